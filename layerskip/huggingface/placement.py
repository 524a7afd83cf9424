"""Placement: where a model's weights are and where its modules compute; models in pieces are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerskip.huggingface.device_map import check_device_map, describe_device_map


class UnsupportedModelError(ValueError):
    """The model cannot be decoded under a mask; the message says which part and why."""


@dataclass(frozen=True)
class Placement:
    """Of one model. Hooks of the accelerate library move hidden states from device to device, and load weights that are
    kept elsewhere for the time of one module's forward."""

    entrance: torch.device
    """Where token ids go in."""
    devices: tuple[torch.device, ...]
    """All that compute, the entrance first."""
    is_offloaded: bool
    """Whether some weights are kept in main memory or on disk, and copied for every forward."""
    device_map: dict[str, int | str] | None
    """What each module's weights are on, where that is known; None for a model that is whole on one device."""

    @classmethod
    def of(cls, model: nn.Module) -> Placement:
        """Looks at every parameter and hook; computes nothing.

        Raises: UnsupportedModelError for tensor parallel models, and for weights that nothing brings together.
        """
        _refuse_pieces(model)
        homes = {parameter.device for parameter in model.parameters()}
        is_offloaded = torch.device("meta") in homes
        hooks = [hook for module in model.modules() for hook in _hooks(module)]
        if is_offloaded and not any(getattr(hook, "offload", False) for hook in hooks):
            raise UnsupportedModelError("model: has weights on the meta device, and nothing that loads them")
        loaded = {torch.device(hook.execution_device) for hook in hooks if getattr(hook, "offload", False)}
        entrance = _entrance(model)
        computing = {entrance, *loaded, *(homes - {torch.device("meta")})}
        devices = (entrance, *sorted(computing - {entrance}, key=str))
        if len(devices) > 1 and not hooks:
            names = ", ".join(map(str, devices))
            raise UnsupportedModelError(
                f"model: its weights lie on {names}, and nothing moves hidden states between them; load it with a "
                "device_map"
            )
        is_whole = len(devices) == 1 and not is_offloaded
        return cls(entrance, devices, is_offloaded, None if is_whole else _device_map(model))

    @property
    def is_whole(self) -> bool:
        """Whether all weights are on the one device that computes."""
        return len(self.devices) == 1 and not self.is_offloaded

    def __str__(self) -> str:
        names = ", ".join(map(str, self.devices))
        return f"{names} (weights partly kept elsewhere and loaded for each forward)" if self.is_offloaded else names

    def describe(self) -> str | None:
        """The map in one line; None for a model that is whole on one device."""
        if self.is_whole:
            return None
        return str(self) if self.device_map is None else describe_device_map(self.device_map)

    def check_whole(self, engine: str) -> None:
        """Raises: UnsupportedModelError, for an engine that reads the weights past the model's own modules."""
        if not self.is_whole:
            raise UnsupportedModelError(
                f"engine {engine}: needs a model that is whole on one device, this one is on {self} (engine eager "
                "serves it)"
            )


def stored_weight(model: nn.Module, name: str) -> torch.Tensor:
    """The values of a parameter that is offloaded. Cost: where they are on disk, reading them.

    Raises: UnsupportedModelError if no hook knows them.
    """
    path, _, rest = name.rpartition(".")
    while True:
        for hook in _hooks(model.get_submodule(path)):
            weights = getattr(hook, "weights_map", None)
            if weights is not None:
                try:
                    values: torch.Tensor = weights[rest]
                except KeyError:
                    continue
                return values
        if not path:
            raise UnsupportedModelError(f"model: {name} is on the meta device, and nothing loads it")
        path, _, last = path.rpartition(".")
        rest = f"{last}.{rest}"


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Of the accelerate library, those inside a chain of them one by one."""
    pending = [getattr(module, "_hf_hook", None)]
    while pending:
        hook = pending.pop()
        if hook is not None:
            pending += getattr(hook, "hooks", ())
            yield hook


def _entrance(model: Any) -> torch.device:
    """The embedding's device; of one whose weights are kept elsewhere the device that they are loaded to."""
    embedding = model.get_input_embeddings()
    weight: torch.Tensor = embedding.weight
    if weight.device.type != "meta":
        return weight.device
    for module in (embedding, model):
        for hook in _hooks(module):
            if getattr(hook, "execution_device", None) is not None:
                return torch.device(hook.execution_device)
    raise UnsupportedModelError("model: its embedding is on the meta device, and nothing loads it")


def _device_map(model: Any) -> dict[str, int | str] | None:
    given = getattr(model, "hf_device_map", None)
    checked = check_device_map(given) if isinstance(given, dict) and given else None
    return checked if isinstance(checked, dict) else None


def _refuse_pieces(model: Any) -> None:
    """A skipped sublayer of a model in pieces would leave its partners waiting for their share."""
    size = getattr(model, "tp_size", None)
    kind = "tensor parallel" if isinstance(size, int) and size > 1 else None
    # Without that module there are no such tensors, and loading it takes a second.
    if kind is None and (module := sys.modules.get("torch.distributed.tensor")) is not None:
        in_pieces = any(isinstance(one, module.DTensor) for one in model.parameters())
        kind = "distributed (DTensor)" if in_pieces else None
    if kind is not None:
        raise UnsupportedModelError(
            f"model: its weights are {kind}, and such models cannot be decoded under a mask; load it with "
            "device_map='auto', which puts whole layers on several devices"
        )
