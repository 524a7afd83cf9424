"""Two devices on a machine that has one: every tensor is on one of them, and operations across them fail as on GPUs.

Tensors stay where they are; which device each is said to be on is kept beside them. What Python asks of torch's devices
(`tensor.device`, `tensor.to`, `device=`) is answered from that, so that the accelerate library's real hooks move them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

KIND = "privateuseone"
FIRST, SECOND = torch.device(KIND, 0), torch.device(KIND, 1)
_HOST = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class TwoDevices:
    """Inside this context, tensors are on `FIRST` or `SECOND` or, made without a word of it, on the host."""

    def __init__(self) -> None:
        self.places: Any = WeakIdKeyDictionary()
        self._modes = (_Words(self), _Operations(self))

    def __enter__(self) -> TwoDevices:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)

    def place_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor is."""
        place: torch.device = self.places.get(tensor, torch.device("cpu"))
        return place

    def put(self, value: Any, place: torch.device) -> Any:
        """The tensors in `value`, said to be at `place` from now on."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                if place.type == KIND:
                    self.places[tensor] = place
                else:
                    self.places.pop(tensor, None)
        return value


class _Words(TorchFunctionMode):
    """Calls from Python: where tensors are, are made, and are moved to."""

    def __init__(self, devices: TwoDevices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self._devices.place_of(args[0])
        if name in _HOST:
            return func(*args, **kwargs)
        if name == "to" and (place := _asked(args[1:], kwargs)) is not None:
            rest = [one for one in args[1:] if _device(one) is None]
            kwargs.pop("device", None)
            return self._devices.put(func(args[0].clone(), *rest, **kwargs), place)
        if (place := _device(kwargs.get("device"))) is not None:
            return self._devices.put(func(*args, **{**kwargs, "device": "cpu"}), place)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is computed: only on tensors of one place, and so is the result. Numbers may come from the host."""

    def __init__(self, devices: TwoDevices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Indices may be the host's.
        operands = args[:1] if func.overloadpacket.__name__ == "index" else (args, kwargs)
        tensors = [one for one in tree_leaves(operands) if isinstance(one, torch.Tensor)]
        places = {
            self._devices.place_of(one) for one in tensors if one.ndim or self._devices.place_of(one).type == KIND
        }
        if len(places) > 1:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, got {sorted(map(str, places))}")
        return self._devices.put(func(*args, **kwargs), places.pop() if places else torch.device("cpu"))


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    return torch.device(value) if isinstance(value, str) and value.split(":")[0] in (KIND, "cpu") else None


def _asked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    return next((place for one in (*args, kwargs.get("device")) if (place := _device(one)) is not None), None)


class _Aligning(AlignDevicesHook):  # type: ignore[misc]
    """The library's own, for weights that are where they belong already."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module


def dispatch(model: nn.Module, devices: TwoDevices, of_module: Callable[[str], torch.device]) -> None:
    """What `accelerate.dispatch_model` does: weights on their devices, and hooks that move inputs to them.

    `of_module`: the place of each decoder layer and of each other module with weights, by their names.
    """
    from tests.layerskip.zoo import stack_of

    stack = stack_of(model)
    path = next(name for name, module in model.named_modules() if module is stack)
    skip_keys = getattr(model, "_skip_keys_device_placement", None)
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        index = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else None
        place = of_module(name if index is None else f"{path}.{index}")
        devices.put(tensors, place)
        if tensors or name == f"{path}.{index}":
            add_hook_to_module(module, _Aligning(execution_device=place, skip_keys=skip_keys))
    add_hook_to_module(model, _Aligning(execution_device=FIRST, io_same_device=True, skip_keys=skip_keys))
