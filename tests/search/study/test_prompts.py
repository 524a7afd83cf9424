"""Prompt files: three shapes, and one clear line with file and line for everything else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerskip.prompts import read_prompts
from search.study.grouping import NO_GROUPS, Grouping, of_group
from search.study.prompts import Prompt, PromptSet, encode_prompts, load_prompts
from tests.search.conftest import write_jsonl

TEXT = {"prompt": "def read(", "id": "a", "category": "code"}
CHAT = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}], "id": 7}
BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a haiku.", "Again."]}


class FakeTokenizer:
    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        if messages[0]["role"] == "robot":
            raise TypeError("roles must alternate\nand more")
        return "<s>" + "|".join(f"{one['role']}:{one['content']}" for one in messages)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [len(text)]}


class FakeModel:
    max_positions: int | None = 20

    def __init__(self, chat_template: str | None = None) -> None:
        self.tokenizer = FakeTokenizer(chat_template)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_three_shapes_are_told_apart_by_their_fields(tmp_path: Path) -> None:
    text, chat, bench = read_prompts(write_jsonl(tmp_path / "p.jsonl", [TEXT, CHAT, BENCH]), NO_GROUPS)
    assert (text.kind, text.prompt_id, text.group) == ("text", "a", "code")
    assert (chat.kind, chat.prompt_id, len(chat.messages)) == ("chat", "7", 2)
    assert (bench.kind, bench.prompt_id, bench.group) == ("turn", "81", "writing")
    assert bench.messages == (("user", "Write a haiku."),)
    assert bench.source == f"{tmp_path / 'p.jsonl'}:3"


@pytest.mark.parametrize(
    ("fields", "regime"),
    [
        ({}, None),
        ({"temperature": 0}, "greedy"),
        ({"temperature": 0.0, "top_p": 0.9}, "greedy"),
        ({"temperature": 0.7}, "t0.7_k20"),
        ({"top_p": 0.9, "top_k": 0}, "t0.5_p0.9_k0"),
        ({"repetition_penalty": 1.3}, "t0.5_k20_r1.3"),
        ({"temperature": 0, "repetition_penalty": 1.3}, "greedy_r1.3"),
    ],
)
def test_a_record_may_say_how_its_tokens_are_chosen(tmp_path: Path, fields: dict[str, Any], regime: str | None) -> None:
    """In the words of the server's API; the model's own defaults stand behind what it leaves out."""
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x"} | fields])
    defaults = SimpleNamespace(do_sample=True, temperature=0.5, top_k=20)
    (encoded,) = encode_prompts(
        PromptSet("tuning", read_prompts(path)), FakeModel(), room=4, generation_config=defaults
    )
    assert (None if encoded.sampling is None else encoded.sampling.name) == regime


def test_settings_that_cannot_be_decoded_with_are_named_with_their_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "temperature": 0.7}])
    prompts = PromptSet("tuning", read_prompts(str(path)))
    with pytest.raises(ValueError, match=re.escape(f"{path}:1: generation_config.num_beams: not supported")):
        encode_prompts(prompts, FakeModel(), room=4, generation_config=SimpleNamespace(num_beams=4))


def test_line_separators_inside_strings_and_blank_lines_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\r\n\n", encoding="utf-8-sig")
    (prompt,) = read_prompts(path)
    assert prompt.messages == (("user", "a\u2028b"),)
    assert prompt.prompt_id == "p-1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object, got list"),
        ("{}", "exactly one of the fields prompt, messages, turns; got fields: none"),
        ('{"prompt": "x", "turns": ["y"]}', "got fields: prompt, turns"),
        ('{"prompt": ""}', "prompt: string should have at least 1 character"),
        ('{"prompt": "  "}', "prompt: must hold more than white space, got '  '"),
        ('{"prompt": "x", "tempo": 1}', "tempo: unknown field"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content: is required"),
        (
            '{"messages": [{"role": "user", "content": "\\n"}]}',
            r"messages.0.content: must hold more than white space, got '\n'",
        ),
        ('{"turns": ["x"]}', "question_id: is required"),
        ('{"prompt": "other", "id": "p-1"}', "repeats the id of"),
        ('{"prompt": "x", "temperature": -1}', "temperature: input should be greater than or equal to 0, got '-1'"),
        ("[" * 100_000, "not valid JSON"),
        ('{"prompt": "x\\udc00"}', r"prompt: must be text, got half of a surrogate pair in 'x\udc00'"),
    ],
)
def test_each_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "first"}\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ")) as caught:
        read_prompts(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such prompt file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(tmp_path / "binary.jsonl")


def records(first: int, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"prompt {i}"} for i in range(first, first + count)]


def test_repeats_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = {"prompt": "Hi", "temperature": 0.7}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    path = write_jsonl(tmp_path / "p.jsonl", [words, chat, {"prompt": "Hi"}, words | {"id": "again"}, {"prompt": "Ho"}])
    prompts = read_prompts(path)
    assert [(one.kind, one.messages[0][1]) for one in prompts] == [("text", "Hi"), ("chat", "Hi"), ("text", "Ho")]
    assert prompts[0].settings["temperature"] == 0.7
    assert caplog.messages == [f"{path}: left out 2 prompts that repeat earlier ones, 3 stay"]


def test_the_same_words_as_chat_and_as_text_are_two_prompts_in_both_sets_too(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": one["prompt"]}]} for one in records(0, 6)]
    texts, chatted = write_jsonl(tmp_path / "t.jsonl", records(0, 6)), write_jsonl(tmp_path / "c.jsonl", chats)
    assert [len(some.prompts) for some in load_prompts(str(texts), str(chatted))] == [6, 6]
    both = write_jsonl(tmp_path / "both.jsonl", [*records(0, 6), *chats])
    assert [len(some.prompts) for some in load_prompts(str(both), None)] == [8, 4]


def test_a_prompt_in_both_sets_is_refused(tmp_path: Path) -> None:
    tuning = write_jsonl(tmp_path / "t.jsonl", records(0, 4))
    held_out = write_jsonl(tmp_path / "h.jsonl", [*records(10, 4), {"prompt": "prompt 2", "id": "other"}])
    with pytest.raises(ValueError, match=r"h\.jsonl:5: held-out prompt is also a tuning prompt \(.*t\.jsonl:3\)"):
        load_prompts(str(tuning), str(held_out))


def test_too_few_prompts(tmp_path: Path) -> None:
    tuning = write_jsonl(tmp_path / "t.jsonl", records(0, 5))
    held_out = write_jsonl(tmp_path / "h.jsonl", records(10, 3))
    with pytest.raises(ValueError, match=r"h\.jsonl: needs at least 4 held-out prompts, got 3"):
        load_prompts(str(tuning), str(held_out))
    with pytest.raises(ValueError, match="needs at least 6, got 5"):
        load_prompts(str(tuning), None)


def test_the_split_depends_on_the_content_alone(tmp_path: Path) -> None:
    tuning, held_out = load_prompts(str(write_jsonl(tmp_path / "a.jsonl", records(0, 30))), None)
    assert (len(tuning.prompts), len(held_out.prompts)) == (20, 10)
    again = load_prompts(str(write_jsonl(tmp_path / "b.jsonl", records(0, 30)[::-1])), None)[1]
    assert {one.fingerprint for one in again.prompts} == {one.fingerprint for one in held_out.prompts}
    assert not {one.fingerprint for one in tuning.prompts} & {one.fingerprint for one in held_out.prompts}


def test_where_groups_count_a_third_of_each_is_held_out_and_at_least_two(tmp_path: Path) -> None:
    sizes = {"a": 12, "b": 4, "c": 3, "d": 1}
    lines = [{"prompt": f"{name} {i}", "category": name} for name, size in sizes.items() for i in range(size)]
    path = str(write_jsonl(tmp_path / "p.jsonl", lines))
    sets = load_prompts(path, None, Grouping(required=True))
    counts = [{name: len(of_group(some.prompts, name)) for name in sizes} for some in sets]
    assert counts == [{"a": 8, "b": 2, "c": 1, "d": 0}, {"a": 4, "b": 2, "c": 2, "d": 1}]
    again = load_prompts(str(write_jsonl(tmp_path / "q.jsonl", lines[::-1])), None, Grouping(required=True))
    assert {one.fingerprint for one in again[1].prompts} == {one.fingerprint for one in sets[1].prompts}


def test_each_way_to_choose_tokens_is_split_apart(tmp_path: Path) -> None:
    lines = [one | {"temperature": 0.7 if i % 2 else 0} for i, one in enumerate(records(0, 16))]
    lines += [one | {"temperature": 1.5} for one in records(50, 3)]  # too few for a regime of their own
    tuning, held_out = load_prompts(str(write_jsonl(tmp_path / "p.jsonl", lines)), None)
    for temperature in (None, 0.7):
        for some in (tuning, held_out):
            assert len([one for one in some.prompts if one.settings.get("temperature") == temperature]) == 4
    assert (len(tuning.prompts), len(held_out.prompts)) == (10, 9)


def test_where_no_way_to_choose_tokens_has_prompts_enough_all_are_split_together(tmp_path: Path) -> None:
    lines = [one | {"temperature": 1 + i / 100} for i, one in enumerate(records(0, 12))]
    counts = [len(some.prompts) for some in load_prompts(str(write_jsonl(tmp_path / "p.jsonl", lines)), None)]
    assert counts == [8, 4]


@pytest.mark.parametrize("record", [TEXT, CHAT, BENCH])
def test_the_group_may_stand_in_another_field(record: dict[str, Any], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [record | {"topic": "haiku"}])
    assert read_prompts(path, Grouping("topic"))[0].group == "haiku"
    assert read_prompts(path, Grouping("topic", required=True))[0].group == "haiku"
    with pytest.raises(ValueError, match="topic: unknown field"):
        read_prompts(path)
    with pytest.raises(ValueError, match="topic: unknown field"):
        read_prompts(path, Grouping("subject"))


@pytest.mark.parametrize("value", [7, None, "", " x", "default", ["a"], "two\nlines", "x" * 65])
def test_what_is_no_name_for_a_group_is_refused_only_where_groups_count(value: object, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "topic": value}])
    assert read_prompts(path, Grouping("topic"))[0].group is None
    with pytest.raises(ValueError, match=re.escape(f"{path}:1: topic: --per-group: must be text")) as caught:
        read_prompts(path, Grouping("topic", required=True))
    assert "\n" not in str(caught.value)


def test_the_set_fingerprint_follows_content_and_order(tmp_path: Path) -> None:
    def fingerprint(lines: list[Any]) -> str:
        return PromptSet("x", read_prompts(write_jsonl(tmp_path / "p.jsonl", lines))).fingerprint

    first = fingerprint([{"prompt": "a"}, {"prompt": "b"}])
    assert first == fingerprint([{"prompt": "a", "id": "other"}, {"prompt": "b"}])
    assert first != fingerprint([{"prompt": "b"}, {"prompt": "a"}])
    assert first != fingerprint([{"prompt": "a"}, {"prompt": "c"}])
    assert first != fingerprint([{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}])


def encode(prompt: Prompt, model: FakeModel, room: int = 4) -> tuple[int, ...]:
    return encode_prompts(PromptSet("tuning", (prompt,)), model, room=room)[0].ids


def prompt_of(record: dict[str, Any], tmp_path: Path) -> Prompt:
    return read_prompts(write_jsonl(tmp_path / "p.jsonl", [record]))[0]


def test_chats_go_through_the_template_and_text_does_not(tmp_path: Path) -> None:
    templated = FakeModel("template")
    assert encode(prompt_of(CHAT, tmp_path), templated) == (len("<s>system:Be short.|user:Hi"),)
    assert encode(prompt_of(BENCH, tmp_path), templated) == (len("<s>user:Write a haiku."),)
    assert encode(prompt_of({"prompt": "ab"}, tmp_path), templated) == (97, 98)
    assert encode(prompt_of(BENCH, tmp_path), FakeModel()) == tuple(map(ord, "Write a haiku."))


def test_chat_errors_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"p\.jsonl:1: a chat prompt needs a chat template"):
        encode(prompt_of(CHAT, tmp_path), FakeModel())
    robot = prompt_of({"messages": [{"role": "robot", "content": "x"}]}, tmp_path)
    with pytest.raises(ValueError, match=r"p\.jsonl:1: the chat template refuses it: roles must alternate$"):
        encode(robot, FakeModel("template"))


def test_a_prompt_must_fit_the_models_positions(tmp_path: Path) -> None:
    prompt = prompt_of({"prompt": "x" * 17}, tmp_path)
    with pytest.raises(ValueError, match=r"p\.jsonl:1: 17 prompt tokens \+ 4 to decode do not fit the model's 20"):
        encode(prompt, FakeModel())
    assert len(encode(prompt, FakeModel(), room=3)) == 17
    unlimited = FakeModel()
    unlimited.max_positions = None
    assert len(encode(prompt, unlimited)) == 17
