"""Several workers on this host from one command: posts, one view of them, signals, ends, and clearing up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import DecodeConfig
from search import run
from search.storages.opening import open_storage
from search.study.trials import counted
from search.workers.device import computing_on, pids_on, share_a_device
from search.workers.launch import Launch, Post, assign_posts, devices_for, parse_devices
from search.workers.process import process_token
from search.workers.roster import Worker
from tests.search.helpers.studies import trials_of
from tests.search.test_commands import changed, run_main
from tests.search.workers.test_workers import ELSEWHERE, a_dead_token

ROOT = Path(__file__).parents[3]


def test_devices_are_read_strictly() -> None:
    assert parse_devices(None) == ()
    assert parse_devices("cuda:0, cuda:1") == ("cuda:0", "cuda:1")
    for text in ("", "cuda:0,", ",cpu"):
        with pytest.raises(ValueError, match=r"devices: must be names with commas between them.*got"):
            parse_devices(text)


def test_a_device_for_each_worker() -> None:
    assert devices_for(None, (), "auto") == ("auto",)
    assert devices_for(1, (), "cuda:3") == ("cuda:3",)
    assert devices_for(2, (), "cpu") == ("cpu", "cpu")
    assert devices_for(None, ("cuda:0", "cuda:1"), "auto") == ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="workers: must be at least 1, got 0"):
        devices_for(0, (), "cpu")
    with pytest.raises(ValueError, match="workers: must be the number of --devices, 1, got 2"):
        devices_for(2, ("cpu",), "auto")


def test_workers_on_the_cpu_get_cores_of_their_own_or_a_warning() -> None:
    posts, warnings = assign_posts(("cpu", "cuda:0", "cpu"), None, [0, 2, 3, 5, 7])
    assert posts == [Post(0, "cpu", (0, 2), 2), Post(1, "cuda:0", None, None), Post(2, "cpu", (3, 5), 2)]
    assert warnings == []
    posts, warnings = assign_posts(("cpu", "cpu"), 3, [0, 1, 2, 3])
    assert [(post.cores, post.num_threads) for post in posts] == [(None, 3), (None, 3)]
    assert warnings == ["2 CPU workers of 3 threads, but there are 4 cores: they disturb each other's timings"]
    posts, warnings = assign_posts(("cpu", "cpu"), None, [1])
    assert [post.num_threads for post in posts] == [1, 1]
    assert len(warnings) == 1
    _, warnings = assign_posts(("cuda:0", "cuda:0"), None, None)
    assert warnings == ["2 workers on cuda:0: they disturb each other's timings"]
    assert assign_posts(("cpu",), None, [0]) == ([Post(0, "cpu")], [])


def test_workers_that_share_a_device_are_found() -> None:
    here, cores = process_token(), computing_on(None)
    assert cores == {"cores": sorted(os.sched_getaffinity(0))}
    assert share_a_device({"cores": [0, 1]}, Worker(1, here, facts={"cores": [1, 2]}))
    assert not share_a_device({"cores": [0, 1]}, Worker(1, here, facts={"cores": [2, 3]}))
    assert not share_a_device({"cores": [0, 1]}, Worker(1, ELSEWHERE, facts={"cores": [0, 1]}))
    assert share_a_device({"unit": "GPU-a"}, Worker(1, here, facts={"unit": "GPU-a"}))
    assert not share_a_device({"unit": "GPU-a"}, Worker(1, here, facts={"unit": "GPU-b", "cores": [0]}))


def test_strangers_on_a_gpu_are_read_from_the_drivers_list() -> None:
    listing = [("4711", "GPU-aa-bb"), ("12", "GPU-cc"), ("13", "GPU-aa-bb"), ("[N/A]", "GPU-aa-bb")]
    assert pids_on("aa-bb", listing, {13}) == [4711]
    assert pids_on("GPU-aa-bb", listing, set()) == [4711, 13]
    assert pids_on("dd", listing, set()) == []


# --- one view --------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, sys, time
device = sys.argv[sys.argv.index("--device") + 1]
cores = sorted(os.sched_getaffinity(0))
print(json.dumps({"event": "hello", "cores": cores, "threads": os.environ.get("OMP_NUM_THREADS")}), flush=True)
print("trouble", file=sys.stderr, flush=True)
if device == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if device == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("waiting", flush=True)
    time.sleep(600)
sys.exit(3 if device == "fails" else 0)
"""


def launch(posts: list[Post], *, json_lines: bool = False, quiet: bool = False) -> int:
    return Launch(posts, [sys.executable, "-c", SCRIPT], json_lines=json_lines, quiet=quiet).run()


def test_lines_say_which_worker_and_the_worst_code_counts(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([Post(0, "ends"), Post(1, "fails")]) == 3
    out, err = capfd.readouterr()
    assert sorted(line[:14] for line in out.splitlines()) == ['[0] {"event": ', '[1] {"event": ']
    assert {"[0] trouble", "[1] trouble"} < set(err.splitlines())
    assert re.search(r"worker 1 \(fails\) ended with exit code 3", err)


def test_a_worker_that_is_killed_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([Post(0, "dies"), Post(1, "ends")]) == 137
    assert "worker 0 (dies) ended with exit code 137" in capfd.readouterr().err


def test_events_name_their_worker(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    assert launch([Post(0, "ends", (core,), 1), Post(1, "ends")], json_lines=True) == 0
    events = {one["worker"]: one for one in map(json.loads, capfd.readouterr().out.splitlines())}
    assert events[0] == {"event": "hello", "worker": 0, "cores": [core], "threads": "1"}
    assert events[1]["cores"] == sorted(before)
    assert os.sched_getaffinity(0) == before


def test_signals_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    seen = threading.Event()

    class Watching(Launch):
        def _write(self, stream: object, text: str) -> None:
            if "waiting" in text and not seen.is_set():
                seen.set()
                os.kill(os.getpid(), signal.SIGTERM)
            super()._write(stream, text)  # type: ignore[arg-type]

    before = signal.getsignal(signal.SIGTERM)
    watching = Watching([Post(0, "waits")], [sys.executable, "-c", SCRIPT], json_lines=False, quiet=False)
    assert watching.run() == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert "waiting" in capfd.readouterr().out


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_workers_from_one_command(tiny_study: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    flags = [*changed(tiny_study, trials="8"), "--devices", "cpu,cpu", "--sampler", "tpe"]
    command = [sys.executable, "-m", "search.run", *flags]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("workers   [0] cpu")
    assert {line[:4] for line in lines[2:]} == {"[0] ", "[1] "}
    assert done.stdout.count("plain decoding of tuning prompts") == 1
    assert done.stdout.count("] written ") == 1
    trials = trials_of(tmp_path / "study")
    assert counted(trials) == 8
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.FAIL}
    assert DecodeConfig.load(tmp_path / "study" / "best.json").provenance is not None
    assert 'device = "cpu"' in (tmp_path / "study" / "study.toml").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "0"], "workers: must be at least 1, got 0"),
        (["--devices", "cpu,,cpu"], "devices: must be names with commas between them"),
        (["--workers", "3", "--devices", "cpu,cpu"], "workers: must be the number of --devices, 2, got 3"),
        (["--workers", "2", "--per-group"], "workers: must be 1 for a per-group search, got 2"),
        (["--trial-timeout", "0"], "trial_timeout_s: input should be greater than 0"),
        (["--reap"], "no such study yet"),
    ],
)
def test_bad_numbers_are_one_line(
    flags: list[str], said: str, tiny_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main([*tiny_study, *flags]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(error) == 1
    assert said in error[0]
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("make_token", [a_dead_token, lambda: ELSEWHERE], ids=["this host", "another host"])
def test_reap_clears_up_says_so_and_ends(
    tiny_study: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make_token: Callable[[], str],
) -> None:
    from search.workers import crew, heartbeats

    monkeypatch.setattr(crew, "Patience", lambda: heartbeats.Patience(dead_after_s=0.2, poll_s=0.01))
    (tmp_path / "study").mkdir()
    storage = open_storage(f"sqlite:///{tmp_path}/study/study.db")
    study = optuna.create_study(storage=storage, study_name="study", direction="maximize")
    attrs = {"process": make_token(), "claim": {"gamma": 1}}
    study.add_trial(optuna.create_trial(state=TrialState.RUNNING, user_attrs=attrs))
    assert run_main([*tiny_study, "--reap"]) == 0
    assert "trial 0: worker died; its config is queued again\n" in capsys.readouterr().out
    assert [trial.state for trial in study.get_trials()] == [TrialState.FAIL, TrialState.WAITING]
    assert run.main([*tiny_study, "--reap"]) == 0
    assert capsys.readouterr().out == "nothing to do: no trial of a dead worker\n"
    assert optuna.get_all_study_names(storage) == ["study"]
