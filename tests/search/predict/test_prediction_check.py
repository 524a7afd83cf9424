"""How good predictions were, and how good they could have been: noise is told from what was measured again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.predict.accuracy import (
    check_predictions,
    describe_checks,
    noise_of_repeats,
    prediction_check_of,
    replay_check_of,
    upper_half_of,
)

NOISE, NUM_CONFIGS, NUM_PROMPTS = 0.05, 60, 4


def trial_of(
    config: int, steps: list[int], ratios: list[float], predicted: list[float], *, stopped_early: bool = False
) -> FrozenTrial:
    attributes: dict[str, Any] = {"prompt_steps": steps, "ratios": ratios, "predicted_ratios": predicted}
    attributes |= {"lossless": True, "stopped_early": stopped_early}
    return create_trial(
        state=TrialState.COMPLETE,
        value=1.0,
        params={"gamma": config},
        distributions={"gamma": IntDistribution(0, 1_000)},
        user_attrs=attributes,
    )


def study_of(*, again: int, noise: float = NOISE, error: float = 0.0) -> list[FrozenTrial]:
    """Every config once, and the first `again` of them a second time on the same prompts."""
    rng, trials = np.random.default_rng(3), []
    truth = np.exp(rng.normal(0.2, 0.1, size=(NUM_CONFIGS, 1)) + rng.normal(0.0, 0.1, size=NUM_PROMPTS))
    told = truth * np.exp(rng.normal(0.0, 1.0, size=(NUM_CONFIGS, 1)) * error)
    for config in (*range(NUM_CONFIGS), *range(again)):
        measured = truth[config] * np.exp(rng.normal(0.0, noise, size=NUM_PROMPTS))
        trials.append(trial_of(config, list(range(NUM_PROMPTS)), measured.tolist(), told[config].tolist()))
    return trials


def test_noise_is_learnt_from_pairs_measured_again_and_from_nothing_else() -> None:
    sigma, freedom = noise_of_repeats(study_of(again=NUM_CONFIGS))
    assert freedom == NUM_CONFIGS * NUM_PROMPTS
    assert sigma == pytest.approx(NOISE, rel=0.15)
    # Prompts differ by twice the noise, configs too: neither counts.
    assert noise_of_repeats(study_of(again=0)) == (None, 0)
    assert noise_of_repeats(study_of(again=4)) == (None, 16)
    assert noise_of_repeats(study_of(again=5))[0] is not None


def test_a_trial_that_stopped_early_counts_for_the_prompts_it_met() -> None:
    first, again = study_of(again=1)[0], study_of(again=1)[-1]
    short = trial_of(0, [0, 1, 2, 3], again.user_attrs["ratios"][:2], again.user_attrs["predicted_ratios"])
    _, freedom = noise_of_repeats([first, short])
    assert freedom == 2


def test_right_predictions_do_as_well_as_the_noise_allows_and_wrong_ones_worse() -> None:
    right, wrong = (prediction_check_of(study_of(again=20, error=error), 0.001) for error in (0.0, 0.08))
    assert wrong is not None
    assert right.noise_freedom == 80
    assert right.noise_sigma == pytest.approx(NOISE, rel=0.3)
    assert right.spearman == pytest.approx(right.noise_spearman, abs=0.06)
    assert right.median_abs_error == pytest.approx(right.noise_median_abs_error, rel=0.4)
    # Half of a normal distribution lies within 0.6745 of its spread; four pairs a trial halve the spread.
    assert right.noise_median_abs_error == pytest.approx(0.6745 * NOISE / math.sqrt(NUM_PROMPTS), rel=0.3)
    assert wrong.spearman is not None
    assert wrong.noise_spearman is not None
    assert wrong.spearman < wrong.noise_spearman - 0.1


def test_without_repeats_plain_against_plain_stands_in_and_is_named() -> None:
    trials = study_of(again=0)
    check = prediction_check_of(trials, 0.02)
    assert (check.noise_sigma, check.noise_freedom) == (0.02, 0)
    assert "(2.0 % a pair, plain against plain)" in describe_checks(check_predictions(trials, 0.02))[-1]
    told = describe_checks(check_predictions(study_of(again=20), 0.02))[-1]
    assert "% a pair, 80 pairs measured again)" in told
    unknown = prediction_check_of(trials)
    assert (unknown.noise_sigma, unknown.noise_spearman) == (None, None)
    assert len(describe_checks(check_predictions(trials))) == 1


def ranked(order: list[int], *, first: int = 0) -> list[FrozenTrial]:
    """Configs on two prompts, each measured a little faster than the one before; `order` is that of the predictions."""
    return [
        trial_of(first + i, [0, 1], [1 + 0.01 * (first + i)] * 2, [1 + 0.01 * (first + place)] * 2)
        for i, place in enumerate(order)
    ]


def test_hopeless_configs_do_not_raise_the_rank_correlation_of_the_faster_half() -> None:
    slow, fast = ranked(list(range(9))), ranked([8, 7, 6, 5, 4, 3, 2, 1, 0], first=9)
    check = prediction_check_of([*slow, *fast])
    assert check.spearman is not None
    assert check.spearman > 0.7
    assert (check.upper_half.num_configs, check.upper_half.num_prompts) == (9, 2)
    assert check.upper_half.spearman == pytest.approx(-1.0)
    assert check.upper_half.reason is None
    told = describe_checks(check_predictions([*slow, *fast]))[-1]
    assert f"rank correlation {check.spearman:.3f} (-1.000 over the 9 distinct configs of the faster half), " in told


def test_trials_of_a_config_are_pooled_into_one() -> None:
    """A second trial makes the slowest of the faster half its fastest, still with the lowest prediction."""
    trials = ranked(list(range(16)))
    assert upper_half_of(trials).spearman == pytest.approx(1.0)
    again = trial_of(8, [1, 0], [2.0, 2.0], [1.0, 1.0])
    half = upper_half_of([*trials, again])
    assert half.num_configs == 8
    # Measured last, predicted first of eight: 1 - 6 (7^2 + 7) / (8 (8^2 - 1)).
    assert half.spearman == pytest.approx(1 - 6 * (7**2 + 7) / (8 * 63))


def test_what_stopped_early_or_decoded_other_prompts_is_out() -> None:
    """Easy prompts speed up every config, which predictions know: that is no knowledge of configs."""
    trials = ranked([7, 6, 5, 4, 3, 2, 1, 0] * 2)
    alone = upper_half_of(trials)
    easy = [trial_of(i, [2, 3], [3.0 + i] * 2, [3.0 + i] * 2) for i in range(12)]
    stopped = [trial_of(100 + i, [0, 1], [3.0 + i] * 2, [3.0 + i] * 2, stopped_early=True) for i in range(12)]
    assert upper_half_of([*trials, *easy, *stopped]) == alone
    assert alone.spearman == pytest.approx(-1.0)


def test_too_few_configs_have_no_rank_correlation_and_the_reason_is_told() -> None:
    trials = ranked(list(range(14)))
    half = upper_half_of(trials, 0.01)
    assert (half.num_configs, half.spearman, half.noise_spearman) == (7, None, None)
    assert half.reason == "7 distinct configs in this half, fewer than 8"
    assert f"(faster half: {half.reason})" in describe_checks(check_predictions(trials))[-1]
    none = upper_half_of([])
    assert (none.num_configs, none.num_prompts, none.spearman) == (0, 0, None)
    alike = upper_half_of([trial_of(i, [0], [1.5], [1.0 + i]) for i in range(8)])
    assert (alike.num_configs, alike.spearman) == (8, None)
    assert alike.reason == "all predicted alike, or all measured alike"


def test_noise_leaves_less_of_the_faster_half_than_of_all() -> None:
    check = prediction_check_of(study_of(again=20))
    assert check.noise_spearman is not None
    half = check.upper_half
    assert half.spearman is not None
    assert half.noise_spearman is not None
    assert half.num_configs == NUM_CONFIGS / 2
    assert half.noise_spearman < check.noise_spearman
    assert half.spearman == pytest.approx(half.noise_spearman, abs=0.15)


def test_nothing_to_compare_is_no_check() -> None:
    assert check_predictions([], 0.02) == {"prediction": None, "replay": None, "replay_int8": None}
    assert describe_checks(check_predictions([], 0.02)) == []


def test_counts_are_not_compared_on_texts_that_parted_by_a_tie() -> None:
    def trial(*parted: bool) -> FrozenTrial:
        attributes: dict[str, Any] = {"replayed_forwards": [[5, 2], [7, 1]], "forwards": [[5, 2], [9, 3]]}
        if parted:  # not kept by studies from before
            attributes["is_tie_by_prompt"] = list(parted)
        return create_trial(state=TrialState.COMPLETE, value=1.0, user_attrs=attributes)

    assert [check and check.exact_share for check in map(replay_check_of, ([trial()], [trial(False, True)]))] == [
        0.0,
        1.0,
    ]
    assert replay_check_of([trial(True, True)]) is None


def test_drafts_with_rounded_weights_are_told_apart() -> None:
    def trial(live: int, bits: int | None = None) -> FrozenTrial:
        attributes: dict[str, Any] = {"replayed_forwards": [[5, 2]], "forwards": [[live, 2]]}
        choice = CategoricalDistribution([None, 8, 4] if bits == 4 else [False, True])
        params: dict[str, Any] = {"draft_bits": bits} if bits == 4 else {"draft_int8": bits == 8}
        return create_trial(
            state=TrialState.COMPLETE,
            value=1.0,
            params=params,
            distributions=dict.fromkeys(params, choice),
            user_attrs=attributes,
        )

    checks = check_predictions([trial(5), trial(7, 8), trial(7, 4)])
    assert (checks["replay"]["num_settings"], checks["replay"]["exact_share"]) == (1, 1.0)
    assert (checks["replay_int8"]["num_settings"], checks["replay_int8"]["exact_share"]) == (2, 0.0)
    exact, on_average = describe_checks(checks)
    assert "1 trials: exact in 100 %" in exact
    assert "2 trials with rounded weights, which can be right on average alone: error median 22.2 %" in on_average
