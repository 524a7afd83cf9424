"""AttentionChoice: which kernel computes attention in recorded steps, by measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from layerskip.engines.cuda_graph.attention_kernels import Kernel, attend, by_backend, split_keys
from layerskip.engines.cuda_graph.static_step import MIN_VISIBLE, additive_mask
from layerskip.engines.recording.stopwatch import SecondsOf, Stopwatch
from layerskip.huggingface.growing_keys import TORCHS_CHOICE

_FEW_TOKENS = 5
"""Stands for every verification: four drafts and the token before them."""
_MOST_VISIBLE = 8192
"""Longer ones are taken to be like this one: samples of it are some hundred megabytes."""
_NUM_CALLS = 20
"""Of a kernel in one timing; as many layers use it in turn."""
_SOME_ROUNDING = 1e-5


@dataclass(frozen=True)
class AttentionShape:
    """What a model's recorded steps ask of attention, but for the numbers of tokens and of visible positions."""

    num_queries: int
    """Heads."""
    num_keys: int
    head_dim: int
    windows: frozenset[int | None]
    dtype: torch.dtype
    device: torch.device


class AttentionChoice:
    """Kernels for recorded steps: for every number of visible positions the fastest of those whose numbers are right,
    over one token and several together.

    One kernel for both, because in most a row then comes out the same whether it is alone or among others; two would
    add to what rounds differently between a plain step and a verification.

    A kernel is left out if it refuses, or if it is further from attention in float32 than four times torch's own `math`
    in the same dtype: cuDNN's has been seen to misread masks, and rows whose first keys are all hidden, as a sliding
    window makes them, are little tested in any.

    Cost: nothing where there is one kernel only, as on a CPU. On a GPU some tens of milliseconds for each number of
    visible positions, when `measure` is first told of it.
    """

    def __init__(self, kernels: Mapping[str, Kernel], seconds_of: SecondsOf) -> None:
        if not kernels:
            raise ValueError("kernels: must hold at least one, got none")
        self._kernels = dict(kernels)
        self._seconds_of = seconds_of
        self._chosen: dict[int, str] = {}
        self.times: dict[tuple[str, int, int], float] = {}
        """Seconds of a call by (kernel, tokens, visible positions); absent where it was left out."""

    @classmethod
    def on(cls, device: torch.device) -> AttentionChoice:
        """All that may be tried on this device."""
        if device.type != "cuda":
            return cls({TORCHS_CHOICE: attend}, Stopwatch(device))
        kernels = {
            "efficient": by_backend(SDPBackend.EFFICIENT_ATTENTION),
            "cudnn": by_backend(SDPBackend.CUDNN_ATTENTION),
            "math": by_backend(SDPBackend.MATH),
            "split keys": split_keys,
        }
        return cls(kernels, Stopwatch(device))

    @property
    def description(self) -> str:
        """The kernel; where several are in use, which from how many visible positions on."""
        if not self._chosen:
            return " or ".join(self._kernels)
        found: list[str] = []
        last = None
        for num_visible, name in sorted(self._chosen.items()):
            if name != last:
                found.append(f"{name} from {num_visible} positions" if found else name)
            last = name
        return ", ".join(found)

    def kernel(self, num_visible: int) -> Kernel:
        """For steps that see this many positions; where that was not measured, as for the next larger number."""
        if len(self._kernels) == 1:
            return next(iter(self._kernels.values()))
        if not self._chosen:
            raise RuntimeError("attention: measure before the first step")
        sizes = sorted(self._chosen)
        return self._kernels[self._chosen[next((n for n in sizes if n >= num_visible), sizes[-1])]]

    def measure(self, shape: AttentionShape, num_positions: int) -> None:
        """Time all kernels at the numbers of visible positions that buffers of this many make, if not done yet."""
        if len(self._kernels) == 1:
            return
        for num_visible in _visible_sizes(min(num_positions, _MOST_VISIBLE)):
            if num_visible not in self._chosen:
                self._choose([_Samples(shape, num_tokens, num_visible) for num_tokens in (1, _FEW_TOKENS)])

    def _choose(self, samples: list[_Samples]) -> None:
        num_visible, totals = samples[0].num_visible, {}
        limits = [max(_SOME_ROUNDING, 4 * one.error_of(by_backend(SDPBackend.MATH))) for one in samples]
        for name, kernel in self._kernels.items():
            try:
                if not all(one.error_of(kernel) <= limit for one, limit in zip(samples, limits, strict=True)):
                    continue
                seconds = [self._seconds_of([one.work(kernel)])[0] / _NUM_CALLS for one in samples]
            except (RuntimeError, ValueError):
                continue  # it does not serve these sizes
            for one, each in zip(samples, seconds, strict=True):
                self.times[name, one.num_tokens, num_visible] = each
            totals[name] = sum(seconds)
        if not totals:
            raise RuntimeError(f"attention: no kernel serves steps over {num_visible} positions")
        self._chosen[num_visible] = min(totals, key=lambda name: totals[name])


def _visible_sizes(num_positions: int) -> list[int]:
    """Those that recorded steps use; see `num_visible_for`."""
    sizes = [min(MIN_VISIBLE, num_positions)]
    while sizes[-1] < num_positions:
        sizes.append(min(2 * sizes[-1], num_positions))
    return sizes


class _Samples:
    """Random queries, keys and values laid out as in a step that has reached its last visible position."""

    def __init__(self, shape: AttentionShape, num_tokens: int, num_visible: int) -> None:
        self.num_tokens, self.num_visible = num_tokens, num_visible
        group = shape.num_queries // shape.num_keys
        generator = torch.Generator(shape.device).manual_seed(0)

        def numbers(length: int) -> torch.Tensor:
            size = (1, shape.num_keys, length, shape.head_dim)
            return torch.randn(size, generator=generator, dtype=shape.dtype, device=shape.device)

        self._queries = numbers(group * num_tokens)
        # The beginnings of longer buffers, as in a step, so that a head's keys do not follow on the last one's.
        self._keys, self._values = (numbers(num_visible + MIN_VISIBLE)[:, :, :num_visible] for _ in range(2))
        positions = torch.arange(num_visible - num_tokens, num_visible, device=shape.device)
        self._masks = [
            additive_mask(positions, num_visible, window, shape.dtype, repeats=group) for window in shape.windows
        ]
        self._scale = shape.head_dim**-0.5

    def error_of(self, kernel: Kernel) -> float:
        """Largest relative error in norm, over the masks of all windows."""
        return float(torch.tensor([self._error(kernel, mask) for mask in self._masks]).max())

    def _error(self, kernel: Kernel, mask: torch.Tensor) -> float:
        got = kernel(self._queries, self._keys, self._values, mask, self._scale).float()
        queries, keys, values, look = (one.float() for one in (self._queries, self._keys, self._values, mask))
        exact = (queries @ keys.transpose(-1, -2) * self._scale + look).softmax(dim=-1) @ values
        return float((got - exact).norm() / exact.norm())

    def work(self, kernel: Kernel) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(_NUM_CALLS):
                kernel(self._queries, self._keys, self._values, self._masks[0], self._scale)

        return calls
