"""A prompt that begins like an earlier text goes on from there, and says the same as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, PrefixCache, SkipMask
from layerskip.decoding import prefix_cache
from tests.layerskip import zoo
from tests.layerskip.drafters.test_drafters import DRAFTERS, PROMPT, TRAINED, TREES, config_of

MUCH = 1 << 24
MASK = SkipMask.from_layers(4, [1])


def conversation(model: LayerSkipModel, cache: PrefixCache, **arguments: Any) -> list[int]:
    """Three turns, each checked against one from scratch; how many tokens of each were known."""
    text, known = list(PROMPT), []
    for turn in range(3):
        out = model.generate(text, max_new_tokens=9, prefix_cache=cache, **arguments)
        assert out.ids == model.generate(text, max_new_tokens=9).ids
        known.append(out.stats.num_cached)
        text += [*out.ids, *zoo.prompt_of(4, seed=turn)]
    return known


@zoo.few(zoo.RUNS + zoo.GRAPH_RUNS)
def test_a_conversation_of_every_architecture(name: str) -> None:
    """All but the last emitted token of the turn before is known, whose keys no round has needed."""
    model = zoo.layerskip_of(name)
    config = DecodeConfig(skip_mask=zoo.masks_of(name)["interior"], gamma=3)
    assert conversation(model, PrefixCache(MUCH), config=config) == [0, 16, 29]


@zoo.few(("llama", "llama fused", "llama graph", "gemma3"), ("llama",))
@pytest.mark.parametrize("drafter", DRAFTERS + TRAINED + TREES)
def test_a_conversation_with_every_drafter(name: str, drafter: str) -> None:
    model, config = zoo.layerskip_of(name), config_of(drafter, name, MASK)
    assert conversation(model, PrefixCache(MUCH), config=config) == [0, 16, 29]


@pytest.mark.parametrize("name", ["llama", "llama fused", "llama graph"])
def test_what_is_put_in_the_cache_is_what_the_prompt_would_have_left_there(name: str) -> None:
    model, cache = zoo.layerskip_of(name), PrefixCache(MUCH)
    first = model.generate(PROMPT, max_new_tokens=6, prefix_cache=cache)
    text = [*PROMPT, *first.ids, 7]
    left = []
    for given in (cache, None):
        stream = model.stream(text, max_new_tokens=2, prefix_cache=given)
        next(stream)
        assert model.engine.cache.length == len(text)
        left.append(model.engine.cache.rows(len(text)))
        stream.close()
    for one, other in zip(*left, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_sampled_text_is_the_same_for_the_same_seed() -> None:
    model, cache = zoo.layerskip_of("llama fused"), PrefixCache(MUCH)
    model.generate(PROMPT, max_new_tokens=12, prefix_cache=cache)
    for seed in range(8):
        arguments: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": seed, "max_new_tokens": 12}
        out = model.generate((*PROMPT, 9), prefix_cache=cache, **arguments | {"seed": np.int64(seed)})
        assert out.stats.num_cached >= len(PROMPT)
        assert out.ids == model.generate((*PROMPT, 9), **arguments).ids


@pytest.mark.skipif("qwen3_5" not in zoo.FUSED, reason="no kernels here")
def test_states_of_layers_serve_the_engine_alone_that_computed_them() -> None:
    model, cache = zoo.model_of("qwen3_5"), PrefixCache(MUCH)
    known = []
    for engine in ("eager", "fused", "eager"):
        out = LayerSkipModel(model, engine=engine).generate((*PROMPT, 9), max_new_tokens=4, prefix_cache=cache)
        known.append(out.stats.num_cached)
        LayerSkipModel(model, engine=engine).generate(PROMPT, max_new_tokens=1, prefix_cache=cache)
    assert known == [0, 0, len(PROMPT)]


@pytest.mark.skipif("glm4-moe" not in zoo.FUSED, reason="no kernels here")
def test_keys_serve_the_engine_alone_that_computed_them() -> None:
    """Where a part of a head is rotated, two engines keep its numbers in different orders."""
    engines = [zoo.layerskip_of("glm4-moe"), zoo.layerskip_of("glm4-moe fused")]
    cache, prompt = PrefixCache(MUCH), zoo.prompt_of(20)
    first = engines[0].generate(prompt, max_new_tokens=8, prefix_cache=cache)
    text = [*prompt, *first.ids, 3, 1, 4]
    for engine, known in zip(engines, (27, 0), strict=True):
        out = engine.generate(text, max_new_tokens=12, prefix_cache=cache)
        assert out.stats.num_cached == known
        assert out.ids == engine.generate(text, max_new_tokens=12).ids


def test_a_drafter_that_reads_states_takes_only_texts_that_have_them() -> None:
    model, cache = zoo.layerskip_of("llama"), PrefixCache(MUCH)
    plain, eagle = DecodeConfig.plain(zoo.NUM_LAYERS), config_of("eagle", "llama", MASK)
    text = (*PROMPT, 9)
    model.generate(PROMPT, max_new_tokens=4, prefix_cache=cache, config=plain)

    def known(config: DecodeConfig, prompt: tuple[int, ...] = text) -> int:
        return model.generate(prompt, max_new_tokens=4, prefix_cache=cache, config=config).stats.num_cached

    assert [known(one) for one in (eagle, eagle, plain)] == [0, len(text) - 1, len(text) - 1]
    # A longer text without states takes no place of one that has them.
    assert [known(plain, (*text, *text)), known(eagle)] == [len(text), len(text) - 1]
    # The same text again, now with states, is kept although its keys are there.
    assert [known(eagle, (*text, *text)) for _ in range(2)] == [len(text), 2 * len(text) - 1]


def test_whoever_stops_early_keeps_what_was_computed_and_who_fails_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, cache = zoo.layerskip_of("llama"), PrefixCache(MUCH)
    stream = model.stream(PROMPT, max_new_tokens=20, prefix_cache=cache)
    stream.close()
    assert cache.num_bytes == 0
    stream = model.stream(PROMPT, max_new_tokens=20, prefix_cache=cache)
    emitted = [token for _ in range(4) for token in next(stream).ids]
    stream.close()
    out = model.generate([*PROMPT, *emitted, 1], max_new_tokens=1, prefix_cache=cache)
    assert out.stats.num_cached == len(PROMPT) + 3

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("broken")

    before = cache.num_bytes
    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "forward", broken)
        with pytest.raises(RuntimeError, match="broken"):
            model.generate(zoo.prompt_of(30, seed=5), max_new_tokens=4, prefix_cache=cache)
    assert cache.num_bytes == before
    assert model.generate(PROMPT, max_new_tokens=9).ids == list(zoo.greedy_reference("llama", PROMPT)[:9])


def test_a_prompt_is_there_for_others_before_its_text_has_ended() -> None:
    model, cache = zoo.layerskip_of("llama"), PrefixCache(MUCH)
    stream = model.stream(PROMPT, max_new_tokens=20, prefix_cache=cache)
    next(stream)
    held = cache.num_bytes
    assert held > 0
    stream.close()
    assert kept(model, cache, PROMPT) == len(PROMPT)
    assert len(cache._texts) == 1


def kept(model: LayerSkipModel, cache: PrefixCache, prompt: tuple[int, ...]) -> int:
    return model.generate((*prompt, 60, 59), max_new_tokens=1, prefix_cache=cache).stats.num_cached


def test_the_oldest_texts_make_room_and_a_used_one_is_young_again() -> None:
    """A position of four layers takes 4 x 2 x 2 heads x 8 numbers of 4 bytes; room for two and a half texts."""
    position = 4 * 2 * 2 * 8 * 4
    model, cache = zoo.layerskip_of("llama"), PrefixCache(25 * position)
    one, two, three = ((k, *zoo.prompt_of(9, seed=k)) for k in (1, 2, 3))
    for prompt in (one, two):
        model.generate(prompt, max_new_tokens=1, prefix_cache=cache)
    assert cache.num_bytes == 20 * position
    model.generate(one, max_new_tokens=1, prefix_cache=cache)
    model.generate(three, max_new_tokens=1, prefix_cache=cache)
    assert cache.num_bytes == 20 * position
    assert kept(model, PrefixCache(MUCH), one) == 0
    assert [kept(model, cache, prompt) for prompt in (one, two)] == [10, 0]


def test_of_a_text_too_long_its_beginning_is_kept() -> None:
    position = 4 * 2 * 2 * 8 * 4
    model, cache = zoo.layerskip_of("llama"), PrefixCache(6 * position + 1)
    model.generate(PROMPT, max_new_tokens=1, prefix_cache=cache)
    assert cache.num_bytes == 6 * position
    assert kept(model, cache, PROMPT) == 6
    none = PrefixCache(position - 1)
    assert [kept(model, none, PROMPT) for _ in range(2)] == [0, 0]
    assert none.num_bytes == 0


def test_a_text_that_goes_on_takes_the_place_of_its_beginning() -> None:
    model, cache = zoo.layerskip_of("llama"), PrefixCache(MUCH)
    model.generate(PROMPT, max_new_tokens=1, prefix_cache=cache)
    short = cache.num_bytes
    model.generate((*PROMPT, *PROMPT), max_new_tokens=1, prefix_cache=cache)
    assert cache.num_bytes == 2 * short
    model.generate(PROMPT, max_new_tokens=1, prefix_cache=cache)
    assert cache.num_bytes == 2 * short


def test_a_prompt_is_compared_with_those_alone_that_begin_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many short texts there are: each is looked at for every request."""
    model, cache, compared = zoo.layerskip_of("llama"), PrefixCache(MUCH), list[int]()
    own = prefix_cache._Text.num_common

    def num_common(text: Any, ids: Any) -> int:
        compared.append(len(ids))
        return own(text, ids)

    monkeypatch.setattr(prefix_cache._Text, "num_common", num_common)
    for first in range(50):
        model.generate((first, 1, 2, 3, 4), max_new_tokens=1, prefix_cache=cache)
    assert len(compared) <= 2 * 50  # each at its end with its own prompt
    compared.clear()
    assert kept(model, cache, (7, 1, 2, 3, 4)) == 5
    assert 0 < len(compared) < 12


def test_who_has_no_room_to_keep_a_text_has_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def keep(*_arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PrefixCache, "keep", keep)
    out = zoo.layerskip_of("llama").generate(PROMPT, max_new_tokens=5, prefix_cache=PrefixCache(MUCH))
    assert out.ids == list(zoo.greedy_reference("llama", PROMPT)[:5])
    assert "RuntimeError: out of memory" in caplog.text


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="max_bytes: must be at least 1, got 0"):
        PrefixCache(0)
    cache = PrefixCache(MUCH)
    zoo.layerskip_of("llama").generate(PROMPT, max_new_tokens=1, prefix_cache=cache)
    with pytest.raises(ValueError, match="prefix_cache: holds another model's keys and values"):
        zoo.layerskip_of("gpt2").generate(PROMPT, max_new_tokens=1, prefix_cache=cache)
