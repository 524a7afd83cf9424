"""The whole search on a fake decoder and a fake clock."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import DecodeConfig
from search.storages.opening import open_storage
from search.study import opening as study
from search.study.fingerprint import FingerprintMismatch
from search.study.opening import as_before
from search.study.spec import StudySpec
from search.study.trials import counted
from tests.search.conftest import quiet
from tests.search.helpers.fakes import FINGERPRINT, SPACE, Bench, make_spec, true_speedup


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A search of forty trials, never changed."""
    done = Bench(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        quiet(monkeypatch)
        assert done.run(trials=40) == 0
    return done


@pytest.fixture
def copied(finished: Bench, tmp_path: Path) -> Bench:
    """A copy of it to go on with."""
    return Bench(Path(shutil.copytree(finished.folder, tmp_path / finished.folder.name)))


def spec_of(bench: Bench, **changes: Any) -> StudySpec:
    """As a run of it has it."""
    return make_spec(**({"storage": bench.url} | changes))


def history(bench: Bench) -> list[tuple[Any, ...]]:
    return [(trial.params, trial.value, trial.user_attrs["origin"]) for trial in bench.trials()]


def test_finds_confirms_and_exports_a_winner(finished: Bench) -> None:
    best = DecodeConfig.load(finished.paths.best)
    assert true_speedup(best) > 1.3
    assert best.provenance is not None
    assert best.confirmed.speedup_ci_low > 1.0
    assert best.confirmed.speedup == pytest.approx(true_speedup(best), rel=0.02)
    assert best.confirmed.num_identical == best.confirmed.num_prompts == 12
    assert best.provenance.num_trials == 40
    summary = finished.summary()
    assert summary["trials"]["counted"] == summary["trials"]["total"] == 40
    assert summary["confirmed"]["speedup"] == best.confirmed.speedup
    assert summary["seconds"].keys() >= {"reference", "search", "confirm"}
    assert "result" in finished.output.getvalue()


def test_speedup_is_the_ratio_of_the_two_speeds(finished: Bench) -> None:
    summary = finished.summary()
    assert set(summary["machine"]) == {"reference", "outlook", "search", "confirm"}
    assert summary["machine"]["confirm"]["num_preparations"] == 2
    confirmed = summary["confirmed"]
    machine = "driver 570.1, SM 1755 MHz, attention math, 2 recordings and compilations in 0.2 s, load 1.5"
    assert confirmed["machine"] == machine
    assert confirmed["speedup"] == confirmed["tokens_per_s"] / confirmed["plain_tokens_per_s"]


def test_trial_attributes_are_plain_numbers(finished: Bench) -> None:
    trial = finished.trials()[0]
    names = ("speedup", "speedup_ci_low", "speedup_ci_high", "acceptance_rate", "mean_accepted_length")
    assert all(isinstance(trial.user_attrs[name], float) for name in names)
    counts = ("num_skipped_attention", "num_skipped_mlp", "num_prompts")
    assert all(isinstance(trial.user_attrs[name], int) for name in counts)
    assert trial.user_attrs["acceptance_rate"] == 0.8
    assert trial.user_attrs["mean_accepted_length"] == 2.0
    assert trial.user_attrs["accepted_by_position"] == [6 * 5, 2 * 5]
    assert len(trial.user_attrs["ratios"]) == trial.user_attrs["num_prompts"] == 5
    plain = finished.summary()["reference"]["plain_tokens_per_s"]
    assert trial.value == pytest.approx(trial.user_attrs["speedup"] * plain)


def test_same_seed_same_trials(bench: Bench, finished: Bench) -> None:
    bench.run(trials=40)
    assert history(bench) == history(finished)


@pytest.mark.parametrize(
    ("sampler", "in_sqlite"),
    [("replay", True), ("tpe", False), ("random", False)],
)
def test_stop_and_resume_equals_uninterrupted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, sampler: str, in_sqlite: bool
) -> None:
    whole = Bench(tmp_path_factory.mktemp("whole"))
    whole.run(trials=14, sampler=sampler)
    Bench(tmp_path, in_sqlite=in_sqlite).run(trials=10, sampler=sampler)
    resumed = Bench(tmp_path, in_sqlite=in_sqlite)
    resumed.run(trials=14, sampler=sampler)
    assert history(resumed) == history(whole)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_parameter_with_one_value_is_searched_too(bench: Bench, sampler: str) -> None:
    bench.space = replace(SPACE, gamma_max=1)
    bench.run(trials=14, sampler=sampler)
    trials = bench.trials()
    assert len(trials) >= 14
    assert {trial.params["gamma"] for trial in trials} == {1}
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}


def test_an_interrupted_trial_is_queued_again(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = Bench(tmp_path_factory.mktemp("whole"))
    whole.run(trials=20)
    decoder = bench.decoder

    def interrupt(_config: DecodeConfig) -> None:
        if decoder.num_decoded == 100:
            bench.stop.handle(15, None)

    decoder.break_on = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.run(trials=20)
    assert bench.stop.exit_code == 143
    assert not bench.paths.best.exists()
    stopped, queued = bench.trials()[-2:]
    assert (stopped.state, stopped.user_attrs["failure"]) == (TrialState.FAIL, "interrupted")
    assert queued.state == TrialState.WAITING
    assert queued.user_attrs["retry_of"] == stopped.number
    assert queued.user_attrs["attempt"] == 1  # a signal is not the config's fault
    assert not [trial for trial in bench.trials() if trial.state == TrialState.RUNNING]
    resumed = Bench(bench.folder)
    assert resumed.run(trials=20) == 0
    finished = [entry for entry in history(resumed) if entry[1] is not None]
    assert [(entry[0], entry[2]) for entry in finished] == [(entry[0], entry[2]) for entry in history(whole)]
    assert counted(resumed.trials()) == 20
    assert not [trial for trial in resumed.trials() if not trial.state.is_finished()]


def test_all_trials_done_goes_straight_to_confirm(copied: Bench) -> None:
    copied.paths.best.unlink()
    assert copied.run(trials=40) == 0
    assert len(copied.trials()) == 40
    assert copied.paths.best.exists()
    assert "all 40 trials are done" in copied.output.getvalue()


def test_the_time_limit_ends_the_search_and_confirms(bench: Bench) -> None:
    assert bench.run(trials=30, timeout_s=1e-9) == 0
    assert len(bench.trials()) <= 2
    assert "time limit" in bench.output.getvalue()


def fast_but_wrong(config: DecodeConfig) -> bool:
    """The whole region of the optimum is broken: it would win by far."""
    return config.skip_mask.attention[2]


def test_an_output_that_differs_can_never_win(bench: Bench) -> None:
    bench.decoder.wrong_on = fast_but_wrong
    assert bench.run(trials=20) == 1
    wrong = [trial for trial in bench.trials() if trial.params["skip.attn.02"]]
    assert wrong
    assert all(trial.state == TrialState.PRUNED and trial.user_attrs["lossless"] is False for trial in wrong)
    assert not DecodeConfig.load(bench.paths.best).skip_mask.attention[2]
    assert len(bench.summary()["not_lossless"]) == len(wrong)
    assert bench.output.getvalue().count("NOT LOSSLESS") >= len(wrong)
    # Said again, with the exit code, by every later run of the study.
    assert Bench(bench.folder).run(trials=20) == 1


def test_an_output_that_differs_only_in_confirm_cannot_win_either(copied: Bench) -> None:
    assert DecodeConfig.load(copied.paths.best).skip_mask.attention[2]
    copied.decoder.wrong_on = fast_but_wrong
    assert copied.run(trials=40) == 1
    assert not DecodeConfig.load(copied.paths.best).skip_mask.attention[2]


def test_a_logit_tie_is_counted_and_may_win(bench: Bench) -> None:
    bench.decoder.tie_on = lambda _config: True
    assert bench.run(trials=8) == 0
    confirmed = DecodeConfig.load(bench.paths.best).confirmed
    assert (confirmed.num_identical, confirmed.num_ties) == (0, 12)


def test_the_verdict_tells_every_drafter_also_those_whose_trials_were_stopped_early(tmp_path: Path) -> None:
    drafters = ("layer_skip", "prompt_lookup", "suffix")
    bench = Bench(tmp_path, space=replace(SPACE, drafters=drafters))
    assert bench.run(trials=8, drafters=drafters) == 0
    trials = bench.trials()
    assert {one.params["drafter"] for one in trials if not one.user_attrs["stopped_early"]} == {"layer_skip"}
    assert bench.summary()["by_drafter"].keys() == set(drafters)
    told = bench.output.getvalue()
    assert re.search(r"best of each drafter on the choosing pass: layer_skip 1\.3\dx, (\w+ 0\.9\dx(, )?){2}\n", told)
    assert (
        len(re.findall(r"confirm   #\d+ 0\.\d+x \(tuning 0\.\d+x, stopped early\): (prompt_lookup|suffix)", told)) == 2
    )


def test_out_of_memory_fails_that_trial_alone(bench: Bench) -> None:
    bench.decoder.break_on = lambda config: MemoryError("no room") if config.gamma == 6 else None
    assert bench.run(trials=16) == 0
    trials = bench.trials()
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    assert failed
    assert all(trial.user_attrs["failure"] == "MemoryError: no room" for trial in failed)
    assert all(trial.params["gamma"] == 6 for trial in failed)
    assert bench.decoder.num_freed >= len(failed)
    assert counted(trials) == len(trials) == 16
    assert bench.summary()["trials"]["failed"] == len(failed)


def test_failures_in_a_row_end_the_run(bench: Bench) -> None:
    bench.decoder.break_on = lambda config: RuntimeError("driver gone") if config.skip_mask.num_skipped else None
    assert bench.run(trials=30, max_failures=3, repeat_every=0) == 1
    assert len(bench.trials()) == 3
    assert "3 trials in a row failed, the last one with RuntimeError: driver gone" in bench.output.getvalue()
    assert not bench.paths.best.exists()


def test_no_advantage_exports_plain_decoding_with_the_reason(bench: Bench) -> None:
    bench.decoder.gain = 0.0
    assert bench.run(trials=8) == 0
    best = DecodeConfig.load(bench.paths.best)
    assert best.gamma == 0
    assert best.confirmed is None
    assert best.reason is not None
    assert "does not lie above 1.0" in best.reason
    assert bench.summary()["verdict"] == "do not speculate"


def test_hopeless_trials_stop_early_and_never_lead(finished: Bench) -> None:
    trials = finished.trials()
    stopped = [trial for trial in trials if trial.user_attrs.get("stopped_early")]
    assert stopped
    assert all(trial.user_attrs["num_prompts"] < 5 for trial in stopped)
    best_full = max(trial.value for trial in trials if not trial.user_attrs["stopped_early"])
    assert all(trial.value < best_full for trial in stopped)
    entries = finished.summary()["best_measured"]["pooled"]
    assert not {number for entry in entries for number in entry["trials"]} & {trial.number for trial in stopped}


def test_leaders_are_measured_again_on_other_prompts(finished: Bench) -> None:
    repeats = [trial for trial in finished.trials() if "repeat_of" in trial.user_attrs]
    assert len(repeats) >= 5
    first = {trial.number: trial for trial in finished.trials()}
    for trial in repeats:
        assert trial.params == first[trial.user_attrs["repeat_of"]].params
        assert trial.user_attrs["origin"] == "repeat"
    assert {step for trial in repeats for step in trial.user_attrs["prompt_steps"]} - set(range(5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": "xyz"}, "weights was 'abc', now 'xyz'"),
        ({"max_new_tokens": 9, "device": "cuda"}, "device was 'cpu', now 'cuda'; max_new_tokens was 17, now 9"),
    ],
)
def test_another_fingerprint_is_refused_by_name(bench: Bench, change: dict[str, Any], said: str) -> None:
    bench.run(trials=3)
    with pytest.raises(FingerprintMismatch, match=said):
        bench.run(trials=6, fingerprint=replace(FINGERPRINT, **change))
    assert len(bench.trials()) == 3


def test_what_is_left_open_is_as_the_study_has_it(bench: Bench) -> None:
    """A default that changes between versions must not end a study: it goes on with the values it was begun with."""
    bench.run(trials=1)
    open_ = spec_of(bench)
    assert (open_.gamma_max, open_.int8, open_.int4) == (None, None, None)
    before = as_before(open_, bench.paths)
    assert (before.gamma_max, before.int8, before.int4) == (FINGERPRINT.gamma_max, False, False)
    fixed = spec_of(bench, engine="eager", num_threads=1)
    assert as_before(fixed, bench.paths).gamma_max == FINGERPRINT.gamma_max, "also where all else is given"
    given = as_before(spec_of(bench, gamma_max=12, int8=True), bench.paths)
    assert (given.gamma_max, given.int8) == (12, True), "what is given is compared, and refused"
    new = as_before(spec_of(bench, study_name="other"), bench.paths)
    assert (new.gamma_max, new.int8) == (None, None)


def test_a_study_on_another_engine_is_not_blamed_on_siblings(bench: Bench) -> None:
    """`siblings` of a study on an engine that can, taken over on one that cannot, would be refused first."""
    bench.run(trials=1, fingerprint=replace(FINGERPRINT, siblings=3))
    assert as_before(spec_of(bench), bench.paths).siblings is True
    assert as_before(spec_of(bench, engine="cuda_graph"), bench.paths).siblings is None


def test_a_study_of_somebody_else_is_refused(bench: Bench) -> None:
    storage = open_storage(bench.url)
    optuna.create_study(storage=storage, study_name=bench.folder.name).optimize(lambda _trial: 1.0, n_trials=1)
    with pytest.raises(ValueError, match=r"has trials that search\.run did not make"):
        bench.run(trials=3)


def test_a_corrupt_best_json_is_kept_aside(bench: Bench) -> None:
    bench.paths.best.write_text("{ half")
    bench.run(trials=8)
    assert (bench.folder / "best.json.bak").read_text() == "{ half"
    assert DecodeConfig.load(bench.paths.best).provenance is not None


def test_a_resume_tells_how_fast_the_machine_is_now(bench: Bench) -> None:
    bench.run(trials=2)
    again = Bench(bench.folder)
    again.run(trials=3)
    assert "stored; now 1.00 times as fast" in again.output.getvalue()


def test_auto_keeps_the_engine_that_the_study_was_measured_with(bench: Bench) -> None:
    spec = spec_of(bench)
    assert as_before(spec, bench.paths) == spec
    assert not list(bench.folder.iterdir())
    bench.run(trials=1)
    assert as_before(spec, bench.paths).engine == FINGERPRINT.engine
    assert as_before(spec_of(bench, engine="eager"), bench.paths).engine == "eager"
    assert as_before(spec_of(bench, study_name="other"), bench.paths).engine == "auto"


def test_a_study_keeps_the_threads_it_was_measured_with(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(study, "num_cores", lambda: 3)
    bench.run(trials=1, fingerprint=replace(FINGERPRINT, num_threads=3))
    assert as_before(spec_of(bench), bench.paths).num_threads == 3
    assert as_before(spec_of(bench, num_threads=2), bench.paths).num_threads == 2
    assert as_before(spec_of(bench, objective="speedup"), bench.paths).num_threads is None
    monkeypatch.setattr(study, "num_cores", lambda: 2)  # another, smaller machine: not what it was measured on
    assert as_before(spec_of(bench), bench.paths).num_threads is None
    monkeypatch.setattr(study, "num_cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert as_before(spec_of(bench), bench.paths).num_threads is None


def test_what_a_trial_freed_is_given_back_before_it_is_told_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr("search.trials.phase.trim_heap", lambda: told.append(bench.output.getvalue().count("\ntrial ")))
    bench.run(trials=4)
    assert told == [0, 1, 2, 3]
