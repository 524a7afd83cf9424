"""What a worker computes on: who disturbs whom on one host, and a study as a worker on an unlike device sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import optuna

from layerskip.machine.host import own_cores
from layerskip.machine.nvidia import nvidia_smi, unit_name
from search.study.attributes import FINGERPRINT, PER_DEVICE, SHARED
from search.study.fingerprint import DEVICE_FIELDS, Fingerprint
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


class StudyOnDevice(optuna.Study):
    """The same study; what was measured on the device before the trials is kept under names of that device."""

    def __init__(self, study: optuna.Study, device: str) -> None:
        self.__dict__ = study.__dict__  # one study: the sampler set on either is both's
        self._own_names = {name: f"{name}@{device}" for name in PER_DEVICE}

    @property
    def user_attrs(self) -> dict[str, Any]:
        """The shared ones and this device's own."""
        attrs = super().user_attrs
        own = {name: attrs[key] for name, key in self._own_names.items() if key in attrs}
        return {name: value for name, value in attrs.items() if name not in self._own_names} | own

    def set_user_attr(self, key: str, value: Any) -> None:
        """Under this device's name where that is due. Raises: ValueError for a name that is not registered."""
        if key not in PER_DEVICE | SHARED:
            raise ValueError(f"attribute: must be one of search.study.attributes, got {key!r}")
        super().set_user_attr(self._own_names.get(key, key), value)


def as_seen_on(study: optuna.Study, fingerprint: Fingerprint) -> optuna.Study:
    """The study itself on the device that it began on, else the view of this device."""
    stored, now = study.user_attrs[FINGERPRINT], asdict(fingerprint)
    if all(stored.get(name) == now[name] for name in DEVICE_FIELDS):
        return study
    return StudyOnDevice(study, ", ".join(str(now[name]) for name in DEVICE_FIELDS))
