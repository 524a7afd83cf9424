"""Texts of earlier requests: drafted from where the config says so, bounded, and of no effect on any answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, PromptLookup, SkipMask, SuffixLookup
from layerskip.config.usual_lookups import lookup_alone, lookup_else
from layerskip.server.app import text_store
from layerskip.server.settings import ServerSettings
from tests.layerskip import zoo
from tests.layerskip.server.test_server_memory import assert_nothing_stays
from tests.layerskip.serving import MODEL_ID, Gate, Serving, completion_request, serving, tiny_model, wait_for

SUFFIX = lookup_alone(zoo.NUM_LAYERS, SuffixLookup(min_match=2, factor=4.0))
MASK = DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 2), gamma=3)
HYBRID = lookup_else(MASK, SuffixLookup(min_match=2, factor=4.0))
ASKED: dict[str, Any] = {"max_tokens": 24, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LayerSkipModel:
    return tiny_model(tokenizer, SUFFIX)


def answer(server: Serving, prompt: Any = "def read(", **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """(token ids, counters) of one completion."""
    status, _, body = server.complete(prompt, **ASKED | fields)
    assert status == 200, body
    return body["choices"][0]["token_ids"], body["layerskip"]


def test_what_was_answered_once_is_drafted_the_next_time(model: LayerSkipModel) -> None:
    prompt = model.encode("def read(")
    expected = model.generate(prompt, max_new_tokens=24).ids
    with serving(model) as server:
        found = [answer(server) for _ in range(2)]
        assert [ids for ids, _ in found] == [expected] * 2
        first, second = (counters for _, counters in found)
        assert first["num_rounds"] + first["num_target_only"] > second["num_rounds"] + second["num_target_only"]
        assert second["num_accepted"] == second["num_drafted"] == second["num_looked_up"] > first["num_accepted"]
        assert server.service.store.num_tokens == 2 * (len(prompt) + 24)
        metrics = server.metrics()
        assert metrics["layerskip_stored_tokens"] == server.service.store.num_tokens


@pytest.mark.parametrize(
    ("config", "tokens", "keeps"),
    [
        (SUFFIX, 10, True),
        (HYBRID, 10, True),
        (MASK.model_copy(update={"groups": {"qa": SUFFIX}}), 10, True),
        (MASK.model_copy(update={"regimes": (SUFFIX,)}), 10, True),
        (SUFFIX, 0, False),
        (MASK, 10, False),
        (DecodeConfig.plain(zoo.NUM_LAYERS), 10, False),
        (lookup_alone(zoo.NUM_LAYERS, PromptLookup(min_match=2, max_match=4)), 10, False),
    ],
)
def test_texts_are_kept_only_where_a_setting_looks_at_them(config: DecodeConfig, tokens: int, keeps: bool) -> None:
    store = text_store(config, ServerSettings("m", 96, store_tokens=tokens))
    assert (store is not None) == keeps
    assert store is None or store.max_tokens == tokens


def test_with_none_kept_a_second_request_is_as_the_first(model: LayerSkipModel) -> None:
    with serving(model, store_tokens=0) as server:
        (first_ids, first), (second_ids, second) = answer(server), answer(server)
    assert first_ids == second_ids
    assert first["num_rounds"] == second["num_rounds"]


def test_the_latest_texts_push_out_the_oldest_ones(model: LayerSkipModel) -> None:
    prompts = [[5, 6, 7, i] for i in range(8, 14)]
    with serving(model, store_tokens=40) as server:
        for prompt in prompts:
            answer(server, prompt, max_tokens=6)
        store = server.service.store
        assert (len(store), store.num_tokens) == (4, 40)
        assert store.match(prompts[-1], 4) is not None
        assert store.match(prompts[1], 4) is None
        answer(server, [9] * 60, max_tokens=20)  # of a longer one the end
        assert (len(store), store.num_tokens) == (1, 40)


def test_what_the_client_has_not_seen_is_not_kept(model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what lies past a stop text, nor the answer of a client that left, nor what was refused."""
    full = model.generate("def read(", max_new_tokens=24)
    stop, num_prompt = full.text[4:7], len(model.encode("def read("))
    with serving(model, api_key="correct-horse-battery") as server:
        key = {"Authorization": "Bearer correct-horse-battery"}
        store = server.service.store
        assert store is not None

        def ask(**fields: Any) -> tuple[int, Any]:
            body = {"model": MODEL_ID, "prompt": "def read(", **ASKED, **fields}
            status, _, found = server.request("POST", "/v1/completions", body, headers=key)
            return status, found

        assert server.request("POST", "/v1/completions", {"model": MODEL_ID, "prompt": "x"})[0] == 401
        assert ask(max_tokens=0)[0] == 400
        assert len(store) == 0
        _, stopped = ask(stop=stop)
        assert store.num_tokens == num_prompt + len(stopped["choices"][0]["token_ids"]) < num_prompt + 24
        with monkeypatch.context() as patch:
            gate = Gate(model, patch)
            authorised = completion_request(stream=True).replace(
                b"Host: localhost", b"Host: localhost\r\nAuthorization: Bearer correct-horse-battery"
            )
            gate.client_leaves(server, authorised)
        wait_for(lambda: gate.streams[0].closed, "its run has ended")
        assert len(store) == 1


@pytest.mark.parametrize(("engine", "dtype"), [("eager", torch.float32), ("fused", torch.bfloat16)])
def test_a_request_with_a_seed_is_answered_as_if_it_were_the_first(
    tokenizer: Any, engine: str, dtype: torch.dtype
) -> None:
    """What is drafted decides how the target's numbers are rounded, unless they are the same however many at once."""
    model = tiny_model(tokenizer, SUFFIX, engine=engine, dtype=dtype)
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    expected = model.generate("def read(", max_new_tokens=24, do_sample=True, temperature=1.5, seed=3, top_k=50).ids
    with serving(model) as server:
        for _ in range(3):
            assert answer(server, **fields, top_k=50)[0] == expected
            answer(server)
            answer(server, temperature=1.5)


def test_metrics_tell_what_was_looked_up_and_what_was_computed(tokenizer: Any) -> None:
    with serving(tiny_model(tokenizer, HYBRID)) as server:
        counters = [answer(server)[1] for _ in range(2)]
        text = server.request("GET", "/metrics")[2]
    columns = {
        "drafted_tokens": ("num_drafted", "num_looked_up"),
        "accepted_tokens": ("num_accepted", "num_looked_up_accepted"),
        "rounds": ("num_rounds", "num_lookup_rounds"),
    }
    for name, (all_of_them, looked_up) in columns.items():
        found = sum(one[looked_up] for one in counters)
        computed = sum(one[all_of_them] for one in counters) - found
        assert found > 0
        assert computed > 0
        assert f'layerskip_{name}_total{{source="looked_up"}} {float(found)}' in text
        assert f'layerskip_{name}_total{{source="computed"}} {float(computed)}' in text


@pytest.mark.slow
def test_a_full_store_takes_no_more_memory(model: LayerSkipModel) -> None:
    with serving(model, store_tokens=300) as server:

        def ask_all() -> None:
            for i in range(60):
                assert server.complete([5 + i, 6, 7, 8] * (i % 3 + 1), max_tokens=3, stream=i % 2 == 0)[0] == 200

        assert_nothing_stays(server, ask_all, 60)
        assert 280 <= server.service.store.num_tokens <= 300
