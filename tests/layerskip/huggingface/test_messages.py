"""MessageParser: what a chat answer says, thinks and calls, the same however it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerskip.huggingface.messages import (
    MessageParser,
    Part,
    Said,
    Thought,
    ToolCall,
    read_template,
    response_template,
)

PREFIX = {
    "qwen2": "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n",
    "qwen3_5": "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n",
    "gemma4": "<|turn>user\nWeather?<turn|>\n<|turn>model\n",
}
END = {"qwen2": "<|im_end|>", "qwen3_5": "<|im_end|>", "gemma4": "<turn|>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = {
    "qwen2": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>',
}


class WithoutTemplate:
    """A tokenizer that says nothing of answers."""


def parts_of(kind: str, text: str, *, size: int = 1 << 20, most_calls: int | None = None) -> list[Part]:
    """Of a text that comes in pieces of so many characters; what is said or thought in one piece each."""
    template = response_template(WithoutTemplate(), kind)
    assert template is not None
    parser = MessageParser(template, PREFIX[kind], TOOLS, most_calls=most_calls)
    found: list[Part] = []
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for part in [*(part for piece in pieces for part in parser.push(piece)), *parser.finish()]:
        last = found[-1] if found else None
        if not isinstance(part, ToolCall) and isinstance(last, type(part)):
            found[-1] = type(part)(last.text + part.text)
        else:
            found.append(part)
    return found


def called(index: int = 0) -> ToolCall:
    return ToolCall(index, "weather", json.dumps({"city": "Köln", "days": 2}))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("kind", CALL)
def test_text_and_calls_are_parted(kind: str, size: int) -> None:
    assert parts_of(kind, "It rains." + END[kind], size=size) == [Said("It rains.")]
    assert parts_of(kind, CALL[kind] + END[kind], size=size) == [called()]
    text = "I look." + "\n" * (kind != "gemma4") + CALL[kind]
    assert parts_of(kind, text + END[kind], size=size) == [Said("I look."), called()]
    assert parts_of(kind, text + CALL[kind] + END[kind], size=size) == [Said("I look."), called(), called(1)]
    assert parts_of(kind, CALL[kind] * 3, size=size, most_calls=1) == [called()]


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_thoughts_are_parted_and_blanks_around_them_left_out(size: int) -> None:
    text = "<think>\nHm, a < b?\n</think>\n\nYes, a < b."
    assert parts_of("qwen2", text + "<|im_end|>", size=size) == [Thought("\nHm, a < b?\n"), Said("Yes, a < b.")]


@pytest.mark.parametrize("size", [1, 4, 1 << 20])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>\n{"name": "weather", "argum', '{"name": "weather", "argum'),
        ("<tool_call>\nnot JSON</tool_call> and more", "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', '{"arguments": {}}'),
        ('<tool_call>{"name": 7}</tool_call>', '{"name": 7}'),
    ],
)
def test_what_is_no_call_is_said_as_it_stands(text: str, said: str, size: int) -> None:
    (part,) = parts_of("qwen2", text, size=size)
    assert isinstance(part, Said)
    assert said in part.text


def test_a_call_before_a_broken_one_is_kept() -> None:
    first, *rest = parts_of("qwen2", CALL["qwen2"] + "<tool_call>{</tool_call>", size=3)
    assert first == called()
    assert all(isinstance(one, Said) for one in rest)
    assert rest


def test_the_tokenizers_own_template_comes_first_and_unknown_models_have_none() -> None:
    own = WithoutTemplate()
    own.response_template = {"fields": {"content": {"content": "text"}}}  # type: ignore[attr-defined]
    assert response_template(own, "qwen2") == own.response_template  # type: ignore[attr-defined]
    assert response_template(WithoutTemplate(), "llama") is None


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.json"
    template = response_template(WithoutTemplate(), "qwen2")
    file.write_text(json.dumps(template), encoding="utf-8")
    assert read_template(file) == template
    for text in ("{", "[]", '"x"', "{}", '{"fields": 3}', '{"fields": {"content": {"content": "no such kind"}}}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"template.json: must be the JSON of a response template: \S"):
            read_template(file)
