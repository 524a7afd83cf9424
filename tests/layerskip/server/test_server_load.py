"""Many clients at once, clients that leave, a model that fails, and the end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from layerskip import LayerSkipModel
from tests.layerskip.serving import MODEL_ID, Gate, completion_request, serving, tiny_model, wait_for


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LayerSkipModel:
    return tiny_model(tokenizer)


# Many at once


def test_fifty_clients_at_once_get_whole_and_right_answers(model: LayerSkipModel) -> None:
    prompts = [f"def f{i % 17}(" for i in range(50)]
    expected = {prompt: model.generate(prompt, max_new_tokens=6).text for prompt in set(prompts)}

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        arguments = {"model": MODEL_ID, "prompt": prompts[i], "max_tokens": 6}
        if i % 2:
            return (await client.completions.create(**arguments)).choices[0].text
        events = await client.completions.create(**arguments, stream=True)
        return "".join([event.choices[0].text async for event in events])

    async def ask_all(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(50)))

    with serving(model, queue_limit=49) as server:
        texts = asyncio.run(ask_all(f"{server.url}/v1"))
        assert server.metrics()["layerskip_requests_total{200}"] == 50
    assert texts == [expected[prompt] for prompt in prompts]


def test_beyond_the_queue_openai_clients_get_their_rate_limit_error(model: LayerSkipModel, monkeypatch) -> None:
    """Streaming and not, text and chat: 40 of 50 are refused before a byte of an answer, the others get all of it."""
    expected = model.generate("def", max_new_tokens=5).text

    async def ask(client: openai.AsyncOpenAI, i: int) -> str | openai.RateLimitError:
        text: dict[str, Any] = {"model": MODEL_ID, "prompt": "def", "max_tokens": 5}
        chat: dict[str, Any] = {"model": MODEL_ID, "messages": [{"role": "user", "content": "def"}], "max_tokens": 5}
        try:
            if i % 4 == 0:
                return (await client.completions.create(**text)).choices[0].text
            if i % 4 == 1:
                return (await client.chat.completions.create(**chat)).choices[0].message.content or ""
            if i % 4 == 2:
                events = await client.completions.create(**text, stream=True)
                return "".join([event.choices[0].text async for event in events])
            chunks = await client.chat.completions.create(**chat, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        except openai.RateLimitError as error:
            return error

    async def ask_all(url: str) -> list[str | openai.RateLimitError]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(50)))

    with serving(model, queue_limit=9) as server, ThreadPoolExecutor(1) as pool:
        gate = Gate(model, monkeypatch)
        asked = pool.submit(asyncio.run, ask_all(f"{server.url}/v1"))
        wait_for(lambda: server.metrics().get("layerskip_requests_total{429}", 0) == 40, "all but ten are refused")
        wait_for(lambda: server.metrics()["layerskip_queue_length"] == 9, "nine wait")
        assert server.metrics()["layerskip_running_requests"] == 1
        gate.open()
        outcomes = asked.result()
        wait_for(lambda: server.service.worker.num_admitted == 0, "all have left")
    assert [one for one in outcomes if isinstance(one, str)] == [expected] * 10
    refused = [one for one in outcomes if isinstance(one, openai.RateLimitError)]
    assert {one.code for one in refused} == {"queue_full"}
    assert all(int(one.response.headers["retry-after"]) >= 1 for one in refused)


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_model_within_one_round(
    model: LayerSkipModel, monkeypatch, stream: bool
) -> None:
    with serving(model) as server:
        gate = Gate(model, monkeypatch)
        client = server.open_socket(completion_request(stream=stream))
        gate.let_through(1)
        if stream:
            while b"data: " not in client.recv(4096):
                pass
        wait_for(lambda: bool(gate.streams) and gate.streams[0].num_begun == 2, "the second round begins")
        client.close()
        wait_for(lambda: server.service.worker.num_admitted == 0, "the server sees the client leave")
        gate.open()
        wait_for(lambda: gate.streams[0].closed, "the run is closed")
        assert gate.streams[0].num_begun == 2  # the round that it was in, and none after it
        wait_for(lambda: server.metrics()["layerskip_running_requests"] == 0, "the model is free")
        metrics = server.metrics()
        assert metrics["layerskip_cancelled_total"] == metrics["layerskip_requests_total{499}"] == 1
        assert server.complete()[0] == 200


def test_a_waiting_client_that_leaves_is_dropped_from_the_queue(model: LayerSkipModel, monkeypatch) -> None:
    with serving(model) as server, ThreadPoolExecutor(1) as pool:
        gate = Gate(model, monkeypatch)
        running = pool.submit(server.complete, max_tokens=4)
        wait_for(lambda: server.metrics()["layerskip_running_requests"] == 1, "the first is decoded")
        client = server.open_socket(completion_request(stream=True))
        wait_for(lambda: server.metrics()["layerskip_queue_length"] == 1, "the second waits")
        client.close()
        wait_for(lambda: server.metrics()["layerskip_queue_length"] == 0, "it is dropped")
        gate.open()
        assert running.result()[0] == 200
        assert [stream.num_begun > 0 for stream in gate.streams] == [True, False]
        assert server.metrics()["layerskip_cancelled_total"] == 1


# A model that fails


class FailingStream:
    """Gives `num_good` pieces, then fails as a model might."""

    def __init__(self, real: Any, num_good: int) -> None:
        self._real = real
        self._left = num_good
        self.stats, self.config = real.stats, real.config

    def __next__(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("CUDA error near SECRET PROMPT")
        return next(self._real)

    def close(self) -> None:
        self._real.close()


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_failure_in_the_model_is_500_without_details_and_the_server_lives_on(
    model: LayerSkipModel, monkeypatch, caplog, num_good: int
) -> None:
    real = model.stream
    with serving(model) as server:
        with monkeypatch.context() as patch:
            patch.setattr(model, "stream", lambda *args, **rest: FailingStream(real(*args, **rest), num_good))
            status, _, body = server.complete()
            assert status == 500
            assert body["error"]["type"] == "server_error"
            assert "SECRET" not in str(body)
            with pytest.raises(openai.APIError, match="the model failed on this request"):
                list(server.client().completions.create(model=MODEL_ID, prompt="def", stream=True))
        assert "CUDA error" in caplog.text  # the operator sees it
        assert server.complete()[0] == 200
        metrics = server.metrics()
        assert metrics["layerskip_failures_total"] == metrics["layerskip_requests_total{500}"] == 2


# The end


def test_the_end_waits_for_who_is_being_answered_and_refuses_the_rest(model: LayerSkipModel, monkeypatch) -> None:
    expected = model.generate("def", max_new_tokens=6).text
    with serving(model) as server, ThreadPoolExecutor(2) as pool:
        gate = Gate(model, monkeypatch)
        running = pool.submit(server.complete, max_tokens=6)
        wait_for(lambda: server.metrics()["layerskip_running_requests"] == 1, "it is decoded")
        server.server.stop()
        wait_for(lambda: server.service.worker.draining, "the end begins")
        status, _, body = server.complete()
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert server.request("GET", "/health")[0] == 503
        gate.open()
        assert running.result()[2]["choices"][0]["text"] == expected
        server.thread.join(60)
        assert not server.thread.is_alive()


def test_when_the_grace_is_over_everyone_is_told(model: LayerSkipModel, monkeypatch) -> None:
    with serving(model, grace_s=0.0) as server, ThreadPoolExecutor(2) as pool:
        gate = Gate(model, monkeypatch)
        gate.let_through(1)

        def read_stream() -> None:
            list(server.client().completions.create(model=MODEL_ID, prompt="def", stream=True))

        running = pool.submit(read_stream)
        wait_for(lambda: bool(gate.streams) and gate.streams[0].num_begun == 2, "the second round begins")
        waiting = pool.submit(server.complete)
        wait_for(lambda: server.metrics()["layerskip_queue_length"] == 1, "another waits")
        server.server.stop()
        assert waiting.result()[0] == 503
        with pytest.raises(openai.APIError, match="shutting down"):
            running.result()
        gate.open()
    assert gate.streams[0].closed
    assert gate.streams[1].num_begun == 0
