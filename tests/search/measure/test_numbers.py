"""Statistics, pooling, choosing and confirming against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from layerskip import DecodeConfig, DecodeStats, PromptLookup, SkipMask, SuffixLookup
from layerskip.analysis.intervals import geometric_mean, log_spread, prompt_interval, ratio_interval
from layerskip.config.usual_lookups import lookup_alone
from search.confirm.stage import Candidate, choose, shortlist, summarise
from search.measure.by_position import seconds_by_position
from search.measure.pairs import Pair, Timed, add_up
from search.measure.reference import Reference, prompts_for
from search.study.leaderboard import Entry, Standings, make_standings
from search.study.space import SearchSpace
from search.study.trials import counted
from tests.search.helpers.fakes import NUM_LAYERS, SPACE


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="positive"):
            geometric_mean(bad)


def test_interval_of_few_prompts_is_students() -> None:
    # logs 0, ln 2, ln 4: mean ln 2, standard deviation ln 2, t(0.975, 2) = 4.30265
    interval = ratio_interval([1.0, 2.0, 4.0], seed=0)
    assert math.log(interval.low) == pytest.approx(math.log(2) * (1 - 4.30265 / math.sqrt(3)), rel=1e-5)
    assert math.log(interval.high) == pytest.approx(math.log(2) * (1 + 4.30265 / math.sqrt(3)), rel=1e-5)


def test_a_single_prompt_is_expected_in_a_wider_interval() -> None:
    # The same logs: t * ln 2 * sqrt(1 + 1/3) around ln 2.
    interval = prompt_interval([1.0, 2.0, 4.0])
    half = 4.30265 * math.log(2) * math.sqrt(4 / 3)
    assert math.log(interval.low) == pytest.approx(math.log(2) - half, rel=1e-5)
    assert math.log(interval.high) == pytest.approx(math.log(2) + half, rel=1e-5)
    assert prompt_interval([1.5]) is None


def test_interval_of_many_prompts_is_a_seeded_bootstrap() -> None:
    ratios = [1.0 + 0.05 * (i % 5) for i in range(24)]
    interval = ratio_interval(ratios, seed=1)
    assert interval is not None
    assert interval == ratio_interval(ratios, seed=1)
    mean, spread = geometric_mean(ratios), 0.065 / math.sqrt(24)
    assert interval.low == pytest.approx(mean * math.exp(-1.96 * spread), rel=0.01)
    assert interval.high == pytest.approx(mean * math.exp(1.96 * spread), rel=0.01)


def test_intervals_that_are_points_or_unknown() -> None:
    assert ratio_interval([1.5], seed=0) is None
    for count in (2, 20):
        interval = ratio_interval([1.5] * count, seed=0)
        assert (interval.low, interval.high) == (pytest.approx(1.5), pytest.approx(1.5))


def test_noise_of_an_a_a_run() -> None:
    assert log_spread([math.exp(0.03), math.exp(-0.04)]) == pytest.approx(math.sqrt((0.0009 + 0.0016) / 2))
    assert log_spread([]) == 0.0


def stats(drafted: list[int], accepted: list[int], rounds: int) -> DecodeStats:
    return DecodeStats(
        num_drafted=sum(drafted),
        num_accepted=sum(accepted),
        num_rounds=rounds,
        drafted_by_position=drafted,
        accepted_by_position=accepted,
    )


def test_acceptance_is_totals_over_totals() -> None:
    total = add_up([stats([4, 2], [4, 1], 4), stats([6], [0], 6)])
    assert total.acceptance_rate == 5 / 12
    assert total.mean_accepted_length == (5 + 10) / 10
    assert total.accepted_by_position == [4, 1]
    assert total.drafted_by_position == [10, 2]
    assert add_up([DecodeStats()]).acceptance_rate is None


def pair(plain: float, fast: float, *, tie: bool = False) -> Pair:
    """The prompt's own forward halves the gain: 10 against 12 tokens/s are 10 against 11 with it."""
    return Pair(
        "p", Timed(plain, plain, False, DecodeStats()), Timed(fast, (plain + fast) / 2, tie, stats([2], [1], 2))
    )


def test_confirmed_numbers_by_hand() -> None:
    passes = [[pair(10, 12), pair(20, 30, tie=True)], [pair(11, 13), pair(22, 31)], [pair(90, 14), pair(24, 90)]]
    # medians: plain 11 and 22, fast 13 and 31
    confirmed = summarise(passes, seed=0)
    assert confirmed.plain_tokens_per_s == pytest.approx(math.sqrt(11 * 22))
    assert confirmed.tokens_per_s == pytest.approx(math.sqrt(13 * 31))
    assert confirmed.speedup == confirmed.tokens_per_s / confirmed.plain_tokens_per_s
    assert confirmed.speedup == pytest.approx(math.sqrt(13 / 11 * 31 / 22))
    assert (confirmed.num_prompts, confirmed.num_repeats) == (2, 3)
    assert (confirmed.num_identical, confirmed.num_ties) == (1, 1)
    assert confirmed.acceptance_rate == 0.5
    assert confirmed.mean_accepted_length == 1.5


def test_the_end_to_end_speedup_is_taken_from_its_own_medians() -> None:
    """Only the speedup of decoding was told; with the prompts' forwards it is a smaller one."""
    passes = [[pair(10, 12), pair(20, 30)], [pair(11, 13), pair(22, 31)], [pair(90, 14), pair(24, 90)]]
    # medians: plain 11 and 22; fast (10 + 12) / 2, (11 + 13) / 2, (90 + 14) / 2 -> 12, and 25, 26.5, 57 -> 26.5
    confirmed = summarise(passes, seed=0, repeated_ngram_share=0.4)
    assert confirmed.end_to_end_speedup == pytest.approx(math.sqrt(12 / 11 * 26.5 / 22))
    assert confirmed.end_to_end_speedup_ci_low is not None
    assert confirmed.end_to_end_speedup_ci_high is not None
    assert confirmed.end_to_end_speedup_ci_low < confirmed.end_to_end_speedup < confirmed.end_to_end_speedup_ci_high
    assert confirmed.repeated_ngram_share == 0.4


def along(plain: list[float], fast: list[float]) -> Pair:
    """Two decodings of a text with the seconds of their tokens after the first."""
    return Pair("p", *(Timed(1.0, 1.0, False, DecodeStats(token_s=token_s)) for token_s in (plain, fast)))


def test_seconds_by_position_are_those_of_tokens_that_both_ways_reached() -> None:
    """A study kept one speedup a text, whatever its length, where the gain grows with the text."""
    # 128 timed tokens of the first pair, as its plain text ended earlier (a tie parts them): two tokens a bin.
    long = along([1.0] * 128, [0.5] * 127 + [0.25] + [9.0] * 2)
    short = along([3.0, 3.0, 3.0], [1.0, 2.0, 3.0])
    kept = seconds_by_position([long, short])
    assert (kept.bin_tokens, kept.longest, len(kept.num_tokens)) == (2, 129, 64)
    assert kept.num_tokens == (4, 3) + (2,) * 62
    assert kept.plain_s == (8.0, 5.0) + (2.0,) * 62
    assert kept.speculative_s == (4.0, 4.0) + (1.0,) * 61 + (0.75,)
    assert kept.spans[:2] + kept.spans[-1:] == [(2, 3), (4, 5), (128, 129)]
    assert kept.speedups[:2] == [8 / 4, 5 / 4]
    assert kept.speedups_up_to[:3] == [8 / 4, 13 / 8, 15 / 9]
    assert kept.speedups_up_to[-1] == sum(kept.plain_s) / sum(kept.speculative_s)
    assert seconds_by_position([along([], []), along([1.0], [])]) is None


def test_one_prompt_confirms_nothing() -> None:
    confirmed = summarise([[pair(10, 30)]], seed=0)
    assert confirmed.speedup == pytest.approx(3.0)
    assert confirmed.speedup_ci_low < 1.0 < confirmed.speedup < confirmed.speedup_ci_high


def entry(text: str, gamma: int, speedup: float = 1.2, lower: float = 1.1, trials: tuple[int, ...] = (0,)) -> Entry:
    config = DecodeConfig(skip_mask=SkipMask.parse(text), gamma=gamma)
    return Entry(config, SPACE.to_params(config), trials, 5, speedup, lower)


def test_the_fastest_of_those_that_stayed_to_the_end_is_chosen() -> None:
    fastest, fast, slow = (Candidate(entry("6:1-4", 4), (ratio,) * 16) for ratio in (1.300, 1.299, 1.250))
    dropped = Candidate(entry("6:1", 1), (1.4,) * 8)
    out = Candidate(entry("6:none", 1), (), "not lossless")
    assert choose([slow, dropped, fast, out, fastest]) == [fastest, fast, slow, dropped]
    assert choose([out]) == []


def standings_of(*entries: Entry) -> Standings:
    return Standings(entries, {}, 0.1)


def test_no_more_than_half_of_the_candidates_share_a_mask() -> None:
    first, second, third, fourth = (entry("6:1-4", gamma) for gamma in (4, 5, 3, 6))
    other, last = entry("6:1-3", 4), entry("6:2", 2)
    standings = standings_of(first, second, third, other, fourth, last)
    assert shortlist(standings, 4) == (first, second, other, last)
    assert shortlist(standings, 3) == (first, second, other)
    assert shortlist(standings, 1) == (first,)
    # Nobody else to ask: the same mask fills the places.
    assert shortlist(standings_of(first, second, third, fourth), 3) == (first, second, third)
    assert shortlist(standings_of(first, second, third, other), 4) == (first, second, third, other)
    assert shortlist(standings_of(), 4) == ()


def trial(text: str, steps: list[int], ratios: list[float], **options: Any) -> FrozenTrial:
    return trial_of(SPACE, DecodeConfig(skip_mask=SkipMask.parse(text), gamma=2), steps, ratios, **options)


def trial_of(
    space: SearchSpace,
    config: DecodeConfig,
    steps: list[int],
    ratios: list[float],
    *,
    stopped: bool = False,
    number: int = 0,
    forecasts: tuple[list[float], float] | None = None,
) -> FrozenTrial:
    distributions: dict[str, BaseDistribution] = space.distributions
    attrs: dict[str, object] = {"lossless": True, "stopped_early": stopped, "prompt_steps": steps, "ratios": ratios}
    if forecasts:
        attrs |= {"forecast_ratios": forecasts[0], "forecast_speedup": forecasts[1]}
    params = space.to_params(config)
    own = {name: distributions[name] for name in params}
    made = create_trial(params=params, distributions=own, value=1.0, user_attrs=attrs)
    made.number = number
    return made


def test_a_lucky_trial_ranks_below_a_proven_config() -> None:
    lucky = trial("6:1", [0, 1, 2, 3], [1.33, 1.32, 1.34, 1.33], number=9)
    noisy = [[1.40, 1.22, 1.38, 1.21], [1.23, 1.39, 1.22, 1.38], [1.38, 1.38, 1.23, 1.23], [1.22, 1.23, 1.39, 1.40]]
    proven = [trial("6:2", [0, 1, 2, 3], ratios, number=i) for i, ratios in enumerate(noisy)]
    standings = make_standings([lucky, *proven], SPACE, 0.08, 4)
    assert standings.leader.config.skip_mask.skipped_layers == (2,)
    assert standings.leader.trials == (0, 1, 2, 3)
    assert standings.leader.num_pairs == 16
    assert standings.entries[1].speedup > standings.leader.speedup


def test_other_prompts_are_compared_as_if_on_the_same() -> None:
    easy, hard = [1.5] * 4, [1.2] * 4
    both = [trial("6:1", [0, 1, 2, 3], easy, number=0), trial("6:1", [4, 5, 6, 7], hard, number=1)]
    others = [trial(f"6:{i}", [0, 1, 2, 3], [1.4] * 4, number=i) for i in (2, 3, 4)]
    others += [trial(f"6:{i}", [4, 5, 6, 7], [1.12] * 4, number=i + 3) for i in (2, 3, 4)]
    standings = make_standings([*both, *others], SPACE, 0.01, 4)
    assert standings.effects[0] == pytest.approx(0.0, abs=0.01)
    assert standings.effects[5] == pytest.approx(math.log(1.12 / 1.4), abs=0.06)
    assert standings.leader.speedup == pytest.approx(1.5, rel=0.04)
    assert standings.standardised([4, 5], [1.2, 1.2]) == pytest.approx(1.5, rel=0.06)
    assert standings.standardised([0, 99], [1.5, 1.5]) == pytest.approx(1.5, rel=0.01)


def test_luck_with_prompts_that_was_forecast_is_no_speed() -> None:
    # On its own prompts the first one is faster; but it was forecast to like these by far more than the average one.
    lucky = trial("6:1", [0, 1], [1.6, 1.5], number=0, forecasts=([1.65, 1.55], 1.3))
    solid = trial("6:2", [0, 1], [1.4, 1.4], number=1, forecasts=([1.4, 1.4], 1.4))
    stopped = trial("6:3", [0], [0.8], stopped=True, number=2, forecasts=([1.0, 1.0], 1.0))
    standings = make_standings([lucky, solid, stopped], SPACE, 0.01, 2)
    assert standings.interaction_weight > 0.9
    assert [one.trials for one in standings.entries] == [(1,), (0,)]
    # Between what was forecast and what was measured with the prompts' part taken out.
    measured = 1.4 / (math.sqrt(1.6 * 1.5 / (1.65 * 1.55)) * 1.3)
    assert 1.4 / 1.3 < standings.entries[0].speedup / standings.entries[1].speedup < measured
    liked = math.log(2.0)
    assert standings.standardised([7], [2.0], [liked]) == pytest.approx(2.0 ** (1 - standings.interaction_weight))
    assert standings.standardised([7, 8], [2.0, 0.5], [liked, -liked]) == pytest.approx(1.0)
    # One trial without a forecast, of an older study, say: then none is used, and all are compared as measured.
    plain = trial("6:4", [0, 1], [1.2, 1.2], number=3)
    standings = make_standings([lucky, solid, stopped, plain], SPACE, 0.01, 2)
    assert standings.interaction_weight == 0.0
    assert standings.entries[0].trials == (0,)
    assert standings.standardised([7], [2.0], [liked]) == pytest.approx(2.0)


def test_one_trial_is_drawn_towards_its_forecast_and_many_stand_for_themselves() -> None:
    """Forecasts are 5 % too high for all; one config is measured above its own by luck, one really is above it."""

    def of(layer: int, number: int, speedup: float, forecast: float) -> FrozenTrial:
        wobble = np.random.default_rng(100 * layer + number).permutation([0.9, 1.11, 0.91, 1.1])
        steps, ratios = [4 * (number % 4) + i for i in range(4)], (speedup * wobble).tolist()
        return trial(f"6:{layer}", steps, ratios, number=number, forecasts=([forecast] * 4, forecast))

    usual = [
        of(layer, layer - 1, forecast / 1.05, forecast) for layer, forecast in ((1, 1.2), (2, 1.3), (3, 1.4), (4, 1.35))
    ]
    lucky = of(0, 0, 1.40, 1.30)
    proven = [of(5, number, 1.40, 1.30) for number in range(12)]
    standings = make_standings([*usual, lucky, *proven], SPACE, 0.01, 4)
    by_layer = {entry.config.skip_mask.skipped_layers[0]: entry for entry in standings.entries}
    assert by_layer[5].speedup == pytest.approx(1.40, rel=0.02)
    assert 1.30 / 1.05 < by_layer[0].speedup < by_layer[5].speedup - 0.02
    for layer, forecast in ((1, 1.2), (2, 1.3), (4, 1.35)):
        assert by_layer[layer].speedup == pytest.approx(forecast / 1.05, rel=0.05)
    assert standings.leader is by_layer[5]
    # A config without a forecast: all are compared as measured.
    blind = trial("6:2", [0, 1, 2, 3], [1.2] * 4, number=20)
    assert make_standings([*usual, lucky, blind], SPACE, 0.01, 4).leader.trials == (0,)  # type: ignore[union-attr]


def test_how_far_off_forecasts_are_for_hopeless_configs_says_nothing_about_leaders() -> None:
    """A lucky trial is drawn to its forecast as far with them as without."""

    def of(number: int, mask: str, speedup: float, forecast: float, *, stopped: bool = False) -> FrozenTrial:
        ratios = (speedup * np.random.default_rng(number).permutation([0.9, 1.11, 0.91, 1.1])).tolist()
        told = ([forecast] * 4, forecast)
        return trial(mask, [0, 1, 2, 3], ratios, number=number, stopped=stopped, forecasts=told)

    near = [of(i, f"6:{i}", one / 1.05, one) for i, one in enumerate((1.2, 1.3, 1.4, 1.35, 1.28))]
    lucky = of(5, "6:5", 1.40, 1.30)
    hopeless = [of(6 + i, f"6:0,{i + 1}", 0.7, one, stopped=True) for i, one in enumerate((0.75, 1.1, 0.72, 1.2, 0.9))]

    def drawn(trials: Sequence[FrozenTrial]) -> float:
        entries = make_standings(trials, SPACE, 0.01, 4).entries
        return next(entry.speedup for entry in entries if entry.trials == (5,))

    assert 1.30 / 1.05 < drawn([*near, lucky]) < 1.35
    assert drawn([*near, lucky, *hopeless]) == pytest.approx(drawn([*near, lucky]), rel=0.01)


def test_forecasts_that_ratios_do_not_follow_lose_their_weight() -> None:
    interactions = ([1.6, 1.2, 1.3, 1.5], 1.4)
    blind = [trial(f"6:{i}", [0, 1, 2, 3], [1.3] * 4, number=i, forecasts=interactions) for i in range(1, 6)]
    following = [
        trial(f"6:{i}", [0, 1, 2, 3], [1.5, 1.1, 1.2, 1.4], number=i, forecasts=interactions) for i in range(1, 6)
    ]
    weights = [make_standings(trials, SPACE, 0.01, 4).interaction_weight for trials in (blind[:1], blind, following)]
    assert 0.2 < weights[1] < weights[0] < 0.6
    assert weights[2] > 0.9


def test_stopped_trials_inform_but_never_lead() -> None:
    stopped = trial("6:1", [0], [9.0], stopped=True)
    assert make_standings([stopped], SPACE, 0.01, 4).leader is None
    assert not make_standings([], SPACE, 0.01, 4).entries


def test_of_a_drafter_whose_trials_were_all_stopped_early_the_best_goes_to_the_confirm_stage() -> None:
    space = replace(SPACE, drafters=("layer_skip", "prompt_lookup", "suffix"))
    masks = [DecodeConfig(skip_mask=SkipMask.parse(text), gamma=2) for text in ("6:1", "6:2", "6:3")]
    prompt, other = (lookup_alone(NUM_LAYERS, PromptLookup(min_match=least, max_match=16), 4) for least in (1, 2))
    suffix = lookup_alone(NUM_LAYERS, SuffixLookup(min_match=2), 4)
    trials = [
        trial_of(space, masks[0], [0, 1, 2], [1.5, 1.4, 1.6], number=0),
        trial_of(space, other, [0, 1], [0.9, 0.8], stopped=True, number=1),
        trial_of(space, prompt, [0, 1], [1.1, 1.0], stopped=True, number=2),
        trial_of(space, masks[1], [0], [1.0], stopped=True, number=3),
        trial_of(space, prompt, [0], [1.1], stopped=True, number=4),
    ]
    standings = make_standings(trials, space, 0.01, 3)
    assert [one.config for one in standings.entries] == [masks[0]]
    (best,) = standings.stopped  # of layer skipping there is one that was measured in full
    assert (best.config, best.trials, best.num_pairs, best.stopped_early) == (prompt, (2, 4), 3, True)
    assert best.lower < best.speedup < 1.2
    assert shortlist(standings, 1) == (*standings.entries, best)
    # Where some config of the drafter was measured in full, none is taken that was not.
    full = trial_of(space, other, [0, 1, 2], [0.9, 0.8, 0.9], number=5)
    stopped = trial_of(space, suffix, [0], [1.2], stopped=True, number=6)
    standings = make_standings([*trials, full, stopped], space, 0.01, 3)
    assert [one.config for one in shortlist(standings, 1)] == [masks[0], other, suffix]
    assert make_standings(trials[1:], space, 0.01, 3).leader is None


def test_hopeless_is_two_standard_errors_below_the_leader() -> None:
    leader = entry("6:1", 2, speedup=1.3)
    standings = Standings((leader,), {}, 0.1)
    bound = math.exp(-2 * 0.1 * math.sqrt(1 / 1 + 1 / 5))
    assert standings.is_hopeless(1.3 * bound * 0.99, 1)
    assert not standings.is_hopeless(1.3 * bound * 1.01, 1)
    assert standings.is_hopeless(1.3 * bound * 1.01, 4)
    assert not Standings((), {}, 0.1).is_hopeless(0.01, 1)


def test_what_counts_towards_the_total() -> None:
    done = [create_trial(value=1.0), create_trial(state=TrialState.PRUNED)]
    failed = create_trial(state=TrialState.FAIL, user_attrs={"failure": "MemoryError: x"})
    interrupted = create_trial(state=TrialState.FAIL, user_attrs={"failure": "interrupted"})
    killed = create_trial(state=TrialState.FAIL)
    assert counted([*done, failed, interrupted, killed]) == 3


def test_prompts_of_a_trial_follow_its_time() -> None:
    assert prompts_for(trial_seconds=3.0, pair_s=0.4) == 7
    assert prompts_for(trial_seconds=0.1, pair_s=5.0) == 4
    assert prompts_for(trial_seconds=900.0, pair_s=0.1) == 16
    assert prompts_for(trial_seconds=1.0, pair_s=0.0) == 16


def test_reference_survives_json_and_goes_round() -> None:
    from search.measure.pairs import PromptCase

    cases = tuple(PromptCase(f"p{i}", (i, 2), (3, 4)) for i in range(5))
    reference = Reference(cases, 3, 100.0, 0.01, 0.5, ("short",))
    assert Reference.from_json(reference.to_json()) == reference
    assert [reference.steps(i) for i in range(3)] == [(0, 1, 2), (3, 4, 0), (1, 2, 3)]
    assert SPACE.num_layers == NUM_LAYERS
