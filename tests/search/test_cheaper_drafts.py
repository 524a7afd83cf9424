"""A search over drafts with weights of fewer bits and of fewer token ids, from command to config."""

from __future__ import annotations

import json
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.draft_ids import unpack_ids
from layerskip.config.sampling_regime import Sampling
from layerskip.config.skip_mask import DRAFT_BITS
from layerskip.engines.native.library import load_kernels
from search import report, run
from search.confirm.regime_settings import combined_config
from search.measure.decoder import ModelDecoder
from search.predict.costs import CostModel
from search.study import space as space_module
from search.study.draft_ids import by_size, likeliest_sets, sets_in, used_by, with_sets
from search.study.space import vocabs_of
from tests.search.helpers.fakes import Bench
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
    sets = sets_in(Bench(tmp_path / "study", in_sqlite=True).study().user_attrs)
    assert [size for size, _ in by_size(sets)] == sorted(SIZES[1:])
    for trial in trials:
        mask = SkipMask.parse(trial.user_attrs["skip_mask"])
        assert mask.bits == (trial.params["draft_bits"] if len(bits) > 1 else 8 if trial.params["draft_int8"] else None)
        assert (mask.draft_vocab or 64) == trial.params["draft_vocab"]
        assert mask.draft_ids == dict(by_size(sets)).get(mask.draft_vocab)
        # Replayed counts are those of decoding, narrowed or not.
        if "replayed_forwards" in trial.user_attrs and mask.draft_vocab is not None:
            config = DecodeConfig(skip_mask=mask, gamma=trial.params["gamma"], draft_ids=sets)
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
    best = DecodeConfig.load(tmp_path / "study" / "best.json")
    assert best.draft_ids == used_by([best], sets)


def test_drafts_choose_among_the_token_ids_that_the_model_holds_likeliest(tiny_model: Path) -> None:
    model = LayerSkipModel.from_pretrained(tiny_model, device="cpu", engine="fused")
    texts = [tuple(model.encode("w1 w2 w3 w4")), tuple(range(30, 50))]
    shares = ModelDecoder(model, 8).token_shares(texts)
    logits = [model.target_logits(ids, num_logits=len(ids)) for ids in texts]
    assert shares == pytest.approx(torch.cat(logits).softmax(dim=-1).sum(dim=0).numpy(), abs=1e-4)
    sets = likeliest_sets(shares, (8, 4))
    for size, name in by_size(sets):
        assert set(unpack_ids(sets[name])) == set(np.argsort(-shares)[:size])
    mask = SkipMask.none(4).narrowed(4, dict(by_size(sets))[4])
    configs = [DecodeConfig(skip_mask=one, gamma=2) for one in (mask, SkipMask.none(4))]
    assert [with_sets(one, sets).draft_ids for one in configs] == [{mask.draft_ids: sets[mask.draft_ids]}, None]
    regime = with_sets(configs[0], sets).model_copy(update={"sampling": Sampling.parse("t0.7")})
    whole = combined_config([configs[1].model_copy(update={"sampling": Sampling.parse("greedy")}), regime])
    assert whole.draft_ids == regime.draft_ids


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
