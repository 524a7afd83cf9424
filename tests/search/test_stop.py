"""Kill -9, signals, time limits, hangs, memory that runs out, readers that leave: how a search ends early."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState

from layerskip import DecodeConfig
from search.stop import StopSignal, TrialTimedOut
from search.storages.opening import open_storage
from search.study.trials import counted, trials_by_state
from search.workers.hang import HUNG_EXIT_CODE
from tests.search.helpers.fakes import Bench
from tests.search.helpers.servers import ROOT, child_environment
from tests.search.test_search import history

RUN = """
import sys, time, pathlib
from layerskip.command_line.cli import quiet_torchao
quiet_torchao()
from search.reporting.publish import Publisher
from search.stop import StopSignal
from search.workers.heartbeats import Patience
from tests.search.helpers.fakes import Bench
Publisher.publish = lambda *_arguments: None
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
patience = Patience(poll_s=0.02, hang_grace_s=0.3)
bench = Bench(folder, stop=StopSignal(ends_process=True), patience=patience, in_sqlite=True)
def doze():
    # Not in one call: of two signals at once the second may go to another thread, and then wakes nobody here.
    for _ in range(12000):
        time.sleep(0.05)
def strike(config):
    if bench.decoder.num_decoded == 120:
        (folder / "struck").touch()
        if what == "hang":
            for _ in range(600):
                try:
                    time.sleep(1)
                except Exception:  # as a call into a driver: no exception gets through
                    pass
        try:
            doze()
        except KeyboardInterrupt:
            if what == "deaf":
                (folder / "heard").touch()
                doze()
            raise
bench.decoder.break_on = strike
with bench.stop.installed():
    try:
        sys.exit(bench.run(trials=16, trial_timeout_s=0.5 if what == "hang" else None))
    except KeyboardInterrupt:
        sys.exit(bench.stop.exit_code)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, in_sqlite=True)


def run_child(folder: Path, what: str) -> subprocess.Popen[str]:
    """A search that stops in the middle of a trial, in a process of its own."""
    command = [sys.executable, "-c", RUN, str(folder), what]
    return subprocess.Popen(command, env=child_environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path, child: subprocess.Popen[str]) -> None:
    while not file.exists():
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)


@pytest.fixture
def waiting(bench: Bench) -> Iterator[subprocess.Popen[str]]:
    """That search once it waits in its trial."""
    child = run_child(bench.folder, "wait")
    try:
        wait_for(bench.folder / "struck", child)
        yield child
    finally:
        child.kill()
        child.wait()


# --- time limits -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", "loops"])
def test_a_trial_that_takes_too_long_is_failed_and_the_search_goes_on(bench: Bench, how: str) -> None:
    def take_for_ever(config: DecodeConfig) -> None:
        while config.gamma == 6:
            time.sleep(60.0 if how == "sleeps" else 0.0)

    bench.decoder.break_on = take_for_ever
    assert bench.run(trials=12, sampler="tpe", trial_timeout_s=2.0) == 0
    trials = bench.trials()
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    assert failed
    assert all(trial.params["gamma"] == 6 for trial in failed)
    said = "TrialTimedOut: took longer than 2 s (--trial-timeout)"
    assert {trial.user_attrs["failure"] for trial in failed} == {said}
    assert counted(trials) == 12  # the config's own failure: not queued again
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_time_is_up_only_where_that_is_safe() -> None:
    stop = StopSignal()
    with stop.deferred(), stop.limited(0.01):
        time.sleep(0.05)  # as a write to the storage: nothing is raised in here
        with pytest.raises(TrialTimedOut, match=r"took longer than 0\.01 s"), stop.interruptible():
            pytest.fail("the time was up before")
    with stop.deferred(), stop.limited(60.0), stop.interruptible():
        pass
    with stop.deferred(), stop.interruptible():
        pass  # the limit has ended with its trial


@pytest.mark.slow
def test_a_trial_that_no_exception_reaches_ends_the_process_with_its_trial_marked(bench: Bench) -> None:
    child = run_child(bench.folder, "hang")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == HUNG_EXIT_CODE
    assert "hung: did not end after 0.5 s (--trial-timeout); the same command continues the study" in errors
    assert "Traceback" not in errors
    last = bench.trials()[-1]
    assert last.state == TrialState.FAIL
    assert last.user_attrs["failure"].startswith("hung: did not end")
    assert bench.run(trials=16) == 0
    assert counted(bench.trials()) == 16


# --- memory ----------------------------------------------------------------------------------------------------------


class Tensor:
    """Stands for a tensor that the failing call holds."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_runs_out_fails_the_trial_drops_what_it_held_and_the_next_one_runs(
    bench: Bench, kind: type[Exception]
) -> None:
    held: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    def run_out(config: DecodeConfig) -> None:
        if config.gamma == 6:
            tensor = Tensor()
            held.append(weakref.ref(tensor))
            raise kind("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has none")

    def free_memory() -> None:
        gc.collect()
        left.append(sum(one() is not None for one in held))

    bench.decoder.break_on = run_out  # type: ignore[assignment]
    bench.decoder.free_memory = free_memory  # type: ignore[method-assign]
    assert bench.run(trials=14) == 0
    failed = [trial for trial in bench.trials() if trial.state == TrialState.FAIL]
    assert failed
    said = f"{kind.__name__}: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has none"
    assert {trial.user_attrs["failure"] for trial in failed} == {said}
    assert left  # freed, and nothing was held any more when it was
    assert set(left) == {0}
    assert counted(bench.trials()) == 14


# --- signals ---------------------------------------------------------------------------------------------------------


def assert_ended_cleanly(bench: Bench, errors: str) -> None:
    assert "Traceback" not in errors
    last, queued = bench.trials()[-2:]
    assert (last.state, last.user_attrs["failure"]) == (TrialState.FAIL, "interrupted")
    assert queued.state == TrialState.WAITING


def assert_resumes_as_if_nothing_had_happened(bench: Bench, whole: Bench) -> None:
    whole.run(trials=16)
    assert bench.run(trials=16) == 0
    trials = bench.trials()
    assert trials_by_state(trials)["interrupted"] == 1
    assert counted(trials) == 16
    assert not [trial for trial in trials if trial.state == TrialState.RUNNING]
    measured = [one[0] for one in history(bench) if one[1] is not None]
    assert measured == [one[0] for one in history(whole)]


def test_a_killed_search_is_resumed(
    bench: Bench, waiting: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    waiting.kill()
    waiting.wait()
    assert bench.trials()[-1].state == TrialState.RUNNING
    assert_resumes_as_if_nothing_had_happened(bench, Bench(tmp_path_factory.mktemp("whole")))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_trial_cleanly(
    bench: Bench,
    waiting: subprocess.Popen[str],
    tmp_path_factory: pytest.TempPathFactory,
    number: signal.Signals,
) -> None:
    waiting.send_signal(number)
    _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + number
    assert_ended_cleanly(bench, errors)
    assert not bench.paths.best.exists()
    assert_resumes_as_if_nothing_had_happened(bench, Bench(tmp_path_factory.mktemp("whole")))


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal().installed():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_two_signals_together_are_one(bench: Bench, waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGINT)
    waiting.send_signal(signal.SIGTERM)
    _, errors = waiting.communicate(timeout=120)
    assert waiting.returncode in (130, 143)
    assert_ended_cleanly(bench, errors)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_process_on_the_spot_and_leaves_a_whole_study(bench: Bench) -> None:
    child = run_child(bench.folder, "deaf")
    wait_for(bench.folder / "struck", child)
    child.send_signal(signal.SIGINT)
    wait_for(bench.folder / "heard", child)
    time.sleep(0.6)  # a person's second Ctrl-C, not the same one twice
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors == "ended at once; the same command clears up and continues\n"
    assert bench.trials()[-1].state == TrialState.RUNNING
    assert bench.run(trials=16) == 0
    trials = bench.trials()
    assert counted(trials) == 16
    assert all(trial.state.is_finished() for trial in trials)


# --- readers that leave ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_run_without_a_traceback(tiny_study: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "search.run", *tiny_study, "--trials", "6"]
    child = subprocess.Popen(
        command, env=child_environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    assert child.stdout.readline().startswith("preflight")
    child.stdout.close()
    errors = child.stderr.read()
    assert child.wait(timeout=120) == 141
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    url = f"sqlite:///{tmp_path / 'study' / 'study.db'}"
    if (tmp_path / "study" / "study.db").exists():
        for name in optuna.get_all_study_names(open_storage(url)):
            trials = optuna.load_study(study_name=name, storage=open_storage(url)).get_trials()
            assert not [trial for trial in trials if trial.state == TrialState.RUNNING]
