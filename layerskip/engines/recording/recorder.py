"""CudaRecorder: records device work as CUDA graphs that share one memory pool."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar

import torch

from layerskip.engines.recording.graph_pool import Replay, warm_up


class CudaRecorder:
    """See `Recorder`. Captures on one stream into one memory pool; replays run on the caller's current stream.

    Streams and pool belong to the device and serve all recorders of the process. Sharing the pool means that one
    graph's intermediates lie where another's do. That is safe for graphs that never run at the same time and leave
    nothing behind but in their owner's buffers, which are allocated outside the pool; replays on different streams
    therefore wait for each other.

    A capture that fails raises the error of the operation that failed, and later captures work.

    Not `torch.cuda.graph`: it empties the allocator's cache before every capture, which costs more than the capture.
    """

    _places: ClassVar[dict[int, _CapturePlace]] = {}
    """By device index. Of the process, because torch hands out its side streams in turn from a fixed set of 32: with a
    pair for every recorder, the seventeenth would warm up on the stream that the first one captures on."""
    _failed: ClassVar[list[torch.cuda.CUDAGraph]] = []
    """Graphs whose capture failed: torch keeps pointers to a graph from the beginning of its capture until it ends
    well, so they must not be freed."""
    _one_at_a_time: ClassVar[threading.Lock] = threading.Lock()
    """Two threads must not capture on one stream together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        with self._one_at_a_time, torch.cuda.device(self._device):
            place = self._places.get(self._index) or _CapturePlace(self._device)
            self._places[self._index] = place
            current = torch.cuda.current_stream()
            place.warm_up_stream.wait_stream(current)
            with torch.cuda.stream(place.warm_up_stream):
                warm_up(work, preserve)
            current.wait_stream(place.warm_up_stream)
            torch.cuda.synchronize()
            pool = place.pool()
            free_before = torch.cuda.mem_get_info()[0]
            try:
                graph = self._capture(work, place.capture_stream, pool)
            except BaseException:
                del self._places[self._index]  # the next capture gets streams and a pool that have seen no failure
                raise
            torch.cuda.synchronize()
            num_bytes = max(0, free_before - torch.cuda.mem_get_info()[0])
        return _CudaReplay(graph, num_bytes, place, pool)

    def _capture(self, work: Callable[[], None], stream: torch.cuda.Stream, pool: _Pool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            try:
                # thread_local: other threads (a progress bar, a dashboard) may go on using the device.
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool)
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: _Pool) -> None:
        """End a capture in which something failed, so that the process can go on.

        Each of these calls may fail in its turn, for the driver has voided the capture; none of them may hide the error
        that is about to be raised. Where `capture_end` raises before it has told the allocator, that goes on looking
        for allocations of this capture, and up to torch 2.12 the default generator refuses to draw.
        """
        self._failed.append(graph)
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index, pool.handle)  # raises where `capture_end` has done it
            torch._C._cuda_releasePool(self._index, pool.handle)
        with suppress(RuntimeError):
            generator = torch.cuda.default_generators[self._index]
            generator.graphsafe_set_state(generator.clone_state())  # the clone knows of no capture


class _CapturePlace:
    """Where one device's graphs are recorded: two streams, always the same ones, and a memory pool.

    The allocator reuses the pool's memory only on the stream it was made for. And cuBLAS keeps a workspace per stream
    whose address graphs remember: since torch 2.12 the reset of one graph frees the workspace of its capture stream
    under all other graphs captured there (pytorch issue 193402). First used inside a capture, and only there, that
    workspace lies in the graphs' own pool, where a later graph may use its memory as it may any other graph's
    intermediates; so warming up must not touch the capture stream, and one stream must not serve two pools at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.warm_up_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: _Pool | None = None
        self._device = device
        self._replayed_on: torch.cuda.Stream | None = None
        self._lock = threading.Lock()

    def pool(self) -> _Pool:
        """To capture into; a new one where the last graph of the present one has gone."""
        if self._pool is None or self._pool.num_graphs == 0:
            self._pool = _Pool()
        return self._pool

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launch on the current stream, after whatever was replayed on another one."""
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            if self._replayed_on is not None and self._replayed_on != stream:
                stream.wait_stream(self._replayed_on)
            self._replayed_on = stream
            graph.replay()


class _Pool:
    """A memory pool of graphs. It dies with its last graph, and its handle must not be used again."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.num_graphs = 0

    def lose_graph(self) -> None:
        self.num_graphs -= 1


class _CudaReplay:
    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int, place: _CapturePlace, pool: _Pool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._place = place
        pool.num_graphs += 1
        self.num_bytes = num_bytes
        # Also where an engine is dropped without having released it: its graph is gone then, and with the last one the
        # pool, and to capture into a pool that is gone fails.
        self._is_lost = weakref.finalize(self, pool.lose_graph)

    def __call__(self) -> None:
        if self._graph is None:
            raise RuntimeError("replayed after its release")
        self._place.replay(self._graph)

    def release(self) -> None:
        if self._graph is None:
            return
        torch.cuda.synchronize()  # it may still be running
        self._graph.reset()
        self._graph = None
        self._is_lost()
