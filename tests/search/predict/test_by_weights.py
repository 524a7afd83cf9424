"""Trained weights are predicted by replay as masks are: exactly, greedy and sampled, alone and after lookups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.teacher_forcing import ForcedText, TreeReadings, make_teacher_forcing
from layerskip.config.decode_config import READ_STATES, TRAINED, DraftWeights
from layerskip.config.lookup_settings import SuffixLookup
from layerskip.decoding import step_clock
from layerskip.drafters.eagle.lean import LeanEagle, LeanText
from layerskip.engines.native import library
from layerskip.rounds.sampling import SamplingParams
from search.measure.decoder import ModelDecoder
from search.outlook.forecast import Candidate, Candidates
from search.predict.costs import free_costs, measure_costs, named
from search.predict.predictor import Predictor
from search.predict.replay import Settings, TextRows, live_counts, replay
from search.study.fingerprint import Fingerprint
from search.study.space import SearchSpace
from search.study.trials import key_of
from tests.layerskip import tokenizers, zoo
from tests.layerskip.engines.cuda_graph.test_cuda_graph import Operations

NEW_TOKENS, VOCABULARY = 24, 2_048
PUBLISHED = "published"
"""Weights of `eagle` that others have trained."""
GREEDY, WARM = SamplingParams(), SamplingParams(do_sample=True, temperature=0.8, top_k=0)


def weights_of(run: str, kind: str) -> DraftWeights:
    make = {"eagle": zoo.eagle_of, "mtp": zoo.mtp_of, "draft_model": zoo.draft_model_of, PUBLISHED: zoo.published_of}
    return make[kind](zoo.architecture(run))


def space(run: str, kind: str = "eagle") -> SearchSpace:
    weights = weights_of(run, kind)
    drafter = weights.drafter
    return SearchSpace(
        zoo.NUM_LAYERS,
        8,
        (),
        (),
        (),
        drafters=(drafter, f"hybrid_{drafter}"),
        lookup_gamma_max=16,
        draft_weights=(weights,),
        trees=(0, 3, 16) if drafter in READ_STATES else (),
    )


def configs(run: str, kind: str = "eagle") -> list[DecodeConfig]:
    weights = weights_of(run, kind)
    drafter = weights.drafter
    own: dict[str, Any] = {"skip_mask": SkipMask.none(zoo.NUM_LAYERS), "draft_weights": weights}
    narrowed = own | {"draft_weights": weights.narrowed(zoo.VOCAB // 2)}
    lookup = SuffixLookup(min_match=1, gamma=3, target_threshold=0.2)
    trees: list[DecodeConfig] = []
    if drafter in READ_STATES:
        small, large = (own | {"draft_weights": weights.branching(size)} for size in (3, 16))
        trees = [
            DecodeConfig(drafter=drafter, gamma=1, **large),
            DecodeConfig(drafter=drafter, gamma=8, **small),
            DecodeConfig(drafter=drafter, gamma=8, **large),
            DecodeConfig(drafter=drafter, gamma=5, draft_threshold=0.1, target_threshold=0.2, **large),
            DecodeConfig(drafter="hybrid", gamma=4, lookup=lookup, **small),
        ]
    return [
        *trees,
        DecodeConfig(drafter=drafter, gamma=1, **own),
        DecodeConfig(drafter=drafter, gamma=8, **own),
        DecodeConfig(drafter=drafter, gamma=6, draft_threshold=0.4, target_threshold=0.2, **own),
        DecodeConfig(drafter="hybrid", gamma=5, draft_threshold=0.3, lookup=lookup, **own),
        DecodeConfig(drafter=drafter, gamma=5, draft_threshold=0.3, **narrowed),
    ]


@pytest.mark.parametrize(
    ("run", "drafter"),
    [
        ("llama fused", "eagle"),
        pytest.param("gemma3", "eagle", marks=pytest.mark.slow),
        pytest.param("llama", PUBLISHED, marks=pytest.mark.slow),
        pytest.param("glm4-moe", "mtp", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "mtp", marks=pytest.mark.slow),
        ("llama fused", "draft_model"),
        pytest.param("gemma3", "draft_model", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_replayed_counts_are_those_of_decoding(
    run: str, params: SamplingParams, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in memory where nothing was written yet."""
    new_text = LeanEagle.new_text

    def dirty(self: LeanEagle, capacity: int) -> LeanText:
        text = new_text(self, capacity)
        text.keys.fill_(torch.nan)
        text.values.fill_(torch.nan)
        return text

    monkeypatch.setattr(LeanEagle, "new_text", dirty)
    model = zoo.layerskip_of(run)
    decoder = ModelDecoder(model, NEW_TOKENS, params)
    plain = DecodeConfig.plain(zoo.NUM_LAYERS)
    prompts = [zoo.prompt_of(5, seed=i) for i in range(4)]
    texts = [ForcedText(one, decoder.decode(one, plain, seed).ids, seed) for seed, one in enumerate(prompts)]
    every = configs(run, drafter)
    model.check_config(every[0])
    forcing = make_teacher_forcing(model, texts, params)
    rows = TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), NEW_TOKENS)
    cost = replace(
        free_costs(space(run, drafter), 24),
        verify_s=(1.0,) * 25,
        weights_s=dict.fromkeys(map(named, [one.draft_weights for one in every]), 0.1),
    )
    predictor = Predictor(forcing, rows, cost, 8)
    accepted = 0
    for config in every:
        counts = predictor.counts(config, sharp=True)
        for i, prompt in enumerate(prompts):
            out = decoder.decode(prompt, config, i)
            assert out.ids == texts[i].continuation_ids
            replayed = [counts.drafted[0, i] + counts.looked_up[0, i], counts.rounds[0, i], counts.target_only[0, i]]
            assert replayed == live_counts([out.stats]).tolist(), config
            accepted += out.stats.num_accepted - out.stats.num_looked_up_accepted
    assert accepted
    weights = weights_of(run, drafter)
    for each in (weights, weights.branching(16)) if weights.reads_states else (weights,):
        best = predictor.best_by_weights(each, [None], count=3)
        assert [one.config.way for one in best] == [weights.drafter] * 3
        assert best[0].config.draft_weights == each
        assert best[0].speedup >= best[-1].speedup > 1.0


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("words", WARM),
        pytest.param("byte_level", GREEDY, marks=pytest.mark.slow),
        pytest.param("byte_fallback", WARM, marks=pytest.mark.slow),
        pytest.param("words", GREEDY, marks=pytest.mark.slow),
        pytest.param("byte_level", WARM, marks=pytest.mark.slow),
        pytest.param("byte_fallback", GREEDY, marks=pytest.mark.slow),
    ],
)
def test_a_draft_model_with_another_tokenizer_is_replayed_nearly(kind: str, params: SamplingParams) -> None:
    """Exactly where the words are the same. Else a shorter draft may be encoded differently at its end."""
    if kind == "words":
        model, weights = tokenizers.words_of("llama fused")
        prompts = [zoo.prompt_of(5, seed=i) for i in range(4)]
    else:
        model, weights = tokenizers.target_of(kind), tokenizers.weights_of(*{*tokenizers.KINDS} - {kind})
        prompts = [tuple(model.encode(one)) for one in ("The reader opens", "日本語 and", "    def", "Don't")]
    own: dict[str, Any] = {"skip_mask": SkipMask.none(model.num_layers), "draft_weights": weights}
    lookup = SuffixLookup(min_match=1, gamma=3, target_threshold=0.2)
    every = [
        DecodeConfig(drafter="draft_model", gamma=3, **own),
        DecodeConfig(drafter="draft_model", gamma=8, **own),
        DecodeConfig(drafter="draft_model", gamma=6, draft_threshold=0.4, target_threshold=0.2, **own),
        DecodeConfig(drafter="hybrid", gamma=5, draft_threshold=0.3, lookup=lookup, **own),
    ]
    decoder = ModelDecoder(model, NEW_TOKENS, params)
    plain = DecodeConfig.plain(model.num_layers)
    texts = [ForcedText(one, decoder.decode(one, plain, seed).ids, seed) for seed, one in enumerate(prompts)]
    model.check_config(every[0])
    forcing = make_teacher_forcing(model, texts, params)
    rows = TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), NEW_TOKENS)
    where = SearchSpace(
        model.num_layers, 8, (), (), (), drafters=("draft_model", "hybrid_draft_model"), draft_weights=(weights,)
    )
    cost = replace(free_costs(where, 24), verify_s=(1.0,) * 25, weights_s={named(weights): 0.1})
    predictor = Predictor(forcing, rows, cost, 8)
    for config in every:
        lives = [decoder.decode(prompt, config, i) for i, prompt in enumerate(prompts)]
        assert [one.ids for one in lives] == [one.continuation_ids for one in texts]
        live = live_counts([one.stats for one in lives])
        error = np.abs(predictor.counts(config, sharp=True).total()[0] - live).sum()
        assert error <= (0.0 if kind == "words" else 0.05 * live.sum()), (config, live)
        ranked = np.abs(predictor.counts(config, sharp=False).total()[0] - live).sum()
        assert ranked <= 0.15 * live.sum(), (config, live)
    best = predictor.best_by_weights(weights, [None], count=2)
    assert best[0].speedup >= best[1].speedup > 1.3


def test_ids_of_another_tokenizer_are_not_narrowed() -> None:
    where = replace(space("llama", "draft_model"), draft_vocabs=(VOCABULARY, 1_024))
    assert [one.draft_vocab for one in where.variants_of(where.draft_weights[0])] == [None, 1_024]
    assert "weights.draft_vocab" in where.distributions
    where = replace(where, narrows_weights=False)
    assert where.variants_of(where.draft_weights[0]) == list(where.draft_weights)
    assert "weights.draft_vocab" not in where.distributions
    config = configs("llama", "draft_model")[0]
    assert where.to_config(where.to_params(config)).draft_weights == config.draft_weights


def test_weights_are_narrowed_to_fewer_ids_than_they_know(tmp_path: Path) -> None:
    where = replace(space("llama", "eagle"), draft_vocabs=(64, 32, 16), trees=())
    for num_draft_ids, expected in ((None, [None, 32, 16]), (32, [None, 16]), (20, [None, 16]), (16, [None])):
        folder = tmp_path / str(num_draft_ids)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"shape": {"num_draft_ids": num_draft_ids}}))
        weights = DraftWeights(path=str(folder), fingerprint="0" * 16)
        assert [one.draft_vocab for one in where.variants_of(weights)] == expected


@pytest.mark.parametrize("drafter", [TRAINED[0], *(pytest.param(one, marks=pytest.mark.slow) for one in TRAINED[1:])])
def test_a_draft_of_weights_is_timed(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts torch's operations, as a busy machine's seconds turn those of tiny models round."""
    monkeypatch.setattr(library, "load_kernels", lambda: "no C++ compiler")  # a kernel is no operation of torch's
    run = zoo.WITH_MTP[0] if drafter == "mtp" else "llama fused"
    model = zoo.layerskip_of(run) if drafter == "mtp" else LayerSkipModel(zoo.model_of(run), engine="fused")
    model.check_config(configs(run, drafter)[0])
    fingerprint = Fingerprint(*["x"] * 12, 16, 4, "layer")  # type: ignore[arg-type]
    text = (*zoo.prompt_of(20), *zoo.greedy_reference(run, zoo.prompt_of(20)))
    timer = ModelDecoder(model, NEW_TOKENS).timer(8)
    with Operations() as operations:
        clock = SimpleNamespace(perf_counter=lambda: float(len(operations.names)))
        monkeypatch.setattr(step_clock, "time", clock)
        cost = measure_costs(timer, [text], replace(space(run, drafter), gamma_max=2), fingerprint, repeats=3)
    weights = weights_of(run, drafter)
    trees = (None, 3, 16) if drafter in READ_STATES else (None,)
    assert list(cost.weights_s) == [named(weights.branching(size)) for size in trees]
    draft_s = cost.draft_s(weights, threshold=False)
    assert draft_s > 0
    if drafter in READ_STATES:
        assert draft_s < cost.verify_s[0]  # one layer of four; the draft model is as large as the target
        assert cost.draft_s(weights.branching(16), threshold=False) > draft_s


@pytest.mark.parametrize("drafter", TRAINED)
def test_configs_and_parameters_are_each_others_inverse(drafter: str) -> None:
    run = zoo.WITH_MTP[0] if drafter == "mtp" else "llama"
    where = space(run, drafter)
    for config in configs(run, drafter):
        params = where.to_params(config)
        assert where.holds(params)
        assert where.to_config(params).way == config.way
        assert where.to_params(where.to_config(params)) == params
    with pytest.raises(ValueError, match="draft_weights: are required to search eagle"):
        SearchSpace(4, 8, (), (), (), drafters=("layer_skip", "eagle"))


def test_where_trees_are_searched_eagle_has_them_and_other_weights_siblings() -> None:
    both = tuple(weights_of("llama", one) for one in ("eagle", "draft_model"))
    where = replace(space("llama"), drafters=("eagle", "draft_model"), draft_weights=both, siblings_max=3)
    assert "weights.tree_tokens" in where.names_for("eagle")
    assert "weights.siblings" not in where.names_for("eagle")
    assert "weights.siblings" in where.names_for("draft_model")
    assert "weights.tree_tokens" not in where.names_for("draft_model")
    assert [one.tree_tokens for one in where.variants_of(both[0])] == [None, 3, 16]
    assert where.variants_of(both[1]) == [both[1]]
    tree = configs("llama")[2]
    params = where.to_params(tree)
    assert (params["weights.tree_tokens"], where.to_config(params).tree_tokens) == (16, 16)
    candidates = Candidates(SimpleNamespace(has_more=False), where)  # type: ignore[arg-type]
    one = Candidate(key_of(params), 0.25)
    [row] = candidates.write([one])
    assert row[0] == f"weights:{both[0].fingerprint}:t16"
    assert candidates.read([row]) == [one]


def test_a_tree_larger_than_was_read_is_refused() -> None:
    nothing = np.zeros((1, 4, 2), dtype=np.float32)
    reading = TreeReadings(8, nothing, nothing.astype(np.uint8), nothing, nothing.astype(np.int16))
    rows = TextRows(np.array([4]), np.ones((1, 4), dtype=np.float32), 4)
    grid = replace(Settings.grid([2], [0.0], [0.0]), tree_tokens=9)
    with pytest.raises(ValueError, match="tree_tokens: must be from 1 to 8, as many as were read, got 9"):
        replay(reading, rows, grid)
