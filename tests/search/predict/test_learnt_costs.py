"""Learnt costs: trials correct what was measured in a burst; the rest of the search is told at the first prices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from layerskip import DecodeConfig, DecodeStats, SkipMask
from search.measure.pairs import add_up
from search.predict.costs import CostModel
from search.predict.learnt_costs import CostLearner, learnt_costs_of, step_times_of
from search.study.attributes import COUNTS, PLAIN_STEP, ROUNDS
from search.study.space import SearchSpace
from tests.search.helpers.fakes import SPACE

ALONE = 0.01
NUM_LAYERS = SPACE.num_layers
TRUE = CostModel(
    verify_s=tuple(ALONE * one for one in (1.0, 1.24, 1.38, 1.48, 1.7, 1.63, 1.82)),
    fixed_s=0.04 * ALONE,
    attention_s=(0.036 * ALONE,) * NUM_LAYERS,
    mlp_s=(0.04 * ALONE,) * NUM_LAYERS,
    threshold_s=0.02 * ALONE,
    fit_error=0.01,
    context_tokens=100,
    measured_on={},
)
CHEAP = dataclasses.replace(
    TRUE,
    verify_s=tuple(ALONE * one for one in (1.0, 0.98, 1.12, 1.28, 1.3, 1.33, 1.39)),
    fixed_s=0.05 * ALONE,
    attention_s=(0.028 * ALONE,) * NUM_LAYERS,
    mlp_s=(0.03 * ALONE,) * NUM_LAYERS,
    threshold_s=0.0,
)
"""A burst in which the neighbours slept while drafts and verifications were timed."""


def trial_of(
    number: int,
    rng: np.random.Generator,
    *,
    cost: CostModel = TRUE,
    pace: float = 1.0,
    noise: float = 0.0,
    space: SearchSpace = SPACE,
    in_one_piece: bool = False,
    most_drafts: int = 6,
    without: Sequence[str] = (),
) -> FrozenTrial:
    """A trial whose steps cost what `cost` says, on a machine `pace` times slower than that, with noise of its own."""
    mask = SkipMask.from_sublayers(
        NUM_LAYERS,
        attention=rng.permutation(NUM_LAYERS)[: rng.integers(1, NUM_LAYERS)].tolist(),
        mlp=rng.permutation(NUM_LAYERS)[: rng.integers(1, NUM_LAYERS)].tolist(),
    )
    config = DecodeConfig(skip_mask=mask, gamma=6, draft_threshold=float(rng.choice([0.0, 0.3])))
    counts = rng.integers(0, 8, size=6)
    counts[most_drafts - 1] += 1
    counts[most_drafts:] = 0
    draft_s = pace * cost.draft_s(mask, threshold=config.draft_threshold > 0) * float(np.exp(noise * rng.normal()))
    verify_s = pace * np.array(cost.verify_s[1:]) * float(np.exp(noise * rng.normal()))
    drafts = np.arange(1, 7)
    attrs: dict[str, Any] = {
        "skip_mask": str(mask),
        "drafted_by_position": np.cumsum(counts[::-1])[::-1].tolist(),
        "draft_s": 0.0 if in_one_piece else float(draft_s * (counts @ drafts)),
        PLAIN_STEP: pace * cost.verify_s[0],
        ROUNDS: (counts * (verify_s + drafts * draft_s)).tolist(),
    }
    params = space.to_params(config)
    trial = create_trial(
        state=TrialState.COMPLETE,
        value=1.0,
        params=params,
        distributions={name: space.distributions[name] for name in params},
        user_attrs={name: value for name, value in attrs.items() if name not in without},
    )
    trial.number = number
    return trial


def trials_of(count: int, **options: Any) -> list[FrozenTrial]:
    rng = np.random.default_rng(0)
    return [trial_of(number, rng, **options) for number in range(count)]


def relative_errors(cost: CostModel) -> tuple[float, float]:
    """(Of verifications, of draft steps), the largest over numbers of drafts and over a hundred masks."""
    verify = np.abs(np.array(cost.verify_s) / TRUE.verify_s - 1.0).max()
    rng = np.random.default_rng(1)
    masks = [SkipMask.from_layers(NUM_LAYERS, rng.permutation(NUM_LAYERS)[:3].tolist()) for _ in range(100)]
    drafts = [
        abs(cost.draft_s(mask, threshold=watched) / TRUE.draft_s(mask, threshold=watched) - 1.0)
        for mask in masks
        for watched in (False, True)
    ]
    return float(verify), float(max(drafts))


def test_a_bad_burst_is_forgotten() -> None:
    before, after = relative_errors(CHEAP), relative_errors(CostLearner().learn(CHEAP, trials_of(60)))
    assert min(before) > 0.15
    assert max(after) < 0.02


def test_moments_of_single_trials_average_out() -> None:
    errors = relative_errors(CostLearner().learn(CHEAP, trials_of(60, noise=0.05)))
    assert max(errors) < 0.05


def test_only_ratios_to_the_plain_step_are_learnt() -> None:
    """A machine that is three times slower at everything has the same prices."""
    usual, slow = (CostLearner().learn(CHEAP, trials_of(30, pace=pace)) for pace in (1.0, 3.0))
    assert slow.verify_s == pytest.approx(usual.verify_s)
    assert slow.verify_s[0] == CHEAP.verify_s[0]
    assert slow.fixed_s == pytest.approx(usual.fixed_s)


def test_right_costs_stay_right() -> None:
    assert max(relative_errors(CostLearner().learn(TRUE, trials_of(3)))) < 1e-6


def test_a_few_trials_move_the_costs_a_little() -> None:
    """One trial against a burst: in between, nearer the truth."""
    one, sixty = (CostLearner().learn(CHEAP, trials_of(count)).verify_s[6] for count in (1, 60))
    assert CHEAP.verify_s[6] < one < sixty


def test_numbers_of_drafts_that_nobody_tried_move_with_the_others() -> None:
    learnt = CostLearner().learn(CHEAP, trials_of(40, most_drafts=3))
    assert learnt.verify_s[3] == pytest.approx(TRUE.verify_s[3], rel=0.02)
    assert CHEAP.verify_s[6] * 1.05 < learnt.verify_s[6] < TRUE.verify_s[6]


def test_rounds_in_one_piece_teach_what_verification_costs_beyond_the_drafts_terms() -> None:
    start = dataclasses.replace(TRUE, verify_s=CHEAP.verify_s)
    learnt = CostLearner().learn(start, trials_of(60, in_one_piece=True))
    assert learnt.verify_s == pytest.approx(TRUE.verify_s, rel=0.02)
    assert (learnt.fixed_s, learnt.attention_s, learnt.mlp_s) == (start.fixed_s, start.attention_s, start.mlp_s)


@pytest.mark.parametrize("without", [PLAIN_STEP, ROUNDS, "drafted_by_position"])
def test_trials_without_step_times_change_nothing(without: str) -> None:
    assert CostLearner().learn(CHEAP, trials_of(5, without=[without])) is CHEAP


def test_unfinished_trials_change_nothing() -> None:
    trials = trials_of(4)
    states = (TrialState.RUNNING, TrialState.FAIL, TrialState.PRUNED, TrialState.WAITING)
    for trial, state in zip(trials, states, strict=True):
        trial.state = state
    assert CostLearner().learn(CHEAP, trials) is CHEAP


def test_step_times_add_up_over_prompts() -> None:
    plain = [DecodeStats(num_target_only=10, decode_s=2.0), DecodeStats(num_target_only=30, decode_s=2.0)]
    speculative = [
        DecodeStats(round_s_by_drafted=[1.0, 2.0], rounds_by_drafted=[4, 3]),
        DecodeStats(round_s_by_drafted=[0.5, 0.0], rounds_by_drafted=[1, 0]),
    ]
    assert step_times_of(add_up(plain), add_up(speculative)) == {PLAIN_STEP: 0.1, ROUNDS: [1.5, 2.0], COUNTS: [5, 3]}


def test_no_step_times_of_nothing() -> None:
    some = DecodeStats(num_target_only=4, decode_s=1.0)
    assert step_times_of(DecodeStats(), DecodeStats()) == {}
    assert step_times_of(DecodeStats(decode_s=1.0), DecodeStats(round_s_by_drafted=[1.0])) == {}
    assert step_times_of(some, DecodeStats()) == {}


def test_a_study_tells_what_its_trials_taught() -> None:
    study = optuna.create_study(direction="maximize")
    assert learnt_costs_of(study, [CHEAP.to_json()]) is None
    study.add_trials(trials_of(20))
    assert learnt_costs_of(study, [TRUE.to_json(), CHEAP.to_json(), CHEAP.to_json()]) == CostLearner().learn(
        CHEAP, trials_of(20)
    )
    with pytest.raises(ValueError, match="cost_model: cannot be read"):
        learnt_costs_of(study, ["{}"])
