"""Preflight: what a spec leaves open is searched as far as the engine can, and what it cannot is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from search.measure.subject import Subject
from search.preflight import space_for
from search.terminal.progress_events import preflight_passed
from tests.search.helpers.fakes import FINGERPRINT, MODEL, SPACE, FakeDecoder, make_spec, prompts


def model_on(engine: str) -> Any:
    """A model as far as a search space asks it, on that engine."""
    layers = {"num_layers": 4, "whole_layers_only": (False,) * 4}
    cannot: dict[str, Any] = {"can_narrow": False, "bits_refusal": lambda _bits: "a CPU or a CUDA device, got mps"}
    refusal = None if engine == "eager" else f"the engine eager or fused, got {engine}"
    cannot |= {"siblings_refusal": refusal, "lossy_refusal": refusal}
    device = SimpleNamespace(type="cuda" if engine == "cuda_graph" else "cpu")
    return SimpleNamespace(engine=SimpleNamespace(), engine_name=engine, device=device, **cannot, **layers)


def test_on_a_gpu_nobody_is_told_of_what_is_for_cpus(caplog: pytest.LogCaptureFixture) -> None:
    for engine, told in (("eager", [8, 4]), ("cuda_graph", [8])):
        caplog.clear()
        space_for(model_on(engine), make_spec())
        warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert [one.split("-bit")[0] for one in warned] == [f"drafts with {bits}" for bits in told]


@pytest.mark.parametrize(("given", "searched"), [(None, 3), (True, 3), (False, 0)])
def test_siblings_are_searched_where_engine_and_model_can(given: bool | None, searched: int) -> None:
    assert space_for(model_on("eager"), make_spec(siblings=given)).siblings_max == searched
    assert space_for(model_on("cuda_graph"), make_spec(siblings=given and None)).siblings_max == 0
    with pytest.raises(ValueError, match="siblings: need the engine eager or fused, got cuda_graph"):
        space_for(model_on("cuda_graph"), make_spec(siblings=True))


def test_trees_that_are_asked_for_and_cannot_be_are_refused() -> None:
    assert space_for(model_on("eager"), make_spec()).trees == ()
    with pytest.raises(ValueError, match="trees: need the engine eager or fused, got cuda_graph"):
        space_for(model_on("cuda_graph"), make_spec(trees=True))
    with pytest.raises(ValueError, match="trees: need an eagle layer among draft_weights, or mtp, which draft them"):
        space_for(model_on("eager"), make_spec(trees=True))


def test_lossy_rules_are_refused_before_anything_is_measured() -> None:
    assert space_for(model_on("eager"), make_spec(allow_lossy=True))
    with pytest.raises(ValueError, match="allow_lossy: needs the engine eager or fused, got cuda_graph"):
        space_for(model_on("cuda_graph"), make_spec(allow_lossy=True))


@pytest.mark.parametrize(("given", "searched"), [(None, 16), (8, 8), (24, 24)])
def test_up_to_sixteen_drafts_unless_the_spec_says(given: int | None, searched: int) -> None:
    assert space_for(model_on("eager"), make_spec(gamma_max=given)).gamma_max == searched


def told(**changes: Any) -> list[str]:
    """What preflight prints of a subject."""
    subject = Subject(FakeDecoder(), SPACE, prompts(12), prompts(6), FINGERPRINT, MODEL)
    event = preflight_passed(replace(subject, **changes), "category", ["greedy"], is_split=False)
    return [line.text for line in event.lines()]


def test_what_is_searched_is_told() -> None:
    for int4, bits in ((False, "8"), (True, "8 or 4")):
        searched = replace(SPACE, int8=True, int4=int4)
        expected = f"12 mask bits, gamma 1..6, two thresholds, weights as they are or of {bits} bits"
        assert told(space=searched)[1].endswith(expected)
    assert told()[1].endswith("12 mask bits, gamma 1..6, two thresholds")
