"""Outlook: measured once and reread, refused on another machine, followed by rechecks; and what it does to a search."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from layerskip import DecodeConfig, SkipMask
from layerskip.config.decode_config import DraftWeights
from search.context import Tools
from search.measure.decoder import Decoded
from search.measure.pairs import PromptCase
from search.measure.reference import Reference, ReferenceOptions, make_reference
from search.measure.subject import Subject
from search.outlook.forecast import Candidate, Pool
from search.outlook.opening import OutlookOpening
from search.outlook.outlook import Outlook, OutlookOptions, describe_outlook, outlook_facts
from search.predict.costs import pool_costs
from search.predict.more_texts import MAX_MORE
from search.stop import StopSignal
from search.study.attributes import CANNOT_WIN, COSTS, GAMMA_LOWERED, MORE, POOL, READINGS, SENSITIVITY, TEXTS
from search.study.fingerprint import Fingerprint
from search.study.leaderboard import make_standings
from search.study.prompts import EncodedPrompt
from search.study.space import SearchSpace
from search.study.trials import expected_gains, interactions_of, key_of
from search.terminal.reporter import Reporter
from search.trials.phase import HANDFUL, TrialPhase, TrialSetup
from search.trials.proposals import ProposeOptions
from search.trials.replay_proposer import ReplayProposer
from tests.search.helpers.fakes import FINGERPRINT, MODEL, NUM_LAYERS, SPACE, Bench, make_spec, prompts
from tests.search.helpers.outlook import PlantedTimer, WatchedDecoder, record

NUM_TOKENS = 17
NUM_COST_CALLS = 3 * (11 + 1)
"""A verification and two draft phases, 11 times and once to warm up."""
NUM_RECHECK_CALLS = 3 * (7 + 1)
OPTIONS = OutlookOptions(max_new_tokens=NUM_TOKENS, seed=0, trials=30, trial_seconds=1.0)


def reference_of(lengths: Sequence[int] = (NUM_TOKENS,) * 6) -> Reference:
    """A prompt of three tokens for each continuation of so many."""
    cases = tuple(PromptCase(f"p{i}", (i, 1, 2), tuple(range(length))) for i, length in enumerate(lengths))
    return Reference(cases, num_per_trial=5, plain_tokens_per_s=100.0, noise_sigma=0.02, pair_s=0.4, dropped=())


TWELVE = reference_of((NUM_TOKENS,) * 12)


def new_study() -> optuna.Study:
    return optuna.create_study(direction="maximize")


def planted(**changes: Any) -> WatchedDecoder:
    return WatchedDecoder(step_times=PlantedTimer(**changes))


def num_timer_calls(decoder: WatchedDecoder) -> int:
    assert isinstance(decoder.step_times, PlantedTimer)
    return decoder.step_times.num_calls


def open_(
    study: optuna.Study,
    decoder: WatchedDecoder,
    options: OutlookOptions = OPTIONS,
    reference: Reference | None = None,
    fingerprint: Fingerprint = FINGERPRINT,
    tuning: Sequence[EncodedPrompt] = (),
    space: SearchSpace = SPACE,
) -> Outlook:
    reference = reference or reference_of()
    return OutlookOpening(
        study, decoder, space, reference, fingerprint, options, prompts=tuning, clock=decoder.clock
    ).outlook()


def up_to(gamma_max: int) -> SearchSpace:
    return dataclasses.replace(SPACE, gamma_max=gamma_max)


def test_a_second_opening_measures_nothing() -> None:
    study, first, second = new_study(), planted(), planted(slowdown=lambda _repeat: 7.0)
    made = open_(study, first)
    assert num_timer_calls(first) == NUM_COST_CALLS
    assert first.num_readings > len(SPACE.bit_names)
    assert study.user_attrs.keys() == {COSTS, SENSITIVITY, POOL, READINGS, TEXTS, MORE}
    stored = dict(study.user_attrs)
    reread = open_(study, second)
    assert num_timer_calls(second) == 0
    assert second.num_readings == 0
    assert study.user_attrs == stored
    assert reread.costs == made.costs
    assert reread.predictor.cost == made.predictor.cost
    assert reread.sensitivity == made.sensitivity
    assert reread.num_readings == made.num_readings
    assert reread.pool == made.pool, "or near-equal predictions would be measured in another order"
    assert reread.texts == made.texts


@pytest.mark.parametrize(("seconds", "is_enough"), [(3.0, False), (30.0, True), (None, True)])
def test_trained_weights_are_read_on_all_texts_where_there_is_time(seconds: float | None, *, is_enough: bool) -> None:
    weights = DraftWeights(drafter="draft_model", path="/models/small", fingerprint="0" * 16)
    space = dataclasses.replace(SPACE, drafters=("layer_skip", "draft_model"), draft_weights=(weights,))
    decoder, options = planted(), replace(OPTIONS, trials=10, trial_seconds=20.0, seconds=seconds)
    decoder.reading_s = 0.3
    outlook = open_(new_study(), decoder, options, reference_of((NUM_TOKENS,) * 30), space=space)
    assert outlook.predictor.num_first < outlook.predictor.num_texts
    read_by = [len(one.texts) for one in decoder.forcings if weights in one.masks]
    assert sum(read_by) == (outlook.predictor.num_texts if is_enough else outlook.predictor.num_first)
    assert any(space.to_config(one.params).draft_weights == weights for one in outlook.pool.candidates)


@pytest.mark.parametrize(
    ("field", "there"), [("device", "cuda"), ("engine", "fused"), ("weights", "xyz"), ("num_threads", 7)]
)
def test_costs_of_something_else_are_refused_in_one_line(field: str, there: Any) -> None:
    study, decoder = new_study(), planted()
    open_(study, planted())
    stored = dict(study.user_attrs)
    here = getattr(FINGERPRINT, field)
    message = rf"^cost_model\.measured_on\.{field}: must be this run's {there!r}, got {here!r}; use another --study"
    with pytest.raises(ValueError, match=message) as caught:
        open_(study, decoder, fingerprint=dataclasses.replace(FINGERPRINT, **{field: there}))
    assert "\n" not in str(caught.value)
    assert (num_timer_calls(decoder), decoder.num_readings) == (0, 0)
    assert study.user_attrs == stored


def test_a_recheck_appends_pools_and_tells_the_drift() -> None:
    """Verifying four drafts rises from 1.12 to 1.48 target steps; a machine that is slower at all has not drifted."""
    study, timer = new_study(), PlantedTimer(verify_share=0.03)
    outlook = open_(study, WatchedDecoder(step_times=timer))
    calls, mask = timer.num_calls, SkipMask.contiguous(6, 1, 4)
    before = outlook.predictor.surface(DecodeConfig(skip_mask=mask, gamma=1))[2]
    timer.verify_share = 0.12
    assert outlook.recheck(study) == pytest.approx(1.48 / 1.12)
    assert timer.num_calls - calls == NUM_RECHECK_CALLS
    assert len(outlook.costs) == 2
    assert outlook.predictor.cost.verify_s == pytest.approx([0.01 * (1 + 0.075 * n) for n in range(7)])
    assert (outlook.predictor.surface(DecodeConfig(skip_mask=mask, gamma=1))[2] < before).all()
    for _ in range(2):
        outlook.recheck(study)
    assert outlook.predictor.cost.verify_s == pytest.approx([0.01 * (1 + 0.12 * n) for n in range(7)])
    timer.slowdown = lambda _repeat: 3.0
    assert outlook.recheck(study) == pytest.approx(1.48 / 1.12)
    timer.verify_share = 0.03
    assert outlook.recheck(study) == pytest.approx(1.0)
    assert len(outlook.costs) == 6
    reread = open_(study, planted())
    assert reread.costs == outlook.costs
    assert reread.predictor.cost == outlook.predictor.cost == pool_costs(outlook.costs)
    facts = outlook_facts(study)["costs"]
    assert facts["num_measured"] == 6
    assert (facts["first"]["verify_s"][4], facts["last"]["verify_s"][4]) == pytest.approx((0.0112, 3 * 0.0112))


DEAR: dict[str, Any] = {"fixed_s": 0.02, "verify_share": 0.25}
"""Two target steps a draft token: no config can win."""


@pytest.mark.parametrize("draft_threshold", [0.0, 0.4])
def test_the_reason_why_nothing_can_win_has_the_numbers(draft_threshold: float) -> None:
    decoder = planted(**DEAR)
    outlook, timer = open_(new_study(), decoder), decoder.step_times
    assert isinstance(timer, PlantedTimer)
    assert math.exp(outlook.pool.best.log_speedup) < 0.9
    mask = SkipMask.contiguous(6, 1, 4)
    config = DecodeConfig(skip_mask=mask, gamma=3, draft_threshold=draft_threshold)
    outlook.pool = Pool((Candidate(key_of(SPACE.to_params(config)), math.log(0.8125)), *outlook.pool.candidates))
    draft = timer.true_draft_s(mask, threshold=draft_threshold > 0) / timer.step_s
    agreement = outlook.predictor.agreement(mask)
    assert 0.9 < agreement < 1.0
    assert outlook.cannot_win() == (
        f"no config can win here: the best of {len(outlook.pool.candidates)} predicted masks, 6:1-4 at gamma 3, "
        f"reaches 0.812x before overhead; its draft agrees with the target in {agreement:.2f} of cases at {draft:.2f} "
        "target steps a token, and verifying 3 costs 1.75"
    )


@pytest.mark.parametrize(("speedup", "can_win"), [(0.999, False), (1.0, False), (1.001, True), (2.0, True)])
def test_only_above_one_something_can_win(speedup: float, can_win: bool) -> None:
    outlook = open_(new_study(), planted())
    outlook.pool = Pool((dataclasses.replace(outlook.pool.best, log_speedup=math.log(speedup)),))
    assert (outlook.cannot_win() is None) == can_win


@pytest.mark.parametrize("lengths", [(NUM_TOKENS,) * 5, (3, NUM_TOKENS, 2, 5)])
def test_more_drafts_than_any_text_has_room_for_are_refused(lengths: tuple[int, ...]) -> None:
    study, decoder, reference = new_study(), planted(), reference_of(lengths)
    message = r"^gamma_max: must be at most 15, two less than the longest continuation \(17 tokens\), .*, got 16$"
    with pytest.raises(ValueError, match=message) as caught:
        open_(study, decoder, reference=reference, space=up_to(16))
    assert "\n" not in str(caught.value)
    assert (num_timer_calls(decoder), decoder.num_readings, study.user_attrs) == (0, 0, {})
    outlook = open_(study, decoder, reference=reference, space=up_to(15))
    assert len(outlook.predictor.cost.verify_s) == 16


@pytest.mark.parametrize(
    ("trial_seconds", "reading_s", "expected"),
    [
        (20.0, 0.35, 3),  # 6 % of a trial is 1.2 s
        (20.0, 1.3, 1),  # at least one
        (20.0, 0.01, 4),  # at most four
        (1.0, 0.07, 2),  # short trials: 0.15 s
        (1.0, 0.0, 4),
    ],
)
def test_readings_of_a_proposal_fit_its_time(trial_seconds: float, reading_s: float, expected: int) -> None:
    study, decoder = new_study(), planted()
    # With the sensitivity known, no mask of the pool has been read before, and its time is that of its readings.
    study.set_user_attr(SENSITIVITY, open_(new_study(), planted()).sensitivity.to_json())
    decoder.reading_s = reading_s
    options = dataclasses.replace(OPTIONS, trial_seconds=trial_seconds)
    assert open_(study, decoder, options).num_readings == study.user_attrs[READINGS] == expected
    other = planted()
    other.reading_s = 5.0
    assert open_(study, other, options).num_readings == expected


@pytest.mark.parametrize(
    ("timeout_s", "expected_s"),
    [
        (None, 60.0),  # 30 trials of five prompts, 0.4 s each
        (100.0, 60.0),
        (7.0, 7.0),
    ],
)
def test_budgets_follow_the_time_that_trials_really_take(timeout_s: float | None, expected_s: float) -> None:
    spec = make_spec(trials=30, trial_seconds=20.0, prompts_per_trial=5, timeout_s=timeout_s)
    options = OutlookOptions.of(spec, reference_of())
    assert options.trial_seconds == pytest.approx(2.0)
    assert options.search_s == pytest.approx(expected_s)


def test_a_time_limit_bounds_what_is_predicted_before_the_first_trial() -> None:
    """Five per cent of 300 s instead of 2,000, and of that 40 for making texts, at 0.17 s a decoding."""
    tuning = tuple(dataclasses.replace(CUTTABLE[0], ids=tuple(range(50 * i, 50 * i + 40))) for i in range(60))
    limited = dataclasses.replace(LONG, timeout_s=300.0)
    free, bound = (open_(new_study(), quick(), one, tuning=tuning).predictor for one in (LONG, limited))
    assert (free.num_texts, bound.num_texts) == (6 + MAX_MORE, 6 + math.ceil(6 / 0.17))


@pytest.mark.parametrize(("reading_s", "num_first"), [(0.1, 12), (0.25, 7), (4.5, 4)])
def test_as_many_first_texts_are_read_as_can_be_afforded(reading_s: float, num_first: int) -> None:
    """Five seconds for 1.4 readings of each of twelve sublayers; four texts always."""
    decoder = planted()
    decoder.reading_s = reading_s
    assert open_(new_study(), decoder, reference=TWELVE).predictor.num_first == num_first


# More texts than the trials decode.

CUTTABLE = tuple(EncodedPrompt(f"t{i}", None, tuple(range(100 * i, 100 * i + 20)), is_text=True) for i in range(6))
LONG = dataclasses.replace(OPTIONS, trials=100, trial_seconds=20.0)
"""A full-fidelity reading may take three seconds, and making the texts 40."""


def quick() -> WatchedDecoder:
    """A reading of 10 ms, a decoding of 170."""
    return WatchedDecoder(step_times=PlantedTimer(), reading_s=0.01, noise=0.0)


def test_more_texts_are_made_of_the_tuning_prompts_and_kept() -> None:
    study, decoder = new_study(), quick()
    outlook = open_(study, decoder, LONG, tuning=CUTTABLE)
    assert decoder.num_decoded == 6 + 4 * 6, "the six whole ones, which the reference does not use, and four cuts each"
    assert (outlook.predictor.num_first, outlook.predictor.num_texts) == (6, 36)
    assert outlook.pool.num_full_fidelity >= 8
    assert outlook.pool.best.full_fidelity
    assert outlook_facts(study)["texts"] == {"num_first": 6, "num_reference_more": 0, "num_made": 30}
    lines = describe_outlook(outlook)
    assert f"configs predicted on 6 texts, the best {outlook.pool.num_full_fidelity} on 36; best" in lines[2]
    other = quick()
    again = open_(study, other, LONG, tuning=CUTTABLE)
    assert (other.num_decoded, other.num_readings) == (0, 0)
    assert again.pool == outlook.pool
    made = [[text.ids for text in one.forcings[-1].texts] for one in (decoder, other)]
    assert made[0] == made[1]


def test_texts_that_the_reference_has_are_not_made_again() -> None:
    decoder = quick()
    cases = tuple(PromptCase(one.prompt_id, one.ids, tuple(range(NUM_TOKENS))) for one in CUTTABLE)
    reference = dataclasses.replace(reference_of(), cases=cases)
    outlook = open_(new_study(), decoder, LONG, reference, tuning=CUTTABLE)
    assert outlook.predictor.num_texts == 30


@pytest.mark.parametrize(
    ("reading_s", "num_first", "num_texts"),
    [
        (0.01, 6, 36),
        (0.59, 6, 12),  # 1.2 seconds for a reading of all
        (1.0, 6, 7),
        (1.3, 6, 6),
        (5.0, 4, 4),  # not even the reference's
    ],
)
def test_a_full_fidelity_reading_has_as_many_texts_as_it_may_take_time(
    reading_s: float, num_first: int, num_texts: int
) -> None:
    study, decoder = new_study(), planted()
    # With the sensitivity known, the pool's time is that of its readings.
    study.set_user_attr(SENSITIVITY, open_(new_study(), planted()).sensitivity.to_json())
    decoder.reading_s = reading_s
    predictor = open_(study, decoder, LONG, tuning=CUTTABLE).predictor
    assert (predictor.num_first, predictor.num_texts) == (num_first, num_texts)
    fast = quick()
    again = open_(study, fast, LONG, tuning=CUTTABLE).predictor
    assert (again.num_first, again.num_texts) == (num_first, num_texts)


def test_a_study_without_more_texts_goes_on_without() -> None:
    """As one that was begun before there were any."""
    study = new_study()
    before = open_(study, quick(), LONG)
    assert not before.predictor.has_more
    kept = {name: value for name, value in study.user_attrs.items() if name != MORE}
    old = new_study()
    for name, value in kept.items():
        old.set_user_attr(name, value)
    decoder = quick()
    again = open_(old, decoder, LONG, tuning=CUTTABLE)
    assert (decoder.num_decoded, decoder.num_readings) == (0, 0)
    assert not again.predictor.has_more
    assert again.pool == before.pool
    assert old.user_attrs == kept
    options = ProposeOptions(4, 0.02, 5)
    one, other = (ReplayProposer.of(each, options).propose([], 0, np.random.default_rng(0)) for each in (before, again))
    assert one == other
    assert outlook_facts(old)["texts"] == {"num_first": 6, "num_reference_more": 0, "num_made": 0}


def test_a_config_that_owes_much_to_the_trials_texts_is_known_to() -> None:
    """Its interactions with its own prompts are kept, so that it can be taken out of what is measured."""
    study, decoder = new_study(), quick()
    outlook = open_(study, decoder, LONG, tuning=CUTTABLE)
    config = DecodeConfig(skip_mask=SkipMask.contiguous(6, 1, 4), gamma=4)
    told = outlook.describe_trial(config, [5, 2], [])
    alone = open_(new_study(), quick(), LONG).predictor
    assert told["forecast_ratios"] == pytest.approx(alone.forecast(config, [5, 2])[0], abs=1e-5)
    on_all = outlook.predictor.forecast(config, [])[1]
    assert told["forecast_speedup"] == pytest.approx(on_all, abs=1e-5)
    assert abs(on_all / alone.forecast(config, [])[1] - 1) > 0.01
    interactions = interactions_of(told)
    assert interactions == pytest.approx([math.log(one / on_all) for one in told["forecast_ratios"]], abs=1e-4)
    # Measured as forecast, it is taken for what it is worth on all texts.
    trial = record(study, SPACE, SPACE.to_params(config), told["forecast_ratios"], **told)
    leader = make_standings([trial], SPACE, 0.02, 2).leader
    assert leader.speedup == pytest.approx(on_all, rel=1e-4)


def test_stopped_and_resumed_with_more_texts_equals_uninterrupted() -> None:
    def trials(*totals: int) -> list[tuple[Any, ...]]:
        study = new_study()
        for total in totals:
            search(quick(), study, tuning=CUTTABLE, trials=total)
        attrs = ("origin", "considered", "forecast_ratios", "forecast_speedup")
        return [(one.params, one.value, *(one.user_attrs.get(name) for name in attrs)) for one in study.trials]

    whole, parts = trials(14), trials(5, 9, 14)
    assert whole == parts
    assert any(one[3] for one in whole)


def test_texts_of_middling_length_are_timed_in_the_middle_of_their_continuations() -> None:
    outlook = open_(new_study(), planted(), reference=reference_of((4, NUM_TOKENS, 8, 12, 10)))
    # Continuations of 8, 10 and 12 tokens: the middle, or earlier, so that seven more tokens are still within them.
    assert outlook.texts == ((2, 1, 2, 0), (4, 1, 2, 0, 1, 2), (3, 1, 2, 0, 1, 2, 3, 4))
    few = open_(new_study(), planted(), reference=reference_of((NUM_TOKENS, 9)))
    assert [len(text) for text in few.texts] == [3 + 2, 3 + 8]


def test_timed_steps_stay_within_the_positions_that_decoding_needs() -> None:
    """A prompt may fill the model's positions up to `max_new_tokens`: beyond them some models cannot run."""
    outlook = open_(new_study(), planted(), space=up_to(15))
    assert all(len(text) + 15 + 1 <= 3 + NUM_TOKENS for text in outlook.texts)


def test_a_trial_is_told_what_it_is_expected_to_show() -> None:
    study, decoder = new_study(), planted()
    outlook, timer = open_(study, decoder), decoder.step_times
    assert isinstance(timer, PlantedTimer)
    config = DecodeConfig(skip_mask=SkipMask.contiguous(6, 1, 4), gamma=4, draft_threshold=0.3)
    told = outlook.describe_trial(config, [5, 2, 0], [])
    assert told["forecast_ratios"] == pytest.approx(outlook.predictor.forecast(config, [5, 2, 0])[0], abs=1e-5)
    assert [len(counts) for counts in told["replayed_forwards"]] == [3, 3, 3]
    assert told["draft_step_ms"] == pytest.approx(1000 * timer.true_draft_s(config.skip_mask, threshold=True), abs=1e-4)
    assert timer.drafted[-1][0] == outlook.texts[2]
    json.dumps(told)


def test_a_trial_on_prompts_that_are_not_read_for_every_mask_is_predicted_as_well() -> None:
    """A slow model's texts are too many to be read for every mask."""
    slow, quick_one = planted(), planted()
    slow.reading_s, quick_one.reading_s = 9.0, 0.1
    few, every = (open_(new_study(), one, reference=TWELVE) for one in (slow, quick_one))
    assert (few.predictor.num_texts, every.predictor.num_texts) == (4, 12)
    config = DecodeConfig(skip_mask=SkipMask.contiguous(6, 1, 4), gamma=4, draft_threshold=0.3)
    told = [one.describe_trial(config, [3, 8, 11], []) for one in (few, every)]
    for name in ("replayed_forwards", "predicted_ratios", "forecast_ratios"):
        assert len(told[0][name]) == 3
        assert told[0][name] == told[1][name]


def test_facts_of_a_study_with_and_without_an_outlook() -> None:
    study = new_study()
    nothing = {"num_predicted": 0, "best": []}
    assert outlook_facts(study) == {
        "costs": None,
        "sensitivity": None,
        "pool": nothing,
        "texts": None,
        "cannot_win": None,
        GAMMA_LOWERED: None,
    }
    outlook = open_(study, planted())
    facts = outlook_facts(study)
    assert facts["costs"]["first"] == facts["costs"]["last"] == json.loads(outlook.costs[0].to_json())
    assert facts["costs"]["learnt"] is None
    assert facts["sensitivity"] == json.loads(outlook.sensitivity.to_json())
    assert facts["pool"]["num_predicted"] == len(outlook.pool.candidates)
    assert [row[0] for row in facts["pool"]["best"]] == [
        str(SPACE.to_mask(one.params)) for one in outlook.pool.candidates[:3]
    ]
    json.dumps(facts)


# What an outlook does to a search.


def slower(_prompt_ids: Sequence[int], config: DecodeConfig) -> float:
    """Whatever drafts loses a tenth."""
    return 0.9 if config.speculates else 1.0


def dear(**changes: Any) -> WatchedDecoder:
    return WatchedDecoder(step_times=PlantedTimer(**DEAR), **changes)


def search(
    decoder: WatchedDecoder,
    study: optuna.Study | None = None,
    *,
    tuning: Sequence[EncodedPrompt] = prompts(8),
    **spec: Any,
) -> tuple[optuna.Study, str | None, str]:
    """The trials of a run in memory: (study, why it must end, what was said)."""
    study, output = study or new_study(), io.StringIO()
    reference = make_reference(decoder, tuning, ReferenceOptions(NUM_LAYERS, 0, 1.0, 5))
    outlook = open_(study, decoder, reference=reference, tuning=tuning)
    subject = Subject(decoder, SPACE, tuple(tuning), (), FINGERPRINT, MODEL)
    tools = Tools(Reporter(output), StopSignal(), "python -m search.run", decoder.clock)
    broken = TrialPhase(TrialSetup(study, subject, make_spec(**spec), reference, outlook, tools)).run()
    return study, broken, output.getvalue()


def test_where_nothing_can_win_a_handful_confirms_it(tmp_path: Path) -> None:
    """The whole run: what is exported does not speculate. The same command again measures nothing more."""
    for _ in range(2):
        bench = Bench(tmp_path, dear(gain=0.0, noise=0.0, interaction=slower))
        assert bench.run(trials=30, num_confirm_candidates=1, confirm_repeats=1) == 0
        summary = bench.summary()
        assert summary["trials"]["counted"] == HANDFUL
        assert summary["verdict"] == "do not speculate"
        assert "no config can win here: the best of" in summary["cannot_win"]
        assert "the best is estimated at 0.9" in summary["cannot_win"]
        assert DecodeConfig.load(bench.paths.best).gamma == 0
        assert f"measuring {HANDFUL} trials to confirm (--force searches on)" in bench.output.getvalue()


def test_a_short_study_is_no_longer_than_it_was_to_be() -> None:
    study, broken, _ = search(dear(gain=0.0, noise=0.0, interaction=slower), trials=3)
    assert broken is None
    assert len(study.trials) == 3
    assert "no config can win here" in study.user_attrs[CANNOT_WIN]


def test_force_searches_on() -> None:
    study, broken, said = search(dear(gain=0.0, noise=0.0, interaction=slower), trials=8, force=True)
    assert broken is None
    assert len(study.trials) == 8
    assert CANNOT_WIN not in study.user_attrs
    assert "no config can win" not in said


def test_a_measured_win_searches_on_against_the_prediction() -> None:
    study, broken, said = search(dear(), trials=8)
    assert broken is None
    assert len(study.trials) == 8
    assert CANNOT_WIN not in study.user_attrs
    assert "no config can win here" in said
    assert "x all the same: searching on" in said


def test_a_forced_win_leaves_no_word_that_nothing_can_win() -> None:
    """What summary.json would say of it."""
    study, _, _ = search(dear(gain=0.0, noise=0.0, interaction=slower), trials=8)
    search(dear(), study, trials=12, force=True)
    assert max(trial.user_attrs["speedup"] for trial in study.trials) > 1.1
    assert outlook_facts(study)["cannot_win"] is None


def test_a_search_that_has_settled_ends_and_says_what_more_trials_could_bring() -> None:
    whole, _, _ = search(planted(), trials=30)
    gains = expected_gains(whole.trials, len(whole.trials))
    assert len(whole.trials) == 30
    assert len(gains) > 10
    bound = sorted(gains)[len(gains) // 2]
    ends = [i for i in range(3, len(gains) + 1) if max(gains[i - 3 : i]) <= 0.01 + max(bound, 0.0)]
    assert ends
    settled, broken, said = search(planted(), trials=30, until_settled=100 * (0.01 + max(bound, 0.0)))
    assert broken is None
    assert expected_gains(settled.trials, 30) == gains[: ends[0]]
    assert len(settled.trials) < 30
    assert f"settled after {len(settled.trials)} trials: no config that was not measured is expected to beat" in said
    again, _, said = search(planted(), settled, trials=30, until_settled=100 * (0.01 + max(bound, 0.0)))
    assert len(again.trials) == len(settled.trials)
    assert "settled after" in said
    search(planted(), settled, trials=30)
    assert len(settled.trials) == 30


def test_settling_needs_expectations() -> None:
    with pytest.raises(ValueError, match="until_settled: needs the sampler replay, which expects something; got tpe"):
        make_spec(sampler="tpe", until_settled=1.0)
    with pytest.raises(ValueError, match=r"until_settled: input should be greater than 0, got '0\.0'"):
        make_spec(until_settled=0.0)


def test_failures_in_the_handful_end_the_run() -> None:
    _, broken, _ = search(dear(gain=0.0, break_on=broken_draft), trials=30, max_failures=3, repeat_every=0)
    assert broken == "3 trials in a row failed, the last one with RuntimeError: driver gone"


def broken_draft(config: DecodeConfig) -> Exception | None:
    return RuntimeError("driver gone") if config.skip_mask.num_skipped else None


@dataclass
class Drifting(WatchedDecoder):
    """Verifying becomes dearer once a hundred outputs are decoded."""

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        self.step_times.verify_share = 0.03 if self.num_decoded < 100 else 0.12
        return super().decode(prompt_ids, config, seed)


def test_costs_are_looked_at_again_every_twenty_trials() -> None:
    study, _, said = search(Drifting(step_times=PlantedTimer()), trials=22)
    assert outlook_facts(study)["costs"]["num_measured"] == 2
    assert "verifying four tokens costs 1.32 times what it did at the start" in said


@pytest.mark.parametrize(
    ("given", "asked", "lengths", "searched"),
    [
        (None, 16, (NUM_TOKENS, 9), 15),
        (None, 16, (18, 9), 16),
        (None, 16, (3, 3), 1),
        (None, 16, (2, 2), 16),  # refused for another reason
        (16, 16, (NUM_TOKENS, 9), 16),  # refused
    ],
)
def test_a_gamma_limit_that_nobody_asked_for_is_lowered_to_what_fits(
    given: int | None, asked: int, lengths: tuple[int, ...], searched: int
) -> None:
    subject = Subject(planted(), up_to(asked), prompts(12), prompts(12, first=500), FINGERPRINT, MODEL)
    reference = reference_of(lengths)
    fitted, note = subject.with_room(reference, make_spec(gamma_max=given))
    assert fitted.space == up_to(searched)
    if searched == asked:
        assert (fitted, note) == (subject, None)
    else:
        assert note == f"gamma 1..{searched} instead of 1..16: the longest continuation has {lengths[0]} tokens"
        assert fitted.with_room(reference, make_spec()) == (fitted, None), "told once"


def test_no_tree_is_larger_than_what_a_round_verifies() -> None:
    """However short the texts turn out to be: its verification would have no cost."""
    where = replace(up_to(16), lookup_gamma_max=14, siblings_max=3, trees=(0, 4, 8, 16))
    assert where.trees == (0, 4, 8, 16)
    subject = Subject(planted(), where, prompts(12), prompts(12, first=500), FINGERPRINT, MODEL)
    fitted, _ = subject.with_room(reference_of((16, 9)), make_spec())
    assert (fitted.space.gamma_limit, fitted.space.trees) == (14, (0, 4, 8))


def test_what_was_lowered_is_told_and_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, space=up_to(16))
    assert bench.run(trials=6) == 0
    told = "gamma 1..15 instead of 1..16: the longest continuation has 17 tokens"
    assert bench.output.getvalue().count(told) == 1
    assert bench.summary()[GAMMA_LOWERED] == told
    assert {trial.distributions["gamma"].high for trial in bench.trials()} == {15}  # type: ignore[attr-defined]
    again = Bench(tmp_path, space=up_to(16))
    assert again.run(trials=7) == 0
    assert told in again.output.getvalue()
