"""The GPU study: its time limits, random models and small helpers, and a rehearsal of all parts on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from layerskip import DecodeConfig, SkipMask, bench
from studies.demo import corpus
from studies.gpu import __main__ as command
from studies.gpu import candidate, drafters_job, environment, main_job, models, summarise, tables
from studies.gpu.book import read
from studies.gpu.engine_part import EnginePart
from studies.gpu.gpu_tests import GpuTests

ROOT = Path(environment.__file__).resolve().parents[2]
SECONDS_A_COMMAND, SECONDS_IN_ALL = 570, 28 * 60


# --- the command


def test_the_parts_fit_into_the_time() -> None:
    assert max(command.SECONDS.values()) <= SECONDS_A_COMMAND
    assert command.SECONDS["a", "1b"] + command.SECONDS["a", "3b"] <= SECONDS_A_COMMAND
    assert sum(seconds for (part, _), seconds in command.SECONDS.items() if part != "d") <= SECONDS_IN_ALL
    for size in ("demo", "1b"):
        for part, sizes in (("c", main_job.SIZES), ("d", drafters_job.SIZES)):
            bounds = sizes[size].bounds_s.values()
            assert max(bounds) < command.SECONDS[part, size] <= sum(bounds)
    for size in ("1b", "3b", "8b"):
        assert max(step.bound_s for step in EnginePart(size).steps()) < command.SECONDS["a", size]
    names = [step.name for step in EnginePart("1b").steps()]
    assert names[:5] == ["plain", "rounds", "speedup", "generate", "compiled"]
    assert set(names) == set(tables.TABLES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "required: --out"),
        (["a", "--size", "70b", "--out", "x"], "invalid choice: '70b'"),
        (["a", "--seconds", "0", "--out", "x"], "--seconds: must be above 0, got 0.0"),
        (["summarise", "nowhere"], "folder: holds no result of a part, got nowhere"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: list[str], message: str, refused: Any) -> None:
    assert message in refused(command.main, arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_cuda_device_only_the_rehearsal_starts() -> None:
    with pytest.raises(RuntimeError, match="part a at size 3b needs a CUDA device"):
        EnginePart("3b").facts()


# --- random models


def test_drafts_of_a_random_model_agree_the_more_the_less_its_late_layers_add() -> None:
    shape, rates = models.SHAPES["tiny"], []
    for damping in (1.0, 0.4, 0.1):
        model = models.on_engine(
            models.random_llama(shape, torch.device("cpu"), torch.float32, damping=damping), "cuda_graph"
        )
        prompt = models.random_prompt(shape, 20)
        config = DecodeConfig(skip_mask=SkipMask.early_exit(shape.layers, 2), gamma=3)
        out = model.generate(prompt, config=config, max_new_tokens=64)
        assert out.ids == model.generate(prompt, config=DecodeConfig.plain(shape.layers), max_new_tokens=64).ids
        assert len(out.ids) == 64, "no text ends early"
        assert len(set(out.ids)) > 24, "the text is no loop"
        rates.append(out.stats.acceptance_rate)
    assert rates == sorted(rates)
    assert rates[0] < 0.75
    assert rates[-1] > 0.9


def test_random_models_are_the_same_every_time_and_in_the_number_format_asked_for() -> None:
    shape, made = models.SHAPES["tiny"], []
    for _ in range(2):
        made.append(models.random_llama(shape, torch.device("cpu"), torch.bfloat16))
        assert torch.get_default_dtype() == torch.float32
    assert {parameter.dtype for parameter in made[0].parameters()} == {torch.bfloat16}
    assert made[0].model.rotary_emb.inv_freq.dtype == torch.float32
    for one, other in zip(*(model.parameters() for model in made), strict=True):
        assert torch.equal(one, other)


# --- what a machine needs


def test_missing_packages_are_found_through_what_is_there() -> None:
    installed = {"app": "1.2", "Old_Lib": "0.9", "torch": "2.11.0+cu130", "deep": "3.0"}
    needs = {"app": ["deep>=2", "lost>=1", 'win; sys_platform == "win32"', 'more; extra == "all"'], "torch": ["gone"]}

    def version_of(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    needed = [Requirement(text) for text in ("app>=1", "Old_Lib>=1", "torch>=2.11,<2.14", "absent<2")]
    assert environment.missing_packages(needed, version_of, needs.get) == [
        "Old_Lib>=1: 0.9 is installed",
        "absent<2: not installed",
        "lost>=1: not installed",
    ]


def test_this_machine_has_all_packages_and_lacks_what_is_asked_too_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = environment.project_requirements()
    assert {"torch", "optuna", "pytest", "hypothesis", "pytest-timeout"} <= {one.name for one in needed}
    flags = ["--device", "cpu", "--work", str(tmp_path)]
    assert environment.main([*flags, "--min-disk-gib", "1e9"]) == 1
    assert "lacking: 1e+09 GiB of disk" in capsys.readouterr().out
    assert environment.main(flags) == 0
    assert json.loads(capsys.readouterr().out)["packages"]["torch"] == torch.__version__


def test_the_wheels_that_the_readme_brings_are_all_that_a_machine_with_torch_may_lack() -> None:
    lines = (ROOT / "studies" / "gpu" / "README.md").read_text(encoding="utf-8").splitlines()
    options = next(i for i, line in enumerate(lines) if line.endswith("-c constraints.txt \\"))
    needed = {one.name for one in environment.project_requirements()} - {"torch", "transformers", "numpy"}
    assert set(lines[options + 1].split()) == needed


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_cuda_is_told_so() -> None:
    assert environment.device_facts("cuda", 1.0)[1] == [f"a CUDA device: torch {torch.__version__} sees none"]


def test_the_check_of_a_machine_needs_none_of_the_packages_it_looks_for() -> None:
    code = (
        "import sys\n"
        "for name in ('pydantic', 'optuna', 'plotly', 'torch', 'transformers'): sys.modules[name] = None\n"
        "import studies.gpu.environment\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_bench_measures_the_best_candidate_where_nothing_won() -> None:
    winner = DecodeConfig.model_validate({"skip_mask": "4:2-3", "gamma": 3})
    plain = DecodeConfig.model_validate({"skip_mask": "4:none", "gamma": 0, "reason": "nothing wins"})
    one = {"config": {"skip_mask": "4:1", "gamma": 2}, "speedup": 0.8, "excluded": None}
    two = {"config": {"skip_mask": "4:2", "gamma": 1, "draft_threshold": 0.4}, "speedup": 0.9, "excluded": None}
    broken = {"config": {"skip_mask": "4:0-3", "gamma": 8}, "speedup": 2.0, "excluded": "not lossless"}
    summary = {"candidates": [one, two, broken]}
    assert candidate.bench_config(winner, summary) == winner
    chosen = candidate.bench_config(plain, summary)
    assert (str(chosen.skip_mask), chosen.gamma, chosen.draft_threshold) == ("4:2", 1, 0.4)
    assert candidate.bench_config(plain, {"candidates": [broken]}) == plain


# --- the rehearsal


@pytest.fixture(scope="module")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty short modules of the interpreter's own library: a corpus that is read in a second."""
    root = tmp_path_factory.mktemp("library")
    fitting = [module for module in corpus.read_modules() if 6_000 <= len(module.text) <= 12_000]
    for module in fitting[:60]:
        file = root / module.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(module.text, encoding="utf-8")
    return root


def rehearse(part: str, out: Path, *flags: str) -> dict[str, Any]:
    """Every step is done; the part's record."""
    code = command.main([part, "--size", "tiny", "--out", str(out), *flags])
    record = read(out / f"{part}-tiny.json")
    broken = {name: step["error"] for name, step in record["steps"].items() if step["state"] != "done"}
    assert not broken
    assert code == 0
    return record


def rows_of(record: dict[str, Any], step: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = record["steps"][step]["rows"]
    return rows


@pytest.mark.slow
def test_part_a_runs_on_a_cpu(tmp_path: Path) -> None:
    record = rehearse("a", tmp_path)
    assert list(record["steps"]) == list(tables.TABLES)
    plain = [row for row in rows_of(record, "plain") if "machine" not in row]
    engines, ways = ("cuda_graph", "fused", "eager"), ("plain", "plain_free_running")
    assert [(row["engine"], row["way"]) for row in plain] == [(one, way) for one in engines for way in ways]
    assert all(row["ms_per_token"] > 0 for row in plain)
    assert rows_of(record, "rounds")[1]["ms"] > 0
    assert 0 < rows_of(record, "speedup")[0]["acceptance_rate"] <= 1
    assert [row["name"] for row in rows_of(record, "generate")] == [
        "hf_generate",
        "plain",
        "plain_free_running",
        "facts",
    ]
    assert "left out of a rehearsal" in rows_of(record, "compiled")[0]["reason"]
    assert all(row["identical"] == row["outputs"] > 0 for row in rows_of(record, "identity"))
    assert all(row["identical"] or row["is_tie"] for row in rows_of(record, "ties") if "is_tie" in row)
    assert rows_of(record, "recordings")[-1]["captures"] >= 4
    assert record["workers"][0]["copy_bytes_per_s"] > 0
    page = summarise.page(tmp_path)
    assert all(summarise.TITLES[name] in page for name in tables.TABLES)
    assert (tmp_path / "a-tiny.json").stat().st_size < 200_000


@pytest.mark.slow
def test_part_b_runs_on_a_cpu(tmp_path: Path) -> None:
    record = rehearse("b", tmp_path)
    assert len(record["steps"]) >= 4
    assert summarise.page(tmp_path).rstrip().endswith(f"{len(record['steps'])} passed.")


@pytest.mark.slow
def test_part_b_finds_the_tests_that_need_a_gpu() -> None:
    names = [step.name for step in GpuTests("all").steps()]
    assert len(names) == len(set(names)) > 20
    assert all("cpu" not in name.partition("[")[2] for name in names)
    assert {name.partition("::")[0] for name in names} >= {"tests/layerskip/engines/cuda_graph/test_cuda_graph_gpu.py"}


@pytest.mark.slow
def test_parts_c_and_d_run_on_a_cpu(tmp_path: Path, small_library: Path) -> None:
    """Trains, searches, confirms and benches a tiny model, then a layer that drafts for it and every way to draft, and
    leaves nothing but its records."""
    assert command.main(["d", "--size", "tiny", "--out", str(tmp_path), "--work", str(tmp_path / "work")]) == 1
    assert "no model; run part c --size tiny first" in read(tmp_path / "d-tiny.json")["steps"]["weights"]["error"]
    record = rehearse("c", tmp_path, "--work", str(tmp_path / "work"), "--corpus", str(small_library))
    facts = rows_of(record, "train")[0]["training"]
    assert (facts["size"], facts["recipe"], facts["steps"], facts["vocab"]) == ("tiny", "layerskip", 10, 4352)
    assert facts["held_out_loss"] < 8.35 < math.log(facts["vocab"])  # better than knowing nothing
    summary, best = (row[name] for name, row in zip(("summary", "best"), rows_of(record, "search"), strict=True))
    assert summary["trials"]["counted"] == 3
    assert summary["not_lossless"] == []
    assert DecodeConfig.model_validate_json(json.dumps(best)).skip_mask.num_layers == 4
    rows = {row["name"]: row for row in rows_of(record, "bench")[0]["bench"]["rows"]}
    for name in ("hf_generate", "plain"):
        assert rows[name]["tokens_per_s"] > 0
        assert rows[name]["identical"] == rows[name]["num_outputs"] == 2
    page = summarise.page(tmp_path)
    assert all(f"### {summarise.TITLES[name]}" in page for name in ("train", "search", "bench"))
    assert (tmp_path / "c-tiny.json").stat().st_size < 500_000

    (tmp_path / "d-tiny.json").unlink()
    record = rehearse("d", tmp_path, "--work", str(tmp_path / "work"), "--corpus", str(small_library))
    assert len(rows_of(record, "weights")[0]["weights"]["held_out_agreement"]) == 2
    assert {"eagle", "hybrid"} <= rows_of(record, "search")[0]["summary"]["by_drafter"].keys()
    found = rows_of(record, "regimes")[0]["regimes"]["regimes"]
    assert any("eagle" in row for one in found if one["name"].startswith("greedy") for row in one["rows"])
    for one in rows_of(record, "trees")[0]["trees"]["regimes"].values():
        assert all(by["num_identical"] == by["num_outputs"] == 2 for by in one["timed"].values())
    page = summarise.page(tmp_path)
    assert all(f"### {summarise.TITLES[name]}" in page for name in ("weights", "search", "regimes", "trees"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["c-tiny.json", "d-tiny.json"]


def test_a_command_that_fails_says_why_in_the_book(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2: layerskip\.bench: error: --config: no such file"):
        main_job.command(bench.main, ["--config", str(tmp_path / "x.json")])
