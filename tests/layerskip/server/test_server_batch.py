"""A server that decodes several requests at once: each gets its own answer, whatever the others do."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from layerskip import LayerSkipModel
from layerskip.engines.fused import Forward, FusedEngine
from tests.layerskip.engines.test_batch import computed
from tests.layerskip.server.test_server_load import FailingStream
from tests.layerskip.serving import MODEL_ID, completion_request, serving, tiny_model, wait_for

__all__ = ["computed"]  # a fixture


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LayerSkipModel:
    return tiny_model(tokenizer, engine="fused")


@pytest.mark.parametrize("max_drafting", [0, 2, 4])
def test_many_clients_share_forwards_and_get_their_own_answers(
    model: LayerSkipModel, computed: list[list[Forward]], max_drafting: int
) -> None:
    fields: list[dict[str, Any]] = [
        {"prompt": f"def f{i % 5}(", "max_tokens": 3 + i % 7, "seed": i, "temperature": 0.9 * (i % 2)}
        for i in range(24)
    ]
    with serving(model) as server:
        alone = [server.complete(**one)[2]["choices"][0] for one in fields]
    computed.clear()

    async def ask_all(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(client.completions.create(model=MODEL_ID, **one) for one in fields))

    with serving(model, max_batch_size=4, max_drafting=max_drafting, queue_limit=24) as server:
        answers = asyncio.run(ask_all(f"{server.url}/v1"))
        metrics = server.metrics()
    for answer, expected in zip(answers, alone, strict=True):
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == (expected["text"], expected["finish_reason"])
    assert 1 < max(map(len, computed)) <= 4
    assert metrics["layerskip_requests_total{200}"] == 24
    assert (metrics["layerskip_drafted_tokens_total"] > 0) is (max_drafting > 0)


def test_a_request_that_fails_takes_no_other_with_it(model: LayerSkipModel, monkeypatch: Any) -> None:
    expected, real, failing = model.generate("def", max_new_tokens=20).text, model.stream, [True]

    def stream(*args: Any, **rest: Any) -> Any:
        return FailingStream(real(*args, **rest), 2) if failing and failing.pop() else real(*args, **rest)

    with serving(model, max_batch_size=4) as server, ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(model, "stream", stream)
        found = [one.result() for one in [pool.submit(server.complete, max_tokens=20) for _ in range(4)]]
        assert sorted(status for status, _, _ in found) == [200, 200, 200, 500]
        assert {body["choices"][0]["text"] for status, _, body in found if status == 200} == {expected}
        assert server.metrics()["layerskip_failures_total"] == 1


def test_a_request_has_room_for_all_of_its_answers_or_for_none(model: LayerSkipModel) -> None:
    with serving(model, max_batch_size=2, queue_limit=4) as server:
        status, _, body = server.complete(n=7, max_tokens=4)
        assert (status, body["error"]["message"]) == (400, "n: this server takes at most 6 texts at once, got 7")
        status, _, body = server.complete(n=6, max_tokens=4)
        assert (status, len(body["choices"])) == (200, 6)
        assert len({choice["text"] for choice in body["choices"]}) == 1
        wait_for(lambda: server.service.worker.num_admitted == 0, "all have left")


def test_a_client_that_leaves_makes_room_and_the_others_go_on(model: LayerSkipModel) -> None:
    expected = model.generate("def", max_new_tokens=40).text
    with serving(model, max_batch_size=2) as server, ThreadPoolExecutor(3) as pool:
        client = server.open_socket(completion_request(stream=True, max_tokens=90, prompt="class"))
        while b"data: " not in client.recv(4096):
            pass
        others = [pool.submit(server.complete, max_tokens=40) for _ in range(3)]
        client.close()
        assert [one.result()[2]["choices"][0]["text"] for one in others] == [expected] * 3
        wait_for(lambda: server.metrics()["layerskip_running_requests"] == 0, "the model is free")


def test_a_client_that_leaves_amid_its_prompt_is_noticed_there(
    model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece waits for the test, so that the client leaves before the last."""
    pieces, may_go_on = list[int](), threading.Event()

    def compute(self: FusedEngine, forwards: list[Forward]) -> list[torch.Tensor]:
        if len(forwards[0].ids) > 1:
            pieces.append(len(forwards[0].ids))
            if len(pieces) == 2:
                assert may_go_on.wait(60)
        return own(self, forwards)

    own = FusedEngine.compute
    monkeypatch.setattr("layerskip.engines.batch._PIECE_ALONE", 8)
    with serving(model, max_batch_size=2) as server:
        monkeypatch.setattr(FusedEngine, "compute", compute)
        client = server.open_socket(completion_request(prompt=[5] * 80, max_tokens=4))
        wait_for(lambda: len(pieces) == 2, "the prompt is under way")
        client.close()
        wait_for(lambda: not server.service.worker.num_admitted, "the server has noticed")
        may_go_on.set()
        wait_for(lambda: server.metrics()["layerskip_running_requests"] == 0, "the model is free")
    assert len(pieces) < 4


def test_the_end_comes_while_a_batch_is_decoded(model: LayerSkipModel) -> None:
    with serving(model, max_batch_size=4, grace_s=0.0) as server, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(server.complete, max_tokens=90) for _ in range(3)]
        wait_for(lambda: server.metrics()["layerskip_running_requests"] > 1, "several are decoded")
        server.server.stop()
        assert {one.result()[0] for one in running} <= {200, 503}
        server.thread.join(60)
        assert not server.thread.is_alive()
    assert model.generate("def", max_new_tokens=4).ids  # the model is whole
