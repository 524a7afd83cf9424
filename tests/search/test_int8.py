"""Drafts with weights of 8 or 4 bits: where they cannot be, what they are taken to cost, how a config says it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.skip_mask import DRAFT_BITS
from layerskip.huggingface import memory
from layerskip.huggingface.adapter import ModelAdapter
from search import run
from search.predict.costs import CostModel, pool_costs
from search.study.space import BITS, DRAFT_INT8
from tests.search.helpers.rivals import make_cost
from tests.search.helpers.studies import trials_of

FOUR = SkipMask.from_sublayers(4, attention=[1], mlp=[1, 2])
COST = dataclasses.replace(
    make_cost(4),
    int8_s=(1e-4, 2e-4, 3e-4),
    int4_s=(1e-4, 1e-4, 1e-4),
    narrowed_s={"8": 5e-4, "8 int8": 5e-5, "8 int4": 6e-5},
)


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        (ModelAdapter, "int8_refusal", "a CPU or a CUDA device, got mps", "need a CPU or a CUDA device, got mps"),
        (memory, "free_bytes", lambda _device: 1 << 10, "need a copy of them (0 MiB, and 0 MiB are free)"),
    ],
    ids=["device", "memory"],
)
def test_where_it_cannot_be_it_is_not_searched_and_refused_if_asked_for(
    tiny_study: list[str],
    tmp_path: Path,
    refused: Any,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    value: Any,
    said: str,
) -> None:
    monkeypatch.setattr(where, name, value)
    given = [*tiny_study, "--drafters", "layer_skip", "--force", "--trials", "2"]
    for bits in DRAFT_BITS:
        error = refused(run.main, [*given, f"--int{bits}"])
        assert f"int{bits}: drafts with {bits}-bit weights {said}" in error
    assert run.main(given) in (0, 1)
    assert all(not {DRAFT_INT8, BITS} & trial.params.keys() for trial in trials_of(tmp_path / "study"))


def test_a_draft_step_costs_what_its_own_terms_say() -> None:
    assert COST.draft_s(FOUR.rounded(8), threshold=False) == pytest.approx(1e-4 + 3 * 2e-4 + 2 * 3e-4)
    narrow = COST.draft_s(FOUR.rounded(8).narrowed(8), threshold=False)
    assert narrow == pytest.approx(1e-4 + 3 * 2e-4 + 2 * 3e-4 - 5e-5)
    assert COST.draft_s(FOUR.rounded(4), threshold=False) == pytest.approx(1e-4 + 5 * 1e-4)
    assert COST.draft_s(FOUR.rounded(4).narrowed(8), threshold=False) == pytest.approx(1e-4 + 5 * 1e-4 - 6e-5)
    assert COST.draft_s(FOUR, threshold=False) - COST.draft_s(FOUR.narrowed(8), threshold=False) == pytest.approx(5e-4)


def test_costs_are_pooled_and_read_again_and_those_from_before_are_without() -> None:
    twice = dataclasses.replace(COST, int8_s=(3e-4, 2e-4, 3e-4), int4_s=(3e-4, 2e-4, 3e-4))
    without = dataclasses.replace(COST, int4_s=None)
    assert CostModel.parse(COST.to_json()) == COST
    before = json.loads(COST.to_json())
    for bits in DRAFT_BITS:
        assert pool_costs([COST, COST, twice]).rounded_s(bits) == COST.rounded_s(bits)
        assert pool_costs([make_cost(4)]).rounded_s(bits) is None
        del before[f"int{bits}_s"]
        assert CostModel.parse(json.dumps(before)).rounded_s(bits) is None
    assert pool_costs([without, COST]).int4_s == COST.int4_s
    assert pool_costs([COST, without]).int4_s is None


def test_a_config_says_it_in_its_mask() -> None:
    config = DecodeConfig(skip_mask=FOUR.rounded(8), gamma=2)
    assert json.loads(config.to_json())["skip_mask"] == "4:1,m2,int8"
    assert DecodeConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="skip_mask: must be left out"):
        DecodeConfig(drafter="suffix", skip_mask=FOUR.rounded(8), gamma=2, lookup={"method": "suffix", "min_match": 1})


def test_a_model_of_8_bits_is_searched_as_such_and_its_config_loads_it_so(
    tiny_study: list[str], tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("torchao", reason="needs the extra `quantized`")
    assert run.main([*tiny_study, "--force", "--quantization", "int8", "--trials", "3"]) in (0, 1)
    assert "float32, int8 weights on cpu" in capsys.readouterr().out
    study = tmp_path / "study"
    searched = {name for trial in trials_of(study) for name in trial.params}
    assert not {DRAFT_INT8, BITS} & searched, "they are all of 8 bits already"
    config = DecodeConfig.load(study / "best.json")
    assert config.provenance is not None
    assert config.provenance.quantization == "int8"
    model = LayerSkipModel.from_config(study / "best.json", device="cpu")
    assert model.quantization == "int8"
    assert run.main([*tiny_study, "--force", "--trials", "4"]) in (0, 1)
    assert "float32, int8 weights on cpu" in capsys.readouterr().out, "a study goes on as it was begun"
