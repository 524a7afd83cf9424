"""Keys and values of earlier requests: of a chat's next turn only the rest is computed, and the answer is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import LayerSkipModel
from tests.layerskip.serving import Serving, serving, tiny_model

FIELDS: dict[str, Any] = {"max_tokens": 8, "return_token_ids": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LayerSkipModel:
    return tiny_model(tokenizer)


def answer(server: Serving, prompt: list[int], **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """(token ids, usage) of one completion."""
    status, _, body = server.complete(prompt, **FIELDS | fields)
    assert status == 200, body
    usage = body["usage"]
    assert body["layerskip"]["num_cached"] == usage["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["token_ids"], usage


def test_the_next_turn_is_computed_from_where_the_last_one_ended(model: LayerSkipModel) -> None:
    text, known = [5, 9, 7, 8], []
    with serving(model) as server:
        for _ in range(3):
            ids, usage = answer(server, text)
            assert ids == model.generate(text, max_new_tokens=8).ids
            known.append(usage["prompt_tokens_details"]["cached_tokens"])
            text += [*ids, 11, 12]
        metrics = server.metrics()
    assert known == [0, 4 + 7, 4 + 7 + 10]
    assert metrics["layerskip_cached_prompt_tokens_total"] == sum(known)
    assert metrics["layerskip_prompt_tokens_total"] == 4 + 14 + 24
    assert metrics["layerskip_prefix_cache_bytes"] == (24 + 7) * 4 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_prompt_with_several_answers_is_computed_once(tokenizer: Any, engine: str) -> None:
    model, prompts = tiny_model(tokenizer, engine=engine), [[*range(5, 25)], [*range(30, 40)]]
    expected = [model.generate(one, max_new_tokens=8).ids for one in prompts for _ in range(3)]
    with serving(model, max_batch_size=4 if engine == "fused" else 1) as server:
        status, _, body = server.complete(prompts, n=3, **FIELDS)
        assert status == 200, body
        assert [choice["token_ids"] for choice in body["choices"]] == expected
        assert server.metrics()["layerskip_cached_prompt_tokens_total"] == 2 * (19 + 9)


def test_the_official_client_reads_how_much_was_cached(model: LayerSkipModel) -> None:
    with serving(model) as server, server.client() as client:
        messages: list[Any] = [{"role": "user", "content": "def read(path):"}]
        for at_least in (0, 4):
            done = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0.0)
            assert (done.usage.prompt_tokens_details.cached_tokens or 0) >= at_least
            messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]


def test_with_a_seed_nothing_is_taken_and_nothing_left(model: LayerSkipModel) -> None:
    prompt = [5, 9, 7, 8, 6]
    with serving(model) as server:
        cached = [
            answer(server, prompt, **fields)[1]["prompt_tokens_details"]["cached_tokens"]
            for fields in ({"seed": 1, "temperature": 0.7}, {}, {"seed": 1, "temperature": 0.7}, {})
        ]
    assert cached == [0, 0, 0, 4]


def test_with_a_seed_they_are_used_where_pieces_have_the_same_bits(tokenizer: Any) -> None:
    """The hardest case for that: bfloat16, in which near-ties flip at the least difference."""
    prompt = [5, 9, 7, 8, 6, 11, 30, 4]
    model = tiny_model(tokenizer, engine="fused", dtype=torch.bfloat16)
    if not model.engine.batch_invariant:
        pytest.skip("no compiled sublayers here")
    with serving(model) as server:
        for seed in range(20):
            fields = {"seed": seed, "temperature": 1.5, "top_k": 0, "max_tokens": 30}
            first, _ = answer(server, prompt, **fields)
            again, usage = answer(server, prompt, **fields)
            answer(server, [*prompt, *again[:seed]], **fields)
            assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
            sampled = {"do_sample": True, "temperature": 1.5, "top_k": 0}
            assert first == again == model.generate(prompt, max_new_tokens=30, seed=seed, **sampled).ids


def test_an_answer_that_a_stop_string_ends_keeps_what_was_computed(model: LayerSkipModel) -> None:
    prompt = [5, 9, 7, 8, 6]
    stop = model.tokenizer.decode(model.generate(prompt, max_new_tokens=8).ids)[1:3]
    with serving(model) as server:
        answer(server, prompt, stop=[stop])
        assert answer(server, prompt)[1]["prompt_tokens_details"]["cached_tokens"] == 4


def test_with_none_kept_every_prompt_is_computed_whole(model: LayerSkipModel) -> None:
    with serving(model, prefix_cache_bytes=0) as server:
        for _ in range(2):
            assert answer(server, [5, 9, 7, 8])[1]["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.metrics()["layerskip_prefix_cache_bytes"] == 0
