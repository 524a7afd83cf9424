"""Device maps: which part of a model goes where, as asked for, and what is refused instead. Loads no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

DeviceMap = str | dict[str, int | str]
"""One of `PLANS`, or module names and the devices of their weights: a number, `cuda:N`, `cpu` or `disk`."""
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
ABOUT_DEVICE_MAP = (
    "spread a model that is larger than one device: auto, balanced, sequential, or a JSON object of module names and "
    "devices; needs the extra `large`"
)
"""Of the flag, in the help of every command that takes it."""
_MODULE = re.compile(r"[\w.]*")
_WORLD = "WORLD_SIZE"
_TENSOR_PARALLEL = ("tp_plan", "tp_size", "device_mesh", "distributed_config")


def check_device_map(device_map: object, device: str = "auto") -> DeviceMap:
    """The same map with plain names of devices; `device` is what was asked for beside it.

    Raises: ValueError naming field, rule and value.
    """
    if device != "auto":
        raise ValueError(
            f"device: must be 'auto' beside a device_map, which says where everything goes, got {device!r}"
        )
    if isinstance(device_map, str):
        if device_map not in PLANS:
            raise ValueError(
                f"device_map: must be {', '.join(PLANS)}, or module names and their devices (a single device is the "
                f"field `device`), got {device_map[:80]!r}"
            )
        return device_map
    if not isinstance(device_map, Mapping) or not device_map:
        raise ValueError(
            f"device_map: must be {', '.join(PLANS)}, or module names and their devices, got {str(device_map)[:80]!r}"
        )
    return {_module_name(name): _device_name(name, place) for name, place in device_map.items()}


def parse_device_map(text: str | None) -> DeviceMap | None:
    """As it is written on a command line: one of `PLANS`, or a JSON object. Raises: ValueError."""
    if text is None or not text.lstrip().startswith("{"):
        return None if text is None else check_device_map(text)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"device_map: must be a JSON object of module names and devices, got {text[:80]!r}") from None
    return check_device_map(given)


def refuse_torchrun(instead: str) -> None:
    """Raises: ValueError if this is one of several processes that were started to act as one. `instead`: what to do."""
    size = os.environ.get(_WORLD, "").strip()
    if size.isdecimal() and int(size) > 1:
        raise ValueError(f"{_WORLD}: must be 1, this command is no part of a torchrun job, got {size}; {instead}")


def refuse_tensor_parallel(arguments: Mapping[str, Any]) -> None:
    """Raises: ValueError if arguments of `from_pretrained` ask for a model whose layers are cut into pieces."""
    for name in _TENSOR_PARALLEL:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name}: tensor parallel models cannot be decoded under a mask; device_map='auto' puts whole layers "
                f"on several devices, got {str(arguments[name])[:80]!r}"
            )


def describe_device_map(device_map: Mapping[str, int | str]) -> str:
    """In one line, neighbours on one device together: `model.embed_tokens, model.layers.0-3: 0; lm_head: 1`."""
    parts = []
    for place, group in groupby(device_map.items(), key=lambda one: str(one[1])):
        parts.append(f"{', '.join(_ranges([name for name, _ in group]))}: {place}")
    return "; ".join(parts)


def _module_name(name: object) -> str:
    # Hugging Face puts the names together to a regular expression.
    if not isinstance(name, str) or not _MODULE.fullmatch(name):
        raise ValueError(f"device_map: keys must be names of modules such as 'model.layers.0', got {str(name)[:80]!r}")
    return name


def _device_name(module: object, place: object) -> int | str:
    if isinstance(place, int) and not isinstance(place, bool) and place >= 0:
        return place
    text = str(place)
    if isinstance(place, bool | int | float) or place is None or not re.fullmatch(r"[a-z]+(:\d+)?", text):
        raise ValueError(
            f"device_map.{str(module)[:80]}: must be a device's number, 'cuda:N', 'cpu' or 'disk', got {text[:80]!r}"
        )
    return text


def _ranges(names: list[str]) -> list[str]:
    """`layers.0`, `layers.1` as `layers.0-1`."""
    out: list[str] = []
    run: tuple[str, int, int] | None = None
    for name in [*names, ""]:
        stem, _, tail = name.rpartition(".")
        number = int(tail) if tail.isdecimal() else None
        if run is not None and number is not None and (stem, number) == (run[0], run[2] + 1):
            run = (stem, run[1], number)
            continue
        if run is not None:
            out.append(f"{run[0]}.{run[1]}" + (f"-{run[2]}" if run[2] > run[1] else ""))
        run = (stem, number, number) if stem and number is not None else None
        if run is None:
            out.append(name or "all")
    return out[:-1]  # what stands for the empty name at the end
