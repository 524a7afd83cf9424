"""The whole run has a budget: what is planned, what a run on a fake clock then takes, and what is told of it."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip import DecodeConfig, SkipMask
from search import run
from search.budget.pace import Pace, measure_pace
from search.budget.plan import make_plan, spread
from search.budget.work import Amounts, Work
from search.context import Tools
from search.measure.decoder import Decoded
from search.measure.pairs import PromptCase
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.predict.sensitivity import measure_sensitivity
from search.reporting.digest import digest_of
from search.reporting.record import read_record
from search.run_plan import RunPlan
from search.stop import StopSignal
from search.study.fingerprint import FingerprintMismatch
from search.study.space import SearchSpace
from search.study.trials import counted
from search.terminal.reporter import Reporter
from tests.search.helpers.fakes import FINGERPRINT, MODEL, SPACE, Bench, FakeClock, FakeDecoder, make_spec, prompts

SLOW = 0.05
"""Of the fake's usual pace: a plain token takes 0.2 s, a decoding of 17 tokens 3.2 s."""
WORK = Work(
    trials=200,
    timeout_s=None,
    trial_seconds=20.0,
    prompts_per_trial=None,
    gamma_max=8,
    num_bits=48,
    num_texts=48,
    held_out=(24, 24),
    max_new_tokens=64,
    confirm_repeats=3,
    num_candidates=7,
)
PACE = Pace(token_s=0.1, further_s=0.01, prompt_s=0.5)


def slow_bench(folder: Path, pace: float = SLOW) -> Bench:
    return Bench(folder, FakeDecoder(pace=pace))


def minutes(bench: Bench) -> float:
    return bench.decoder.clock.now / 60


@pytest.mark.parametrize("budget", [4.0, pytest.param(15.0, marks=pytest.mark.slow)])
def test_the_whole_run_keeps_to_its_budget_and_uses_most_of_it(tmp_path: Path, budget: float) -> None:
    bench = slow_bench(tmp_path)
    assert bench.run(trials=200, budget_minutes=budget) == 0
    assert 0.75 * budget <= minutes(bench) <= 1.02 * budget
    summary = bench.summary()
    assert summary["seconds"]["confirm"] >= 0.1 * 60 * budget
    assert 1 <= summary["trials"]["counted"] < 200
    assert summary["budget"]["minutes"] == budget
    assert summary["confirmed"] is not None


def test_what_is_cut_is_told_recorded_and_reported(tmp_path: Path) -> None:
    bench = slow_bench(tmp_path)
    bench.run(trials=200, budget_minutes=4.0)
    budget, told = bench.summary()["budget"], bench.output.getvalue()
    asked, used = Amounts(**budget["asked"]), Amounts(**budget["used"])
    assert budget["cuts"] == used.cuts_from(asked)
    assert f"{used.num_texts} of 12 tuning texts" in told
    assert used.num_texts == bench.summary()["reference"]["num_prompts"] < 12
    assert used.num_held_out == bench.summary()["confirmed"]["num_prompts"] < 12
    assert used.confirm_repeats == bench.summary()["confirmed"]["num_repeats"]
    assert "plan      without a budget at most about " in told
    assert "plan      with 4:00 left about " in told
    assert budget["expected_s"].keys() == {"reference", "outlook", "search", "confirm"}
    made = dict(digest_of(read_record(bench.study())).made)
    assert made["budget"] == f"4 minutes for the whole run, with {', '.join(budget['cuts'])}"


def test_without_a_budget_nothing_is_cut_and_a_long_run_is_told_what_a_budget_would_do(tmp_path: Path) -> None:
    bench = slow_bench(tmp_path, pace=0.02)
    bench.run(trials=30)
    summary, told = bench.summary(), bench.output.getvalue()
    assert summary["trials"]["counted"] == 30
    assert summary["budget"]["cuts"] == []
    assert summary["reference"]["num_prompts"] == summary["confirmed"]["num_prompts"] == 12
    assert "plan      in all at most about " in told
    assert "plan      --budget 30 would end within 30 minutes, with " in told


def test_a_short_run_is_told_how_long_it_takes_and_no_more(bench: Bench) -> None:
    bench.run(trials=4)
    lines = [line for line in bench.output.getvalue().splitlines() if line.startswith("plan ")]
    assert len(lines) == 1
    assert "reference 0:" in lines[0]
    assert "a token takes 10.0 ms" in lines[0]


def test_a_budget_that_suffices_changes_nothing(tmp_path: Path) -> None:
    with_budget, without = slow_bench(tmp_path / "a", 1.0), slow_bench(tmp_path / "b", 1.0)
    for bench in (with_budget, without):
        bench.folder.mkdir()
    with_budget.run(trials=20, budget_minutes=60.0)
    without.run(trials=20)
    values = [[(one.params, one.value) for one in bench.study().get_trials()] for bench in (with_budget, without)]
    assert values[0] == values[1]
    assert with_budget.summary()["budget"]["cuts"] == []
    assert "so nothing is cut" in with_budget.output.getvalue()


def test_a_budget_too_short_names_the_least_that_would_do_before_anything_is_measured(tmp_path: Path) -> None:
    bench = slow_bench(tmp_path)
    with pytest.raises(ValueError, match=r"budget_minutes: must be at least [\d.]+ here, .*, got 0\.5") as error:
        bench.run(trials=200, budget_minutes=0.5)
    assert bench.decoder.num_decoded == 0
    least = float(str(error.value).split("at least ")[1].split()[0])
    assert slow_bench(tmp_path).run(trials=200, budget_minutes=least) == 0


def test_a_budget_is_named_as_it_was_given_though_loading_took_longer() -> None:
    spec, clock = make_spec(trials=200, budget_minutes=0.5), FakeClock()
    subject = Subject(FakeDecoder(clock=clock), SPACE, prompts(12), prompts(12, first=500), FINGERPRINT, MODEL)
    tools = Tools(Reporter(io.StringIO()), StopSignal(), "search", clock)
    clock.advance(196.2)
    with pytest.raises(
        ValueError, match=r"must be at least [\d.]+ here, of which 3\.27 are over, for one trial .*, got 0\.5$"
    ):
        RunPlan(subject, spec, tools, 0.0, None)


def test_a_resumed_run_counts_its_own_minutes_and_keeps_the_texts(tmp_path: Path) -> None:
    first = slow_bench(tmp_path)
    first.run(trials=200, budget_minutes=4.0)
    done = counted(first.study().get_trials())
    again = slow_bench(tmp_path)
    assert again.run(trials=200, budget_minutes=4.0) == 0
    assert 0.75 * 4 <= minutes(again) <= 1.02 * 4
    assert counted(again.study().get_trials()) > done
    one, other = (summary["budget"]["used"] for summary in (first.summary(), again.summary()))
    assert [one[name] for name in ("num_texts", "max_new_tokens")] == [
        other[name] for name in ("num_texts", "max_new_tokens")
    ]


def long_bench(folder: Path) -> Bench:
    """That decodes 33 tokens a prompt, if it may."""
    return Bench(folder, FakeDecoder(pace=SLOW, num_tokens=33))


def test_new_tokens_are_cut_once_and_every_later_run_decodes_as_many(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"max_new_tokens": 33, "trials": 200}
    first = long_bench(tmp_path)
    fingerprint = replace(FINGERPRINT, max_new_tokens=33)
    first.run(fingerprint=fingerprint, budget_minutes=3.0, **spec)
    used = first.summary()["budget"]["used"]["max_new_tokens"]
    assert 16 <= used < 33
    assert first.summary()["fingerprint"]["max_new_tokens"] == used
    assert json.loads(first.paths.best.read_text())["provenance"]["max_new_tokens"] == used
    cases = Reference.from_json(first.study().user_attrs["reference"]).cases
    assert {len(case.reference_ids) for case in cases} == {used}
    # The same command, and the same without a budget, go on with as many tokens.
    done = counted(first.study().get_trials())
    again = long_bench(tmp_path)
    assert again.run(fingerprint=fingerprint, **spec | {"trials": done + 2}) == 0
    assert again.summary()["fingerprint"]["max_new_tokens"] == used
    assert f"{used} of 33 new tokens" in again.summary()["budget"]["cuts"]
    # Another number is another study.
    with pytest.raises(FingerprintMismatch, match=f"max_new_tokens was {used}, now 30"):
        long_bench(tmp_path).run(fingerprint=replace(fingerprint, max_new_tokens=30), **spec | {"max_new_tokens": 30})


def test_what_few_trials_leave_goes_to_the_confirm_stage(tmp_path: Path) -> None:
    many, few = slow_bench(tmp_path / "many"), slow_bench(tmp_path / "few")
    for bench, trials in ((many, 200), (few, 2)):
        bench.folder.mkdir()
        bench.run(trials=trials, budget_minutes=6.0)
    assert few.summary()["trials"]["counted"] == 2
    assert few.summary()["seconds"]["confirm"] > 1.2 * many.summary()["seconds"]["confirm"]
    assert minutes(few) <= 6.1


def test_the_time_limit_bounds_the_trials_within_a_budget(tmp_path: Path) -> None:
    bench = slow_bench(tmp_path)
    bench.run(trials=200, budget_minutes=15.0, timeout_s=60.0)
    assert "time limit of 60 s reached" in bench.output.getvalue()
    assert bench.summary()["seconds"]["search"] < 60 + 2 * 5 * 6.5
    assert minutes(bench) <= 15.1


def test_regimes_share_a_budget(tmp_path: Path) -> None:
    bench = slow_bench(tmp_path)
    assert bench.run_regimes("greedy", "t0.7", trials=400, budget_minutes=12.0) == 0
    assert 0.7 * 12 <= minutes(bench) <= 12.3
    assert bench.summary()["by_regime"].keys() == {"greedy", "t0.7"}


def test_a_regime_has_its_turn_with_the_first_ones_length_though_the_budget_is_gone(tmp_path: Path) -> None:
    bench = slow_bench(tmp_path)

    def slowly(_ids: Sequence[int], _config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
        bench.decoder.clock.now += 20.0 if out.ids and not bench.decoder.is_sampled else 0.0
        return out

    bench.decoder.then = slowly
    assert bench.run_regimes("greedy", "t0.7", trials=8, budget_minutes=6.0) == 0
    assert minutes(bench) > 6.0
    greedy, warm = (bench.study(part).user_attrs["first_plan"] for part in (None, "t0.7"))
    assert json.loads(greedy)["used"]["max_new_tokens"] == json.loads(warm)["used"]["max_new_tokens"]
    assert DecodeConfig.load(bench.paths.best).regime_names == ("greedy", "t0.7")


def test_a_budget_is_refused_where_it_is_not_followed() -> None:
    with pytest.raises(ValueError, match=r"budget_minutes: must not be given in a per-group search, got 5"):
        make_spec(per_group=True, budget_minutes=5.0)
    with pytest.raises(ValueError, match="budget_minutes"):
        make_spec(budget_minutes=0.0)


@given(
    st.floats(0.001, 3.0),
    st.floats(0.0, 0.5),
    st.floats(0.0, 10.0),
    st.floats(1.0, 1e5),
    st.integers(1, 300),
)
def test_a_plan_fits_and_is_never_empty(
    token_s: float, further_s: float, prompt_s: float, left_s: float, trials: int
) -> None:
    work, pace = replace(WORK, trials=trials), Pace(token_s, further_s, prompt_s)
    try:
        plan = make_plan(work, pace, left_s)
    except ValueError as error:
        least = 60 * float(str(error).split("at least ")[1].split()[0])
        assert least > left_s
        plan = make_plan(work, pace, least)  # as it said
        left_s = least
    assert plan.total_s <= left_s
    assert plan.num_trials >= 1 or plan.total_s == sum(plan.asked_s.values())
    for name, value in asdict(plan.amounts).items():
        assert value <= getattr(plan.asked, name)
        assert value >= 1 or name == "num_choosing"
    assert plan.amounts.num_held_out >= 4
    assert plan.amounts.max_new_tokens >= 16


def test_prompts_go_first_then_tokens_repeats_candidates_and_the_last_prompts() -> None:
    full = WORK.amounts(PACE)
    levels = list(WORK.levels(full))
    for one, other in itertools.pairwise(levels):
        assert all(getattr(other, name) <= value for name, value in asdict(one).items())

    def first_cut(name: str) -> int:
        return next(i for i, one in enumerate(levels) if getattr(one, name) < getattr(full, name))

    cuts = [first_cut(name) for name in ("num_texts", "max_new_tokens", "confirm_repeats", "num_candidates")]
    assert cuts == sorted(cuts)
    assert next(i for i, one in enumerate(levels) if one.num_held_out < 8) == len(levels) - 1


def test_a_study_that_is_begun_keeps_its_texts_and_tokens() -> None:
    cases = tuple(PromptCase(f"p{i}", (i, 1, 2), (3, 4, 5)) for i in range(20))
    work = replace(WORK, kept=frozenset({"reference"})).on(Reference(cases, 5, 10.0, 0.01, 8.0, ()))
    plan = make_plan(work, PACE, 600.0)
    assert plan.limits
    assert (plan.amounts.num_texts, plan.amounts.prompts_per_trial, plan.amounts.max_new_tokens) == (20, 5, 64)


def test_time_that_is_left_at_the_end_is_the_confirm_stages() -> None:
    over = WORK.after("reference", "outlook", "search")
    full = over.confirm_s(WORK.amounts(PACE), PACE)
    assert make_plan(over, PACE, full * 1.1).cuts == []
    assert make_plan(over, PACE, full * 0.9).cuts != []
    late = make_plan(over, PACE, 0.0, at_least=True)  # it always runs
    assert (late.amounts.num_held_out, late.amounts.confirm_repeats, late.amounts.num_candidates) == (4, 1, 1)


def test_the_pace_is_what_the_steps_take() -> None:
    pace = measure_pace(FakeDecoder(clock=FakeClock()), prompts(5), 7, FakeClock())
    assert pace.token_s == pytest.approx(0.01)
    assert pace.further_s == pytest.approx(0.01 * 0.03)
    assert pace.decoding_s(17, 3) - pace.decoding_s(17, 2) == pytest.approx(16 * pace.token_s)
    seen = pace.as_seen(2 * pace.decoding_s(17, 2), 17)  # the pair takes twice as long
    assert seen.decoding_s(17) == pytest.approx(2 * pace.decoding_s(17))


def test_prompts_are_spread_over_the_file() -> None:
    assert [one.ids[0] for one in spread(prompts(12), 4)] == [0, 3, 6, 9]
    assert spread(prompts(3), 5) == prompts(3)
    assert spread(prompts(3), 0) == ()


def test_sublayers_that_there_was_no_time_to_read_are_like_the_nearest_of_their_kind() -> None:
    clock, space = FakeClock(), SearchSpace(24, 4, tuple(range(24)), tuple(range(24)), ())

    def agreement(mask: SkipMask) -> float:
        clock.advance(1.0)
        return 1.0 - sum(mask.attention[:12]) / 24 - sum(mask.mlp) / 100

    found = measure_sensitivity(agreement, space, seconds=11.5, clock=clock)
    assert clock.now == 1 + 2 * 6
    by_name = {one.name: one for one in found.sublayers}
    assert [one.name for one in found.sublayers] == list(space.bit_names)
    assert by_name["skip.attn.03"].leave_one_out == by_name["skip.attn.00"].leave_one_out
    assert by_name["skip.attn.23"].leave_one_out == by_name["skip.attn.16"].leave_one_out == 1.0
    assert by_name["skip.mlp.09"].leave_one_out == by_name["skip.mlp.08"].leave_one_out
    whole = measure_sensitivity(agreement, space)
    assert whole == measure_sensitivity(agreement, space, seconds=1e9, clock=clock)


@pytest.mark.slow
def test_the_command_plans_on_a_real_model(
    tiny_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*tiny_study, "--budget", "30", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "plan      in all at most about 0:" in told
    assert "within the 30:00 that are left, so nothing is cut" in told
    assert run.main([*tiny_study, "--budget", "0.0001"]) == 2
    assert "budget_minutes: must be at least " in capsys.readouterr().err
    assert run.main([*tiny_study, "--budget", "30"]) == 0
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert summary["budget"]["minutes"] == 30.0
    assert summary["trials"]["counted"] == 4
