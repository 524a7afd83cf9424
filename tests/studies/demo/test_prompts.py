"""The demo's prompts: how they are chosen, and the files that are shipped."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import platform
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from studies.demo import corpus, make_prompts
from studies.demo.corpus import Module, Split
from studies.demo.make_prompts import Chooser, Excerpt

DEMO = Path(make_prompts.__file__).parent
MODEL = DEMO / "model"
BOUNDS = {"opens": (40, 120), "continues": (100, 300)}
WORDS = [
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "echo",
    "foxtrot",
    "golf",
    "hotel",
    "india",
    "juliet",
    "kilo",
    "lima",
    "mike",
    "november",
    "oscar",
    "papa",
]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@functools.cache
def training() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((MODEL / "training.json").read_text())
    return facts


def prompts_of(part: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]


def table(name: str) -> str:
    """Statements of one form: what comes next follows from what is there."""
    return "\n".join(f"{name}.register('{word}', handler=on_{word}, priority=10)" for word in WORDS) + "\n"


def prose(name: str) -> str:
    """A function none of whose lines is like another one."""
    pairs = itertools.islice(itertools.permutations(WORDS, 2), 0, 240, 10)
    lines = [f"    {a}{i} {'+-*/%'[i % 5]}= {i * 37} {'<>&|^'[i // 5]} {b}" for i, (a, b) in enumerate(pairs)]
    return f"def {name}():\n" + "\n".join(lines) + "\n"


def test_the_share_counts_tokens_that_end_an_ngram_of_the_prompt() -> None:
    assert make_prompts.repeated_share([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]) == 1
    assert make_prompts.repeated_share([1, 2, 3, 4, 5, 1, 2, 3], [4, 9, 1, 2]) == 1 / 4
    assert make_prompts.repeated_share([1, 2, 3], [4, 5, 1, 2, 3, 4]) == 0  # what the following repeats of itself


def test_texts_continue_where_their_source_repeats_itself_and_nowhere_else() -> None:
    modules = [Module("table.py", table("registry")), Module("prose.py", prose("compute"))]
    (found,) = Chooser([], tokenizer()).continues(modules, 1)
    assert found.path == "table.py"
    lines = modules[0].text.split("\n")
    num_lines = found.text.count("\n") + 1
    assert found.text == "\n".join(lines[found.first - 1 : found.first - 1 + num_lines])
    assert num_lines < found.last - found.first + 1 < len(lines)  # the tokens it was judged by are its own too
    with pytest.raises(ValueError, match="1 prompts wanted, got 0 from 1 modules"):
        Chooser([], tokenizer()).continues(modules[1:], 1)


def test_what_stands_in_the_training_text_is_no_prompt() -> None:
    modules = [Module("table.py", table("registry")), Module("prose.py", prose("compute"))]
    trained = [Module("train.py", f"import {module.path}\n\n{module.text}") for module in modules]
    for category, module in (("continues", modules[0]), ("opens", modules[1])):
        choose = getattr(Chooser([], tokenizer()), category)
        assert len(choose([module], 1)) == 1
        with pytest.raises(ValueError, match="1 prompts wanted, got 0"):
            getattr(Chooser(trained, tokenizer()), category)([module], 1)


def test_what_stands_in_the_part_before_is_no_prompt() -> None:
    """Else the search would be tuned on texts that it is judged by, whatever their lengths."""
    chooser = Chooser([], tokenizer())
    copy = Module("held_out.py", "import held_out\n\n" + table("registry"))
    chooser.leave([Module("tuning.py", table("registry"))])
    with pytest.raises(ValueError, match="1 prompts wanted, got 0"):
        chooser.continues([copy], 1)
    assert len(Chooser([], tokenizer()).continues([copy], 1)) == 1


def test_near_duplicates_are_known() -> None:
    assert make_prompts.is_similar(table("registry"), table("registries"))
    assert not make_prompts.is_similar(table("registry"), prose("compute"))


@given(st.text("abc", min_size=1), st.text("abcd", min_size=1))
def test_no_ratio_is_above_its_bound(one: str, other: str) -> None:
    ratio = difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()
    assert ratio <= make_prompts.most_alike(one, other) <= 2 * min(len(one), len(other)) / (len(one) + len(other))


def test_the_bound_is_by_the_longest_common_subsequence() -> None:
    assert make_prompts.most_alike("abcbdab", "bdcaba") == 2 * 4 / 13
    assert make_prompts.most_alike("abc", "xyz") == 0


@pytest.mark.parametrize(("first", "last", "overlaps"), [(1, 4, False), (1, 5, True), (6, 7, True), (10, 12, False)])
def test_excerpts_overlap_if_they_share_a_line(first: int, last: int, *, overlaps: bool) -> None:
    one = Excerpt("opens", "a.py", 5, 9, "")
    assert one.overlaps(Excerpt("continues", "a.py", first, last, "")) == overlaps
    assert not one.overlaps(Excerpt("continues", "b.py", first, last, ""))


def test_a_corpus_that_the_model_was_not_trained_on_is_refused(tmp_path: Path, refused: Any) -> None:
    split = Split((Module("t.py", "x = 1\n"),), (Module("a.py", "a"),), (Module("b.py", "b"),))
    facts = {"tuning_modules": ["a.py"], "held_out_modules": ["b.py"], "python": "3.11.7"}
    num_tokens = len(corpus.token_stream(tokenizer(), split.train))
    make_prompts.check_split(split, facts | {"corpus_tokens": num_tokens}, tokenizer())
    with pytest.raises(ValueError, match=rf"must have the 9 tokens .*3\.11\.7.*, got {num_tokens}"):
        make_prompts.check_split(split, facts | {"corpus_tokens": 9}, tokenizer())
    with pytest.raises(ValueError, match="must hold out the model's own held_out modules"):
        make_prompts.check_split(split, facts | {"held_out_modules": ["a.py"]}, tokenizer())
    error = refused(make_prompts.main, ["--corpus", str(tmp_path), "--out", str(tmp_path)])
    assert "at least 40 must be long enough, got 0" in error


# The shipped files.


@pytest.mark.parametrize(("part", "num"), [("tuning", 24), ("held_out", 52)])
def test_shipped_prompts(part: str, num: int) -> None:
    prompts = prompts_of(part)
    assert [prompt["category"] for prompt in prompts] == ["opens", "continues"] * num
    assert len({prompt["id"] for prompt in prompts}) == 2 * num
    for prompt in prompts:
        assert set(prompt) == {"id", "category", "prompt"}
        low, high = BOUNDS[prompt["category"]]
        assert low <= len(tokenizer()(prompt["prompt"])["input_ids"]) <= high
    modules = {prompt["id"].split(":")[0] for prompt in prompts}
    assert len(modules) >= 18
    assert modules <= set(training()[f"{part}_modules"])


def test_shipped_parts_share_no_module_and_hardly_a_line() -> None:
    parts = [prompts_of(part) for part in ("tuning", "held_out")]
    modules = [{prompt["id"].split(":")[0] for prompt in prompts} for prompts in parts]
    assert not modules[0] & modules[1]
    lines = {line for prompt in parts[0] for line in corpus.long_lines(prompt["prompt"])}
    for prompt in parts[1]:
        own = corpus.long_lines(prompt["prompt"])
        assert len(own & lines) <= corpus.MAX_SHARED_LINES * len(own), prompt["id"]


@pytest.mark.slow
def test_the_command_writes_the_shipped_prompts_anew(tmp_path: Path) -> None:
    if platform.python_version() != training()["python"]:
        pytest.skip(f"the prompts are of the library of Python {training()['python']}")
    assert make_prompts.main(["--out", str(tmp_path)]) == 0
    for part in ("tuning", "held_out"):
        assert (tmp_path / f"{part}.jsonl").read_bytes() == (DEMO / f"{part}.jsonl").read_bytes()
