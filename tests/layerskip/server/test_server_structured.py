"""Answers that have to look like something, over OpenAI's own client."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from layerskip import Grammar, LayerSkipModel
from tests.layerskip.rounds.test_grammar import NEW_TOKENS, PATTERN, SCHEMA, of
from tests.layerskip.serving import MODEL_ID, Serving, serving
from tests.layerskip.tokenizers import folder_of

FORMAT = {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA, "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "Say it"}]


@pytest.fixture(scope="module")
def model() -> LayerSkipModel:
    found = LayerSkipModel.from_pretrained(folder_of("byte_level"), device="cpu", engine="fused")
    found.config = of("mask")
    found.tokenizer = copy.deepcopy(found.tokenizer)
    found.tokenizer.chat_template = (
        "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|assistant|>"
    )
    return found


@pytest.fixture(scope="module")
def server(model: LayerSkipModel) -> Iterator[Serving]:
    with serving(model, max_batch_size=4) as running:
        yield running


def ask(server: Serving, **fields: Any) -> Any:
    fields = {"max_tokens": NEW_TOKENS, "response_format": FORMAT} | fields
    return server.client().chat.completions.create(model=MODEL_ID, messages=MESSAGES, **fields)


def complete(server: Serving, **fields: Any) -> Any:
    create = server.client().completions.create
    return create(model=MODEL_ID, prompt="The reader ", max_tokens=NEW_TOKENS, extra_body=fields).choices[0]


def test_an_answer_keeps_to_its_schema_whole_and_streamed(server: Serving, model: LayerSkipModel) -> None:
    texts = [one.message.content for one in ask(server, n=3, temperature=1.1, seed=4).choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    first = ask(server, temperature=1.1, seed=4, stream=True)
    assert "".join(choice.delta.content or "" for event in first for choice in event.choices) == texts[0]
    prompt = "<|user|>Say it<|assistant|>"
    settings = {"do_sample": True, "temperature": 1.1, "seed": 4, "grammar": Grammar.json(SCHEMA)}
    assert model.generate(prompt, max_new_tokens=NEW_TOKENS, **settings).text == texts[0]
    plain = ask(server, response_format={"type": "text"}, max_tokens=8)
    assert (
        plain.choices[0].message.content
        == ask(server, response_format=openai.omit, max_tokens=8).choices[0].message.content
    )


def test_any_object_will_do(server: Serving) -> None:
    answer = ask(server, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert answer.message.content.lstrip().startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_vllms_words_are_understood(server: Serving) -> None:
    pattern, choice = complete(server, structured_outputs={"regex": PATTERN}), ["closes", "opens"]
    assert re.fullmatch(PATTERN, pattern.text)
    assert pattern.finish_reason == "stop"
    assert complete(server, structured_outputs={"choice": choice}).text in choice
    assert complete(server, structured_outputs={"grammar": 'start: "file" "s"?'}).text in ("file", "files")
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        jsonschema.validate(json.loads(complete(server, structured_outputs={"json": schema}).text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs: must have one of json, regex, choice and grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs: must have one of"),
        ({"structured_outputs": {"jsonish": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(("}}, "grammar: "),
        ({"structured_outputs": {"choice": []}}, "grammar: a choice"),
        ({"structured_outputs": {"json": "["}}, "not valid JSON"),
        ({"response_format": {"type": "json_schema"}}, "json_schema: goes with the type json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type: "),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "?"}}}}, "grammar: "),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "must be one of these alone"),
    ],
)
def test_what_is_no_format_is_refused(server: Serving, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        complete(server, **fields)


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(a|aa|aaa|b*)*" * 200},
        {"grammar": 'start: a a a a\na: b b b b\nb: c c c c\nc: "x"* "y"* | a'},
        {"json": '{"properties": {"a": ' * 60 + "{}" + "}}" * 60},
        {"json": {"enum": [f"value {i}" for i in range(5000)]}},
        {"choice": [f"option {i}" for i in range(5000)]},
    ],
)
def test_a_format_that_is_dear_costs_its_own_request_alone(server: Serving, given: dict[str, Any]) -> None:
    try:
        assert complete(server, structured_outputs=given).finish_reason in ("stop", "length")
    except openai.APIStatusError as error:
        assert error.status_code in (400, 500)  # noqa: PT017 (either will do)
    assert complete(server, structured_outputs={"choice": ["yes"]}).text == "yes"


def test_a_format_and_tools_are_not_asked_for_together(server: Serving) -> None:
    tool = {"type": "function", "function": {"name": "read"}}
    with pytest.raises(openai.BadRequestError, match="must be one of these alone"):
        ask(server, tools=[tool])
