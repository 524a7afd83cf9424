"""Tools over OpenAI's own client: what the chat template gets, and calls and thoughts in the answer."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from layerskip import LayerSkipModel
from layerskip.decoding.text_stream import TextStream
from layerskip.huggingface.messages import response_template
from layerskip.server.tool_calls import calls_alone
from tests.layerskip import zoo
from tests.layerskip.serving import MODEL_ID, Serving, serving, tiny_model

TEMPLATE = (
    "{% if tools and not deaf is defined %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{% for call in message.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments.city }}]{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}, "strict": True},
}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
SAID = f"<think>Hm.</think>\nI look.\n{CALL}\n{CALL}<|im_end|>"


@pytest.fixture(scope="module")
def tools_model(tokenizer: Any) -> LayerSkipModel:
    model = tiny_model(tokenizer)
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.tokenizer.chat_template = TEMPLATE
    return LayerSkipModel(
        zoo.build("llama", vocab_size=len(tokenizer), max_position_embeddings=512),
        model.tokenizer,
        model.config,
        engine="eager",
    )


@pytest.fixture(scope="module")
def server(tools_model: LayerSkipModel) -> Iterator[Serving]:
    with serving(tools_model, response_template=response_template(None, "qwen2")) as running:
        yield running


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has the model say `SAID`, three characters a token; gets whether each text is to have special tokens."""
    asked = []

    class Scripted(TextStream):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.place = 0
            asked.append(not self._skips_special)

        def push(self, ids: Sequence[int]) -> str:
            start, self.place = self.place, self.place + 3 * len(ids)
            return SAID[start : self.place]

        def finish(self) -> str:
            return ""

    monkeypatch.setattr("layerskip.model.TextStream", Scripted)
    return asked


def ask(server: Serving, **fields: Any) -> Any:
    fields = {"tools": [TOOL], "max_tokens": 100, "extra_body": {"ignore_eos": True}} | fields
    return server.client().chat.completions.create(model=MODEL_ID, messages=MESSAGES, **fields)


def streamed(server: Serving, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """(said, thought, calls, finish reason)"""
    said, thought, calls, reason = "", "", [], ""
    for event in ask(server, stream=True, **fields):
        for choice in event.choices:
            said += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(calls)
                assert call.id.startswith("call_")
                calls.append((call.function.name, call.function.arguments))
            reason = choice.finish_reason or reason
    return said, thought, calls, reason


def test_calls_and_thoughts_are_told_whole_and_streamed(server: Serving, script: list[bool]) -> None:
    answer = ask(server).choices[0]
    message = answer.message
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls]
    assert calls == [("weather", json.dumps({"city": "Bonn"}))] * 2
    assert len({one.id for one in message.tool_calls}) == 2
    assert (message.content, message.reasoning_content) == ("I look.", "Hm.")
    assert streamed(server) == ("I look.", "Hm.", calls, answer.finish_reason)
    assert all(script)


def test_the_end_of_an_answer_with_calls_is_named(server: Serving, script: list[bool]) -> None:
    assert ask(server, max_tokens=20).choices[0].finish_reason == "length"
    stopped = ask(server, stop=["<|im_end|>"]).choices[0]
    assert (stopped.finish_reason, len(stopped.message.tool_calls)) == ("tool_calls", 2)
    assert ask(server, stop=["look"]).choices[0].finish_reason == "stop"
    assert script


def test_of_several_calls_the_first_alone_is_told_where_asked_for(server: Serving, script: list[bool]) -> None:
    assert len(ask(server, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(streamed(server, parallel_tool_calls=False)[2]) == 1
    assert script


def test_an_answer_has_to_call_where_asked_for(tokenizer: Any) -> None:
    """Calls are forced, so a random model calls, too."""
    names = ("weather", "time")
    parameters = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}}
    parameters["additionalProperties"] = False  # else a random model makes up names without end
    tools = [{"type": "function", "function": {"name": one, "parameters": parameters}} for one in names]
    marks = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
    template = response_template(None, "qwen2") | {"start_anchor": "assistant"}  # type: ignore[operator]
    assert template["fields"]["tool_calls"].items() > marks.items()
    for added in ([], ["<tool_call>", "</tool_call>"]):
        model = tiny_model(tokenizer)
        model.tokenizer.chat_template = TEMPLATE
        model.tokenizer.add_tokens(added)
        wide = zoo.build("llama", vocab_size=len(model.tokenizer) + 5, max_position_embeddings=640)
        wide.generation_config.eos_token_id = model.tokenizer.eos_token_id
        model = LayerSkipModel(wide, model.tokenizer, model.config, engine="eager")
        with serving(model, response_template=template) as running:
            fields = {
                "tools": tools,
                "max_tokens": 120,
                "temperature": 1.0,
                "extra_body": {},
                "parallel_tool_calls": False,
            }
            for seed in range(4):
                choice = ask(running, tool_choice="required", seed=seed, **fields).choices[0]
                (call,) = choice.message.tool_calls
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
                assert call.function.name in names
                assert isinstance(json.loads(call.function.arguments), dict)
                named = {"type": "function", "function": {"name": "time"}}
                (call,) = ask(running, tool_choice=named, seed=seed, **fields).choices[0].message.tool_calls
                assert call.function.name == "time"


def test_marks_of_several_kinds_are_not_forced(tokenizer: Any) -> None:
    known: Any = response_template(None, "qwen2")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert calls_alone(known, tokenizer, tools, most_calls=1) is not None
    for name, value in (
        ("open_pattern", ["<a>", "<b>"]),
        ("open_pattern", "<a>|<b>"),
        ("close", None),
        ("transform", None),
    ):
        fields = known["fields"] | {"tool_calls": known["fields"]["tool_calls"] | {name: value}}
        assert calls_alone({"fields": fields}, tokenizer, tools, most_calls=1) is None
    assert calls_alone({"fields": {}}, tokenizer, tools, most_calls=1) is None


def test_a_model_whose_calls_are_no_json_cannot_be_made_to_call(tools_model: LayerSkipModel) -> None:
    with serving(tools_model, response_template=response_template(None, "gemma4")) as running:
        assert ask(running, max_tokens=2).choices
        with pytest.raises(openai.BadRequestError, match="tool_choice: must be auto or none"):
            ask(running, tool_choice="required")


def test_without_tools_an_answer_is_what_the_model_says(server: Serving, script: list[bool]) -> None:
    for fields in ({"tools": []}, {"tools": openai.omit}, {"tool_choice": "none"}):
        message = ask(server, **fields).choices[0].message
        assert message.content == SAID
        assert message.tool_calls is None
    assert not any(script)
    ask(server, tools=[], extra_body={"skip_special_tokens": False})
    assert script[-1]


def test_the_template_gets_tools_calls_and_thoughts(server: Serving, tools_model: LayerSkipModel) -> None:
    told = {"type": "function", "function": {k: v for k, v in TOOL["function"].items() if k != "strict"}}  # type: ignore[attr-defined]
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call | {"index": 0}], "reasoning_content": "Hm."},
        {"role": "tool", "content": "Rain", "tool_call_id": "call-1"},
    ]
    text = json.dumps([told]) + "user: Hi\nassistant: (Hm.)[call-1 weather Bonn]\ntool: Rain\n<|im_start|>assistant\n"
    expected = tools_model.generate(text, max_new_tokens=8, do_sample=False)
    create = server.client().chat.completions.create
    answer = create(model=MODEL_ID, messages=turns, tools=[TOOL], max_tokens=8, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == expected.ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "never"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice: needs tools to be required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time"}}},
            "tool_choice: must be one of tools, got time",
        ),
        ({"tool_choice": "required", "extra_body": {"response_format": {"type": "json_object"}}}, "one of these alone"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type: "),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools.0.function.name: "),
        ({"tools": [TOOL] * 129}, "tools: "),
        ({"extra_body": {"chat_template_kwargs": {"deaf": True}}}, "tools: the model's chat template leaves them out"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Serving, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, **fields)


def turn(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (turn(), "content: is needed"),
        (turn(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "arguments: must be JSON"),
        (turn(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "arguments: "),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "assistant"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "must be of an assistant's turn"),
    ],
)
def test_a_turn_that_makes_no_sense_is_refused(server: Serving, one: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        server.client().chat.completions.create(model=MODEL_ID, messages=[*MESSAGES, one], max_tokens=2)


def test_a_model_that_nobody_knows_the_calls_of_says_so(tools_model: LayerSkipModel) -> None:
    with (
        serving(tools_model) as running,
        pytest.raises(openai.BadRequestError, match=r"tools: neither.*--response-template"),
    ):
        ask(running)
