"""The recorder of CUDA graphs on a GPU: what a failed capture leaves behind, and replays on several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip.engines.recording.recorder import CudaRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none"),
]


def product(size: int = 256) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(work, its input, its output): a product by cuBLAS, which has a workspace of its own for every stream."""
    matrix, source = torch.randn(size, size, device="cuda"), torch.randn(4, size, device="cuda")
    out = torch.zeros(4, size, device="cuda")

    def work() -> None:
        out.copy_(source @ matrix @ matrix)

    return work, source, out


def replayed_rightly(replay: Any, work: Any, source: torch.Tensor, out: torch.Tensor) -> bool:
    source.normal_()
    replay()
    got = out.clone()
    out.zero_()
    work()
    return torch.equal(got, out)


def test_after_a_failed_capture_the_error_is_its_own_and_all_goes_on() -> None:
    """Graphs recorded before it, after it, allocations, and draws of the default generator."""
    recorder, device = CudaRecorder(torch.device("cuda")), torch.device("cuda", torch.cuda.current_device())
    before = product()
    early = recorder.record(before[0], ())
    number = torch.ones(1, device=device)

    def waits() -> None:
        number.add_(1)
        number.item()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="captur") as caught:
            recorder.record(waits, ())
        assert caught.traceback[-1].name == "waits"
        torch.rand(3, device=device).sum().item()
        torch.randn(1 << 20, device=device).sum().item()
    after = product()
    late = CudaRecorder(device).record(after[0], ())
    assert replayed_rightly(early, *before)
    assert replayed_rightly(late, *after)
    early.release()
    torch.cuda.empty_cache()
    assert replayed_rightly(late, *after)
    late.release()


def test_graphs_of_several_recorders_replay_on_any_stream() -> None:
    """They share one pool of memory, so replays on different streams must not overlap."""
    works = [product(1024) for _ in range(3)]
    replays = [CudaRecorder(torch.device("cuda")).record(work, ()) for work, _, _ in works]
    streams = [torch.cuda.Stream() for _ in works]
    expected = []
    for work, _, out in works:
        work()
        expected.append(out.clone())
        out.zero_()
    torch.cuda.synchronize()
    for _ in range(50):
        for replay, stream in zip(replays, streams, strict=True):
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, one) for (_, _, out), one in zip(works, expected, strict=True))
    for replay in replays:
        replay.release()
