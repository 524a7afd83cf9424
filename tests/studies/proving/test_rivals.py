"""Rivals on a table: plans made of hidden states are replayed, and settings predicted from its readings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.teacher_forcing import ForcedText
from search.rivals.hidden_states import PLANS, StoredPlans, latency_weights, layer_plan, plan_facts, sublayer_plan
from search.study.space import SearchSpace
from studies.proving.costs import COSTS
from studies.proving.readings import states_of
from studies.proving.runner import Case, TabularHints, run_case
from studies.proving.tabular import Noise
from studies.proving.truth import speedup_of
from tests.layerskip import zoo
from tests.search.helpers.rivals import OrthogonalStates
from tests.studies.proving.test_search import SPACE, made_table

TABLE = made_table()
PLANNED = replace(TABLE, facts={PLANS: plan_facts(OrthogonalStates([0.4, 0.5, 0.3, 0.2]), SPACE)})


@pytest.mark.parametrize("bits", [(0, 1, 2, 3), (1, 2)])
def test_plans_stored_are_those_of_the_model(bits: tuple[int, ...]) -> None:
    model = zoo.model_of("llama")
    count = model.config.num_hidden_layers
    whole = bits if len(bits) < count else ()
    apart = () if whole else tuple(range(count))
    space = SearchSpace(count, 8, apart, apart, whole)
    rng = np.random.default_rng(0)
    texts = [ForcedText(tuple(rng.integers(3, 60, 5).tolist()), tuple(rng.integers(3, 60, 8).tolist())) for _ in "ab"]
    states = states_of(model, texts)
    stored = StoredPlans(json.loads(json.dumps(plan_facts(states, space))))
    assert stored.layer_plan() == layer_plan(states, space)
    assert len(stored.layer_plan()) == len(whole or apart) + 1
    for costs in COSTS.values():
        weights = latency_weights(costs.prices("made", count).terms)
        assert stored.sublayer_plan(*weights) == sublayer_plan(states, space, *weights)


@pytest.mark.parametrize(
    "strategy", ["del", "draft-verify", "swift", "clasp", "knapspec", "clasp+settings", "random+settings"]
)
def test_a_rivals_run_follows_from_its_seed(strategy: str) -> None:
    case = Case("made", PLANNED, COSTS["gpu_memory"], strategy, seed=0, trials=8, noise=Noise(0.02))
    one, other = run_case(case, [1, 8]), run_case(case, [1, 8])
    assert (one.leaders, one.exported) == (other.leaders, other.exported)
    assert one.num_trials == 8


def test_a_table_without_plans_says_so() -> None:
    hints = TabularHints.of(TABLE, COSTS["cpu"], "made")
    with pytest.raises(ValueError, match="plans: must hold 'layers', computed from hidden states"):
        hints.layer_plan()


def test_the_predicted_setting_is_the_best_that_is_tried() -> None:
    hints = TabularHints.of(TABLE, COSTS["gpu_memory"], "made")
    mask, tuning = SkipMask.from_sublayers(2, mlp=[1]), range(TABLE.num_tuning)
    best = hints.best_setting(mask)
    assert best.skip_mask == mask
    value = speedup_of(TABLE, COSTS["gpu_memory"].prices("made", SPACE.num_layers), best, tuning)
    for gamma, threshold in ((1, 0.0), (8, 0.0), (4, 0.6)):
        other = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=threshold)
        assert value >= speedup_of(TABLE, COSTS["gpu_memory"].prices("made", SPACE.num_layers), other, tuning) - 0.02
    right, wrong = hints.confidences(mask)
    assert 0 < wrong < right < 1
