"""SyncWatch: finds operations that would make the host wait for the device, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result, or the shape of it, the host has to know. `multinomial` looks at its input first.
_OPERATIONS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "multinomial",
)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
_HIDDEN = "called a synchronizing CUDA operation"
"""What torch's own watch says."""
_REASONS = {
    "_grouped_mm": ": in any dtype but bfloat16, and before Hopper in that too, torch copies the sizes of a mixture's "
    "experts to the host (load the model in bfloat16)"
}
_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class SyncError(RuntimeError):
    """Work that is to be recorded would wait for the device."""


class SyncWatch:
    """Inside this context such an operation raises SyncError, naming it.

    Works where there is no device to wait for, so that device code is checked on a CPU too; only copies between host
    and device go unseen there. Two layers, because neither sees all: operations as they are dispatched, those within
    other operations included; and calls from Python, for in inference mode some, `item` among them, are not dispatched.
    On a CUDA device torch watches too, in all threads: it alone sees what the code of an operator does in itself.
    """

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(_watched_by_torch())
        self._stack.enter_context(_Calls())
        self._stack.enter_context(_Operations())  # type: ignore[no-untyped-call]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stack.close()
        if isinstance(error, RuntimeError) and str(error) == _HIDDEN:
            raise SyncError("what is not dispatched as an operation waits for the device") from error


@contextmanager
def _watched_by_torch() -> Iterator[None]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS or (name == "where" and len(args) == 1):
            raise SyncError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, overload = func.overloadpacket.__name__, func._overloadname
        # With a number of repeats, all of them the same, nothing needs counting.
        counts_repeats = name == "repeat_interleave" and "Tensor" in overload
        if name in _OPERATIONS or (counts_repeats and (kwargs or {}).get("output_size") is None):
            raise SyncError(f"{name} waits for the device")
        if name in _INDEXING and any(_is_mask(index) for index in args[1]):
            raise SyncError("indexing with a boolean mask waits for the device to count it")
        if name in ("_to_copy", "copy_") and _leaves_the_device(name, args, kwargs or {}):
            raise SyncError("a copy to the host waits for the device")
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _HIDDEN not in str(error):
                raise
            raise SyncError(f"{name} waits for the device{_REASONS.get(name, '')}") from error


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _leaves_the_device(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "copy_":
        return bool(args[0].device.type == "cpu" and args[1].device.type != "cpu")
    to = kwargs.get("device")
    return to is not None and torch.device(to).type == "cpu" != args[0].device.type
