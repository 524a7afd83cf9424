"""The studies of the engine: what they write, from tiny models."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from layerskip import LayerSkipModel
from layerskip import train as layerskip_train
from layerskip.benchmark import memory
from layerskip.decoding import loop
from layerskip.rounds import likely_ids, sampling
from studies.demo.corpus import Module
from studies.engine import (
    batches,
    draft_bits,
    draft_vocab,
    families,
    folding,
    llama_cpp,
    lookups,
    siblings,
    trees,
    turns,
)
from studies.engine import grammar as engine_grammar
from studies.engine import sampling as engine_sampling
from tests.layerskip import zoo
from tests.layerskip.conftest import text_model, tokenizer, with_whole_drafts
from tests.layerskip.engines.test_native import needs_kernels

__all__ = ["text_model", "tokenizer", "with_whole_drafts"]  # fixtures


DEMO = Path(__file__).parents[2] / "studies" / "demo"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CPU_BYTES", 1 << 16)


def test_lookups_tells_costs_and_what_was_proposed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(lookups.TEXTS, "natural", lambda count: [3, 1, 4, 1, 5] * (count // 5))
    ticks = itertools.count()
    monkeypatch.setattr(lookups.time, "perf_counter_ns", lambda: 2_000 * next(ticks))
    assert lookups.main(["--lengths", "50", "200", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "lookups.json").read_text())
    found = {(one["lookup"], one["text"], one["num_tokens"]): one for one in record["results"]}
    assert len(found) == 2 * 3 * 2
    for one in found.values():
        assert one["token_us"] == one["proposal_us"] == [2.0, 2.0]
    assert found["prompt_lookup", "natural", 200]["mean_proposed"] == pytest.approx(10 * (199 - 6) / 199)
    assert found["suffix", "natural", 200]["share_right"] > 0.9
    assert found["suffix", "looping", 50]["mean_proposed"] > 0
    assert found["suffix", "random", 50]["share_right"] in (None, pytest.approx(0, abs=0.2))
    assert "| prompt_lookup | looping | 200 | 2.0 | 2.0 | 2.0 | 2.0 |" in (tmp_path / "lookups.md").read_text()


@needs_kernels
@pytest.mark.slow
def test_draft_bits_tells_both(tmp_path: Path, capsys) -> None:
    demo = siblings.DEMO
    names = {"model": "model", "prompts": "tuning.jsonl", "held_out": "held_out.jsonl"}
    lines = [f'{name} = "{demo / file}"' for name, file in names.items()]
    # The model itself, which drafts its own next token: always as it is, in 8 bits mostly.
    lines += [f'draft_weights = "{demo / "model"}"', 'device = "cpu"', 'dtype = "float32"', "num_threads = 1"]
    (tmp_path / "study.toml").write_text("\n".join([*lines, "max_new_tokens = 16"]) + "\n")
    out = tmp_path / "draft_bits.json"
    given = ["--study", str(tmp_path), "--gamma", "3", "--prompts", "2", "--repeats", "2", "--out", str(out)]
    assert draft_bits.main(given) == 0
    record = json.loads(out.read_text())
    assert [(one["drafter"], one["regime"]) for one in record["rows"]] == [
        ("draft_model", regime) for regime in draft_bits.REGIMES
    ]
    for one in record["rows"]:
        whole, rounded = one["ways"]
        assert whole["length"] == pytest.approx(4.0, abs=0.3)
        assert 2.5 < rounded["length"] <= whole["length"]
        assert whole["over_none"]["mean"] == 1.0
        assert len(rounded["over_none"]["raw"].split()) == 4
        assert whole["num_identical"] == rounded["num_identical"] == 4
    assert draft_bits.table(record) in capsys.readouterr().out


@needs_kernels
@pytest.mark.slow
def test_draft_vocab_tells_shares_and_speeds(tmp_path: Path, capsys) -> None:
    demo, out = siblings.DEMO, tmp_path / "draft_vocab.json"
    names = {"model": "model", "prompts": "tuning.jsonl", "held_out": "held_out.jsonl"}
    lines = [f'{name} = "{demo / file}"' for name, file in names.items()]
    lines += ['device = "cpu"', 'dtype = "float32"', "num_threads = 1", "max_new_tokens = 16"]
    (tmp_path / "study.toml").write_text("\n".join(lines) + "\n")
    given = ["--study", str(tmp_path), "--texts", "4", "--prompts", "2", "--repeats", "1", "--out", str(out)]
    assert draft_vocab.main([*given, "--bits", "8"]) == 0
    record = json.loads(out.read_text())
    assert [one["regime"] for one in record["rows"]] == list(draft_vocab.REGIMES)
    for one in record["rows"]:
        assert [by["size"] for by in one["coverage"]] == [2048, 1024, 512]
        assert all(0 < by["first"] <= 1 and 0 < by["likeliest"] <= 1 for by in one["coverage"])
        assert [way["name"] for way in one["ways"]][:3] == ["all", "the first 1024", "the likeliest 1024"]
        assert all(way["num_identical"] == way["num_outputs"] == 2 for way in one["ways"])
    assert draft_vocab.table(record) in capsys.readouterr().out


@needs_kernels
@pytest.mark.slow
def test_grammar_tells_what_forced_text_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    own = loop.MOST_FORCED
    monkeypatch.setattr(engine_grammar, "NEW_TOKENS", 40)
    monkeypatch.setattr(engine_grammar, "prompts_of", lambda model, file, count: [model.encode("def f(x):\n")] * count)
    out = tmp_path / "grammar.json"
    given = ["--study", str(siblings.DEMO), "--prompts", "2", "--bits", "8", "--gamma", "2", "--out", str(out)]
    assert engine_grammar.main(given) == 0
    assert own == loop.MOST_FORCED
    record = json.loads(out.read_text())
    assert [one["regime"] for one in record["rows"]] == list(engine_grammar.REGIMES)
    for one in record["rows"]:
        alone, forced_alone, *_ = one["ways"]
        assert all(way["num_identical"] == way["num_outputs"] == 2 for way in one["ways"])
        assert alone["mean_accepted_length"] == 1.0
        assert forced_alone["mean_accepted_length"] > 2.0
    assert engine_grammar.table(record) in capsys.readouterr().out


def test_a_function_is_described_in_the_chats_form(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"content": "Change it.\n\ndef f(x):\n\n    pass"}]}), encoding="utf-8")
    asked = []
    told = SimpleNamespace(apply_chat_template=lambda turns, **_: asked.extend(turns) or {"input_ids": [1, 2]})
    assert engine_grammar.prompts_of(SimpleNamespace(tokenizer=told), file, 3) == [[1, 2]]
    assert asked[0]["content"].endswith("\n\ndef f(x):\n\n    pass")
    assert "Change" not in asked[0]["content"]


@needs_kernels
@pytest.mark.slow
def test_sampling_tells_costs_and_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(likely_ids, "_LARGE", 64)
    out = tmp_path / "sampling.json"
    given = ["--study", str(siblings.DEMO), "--prompts", "2", "--repeats", "1", "--gamma", "2", "--out", str(out)]
    assert engine_sampling.main(given) == 0
    assert likely_ids._LARGE == 64
    record = json.loads(out.read_text())
    assert [one["regime"] for one in record["tokens"]] == list(engine_sampling.SETTINGS)
    assert all(ms > 0 for one in record["tokens"] for ms in one["token_ms"])
    assert [one["regime"] for one in record["rows"]] == list(engine_sampling.DECODED)
    for one in record["rows"]:
        assert [way["name"] for way in one["ways"]] == ["drafts", "plain, as `generate`", "drafts, as `generate`"]
        assert all(way["num_identical"] == way["num_outputs"] == 2 for way in one["ways"])
        assert one["ways"][1]["mean_accepted_length"] == 1.0
    assert engine_sampling.table(record) in capsys.readouterr().out


@needs_kernels
@pytest.mark.slow
def test_batches_tells_tokens_a_second_and_what_a_prompt_holds_up(tmp_path: Path, capsys) -> None:
    given = ["--prompts", "3", "--sizes", "2", "3", "--new-tokens", "6", "--repeats", "2"]
    assert batches.main([*given, "--out", str(tmp_path / "batches.json")]) == 0
    record = json.loads((tmp_path / "batches.json").read_text())
    assert [one["regime"] for one in record["regimes"]] == ["greedy", "t0.7"]
    for one in record["regimes"]:
        ways = [(way["size"], way["way"]) for way in one["ways"]]
        own = [(size, way) for size in (1, 2, 3) for way in (batches.PLAIN, batches.DRAFTING)]
        assert ways == [*own, (3, batches.HUGGING_FACE)]
        assert all(len(way["tokens_per_s"]) == 2 for way in one["ways"])
        assert all(way["num_identical"] == 3 for way in one["ways"] if way["way"] != batches.HUGGING_FACE)
        if one["regime"] == "greedy":
            assert one["ways"][-1]["num_identical"] == 3
    assert [one["piece"] for one in record["joining"]] == [512, 128, 64, 32, 16]
    assert record["joining"][0]["longest_s"] > record["joining"][-1]["longest_s"]
    assert (tmp_path / "batches.md").read_text() in capsys.readouterr().out
    assert batches.main(["--sizes", "1"]) == 2


@pytest.mark.usefixtures("with_whole_drafts")
@pytest.mark.slow
def test_siblings_tells_rounds_and_where_they_pay(tmp_path: Path, capsys) -> None:
    sizes = ["--num-prompts", "3", "--timed-prompts", "2", "--repeats", "2", "--new-tokens", "16"]
    # The model itself, which drafts its own next token.
    weights = ["--draft-weights", str(siblings.DEMO / "model")]
    assert siblings.main([*sizes, *weights, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "siblings.json").read_text())
    assert [(one["regime"], one["drafter"]) for one in record["timed"]] == [
        (regime, drafter) for regime in ("greedy", "t0.7") for drafter in ("exit after 3", "draft_model")
    ]
    for one in record["timed"]:
        by_siblings = one["by_siblings"]
        assert [(by["siblings"], by["sibling_threshold"]) for by in by_siblings] == list(siblings.TIMED_SIBLINGS)
        assert all(by["num_identical"] == by["num_outputs"] == 4 for by in by_siblings)
        lengths = [by["mean_accepted_length"] for by in by_siblings]
        assert lengths[0] < lengths[3] if one["drafter"] != "draft_model" else lengths[0] == lengths[3] > 4.0
        assert lengths[0] <= lengths[4] <= lengths[3]
        assert by_siblings[0]["over_none"]["mean"] == 1.0
        assert len(by_siblings[2]["over_none"]["raw"].split()) == 4
    assert all(one["mean_accepted_length"] == sorted(one["mean_accepted_length"]) for one in record["rounds"])
    assert any(one["mean_accepted_length"][1] > 1.02 * one["mean_accepted_length"][0] for one in record["rounds"])
    best = {
        (one["regime"], one["machine"]): [by["speedup"] for by in one["best"].values()] for one in record["machines"]
    }
    none, everywhere, unsure = best["greedy", "cpu_dear"]
    assert none > unsure > everywhere, "where verifying is dear, none, and fewer rather than more"
    assert (tmp_path / "siblings.md").read_text() in capsys.readouterr().out


def test_folding_tells_both_ways_for_every_shape(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(folding, "HEADS", (folding.Heads("one", 4, 2, 8), folding.Heads("other", 2, 2, 8)))
    seconds_of = SimpleNamespace(works=0)

    def twice_as_fast(works: Sequence[Callable[[], None]]) -> list[float]:
        for work in works:
            work()
        seconds_of.works += len(works)
        return [0.002, 0.001]

    monkeypatch.setattr(folding, "Stopwatch", lambda _device: twice_as_fast)
    assert folding.main(["--sizes", "4", "6", "--rows", "1", "3", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "folding.json").read_text())
    assert seconds_of.works == 2 * len(record["times"]) == 2 * 2 * 2 * 2 * 2
    assert all(one["as_they_are_us"] == 2 * one["folded_us"] > 0 for one in record["times"])
    said = capsys.readouterr().out
    assert (tmp_path / "folding.md").read_text() in said
    assert "| one | bfloat16 | 3 | 67 / 33 (2.0×) | 67 / 33 (2.0×) |" in said


@needs_kernels
def test_families_tells_each_step_on_every_engine(tmp_path: Path, monkeypatch, capsys) -> None:
    shapes = {name: zoo.SPECS[name] for name in ("gemma3", "lfm2")}
    configs = {
        name: lambda spec=spec: getattr(transformers, spec.config_class)(**spec.arguments)
        for name, spec in shapes.items()
    }
    monkeypatch.setattr(families, "MODELS", configs)
    sizes = ["--dtype", "float32", "--threads", "1", "--context", "9", "--rows", "3", "--rounds", "3"]
    assert families.main([*sizes, "--out", str(tmp_path)]) == 0
    steps = json.loads((tmp_path / "families.json").read_text())["steps"]
    alone = (families.WHOLE, "kernels, in place")  # without drafts of 8 bits
    kernels = ("modules", "kernels", *alone)
    ways = [("gemma3", one) for one in ("torch", *kernels)] + [("lfm2", one) for one in kernels]
    assert sorted((one["model"], one["engine"], one["step"]) for one in steps) == sorted(
        (*way, step)
        for way in ways
        for step in (*families.STEPS, families.PROMPT)
        if way[1] not in alone or step != "int8"
    )
    for one in steps:
        if one["step"] == families.PROMPT:
            assert one["low"] is one["high"] is None
        else:
            assert 0 < one["low"] <= one["times_faster"] <= one["high"]
        assert one["engine"] != "modules" or one["times_faster"] == pytest.approx(1.0)
    said = capsys.readouterr().out
    assert (tmp_path / "families.md").read_text() in said
    assert said.count("| lfm2 |") == 4
    (tmp_path / "rounded").mkdir()
    assert families.main([*sizes, "--quantization", "int8", "--out", str(tmp_path / "rounded")]) == 0
    steps = json.loads((tmp_path / "rounded" / "families.json").read_text())["steps"]
    assert {(one["engine"], one["step"]) for one in steps} == {
        (how, step) for how in ("modules", "kernels") for step in (*families.STEPS, families.PROMPT) if step != "int8"
    }


def test_a_conversation_is_computed_whole_and_from_where_it_was(tmp_path: Path, capsys) -> None:
    out = tmp_path / "turns.json"
    sizes = ["--turns", "3", "--message-tokens", "9", "--new-tokens", "5", "--repeats", "2"]
    assert turns.main(["--config", str(DEMO / "best.json"), *sizes, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    for repeat in record["turns"]:
        assert [(one["num_tokens"], one["num_cached"]) for one in repeat] == [(9, 0), (23, 13), (37, 27)]
        assert all(one["identical"] for one in repeat)
    assert record["command"].startswith("python -m studies.engine.turns --config ")
    said = capsys.readouterr().out
    assert out.with_suffix(".md").read_text() in said
    assert "| 3 | 37 | 27 | " in said


def test_llama_cpp_is_compared_prompt_by_prompt_in_turns() -> None:
    asked: list[tuple[str, int]] = []

    def way(name: str, seconds: float, *ids: int) -> Any:
        def decode(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
            asked.append((name, prompt[0]))
            return [*ids, *[7] * (count - len(ids))], seconds * (count - 1)

        return decode

    of_8, of_4 = llama_cpp.ROUNDED
    ways = {
        llama_cpp.LLAMA_CPP: way("theirs", 0.2, 7, 1),
        of_8.theirs: way("rounded", 0.1, 7, 1),
        of_4.theirs: way("more", 0.05, 7, 1),
        llama_cpp.PLAIN: way("plain", 0.1),
        llama_cpp.CONFIG: way("own", 0.05),
    }
    found = llama_cpp.compare(ways, [[1], [2], [3]], 4, 2)
    first = ["theirs", "rounded", "more", "plain", "own"]
    assert asked[5:15] == [(one, 1) for one in first] + [(one, 2) for one in [*first[1:], *first[:1]]]
    assert [round(one["tokens_per_s"]) for one in found.values()] == [5, 10, 20, 10, 20]
    ratios = found[llama_cpp.CONFIG]["ratio_to"]
    assert ratios[llama_cpp.LLAMA_CPP] == pytest.approx([4.0, 4.0, 4.0])
    assert ratios[of_8.theirs] == pytest.approx([2.0, 2.0, 2.0])
    assert ratios[of_4.theirs] == pytest.approx([1.0, 1.0, 1.0])
    assert [one["tokens_like_plain"] for one in found.values()] == [0.25, 0.25, 0.25, 1.0, 1.0]
    row = {"dtype": "bfloat16", "num_threads": 2, "ways": found}
    told = llama_cpp.table([row]).splitlines()
    where = "| bfloat16, 2 threads:"
    assert told[2:] == [
        f"{where} llama.cpp | 5.0 | 1 | 0.50 (0.50..0.50) | 0.25 (0.25..0.25) | 25% |",
        f"{where} llama.cpp with weights of 8 bits | 10.0 | 2.00 (2.00..2.00) | 1 | 0.50 (0.50..0.50) | 25% |",
        f"{where} llama.cpp with weights of 4 bits | 20.0 | 4.00 (4.00..4.00) | 2.00 (2.00..2.00) | 1 | 25% |",
        f"{where} ours, plain | 10.0 | 2.00 (2.00..2.00) | 1.00 (1.00..1.00) | 0.50 (0.50..0.50) | 100% |",
        f"{where} ours, under the config | 20.0 | 4.00 (4.00..4.00) | 2.00 (2.00..2.00) | 1.00 (1.00..1.00) | 100% |",
    ]


def test_without_llama_cpp_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "pip install llama-cpp-python==0.3.36" in refused(llama_cpp.main, [])


def test_the_natural_text_is_python_and_has_an_end(monkeypatch) -> None:
    module = Module("a.py", "import os\n\n\ndef read(path):\n    return os.open(path)\n")
    monkeypatch.setattr(lookups, "read_modules", lambda: [module, module])
    text = lookups.natural_text(25)
    assert len(text) == 25
    with pytest.raises(ValueError, match=r"--lengths: must be at most the standard library's \d+ tokens, got 1000"):
        lookups.natural_text(1_000)


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (lookups.main, ["--lengths", "1"], "--lengths: must be at least 2, got 1"),
        (turns.main, ["--turns", "0"], "--turns: must be at least 1, got 0"),
        (llama_cpp.main, ["--threads", "2", "0"], "--threads: must be at least 1, got 0"),
        (llama_cpp.main, ["--out", "/nowhere/x.json"], "--out: no such folder: /nowhere"),
        (turns.main, ["--out", "/nowhere/x.json"], "--out: no such folder: /nowhere"),
        (draft_bits.main, ["--out", "/nowhere/x.json"], "--out: no such folder: /nowhere"),
        (draft_bits.main, ["--study", str(siblings.DEMO)], "--study: must name draft_weights"),
        (draft_vocab.main, ["--texts", "0"], "--texts: must be at least 1, got 0"),
        (turns.main, ["--turns", "400"], "--turns: must be at most "),
        (families.main, ["--rows", "1"], "--rows: must be at least 2, got 1"),
        (folding.main, ["--sizes", "4", "0"], "--sizes: must be at least 1, got 0"),
        (folding.main, ["--sizes", "8", "4", "--rows", "1", "5"], "--rows: must be at most 4, the fewest seen, got 5"),
    ],
)
def test_bad_input_is_one_line(main: Any, arguments: list[str], message: str, refused) -> None:
    err = refused(main, arguments)
    assert message in err


@pytest.mark.slow
def test_trees_tells_rounds_and_where_they_pay(text_model: LayerSkipModel, tmp_path: Path, capsys) -> None:
    text_model.model.save_pretrained(tmp_path / "model")
    text_model.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("def read(self):\n    return self.text\n" * 40)
    prompts = ["def read(self):\n    return self.", "return self.text\n    return"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    model, weights = ["--model", str(tmp_path / "model")], str(tmp_path / "eagle")
    trained = ["--data", str(tmp_path / "text.txt"), "--out", weights, "--steps", "8", "--window", "32"]
    assert layerskip_train.main([*model, *trained, "--device", "cpu"]) == 0
    given = [*model, "--draft-weights", weights, "--prompts", str(tmp_path / "prompts.jsonl"), "--repeats", "1"]
    assert trees.main([*given, "--new-tokens", "12", "--out", str(tmp_path)]) == 0
    regimes = json.loads((tmp_path / "trees.json").read_text())["regimes"]
    assert regimes.keys() == trees.REGIMES.keys()
    for one in regimes.values():
        assert len(one["timed"]) == len(trees.TIMED)
        assert all(by["num_identical"] == by["num_outputs"] for by in one["timed"].values())
        found = {name: list(by.values()) for name, by in one["tokens_a_round"].items()}
        assert found["tree"] == sorted(found["tree"])
        assert all(more >= less for more, less in zip(found["siblings"], found["chain"], strict=True))
        assert one["steepness"]["times 1"] == one["tokens_a_round"]["tree"]
        assert {by["tree"]["tree_tokens"] for by in one["machines"].values()} <= set(trees.SIZES)
    assert (tmp_path / "trees.md").read_text() in capsys.readouterr().out
    with trees.steepness(2.0):
        assert sampling._STEEPNESS == 3.0
    assert sampling._STEEPNESS == 1.5
