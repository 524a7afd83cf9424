"""Memory stays flat: a search in small, with and without a leak planted in it, and what the studies of it write."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from layerskip.analysis.teacher_forcing import LayerwiseForcing
from layerskip.huggingface.kv_cache import SharedLengthCache
from search import run as search_run
from search.outlook import opening as outlook_opening
from search.predict import predictor
from search.reporting.publish import Publisher
from search.trials.phase import TrialPhase
from studies.memory import budget, search, serve
from studies.memory.course import LIMIT, Course, peak_mib, resident_mib
from studies.memory.searching import events_of
from tests.search.conftest import save_tiny_model, tiny_flags

NUM_TRIALS, WARM_UP = 36, 12
SPARE_BYTES = 1 << 16
"""A text of the tiny model has some 16 KiB of keys and values, a trial sixteen texts or more."""
BLOCKS_A_TRIAL = 800
"""Of Python's allocator: some 270 that Optuna keeps of a finished trial."""

Growth = tuple[int, int]
"""Bytes of tensors, blocks of Python's allocator."""


@pytest.fixture
def count_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Growth]:
    """A real search on a tiny model; the bytes of all tensors and the blocks of all else after the warm-up and after
    the last trial."""
    counted: list[Growth] = []
    watch, numbers = TrialPhase._after, itertools.count(1)

    def watch_and_count(self: TrialPhase, *arguments: Any) -> None:
        watch(self, *arguments)
        if next(numbers) in (WARM_UP, NUM_TRIALS):
            counted.append((tensor_bytes(), sys.getallocatedblocks()))

    monkeypatch.setattr(TrialPhase, "_after", watch_and_count)
    monkeypatch.setattr(Publisher, "__call__", lambda *_: None)
    monkeypatch.setattr(Publisher, "publish", lambda *_: None)
    # Caches that are full before the first trial, as they are on a real model.
    monkeypatch.setattr(outlook_opening, "MIN_OPENING_S", 2.0)
    monkeypatch.setattr(predictor, "_KEPT_BYTES", 1 << 14)
    monkeypatch.setitem(LayerwiseForcing.__init__.__kwdefaults__, "cache_bytes", 1 << 14)
    flags = tiny_flags(save_tiny_model(tmp_path / "model"), tmp_path)

    def run() -> Growth:
        flags[flags.index("--trials") + 1] = str(NUM_TRIALS)
        assert search_run.main([*flags, "--engine", "fused", "--force", "--quiet"]) == 0
        before, after = counted
        return after[0] - before[0], after[1] - before[1]

    return run


def tensor_bytes() -> int:
    gc.collect()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors()}
    return sum(one.nbytes() for one in storages.values())


def tensors() -> Iterator[torch.Tensor]:
    found = (one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu")
    return (one for one in found if one.layout == torch.strided)  # what oneDNN packed has no storage to ask for


@pytest.mark.slow
def test_trials_leave_nothing_behind(count_search: Callable[[], Growth]) -> None:
    num_bytes, num_blocks = count_search()
    assert num_bytes < SPARE_BYTES
    assert num_blocks < BLOCKS_A_TRIAL * (NUM_TRIALS - WARM_UP)


@pytest.mark.slow
def test_trials_that_leave_something_behind_are_seen(
    count_search: Callable[[], Growth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a planted leak: somebody holds on to the keys and values of every text."""
    held: list[SharedLengthCache] = []
    make = SharedLengthCache.__init__

    def make_and_hold(self: SharedLengthCache, *arguments: Any) -> None:
        make(self, *arguments)
        held.append(self)

    monkeypatch.setattr(SharedLengthCache, "__init__", make_and_hold)
    num_bytes, _ = count_search()
    assert num_bytes > 2 * SPARE_BYTES


TELLER = """
import json, sys
kept, seen = [bytearray(b"x" * (80 << 20))], None
for done in range(1, 41):
    if sys.argv[1] == "leaks":
        kept.append(bytearray(b"x" * (1 << 20)))
    print(json.dumps({"event": "note", "text": ""}))
    print(json.dumps({"event": "trial", "num_done": done, "state": "complete"}), flush=True)
    seen = seen or open(sys.argv[2])
    seen.readline()
    if sys.argv[1] == "fails" and done == 7:
        sys.exit("teller: error: no room")
"""


@pytest.fixture
def teller(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A process in the place of the search that tells of forty trials; after each it waits until it was looked at."""

    def put(kind: str) -> None:
        seen = tmp_path_factory.mktemp("teller") / "seen"
        os.mkfifo(seen)
        writers: list[IO[str]] = []

        class Stepped(Course):
            def sample(self, at: float, pid: int) -> float:
                mib = super().sample(at, pid)
                if not writers:
                    writers.append(seen.open("w", buffering=1))
                writers[0].write("\n")
                return mib

        monkeypatch.setattr(search, "Course", Stepped)
        monkeypatch.setattr(search, "command", lambda *_: [sys.executable, "-c", TELLER, kind, str(seen)])

    return put


@pytest.mark.parametrize(("kind", "code"), [("is flat", 0), ("leaks", 1)])
def test_the_study_of_a_search_tells_flat_memory_from_a_leak(
    teller: Callable[[str], None], kind: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teller(kind)
    assert search.main(["--trials", "40", "--out", str(tmp_path)]) == code
    record = json.loads((tmp_path / "search.json").read_text())
    assert (record["unit"], record["num_samples"], record["warm_up"]) == ("trials", 40, 4)
    assert record["is_flat"] == (code == 0)
    assert record["trials_by_state"] == {"complete": 40}
    assert record["rss_mib_at_end"] > 80
    if kind == "leaks":
        grown = record["rss_mib_at_end"] - record["rss_mib_after_warm_up"]
        assert grown == pytest.approx(36, abs=3)
        assert record["growth"] > LIMIT
    line = (tmp_path / "table.md").read_text().splitlines()[-1]
    assert line.startswith("| search | 40 trials | 4 |")
    assert line in capsys.readouterr().out


def test_a_search_that_fails_is_told_in_its_own_words(
    teller: Callable[[str], None], tmp_path: Path, refused: Any
) -> None:
    teller("fails")
    error = refused(search.main, ["--trials", "40", "--out", str(tmp_path)])
    assert "the search ended with code 1: teller: error: no room" in error
    teller("is flat")
    assert "the search ended after 40 of 41 trials" in refused(search.main, ["--trials", "41", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_nobody_watches_any_more_is_ended() -> None:
    waits = "import time; print('{}', flush=True); time.sleep(600)"
    with closing(events_of([sys.executable, "-c", waits])) as events:
        event, pid = next(events)
        assert event == {}
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_the_search_that_is_watched_is_a_real_one(tmp_path: Path) -> None:
    arguments = search.build_parser().parse_args(["--trials", "3"])
    command = search.command(arguments, tmp_path)
    parsed = search_run.build_parser().parse_args(command[3:])
    assert (command[1:3], parsed.trials, parsed.json, parsed.force) == (["-m", "search.run"], 3, True, True)
    assert Path(parsed.study).parent == tmp_path
    assert Path(parsed.model, "config.json").is_file()


@pytest.mark.slow
def test_the_study_of_a_budget_makes_its_model_and_tells_minutes_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"layers": 4, "hidden": 64, "heads": 4, "kv-heads": 2, "mlp": 128, "vocabulary": 4096}
    numbers |= {"max-new-tokens": 24, "trials": 6, "budget": 5}
    flags = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    code = budget.main([*flags, "--dtype", "float32", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "budget.json").read_text())
    assert code == (0 if record["is_within_memory"] else 1)
    assert record["limit_mib"] == pytest.approx(
        record["program_mib"] + 2 * record["weights_mib"] + record["layers_mib"], abs=0.5
    )
    assert record["num_trials"] == 6
    assert record["budget"]["minutes"] == 5.0
    assert record["weights_mib"] > record["layers_mib"] > 0
    assert record["peak_mib"] > 100
    told = capsys.readouterr().out
    assert "| confirm |" in told
    assert "6 trials; nothing was cut" in told


@pytest.mark.slow
def test_the_study_of_a_server_asks_in_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For some seconds: each way to ask and its outcome. That nothing stays of a request: test_server_memory.py."""
    code = serve.main(["--minutes", "0.1", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "serve.json").read_text())
    assert code == (0 if record["is_flat"] else 1)
    kinds = record["requests_by_kind"]
    assert {"whole", "streamed", "sampled", "left mid-stream", "chat refused", "rubbish refused"} < kinds.keys()
    assert len(set(kinds.values())) == 1
    assert record["requests"] == sum(kinds.values()) >= 2 * len(kinds)
    assert record["rss_mib_at_end"] > 100
    assert "| serve | 0.1 minutes |" in (tmp_path / "table.md").read_text()


def test_the_figures_of_a_course() -> None:
    course = Course("trials", 20, [1, 2, 3, 19, 20], [90.0, 100.0, 108.0, 103.0, 102.0])
    assert course.after_warm_up == [100.0, 108.0, 103.0, 102.0]
    assert (course.growth, course.most_growth) == (pytest.approx(0.02), pytest.approx(0.08))
    assert not course.is_flat  # the end is, what lay between is not
    assert Course("trials", 20, [2, 20], [100.0, 104.9]).is_flat
    with pytest.raises(ValueError, match="no sample after 2 trials: the process ended before"):
        Course("trials", 20, [1], [90.0]).to_json()
    many = Course("trials", 500, list(range(1, 501)), [100.0] * 500).to_json()
    assert len(many["samples"]) <= 61
    assert many["samples"][-1] == [500, 100.0]
    assert resident_mib(1) > 0
    assert peak_mib(os.getpid()) >= resident_mib(os.getpid()) > 0


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (search.main, ["--trials", "0"], "--trials: must be at least 1, got 0"),
        (search.main, ["--max-new-tokens", "1"], "--max-new-tokens: must be at least 2, got 1"),
        (search.main, ["--model", "/nowhere"], "--model: no such folder: /nowhere"),
        (search.main, ["--out", "/nowhere"], "--out: no such folder: /nowhere"),
        (budget.main, ["--layers", "1"], "--layers: must be at least 2, got 1"),
        (budget.main, ["--budget", "0"], "--budget: must be above 0, got 0.0"),
        (serve.main, ["--minutes", "inf"], "--minutes: must be above 0, got inf"),
        (serve.main, ["--config", "/nowhere"], "--config: no such file: /nowhere"),
    ],
)
def test_bad_input_is_one_line(
    main: Callable[[list[str]], int], arguments: list[str], message: str, refused: Any
) -> None:
    err = refused(main, arguments)
    assert message in err
