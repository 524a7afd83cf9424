"""What a server answers to so many requests at once, and when: streamed, by the OpenAI protocol."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from layerskip.prompts import Prompt

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Endpoint:
    """A server that runs."""

    name: str
    url: str
    model: str
    """As the server calls it."""

    @classmethod
    def at(cls, name: str, url: str) -> Endpoint:
        """Asks it for its model. Raises: OSError where nobody answers; ValueError where the answer is another one."""
        connection = _connection(url)
        try:
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        try:
            return cls(name, url, json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{name}: {url}/v1/models names no model, it says {body[:80]!r}") from error


@dataclass(frozen=True)
class Answer:
    """To one request."""

    text: str
    num_tokens: int
    num_prompt_tokens: int
    first_s: float
    """From the request to the first text."""
    last_s: float
    """To the last."""

    @property
    def token_s(self) -> float:
        """Of each after the first."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class Load:
    """So many requests at once until all are answered."""

    answers: tuple[Answer, ...]
    """In the order of the prompts."""
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of all together, their prompts in the seconds."""
        return sum(one.num_tokens for one in self.answers) / self.wall_s

    def facts(self) -> dict[str, Any]:
        """For a file: medians over the requests."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "first_s": median(one.first_s for one in self.answers),
            "token_s": median(one.token_s for one in self.answers),
        }


def ask(server: Endpoint, prompt: Prompt, options: Mapping[str, Any]) -> Answer:
    """A request's answer; a chat's by the chat route, a text's by the other.

    Raises: OSError where the server does not answer; ValueError where it answers with an error.
    """
    route, more = "/v1/completions", {"prompt": prompt.messages[0][1]}
    if prompt.kind != "text":
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        route, more = "/v1/chat/completions", {"messages": messages}
    body = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}, **more, **options}
    connection = _connection(server.url)
    start, arrived = time.perf_counter(), []
    try:
        connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{server.name}: answered {response.status}, {response.read()[:300]!r}")
        for line in response:
            arrived.append((time.perf_counter() - start, line))
    except http.client.HTTPException as error:
        raise ValueError(f"{server.name}: its answer broke off: {error!r}") from error
    finally:
        connection.close()
    return _read(server.name, arrived)


def load(server: Endpoint, prompts: Sequence[Prompt], at_once: int, options: Mapping[str, Any]) -> Load:
    """Whoever has its answer sends the next request, until there are none left. Raises: see `ask`."""
    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as senders:
        answers = tuple(senders.map(ask, itertools.repeat(server), prompts, itertools.repeat(options)))
    return Load(answers, time.perf_counter() - start)


def _read(name: str, arrived: Sequence[tuple[float, bytes]]) -> Answer:
    """Read when all is there, so that reading takes no time from the server, which runs beside."""
    pieces, times, usage = list[str](), list[float](), None
    for at, event in _events(arrived):
        if "error" in event:
            raise ValueError(f"{name}: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                pieces.append(text)
                times.append(at)
    if usage is None or not times:
        raise ValueError(f"{name}: the answer ended without text or without a count of its tokens")
    return Answer("".join(pieces), usage["completion_tokens"], usage["prompt_tokens"], times[0], times[-1])


def _events(arrived: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    for at, line in arrived:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield at, json.loads(data)


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"url: must be http://HOST:PORT, got {url!r}")
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
