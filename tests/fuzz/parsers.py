"""The parsers under test: what a valid document is, how its text is read, and what an accepted value must satisfy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from layerskip.config.skip_mask import SkipMask
from layerskip.prompts import Prompt, read_prompts
from layerskip.server.errors import ApiError
from layerskip.server.schemas import ChatRequest, CompletionRequest, parse
from search.comparison.confirm import read_measurements
from search.comparison.journal import Journal
from search.comparison.runs import read_trials
from search.study.space import SearchSpace
from search.study.spec import StudySpec, load_spec, to_toml
from tests.fuzz.configs import CONFIGS, check_config, read_config_file

_ALL = tuple(range(4))
SPACE = SearchSpace(num_layers=4, gamma_max=8, attention_bits=_ALL, mlp_bits=_ALL, layer_bits=())
Document = dict[str, Any]


@dataclass(frozen=True)
class Parser:
    """One way in."""

    name: str
    documents: st.SearchStrategy[Document]
    dump: Callable[[Document], bytes]
    read: Callable[[bytes, Path], Any]
    """Raises: ValueError or ApiError, nothing else. The folder is for parsers of files."""
    check: Callable[[Any, Path], None]
    """Fails unless the value says what it was read from, or comes back from its own text."""
    names_file: bool = True
    only_field: str | None = None
    """What every message names, where there is one thing to name."""


def _json(document: Document) -> bytes:
    return json.dumps(document).encode()


def _in_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# study.toml


def _toml(document: Document) -> bytes:
    return "".join(f"{_toml_text(name)} = {_toml_value(value)}\n" for name, value in document.items()).encode(
        "utf-8", "surrogatepass"
    )


def _toml_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_text(name)} = {_toml_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(one) for one in value) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 64:
        return f"0x{abs(value):x}"  # the form without a limit on its digits
    return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(text := _toml_text(value), text)


def _read_study(data: bytes, folder: Path) -> StudySpec:
    _in_file(folder, "study.toml", data)
    return load_spec({"model": None, "prompts": None}, str(folder), demo=folder)[0]


def _check_study(spec: StudySpec, folder: Path) -> None:
    assert _read_study(to_toml(spec, folder).encode(), folder) == spec


STUDIES = st.fixed_dictionaries(
    {"model": st.sampled_from(["./model", "org/name", "/far/away", "gpt2"]), "prompts": st.just("./p.jsonl")},
    optional={
        "held_out": st.sampled_from(["h.jsonl", "../h.jsonl", "/h.jsonl"]),
        "storage": st.sampled_from(["sqlite:///x.db", "journal:x.log", "postgresql://me:secret@host/db"]),
        "trials": st.integers(1, 500),
        "timeout_s": st.floats(0.1, 1e6),
        "device": st.sampled_from(["auto", "cuda:1"]),
        "dtype": st.sampled_from(["auto", "bfloat16"]),
        "engine": st.sampled_from(["eager", "fused"]),
        "gamma_max": st.integers(1, 64),
        "sampler": st.sampled_from(["replay", "tpe"]),
        "seed": st.integers(0, 2**32 - 1),
        "num_threads": st.integers(1, 8),
        "group_field": st.sampled_from(["category", "kind of text"]),
        "study_name": st.text(min_size=1, max_size=8),
    },
)

# Prompt files


def _read_prompt_file(data: bytes, folder: Path) -> tuple[Prompt, ...]:
    return read_prompts(_in_file(folder, "prompts.jsonl", data))


def _check_prompts(prompts: tuple[Prompt, ...], folder: Path) -> None:
    """It says what its line says; written down anew it is the same prompt; and all are different."""
    text = (folder / "prompts.jsonl").read_text(encoding="utf-8-sig")
    said = [json.loads(line) for line in text.split("\n") if line.strip()]
    assert [[content for _, content in one.messages] for one in prompts] == [_texts_of(line) for line in said]
    lines = [{"messages": [{"role": role, "content": content} for role, content in one.messages]} for one in prompts]
    again = _read_prompt_file(b"".join(_json(line) + b"\n" for line in lines), folder)
    assert [one.fingerprint for one in again] == [one.fingerprint for one in prompts]
    assert len({one.fingerprint for one in prompts}) == len(prompts) > 0


def _texts_of(line: Document) -> list[str]:
    if "messages" in line:
        return [message["content"] for message in line["messages"]]
    return [line["prompt"] if "prompt" in line else line["turns"][0]]


_SOME_TEXT = st.text(min_size=1, max_size=9).filter(str.strip)
_ROLES = st.sampled_from(["user", "assistant", "system"])
PROMPT_LINES = st.one_of(
    st.fixed_dictionaries({"prompt": _SOME_TEXT}, optional={"id": st.integers() | st.text(max_size=4)}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": _ROLES, "content": _SOME_TEXT}), min_size=1, max_size=3)},
        optional={"category": st.text(max_size=4)},
    ),
    st.fixed_dictionaries(
        {"question_id": st.integers(), "category": st.just("qa"), "turns": st.lists(_SOME_TEXT, min_size=1, max_size=2)}
    ),
)

# Masks


def _check_mask(mask: SkipMask, _folder: Path) -> None:
    assert SkipMask.parse(str(mask)) == mask


def _read_mask(data: bytes, _folder: Path) -> SkipMask:
    return SkipMask.parse(data.decode("utf-8", "surrogateescape"))


_LAYER = st.integers(0, 13).map(str) | st.sampled_from(["007", "٣", "-1", "99999", "1 1", " ", ""])
_ITEM = st.builds("".join, st.tuples(st.sampled_from(["", "a", "m", "x"]), _LAYER, st.just("-") | st.just(""), _LAYER))
MASKS = st.fixed_dictionaries({"skip_mask": st.lists(_ITEM, max_size=3).map(lambda items: f"12:{','.join(items)}")})


def _dump_mask(document: Document) -> bytes:
    value = next(iter(document.values()), "")
    return (value if isinstance(value, str) else json.dumps(value)).encode("utf-8", "surrogateescape")


# Requests


def _reader_of(kind: Any) -> Callable[[bytes, Path], Any]:
    return lambda data, _folder: parse(kind, data)


def _check_request(asked: Any, _folder: Path) -> None:
    assert parse(type(asked), asked.model_dump_json(exclude_unset=True).encode()) == asked
    assert asked.temperature is None or asked.temperature >= 0


_REQUEST_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 99),
    "temperature": st.floats(0.001, 100) | st.just(0),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 99),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.integers(-5, 5),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=4) | st.just("end"),
    "stream": st.just(True),
    "group": st.just("qa"),
    "n": st.just(1),
    "user": st.text(max_size=3),
}
COMPLETIONS = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": st.text(max_size=5) | st.lists(st.integers(0, 9), min_size=1, max_size=3)},
    optional=_REQUEST_OPTIONS,
)
_PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)}), min_size=1, max_size=2)
_MESSAGES = st.fixed_dictionaries({"role": _ROLES, "content": st.text(max_size=5) | _PARTS})
CHATS = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(_MESSAGES, min_size=1, max_size=2)}, optional=_REQUEST_OPTIONS
)

# Journals

_PARAMS = {"gamma": 3, **{f"skip.{kind}.{i:02}": i == 1 for kind in ("attn", "mlp") for i in range(4)}}
TRIALS = st.fixed_dictionaries(
    {
        "strategy": st.just("ours"),
        "seed": st.integers(0, 3),
        "number": st.just(0),
        "state": st.just("COMPLETE"),
        "value": st.floats(0.1, 9),
        "params": st.just({**_PARAMS, "draft_threshold": 0.0, "target_threshold": 0.0}),
        "user_attrs": st.just({"speedup": 1.2}),
        "steps": st.just([[0, 1.1], [1, 1.2]]),
        "proposal_s": st.floats(0, 9),
        "measure_s": st.floats(0, 9),
        "seconds": st.floats(0, 9),
    }
)
MEASUREMENTS = st.fixed_dictionaries(
    {
        "pick": st.text(max_size=3),
        "repeat": st.integers(0, 2),
        "prompt_id": st.just("p"),
        "tokens_per_s": st.floats(0.1, 9),
        "plain_tokens_per_s": st.floats(0.1, 9),
        "is_tie": st.booleans(),
    }
)


def _line(document: Document) -> bytes:
    return _json(document) + b"\n"


def _journal(read: Callable[[Journal], Any]) -> Callable[[bytes, Path], Any]:
    return lambda data, folder: read(Journal(_in_file(folder, "journal.jsonl", data)))


def _read_trials(journal: Journal) -> list[Any]:
    return [asdict(record) for records in read_trials(journal, SPACE).values() for record in records]


def _check_records(records: list[Any], folder: Path) -> None:
    """The values are what the lines say, to the last digit; and the file can be continued."""
    journal = Journal(folder / "journal.jsonl")
    lines = journal.read()
    assert _canonical(records) == _canonical(lines)
    journal.append({"one": "more"})
    assert _canonical(journal.read()) == _canonical([*lines, {"one": "more"}])


def _canonical(records: list[Any]) -> list[str]:
    """Their JSON, by strategy, seed and number where they have such."""
    return sorted(json.dumps(_as_numbers(one), sort_keys=True) for one in records)


def _as_numbers(value: Any) -> Any:
    """1 and 1.0 are the same number; one that no float holds exactly stays as it is."""
    if isinstance(value, dict):
        return {name: _as_numbers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_numbers(one) for one in value]
    is_exact = type(value) is int and abs(value) < 1 << 1023 and int(float(value)) == value
    return float(value) if is_exact else value


PARSERS = (
    Parser("study.toml", STUDIES, _toml, _read_study, _check_study),
    Parser("prompt file", PROMPT_LINES, _line, _read_prompt_file, _check_prompts),
    Parser("decode config", CONFIGS, _json, read_config_file, check_config),
    Parser("mask", MASKS, _dump_mask, _read_mask, _check_mask, names_file=False, only_field="skip_mask"),
    Parser("completion request", COMPLETIONS, _json, _reader_of(CompletionRequest), _check_request, names_file=False),
    Parser("chat request", CHATS, _json, _reader_of(ChatRequest), _check_request, names_file=False),
    Parser("trial journal", TRIALS, _line, _journal(_read_trials), _check_records),
    Parser("confirm journal", MEASUREMENTS, _line, _journal(read_measurements), _check_records),
)
REFUSALS = (ValueError, ApiError)
