"""What a worker computes on, in words that tell whether two workers of one host disturb each other's timings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from layerskip.machine.host import own_cores
from layerskip.machine.nvidia import nvidia_smi, unit_name
from search.workers.process import is_here
from search.workers.roster import Worker

_CORES, _UNIT, _MORE_UNITS = "cores", "unit", "more_units"


def computing_on(device: Any, *more: Any) -> dict[str, Any]:
    """`unit` of an accelerator, or `cores` of a processor; empty where neither can be told.

    device: a torch.device, or None; `more`: those that a model is spread over besides. The unit is the driver's own id
    where there is one: CUDA_VISIBLE_DEVICES gives one GPU several numbers.
    """
    if getattr(device, "type", "cpu") == "cpu":
        cores = own_cores()
        return {_CORES: cores} if cores is not None else {}
    units = [_unit(one) for one in more if getattr(one, "type", "cpu") != "cpu"]
    return {_UNIT: _unit(device)} | ({_MORE_UNITS: units} if units else {})


def _unit(device: Any) -> str:
    unit = str(device)
    if device.type == "cuda":
        import torch

        with suppress(AttributeError, RuntimeError):  # older torch, or a device that is gone
            unit = str(torch.cuda.get_device_properties(device).uuid)
    return unit


def _units(facts: Mapping[str, Any]) -> set[str]:
    return {facts[_UNIT], *facts.get(_MORE_UNITS, ())} if _UNIT in facts else set()


def share_a_device(facts: Mapping[str, Any], other: Worker) -> bool:
    """Whether another worker of this host computes on the same accelerator, or on some of the same cores."""
    if not is_here(other.process):
        return False
    if _UNIT in facts:
        return bool(_units(facts) & _units(other.facts))
    return bool(set(facts.get(_CORES, ())) & set(other.facts.get(_CORES, ())))


def strangers_on(facts: Mapping[str, Any], known_pids: set[int]) -> list[int]:
    """Processes that compute on the same GPU and are no workers of the study; none where the driver does not tell."""
    if _UNIT not in facts:
        return []
    rows = nvidia_smi("compute-apps", ["pid", "gpu_uuid"])
    known = known_pids | {os.getpid()}
    return list(dict.fromkeys(pid for unit in sorted(_units(facts)) for pid in pids_on(unit, rows, known)))


def pids_on(unit: str, rows: Sequence[Sequence[str]], known_pids: set[int]) -> list[int]:
    """Of the driver's rows of pid and GPU, the pids on this GPU that are not known."""
    found = [(pid, unit_name(name)) for pid, name in rows]
    mine = unit_name(unit)
    return [int(pid) for pid, name in found if pid.isdecimal() and name == mine and int(pid) not in known_pids]
