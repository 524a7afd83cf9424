"""A search over drafts with weights of fewer bits and of fewer token ids, from command to config."""

from __future__ import annotations

import json
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.skip_mask import DRAFT_BITS
from layerskip.engines.native.library import load_kernels
from search import report, run
from search.predict.costs import CostModel
from search.study import space as space_module
from search.study.space import vocabs_of
from tests.search.helpers.studies import trials_of

SIZES = (64, 32, 16, 8, 4)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "_LEAST_VOCAB", 4)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["replay", "random", "tpe"])
def test_both_are_searched_resumed_replayed_and_decoded_with(
    tiny_study: list[str],
    tiny_model: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
) -> None:
    # In so small a model all drafts take the same time: which bits `replay` tries would be up to the clock.
    draft_s = CostModel.draft_s
    monkeypatch.setattr(
        CostModel,
        "draft_s",
        lambda self, mask, **named: draft_s(self, mask, **named) * (1 if mask.bits is None else 10),
    )
    given = [*tiny_study, "--drafters", "layer_skip", "--force", "--sampler", sampler]
    assert run.main([*given, "--trials", "4"]) in (0, 1)
    said = capsys.readouterr().out
    bits = DRAFT_BITS if isinstance(load_kernels(), CDLL) else DRAFT_BITS[:1]
    assert f"weights as they are or of {' or '.join(map(str, bits))} bits" in said
    assert "64, 32, 16, 8, 4 token ids" in said
    assert run.main(["--study", str(tmp_path / "study"), "--trials", "8"]) in (0, 1)
    trials = trials_of(tmp_path / "study")
    found = {SkipMask.parse(trial.user_attrs["skip_mask"]).bits for trial in trials}
    assert found >= ({None} if sampler == "replay" else {None, *bits})
    assert {trial.params["draft_vocab"] for trial in trials} <= set(SIZES)
    model = LayerSkipModel.from_pretrained(tiny_model, device="cpu", engine="fused")
    for trial in trials:
        mask = SkipMask.parse(trial.user_attrs["skip_mask"])
        assert mask.bits == (trial.params["draft_bits"] if len(bits) > 1 else 8 if trial.params["draft_int8"] else None)
        assert (mask.draft_vocab or 64) == trial.params["draft_vocab"]
        # Replayed counts are those of decoding, narrowed or not.
        if "replayed_forwards" in trial.user_attrs and mask.draft_vocab is not None:
            config = DecodeConfig(skip_mask=mask, gamma=trial.params["gamma"])
            plain = DecodeConfig.plain(4)
            ids = [model.generate("w1 w2 w3", max_new_tokens=8, config=one).ids for one in (config, plain)]
            assert ids[0] == ids[1]
    if sampler == "replay":
        assert "exact in 100 %, error median 0.00 %" in capsys.readouterr().out
        costs = json.loads((tmp_path / "study" / "summary.json").read_text())["costs"]["first"]
        assert all(len(costs[f"int{one}_s"]) == 3 for one in bits)
        sizes = {"32", "16", "8", "4"}
        assert costs["narrowed_s"].keys() == sizes | {f"{size} int{one}" for size in sizes for one in bits}
    assert report.main([str(tmp_path / "study")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "param"), [("--no-int8", "draft_int8"), ("--no-int4", "draft_bits"), ("--no-draft-vocab", "draft_vocab")]
)
def test_a_study_from_before_goes_on_without(tiny_study: list[str], tmp_path: Path, flag: str, param: str) -> None:
    given = [*tiny_study, "--drafters", "layer_skip", "--force"]
    assert run.main([*given, "--trials", "1", flag]) in (0, 1)
    assert run.main([*given, "--trials", "2"]) in (0, 1)
    assert all(param not in trial.params for trial in trials_of(tmp_path / "study"))


def test_a_model_without_a_large_vocabulary_is_searched_without(
    tiny_study: list[str], refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "_LEAST_VOCAB", 512)
    assert vocabs_of(64) == ()
    assert vocabs_of(151_936) == (151_936, 75_968, 37_984, 18_992, 9_496)
    error = refused(run.main, [*tiny_study, "--draft-vocab", "--trials", "2"])
    assert "draft_vocab: needs a plain output embedding of a thousand token ids or more" in error
