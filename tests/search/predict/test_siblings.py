"""Siblings are replayed exactly, greedy and sampled, under masks and by trained weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, make_teacher_forcing
from layerskip.config.lookup_settings import SuffixLookup
from layerskip.rounds.sampling import SamplingParams
from search.measure.decoder import ModelDecoder
from search.outlook.forecast import Candidates
from search.predict.costs import CostModel, measure_costs
from search.predict.joined_forcing import join_readings
from search.predict.predictor import Predictor
from search.predict.replay import Settings, TextRows, live_counts, replay, walk
from tests.layerskip import zoo
from tests.search.helpers.fakes import FINGERPRINT, SPACE
from tests.search.helpers.forcing import FakeForcing, FakeTimer

NEW_TOKENS = 24
GREEDY, WARM = SamplingParams(), SamplingParams(do_sample=True, temperature=0.8, top_k=0)
PENALISED = SamplingParams(do_sample=True, temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2)


def configs(run: str) -> list[DecodeConfig]:
    mask, none = SkipMask.from_layers(zoo.NUM_LAYERS, [1, 2]), SkipMask.none(zoo.NUM_LAYERS)
    lookup = SuffixLookup(min_match=1, gamma=3, target_threshold=0.2)
    found = [
        DecodeConfig(skip_mask=mask, gamma=1, siblings=1),
        DecodeConfig(skip_mask=mask, gamma=8, siblings=2),
        DecodeConfig(skip_mask=mask, gamma=6, siblings=3, draft_threshold=0.4, target_threshold=0.2),
        DecodeConfig(skip_mask=mask.narrowed(zoo.VOCAB // 2), gamma=4, siblings=4),
        DecodeConfig(skip_mask=mask, gamma=4, siblings=3, sibling_threshold=0.3),
        DecodeConfig(skip_mask=mask, gamma=1, siblings=2, sibling_threshold=0.4),
        DecodeConfig(drafter="hybrid", skip_mask=mask, gamma=5, siblings=2, draft_threshold=0.3, lookup=lookup),
    ]
    for weights in (zoo.eagle_of(zoo.architecture(run)), zoo.draft_model_of(zoo.architecture(run))):
        own: dict[str, Any] = {"skip_mask": none, "draft_weights": weights, "siblings": 2}
        found.append(DecodeConfig(drafter=weights.drafter, gamma=5, draft_threshold=0.3, **own))
    return found


def costs(by_weights: bool) -> CostModel:
    """A token verified costs a second, a forward one more."""
    nothing = (0.0,) * zoo.NUM_LAYERS
    return CostModel(
        tuple(1.0 + n for n in range(40)),
        0.0,
        nothing,
        nothing,
        0.0,
        0.0,
        0,
        {},
        weights_s={"": 0.0} if by_weights else {},
    )


@pytest.mark.parametrize("run", ["llama fused", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("params", [GREEDY, WARM, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_replayed_counts_are_those_of_decoding(run: str, params: SamplingParams) -> None:
    model = zoo.layerskip_of(run)
    decoder = ModelDecoder(model, NEW_TOKENS, params)
    prompts = [zoo.prompt_of(5, seed=i) for i in range(4)]
    plain = DecodeConfig.plain(zoo.NUM_LAYERS)
    texts = [ForcedText(one, decoder.decode(one, plain, seed).ids, seed) for seed, one in enumerate(prompts)]
    forcing = make_teacher_forcing(model, texts, params)
    rows = TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), NEW_TOKENS)
    hits = 0
    for config in configs(run):
        predictor = Predictor(forcing, rows, costs(config.draft_weights is not None), 8)
        model.check_config(config)
        counts = predictor.counts(config, sharp=True)
        deep = forcing.read(config.drafted_by, config.gamma)
        found = sum(one.hit for one in walk(deep, rows, config, predictor._lookup))
        live_hits = 0
        for i, prompt in enumerate(prompts):
            out = decoder.decode(prompt, config, i)
            assert out.ids == texts[i].continuation_ids
            replayed = [counts.drafted[0, i] + counts.looked_up[0, i], counts.rounds[0, i], counts.target_only[0, i]]
            assert replayed == live_counts([out.stats]).tolist(), config
            stats = out.stats
            verified = stats.num_rounds + stats.num_drafted + stats.num_siblings
            # Whether drafts after a wrong one are unsure is taken from those along the right text.
            if config.sibling_threshold == 1.0 or config.gamma == 1:
                assert counts.verify_s[0, i] == verified
            else:
                fewest = stats.num_rounds + stats.num_drafted
                assert fewest <= counts.verify_s[0, i] <= fewest + config.siblings * stats.num_drafted
            live_hits += stats.num_sibling_hits
        assert found == live_hits, config
        hits += live_hits
    assert hits > 10


def readings(seed: int, texts: int = 3, width: int = 12, depth: int = 2) -> tuple[DraftReadings, TextRows]:
    rng = np.random.default_rng(seed)
    shape = (depth + 1, texts, width)
    accepted = (rng.random(shape) < 0.5).astype(np.float32)
    accepted[:, :, -1] = 0.0
    ranks = np.where(accepted > 0, 0, rng.integers(1, 5, shape)).astype(np.uint8)
    ranks[:, :, -1] = 0
    reading = DraftReadings(accepted, rng.random(shape).astype(np.float32), np.zeros(shape, np.int64), ranks)
    return reading, TextRows(np.full(texts, width), rng.random((texts, width)).astype(np.float32), width)


@pytest.mark.parametrize("seed", range(20))
def test_replay_counts_the_rounds_of_walk(seed: int) -> None:
    """All at once as one by one, where drafting stops at the first wrong token: the two only differ in what follows."""
    reading, rows = readings(seed)
    for siblings in (0, 1, 3):
        for gamma, threshold, below in ((1, 0.0, 1.0), (4, 0.0, 0.6), (3, 0.5, 1.0)):
            config = DecodeConfig(
                skip_mask=SkipMask.from_layers(4, [1]),
                gamma=gamma,
                siblings=siblings,
                sibling_threshold=below if siblings else 1.0,
                draft_threshold=threshold,
                target_threshold=0.2,
            )
            counts = replay(reading, rows, Settings.of(config), np.arange(20.0))
            rounds = walk(reading, rows, config)
            for text in range(3):
                own = [one for one in rounds if one.text == text]
                assert counts.rounds[0, text] == sum(one.drafted > 0 for one in own)
                assert counts.target_only[0, text] == sum(one.drafted == 0 for one in own)
            assert any(one.hit for one in rounds) == (siblings > 0) or below < 1.0
            most = counts.drafted.sum() * (1 + siblings)
            assert counts.verify_s.sum() == most if below == 1.0 or not siblings else counts.verify_s.sum() < most


def test_siblings_of_unsure_drafts_by_hand() -> None:
    """Rounds of four drafts. The text's second is unsure, its third too, whose sibling is right; those beyond it count
    as unsure."""
    accepted = np.array([[[1, 1, 0, 1, 1, 0]]], dtype=np.float32)
    confidence = np.array([[[0.9, 0.4, 0.3, 0.9, 0.9, 0.9]]], dtype=np.float32)
    ranks = np.array([[[0, 0, 1, 0, 0, 0]]], dtype=np.uint8)
    reading = DraftReadings(accepted, confidence, np.zeros((1, 1, 6), np.int64), ranks)
    rows = TextRows(np.array([6]), np.ones((1, 6), dtype=np.float32), 20)
    for below, verified in ((1.0, [8, 8]), (0.5, [6, 6]), (0.35, [5, 6]), (0.2, [4, 5])):
        config = DecodeConfig(skip_mask=SkipMask.none(4), gamma=4, siblings=1, sibling_threshold=below)
        counts = replay(reading, rows, Settings.of(config), np.arange(20.0))
        assert counts.rounds.sum() == len(walk(reading, rows, config)) == 2, below
        assert counts.verify_s.sum() == sum(verified), below


@pytest.mark.parametrize(("verify_share", "pays"), [(0.0, True), (0.3, False)])
def test_siblings_are_proposed_where_verifying_them_costs_little(verify_share: float, pays: bool) -> None:
    """And one at most, as a second or third has the text's token nowhere here."""
    text = ForcedText((1, 2), tuple(range(3, 3 + NEW_TOKENS)), 0)
    forcing = FakeForcing([text, replace(text, prompt_ids=(2, 1))])
    rows = TextRows(forcing.lengths, forcing.target_probs, NEW_TOKENS)
    timer = FakeTimer(verify_share=verify_share)
    cost = measure_costs(timer, [(1,)], replace(SPACE, gamma_max=24), FINGERPRINT, repeats=1)
    candidates = Candidates(Predictor(forcing, rows, cost, SPACE.gamma_max), replace(SPACE, siblings_max=3))
    plain = Candidates(candidates.predictor, SPACE)
    mask = SkipMask.from_layers(SPACE.num_layers, [1, 2, 3, 4])
    found, without = candidates.of(mask), plain.of(mask)
    assert found.params["siblings"] == pays
    assert (found.log_speedup > without.log_speedup) == pays
    config = candidates.read(candidates.write([found]))
    assert config[0].params == found.params
    assert {one.params["siblings"] for one in candidates.variants(mask, 2)} == ({0, 1} if pays else {0})


def test_readings_without_ranks_cannot_be_replayed_with_siblings() -> None:
    reading, rows = readings(0)
    settings = replace(Settings.grid([2], [0.0], [0.0]), siblings=2)
    with pytest.raises(ValueError, match="reading: must have ranks to replay 2 siblings, has none"):
        replay(replace(reading, ranks=None), rows, settings)
    with pytest.raises(ValueError, match="verify_s: must reach gamma 6, has 3 entries"):
        replay(reading, rows, settings, [1.0] * 3)


def test_ranks_go_where_readings_go() -> None:
    one, other = readings(1)[0], readings(2, texts=2, width=9, depth=1)[0]
    joint = join_readings([one, other], 12)
    np.testing.assert_array_equal(joint.ranks[:, :3], one.ranks)
    np.testing.assert_array_equal(joint.select([1]).ranks, one.ranks[:, [1]])
    assert join_readings([one, replace(other, ranks=None)], 12).ranks is None
    assert one.nbytes == replace(one, ranks=None).nbytes + one.ranks.nbytes
