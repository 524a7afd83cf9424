"""python -m layerskip.bench: rows in turns, identity, step costs and intervals on made-up clocks, clear refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, bench
from layerskip.analysis.identity import IdentityReport
from layerskip.benchmark import memory, profiling, run, steps
from layerskip.benchmark.alternation import Case, Row, alternate, make_cases, order_of
from layerskip.benchmark.hf_ways import CompiledWay, HuggingFaceWay, huggingface_ways
from layerskip.benchmark.memory import LayerBytes, StepBytes, step_bytes
from layerskip.benchmark.names import FREE_RUNNING, OWN_ROWS, ROW_NAMES
from layerskip.benchmark.report import write_plot
from layerskip.benchmark.run import Plan, run_benchmark
from layerskip.benchmark.steps import StepSeconds, StepTurn, allowed_s, attained, forward_share, rounds_by_length
from layerskip.benchmark.summary import ratio, row_records
from layerskip.benchmark.ways import (
    CannotRun,
    FreeRunningWay,
    OwnWay,
    Refused,
    Sample,
    own_settings,
    own_ways,
)
from layerskip.config.lookup_settings import PromptLookup, SuffixLookup
from layerskip.config.usual_lookups import NGRAMS, lookup_alone, lookup_else
from layerskip.decoding.stats import DecodeStats
from layerskip.decoding.step_clock import StepClock
from tests.layerskip import zoo
from tests.layerskip.tape import graph_model
from tests.layerskip.tokenizers import KINDS, target_of, weights_of

EARLY_EXIT = DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 2), gamma=3, draft_threshold=0.1)
PROMPTS = [(f"p{i}", zoo.prompt_of(length)) for i, length in enumerate((5, 9, 3))]


@pytest.fixture(autouse=True)
def _small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CPU_BYTES", 1 << 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_model: LayerSkipModel) -> Path:
    """What a study leaves: best.json, held_out.jsonl and a model."""
    root = tmp_path_factory.mktemp("study")
    provenance = zoo.saved_beside(root, text_model, max_new_tokens=7)
    EARLY_EXIT.model_copy(update={"provenance": provenance}).save(root / "best.json")
    lines = [json.dumps({"id": text, "prompt": text}) for text in ("def f(", "class A", "naive", "with open")]
    (root / "held_out.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return root


def command(*arguments: object) -> int:
    return bench.main([str(argument) for argument in arguments])


# --- the command


def test_the_json_holds_every_row_the_steps_and_the_facts(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "bench.json"
    arguments = ("--config", folder / "best.json", "--num-prompts", 3, "--repeats", 2)
    assert command(*arguments, "--json", out, "--plot", tmp_path / "bench.html", "--profile") == 0
    record = json.loads(out.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert tuple(rows) == ROW_NAMES
    assert "--compile" in rows.pop("hf_generate_compiled")["reason"]
    assert rows.pop("layer_skip")["reason"] == "the config is that, see speculative"
    assert rows.pop("hf_assistant")["reason"] == "needs a config that drafts by a draft model"
    assert "num_mtp_layers" in rows.pop("hf_mtp")["reason"]
    for name in ("eagle", "mtp", "draft_model"):
        assert rows.pop(name)["reason"] == f"the config has no draft weights of {name}"
    for name, row in rows.items():
        assert (row["identical"], row["ties"], row["num_outputs"], row["differing"]) == (6, 0, 6, []), name
        assert row["ci_low"] <= row["tokens_per_s"] <= row["ci_high"]
        assert [len(repeats) for repeats in row["samples"]] == [2, 2, 2]
        assert all(emitted == 7 for repeats in row["samples"] for emitted, *_ in repeats)
        assert row["repeated_ngram_share"] == rows["hf_generate"]["repeated_ngram_share"] is not None
    assert rows["hf_generate"]["vs_hf_generate"] is None
    assert rows["speculative"]["vs_plain"]["ratio"] > 0
    assert rows["speculative"]["end_to_end_vs_plain"]["ratio"] > 0
    assert rows["speculative"]["vs_plain_free_running"]["ratio"] > 0
    assert rows["speculative"]["settings"]["skip_mask"] == "4:2-3"
    assert rows["hf_early_exit"]["settings"]["assistant_early_exit"] == 2
    assert [step["num_tokens"] for step in record["steps"]["target"]] == [1, 2, 3, 4]
    assert record["steps"]["draft"][-1]["draft_length"] == EARLY_EXIT.gamma
    assert set(record["steps"]["attained"]) == set(record["forward_share"]) == {"plain", "speculative"}
    assert record["machine"]["attention_backend"]
    facts = record["facts"]
    assert (facts["engine"], facts["dtype"], facts["max_new_tokens"], facts["repeats"]) == ("eager", "float32", 7, 2)
    assert facts["prompts"] == ["def f(", "class A", "naive"]
    assert [one["step"] for one in record["profile"]] == ["plain step", "draft step", "verify of 4 tokens"]
    printed = capsys.readouterr().out
    assert "hf_generate_compiled: not run: off" in printed
    assert f"\nattention {record['machine']['attention_backend']}, peak resident memory" in printed
    assert "tokens/s, prompt included" in printed
    assert "repeats: 4-grams of the outputs" in printed
    assert "of the speed that its own steps allow" in printed
    assert "<html>" in (tmp_path / "bench.html").read_text()


def test_of_a_config_with_regimes_the_setting_for_greedy_is_measured(folder: Path, tmp_path: Path, capsys) -> None:
    """Its rows are all greedy; the default may be for sampled text."""
    data = json.loads((folder / "best.json").read_text())
    greedy = {"skip_mask": "4:1", "gamma": 2, "sampling": {"do_sample": False}}
    data |= {"sampling": {"do_sample": True, "temperature": 0.7}, "regimes": [greedy]}
    data["provenance"]["model"] = str(folder / "model")
    (tmp_path / "best.json").write_text(json.dumps(data))
    arguments = ("--config", tmp_path / "best.json", "--prompt", "def f(", "--repeats", 1, "--max-new-tokens", 4)
    assert command(*arguments, "--only", "speculative", "--json", tmp_path / "bench.json") == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    settings = record["rows"][0]["settings"]
    assert (settings["skip_mask"], settings["gamma"], record["facts"]["regime"]) == ("4:1", 2, "greedy")
    assert not {"sampling", "regimes"} & set(settings)
    assert "batch 1, greedy; the config's setting for greedy\n" in capsys.readouterr().out


def test_only_restricts_the_rows_and_their_steps(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "bench.json"
    arguments = ("--model", folder / "model", "--prompt", "def f(", "--max-new-tokens", 3, "--repeats", 1)
    assert command(*arguments, "--only", "hf_generate", "--json", out) == 0
    record = json.loads(out.read_text())
    assert [row["name"] for row in record["rows"]] == ["hf_generate"]
    assert record["steps"] is None
    assert record["rows"][0]["ci_low"] is None, "one prompt tells nothing of others"


def test_a_model_alone_is_decoded_plainly_and_a_mask_by_hand_speculates(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--model", folder / "model", "--engine", "eager", "--prompt", "def f(", "--repeats", 1]
    arguments += ["--max-new-tokens", 3, "--only", "plain", "--only", "speculative", "--json", out]
    assert command(*arguments) == 0
    plain, speculative = json.loads(out.read_text())["rows"]
    assert plain["identical"] == 1
    assert speculative["reason"] == "needs --config, or --drafter or --mask"
    assert command(*arguments, "--mask", "4:1,a2", "--gamma", 2) == 0
    _, speculative = json.loads(out.read_text())["rows"]
    settings = speculative["settings"]
    assert (settings["drafter"], settings["skip_mask"], settings["gamma"]) == ("layer_skip", "4:1,a2", 2)
    assert (speculative["identical"], speculative["num_outputs"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --config FILE, or --model NAME"),
        (["--config", "none.json"], "--config: no such file: none.json"),
        (["--config", "BEST", "--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["--config", "BEST", "--only", "fastest"], "argument --only: invalid choice: 'fastest'"),
        (["--config", "BEST", "--prompts", "none.jsonl"], "--prompts: no such file: none.jsonl"),
        (["--config", "BEST", "--prompts", "x", "--prompt", "y"], "--prompts, --prompt: give one of them, not both"),
        (["--config", "BEST", "--json", "/nowhere/b.json"], "no such folder: /nowhere"),
        (["--config", "BEST", "--mask", "4:1", "--gamma", "2"], "--mask: give it with --model alone"),
        (["--model", "MODEL"], "--prompts: is required, or --prompt"),
        (["--model", "MODEL", "--mask", "4:1"], "--mask: needs --gamma"),
        (["--model", "MODEL", "--gamma", "2"], "--gamma: needs --mask or --drafter"),
        (
            ["--model", "MODEL", "--prompt", "a", "--mask", "5:1", "--gamma", "2"],
            "must have the model's 4 layers, got 5",
        ),
        (
            ["--model", "MODEL", "--prompt", "a", "--only", "hf_mtp", "--max-new-tokens", "4"],
            "no row to measure: hf_mtp: ",
        ),
        (["--config", "BEST", "--max-new-tokens", "96"], "do not fit the model's 96 positions"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder: Path, arguments: list[str], message: str, refused) -> None:
    places = {"BEST": str(folder / "best.json"), "MODEL": str(folder / "model")}
    err = refused(bench.main, [places.get(argument, argument) for argument in arguments])
    assert message in err
    assert err.startswith(("layerskip.bench: error: ", "python -m layerskip.bench: error: "))


def test_an_output_of_ours_that_differs_is_told_and_exits_with_1(folder: Path, monkeypatch, capsys) -> None:
    real = run.check_identity

    def lies(model: LayerSkipModel, prompt: Any, ids: Sequence[int], reference: Sequence[int]) -> IdentityReport:
        return real(model, prompt, [*ids[:-1], ids[-1] ^ 1], reference)

    monkeypatch.setattr(run, "check_identity", lies)
    arguments = ("--config", folder / "best.json", "--num-prompts", 1, "--repeats", 1, "--only", "plain")
    assert command(*arguments) == 1
    assert "plain: output differs from Hugging Face's" in capsys.readouterr().err


# --- rows that cannot run


def test_an_architecture_without_early_exit_gets_a_row_with_the_reason_and_stays_whole() -> None:
    model = zoo.layerskip_of("gpt2")
    settings = model.model.generation_config.to_dict()
    plan = Plan(6, 1, ("hf_generate", "hf_early_exit", "speculative"))
    found = run_benchmark(model, EARLY_EXIT, PROMPTS[:1], plan)
    rows = {row["name"]: row for row in found.rows}
    assert rows["hf_early_exit"]["reason"].startswith("IndexError: ")
    assert rows["hf_early_exit"]["tokens_per_s"] is None
    assert rows["hf_generate"]["identical"] == rows["speculative"]["identical"] == 1
    assert model.model.config.num_hidden_layers == zoo.NUM_LAYERS
    assert model.model.generation_config.to_dict() == settings


def test_what_hugging_face_reads_from_the_generation_config_is_set_for_the_run_alone(monkeypatch) -> None:
    model = zoo.layerskip_of("llama")
    seen = {}

    def generate(_ids: Any, **_arguments: Any) -> None:
        seen.update(model.model.generation_config.to_dict())
        model.model.config.num_hidden_layers = 1  # as an early exit leaves it when it fails
        raise RuntimeError("no such\nthing")

    monkeypatch.setattr(model.model, "generate", generate)
    before = model.model.generation_config.to_dict()
    ways, refused = huggingface_ways(model, EARLY_EXIT, ["hf_early_exit"])
    assert not refused
    with pytest.raises(CannotRun, match=r"^RuntimeError: no such thing$"):
        ways[0].run((1, 2), 4)
    assert (seen["num_assistant_tokens"], seen["assistant_confidence_threshold"]) == (3, 0.1)
    assert seen["num_assistant_tokens_schedule"] == "constant"
    assert model.model.generation_config.to_dict() == before
    assert model.model.config.num_hidden_layers == zoo.NUM_LAYERS


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, "hf_early_exit"),
        (DecodeConfig.plain(4), "hf_early_exit"),
        (DecodeConfig(skip_mask=SkipMask.parse("4:a1,m2"), gamma=2), "hf_early_exit"),
        (DecodeConfig(skip_mask=SkipMask.parse("4:0-1"), gamma=2), "hf_early_exit"),
        (EARLY_EXIT, "hf_generate_compiled"),
    ],
)
def test_rows_that_make_no_sense_are_not_started(config: DecodeConfig | None, name: str) -> None:
    ways, refused = huggingface_ways(zoo.layerskip_of("llama"), config, [name])
    assert not ways
    assert [one.name for one in refused] == [name]


def test_without_a_reference_there_is_nothing_to_compare_with(monkeypatch) -> None:
    model = zoo.layerskip_of("llama")

    def generate(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(model.model, "generate", generate)
    with pytest.raises(CannotRun, match="RuntimeError: broken"):
        run_benchmark(model, None, PROMPTS[:1], Plan(4, 1, ("plain",)))


def test_the_rows_of_single_drafters_are_what_the_config_has_of_each() -> None:
    num_layers, mask = zoo.NUM_LAYERS, EARLY_EXIT.skip_mask
    lookup = SuffixLookup(min_match=3, gamma=2)
    hybrid = DecodeConfig(drafter="hybrid", skip_mask=mask, gamma=3, lookup=lookup, draft_threshold=0.1)
    found = own_settings(num_layers, hybrid)
    assert found.keys() == set(OWN_ROWS) - {FREE_RUNNING, "eagle", "mtp", "draft_model"}
    assert found["speculative"] == hybrid
    assert found["layer_skip"] == EARLY_EXIT
    assert (found["hybrid"].skip_mask, found["hybrid"].gamma, found["hybrid"].lookup_gamma) == (mask, 3, 10)
    for name in ("layer_skip", "prompt_lookup", "suffix", "hybrid"):
        assert found[name].drafter == name
    ways, _ = own_ways(zoo.layerskip_of("llama"), found, ["prompt_lookup"], has_config=True)
    assert ways[0].settings["lookup"] == {
        "min_match": 2,
        "method": "prompt_lookup",
        "max_match": 4,
        "continuation": "recent",
    }


def test_draft_weights_have_rows_and_steps_like_a_mask() -> None:
    model, weights = zoo.layerskip_of("llama fused"), zoo.eagle_of("llama")
    none, lookup = SkipMask.none(zoo.NUM_LAYERS), SuffixLookup(min_match=3, gamma=2)
    eagle = DecodeConfig(drafter="eagle", skip_mask=none, gamma=3, draft_weights=weights)
    hybrid = DecodeConfig(drafter="hybrid", skip_mask=none, gamma=3, draft_weights=weights, lookup=lookup)
    found = own_settings(zoo.NUM_LAYERS, hybrid)
    assert found["eagle"] == eagle
    assert found["hybrid"].way == "hybrid_eagle"
    assert "layer_skip" not in found
    result = run_benchmark(model, hybrid, PROMPTS[:2], Plan(8, 1, ROW_NAMES))
    rows = {row["name"]: row for row in result.rows}
    assert all(rows[name]["identical"] == 2 for name in ("speculative", "eagle", "hybrid"))
    draft: Any = result.steps["draft"]
    assert all(step["seconds"] > 0 for step in draft)
    assert draft[0]["bytes"] > sum(one.nbytes for one in model.engine.draft_weights[weights.path].module.parameters())


def test_a_draft_model_is_compared_with_transformers_assisted_generation() -> None:
    model, weights = zoo.layerskip_of("llama"), zoo.draft_model_of("llama")
    none = SkipMask.none(zoo.NUM_LAYERS)
    config = DecodeConfig(drafter="draft_model", skip_mask=none, gamma=3, draft_threshold=0.2, draft_weights=weights)
    result = run_benchmark(model, config, PROMPTS[:2], Plan(8, 1, ("hf_assistant", "speculative", "draft_model")))
    rows = {row["name"]: row for row in result.rows}
    assert rows["hf_assistant"]["settings"] == {
        "assistant_model": weights.path,
        "num_assistant_tokens": 3,
        "assistant_confidence_threshold": 0.2,
    }
    assert rows["hf_assistant"]["identical"] == rows["speculative"]["identical"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_with_another_tokenizer_is_compared_with_transformers_universal_assisted_generation(kind: str) -> None:
    model = target_of(kind)
    weights, none = weights_of(next(one for one in KINDS if one != kind)), SkipMask.none(model.num_layers)
    config = DecodeConfig(drafter="draft_model", skip_mask=none, gamma=3, draft_weights=weights)
    texts = ("The reader opens", "The writer closes the file again.")
    prompts = [(one, tuple(model.encode(one))) for one in texts]
    names = ("hf_assistant", "speculative", "draft_model", "hybrid")
    result = run_benchmark(model, config, prompts, Plan(12, 1, names))
    rows = {row["name"]: row for row in result.rows}
    assert rows["hf_assistant"]["settings"]["assistant_tokenizer"] == config.draft_weights.path
    assert [rows[one]["identical"] for one in ("hf_assistant", "speculative", "hybrid")] == [2, 2, 2]


NO_WEIGHTS = {one: f"the config has no draft weights of {one}" for one in ("eagle", "mtp", "draft_model")}
COMPUTED = ("speculative", "layer_skip", "eagle", "mtp", "draft_model", "hybrid")


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (None, dict.fromkeys(COMPUTED, "needs --config, or --drafter or --mask")),
        (DecodeConfig.plain(4), dict.fromkeys(COMPUTED, "the config says gamma 0")),
        (EARLY_EXIT, {"layer_skip": "the config is that, see speculative", **NO_WEIGHTS}),
        (
            lookup_alone(4, NGRAMS),
            dict.fromkeys(("layer_skip", "hybrid"), "the config has no mask") | NO_WEIGHTS,
        ),
    ],
)
def test_rows_that_a_config_has_no_setting_for_say_why(config: DecodeConfig | None, missing: dict[str, str]) -> None:
    model = zoo.layerskip_of("llama")
    settings = own_settings(model.num_layers, config)
    ways, refused = own_ways(model, settings, ROW_NAMES, has_config=config is not None)
    assert {one.name: one.reason for one in refused} == missing
    assert {way.name for way in ways} == set(OWN_ROWS) - missing.keys()


# --- turns


@given(st.integers(1, 7), st.integers(0, 5))
def test_everyone_goes_once_a_visit_and_is_in_every_place_equally_often(count: int, start: int) -> None:
    orders = [order_of(visit, count) for visit in range(start * count, (start + 1) * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in range(count):
        assert sorted(order[place] for order in orders) == list(range(count))


class FakeWay:
    """A way with given seconds, which writes down when it ran."""

    def __init__(self, name: str, seconds: Callable[[int], float], log: list[str], fails_at: int = -1) -> None:
        self.name, self.settings = name, dict[str, object]()
        self._seconds, self._log, self._fails_at = seconds, log, fails_at
        self._calls = 0

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        self._log.append(self.name)
        if self._calls == self._fails_at:
            raise CannotRun("out of luck")
        self._calls += 1
        seconds = self._seconds(self._calls)
        return Sample(tuple(range(max_new_tokens)), max_new_tokens - 1, seconds, 2 * seconds)


def same(_prompt: Sequence[int], ids: Sequence[int], reference: Sequence[int]) -> IdentityReport:
    return IdentityReport(identical=tuple(ids) == tuple(reference), is_tie=False)


def cases_of(count: int) -> list[Case]:
    return [Case(f"p{i}", tuple(range(i + 1)), tuple(range(5))) for i in range(count)]


def test_every_way_runs_on_every_prompt_in_turns_after_a_warm_up() -> None:
    log: list[str] = []
    cases = cases_of(2)
    rows = [Row(FakeWay(name, lambda _: 1.0, log), cases_of(2), 5, same) for name in "abc"]
    progress: list[int] = []
    assert alternate(rows, cases, 3, progress=lambda: progress.append(len(log))) == {}
    assert log[:6] == ["a", "a", "b", "b", "c", "c"]
    visits = [log[6 + 3 * i : 9 + 3 * i] for i in range(6)]
    assert visits == [["abc"[i] for i in order_of(visit, 3)] for visit in range(6)]
    assert progress == [9, 12, 15, 18, 21, 24]
    for row in rows:
        assert [len(samples) for samples in row.samples] == [3, 3]
        assert (row.num_identical, row.num_outputs, row.differing) == (6, 6, [])


@pytest.mark.parametrize("fails_at", [0, 3])
def test_who_fails_stops_nobody_else(fails_at: int) -> None:
    log: list[str] = []
    good = Row(FakeWay("good", lambda _: 1.0, log), cases_of(2), 5, same)
    bad = Row(FakeWay("bad", lambda _: 1.0, log, fails_at), cases_of(2), 5, same)
    assert alternate([bad, good], cases_of(2), 2) == {"bad": "out of luck"}
    assert log.count("bad") == fails_at + 1
    assert good.num_outputs == 4
    (row, failed) = row_records({"good": good}, [Refused("bad", "out of luck")], ["good", "bad"])
    assert row["num_outputs"] == 4
    assert (failed["name"], failed["tokens_per_s"], failed["num_outputs"]) == ("bad", None, 0)
    assert failed["reason"] == "out of luck"


def test_differing_outputs_and_ties_are_counted_once_each() -> None:
    answers = iter([(True, False), (False, True), (False, False), (True, False)])

    def check(*_texts: Sequence[int]) -> IdentityReport:
        identical, is_tie = next(answers)
        return IdentityReport(identical=identical, is_tie=is_tie)

    row = Row(FakeWay("a", lambda _: 1.0, []), cases_of(2), 5, check)
    alternate([row], cases_of(2), 2)
    (record,) = row_records({"a": row}, [], ["a"])
    assert (record["identical"], record["ties"], record["num_outputs"], record["differing"]) == (2, 1, 4, ["p0"])


# --- numbers


def sampled(by_prompt: Sequence[Sequence[float]], name: str = "plain", prompt_share: float = 1.0) -> Row:
    """Outputs of five tokens in these seconds; the prompt takes a share of each on top."""
    row = Row(FakeWay(name, lambda _: 1.0, []), cases_of(len(by_prompt)), 5, same)
    for samples, seconds in zip(row.samples, by_prompt, strict=True):
        samples += [Sample((0,) * 5, 4, one, (1 + prompt_share) * one) for one in seconds]
    return row


def test_a_rate_is_the_geometric_mean_of_medians() -> None:
    (record,) = row_records({"plain": sampled([[1.0, 4.0, 2.0], [0.5, 0.5, 9.0]])}, [], ["plain"])
    assert record["tokens_per_s"] == pytest.approx(math.sqrt((4 / 2.0) * (4 / 0.5)))
    assert record["end_to_end"]["tokens_per_s"] == pytest.approx(math.sqrt((5 / 4.0) * (5 / 1.0)))


def test_ratios_are_paired_by_prompt_and_repeat() -> None:
    # The machine is ten times slower in the second repeat and three times on the second prompt: no ratio moves.
    plain = sampled([[1.0, 10.0], [3.0, 30.0]])
    faster = sampled([[0.5, 5.0], [1.5, 15.0]], "speculative")
    found = ratio(faster, plain)
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_prompt_that_takes_as_long_either_way_takes_from_the_end_to_end_ratio() -> None:
    """Only the ratio prompt apart was told, which nobody who waits for an answer sees."""
    rows = {"plain": sampled([[1.0, 10.0]], prompt_share=0.5), "speculative": sampled([[0.5, 5.0]], prompt_share=1.0)}
    plain, speculative = row_records(rows, [], ["plain", "speculative"])
    assert speculative["vs_plain"] == {"ratio": pytest.approx(2.0), "ci_low": None, "ci_high": None}
    assert speculative["end_to_end_vs_plain"] == {"ratio": pytest.approx(1.5), "ci_low": None, "ci_high": None}
    assert plain["vs_plain"] is plain["end_to_end_vs_plain"] is None


def test_a_row_tells_how_much_of_its_outputs_repeats() -> None:
    (record,) = row_records({"plain": sampled([[1.0], [1.0]])}, [], ["plain"])
    assert record["repeated_ngram_share"] == 3 / 4, "the first prompt ends with that very token"


def test_an_output_that_ends_with_its_first_tokens_has_no_rate() -> None:
    row = Row(FakeWay("plain", lambda _: 1.0, []), cases_of(1), 5, same)
    row.samples[0].append(Sample((1,), 0, 0.0, 1.0))
    (record,) = row_records({"plain": row}, [], ["plain"])
    assert record["tokens_per_s"] is None
    assert "too short to time" in record["reason"]


# --- one clock for all rows


def test_what_our_rows_record_is_recorded_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's first run of a length had its recordings in its end-to-end seconds."""
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    for name in ("plain", "speculative", "plain_free_running"):
        before = model.engine.num_preparations
        recorded_at: list[int] = []

        class NotingClock(StepClock):
            def skip(self, seen: list[int] = recorded_at) -> None:
                super().skip()
                seen.append(model.engine.num_preparations)

        monkeypatch.setattr("layerskip.benchmark.ways.StepClock", NotingClock)
        config = own_settings(zoo.NUM_LAYERS, EARLY_EXIT).get(name)
        way = FreeRunningWay(model) if config is None else OwnWay(name, model, config)
        sample = way.run(prompt, 20)
        assert sample.ids == zoo.greedy_reference("llama", prompt, 20)
        assert before < recorded_at[0] == recorded_at[-1], name


class CountingClock(StepClock):
    """Every look at it takes a second, and nothing else does."""

    num_looks = 0

    def skip(self) -> None:
        super().skip()
        self._start = float(self.num_looks)
        self.num_looks += 1


class Speechless:
    """A tokenizer that must not be asked for text while something is timed."""

    def decode(self, *_args: Any, **_kwargs: Any) -> str:
        raise AssertionError("text was made inside a timed span")


def test_our_rows_and_hugging_faces_read_the_same_clock_as_often_and_make_no_text(monkeypatch) -> None:
    """Ours added up the seconds of its steps and made text between them; theirs read the clock twice and made none."""
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(6)
    monkeypatch.setattr(model, "tokenizer", Speechless())
    monkeypatch.setattr("layerskip.benchmark.ways.StepClock", CountingClock)
    for way in (
        HuggingFaceWay("hf", model),
        OwnWay("plain", model, DecodeConfig.plain(zoo.NUM_LAYERS)),
        OwnWay("speculative", model, EARLY_EXIT),
        FreeRunningWay(model),
    ):
        sample = way.run(prompt, 9)
        assert sample.ids == zoo.greedy_reference("llama", prompt, 9)
        assert (sample.num_timed, sample.decode_s, sample.total_s) == (8, 1.0, 2.0), way.name


def test_stop_strings_of_a_generation_config_end_no_row(monkeypatch) -> None:
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(6)
    monkeypatch.setattr(model.model.generation_config, "stop_strings", ["a"])
    assert len(HuggingFaceWay("hf", model).run(prompt, 9).ids) == 9
    assert model.model.generation_config.stop_strings == ["a"]


def test_the_compiled_row_keeps_one_static_cache(monkeypatch) -> None:
    """A cache for each call had `generate` allocate, and on a GPU compile or record, within every timed run."""
    model = zoo.layerskip_of("llama")
    caches: list[Any] = []
    calls: list[int] = []

    def compiled(**inputs: Any) -> Any:
        calls.append(inputs["input_ids"].shape[1])
        return model.model(**inputs)

    generate = model.model.generate

    def watched(*args: Any, **arguments: Any) -> Any:
        if "past_key_values" in arguments:  # not so when the reference is made
            caches.append(arguments["past_key_values"])
        return generate(*args, **arguments)

    monkeypatch.setattr(model.model, "get_compiled_call", lambda _config: compiled)
    monkeypatch.setattr(model.model, "generate", watched)
    way = CompiledWay(model)
    for length in (9, 3, 7):
        prompt = zoo.prompt_of(length)
        assert way.run(prompt, 6).ids == zoo.greedy_reference("llama", prompt, 6)
    assert len({id(cache) for cache in caches}) == 1
    assert calls == [1] * 15, "every step but the prompts' ran the compiled forward"
    buffers = [layer.keys.data_ptr() for layer in caches[0].layers]
    way.run(zoo.prompt_of(2), 6)
    assert [layer.keys.data_ptr() for layer in caches[0].layers] == buffers
    longer = zoo.prompt_of(12)
    assert way.run(longer, 6).ids == zoo.greedy_reference("llama", longer, 6)
    assert caches[-1] is not caches[0], "a text that does not fit"


@pytest.mark.parametrize("arguments", [{}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}])
def test_only_tokens_after_the_first_ones_are_timed(arguments: dict[str, int]) -> None:
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(6)
    sample = HuggingFaceWay("hf", model, arguments).run(prompt, 9)
    assert sample.ids == zoo.greedy_reference("llama", prompt, 9)
    assert 0 < sample.decode_s < sample.total_s
    assert sample.num_timed == 8 if not arguments else 0 < sample.num_timed <= 8


# --- steps


def a_run(drafted_by_position: list[int], num_target_only: int, decode_s: float = 0.0) -> DecodeStats:
    return DecodeStats(drafted_by_position=drafted_by_position, num_target_only=num_target_only, decode_s=decode_s)


def test_rounds_by_the_length_of_their_draft() -> None:
    assert rounds_by_length(a_run([9, 7, 7, 2], 0)) == ({1: 2, 3: 5, 4: 2}, {})
    assert rounds_by_length(a_run([], 5)) == ({}, {})
    looked_up = a_run([9, 7, 7, 2], 0)
    looked_up.lookup_rounds_by_drafted = [2, 0, 3, 0]
    assert rounds_by_length(looked_up) == ({3: 2, 4: 2}, {1: 2, 3: 3})


STEPS = StepSeconds(
    target_s={1: 1.0, 2: 1.5, 4: 2.0},
    draft_s={1: 0.25, 3: 0.7},
    round_s={1: 1.8, 3: 2.9},  # not the sum of its parts
    lookup_s={1: 1.6, 3: 2.1},
)


def test_what_the_steps_allow_by_hand() -> None:
    # Two rounds of one draft token, five of three, four of the target alone.
    assert allowed_s(a_run([7, 5, 5], 4), STEPS) == pytest.approx(2 * 1.8 + 5 * 2.9 + 4 * 1.0)
    looked_up = a_run([7, 5, 5], 4)
    looked_up.lookup_rounds_by_drafted = [1, 0, 5]
    assert allowed_s(looked_up, STEPS) == pytest.approx(1.8 + 1.6 + 5 * 2.1 + 4 * 1.0), "lookups are free"


def test_attained_is_what_the_steps_explain_of_the_seconds() -> None:
    model = zoo.layerskip_of("llama")
    turn = StepTurn(model, EARLY_EXIT, 2, 5)
    row = Row(FakeWay("speculative", lambda _: 1.0, []), cases_of(2), 5, same)
    for index, overhead in enumerate((1.25, 1.0)):
        for _ in range(2):
            stats = a_run([7, 5, 5], 4, 22.1 * overhead)
            row.samples[index].append(Sample((0,) * 9, 8, stats.decode_s, 30.0, stats))
            turn.samples[index].append(STEPS)
    found = attained(row, turn)
    assert found.value == pytest.approx(math.sqrt(1 / 1.25))


def test_steps_are_timed_at_the_lengths_that_the_prompt_draws_on() -> None:
    model = zoo.layerskip_of("llama")
    cases = make_cases(HuggingFaceWay("hf", model), PROMPTS, 12)
    turn = StepTurn(model, EARLY_EXIT, len(cases), 12)
    for index, case in enumerate(cases):
        turn.take(index, case)
        (found,) = turn.samples[index]
        stats = model.generate(list(case.prompt_ids), config=EARLY_EXIT, max_new_tokens=12, do_sample=False).stats
        assert set(rounds_by_length(stats)[0]) <= set(found.draft_s)
        assert {1, *(length + 1 for length in found.draft_s)} <= set(found.target_s)
        assert allowed_s(stats, found) > 0


HYBRID = lookup_else(EARLY_EXIT, PromptLookup(min_match=1, max_match=2), gamma=6)
SUFFIX = lookup_alone(zoo.NUM_LAYERS, SuffixLookup(min_match=1), gamma=5)


@pytest.mark.parametrize("config", [HYBRID, SUFFIX])
def test_the_steps_of_lookups_are_their_verifications(config: DecodeConfig) -> None:
    """They were timed as drafts of the whole model."""
    model = zoo.layerskip_of("llama")
    cases = make_cases(HuggingFaceWay("hf", model), [("p", zoo.prompt_of(5))], 24)
    turn = StepTurn(model, config, 1, 24)
    turn.take(0, cases[0])
    (found,) = turn.samples[0]
    stats = model.generate(list(cases[0].prompt_ids), config=config, max_new_tokens=24, do_sample=False).stats
    computed, looked_up = rounds_by_length(stats)
    assert looked_up
    assert bool(computed) == bool(found.draft_s) == (config is HYBRID)
    assert {1, *(length + 1 for length in (*computed, *looked_up))} <= set(found.target_s)
    assert allowed_s(stats, found) > 0


@pytest.mark.parametrize("config", [EARLY_EXIT, HYBRID, SUFFIX, DecodeConfig.plain(zoo.NUM_LAYERS)])
def test_the_forwards_are_part_of_the_run_that_they_are_timed_in(config: DecodeConfig) -> None:
    model = zoo.layerskip_of("llama")
    cases = make_cases(HuggingFaceWay("hf", model), PROMPTS, 8)
    found = forward_share(model, config, cases, 8)
    assert 0.0 < found.value < 1.0


def test_the_prompts_own_forward_is_no_part_of_the_share(monkeypatch) -> None:
    model = zoo.layerskip_of("llama")

    def decode(engine: Any, *_args: Any) -> DecodeStats:
        engine.forwards_s += [100.0, 1.0, 2.0]
        return a_run([], 2, decode_s=6.0)

    monkeypatch.setattr(steps, "decode", decode)
    found = forward_share(model, EARLY_EXIT, cases_of(1), 8)
    assert found.value == pytest.approx(0.5)
    monkeypatch.setattr(steps, "decode", lambda *_args: a_run([], 2, decode_s=6.0))
    assert forward_share(model, EARLY_EXIT, cases_of(1), 8) is None, "an engine that hides its forwards"


# --- bytes


def test_bytes_of_a_step_by_hand() -> None:
    full = LayerBytes(attention=100, mlp=300, other=7, cached_token=10, window=None)
    sliding = LayerBytes(attention=100, mlp=300, other=7, cached_token=10, window=4)
    found = StepBytes((full, sliding), head=1000, weight_size=4)
    assert found.of(None, 1, 20) == 1000 + 2 * 407 + 21 * 10 + 4 * 10
    assert found.of(None, 3, 20) == 1000 + 2 * 407 + 23 * 10 + 6 * 10
    assert found.of(SkipMask.parse("2:0"), 1, 20) == 1000 + 407 + 4 * 10
    assert found.of(SkipMask.parse("2:a0,m1"), 1, 20) == 1000 + 300 + 7 + 100 + 7 + 4 * 10
    assert found.of(SkipMask.parse("2:a0,m1,int8"), 1, 20) == 250 + 75 + 7 + 25 + 7 + 4 * 10
    narrow = StepBytes((full, sliding), head=1000, weight_size=4, head_row=20)
    assert narrow.of(SkipMask.parse("2:v30,int8"), 1, 20) == 600 // 4 + 2 * (100 + 7) + 21 * 10 + 4 * 10
    mixture = LayerBytes(attention=100, mlp=300, other=7, cached_token=0, window=None, state=50, experts=200)
    found = StepBytes((mixture,), head=1000, weight_size=2, chosen_share=0.25)
    assert found.of(None, 1, 20) == 1000 + 100 + 50 + 100 + 50 + 7
    assert found.of(None, 2, 20) == 1000 + 100 + 50 + 100 + 88 + 7, "7 of 16 experts, by chance"
    assert found.of(SkipMask.parse("1:int8"), 1, 20) == 500 + 50 + 50 + 75 + 7


@pytest.mark.parametrize("name", ["llama", "llama fused"])
def test_bytes_of_a_llama(name: str) -> None:
    found = step_bytes(zoo.layerskip_of(name))
    hidden, middle, keys, size = 32, 48, 16, 4
    layer = LayerBytes(
        attention=size * (2 * hidden * hidden + 2 * hidden * keys),
        mlp=size * 3 * hidden * middle,
        other=size * 2 * hidden,
        cached_token=size * 2 * keys,
        window=None,
    )
    assert found == StepBytes((layer,) * zoo.NUM_LAYERS, size * hidden * zoo.VOCAB, size, head_row=size * hidden)


def test_float32_weights_of_16_bits_are_counted_as_kernels_read_them() -> None:
    model = LayerSkipModel(zoo.build("llama").bfloat16().float(), None, engine="fused")
    halved = 1 if model.engine.refusal is not None else 2  # type: ignore[attr-defined]
    found, whole = step_bytes(model), step_bytes(zoo.layerskip_of("llama"))
    assert [whole.weight_size, whole.head] == [halved * found.weight_size, halved * found.head]
    assert whole.layers[0].mlp == halved * found.layers[0].mlp
    assert whole.layers[0].other == found.layers[0].other


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "glm4-moe", "qwen3-moe fused"])
def test_of_experts_those_count_that_are_chosen(name: str) -> None:
    found = step_bytes(zoo.layerskip_of(name))
    own = zoo.model_of(name).model.layers[1].mlp.experts
    assert found.layers[1].experts == own.gate_up_proj.nbytes + own.down_proj.nbytes
    assert found.chosen_share == 0.5


@pytest.mark.parametrize("name", [f"{one} fused" for one in zoo.COMPILED if one in zoo.RECURRENT])
def test_states_count_as_the_modules_keep_them(name: str) -> None:
    """Less the oldest input of a convolution, which Transformers keeps for nothing."""
    lean, modules = (step_bytes(zoo.layerskip_of(one)).layers for one in (name, zoo.architecture(name)))
    num_channels = {"qwen3_5": 64, "lfm2": 32, "granite-hybrid": 80, "bamba": 80}[zoo.architecture(name)]
    for found, expected, is_recurrent in zip(lean, modules, (1, 0, 1, 0), strict=True):
        assert expected.state - found.state == 4 * num_channels * is_recurrent
        assert (found.attention, found.experts) == (expected.attention, 0)
        assert (found.mlp, found.other, found.cached_token) == (expected.mlp, expected.other, expected.cached_token)


def test_bandwidth_is_the_better_of_reading_and_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    laps = iter([2.0] * 5 + [3.0] * 5)
    monkeypatch.setattr(StepClock, "lap", lambda _clock: next(laps))
    found = memory.read_bandwidth(zoo.layerskip_of("llama").engine)
    assert found == pytest.approx(2 * (1 << 16) / 3.0), "a copy reads and writes"


# --- profile and plot


def test_on_a_device_a_kernel_counts_once() -> None:
    """The operation that launched it has its time too; both were counted, so that every share was halved."""

    def event(key: str, kind: DeviceType, cpu_us: float, device_us: float) -> Any:
        return SimpleNamespace(
            key=key, device_type=kind, self_cpu_time_total=cpu_us, self_device_time_total=device_us, count=8
        )

    events = [
        event("aten::mm", DeviceType.CPU, 100.0, 800.0),
        event("gemm", DeviceType.CUDA, 0.0, 600.0),
        event("splitk", DeviceType.CUDA, 0.0, 200.0),
    ]
    found = profiling._read("plain step", "cuda", events, 8)
    assert [(one.name, one.share, one.calls) for one in found.operations] == [
        ("gemm", 0.75, 1.0),
        ("splitk", 0.25, 1.0),
    ]
    assert found.ms == pytest.approx(0.1)
    assert [one.name for one in profiling._read("plain step", "cpu", events, 8).operations] == ["aten::mm"]


def test_the_profile_names_operations_that_the_steps_run() -> None:
    model = zoo.layerskip_of("llama")
    case = make_cases(HuggingFaceWay("hf", model), PROMPTS[:1], 6)[0]
    found = profiling.profile_steps(model, EARLY_EXIT, case, top=40)
    plain, draft, verify = found
    assert (plain.step, draft.step, verify.step) == ("plain step", "draft step", "verify of 4 tokens")
    calls = {one.step: sum(o.calls for o in one.operations if o.name in ("aten::mm", "aten::addmm")) for one in found}
    assert calls["plain step"] == calls["verify of 4 tokens"] == 7 * zoo.NUM_LAYERS + 1
    assert calls["draft step"] == 7 * 2 + 1, "two of four layers"
    for one in found:
        shares = [operation.share for operation in one.operations]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.0 + 1e-9


def test_the_plot_shows_the_rows_that_ran(tmp_path: Path) -> None:
    rows = row_records({"plain": sampled([[1.0], [2.0]])}, [Refused("speculative", "why")], ["plain", "speculative"])
    write_plot(tmp_path / "plot.html", rows, "a machine")
    page = (tmp_path / "plot.html").read_text()
    assert '"y":["plain"]' in page
    assert "speculative" not in page.split("Plotly.newPlot")[1]
