"""Connections that stall, that are too many, or on which something else than HTTP arrives."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from layerskip import DecodeConfig, LayerSkipModel
from layerskip.server.settings import ServerSettings
from tests.layerskip import zoo
from tests.layerskip.serving import Gate, completion_request, serving, tiny_model, wait_for

LONG_NAME = "m" * 512
"""Of a model: it stands in every event, so a few dozen of them fill small buffers."""
SMALL_BUFFERS = {"model_id": LONG_NAME, "send_buffer": 2048}
NUM_TOKENS = 80


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LayerSkipModel:
    """Decodes plainly: a round is a token, and an event."""
    return tiny_model(tokenizer, DecodeConfig.plain(zoo.NUM_LAYERS))


def stream_request() -> bytes:
    return completion_request(model=LONG_NAME, stream=True, max_tokens=NUM_TOKENS)


def read_all(client: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


# Who takes nothing


def test_a_client_that_stops_reading_frees_the_model_within_one_round(model: LayerSkipModel, monkeypatch) -> None:
    with serving(model, **SMALL_BUFFERS, send_timeout_s=0.2) as server:
        gate = Gate(model, monkeypatch)
        client = server.open_socket(stream_request(), receive_buffer=2048)
        wait_for(lambda: bool(gate.streams), "it is decoded")
        gate.let_through(NUM_TOKENS - 10)  # some 50 kB, of which the kernel holds a part; more rounds wait
        wait_for(lambda: server.service.worker.num_admitted == 0, "the client is given up")
        num_begun = gate.streams[0].num_begun
        gate.open()
        wait_for(lambda: gate.streams[0].closed, "the run is closed")
        assert gate.streams[0].num_begun <= min(num_begun + 1, NUM_TOKENS - 9)
        wait_for(lambda: server.metrics()["layerskip_cancelled_total"] == 1, "the run is counted")
        assert server.metrics()["layerskip_requests_total{499}"] == 1
        wait_for(lambda: server.num_connections == 0, "its connection is closed")
        assert server.complete(model=LONG_NAME)[0] == 200
        assert b"[DONE]" not in read_all(client)
        client.close()


def test_complete_answers_that_nobody_takes_do_not_keep_a_connection(model: LayerSkipModel) -> None:
    with serving(model, send_buffer=2048, send_timeout_s=0.2) as server:
        client = server.open_socket(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20, receive_buffer=2048)
        wait_for(lambda: server.server.server_state.total_requests > 0, "it is answered")
        wait_for(lambda: server.num_connections == 0, "it is given up")
        assert read_all(client).count(b"HTTP/1.1 200") < 20
        client.close()


def test_a_slow_reader_holds_up_nobody_and_gets_everything(model: LayerSkipModel) -> None:
    expected = model.generate("def", max_new_tokens=NUM_TOKENS).ids
    with serving(model, **SMALL_BUFFERS) as server:
        request = stream_request().replace(b"Host", b"Connection: close\r\nHost", 1)
        client = server.open_socket(request, receive_buffer=2048)
        wait_for(lambda: server.metrics()["layerskip_emitted_tokens_total"] == len(expected), "it is decoded")
        assert server.complete(model=LONG_NAME)[0] == 200
        wait_for(lambda: server.service.worker.num_admitted == 1, "the slow reader alone is left")
        lines = [line for line in read_all(client).split(b"\n") if line.startswith(b"data: {")]
        client.close()
        wait_for(lambda: server.service.worker.num_admitted == 0, "it is done")
    ids = [token for line in lines for token in json.loads(line[6:])["choices"][0].get("token_ids", ())]
    assert ids == expected


# Who sends nothing


@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"])
def test_a_head_that_never_comes_is_given_up(model: LayerSkipModel, begun: bytes) -> None:
    with serving(model, body_timeout_s=0.2) as server:
        server.server.config.timeout_keep_alive = 1  # else it waits five seconds for a second request
        client = server.open_socket(begun)
        assert read_all(client) == b""
        client.close()
        # On a connection that has been used before, too.
        client = server.open_socket(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + begun)
        assert b"200" in read_all(client).partition(b"\r\n")[0]
        client.close()
        wait_for(lambda: server.num_connections == 0, "both are closed")
        assert server.complete()[0] == 200


# Too many


def test_beyond_the_most_connections_requests_get_503(model: LayerSkipModel) -> None:
    with serving(model, max_connections=2) as server:
        idle = [server.open_socket() for _ in range(2)]
        wait_for(lambda: server.num_connections == 2, "both are open")
        status, headers, body = server.complete()
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert body["error"]["type"] == "server_error"
        assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        assert server.request("GET", "/health")[0] == 200  # or it would be taken for dead
        for one in idle:
            one.close()
        wait_for(lambda: server.num_connections == 0, "they have left")
        assert server.complete()[0] == 200
        assert server.metrics()["layerskip_requests_total{503}"] == 1


# No HTTP


@pytest.mark.parametrize(
    "data",
    [
        b"rubbish\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        # Past the limit of 16 KiB and read in one go: bytes that come after the refusal reset the connection.
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["rubbish", "two hosts", "negative length", "large head", "TLS"],
)
def test_what_is_no_http_has_an_error_object_too(model: LayerSkipModel, data: bytes) -> None:
    with serving(model) as server:
        client = server.open_socket(data)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        client.close()
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/json" in head
        assert json.loads(body)["error"] == {
            "message": "request: Invalid HTTP request received.",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
        assert server.complete()[0] == 200


def test_rubbish_behind_a_request_closes_the_connection_and_frees_the_model(model: LayerSkipModel, monkeypatch) -> None:
    with serving(model) as server:
        gate = Gate(model, monkeypatch)
        request = completion_request(stream=True)
        head = request.partition(b"Content-Length")[0]
        client = server.open_socket(head + b"Transfer-Encoding: chunked\r\n\r\nrubbish\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 400 ")  # the body is no chunk
        client.close()
        client = server.open_socket(request + b"rubbish\r\n\r\n")  # waits until the answer is complete
        wait_for(lambda: bool(gate.streams), "the first request is decoded")
        gate.open()
        answered = read_all(client)
        client.close()
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert b"data: [DONE]" in answered
        assert b"HTTP/1.1 400 " in answered
        wait_for(lambda: server.service.worker.num_admitted == 0, "the model is free")


# Every other refusal


def test_a_model_name_is_no_longer_than_a_request_may_say() -> None:
    with pytest.raises(ValueError, match="model_id: must be printable text of at most 512 characters"):
        ServerSettings(model_id="m" * 513, max_context=8)
