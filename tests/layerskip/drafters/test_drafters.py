"""What every drafter promises: the target's tokens, its distribution, sound caches and honest counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerskip.decoding.loop
from layerskip import DecodeConfig, DecodeStats, LayerSkipModel, SkipMask, custom_generate
from layerskip.config.lookup_settings import PromptLookup, SuffixLookup
from layerskip.decoding.loop import DecodeLoop, DecodeRequest
from layerskip.drafters import TextStore
from layerskip.drafters.lookups.drafter import LookupSession
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo
from tests.layerskip.decoding.counters import check_counters, check_ends
from tests.layerskip.huggingface.test_adapter import PlantedError
from tests.layerskip.rounds.test_broken_rounds import check_survives, failing
from tests.layerskip.rounds.test_device_round import table_engine
from tests.layerskip.rounds.test_sampling import (
    FAILS,
    MASK,
    NUM_DRAWS,
    NUM_TOKENS,
    PASSES,
    VOCAB,
    Exact,
    TableEngine,
    accepted_with_the_targets_probability,
    correct,
    enumerate_exactly,
    p_values,
)
from tests.layerskip.tape import TapeRecorder, engine_of

NGRAM = PromptLookup(min_match=1, max_match=3)
OFTEN = PromptLookup(min_match=1, max_match=2, continuation="frequent")
SUFFIX = SuffixLookup(min_match=1, factor=2.0, min_probability=0.3)


def by_weights(run: str, gamma: int = 4) -> dict[str, DecodeConfig]:
    """A config of every drafter that needs trained weights."""
    common: dict[str, Any] = {"skip_mask": SkipMask.none(zoo.NUM_LAYERS), "gamma": gamma}
    lookup = NGRAM.model_copy(update={"gamma": gamma + 2})
    found = {}
    own_layers = [zoo.mtp_of(run)] if run in zoo.WITH_MTP else []
    trained = [] if run == "gemma3n" else [zoo.eagle_of(run)]  # which has several states a token
    for weights in (*own_layers, *trained, zoo.draft_model_of(run)):
        own = common | {"draft_weights": weights}
        found[weights.drafter] = DecodeConfig(drafter=weights.drafter, **own, draft_threshold=0.2, target_threshold=0.1)
        found[f"hybrid {weights.drafter}"] = DecodeConfig(drafter="hybrid", **own, lookup=lookup)
    return found


def by_trees(run: str, gamma: int = 4) -> dict[str, DecodeConfig]:
    """Configs of drafts by trained weights that are trees."""
    chains, found = by_weights(run, gamma), dict[str, DecodeConfig]()
    named = (("eagle", 5), ("hybrid eagle", 9), ("mtp", 5), ("hybrid mtp", 9))
    for name, tree_tokens in (one for one in named if one[0] in chains):
        weights = chains[name].draft_weights
        update = {"draft_weights": weights.branching(tree_tokens), "draft_threshold": 0.0}
        found[f"{name} tree"] = chains[name].model_copy(update=update)
    return found


def drafters(mask: SkipMask, gamma: int = 4) -> dict[str, DecodeConfig]:
    """A config of every drafter that needs nothing but the model."""
    none = SkipMask.none(mask.num_layers)
    hybrid: dict[str, Any] = {"drafter": "hybrid", "skip_mask": mask, "gamma": gamma}
    return {
        "layer_skip": DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=0.3),
        "prompt_lookup": DecodeConfig(drafter="prompt_lookup", skip_mask=none, gamma=gamma, lookup=NGRAM),
        "prompt_lookup frequent": DecodeConfig(
            drafter="prompt_lookup", skip_mask=none, gamma=gamma + 3, lookup=OFTEN, target_threshold=0.3
        ),
        "suffix": DecodeConfig(drafter="suffix", skip_mask=none, gamma=gamma, lookup=SUFFIX),
        "hybrid": DecodeConfig(**hybrid, lookup=NGRAM.model_copy(update={"gamma": gamma + 2})),
        "hybrid suffix": DecodeConfig(
            **hybrid, target_threshold=0.4, draft_threshold=0.3, lookup=SUFFIX.model_copy(update={"gamma": 2})
        ),
    }


DRAFTERS = tuple(drafters(SkipMask.none(2)))
TRAINED = ("eagle", "hybrid eagle", "draft_model", "hybrid draft_model")
TREES = ("eagle tree", "hybrid eagle tree")


def config_of(name: str, run: str, mask: SkipMask) -> DecodeConfig:
    if name in TREES:
        return by_trees(zoo.architecture(run))[name]
    return by_weights(zoo.architecture(run))[name] if name in TRAINED else drafters(mask)[name]


PROMPT = (3, 5, 8, 3, 5, 9, 3, 5)
"""Ends as it was before, so that there is something to look up at once."""


def again(name: str) -> tuple[int, ...]:
    """What is to come was there before, up to where the new prompt leads. Without 0, which `generate` takes for
    padding."""
    return (*PROMPT, *(token for token in zoo.greedy_reference(name, PROMPT)[:12] if token), *PROMPT)


@zoo.few(zoo.RUNS + zoo.GRAPH_RUNS)
def test_greedy_equals_generate(name: str) -> None:
    model, mask = zoo.layerskip_of(name), zoo.masks_of(name)["interior"]
    total: Counter[str] = Counter()
    for config in drafters(mask).values():
        for prompt, budget in ((PROMPT, zoo.LONGEST), (again(name), 16), (zoo.prompt_of(1), 5)):
            out = model.generate(prompt, max_new_tokens=budget, config=config)
            assert out.ids == list(zoo.greedy_reference(name, prompt)[:budget]), config
            check_counters(out, config)
            total.update(looked_up=out.stats.num_looked_up, kept=out.stats.num_looked_up_accepted)
            total.update(drafted=out.stats.num_drafted, alone=out.stats.num_target_only)
    assert 0 < total["kept"] < total["looked_up"] < total["drafted"]
    assert total["alone"]


@zoo.few(zoo.RUNS)
def test_greedy_equals_generate_with_trained_weights(name: str) -> None:
    model, total = zoo.layerskip_of(name), Counter[str]()
    run = zoo.architecture(name)
    for config in (by_weights(run) | (by_trees(run) if run not in (*zoo.WITHOUT_TREES, "gemma3n") else {})).values():
        for prompt, budget in ((PROMPT, zoo.LONGEST), (again(name), 16), (zoo.prompt_of(1), 5)):
            out = model.generate(prompt, max_new_tokens=budget, config=config)
            assert out.ids == list(zoo.greedy_reference(name, prompt)[:budget]), config
            check_counters(out, config)
            total.update(drafted=out.stats.num_drafted - out.stats.num_looked_up)
            total.update(kept=out.stats.num_accepted - out.stats.num_looked_up_accepted)
    assert 0 < total["kept"] < total["drafted"]


@zoo.each(("llama", "llama fused", "gemma3", "falcon-alibi", "llama graph"))
@pytest.mark.parametrize("drafter", DRAFTERS + TRAINED)
def test_the_cache_after_each_step_holds_all_but_the_last_token(name: str, drafter: str) -> None:
    model, config = zoo.layerskip_of(name), config_of(drafter, name, SkipMask.from_layers(4, [0, 2]))
    total = len(PROMPT)
    for piece in model.stream(PROMPT, max_new_tokens=20, config=config):
        total += len(piece.ids)
        assert model.engine.cache.length == total - 1
    assert total == len(PROMPT) + 20


@pytest.mark.parametrize("drafter", DRAFTERS + TRAINED + TREES)
def test_end_of_text_at_every_offset_of_a_round(drafter: str) -> None:
    model, config = zoo.layerskip_of("llama fused"), config_of(drafter, "llama", SkipMask.from_sublayers(4, mlp=[3]))
    prompt = again("llama fused")
    check_ends(model, prompt, config, zoo.greedy_reference("llama fused", prompt))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_strings_and_streaming(drafter: str, text_model: LayerSkipModel) -> None:
    config = drafters(SkipMask.from_layers(text_model.num_layers, [1]))[drafter]
    text = "def read(self): return def read(self):"
    plain = text_model.generate(text, max_new_tokens=24, config=DecodeConfig.plain(text_model.num_layers))
    stop = plain.text[5:8]
    expected = text_model.generate(
        text, max_new_tokens=24, stop_strings=stop, config=DecodeConfig.plain(text_model.num_layers)
    )
    out = text_model.generate(text, max_new_tokens=24, stop_strings=stop, config=config)
    assert (out.ids, out.finish_reason) == (expected.ids, "stop")
    stream = text_model.stream(text, max_new_tokens=24, config=config)
    pieces = list(stream)
    assert [token for piece in pieces for token in piece.ids] == plain.ids
    assert "".join(piece.text for piece in pieces) == plain.text
    rejected = sum(len(piece.rejected) for piece in pieces)
    stats = stream.stats
    assert rejected <= stats.num_drafted - stats.num_accepted


@settings(max_examples=25)
@given(st.data())
def test_any_lookup_gives_the_targets_tokens(data: st.DataObject) -> None:
    model = zoo.layerskip_of("qwen2 fused")
    least = data.draw(st.integers(1, 4))
    is_hybrid = data.draw(st.booleans())
    own: dict[str, Any] = {"min_match": least}
    if is_hybrid:
        own["gamma"] = data.draw(st.none() | st.integers(1, 12))
        own["target_threshold"] = data.draw(st.none() | st.sampled_from([0.0, 0.3, 0.9]))
    suffix = data.draw(st.booleans())
    lookup: Any = (
        SuffixLookup(**own, factor=data.draw(st.sampled_from([0.5, 1.0, 4.0])), min_probability=0.1)
        if suffix
        else PromptLookup(**own, max_match=least + 2, continuation=data.draw(st.sampled_from(["recent", "frequent"])))
    )
    config = DecodeConfig(
        drafter="hybrid" if is_hybrid else lookup.method,
        skip_mask=SkipMask.from_layers(4, [1, 2] if is_hybrid else []),
        gamma=data.draw(st.integers(1, 9)),
        lookup=lookup,
    )
    prompt = zoo.prompt_of(data.draw(st.integers(1, 4)), seed=data.draw(st.integers(0, 2)))
    out = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config)
    assert out.ids == list(zoo.greedy_reference("qwen2 fused", prompt))
    check_counters(out, config)


@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix", "hybrid"])
@pytest.mark.parametrize("name", ["llama", "llama graph"])
def test_an_exception_anywhere_leaves_the_model_whole(name: str, drafter: str, monkeypatch: Any) -> None:
    model, config = zoo.layerskip_of(name), drafters(SkipMask.from_layers(4, [1, 2]))[drafter]

    places = ((LookupSession, "propose"), (LookupSession, "look_up"), (layerskip.decoding.loop, "_settle"))
    expected = check_survives(model, again(name), config, places, monkeypatch)
    assert expected.stats.num_rounds > 1
    if name.endswith("graph"):
        engine_of(model).close()  # what is recorded already would not call the patched function
    with failing(monkeypatch, Sampler, "shape", 1, after=True), pytest.raises(PlantedError):
        model.generate(again(name), max_new_tokens=16, config=config)
    out = model.generate(again(name), max_new_tokens=16, config=config)
    assert (out.ids, out.stats.counters()) == (expected.ids, expected.stats.counters())


# Sampling.

LOOPED = (2, 0, 1, 2, 0, 1, 2, 0)
WARM = SamplingParams(do_sample=True, top_k=0, temperature=0.7)


def draw_many(engine: Any, config: DecodeConfig, seed: int, num_draws: int) -> tuple[Counter[Any], DecodeStats]:
    generator, draws, total = torch.Generator().manual_seed(seed), Counter[Any](), DecodeStats()
    for _ in range(num_draws):
        stats = DecodeStats()
        loop = DecodeLoop(engine, config, Sampler(WARM, generator))
        request = DecodeRequest(LOOPED, NUM_TOKENS)
        draws[tuple(token for emitted in loop.run(request, stats) for token in emitted.ids)] += 1
        for name in ("num_looked_up", "num_looked_up_accepted", "num_drafted", "num_accepted"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
    return draws, total


def exactly() -> Exact:
    return enumerate_exactly(TableEngine().target_row, WARM, LOOPED, VOCAB, NUM_TOKENS)


@pytest.mark.parametrize(
    "drafter",
    [pytest.param(one, marks=() if one in ("suffix", "hybrid") else pytest.mark.slow) for one in DRAFTERS[1:]],
)
def test_output_follows_the_targets_distribution(drafter: str) -> None:
    draws, stats = draw_many(TableEngine(), drafters(MASK, gamma=3)[drafter], 11, NUM_DRAWS)
    values = p_values(draws, exactly())
    assert min(values.values()) > PASSES, values
    assert NUM_DRAWS / 8 < stats.num_looked_up_accepted < stats.num_looked_up - NUM_DRAWS / 8


@pytest.mark.parametrize("drafter", ["prompt_lookup", "hybrid"])
def test_rounds_on_the_device_follow_it_too(drafter: str) -> None:
    draws, stats = draw_many(table_engine(TapeRecorder()), drafters(MASK, gamma=3)[drafter], 12, 1_200)
    values = p_values(draws, exactly())
    assert min(values.values()) > PASSES, values
    assert stats.num_looked_up_accepted > 100


@pytest.mark.parametrize(
    ("drafter", "broken"),
    [
        ("hybrid", True),
        ("hybrid", False),
        *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("prompt_lookup", "suffix")),
    ],
)
def test_a_broken_verifier_fails_the_same_test(drafter: str, broken: bool, monkeypatch: Any) -> None:
    """And with the harness's own, which is right, it passes."""
    verifier = accepted_with_the_targets_probability if broken else correct
    monkeypatch.setattr(layerskip.decoding.loop, "verify", verifier)
    values = p_values(draw_many(TableEngine(), drafters(MASK, gamma=3)[drafter], 13, NUM_DRAWS)[0], exactly())
    assert min(values.values()) < FAILS if broken else min(values.values()) > PASSES, values


# Earlier texts.


def test_earlier_texts_are_drafted_from_where_they_are_given() -> None:
    model = zoo.layerskip_of("llama fused")
    config = DecodeConfig(drafter="suffix", skip_mask=SkipMask.none(4), gamma=8, lookup=SuffixLookup(min_match=2))
    prompt = zoo.prompt_of(6, seed=4)
    alone = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config)
    store = TextStore(200)
    store.add([*prompt, *alone.ids])
    again = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config, text_store=store)
    assert again.ids == alone.ids == list(zoo.greedy_reference("llama", prompt))
    assert again.stats.num_accepted == again.stats.num_drafted
    assert again.stats.num_rounds < alone.stats.num_rounds + alone.stats.num_target_only
    assert store.num_tokens == len(prompt) + zoo.LONGEST  # nothing is added by itself


def test_texts_of_another_vocabulary_are_refused() -> None:
    """Their ids would reach the embedding, which on a GPU breaks the whole process."""
    model, store = zoo.layerskip_of("llama"), TextStore(9)
    store.add([zoo.VOCAB - 1])
    assert len(model.generate(PROMPT, max_new_tokens=2, text_store=store).ids) == 2
    store.add([1, zoo.VOCAB])
    message = f"text_store: token ids must be in 0..{zoo.VOCAB - 1}, got {zoo.VOCAB}"
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPT, max_new_tokens=2, text_store=store)
    with pytest.raises(ValueError, match=message):
        zoo.model_of("llama").generate(
            torch.tensor([PROMPT]),
            max_new_tokens=2,
            custom_generate=custom_generate(DecodeConfig.plain(4), engine="eager", text_store=store),
        )


# Configs.


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_configs_round_trip(drafter: str) -> None:
    config = drafters(SkipMask.from_layers(4, [1]))[drafter]
    assert DecodeConfig.from_json(config.to_json()) == config
    assert config.speculates
    assert config.max_gamma == max(config.gamma, config.lookup_gamma)


def test_a_file_of_before_there_were_drafters_is_layer_skip() -> None:
    config = DecodeConfig.from_json('{"schema_version": 1, "skip_mask": "4:1", "gamma": 3}')
    assert (config.drafter, config.lookup, config.lookup_gamma, config.max_gamma) == ("layer_skip", None, 0, 3)


LOOKUP = {"method": "prompt_lookup", "min_match": 2, "max_match": 4}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"drafter": "ngrams"},
        "drafter: input should be 'layer_skip', 'prompt_lookup', 'suffix', 'hybrid', 'eagle', 'mtp' or",
    ),
    ({"drafter": "suffix"}, "lookup: is required where the drafter is suffix"),
    ({"lookup": LOOKUP}, "lookup: must be left out where the drafter is layer_skip"),
    ({"drafter": "suffix", "lookup": LOOKUP}, "lookup.method: must be the drafter, suffix, got prompt_lookup"),
    ({"drafter": "prompt_lookup", "lookup": LOOKUP, "gamma": 0}, "gamma: must be at least 1 where the drafter is"),
    ({"drafter": "prompt_lookup", "lookup": LOOKUP, "skip_mask": "4:1"}, "skip_mask: must be left out where"),
    ({"drafter": "prompt_lookup", "lookup": LOOKUP, "draft_threshold": 0.1}, "draft_threshold: must be left out"),
    ({"drafter": "prompt_lookup", "lookup": LOOKUP | {"gamma": 3}}, "lookup.gamma: must be left out where"),
    ({"drafter": "hybrid", "lookup": LOOKUP | {"min_match": 0}}, "min_match: input should be greater than or equal"),
    ({"drafter": "hybrid", "lookup": LOOKUP | {"max_match": 1}}, "max_match: must be at least min_match, 2, got 1"),
    ({"drafter": "hybrid", "lookup": {"min_match": 2}}, "lookup: unable to extract tag using discriminator 'method'"),
    ({"drafter": "hybrid", "lookup": {"method": "x" * 5_000}}, "lookup: 'method' must be one of 'prompt_lookup', "),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_bad_drafters_name_field_rule_and_value(fields: dict[str, Any], message: str) -> None:
    data = {"schema_version": 1, "skip_mask": SkipMask.none(4), "gamma": 3} | fields
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        DecodeConfig(**data)
    assert message in str(caught.value)
