"""The pool of recordings: one per key, bounded, dropped when their buffers go; and what counts as waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layerskip.engines.recording import sync_watch
from layerskip.engines.recording.graph_pool import GraphPool, Recorder, Replay, RerunRecorder
from layerskip.engines.recording.sync_watch import SyncError, SyncWatch
from layerskip.huggingface.kv_cache import DeviceNumber
from tests.layerskip.tape import TapeRecorder

RECORDERS: list[Callable[[], Recorder]] = [RerunRecorder, TapeRecorder]


def adder(total: torch.Tensor, amount: int) -> Callable[[], None]:
    def work() -> None:
        total.add_(amount)

    return work


@pytest.mark.parametrize("recorder", RECORDERS)
def test_work_is_recorded_once_and_every_play_runs_it_once(recorder: Callable[[], Recorder]) -> None:
    pool, total = GraphPool(recorder()), torch.zeros(1)
    for _ in range(3):
        pool.play("one", adder(total, 1), (total,))
    pool.play("ten", adder(total, 10), (total,))
    assert total.item() == 13  # neither warming up nor recording counts
    assert (pool.stats.num_captures, len(pool)) == (2, 2)
    assert pool.stats.capture_s > 0


def test_a_recording_is_frozen_on_its_buffers_and_numbers() -> None:
    """What the tape stands in for: the Python around the tensors does not run again."""
    pool, source, out, factor = GraphPool(TapeRecorder()), torch.ones(2), torch.zeros(2), 2

    def work() -> None:
        out.copy_(source * factor)

    pool.play("k", work)
    factor = 5
    source.fill_(3)
    pool.play("k", work)
    assert out.tolist() == [6, 6]
    source = torch.full((2,), 100.0)  # another buffer under the same name is not seen
    pool.play("k", work)
    assert out.tolist() == [6, 6]


def test_the_least_recently_played_goes_first() -> None:
    recorder, total = TapeRecorder(), torch.zeros(1)
    pool = GraphPool(recorder, max_graphs=2)
    for key in ("a", "b", "a", "c"):
        pool.play(key, adder(total, 1), (total,))
    assert ("a" in pool, "b" in pool, "c" in pool) == (True, False, True)
    assert (recorder.alive, pool.stats.num_evictions) == (2, 1)
    pool.play("b", adder(total, 1), (total,))
    assert (pool.stats.num_captures, total.item()) == (4, 5)


def test_bytes_are_bounded_but_the_one_in_use_stays() -> None:
    sizes = [40, 50, 30, 500, 10]
    recorder, total = TapeRecorder(lambda i: sizes[i]), torch.zeros(1)
    pool = GraphPool(recorder, max_bytes=100)
    kept = []
    for key in range(len(sizes)):
        pool.play(key, adder(total, 1), (total,))
        kept.append([one for one in range(len(sizes)) if one in pool])
    assert kept == [[0], [0, 1], [1, 2], [3], [4]]
    assert pool.num_bytes == 10
    assert recorder.alive == 1


def test_invalidation_drops_all() -> None:
    recorder, total = TapeRecorder(), torch.zeros(1)
    pool = GraphPool(recorder)
    for key in range(3):
        pool.play(key, adder(total, 1), (total,))
    pool.invalidate()
    assert (len(pool), recorder.alive, pool.stats.num_evictions) == (0, 0, 0)
    pool.play(0, adder(total, 1), (total,))
    assert pool.stats.num_captures == 4


def test_a_released_replay_refuses() -> None:
    replay = RerunRecorder().record(lambda: None, ())
    replay.release()
    with pytest.raises(RuntimeError, match="replayed after its release"):
        replay()


class FailingRecorder(TapeRecorder):
    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        super().record(work, preserve).release()
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("recorder", [*RECORDERS, FailingRecorder])
def test_work_that_fails_leaves_pool_and_state_as_they_were(recorder: Callable[[], Recorder]) -> None:
    pool, total = GraphPool(recorder()), torch.zeros(1)

    def fails() -> None:
        total.add_(5)
        if recorder is not FailingRecorder:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"out of memory|not permitted"):
        pool.play("k", fails, (total,))
    assert (total.item(), len(pool), pool.stats.num_captures) == (0, 0, 0)


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="max_graphs: must be at least 1, got 0"):
        GraphPool(RerunRecorder(), max_graphs=0)
    with pytest.raises(ValueError, match="max_bytes: must be at least 0, got -1"):
        GraphPool(RerunRecorder(), max_bytes=-1)


def test_a_device_number_is_written_only_where_it_is_not_known() -> None:
    number = DeviceNumber(torch.device("cpu"))
    address = number.tensor.data_ptr()
    assert number.set(4).tolist() == [4]
    number.tensor.fill_(9)  # behind its back: `set` must not look
    assert number.set(4).tolist() == [9]
    number.known(9)
    assert number.set(4).tolist() == [4]
    number.distrust()
    number.tensor.fill_(1)
    assert number.set(4).tolist() == [4]
    assert number.tensor.data_ptr() == address


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t[0] > 0),
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t[0]),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0.5),
    "boolean mask": lambda t: t[t > 0.5],
    "assignment under a mask": lambda t: t.__setitem__(t > 0.5, 0.0),
    "masked_select": lambda t: t.masked_select(t > 0.5),
    "equal": lambda t: torch.equal(t, t),
    "unique": lambda t: t.unique(),
    "multinomial": lambda t: torch.multinomial(t, 1),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, torch.ones(4, dtype=torch.long)),
}
DOES_NOT_WAIT: dict[str, Callable[[torch.Tensor], object]] = {
    "masked_fill": lambda t: t.masked_fill(t > 0.5, 0.0),
    "indices": lambda t: t[torch.tensor([1, 2])],
    "repeat_interleave": lambda t: torch.repeat_interleave(t, 2),
    "gather": lambda t: t.gather(0, t.argmax(0, keepdim=True)),
    "topk": lambda t: t.topk(2),
}


@pytest.mark.parametrize("inference", [True, False])
def test_waiting_is_seen_and_nothing_else(inference: bool) -> None:
    with torch.inference_mode(inference):
        values = torch.rand(4)
        for name, function in WAITS.items():
            with pytest.raises(SyncError), SyncWatch():
                print(name, function(values))
        for function in DOES_NOT_WAIT.values():
            with SyncWatch():
                function(values)


class SeesSums(TorchDispatchMode):
    """Stands in for torch's own watch, which sees copies within an operator's code."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "cumsum":
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


def test_waiting_that_torch_alone_sees_names_the_operator_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_watch, "_watched_by_torch", SeesSums)
    with pytest.raises(SyncError, match=r"^cumsum waits for the device$"), SyncWatch():
        torch.rand(4).cumsum(0)
    with pytest.raises(SyncError, match="not dispatched"), SyncWatch():
        raise RuntimeError("called a synchronizing CUDA operation")
    with pytest.raises(RuntimeError, match="of another kind"), SyncWatch():
        raise RuntimeError("of another kind")
