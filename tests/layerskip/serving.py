"""A real server on a free port, in a thread of the test's process, and a decoder whose rounds the test lets through."""

from __future__ import annotations

import copy
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import torch
from prometheus_client.parser import text_string_to_metric_families

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.model import GenerationStream
from layerskip.server.app import Service, create_app
from layerskip.server.settings import ServerSettings
from layerskip.server.transport.running import GracefulServer, bind
from tests.layerskip import zoo

MODEL_ID = "tiny"
PATIENCE_S = 60.0
"""Only a server that hangs takes so long."""


@dataclass
class Serving:
    """One running server."""

    port: int
    service: Service
    server: GracefulServer
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **arguments: Any) -> openai.OpenAI:
        arguments = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S} | arguments
        return openai.OpenAI(base_url=f"{self.url}/v1", **arguments)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """(status, headers, JSON or text) of one request on a connection of its own."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
            return _read(connection.getresponse())
        finally:
            connection.close()

    @property
    def num_connections(self) -> int:
        return self.service.num_connections()

    def open_socket(self, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        """A bare connection on which so much has been sent: leaving is a plain close, and nothing is read unasked."""
        client = socket.socket()
        client.settimeout(PATIENCE_S)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", self.port))
        client.sendall(data)
        return client

    def complete(self, prompt: Any = "def", **fields: Any) -> tuple[int, dict[str, str], Any]:
        return self.request("POST", "/v1/completions", {"model": MODEL_ID, "prompt": prompt} | fields)

    def metrics(self) -> dict[str, float]:
        """Sum over labels of every sample, and each `name{status}` by itself."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self.request("GET", "/metrics")[2]):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if "status" in sample.labels:
                    name = f"{sample.name}{{{sample.labels['status']}}}"
                    sums[name] = sums.get(name, 0.0) + sample.value
        return sums


def completion_request(**fields: Any) -> bytes:
    """As it goes over the wire; with token ids, so that every round has its event."""
    body = json.dumps({"model": MODEL_ID, "prompt": "def", "max_tokens": 40, "return_token_ids": True} | fields)
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode()


def _read(response: http.client.HTTPResponse) -> tuple[int, dict[str, str], Any]:
    text = response.read().decode()
    headers = {name.lower(): value for name, value in response.getheaders()}
    is_json = headers.get("content-type") == "application/json"
    return response.status, headers, json.loads(text) if is_json else text


def tiny_model(
    tokenizer: Any, config: DecodeConfig | None = None, *, engine: str = "eager", dtype: torch.dtype = torch.float32
) -> LayerSkipModel:
    """Random, with 96 positions and the plainest of chat templates."""
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = config or DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 2), gamma=3)
    model = zoo.build("llama", vocab_size=len(tokenizer)).to(dtype)
    return LayerSkipModel(model, with_template, config, engine=engine)


@contextmanager
def serving(
    model: LayerSkipModel, *, grace_s: float = PATIENCE_S, send_buffer: int | None = None, **settings: Any
) -> Iterator[Serving]:
    """A server that has started; ended with its thread afterwards.

    `send_buffer`: bytes that the kernel takes per connection; by itself it takes megabytes.
    """
    settings = {"model_id": MODEL_ID, "max_context": model.max_positions} | settings
    app = create_app(model, ServerSettings(**settings))
    app.state.service.worker.start()
    server = GracefulServer(app, grace_s)
    with bind("127.0.0.1", 0) as bound:
        if send_buffer is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        bound.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
        thread.start()
        try:
            yield Serving(bound.getsockname()[1], app.state.service, server, thread)
        finally:
            server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def wait_for(holds: Callable[[], bool], what: str) -> None:
    """Polls; fails if it never holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


class Gate:
    """Makes a model's rounds wait for the test."""

    def __init__(self, model: LayerSkipModel, monkeypatch: Any) -> None:
        self.streams: list[GatedStream] = []
        self.permits = threading.Semaphore(0)
        real = model.stream

        def stream(*args: Any, **arguments: Any) -> GatedStream:
            self.streams.append(GatedStream(real(*args, **arguments), self.permits))
            return self.streams[-1]

        monkeypatch.setattr(model, "stream", stream)

    def let_through(self, num_rounds: int) -> None:
        self.permits.release(num_rounds)

    def open(self) -> None:
        self.let_through(1_000_000)

    def client_leaves(self, server: Serving, request: bytes) -> None:
        """A client that asks for a stream leaves in its second round; opens once the server has seen it."""
        client = server.open_socket(request)
        self.let_through(1)
        while b"data: " not in client.recv(4096):
            pass
        client.close()
        wait_for(lambda: server.service.worker.num_admitted == 0, "the server sees it leave")
        self.open()


class GatedStream:
    """A stream of which every round waits for a permit."""

    def __init__(self, real: GenerationStream, permits: threading.Semaphore) -> None:
        self._real = real
        self._permits = permits
        self.num_begun = 0
        self.closed = False

    @property
    def stats(self) -> Any:
        return self._real.stats

    @property
    def config(self) -> DecodeConfig:
        return self._real.config

    def __next__(self) -> Any:
        self.num_begun += 1
        assert self._permits.acquire(timeout=PATIENCE_S)
        return next(self._real)

    def close(self) -> None:
        self.closed = True
        self._real.close()

    def output(self) -> Any:
        return self._real.output()
