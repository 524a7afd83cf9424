"""Every rival on synthetic models: valid at any size, pure, and true to its own criterion."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from optuna.trial import FrozenTrial

from layerskip.analysis.teacher_forcing import DraftReadings
from layerskip.config.skip_mask import SkipMask
from search.rivals import STRATEGIES, Setup, departures_table, hidden_states
from search.rivals.bayesian import DraftVerify, Swift
from search.rivals.by_throughput import DynamicExit, LeaveOneOut, throughput
from search.rivals.common import bits_of, mean_confidences, union
from search.rivals.gaussian_process import GaussianProcess, upper_bound_points
from search.rivals.hidden_states import (
    Clasp,
    KnapSpec,
    StoredPlans,
    latency_weights,
    layer_plan,
    most_similar,
    plan_facts,
    sublayer_plan,
)
from search.study.space import DRAFT_THRESHOLD, GAMMA, TARGET_THRESHOLD, SearchSpace
from search.study.trials import counted
from search.trials.proposals import Proposal, ProposeOptions, measured_keys
from tests.search.helpers.fakes import SPACE
from tests.search.helpers.rivals import (
    FakeHints,
    OrthogonalStates,
    agreement_of,
    failed,
    make_setup,
    make_space,
    measured,
)

RIVALS = [name for name in STRATEGIES if name != "ours"]
PUBLISHED = [name for name in RIVALS if not STRATEGIES[name].with_settings]
SPACES = {
    "one layer": make_space(1, gamma_max=1),
    "one whole layer": make_space(1, whole=True, gamma_max=2),
    "two layers": make_space(2, gamma_max=2),
    "whole layers": make_space(6, whole=True),
    "six layers": SPACE,
    "some of eight layers": SearchSpace(8, 4, (), (), (2, 3, 5, 6)),
}


def make(name: str, space: SearchSpace, seed: int = 0, *, repeat_every: int = 0) -> Any:
    return STRATEGIES[name].proposer(make_setup(space, seed=seed, repeat_every=repeat_every))


def propose(proposer: Any, trials: list[FrozenTrial], seed: int = 0) -> Proposal:
    index = counted(trials)
    proposal: Proposal = proposer.propose(trials, index, np.random.default_rng([seed, index, 0]))
    return proposal


def follow(proposer: Any, space: SearchSpace, count: int) -> tuple[list[Proposal], list[FrozenTrial]]:
    """So many proposals, each measured before the next."""
    proposals: list[Proposal] = []
    trials: list[FrozenTrial] = []
    for number in range(count):
        proposals.append(propose(proposer, trials))
        params = proposals[-1].params
        assert params is not None
        trials.append(measured(space, params, number))
    return proposals, trials


def check_valid(proposal: Proposal, space: SearchSpace) -> None:
    assert proposal.params.keys() == space.distributions.keys()
    for name, one in space.distributions.items():
        assert one._contains(one.to_internal_repr(proposal.params[name])), (name, proposal.params[name])
    config = space.to_config(proposal.params)
    assert space.to_params(config) == proposal.params


FEW = ("one layer", "some of eight layers")
"""Enough for methods with our settings, whose masks are those of the methods alone."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if kind in FEW else pytest.mark.slow)
        for name in RIVALS
        for kind in (FEW if STRATEGIES[name].with_settings else SPACES)
    ],
)
def test_every_proposal_is_a_point_of_the_space_long_after_the_grid_ends(name: str, kind: str) -> None:
    space = SPACES[kind]
    proposals, trials = follow(make(name, space), space, 28)
    for number, proposal in enumerate(proposals):
        check_valid(proposal, space)
        if proposal.repeat_of is not None:
            assert proposal.repeat_of < number
            assert trials[proposal.repeat_of].params == proposal.params


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_eighty_layers(name: str) -> None:
    space = make_space(80, gamma_max=8)
    proposals, _ = follow(make(name, space), space, 7)
    for proposal in proposals:
        check_valid(proposal, space)


@pytest.mark.parametrize("name", RIVALS)
def test_a_proposal_follows_from_its_arguments_alone(name: str) -> None:
    """A proposer that has run all along says what a fresh one says, at every trial: so a resume cannot differ."""
    proposals, trials = follow(make(name, SPACE), SPACE, 12)
    for number in (0, 1, 7, 11):
        assert propose(make(name, SPACE), trials[:number]) == proposals[number]
    veteran = make(name, SPACE)
    propose(veteran, trials)
    assert propose(veteran, trials[:7]) == proposals[7]


@pytest.mark.parametrize("name", RIVALS)
def test_nothing_but_failures_is_no_reason_to_crash(name: str) -> None:
    space = SPACES["two layers"]
    proposer = make(name, space)
    trials: list[FrozenTrial] = []
    for number in range(30):
        proposal = propose(proposer, trials)
        check_valid(proposal, space)
        assert proposal.repeat_of is None
        assert proposal.params is not None
        trials.append(failed(space, proposal.params, number, "out of memory"))


@pytest.mark.parametrize("name", [one for one in RIVALS if one.partition("+")[0] not in ("random", "raw-tpe")])
def test_an_interrupted_trial_is_proposed_again_and_a_failed_one_is_not(name: str) -> None:
    _, trials = follow(make(name, SPACE), SPACE, 8)
    proposal = propose(make(name, SPACE), trials)
    assert proposal.params is not None
    interrupted = [*trials, failed(SPACE, proposal.params, 8, "interrupted")]
    assert propose(make(name, SPACE), interrupted) == proposal
    broken = propose(make(name, SPACE), [*trials, failed(SPACE, proposal.params, 8, "out of memory")])
    assert broken.params != proposal.params or broken.repeat_of is not None


def test_the_used_up_grid_measures_leaders_in_turn() -> None:
    space = make_space(3, gamma_max=2)
    proposals, trials = follow(make("layerskip", space), space, 4 + 8)
    first = [tuple(sorted(one.params.items())) for one in proposals[:4] if one.params]
    assert len(set(first)) == 4
    assert {space.to_config(dict(one)).skip_mask.exit_layer for one in first} == {1, 2}
    assert all(one.repeat_of is None for one in proposals[:4])
    again = Counter(one.repeat_of for one in proposals[4:])
    assert again == {0: 2, 1: 2, 2: 2, 3: 2}
    assert measured_keys(trials) == set(first)


def test_thresholds_and_gamma_are_each_papers_own() -> None:
    space = make_space(6, gamma_max=16)
    expected = {
        "draft-verify": ({12}, 0.6),
        "layerskip": (set(range(1, 17)), 0.0),
        "swift": ({16}, 0.8),
        "clasp": (set(range(1, 17)), 0.7),
        "knapspec": (set(range(1, 17)), 0.7),
        "leave-one-out": (set(range(1, 17)), 0.0),
    }
    for name, (gammas, threshold) in expected.items():
        for proposal in follow(make(name, space), space, 10)[0]:
            assert proposal.params[GAMMA] in gammas
            assert proposal.params[DRAFT_THRESHOLD] == threshold
            assert proposal.params[TARGET_THRESHOLD] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_clasp_finds_the_most_similar_layers_of_every_number(seed: int) -> None:
    lengths = np.random.default_rng(seed).uniform(0.1, 1.0, 12).tolist()
    states = OrthogonalStates(lengths)
    plan = layer_plan(states, SPACE)
    assert sorted(plan) == list(range(7))
    for count, mask in plan.items():
        assert len(mask.skipped_layers) == count == mask.num_skipped / 2
        best = max(
            (states.similarity(SkipMask.from_layers(6, one)), one) for one in itertools.combinations(range(6), count)
        )
        assert states.similarity(mask) == pytest.approx(best[0], abs=1e-12)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("whole", [False, True])
def test_knapspec_finds_the_most_similar_sublayers_of_every_budget(seed: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    states = OrthogonalStates(rng.uniform(0.1, 1.0, 12).tolist())
    bits = [mask for _, mask in bits_of(make_space(6, whole=whole))]
    weights = [int(one) for one in rng.integers(1, 6, len(bits))]
    plan = most_similar(states, bits, weights, -1.0)
    best: dict[int, float] = {}
    for size in range(len(bits) + 1):
        for places in itertools.combinations(range(len(bits)), size):
            saved = sum(weights[place] for place in places)
            similarity = states.similarity(union(6, [bits[place] for place in places]))
            best[saved] = max(best.get(saved, -1.0), similarity)
    assert plan.keys() == best.keys()
    for saved, mask in plan.items():
        assert sum(weight for bit, weight in zip(bits, weights, strict=True) if union(6, [bit, mask]) == mask) == saved
        assert states.similarity(mask) == pytest.approx(best[saved], abs=1e-12)


def test_layers_that_the_space_has_no_bit_for_are_run() -> None:
    """A plan over some layers alone starts from a draft that runs the others, and skips none of these."""
    states = OrthogonalStates(np.random.default_rng(3).uniform(0.1, 1.0, 16).tolist())
    space = SearchSpace(8, 4, (), (), (2, 3, 5, 6))
    for plan in (layer_plan(states, space), sublayer_plan(states, space, 1, 1)):
        assert plan[0] == SkipMask.none(8)
        for mask in plan.values():
            count = len(mask.skipped_layers)
            best = max(
                states.similarity(SkipMask.from_layers(8, one)) for one in itertools.combinations((2, 3, 5, 6), count)
            )
            assert states.similarity(mask) == pytest.approx(best, abs=1e-12)


def test_knapspec_lets_dissimilar_branches_die_and_keeps_the_ends() -> None:
    """Without attention 1 the state is a right angle away from the target's right there, whatever comes later."""
    states = OrthogonalStates([0.1, 0.1, 5.0, 0.1, 0.1, 5.0, 0.1, 0.1])
    masks = list(sublayer_plan(states, make_space(4), 1, 1).values())
    assert {mask.num_skipped for mask in masks} == {0, 1, 2, 3}
    for mask in masks:
        assert not any(mask.attention[i] or mask.mlp[i] for i in (0, 3))
        assert not mask.attention[1]


def test_stored_plans_are_those_of_the_states() -> None:
    states = OrthogonalStates(np.random.default_rng(1).uniform(0.1, 1.0, 12).tolist())
    stored = StoredPlans(json.loads(json.dumps(plan_facts(states, SPACE))))
    assert stored.layer_plan() == layer_plan(states, SPACE)
    for attention_s, mlp_s in ((1.0, 2.4), (2.6, 1.0), (1.0, 99.0), (0.0, 0.0)):
        weights = latency_weights(FakeHints(SPACE, attention_s=attention_s, mlp_s=mlp_s).cost)
        assert stored.sublayer_plan(*weights) == sublayer_plan(states, SPACE, *weights)
    with pytest.raises(ValueError, match="plans: must hold 'layers', computed from hidden states, got"):
        StoredPlans(None).layer_plan()


def test_latencies_become_small_whole_weights() -> None:
    for attention_s, mlp_s, expected in (
        (1.0, 2.4, (1, 2)),
        (2.6, 1.0, (3, 1)),
        (1.0, 99.0, (1, 5)),
        (0.0, 0.0, (1, 1)),
    ):
        assert latency_weights(FakeHints(SPACE, attention_s=attention_s, mlp_s=mlp_s).cost) == expected


def test_bits_are_in_the_order_in_which_they_run() -> None:
    mixed = SearchSpace(3, 2, attention_bits=(0, 2), mlp_bits=(0, 2), layer_bits=(1,))
    assert [str(mask) for _, mask in bits_of(mixed)] == ["3:a0", "3:m0", "3:1", "3:a2", "3:m2"]
    for name, mask in bits_of(mixed):
        config = mixed.to_config(
            {one: one == name for one in mixed.bit_names} | {GAMMA: 1, DRAFT_THRESHOLD: 0.0, TARGET_THRESHOLD: 0.0}
        )
        assert config.skip_mask == mask


def test_clasp_sweeps_numbers_first_and_then_around_the_leader() -> None:
    space = make_space(8, gamma_max=12)
    clasp = Clasp(make_setup(space))
    trials: list[FrozenTrial] = []
    seen = []
    for number in range(11):
        params = propose(clasp, trials).params
        assert params is not None
        config = space.to_config(params)
        seen.append((len(config.skip_mask.skipped_layers), config.gamma))
        trials.append(measured(space, params, number, speedup=2.0 if seen[-1] == (3, 10) else 1.0))
    assert seen[:7] == [(count, 10) for count in (4, 5, 3, 6, 2, 7, 1)]
    assert set(seen[7:9]) == {(3, 9), (3, 11)}
    assert set(seen[9:11]) == {(3, 8), (3, 12)}


@pytest.mark.parametrize("rival", [KnapSpec, LeaveOneOut])
def test_the_first_configs_are_the_masks_at_their_best_gamma_by_expected_throughput(rival: Any) -> None:
    hints = FakeHints(SPACE)
    configs = list(rival(make_setup(SPACE, hints)).configs())
    num_masks = len({config.skip_mask for config in configs})
    assert len(configs) == num_masks * SPACE.gamma_max
    cost, threshold = hints.cost, rival is KnapSpec

    def value(config: Any) -> float:
        agreement, gamma = agreement_of(config.skip_mask), config.gamma
        draft_s = cost.draft_s(config.skip_mask, threshold=threshold)
        return (1 - agreement ** (gamma + 1)) / (1 - agreement) / (gamma * draft_s + cost.verify_s[gamma])

    head = configs[:num_masks]
    assert len({config.skip_mask for config in head}) == num_masks
    assert [value(one) for one in head] == sorted((value(one) for one in head), reverse=True)
    for config in configs[num_masks:]:
        best = next(one for one in head if one.skip_mask == config.skip_mask)
        assert value(config) <= value(best) + 1e-12


def test_leave_one_out_takes_sublayers_by_loss_per_second() -> None:
    """A dear sublayer that saves much goes before a cheap one that saves nothing, and the masks are nested."""
    configs = LeaveOneOut(make_setup(SPACE, FakeHints(SPACE, attention_s=1e-5, mlp_s=1e-2))).configs()
    masks = sorted({config.skip_mask for config in configs}, key=lambda mask: mask.num_skipped)
    assert [mask.num_skipped for mask in masks] == list(range(1, 13))
    for smaller, larger in itertools.pairwise(masks):
        assert union(6, [smaller, larger]) == larger
    assert all(masks[5].mlp)
    assert not any(masks[5].attention)


def test_swift_skips_its_share_keeps_the_ends_and_only_gets_better() -> None:
    hints = FakeHints(SPACE)
    swift = Swift(make_setup(SPACE, hints, seed=3))
    best = []
    for index in range(4):
        mask = SPACE.to_config(swift.propose([], index, np.random.default_rng(0)).params or {}).skip_mask
        assert hints.num_asked == 25 * (index + 1)
        assert mask.num_skipped == 3, "45 % of the eight inner sublayers, rounded down"
        assert not any((mask.attention[0], mask.mlp[0], mask.attention[-1], mask.mlp[-1]))
        best.append(agreement_of(mask))
    assert best == sorted(best)
    assert len(set(swift._agreements[:24])) > 5
    last = swift._points[24]
    assert ((last > 0) & (last < 1)).any(), "the 25th step comes from the Gaussian process, on relaxed bits"


def test_swift_ends_once_the_agreement_is_good_enough() -> None:
    swift = Swift(make_setup(SPACE, FakeHints(SPACE, agree=lambda _mask: 0.96)))
    swift.propose([], 3, np.random.default_rng(0))
    assert len(swift._agreements) == 1


def test_draft_verify_learns_from_measured_speed() -> None:
    """On the fake landscape it leaves random search behind: all proposals after the first 20 beat the random mean."""
    _, trials = follow(DraftVerify(make_setup(SPACE)), SPACE, 40)
    _, random = follow(make("random", SPACE), SPACE, 40)
    early, late = (np.mean([trial.value for trial in part]) for part in (random, trials[20:]))
    assert late > 1.15 * early
    assert len(measured_keys(trials)) == 40


def test_gaussian_process_interpolates_and_climbs_its_bound() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((60, 3))
    values = 5 + 100 * (points[:, 0] - 0.5 * points[:, 1] ** 2)
    process = GaussianProcess(points, values)
    fresh = rng.random((50, 3))
    mean, deviation = process.predict(fresh)
    truth = 5 + 100 * (fresh[:, 0] - 0.5 * fresh[:, 1] ** 2)
    assert np.abs(mean - truth).max() < 10
    assert (np.abs(mean - truth) < 4 * deviation + 2).all()
    assert process.predict(points[:1])[1][0] < process.predict(np.full((1, 3), 9.0))[1][0]
    best = upper_bound_points(process, 3, 0.1, rng)
    assert best.shape == (2005, 3)
    assert best[0, 0] > 0.95
    assert best[0, 1] < 0.2


def test_equal_values_are_no_reason_to_crash() -> None:
    process = GaussianProcess(np.zeros((6, 2)), np.ones(6))
    mean, deviation = process.predict(np.zeros((1, 2)))
    assert mean[0] == pytest.approx(1.0)
    assert math.isfinite(deviation[0])


def test_the_registry_names_all_and_only_ours_is_set_up_elsewhere() -> None:
    published = ["random", "raw-tpe", "draft-verify", "layerskip", "del", "swift", "clasp", "knapspec", "leave-one-out"]
    assert list(STRATEGIES) == ["ours", *published, *(f"{name}+settings" for name in published)]
    for name, info in STRATEGIES.items():
        assert info.name == name
        assert info.about
        assert info.source
        assert (info.factory is None) == (name == "ours")
        assert info.with_settings == name.endswith("+settings")
    with pytest.raises(ValueError, match="strategy: must be a rival, got 'ours'"):
        STRATEGIES["ours"].proposer(make_setup(SPACE))


def test_every_paper_has_its_departures_in_the_table() -> None:
    rows = departures_table().splitlines()
    for name in PUBLISHED:
        info = STRATEGIES[name]
        own = [row for row in rows if row.startswith(f"| {name} ({info.source}) |")]
        assert len(own) == len(info.departures)
        assert bool(own) == info.source[:4].isdigit()
        assert all(row.rpartition(" | ")[2] in ("helps it |", "hurts it |", "either way |") for row in own)


def test_only_those_that_need_the_model_ask_it() -> None:
    for name in ("random", "raw-tpe", "draft-verify", "layerskip"):
        setup = Setup(SPACE, None, 0, ProposeOptions(4, 0.0, 3))  # type: ignore[arg-type]
        follow(STRATEGIES[name].proposer(setup), SPACE, 12)


def test_knapspec_drafts_with_the_whole_model_where_no_mask_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "MIN_SIMILARITY", 0.99)
    space = make_space(3)
    hints = FakeHints(space)
    hints.states = OrthogonalStates([0.1, 0.1, 9.0, 9.0, 0.1, 0.1])
    assert {str(config.skip_mask) for config in KnapSpec(make_setup(space, hints)).configs()} == {"3:none"}


@pytest.mark.parametrize("name", [one for one in RIVALS if STRATEGIES[one].with_settings])
def test_with_settings_masks_are_the_methods_and_the_rest_is_predicted(name: str) -> None:
    """Every new config has the predicted setting of its mask, each asked for once; and masks are not all the same."""
    hints = FakeHints(SPACE)
    proposer = STRATEGIES[name].proposer(make_setup(SPACE, hints))
    proposals, _ = follow(proposer, SPACE, 12)
    configs = [SPACE.to_config(one.params or {}) for one in proposals if one.origin != "repeat"]
    for config in configs:
        assert (config.gamma, config.draft_threshold, config.target_threshold) == (3, 0.35, 0.1)
    masks = {config.skip_mask for config in configs}
    assert len(masks) > 1 or name.startswith("swift"), "SWIFT measures its best mask so far"
    assert hints.num_settings == len(masks)


def test_with_settings_the_first_masks_are_those_of_the_method() -> None:
    for name in ("leave-one-out", "knapspec", "swift", "del"):
        one, other = (propose(make(full, SPACE), []).params for full in (name, f"{name}+settings"))
        assert one is not None
        assert other is not None
        assert SPACE.to_mask(one) == SPACE.to_mask(other)
        assert one != other


@pytest.mark.parametrize("name", RIVALS)
def test_every_fourth_trial_measures_a_leader_again(name: str) -> None:
    proposals, trials = follow(make(name, SPACE, repeat_every=4), SPACE, 12)
    for index in (3, 7, 11):
        again = proposals[index].repeat_of
        assert again is not None
        assert again < index
        assert trials[again].params == proposals[index].params


def test_del_orders_exits_by_expected_tokens_and_stops_between_sure_and_unsure() -> None:
    setup = make_setup(SPACE)
    configs = list(DynamicExit(setup).configs())
    assert len(configs) == 5 * SPACE.gamma_max
    assert {config.skip_mask.exit_layer for config in configs[:5]} == {1, 2, 3, 4, 5}
    cost = setup.hints.cost
    for config in configs[:5]:
        agreement = agreement_of(config.skip_mask)
        assert config.draft_threshold == pytest.approx(0.25 + 0.5 * agreement)
        draft_s = cost.draft_s(config.skip_mask, threshold=True)
        rates = [throughput(agreement, draft_s, g, cost.verify_s[g]) for g in range(1, SPACE.gamma_max + 1)]
        assert rates[config.gamma - 1] == max(rates)


def test_draft_verify_begins_with_its_probes_and_follows_the_acceptance_rate() -> None:
    space = make_space(40, gamma_max=12)
    rival = DraftVerify(make_setup(space))
    proposals, trials = follow(rival, space, 2)
    masks = [space.to_config(one.params or {}).skip_mask for one in proposals]
    assert [(mask.num_skipped_attention, mask.num_skipped_mlp) for mask in masks] == [(20, 0), (24, 10)]
    assert masks[0].attention[8]
    assert masks[1].mlp[35]

    def after(drafted: list[int], accepted: list[int]) -> float:
        for trial in trials:
            trial.set_user_attr("drafted_by_position", drafted)
            trial.set_user_attr("accepted_by_position", accepted)
        return rival.threshold_after(trials)

    assert rival.threshold_after(trials) == 0.6
    assert after([100, 50], [80, 30]) == pytest.approx(0.8), "two trials of 100 rounds that are often wrong"
    assert after([100, 50], [98, 48]) == pytest.approx(0.5), "the 50 rounds that ran to gamma's end say nothing"
    params = propose(rival, trials).params
    assert params[DRAFT_THRESHOLD] == 0.5
    assert after([4000, 0], [0, 0]) == 0.95


def test_mean_confidences_leave_out_what_is_no_draft() -> None:
    accepted = np.array([[[1, 0, 0], [1, 1, 0]]], dtype=np.float32)
    confidence = np.array([[[0.8, 0.2, 0.9], [0.6, 1.0, 0.9]]], dtype=np.float32)
    reading = DraftReadings(accepted, confidence, np.zeros((1, 2, 3), dtype=np.int64))
    assert mean_confidences(reading, np.array([3, 3])) == pytest.approx((0.8, 0.2))
    assert mean_confidences(reading, np.array([2, 2])) == pytest.approx((0.7, 0.0))
