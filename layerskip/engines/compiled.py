"""CompiledFunctions: functions compiled by torch.compile once for each set of sizes, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any

import torch


class CompiledFunctions:
    """Every function compiled apart for every set of sizes, so that one compilation serves one shape.

    torch.compile keeps what it compiled with a function's code, up to a limit (8), beyond which a function runs as it
    is and says so in a log only. Here each set of sizes has a copy of the code, and with it a limit of its own; and
    with `fullgraph` going past the limit is an error (FailOnRecompileLimitHit), never a silent fallback. What else
    makes torch compile anew (a global setting of torch that has changed) is counted like the rest.

    Cost: seconds for each (function, sizes) at its first call, so call all that will be needed before the clock runs.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._variants: dict[Hashable, Callable[..., Any]] = {}
        self.seconds: list[float] = []
        """Of each compilation so far."""

    @property
    def num_compilations(self) -> int:
        return len(self.seconds)

    def variant(self, function: Callable[..., Any], *sizes: int) -> Callable[..., Any]:
        """`function`, which must be a plain one without a closure, for calls of these sizes."""
        key = (function, sizes)
        if key not in self._variants:
            own = _with_code_of_its_own(function, "_".join(map(str, sizes)))
            self._variants[key] = torch.compile(own, fullgraph=True, dynamic=False, backend=self._compile)
        return self._variants[key]

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        start = time.perf_counter()
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(self._backend)(graph, list(inputs))
        self.seconds.append(time.perf_counter() - start)
        return compiled


def _with_code_of_its_own(function: Callable[..., Any], suffix: str) -> Callable[..., Any]:
    # `isolate_recompiles` would do this from torch 2.13 on.
    code = function.__code__
    return FunctionType(code.replace(co_name=f"{code.co_name}_{suffix}"), function.__globals__)
