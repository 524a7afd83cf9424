"""A search over drafts with 8-bit weights, from the command to the config; what such a draft is taken to cost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from layerskip import DecodeConfig, SkipMask
from layerskip.huggingface.adapter import ModelAdapter
from search import report, run
from search.predict.costs import CostModel, pool_costs
from tests.search.helpers.rivals import make_cost
from tests.search.helpers.studies import trials_of

FOUR = SkipMask.from_sublayers(4, attention=[1], mlp=[1, 2])
COST = dataclasses.replace(make_cost(4), int8_s=(1e-4, 2e-4, 3e-4), narrowed_s={"8": 5e-4, "8 int8": 5e-5})


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["replay", "random", "tpe"])
def test_it_is_searched_resumed_and_replayed(tiny_study: list[str], tmp_path: Path, capsys: Any, sampler: str) -> None:
    given = [*tiny_study, "--drafters", "layer_skip", "--force", "--sampler", sampler]
    assert run.main([*given, "--trials", "4"]) in (0, 1)
    assert "weights as they are or of 8 bits" in capsys.readouterr().out
    assert run.main(["--study", str(tmp_path / "study"), "--trials", "8"]) in (0, 1)
    trials = trials_of(tmp_path / "study")
    assert {trial.params["draft_int8"] for trial in trials} >= ({False} if sampler == "replay" else {False, True})
    for trial in trials:
        assert SkipMask.parse(trial.user_attrs["skip_mask"]).int8 is trial.params["draft_int8"]
    if sampler == "replay":
        assert "exact in 100 %, error median 0.00 %" in capsys.readouterr().out
        summary = json.loads((tmp_path / "study" / "summary.json").read_text())
        assert len(summary["costs"]["first"]["int8_s"]) == 3
    assert report.main([str(tmp_path / "study")]) == 0


@pytest.mark.slow
def test_a_study_from_before_goes_on_without(tiny_study: list[str], tmp_path: Path) -> None:
    given = [*tiny_study, "--drafters", "layer_skip", "--force"]
    assert run.main([*given, "--trials", "1", "--no-int8"]) in (0, 1)
    assert run.main([*given, "--trials", "2"]) in (0, 1)
    assert all("draft_int8" not in trial.params for trial in trials_of(tmp_path / "study"))


def test_where_it_cannot_be_it_is_not_searched_and_refused_if_asked_for(
    tiny_study: list[str], tmp_path: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelAdapter, "int8_refusal", "a model that is whole on a CPU, got one on cuda:0")
    given = [*tiny_study, "--drafters", "layer_skip", "--force", "--trials", "2"]
    error = refused(run.main, [*given, "--int8"])
    assert "int8: drafts with 8-bit weights need a model that is whole on a CPU" in error
    assert run.main(given) in (0, 1)
    assert all("draft_int8" not in trial.params for trial in trials_of(tmp_path / "study"))


def test_a_draft_step_costs_what_its_own_terms_say() -> None:
    assert COST.draft_s(FOUR.in_int8(), threshold=False) == pytest.approx(1e-4 + 3 * 2e-4 + 2 * 3e-4)
    narrow = COST.draft_s(FOUR.in_int8().narrowed(8), threshold=False)
    assert narrow == pytest.approx(1e-4 + 3 * 2e-4 + 2 * 3e-4 - 5e-5)
    assert COST.draft_s(FOUR, threshold=False) - COST.draft_s(FOUR.narrowed(8), threshold=False) == pytest.approx(5e-4)
    assert COST.verifications_s(FOUR.in_int8(), share_prefix=True) == COST.verify_s, "it leaves no prefix"


def test_costs_are_pooled_and_read_again_and_those_from_before_are_without() -> None:
    twice = dataclasses.replace(COST, int8_s=(3e-4, 2e-4, 3e-4))
    assert pool_costs([COST, COST, twice]).int8_s == COST.int8_s
    assert pool_costs([make_cost(4)]).int8_s is None
    assert CostModel.parse(COST.to_json()) == COST
    before = json.loads(COST.to_json())
    del before["int8_s"]
    assert CostModel.parse(json.dumps(before)).int8_s is None


def test_a_config_says_it_in_its_mask() -> None:
    config = DecodeConfig(skip_mask=FOUR.in_int8(), gamma=2)
    assert json.loads(config.to_json())["skip_mask"] == "4:1,m2,int8"
    assert DecodeConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="skip_mask: must be left out"):
        DecodeConfig(
            drafter="suffix", skip_mask=SkipMask.none(4).in_int8(), gamma=2, lookup={"method": "suffix", "min_match": 1}
        )
