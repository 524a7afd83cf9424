"""The recorder of CUDA graphs on a fake of torch.cuda: failed captures, and streams that all recorders share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from layerskip.engines.recording.recorder import CudaRecorder

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """torch.cuda with one device. As there, what was invalidated while it was captured fails once more at the end."""

    def __init__(self) -> None:
        self.current: FakeStream = FakeStream(self)
        self.num_streams = self.num_pools = 0
        self.streams_used: list[tuple[str, FakeStream]] = []
        self.open_pools: list[tuple[int, int]] = []
        """Pools that the allocator still directs a capture's allocations to."""
        self.released_pools: list[tuple[int, int]] = []
        self.generator = FakeGenerator()
        self.freed: list[FakeGraph] = []
        self.waits: list[tuple[FakeStream, FakeStream]] = []

    def new_stream(self, _device: Any = None) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self)

    def new_pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def end_allocation(self, _index: int, pool: tuple[int, int]) -> None:
        if pool not in self.open_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open_pools.remove(pool)


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.waits.append((self, other))


class FakeGenerator:
    """The default one of torch 2.11: it belongs to a capture until that ends well."""

    def __init__(self, *, capturing: bool = False) -> None:
        self.capturing = capturing

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator()

    def graphsafe_set_state(self, state: FakeGenerator) -> None:
        self.capturing = state.capturing


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.num_replays = 0

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.pool = pool
        self._cuda.streams_used.append(("capture", self._cuda.current))
        self._cuda.open_pools.append(pool)
        self._cuda.generator.capturing = True

    def capture_end(self) -> None:
        if INVALIDATED in self._cuda.__dict__:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._cuda.open_pools.remove(self.pool)
        self._cuda.generator.capturing = False

    def replay(self) -> None:
        self.num_replays += 1

    def reset(self) -> None:
        pass

    def __del__(self) -> None:
        self._cuda.freed.append(self)


INVALIDATED = "invalidated"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    replacements = {
        "Stream": fake.new_stream,
        "CUDAGraph": lambda: FakeGraph(fake),
        "stream": fake.stream,
        "device": lambda _device: contextlib.nullcontext(),
        "current_stream": lambda _device=None: fake.current,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "mem_get_info": lambda: (1 << 30, 1 << 30),
        "graph_pool_handle": fake.new_pool,
        "default_generators": (fake.generator,),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocation)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _index, pool: fake.released_pools.append(pool))
    monkeypatch.setattr(CudaRecorder, "_places", {})
    monkeypatch.setattr(CudaRecorder, "_failed", [])
    return fake


def failing_operation(cuda: FakeCuda, *, voids: bool) -> Any:
    """Work that fails while it is captured, and not while it warms up."""

    def work() -> None:
        if cuda.open_pools:
            if voids:
                cuda.__dict__[INVALIDATED] = True
            raise NotImplementedError("aten::grouped_mm copies to the host")

    return work


@pytest.mark.parametrize("voids", [True, False])
def test_the_error_of_a_failed_capture_is_the_operations_own(cuda: FakeCuda, voids: bool) -> None:
    """`capture_end` raises over it where the driver has voided the capture."""
    with pytest.raises(NotImplementedError, match="aten::grouped_mm copies to the host") as caught:
        CudaRecorder(DEVICE).record(failing_operation(cuda, voids=voids), ())
    assert caught.traceback[-1].name == "work"
    assert caught.value.__cause__ is None
    assert not cuda.open_pools
    assert not cuda.generator.capturing
    assert cuda.released_pools == ([(0, 1)] if voids else [])  # else torch releases it with the graph


def test_a_capture_after_a_failed_one_has_its_own_streams_and_pool_and_the_failed_graph_lives(cuda: FakeCuda) -> None:
    recorder, ran = CudaRecorder(DEVICE), []
    with pytest.raises(NotImplementedError):
        recorder.record(failing_operation(cuda, voids=True), ())
    assert not cuda.freed  # torch still has pointers to it
    del cuda.__dict__[INVALIDATED]
    replay: Any = recorder.record(lambda: ran.append(1), ())
    replay()
    assert (len(ran), replay._graph.num_replays) == (2, 1)
    (_, failed_on), (_, then_on) = cuda.streams_used
    assert failed_on is not then_on
    assert replay._graph.pool != (0, 1)


def test_an_end_that_fails_by_itself_is_raised_and_leaves_no_capture_open(cuda: FakeCuda) -> None:
    def work() -> None:
        if cuda.open_pools:
            cuda.__dict__[INVALIDATED] = True  # as an operation that does not raise

    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaRecorder(DEVICE).record(work, ())
    assert not cuda.open_pools


def test_all_recorders_of_a_device_use_one_pair_of_streams_and_one_pool(cuda: FakeCuda) -> None:
    """torch hands out 32 side streams in turn: the seventeenth pair would be the first one again."""
    replays: list[Any] = [CudaRecorder(DEVICE).record(lambda: None, ()) for _ in range(20)]
    assert cuda.num_streams == 2
    assert len({one for _, one in cuda.streams_used}) == 1
    assert len({one._graph.pool for one in replays}) == 1


def test_threads_record_one_after_the_other(cuda: FakeCuda) -> None:
    """A stream that is capturing cannot begin another capture."""
    busy, overlaps = threading.Lock(), []

    def work() -> None:
        overlaps.append(not busy.acquire(blocking=False))
        time.sleep(0.002)
        if not overlaps[-1]:
            busy.release()

    threads = [threading.Thread(target=CudaRecorder(DEVICE).record, args=(work, ())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False] * 8  # warming up and capturing, four times


def test_a_pool_is_not_used_again_after_its_last_graph(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(DEVICE)
    first: Any = recorder.record(lambda: None, ())
    pool = first._graph.pool
    first.release()
    second: Any = recorder.record(lambda: None, ())
    assert second._graph.pool != pool
    with pytest.raises(RuntimeError, match="replayed after its release"):
        first()


def test_a_pool_is_not_used_again_after_its_last_graph_was_dropped_with_its_engine(cuda: FakeCuda) -> None:
    """Nobody released it: the next capture asked for a pool that had gone, which torch refuses."""
    first: Any = CudaRecorder(DEVICE).record(lambda: None, ())
    kept: Any = CudaRecorder(DEVICE).record(lambda: None, ())
    pool = first._graph.pool
    del first
    third: Any = CudaRecorder(DEVICE).record(lambda: None, ())
    assert third._graph.pool == kept._graph.pool == pool
    kept.release()
    del kept, third
    assert CudaRecorder(DEVICE).record(lambda: None, ())._graph.pool != pool  # type: ignore[attr-defined]


def test_replays_on_different_streams_wait_for_each_other(cuda: FakeCuda) -> None:
    """They share the pool's memory, whoever recorded them."""
    one, other = (CudaRecorder(DEVICE).record(lambda: None, ()) for _ in range(2))
    here, elsewhere = cuda.current, FakeStream(cuda)
    cuda.waits.clear()
    one()
    other()
    assert not cuda.waits
    with cuda.stream(elsewhere):
        other()
    assert cuda.waits == [(elsewhere, here)]
