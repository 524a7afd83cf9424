"""The studies of the engine: what they write, from tiny models, and the straight lines through their points."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerskip import LayerSkipModel
from layerskip import train as layerskip_train
from layerskip.analysis.step_times import StepTimer
from layerskip.benchmark import memory
from layerskip.rounds import sampling
from studies.demo.corpus import Module
from studies.engine import (
    draft_bits,
    folding,
    growth,
    llama_cpp,
    lookups,
    results,
    siblings,
    sizes,
    switches,
    trees,
    turns,
)
from studies.engine.random_models import VOCABULARY, random_llama, random_text
from tests.layerskip.conftest import text_model, tokenizer, with_whole_drafts
from tests.layerskip.engines.test_native import needs_kernels

__all__ = ["text_model", "tokenizer", "with_whole_drafts"]  # fixtures


DEMO = Path(__file__).parents[2] / "studies" / "demo"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CPU_BYTES", 1 << 16)
    monkeypatch.setattr(results, "take_picture", lambda _page, picture, *_size: picture.write_bytes(b"png"))


def test_growth_writes_three_figures_and_their_numbers(tmp_path: Path, monkeypatch, capsys) -> None:
    """The clock is a model of the costs, so the lines through the points are known."""

    def verify_s(self: Any, text: tuple[int, ...], counts: list[int]) -> list[float]:
        layers = len(self._engine._adapter.layers)
        return [1e-3 * (2 + layers + n + len(text) / 10) for n in counts]

    def draft_s(self: Any, text: tuple[int, ...], masks: list[Any], *, gamma: int, threshold: bool) -> list[float]:
        kept = [mask.num_layers - len(mask.skipped_layers) for mask in masks]
        return [1e-3 * (0.5 + one + len(text) / 20) for one in kept]

    monkeypatch.setattr(StepTimer, "verify_s", verify_s)
    monkeypatch.setattr(StepTimer, "draft_s", draft_s)
    assert growth.main(["--quick", "--repeats", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "growth.json").read_text())
    lines = {(sweep["name"], line["name"]): line for sweep in record["sweeps"] for line in sweep["lines"]}
    expected = {
        ("layers", "plain step"): (4.6, 1.0),
        ("layers", "verify of 5"): (8.6, 1.0),
        ("layers", "draft step, half the layers"): (1.3, 0.5),
        ("context", "plain step"): (5.0, 0.1),
        ("gamma", "its verification"): (8.6, 1.0),
        ("gamma", "its draft, half the layers"): (0.0, 3.3),
        ("gamma", "a round"): (8.6, 4.3),
        ("gamma", "plain decoding of gamma + 1 tokens"): (8.6, 8.6),
    }
    for key, (fixed, slope) in expected.items():
        assert lines[key]["fixed_ms"] == pytest.approx(fixed, abs=1e-6), key
        assert lines[key]["slope_ms"] == pytest.approx(slope), key
        assert lines[key]["fit_error"] == pytest.approx(0, abs=1e-9)
    assert sorted(one.name for one in tmp_path.glob("*.png")) == [
        "growth_context.png",
        "growth_gamma.png",
        "growth_layers.png",
    ]
    assert "100 ms a thousand tokens" in (tmp_path / "growth.md").read_text()


def test_sizes_writes_a_line_for_every_dtype(tmp_path: Path, capsys) -> None:
    arguments = ["--quick", "--layers", "2", "--repeats", "1", "--prompts", "1", "--engine", "eager"]
    assert sizes.main([*arguments, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "sizes.json").read_text())
    assert [(one["dtype"], one["engine"]) for one in record["results"]] == [("float32", "eager"), ("bfloat16", "eager")]
    exact, reduced = (next(row for row in one["rows"] if row["name"] == "plain") for one in record["results"])
    assert (exact["identical"], exact["num_outputs"]) == (1, 1)
    assert reduced["identical"] + reduced["ties"] == 1
    assert all(set(one["verify"]) == {"1", "2", "4", "8"} for one in record["results"])
    assert len((tmp_path / "sizes.md").read_text().splitlines()) == 4


@pytest.mark.slow
def test_switches_tells_seconds_and_memory_of_different_masks(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(switches, "_WARM_UP", 5)

    def draft_s(self: Any, text: tuple[int, ...], masks: list[Any], **_: Any) -> list[float]:
        assert len(masks) == 2 * len(set(masks))  # each mask twice in a row: a switch, and none
        assert masks[::2] == masks[1::2]
        return [0.003 if place % 2 == 0 else 0.001 for place in range(len(masks))]

    monkeypatch.setattr(StepTimer, "draft_s", draft_s)
    arguments = ["--switches", "20", "--layers", "4", "--hidden-size", "64", "--engines", "eager"]
    assert switches.main([*arguments, "--out", str(tmp_path)]) == 0
    (one,) = json.loads((tmp_path / "switches.json").read_text())["results"]
    assert one["extra_ms"] == pytest.approx([2.0, 2.0, 2.0])
    assert one["draft_ms"] == pytest.approx(1.0)
    assert len(one["rss_mib"]) == 11
    assert one["growth"] == pytest.approx(one["rss_mib"][-1] / one["rss_mib"][0] - 1)
    assert "| eager | 4 | 64 | 20 |" in (tmp_path / "switches.md").read_text()
    masks = switches.random_masks(4, 50)
    assert len(set(masks)) == 50
    assert all(mask.num_skipped < 2 * mask.num_layers for mask in masks)


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


def test_a_conversation_is_computed_whole_and_from_where_it_was(tmp_path: Path, capsys) -> None:
    out = tmp_path / "turns.json"
    sizes = ["--turns", "3", "--message-tokens", "9", "--new-tokens", "5", "--repeats", "2"]
    assert turns.main([*sizes, "--config", str(DEMO / "best.json"), "--out", str(out)]) == 0
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

    ways = {
        llama_cpp.LLAMA_CPP: way("theirs", 0.2, 7, 1),
        llama_cpp.PLAIN: way("plain", 0.1),
        llama_cpp.CONFIG: way("own", 0.05),
    }
    found = llama_cpp.compare(ways, [[1], [2], [3]], 4, 2)
    assert asked[3:9] == [("theirs", 1), ("plain", 1), ("own", 1), ("plain", 2), ("own", 2), ("theirs", 2)]
    assert [round(one["tokens_per_s"]) for one in found.values()] == [5, 10, 20]
    assert found[llama_cpp.CONFIG]["ratio_to_llama_cpp"] == pytest.approx([4.0, 4.0, 4.0])
    assert [one["tokens_like_plain"] for one in found.values()] == [0.25, 1.0, 1.0]
    row = {"dtype": "bfloat16", "num_threads": 2, "ways": found}
    told = llama_cpp.table([row]).splitlines()
    assert told[2:] == [
        "| bfloat16, 2 threads: llama.cpp | 5.0 | 1 | 25% |",
        "| bfloat16, 2 threads: ours, plain | 10.0 | 2.00 (2.00..2.00) | 100% |",
        "| bfloat16, 2 threads: ours, under the config | 20.0 | 4.00 (4.00..4.00) | 100% |",
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
        (switches.main, ["--switches", "0"], "--switches: must be at least 1, got 0"),
        (switches.main, ["--layers", "4"], "--layers: must have more than 1100 different masks, got 4"),
        (growth.main, ["--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (growth.main, ["--quick", "--out", "/nowhere"], "--out: no such folder: /nowhere"),
        (lookups.main, ["--lengths", "1"], "--lengths: must be at least 2, got 1"),
        (sizes.main, ["--sizes", "256", "0"], "--sizes: must be at least 1, got 0"),
        (turns.main, ["--turns", "0"], "--turns: must be at least 1, got 0"),
        (llama_cpp.main, ["--threads", "2", "0"], "--threads: must be at least 1, got 0"),
        (llama_cpp.main, ["--out", "/nowhere/x.json"], "--out: no such folder: /nowhere"),
        (turns.main, ["--out", "/nowhere/x.json"], "--out: no such folder: /nowhere"),
        (draft_bits.main, ["--out", "/nowhere/x.json"], "--out: no such folder: /nowhere"),
        (draft_bits.main, ["--study", str(siblings.DEMO)], "--study: must name draft_weights"),
        (turns.main, ["--turns", "400"], "--turns: must be at most "),
        (folding.main, ["--sizes", "4", "0"], "--sizes: must be at least 1, got 0"),
        (folding.main, ["--sizes", "8", "4", "--rows", "1", "5"], "--rows: must be at most 4, the fewest seen, got 5"),
    ],
)
def test_bad_input_is_one_line(main: Any, arguments: list[str], message: str, refused) -> None:
    err = refused(main, arguments)
    assert message in err


def test_random_models_never_end_their_text() -> None:
    model = random_llama(1, 64, engine="eager")
    assert model.eos_token_ids == frozenset()
    text = random_text(9, seed=3)
    assert text == random_text(9, seed=3) != random_text(9)
    assert all(0 < token < VOCABULARY for token in text)
    assert len(model.generate(text, max_new_tokens=5).ids) == 5


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
