"""The space: config -> params -> config, what a model forbids, warm starts and local moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, IntDistribution

from layerskip import DecodeConfig, SkipMask
from layerskip.config.decode_config import UNTRAINED
from search.outlook.warm_starts import warm_starts
from search.study.space import SearchSpace, snap_threshold


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    whole = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=14)))
    granularity = draw(st.sampled_from(["layer", "sublayer"]))
    model = SimpleNamespace(num_layers=len(whole), whole_layers_only=whole, vocab_size=4096)
    return SearchSpace.for_model(
        model,
        gamma_max=draw(st.integers(1, 12)),
        granularity=granularity,
        draft_vocab=draw(st.booleans()),
        int8=draw(st.booleans()),
        int4=draw(st.booleans()),
        siblings_max=draw(st.integers(0, 3)),
        drafters=draw(st.lists(st.sampled_from(UNTRAINED), min_size=1, unique=True)),
    )


@st.composite
def points(draw: st.DrawFn) -> tuple[SearchSpace, dict[str, Any]]:
    space = draw(spaces())
    params: dict[str, Any] = {}
    for name, one in space.distributions.items():
        if isinstance(one, CategoricalDistribution):
            params[name] = draw(st.sampled_from(one.choices))
        elif isinstance(one, IntDistribution):
            params[name] = draw(st.integers(one.low, one.high))
        else:
            params[name] = snap_threshold(draw(st.integers(0, 19)) * 0.05)
    if "siblings" in params:
        most = space.gamma_limit // params["gamma"] - 1
        params["siblings"] = min(params["siblings"], max(0, most))
        params["sibling_threshold"] = draw(st.sampled_from([0.05, 0.35, 1.0])) if params["siblings"] else 1.0
    return space, space.reduce(params)


@given(points())
def test_params_to_config_and_back(point: tuple[SearchSpace, dict[str, Any]]) -> None:
    space, params = point
    config = space.to_config(params)
    assert space.to_params(config) == params
    assert DecodeConfig.from_json(config.to_json()) == config


@given(points())
def test_a_trial_given_a_configs_params_suggests_that_config(point: tuple[SearchSpace, dict[str, Any]]) -> None:
    space, params = point
    study = optuna.create_study()
    study.enqueue_trial(params)
    trial = study.ask()
    assert space.suggest(trial) == space.to_config(params)
    assert all(
        space.distributions[name]._contains(space.distributions[name].to_internal_repr(value))
        for name, value in trial.params.items()
    )


@given(spaces())
def test_warm_starts_are_distinct_points_of_the_space(space: SearchSpace) -> None:
    starts = warm_starts(space)
    origins = [start.origin for start in starts]
    lookups = {"prompt_lookup", "suffix", "hybrid"}
    assert lookups & set(space.drafters) == lookups & set(origins)
    assert ("no-skip" in origins) == ("layer_skip" in space.drafters)
    assert len({tuple(sorted(start.params.items())) for start in starts}) == len(starts)
    for start in starts:
        assert space.to_params(space.to_config(start.params)) == start.params


def test_copies_that_choose_among_few_token_ids_come_before_other_shapes() -> None:
    """Where readings are slow the first ones are all that is predicted, and much of a small model is its embeddings."""
    ids = ((64, "0" * 8), (256, "1" * 8))
    space = SearchSpace(4, 4, (0, 1, 2, 3), (0, 1, 2, 3), (), (1024, 512, 256, 128, 64), ids, int8=True, int4=True)
    masks = [str(space.to_mask(one.params)) for one in warm_starts(space)]
    few = ["4:v64@00000000,int8", "4:v64@00000000,int4", "4:v256@11111111,int8", "4:v256@11111111,int4"]
    assert masks[:7] == ["4:none", "4:int8", "4:int4", *few]


def test_names_sort_as_layers_do() -> None:
    model = SimpleNamespace(num_layers=120, whole_layers_only=(False,) * 119 + (True,))
    space = SearchSpace.for_model(model, gamma_max=4, granularity="sublayer")
    assert space.bit_names[7] == "skip.attn.007"
    assert space.bit_names[-1] == "skip.layer.119"
    assert len(space.bit_names) == 2 * 119 + 1
    assert [*space.bit_names[:119]] == sorted(space.bit_names[:119])


def test_whole_layers_only() -> None:
    model = SimpleNamespace(num_layers=3, whole_layers_only=(False, False, False))
    space = SearchSpace.for_model(model, gamma_max=4, granularity="layer")
    assert space.bit_names == ("skip.layer.00", "skip.layer.01", "skip.layer.02")
    half = DecodeConfig(skip_mask=SkipMask.parse("3:1,a2"), gamma=9, draft_threshold=0.33)
    params = space.to_params(half)
    assert (params["skip.layer.01"], params["skip.layer.02"]) == (True, False)
    assert (params["gamma"], params["draft_threshold"]) == (4, 0.35)


def test_foreign_params_and_masks_are_refused() -> None:
    model = SimpleNamespace(num_layers=3, whole_layers_only=(False, False, False))
    space = SearchSpace.for_model(model, gamma_max=4, granularity="layer")
    with pytest.raises(ValueError, match="must have 3 layers, got 4"):
        space.to_params(DecodeConfig.plain(4))
    with pytest.raises(ValueError, match="differ in"):
        space.to_config({"gamma": 1})


def test_one_layer_and_gamma_one_is_still_a_space() -> None:
    model = SimpleNamespace(num_layers=1, whole_layers_only=(True,))
    space = SearchSpace.for_model(model, gamma_max=1, granularity="sublayer")
    assert len(warm_starts(space)) >= 2
