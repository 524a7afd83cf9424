"""Cost model: planted step times come out as terms; drift is followed, one bad moment is not."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from layerskip import SkipMask
from search.predict.costs import (
    CostModel,
    device_facts,
    measure_costs,
    pool_costs,
)
from search.study.space import SearchSpace
from tests.layerskip.zoo import random_mask
from tests.search.helpers import fakes
from tests.search.helpers.fakes import FINGERPRINT
from tests.search.helpers.forcing import FakeTimer
from tests.search.helpers.outlook import PlantedTimer, space_of

TEXTS = ((1, 2, 3), (4, 5, 6, 7, 8, 9), (10, 11))
GAMMA_MAX, REPEATS = 5, 5
SPACE = dataclasses.replace(fakes.SPACE, gamma_max=GAMMA_MAX)
NUM_REPEATS = REPEATS + 1
"""The first one warms up."""


def measure(timer: FakeTimer, space: SearchSpace = SPACE, repeats: int = REPEATS, seed: int = 0) -> CostModel:
    return measure_costs(timer, TEXTS, space, FINGERPRINT, repeats=repeats, seed=seed)


def check_terms(timer: PlantedTimer, cost: CostModel, space: SearchSpace) -> None:
    """Seconds of masks that were never timed are the planted ones."""
    draw = random.Random(0)
    for _ in range(20):
        mask = random_mask(space.num_layers, draw, sublayers=not space.layer_bits)
        for threshold in (False, True):
            planted = timer.true_draft_s(mask, threshold=threshold)
            assert cost.draft_s(mask, threshold=threshold) == pytest.approx(planted, rel=1e-6)
    assert cost.threshold_s == pytest.approx(timer.threshold_s, rel=1e-6)
    assert cost.fit_error < 1e-9
    planted_s = [timer.step_s * (1 + timer.verify_share * n) for n in range(6)]
    assert cost.verify_s == pytest.approx(planted_s)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 80])
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_terms_are_recovered(num_layers: int, seed: int) -> None:
    timer, space = PlantedTimer(), space_of(num_layers, gamma_max=GAMMA_MAX)
    cost = measure(timer, space, seed=seed)
    assert cost.fixed_s == pytest.approx(timer.fixed_s, rel=1e-6)
    assert cost.attention_s == pytest.approx((timer.attention_s,) * num_layers, rel=1e-6)
    assert cost.mlp_s == pytest.approx((timer.mlp_s,) * num_layers, rel=1e-6)
    check_terms(timer, cost, space)


@pytest.mark.parametrize("num_layers", [1, 2, 6, 80])
def test_whole_layers_cost_what_both_halves_do(num_layers: int) -> None:
    """Nothing tells the halves apart, so each gets half, and no mask that skips them apart is run."""
    timer, space = PlantedTimer(), space_of(num_layers, whole=True, gamma_max=GAMMA_MAX)
    cost = measure(timer, space)
    half = (timer.attention_s + timer.mlp_s) / 2
    assert cost.attention_s == cost.mlp_s == pytest.approx((half,) * num_layers, rel=1e-6)
    assert all(mask.attention == mask.mlp for _, masks, _, _ in timer.drafted for mask in masks)
    check_terms(timer, cost, space)


def test_a_space_with_some_whole_layers_is_fitted_on_what_it_allows() -> None:
    timer = PlantedTimer()
    space = SearchSpace(4, GAMMA_MAX, attention_bits=(1, 2, 3), mlp_bits=(1, 2, 3), layer_bits=(0,))
    cost = measure(timer, space)
    assert all(mask.attention[0] == mask.mlp[0] for _, masks, _, _ in timer.drafted for mask in masks)
    check_terms(timer, cost, space)


def test_the_fake_timers_terms() -> None:
    """A draft step of the simple fake: 5 % of a target step and what it keeps of the rest."""
    cost = measure(FakeTimer(0.02))
    assert (cost.fixed_s, *cost.attention_s) == pytest.approx((0.001, *[0.95 * 0.02 / 12] * 6), rel=1e-6)
    assert cost.draft_s(SkipMask.none(6), threshold=False) == pytest.approx(0.02)


@pytest.mark.parametrize("wild", range(NUM_REPEATS))
def test_one_wild_repeat_changes_nothing(wild: int) -> None:
    calm, moody = PlantedTimer(), PlantedTimer(slowdown=lambda repeat: 50.0 if repeat == wild else 1.0)
    assert measure(moody) == measure(calm)


def test_the_first_repeat_only_warms_up() -> None:
    cold = PlantedTimer(slowdown=lambda repeat: 50.0 if repeat == 0 else 1.0)
    assert measure(cold, repeats=1) == measure(PlantedTimer(), repeats=1)


def test_all_things_are_timed_in_turn_on_alternating_texts() -> None:
    timer = PlantedTimer()
    cost = measure(timer)
    turns = [TEXTS[repeat % 3] for repeat in range(NUM_REPEATS)]
    assert timer.verified == turns
    assert [text for text, *_ in timer.drafted] == [text for text in turns for _ in range(2)]
    assert [threshold for *_, threshold in timer.drafted] == [False, True] * NUM_REPEATS
    assert len({masks for _, masks, _, threshold in timer.drafted if not threshold}) == 1
    assert cost.context_tokens == 4
    assert cost.measured_on == device_facts(FINGERPRINT)


def test_costs_reach_as_far_as_any_round_verifies() -> None:
    """Siblings fill more than gamma tokens; without lookups nothing else says how far costs must go."""
    space = dataclasses.replace(SPACE, siblings_max=3)
    assert space.gamma_limit > GAMMA_MAX
    assert len(measure(PlantedTimer(), space).verify_s) == space.gamma_limit + 1


def test_no_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="texts: at least one is needed to time steps, got none"):
        measure_costs(PlantedTimer(), [], SPACE, FINGERPRINT)


class CrookedTimer(PlantedTimer):
    """MLPs that make a step faster, and every mask off by its own share."""

    def true_draft_s(self, mask: SkipMask, *, threshold: bool) -> float:
        off = 1 + 0.1 * random.Random(str(mask)).random()
        return off * (super().true_draft_s(mask, threshold=threshold) + 1e-3 * mask.num_skipped_mlp)


def test_terms_are_never_negative_and_the_error_of_the_fit_is_told() -> None:
    timer = CrookedTimer()
    cost = measure(timer)
    assert min(cost.fixed_s, *cost.attention_s, *cost.mlp_s, cost.threshold_s) >= 0.0
    masks = timer.drafted[0][1]
    errors = [cost.draft_s(mask, threshold=False) / timer.true_draft_s(mask, threshold=False) - 1.0 for mask in masks]
    assert cost.fit_error == pytest.approx(np.median(np.abs(errors)))
    assert cost.fit_error > 0.01


def history(*factors: float) -> list[CostModel]:
    """Measurements in which everything took so many times as long."""
    return [measure(PlantedTimer(slowdown=lambda _repeat, factor=factor: factor)) for factor in factors]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.0,), 1.0),
        ((1.0, 1.0, 9.0), 1.0),  # a bad moment just now
        ((1.0, 9.0, 1.0), 1.0),
        ((1.0, 2.0, 2.0), 2.0),  # two in a row are no accident
        ((5.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0), 1.0),  # only the latest five count
        ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 4.0),
    ],
)
def test_pooled_costs_follow_drift_but_not_one_bad_moment(factors: tuple[float, ...], expected: float) -> None:
    pooled, wanted = pool_costs(history(*factors)), history(expected)[0]
    for field in ("verify_s", "attention_s", "mlp_s", "fixed_s", "threshold_s"):
        assert getattr(pooled, field) == pytest.approx(getattr(wanted, field)), field


def test_pooled_facts_are_the_newest_ones() -> None:
    old, new = history(1.0, 1.0)
    new = dataclasses.replace(new, context_tokens=99, measured_on={"device": "moon"})
    pooled = pool_costs([old, new])
    assert (pooled.context_tokens, pooled.measured_on) == (99, {"device": "moon"})
    with pytest.raises(ValueError, match="history: must hold at least one measurement, got none"):
        pool_costs([])


def test_json_round_trip() -> None:
    cost = measure(CrookedTimer(slowdown=lambda repeat: 1 + 0.01 * repeat / 3))
    text = cost.to_json()
    assert "\n" not in text
    assert CostModel.from_json(text, FINGERPRINT) == cost


@pytest.mark.parametrize("field", ["device", "cpu", "dtype", "engine", "num_threads", "weights"])
def test_costs_of_another_machine_or_model_are_refused_by_name(field: str) -> None:
    text = measure(PlantedTimer()).to_json()
    there: Any = 7 if field == "num_threads" else "other"
    here = getattr(FINGERPRINT, field)
    message = rf"cost_model\.measured_on\.{field}: must be this run's {there!r}, got {here!r}; use another --study-name"
    with pytest.raises(ValueError, match=message):
        CostModel.from_json(text, dataclasses.replace(FINGERPRINT, **{field: there}))


def test_what_steps_do_not_depend_on_may_differ() -> None:
    cost = measure(PlantedTimer())
    other = dataclasses.replace(FINGERPRINT, tuning_prompts="x", held_out_prompts="y", max_new_tokens=3, torch="9")
    assert CostModel.from_json(cost.to_json(), other) == cost


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    "change",
    [
        without("fixed_s"),
        without("measured_on"),
        lambda data: data | {"surplus": 1},
        lambda data: data | {"verify_s": ["much"]},
        lambda data: data | {"mlp_s": 3},
        lambda data: data | {"attention_s": None},
        lambda data: [data],
        lambda data: 5,
    ],
)
def test_unreadable_costs_are_refused_in_one_line(change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(measure(PlantedTimer()).to_json())
    with pytest.raises(ValueError, match=r"cost_model: cannot be read: \S") as caught:
        CostModel.from_json(json.dumps(change(data)), FINGERPRINT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "not JSON", '{"verify_s": [0.01'])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cost_model: cannot be read: "):
        CostModel.from_json(text, FINGERPRINT)
