"""Teams of threads: they end with what they computed, and one too many makes all sleep where a core is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from layerskip import LayerSkipModel, openmp
from layerskip.openmp import _Watch, computing, release_team
from tests.layerskip import zoo

pytestmark = pytest.mark.skipif(openmp._library() is None, reason="torch does not compute by GNU's OpenMP here")
CPU = torch.device("cpu")


def compute() -> None:
    torch.ones(1 << 20).add_(1)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def comes_true(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    give_up = time.monotonic() + within_s
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.005)
    return condition()


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    """A team of two others."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    release_team()
    yield
    release_team()
    torch.set_num_threads(before)


def test_a_team_ends_and_comes_again() -> None:
    alone = num_threads()
    for _ in range(2):
        compute()
        assert num_threads() == alone + 2
        release_team()
        assert comes_true(lambda: num_threads() == alone)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_neither_loading_nor_a_run_leaves_a_team(engine: str) -> None:
    with computing(CPU):  # the watching thread stays
        pass
    alone = num_threads()
    model = LayerSkipModel(zoo.build("llama"), engine=engine)
    assert comes_true(lambda: num_threads() == alone)
    stream = model.stream([1, 2, 3], max_new_tokens=4)
    next(stream)
    compute()
    assert num_threads() == alone + 2
    assert len(list(stream)) == 3
    assert comes_true(lambda: num_threads() == alone)


def test_the_last_run_ends_the_team() -> None:
    with computing(CPU):
        alone = num_threads()
        with computing(CPU):
            compute()
        assert num_threads() == alone + 2
    assert comes_true(lambda: num_threads() == alone)


@pytest.mark.parametrize("waited", [0.5, 0.7])
def test_threads_sleep_while_a_core_is_waited_for(monkeypatch: pytest.MonkeyPatch, waited: float) -> None:
    """And spin again as soon as none is."""
    share = waited
    monkeypatch.setattr(openmp, "_LOOK_S", 0.02)
    monkeypatch.setattr(openmp, "_PATIENCE_S", 1e9)
    monkeypatch.setattr(openmp, "_waited_s", lambda: {"1": share * time.perf_counter(), str(time.time()): 1e9})
    watch = _Watch()
    watch.begin()
    alone, library = num_threads(), openmp._library()
    assert library is not None
    size = max(2, library.omp_get_num_procs() - 3 + 2)
    is_long = waited > openmp._MOST_WAITED
    assert comes_true(lambda: num_threads() == alone + size - 1, 10 if is_long else 0.5) == is_long
    share = 0.0
    assert comes_true(lambda: num_threads() == alone)
    assert watch.end() == 0


def test_they_spin_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_LOOK_S", 0.02)
    monkeypatch.setattr(openmp, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(openmp, "_waited_s", lambda: {"1": time.perf_counter()})
    watch = _Watch()
    watch.begin()
    alone = num_threads()
    for _ in range(2):
        assert comes_true(lambda: num_threads() > alone)
        assert comes_true(lambda: num_threads() == alone)
    watch.end()


def test_without_room_for_a_thread_that_watches_it_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(openmp, "_WATCH", _Watch())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    model = LayerSkipModel(zoo.build("llama"), engine="fused")
    assert len(model.generate([1, 2, 3], max_new_tokens=4).ids) == 4
    assert openmp._WATCH.end() == -1


def test_every_thread_is_watched() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        waited = openmp._waited_s()
        assert {str(threading.get_native_id()), str(thread.native_id)} <= set(waited)
        assert all(seconds >= 0 for seconds in waited.values())
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("device", "threads"), [("meta", 2), ("cpu", 1)])
def test_what_computes_on_no_team_is_not_watched(monkeypatch: pytest.MonkeyPatch, device: str, threads: int) -> None:
    watch = _Watch()
    monkeypatch.setattr(openmp, "_WATCH", watch)
    torch.set_num_threads(threads)
    with computing(torch.device(device)):
        assert watch._thread is None
