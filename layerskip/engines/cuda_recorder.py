"""CudaRecorder: records device work as CUDA graphs that share one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from layerskip.engines.graph_pool import Replay, warm_up


class CudaRecorder:
    """See `Recorder`. Captures on one stream into one memory pool; replays run on the caller's current stream.

    Sharing the pool means that one graph's intermediates lie where another's do. That is safe for graphs that never run
    at the same time and leave nothing behind but in their owner's buffers, which are allocated outside the pool.

    Not `torch.cuda.graph`: it empties the allocator's cache before every capture, which costs more than the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Two streams, always the same ones. The allocator reuses the pool's memory only on the stream it was made for.
        # And cuBLAS keeps a workspace per stream whose address graphs remember: since torch 2.12 the reset of one graph
        # frees the workspace of its capture stream under all other graphs captured there (pytorch issue 193402). First
        # used inside a capture, and only there, that workspace lies in the graphs' own pool, where a later graph may
        # use its memory as it may any other graph's intermediates; so warming up must not touch the capture stream.
        self._warm_up_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = _Pool()

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._warm_up_stream.wait_stream(current)
            with torch.cuda.stream(self._warm_up_stream):
                warm_up(work, preserve)
            current.wait_stream(self._warm_up_stream)
            torch.cuda.synchronize()
            if self._pool.num_graphs == 0:
                self._pool = _Pool()
            free_before = torch.cuda.mem_get_info()[0]
            try:
                graph = self._capture(work)
            except BaseException:
                self._pool = _Pool()  # what a failed capture leaves in the allocator is its own affair
                raise
            torch.cuda.synchronize()
            num_bytes = max(0, free_before - torch.cuda.mem_get_info()[0])
        return _CudaReplay(graph, num_bytes, self._pool)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream):
            # thread_local: other threads (a progress bar, a dashboard) may go on using the device.
            graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


class _Pool:
    """A memory pool of graphs. It dies with its last graph, and its handle must not be used again."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.num_graphs = 0


class _CudaReplay:
    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int, pool: _Pool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        pool.num_graphs += 1
        self.num_bytes = num_bytes

    def __call__(self) -> None:
        if self._graph is None:
            raise RuntimeError("replayed after its release")
        self._graph.replay()

    def release(self) -> None:
        if self._graph is None:
            return
        torch.cuda.synchronize()  # it may still be running
        self._graph.reset()
        self._graph = None
        self._pool.num_graphs -= 1
