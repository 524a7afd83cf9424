"""What the server refuses: bad input, strangers, and more than it was told to take; and that it lives on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from layerskip import LayerSkipModel
from tests.layerskip.serving import MODEL_ID, Serving, serving, tiny_model, wait_for

KEY = "correct-horse-battery"
LIMIT = 1 << 16


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LayerSkipModel:
    return tiny_model(tokenizer)


@pytest.fixture(scope="module")
def server(model: LayerSkipModel) -> Iterator[Serving]:
    with serving(model, max_body_bytes=LIMIT, max_new_tokens=64) as running:
        yield running


def completion(**fields: Any) -> str:
    return json.dumps({"model": MODEL_ID, "prompt": "def", "max_tokens": 4} | fields)


def chat(**fields: Any) -> str:
    return json.dumps({"model": MODEL_ID, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | fields)


COMPLETIONS: dict[str, tuple[Any, int, str]] = {
    "no body": ("", 400, "not valid JSON"),
    "not JSON": ("{", 400, "not valid JSON"),
    "not UTF-8": (b'{"model": "\xff"}', 400, "not valid JSON"),
    "deep nesting": ('{"user":' * 8000, 400, "not valid JSON"),
    "NaN": (completion(temperature=float("nan")), 400, "not valid JSON"),
    "infinite number": (completion().replace("4}", '4, "temperature": 1e999}'), 400, "temperature: input should be"),
    "huge int": (completion().replace("4}", "4" * 5000 + "}"), 400, "not valid JSON"),
    "lone surrogate": (completion(prompt="\ud800"), 400, "not valid JSON"),
    "unknown model": (completion(model="gpt-9"), 404, "model: this server has 'tiny' only, got 'gpt-9'"),
    "no model": ('{"prompt": "x"}', 400, "model: is required"),
    "empty prompt": (completion(prompt=""), 400, "prompt: must hold at least one token"),
    "many prompts": (completion(prompt=["a"] * 129), 400, "prompt: must be at most 128 prompts, got 129"),
    "a bad prompt": (completion(prompt=["a", 3]), 400, "prompt: must be text or a list of token ids, or several"),
    "many answers": (completion(prompt=["a"] * 20, n=7), 400, "n: prompts times n must be at most 128, got 140"),
    "unknown ids": (completion(prompt=[10**6]), 400, "prompt: token ids must be in 0.."),
    "over-long prompt": (completion(prompt=[1] * 200), 400, "prompt: 200 tokens leave no room for output in 96"),
    "prompt far too long": (completion(prompt="def " * 400), 400, "prompt: more than 96 tokens leave no room for"),
    "prompt and output too long": (completion(prompt=[1] * 90, max_tokens=20), 400, "must fit in 96"),
    "too many new tokens": (completion(max_tokens=65), 400, "max_tokens: must be at most 64 on this server, got 65"),
    "no new tokens": (completion(max_tokens=0), 400, "max_tokens: input should be greater than or equal to 1"),
    "two limits": (completion(max_completion_tokens=5), 400, "max_completion_tokens: must not differ"),
    "top_p": (completion(top_p=0), 400, "top_p: input should be greater than 0"),
    "top_k": (completion(top_k=-2), 400, "top_k: input should be greater than or equal to 0"),
    "penalty": (completion(presence_penalty=3), 400, "presence_penalty: input should be less than or equal to 2"),
    "bias of a word": (completion(logit_bias={"x": 1}), 400, "logit_bias: must map token ids to numbers, got 'x'"),
    "large bias": (completion(logit_bias={"3": 101}), 400, "input should be less than or equal to 100"),
    "bias of unknown ids": (completion(logit_bias={"99999999": 1}), 400, "logit_bias: token ids must be in 0.."),
    "many biases": (
        completion(logit_bias={str(i): 1 for i in range(2000)}),
        400,
        "logit_bias: must be of at most",
    ),
    "least length": (completion(min_tokens=-1), 400, "min_tokens: input should be greater than or equal to 0"),
    "many log-probabilities": (completion(logprobs=21), 400, "logprobs: input should be less than or equal to 20"),
    "seed": (completion(seed=1 << 64), 400, "seed: input should be less than"),
    "many stops": (completion(stop=[*map(str, range(17))]), 400, "stop: must be at most 16 texts"),
    "empty stop": (completion(stop=""), 400, "stop: must be text, or a list of texts, none of them empty"),
    "options without stream": (completion(stream_options={}), 400, "stream_options: needs stream = true"),
    "n": (completion(n=0), 400, "n: input should be greater than or equal to 1"),
    "unknown field": (completion(**{"max_tokns\n": 3}), 400, "'max_tokns\\n': unknown field"),
    "many unknown fields": (completion(**{f"x{i}": i for i in range(3000)}), 400, "'x0': unknown field"),
    "group": (completion(group="prose"), 400, "group: this config has no groups, got 'prose'"),
    "too large": (completion(prompt="x" * LIMIT), 413, f"body: must be at most {LIMIT} bytes"),
}

CHATS: dict[str, tuple[Any, int, str]] = {
    "no messages": (chat(messages=[]), 400, "messages: list should have at least 1 item"),
    "robot role": (
        chat(messages=[{"role": "robot", "content": "x"}]),
        400,
        "messages.0.role: input should be 'system'",
    ),
    "name": (chat(messages=[{"role": "user", "content": "x", "name": 7}]), 400, "messages.0.name: input should be"),
    "a list of template variables": (chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs: input should be"),
    "a template": (
        chat(chat_template_kwargs={"chat_template": "x"}),
        400,
        "chat_template_kwargs: must be variables of the chat template, chat_template is the server's to set",
    ),
    "the messages as a variable": (chat(chat_template_kwargs={"messages": []}), 400, "messages is the server's to set"),
    "null content": (chat(messages=[{"role": "user", "content": None}]), 400, "content: must be text or a list of"),
    "an image": (
        chat(
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
        ),
        400,
        'content: must hold parts of the form {"type": "text"',
    ),
    "tools": (chat(tools=[{"type": "function"}]), 400, "tools.0.function: "),
    "another format": (chat(response_format={"type": "xml"}), 400, "response_format.type: "),
    "top without log-probabilities": (chat(top_logprobs=2), 400, "top_logprobs: needs logprobs = true"),
    "prompt instead": (completion(), 400, "'prompt': unknown field"),
    "empty text": (chat(messages=[{"role": "user", "content": ""}]), 400, "prompt: must hold at least one token"),
}

CASES = [("/v1/completions", name, *case) for name, case in COMPLETIONS.items()]
CASES += [("/v1/chat/completions", name, *case) for name, case in CHATS.items()]


@pytest.mark.parametrize(("path", "name", "body", "status", "expected"), CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_bad_input_has_the_right_status_and_names_the_field(
    server: Serving, path: str, name: str, body: Any, status: int, expected: str
) -> None:
    got, headers, answer = server.request("POST", path, body)
    assert (got, list(answer)) == (status, ["error"]), answer
    assert expected in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1000
    assert answer["error"]["type"] == "invalid_request_error"
    assert headers["x-request-id"]
    assert headers["content-type"] == "application/json"
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_the_server_lives_on_after_all_of_it(server: Serving, model: LayerSkipModel) -> None:
    assert server.request("GET", "/health")[::2] == (200, {"status": "ok"})
    assert server.complete(max_tokens=4)[2]["choices"][0]["text"] == model.generate("def", max_new_tokens=4).text
    wait_for(lambda: server.service.worker.num_admitted == 0, "all have left")


def test_wrong_paths_methods_and_types(server: Serving) -> None:
    assert server.request("GET", "/nosuch")[2]["error"]["message"] == "GET '/nosuch': Not Found"
    assert server.request("GET", "/v1/completions")[0] == 405
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        # What a web page may send to another site without asking first.
        assert server.request("POST", "/v1/completions", completion(), {"Content-Type": content_type})[0] == 415
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert server.request("GET", path)[0] == 404


@pytest.mark.parametrize("chunked", [False, True])
def test_ten_megabytes_of_rubbish_are_refused_while_they_are_read(server: Serving, chunked: bool) -> None:
    chunk = bytes(range(256)) * 256
    connection = server.connect()
    length = {} if chunked else {"Content-Length": str(10 * (1 << 20))}
    body = (chunk for _ in range(160))
    headers = {"Content-Type": "application/json", **length}
    # Over what is read and thrown away (4 MiB here) the server closes: a reset is as clear a refusal as a 413.
    try:
        connection.request("POST", "/v1/completions", body, headers, encode_chunked=chunked)
        assert connection.getresponse().status == 413
    except ConnectionError:
        pass
    finally:
        connection.close()
    small_rubbish = server.request("POST", "/v1/completions", chunk * 16)  # 1 MiB, sixteen times the limit
    assert small_rubbish[0] == 413
    assert small_rubbish[1]["connection"] == "close"
    assert server.complete()[0] == 200


def test_a_body_that_never_comes_is_given_up(model: LayerSkipModel) -> None:
    with serving(model, body_timeout_s=0.2) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
        connection.close()
        assert server.complete()[0] == 200


def test_a_key_is_asked_for_and_never_logged(model: LayerSkipModel, caplog) -> None:
    caplog.set_level(logging.WARNING, "openai")  # the client, here in the server's process, may log what it sends
    caplog.set_level(logging.DEBUG)
    with serving(model, api_key=KEY) as server:
        for headers in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Basic {KEY}"}, {"api-key": KEY}):
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("POST", "/v1/completions"),
                ("GET", "/x"),
            ):
                status, answered, body = server.request(method, path, completion(), headers)
                assert status == 401
                assert body["error"]["type"] == "authentication_error"
                assert answered["www-authenticate"] == "Bearer"
        assert server.request("GET", "/health", None, {"Host": "elsewhere"})[0] == 200
        with pytest.raises(openai.AuthenticationError, match="wrong API key"):
            server.client(api_key="wrong-horse-battery").models.list()
        assert server.client(api_key=KEY).completions.create(model=MODEL_ID, prompt="SECRET PROMPT").choices[0].text
        assert KEY not in repr(server.service.settings)
    assert "POST '/v1/completions' 200" in caplog.text
    assert KEY not in caplog.text
    assert "wrong-horse" not in caplog.text
    assert "SECRET" not in caplog.text


def test_without_a_key_only_names_of_this_machine_are_answered(model: LayerSkipModel) -> None:
    with serving(model, hosts=frozenset({"localhost", "127.0.0.1", "::1"})) as server:
        assert server.complete()[0] == 200
        for host, status in (
            ("localhost:80", 200),
            ("[::1]:8000", 200),
            ("evil.example", 421),
            ("127.0.0.1.evil", 421),
        ):
            assert server.request("GET", "/v1/models", None, {"Host": host})[0] == status


def test_a_log_line_cannot_be_forged_by_a_path(server: Serving, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert server.request("GET", "/a%0aPOST%20'/v1/completions'%20200")[0] == 404
    wait_for(lambda: "GET '/a\\nPOST" in caplog.text or '"/a\\nPOST' in caplog.text, "the request is logged")
    assert all("\n" not in record.getMessage() for record in caplog.records)
