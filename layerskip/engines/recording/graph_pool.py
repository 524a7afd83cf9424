"""GraphPool: recorded pieces of device work, kept by key under a bound on their number and bytes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MAX_GRAPHS = 64
MAX_BYTES = 1 << 30


class Replay(Protocol):
    """One recorded piece of work."""

    num_bytes: int
    """Device memory that keeping it takes."""

    def __call__(self) -> None:
        """Run it again, on the same buffers. Launches only: no wait for the device, no allocation."""
        ...

    def release(self) -> None:
        """Free it. Not to be called while others may still be running on the device: the recorder waits for it."""
        ...


class Recorder(Protocol):
    """Turns a function into something that can be replayed."""

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        """Warm `work` up and record it; afterwards the tensors in `preserve` hold what they held before.

        `work` takes nothing, returns nothing, and reads and writes tensors that live at least as long as the replay:
        what is recorded is their addresses. Numbers it computes in Python are frozen.
        """
        ...


class RerunRecorder:
    """Replays by running the function again. For devices without graphs, and to test everything but the capture."""

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        warm_up(work, preserve)
        return _Rerun(work)


class _Rerun:
    num_bytes = 0

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def __call__(self) -> None:
        if self._work is None:
            raise RuntimeError("replayed after its release")
        self._work()

    def release(self) -> None:
        self._work = None


def warm_up(work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> None:
    """One run whose changes to `preserve` are undone."""
    before = [tensor.clone() for tensor in preserve]
    try:
        work()
    finally:
        for tensor, value in zip(preserve, before, strict=True):
            tensor.copy_(value)


@dataclass
class PoolStats:
    """What a pool has done so far."""

    num_captures: int = 0
    num_evictions: int = 0
    """Dropped to stay within the bound."""
    capture_s: float = 0.0
    """Seconds spent warming up and recording."""


class GraphPool:
    """Replays by key, least recently used dropped first.

    At most `max_graphs` of them and `max_bytes` of device memory, but always room for the one in use and for all that
    were prepared and not yet let go: what a text needs is never dropped for the bounds, only for another text's sake.
    All of them work on their owner's buffers: whoever replaces a buffer calls `invalidate` first.
    """

    def __init__(self, recorder: Recorder, *, max_graphs: int = MAX_GRAPHS, max_bytes: int = MAX_BYTES) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs: must be at least 1, got {max_graphs}")
        if max_bytes < 0:
            raise ValueError(f"max_bytes: must be at least 0, got {max_bytes}")
        self._recorder = recorder
        self._max_graphs = max_graphs
        self._max_bytes = max_bytes
        self._replays: OrderedDict[Hashable, Replay] = OrderedDict()
        self._prepared: set[Hashable] = set()
        self.stats = PoolStats()

    def __len__(self) -> int:
        return len(self._replays)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    @property
    def num_bytes(self) -> int:
        """Device memory of all that is kept."""
        return sum(replay.num_bytes for replay in self._replays.values())

    def play(self, key: Hashable, work: Callable[[], None], preserve: Sequence[torch.Tensor] = ()) -> None:
        """Run `work`, recording it first where the pool does not have `key`. No device sync but for a recording.

        preserve: what `work` changes and must find unchanged at its real run.
        """
        self._get(key, work, preserve)()

    def prepare(self, key: Hashable, work: Callable[[], None], preserve: Sequence[torch.Tensor] = ()) -> None:
        """Record `work` where the pool does not have `key`, without running it; it stays until `let_go`."""
        self._get(key, work, preserve)
        self._prepared.add(key)

    def let_go(self) -> None:
        """What was prepared may be dropped again, as anything else."""
        self._prepared.clear()

    def invalidate(self) -> None:
        """Drop all: the buffers they were recorded on are about to go."""
        for key in list(self._replays):
            self._drop(key)
        self.let_go()

    def _get(self, key: Hashable, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        if key in self._replays:
            self._replays.move_to_end(key)
        else:
            self._record(key, work, preserve)
        return self._replays[key]

    def _record(self, key: Hashable, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> None:
        self._evict(lambda: len(self._replays) >= self._max_graphs)
        start = time.perf_counter()
        replay = self._recorder.record(work, preserve)
        self.stats.capture_s += time.perf_counter() - start
        self._evict(lambda: self.num_bytes + replay.num_bytes > self._max_bytes)
        self._replays[key] = replay
        self.stats.num_captures += 1

    def _evict(self, too_many: Callable[[], bool]) -> None:
        """Drop the oldest of those that may go, one by one, while there are too many."""
        for key in [one for one in self._replays if one not in self._prepared]:
            if not too_many():
                return
            self._drop(key)
            self.stats.num_evictions += 1

    def _drop(self, key: Hashable) -> None:
        self._replays.pop(key).release()
