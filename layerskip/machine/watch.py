"""MachineWatch: the state of the machine before and after something was timed, and what preparing for it took."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from layerskip.machine.host import cpu_name
from layerskip.machine.nvidia import gpu_states, unit_name

if TYPE_CHECKING:
    from layerskip.model import LayerSkipModel

_GIB = 2**30


class MachineWatch:
    """Begins when it is made; `record` says how the machine was then, how it is now, and what lay between.

    Peaks of memory are those of the process since its start. What nvidia-smi does not tell is left out. Clocks and
    power are those of a moment before and a moment after, when the device may have come to rest.
    """

    def __init__(self, model: LayerSkipModel) -> None:
        import torch

        self._engine = model.engine
        self._devices = [device for device in model.placement.devices if device.type == "cuda"]
        self._units = [unit_name(str(torch.cuda.get_device_properties(one).uuid)) for one in self._devices]
        self._num_prepared, self._prepared_s = self._engine.num_preparations, self._engine.preparation_s
        self._before = self._moment()

    def record(self) -> dict[str, Any]:
        """Plain values; `describe_machine` has them in words. Cost: a call of nvidia-smi where there is a GPU."""
        import torch

        record = {
            "cpu": cpu_name(),
            "num_threads": torch.get_num_threads(),
            "attention_backend": self._engine.attention_backend,
            "num_preparations": self._engine.num_preparations - self._num_prepared,
            "preparation_s": self._engine.preparation_s - self._prepared_s,
            "peak_resident_bytes": _peak_resident_bytes(),
            "before": self._before,
            "after": self._moment(),
        }
        if self._devices:
            record["peak_allocated_bytes"] = sum(map(torch.cuda.max_memory_allocated, self._devices))
            record["peak_reserved_bytes"] = sum(map(torch.cuda.max_memory_reserved, self._devices))
        return record

    def _moment(self) -> dict[str, Any]:
        load = None
        with suppress(OSError, AttributeError):  # not every system tells
            load = os.getloadavg()[0]
        return {"load": load, "gpus": gpu_states(self._units)}


def describe_machine(record: Mapping[str, Any]) -> str:
    """The record in one line: clocks, power, driver, attention, preparations, memory, load."""
    before, after = record["before"], record["after"]
    parts = [_describe_gpu(one, other) for one, other in zip(before["gpus"], after["gpus"], strict=False)]
    parts.append(f"attention {record['attention_backend']}")
    if record["num_preparations"]:
        parts.append(f"{record['num_preparations']} recordings and compilations in {record['preparation_s']:.1f} s")
    if "peak_allocated_bytes" in record:
        allocated, reserved = (record[f"peak_{kind}_bytes"] / _GIB for kind in ("allocated", "reserved"))
        parts.append(f"peak GPU memory {allocated:.2f} GiB, {reserved:.2f} reserved")
    if record["peak_resident_bytes"] is not None:
        parts.append(f"peak resident memory {record['peak_resident_bytes'] / _GIB:.2f} GiB")
    if before["load"] is not None and after["load"] is not None:
        parts.append(f"load {_change(before['load'], after['load'], '.1f')}")
    return ", ".join(parts)


def _describe_gpu(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    words = [f"driver {after['driver']}"] if "driver" in after else []
    for name, key, most, unit in (
        ("SM", "sm_clock_mhz", "max_sm_clock_mhz", "MHz"),
        ("memory", "memory_clock_mhz", "max_memory_clock_mhz", "MHz"),
        ("power", "power_w", "power_limit_w", "W"),
    ):
        if key in before and key in after:
            limit = f" of {after[most]:.0f}" if most in after else ""
            words.append(f"{name} {_change(before[key], after[key], '.0f')}{limit} {unit}")
    return ", ".join(words) or "a GPU of which the driver tells nothing"


def _change(before: float, after: float, form: str) -> str:
    first, last = format(before, form), format(after, form)
    return first if first == last else f"{first} to {last}"


def _peak_resident_bytes() -> int | None:
    """None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
