"""Sensitivity finds planted sublayers; the pool holds the optimum of the fake landscape and keeps to its budget."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from layerskip import SkipMask
from layerskip.analysis.teacher_forcing import ForcedText
from search.outlook.forecast import Candidate, Candidates, Pool, known_masks, make_pool
from search.predict.costs import measure_costs
from search.predict.predictor import Predictor
from search.predict.replay import TextRows
from search.predict.sensitivity import Sensitivity, SublayerWorth, measure_sensitivity
from search.study.space import SearchSpace
from search.study.trials import key_of
from tests.search.helpers.fakes import FINGERPRINT, SPACE, FakeClock
from tests.search.helpers.forcing import FakeForcing, FakeTimer
from tests.search.helpers.outlook import space_of

LENGTH = 17
SPACES = {
    "one layer": space_of(1),
    "one whole layer": space_of(1, whole=True, gamma_max=1),
    "whole layers": space_of(6, whole=True),
    "some whole layers": SearchSpace(4, 6, attention_bits=(1, 2, 3), mlp_bits=(1, 2, 3), layer_bits=(0,)),
    "80 layers": space_of(80),
}
any_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def candidates_of(space: SearchSpace, num_texts: int = 4) -> tuple[Candidates, FakeForcing]:
    forcing = FakeForcing([ForcedText((i,), tuple(range(LENGTH))) for i in range(num_texts)])
    cost = measure_costs(FakeTimer(), [(1,)], space, FINGERPRINT, repeats=1)
    rows = TextRows(forcing.lengths, forcing.target_probs, LENGTH)
    return Candidates(Predictor(forcing, rows, cost), space), forcing


def planted(space: SearchSpace, critical: dict[str, float], asked: list[SkipMask]) -> Sensitivity:
    """Of an agreement that every skipped sublayer lowers by a weight of its own, small but for the critical ones."""
    weights = {name: 0.001 * (i + 1) for i, name in enumerate(space.bit_names)} | critical

    def agreement(mask: SkipMask) -> float:
        asked.append(mask)
        return 1.0 - sum(weights[name] for name, skipped in space.to_bits(mask).items() if skipped)

    return measure_sensitivity(agreement, space)


@pytest.mark.parametrize("whole", [False, True])
def test_planted_critical_sublayers_are_found(whole: bool) -> None:
    space = space_of(8, whole=whole)
    critical = {"skip.layer.03": 0.3, "skip.layer.06": 0.2} if whole else {"skip.attn.03": 0.3, "skip.mlp.06": 0.2}
    asked: list[SkipMask] = []
    found = planted(space, critical, asked)
    weights = {name: critical.get(name, 0.001 * (i + 1)) for i, name in enumerate(space.bit_names)}
    assert {one.name: one.leave_one_out for one in found.sublayers} == pytest.approx(
        {name: 1.0 - weight for name, weight in weights.items()}
    )
    # Added to the thin draft, or taken out of it: in a sum of weights the same.
    assert {one.name: one.keep_one_out for one in found.sublayers} == pytest.approx(weights)
    assert [one.name for one in found.sublayers] == list(space.bit_names)
    assert found.order() == sorted(space.bit_names, key=weights.__getitem__)
    assert found.order()[:-3:-1] == list(critical)
    assert len(asked) == 2 * len(space.bit_names) + 1
    assert found.base == str(SkipMask.early_exit(8, 2))
    assert found.base_agreement == pytest.approx(1.0 - sum(w for name, w in weights.items() if int(name[-2:]) >= 2))


@any_space
def test_sensitivity_of_any_space_and_its_json(space: SearchSpace) -> None:
    asked: list[SkipMask] = []
    found = planted(space, {}, asked)
    assert [one.name for one in found.sublayers] == list(space.bit_names)
    allowed = all(not (mask.attention[i] ^ mask.mlp[i]) for mask in asked for i in space.layer_bits)
    assert allowed
    text = found.to_json()
    assert "\n" not in text
    assert Sensitivity.from_json(text) == found


def test_the_pool_holds_the_best_mask_of_all() -> None:
    """All 256 masks of four layers by brute force; the pool reads a quarter of them and has the best."""
    space = space_of(4)
    everywhere, _ = candidates_of(space)
    bits = itertools.product([False, True], repeat=8)
    best = max(everywhere.of(space.to_mask(dict(zip(space.bit_names, one, strict=True)))).log_speedup for one in bits)
    candidates, forcing = candidates_of(space)
    sensitivity = measure_sensitivity(candidates.predictor.agreement, space)
    pool = make_pool(candidates, space, sensitivity, seed=0, seconds=1e9, max_readings=64)
    assert pool.best.log_speedup == pytest.approx(best)
    assert pool.best.log_speedup > math.log(1.3)
    assert forcing.num_readings < 100


@pytest.mark.parametrize("seed", range(3))
def test_the_pool_reaches_the_fake_decoders_optimum(seed: int) -> None:
    """The four middle layers of six, whole: see `fakes.true_speedup`."""
    candidates, _ = candidates_of(SPACE)
    sensitivity = measure_sensitivity(candidates.predictor.agreement, SPACE)
    pool = make_pool(candidates, SPACE, sensitivity, seed=seed, seconds=1e9)
    assert SPACE.to_mask(pool.best.params) == SkipMask.contiguous(6, 1, 4)


def test_climbing_leaves_the_known_shapes_by_single_flips() -> None:
    """The best mask is no known shape and not in the order of sensitivity either, which here misleads."""
    space = space_of(6)
    candidates, _ = candidates_of(space)
    odd = SkipMask.from_sublayers(6, attention=[0, 2, 4], mlp=[1, 5])
    candidates.of = lambda mask: Candidate(  # type: ignore[method-assign]
        key_of(space.to_bits(mask) | {"gamma": 1, "draft_threshold": 0.0, "target_threshold": 0.0}),
        -float(sum(a != b for a, b in zip(mask.attention + mask.mlp, odd.attention + odd.mlp, strict=True))),
    )
    misleading = Sensitivity(tuple(SublayerWorth(name, 1.0, 0.0) for name in space.bit_names), "6:none", 1.0)
    pool = make_pool(candidates, space, misleading, seed=0, seconds=1e9)
    assert odd not in known_masks(space)
    assert space.to_mask(pool.best.params) == odd
    assert pool.best.log_speedup == 0.0


@any_space
def test_a_pool_of_any_space_is_valid_sorted_and_read_back(space: SearchSpace) -> None:
    candidates, forcing = candidates_of(space, num_texts=2)
    sensitivity = planted(space, {}, [])
    pool = make_pool(candidates, space, sensitivity, seed=0, seconds=1e9, max_readings=40)
    masks = [space.to_mask(one.params) for one in pool.candidates]
    assert len(set(masks)) == len(masks) == forcing.num_readings <= 40
    assert [one.log_speedup for one in pool.candidates] == sorted(one.log_speedup for one in pool.candidates)[::-1]
    assert SkipMask.none(space.num_layers) in masks
    for one in pool.candidates:
        assert one.params.keys() == space.distributions.keys()
        config = space.to_config(dict(one.params))
        assert space.to_params(config) == one.params
        assert 1 <= config.gamma <= space.gamma_max
        assert one.log_speedup == pytest.approx(math.log(candidates.predictor.forecast(config, [])[1]))
    again = Pool.from_json(pool.to_json(candidates), candidates)
    assert [one.params for one in again.candidates] == [one.params for one in pool.candidates]
    assert [one.key for one in again.candidates] == [one.key for one in pool.candidates]
    assert [one.log_speedup for one in again.candidates] == pytest.approx(
        [one.log_speedup for one in pool.candidates], abs=1e-5
    )
    assert Pool.from_json(again.to_json(candidates), candidates) == again


def test_a_small_space_is_predicted_whole_and_then_done() -> None:
    candidates, _ = candidates_of(space_of(1))
    pool = make_pool(candidates, space_of(1), planted(space_of(1), {}, []), seed=0, seconds=1e9)
    assert {str(space_of(1).to_mask(one.params)) for one in pool.candidates} == {"1:none", "1:0", "1:a0", "1:m0"}


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 3), (0.5, 3), (2.0, 11)])
def test_the_pool_keeps_to_its_seconds(seconds: float, expected: int) -> None:
    """A reading takes 0.19 s; the one under way when time is up is finished."""
    clock = FakeClock()
    candidates, forcing = candidates_of(SPACE)
    forcing._tick = lambda _seconds: clock.advance(0.19)
    pool = make_pool(candidates, SPACE, planted(SPACE, {}, []), seed=0, seconds=seconds, clock=clock)
    assert len(pool.candidates) == forcing.num_readings == expected


def test_known_masks_are_told_apart_and_hold_exits_at_many_depths() -> None:
    masks = known_masks(space_of(80))
    assert len(set(masks)) == len(masks)
    exits = {mask.exit_layer for mask in masks} - {None}
    assert len(exits) >= 12
    assert {1, 79} <= exits
    # Of one layer no exit is left, and of the later half only its attention.
    assert known_masks(space_of(1)) == [SkipMask.none(1), SkipMask.from_sublayers(1, attention=[0])]
    assert known_masks(space_of(1, whole=True)) == [SkipMask.none(1)]


def test_variants_are_the_masks_best_settings() -> None:
    candidates, _ = candidates_of(SPACE)
    mask = SkipMask.contiguous(6, 1, 4)
    found = candidates.variants(mask, 6)
    assert len({one.key for one in found}) == 6
    assert {SPACE.to_mask(one.params) for one in found} == {mask}
    speedups = [candidates.predictor.forecast(SPACE.to_config(dict(one.params)), [])[1] for one in found]
    assert [math.exp(one.log_speedup) for one in found] == pytest.approx(speedups)
    assert speedups == sorted(speedups, reverse=True)
    assert candidates.of(mask).log_speedup >= found[0].log_speedup - 1e-12


@pytest.mark.parametrize("siblings_max", [0, 2])
def test_candidates_are_written_and_read_with_all_that_the_space_has(siblings_max: int) -> None:
    candidates, _ = candidates_of(dataclasses.replace(SPACE, siblings_max=siblings_max))
    found = [candidates.of(mask) for mask in known_masks(SPACE)]
    again = candidates.read(json.loads(json.dumps(candidates.write(found))))
    assert [one.params for one in again] == [one.params for one in found]
    assert all(("siblings" in one.params) == (siblings_max > 0) for one in found)


def tiers_of(space: SearchSpace, num_first: int = 2, num_more: int = 3) -> Candidates:
    first, more = (
        FakeForcing([ForcedText((i,), tuple(range(LENGTH))) for i in places])
        for places in (range(num_first), range(num_first, num_first + num_more))
    )
    cost = measure_costs(FakeTimer(), [(1,)], space, FINGERPRINT, repeats=1)
    rows = [TextRows(one.lengths, one.target_probs, LENGTH) for one in (first, more)]
    return Candidates(Predictor(first, rows[0], cost).with_more(more, rows[1]), space)


def test_candidates_know_on_which_texts_they_were_predicted() -> None:
    tiers, first, together = tiers_of(SPACE), candidates_of(SPACE, 2)[0], candidates_of(SPACE, 5)[0]
    mask = SkipMask.early_exit(6, 4)
    coarse, full = tiers.of(mask), tiers.of(mask, full_fidelity=True)
    alone, whole = first.of(mask), together.of(mask)
    assert (coarse.params, coarse.log_speedup, coarse.full_fidelity) == (alone.params, alone.log_speedup, False)
    assert (full.params, full.log_speedup, full.full_fidelity) == (whole.params, whole.log_speedup, True)
    assert alone.full_fidelity, "there are no more texts"
    assert [one.params for one in tiers.variants(mask, 3, full_fidelity=True)] == [
        one.params for one in together.variants(mask, 3)
    ]
    assert [one.params for one in tiers.variants(mask, 3)] == [one.params for one in first.variants(mask, 3)]
    rows = json.loads(json.dumps(tiers.write([coarse, full])))
    assert rows[1] == [*rows[1][:5], True]
    as_before = [rows[0], [*rows[1][:-1], 0.25]]  # earlier versions kept the log speedup on the first texts
    for written in (rows, as_before):
        back = tiers.read(written)
        for one, other in zip(back, (coarse, full), strict=True):
            assert (one.params, one.full_fidelity) == (other.params, other.full_fidelity)
        assert tiers.write(back) == rows


def test_the_best_of_a_pool_is_one_that_was_predicted_on_all_texts() -> None:
    tiers = tiers_of(SPACE)
    coarse, full = tiers.of(SkipMask.contiguous(6, 1, 4)), tiers.of(SkipMask.none(6), full_fidelity=True)
    pool = Pool((coarse, full))
    assert (pool.best, pool.num_full_fidelity) == (full, 1)
    again = Pool.from_json(pool.to_json(tiers), tiers)
    assert (again.best.params, again.num_full_fidelity) == (full.params, 1)
    assert Pool((coarse,)).best == coarse
