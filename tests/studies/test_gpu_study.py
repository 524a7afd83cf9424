"""The GPU study: its script's order, limits, resumption and failures, its small helpers, and a rehearsal on the CPU."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from layerskip.config import DecodeConfig
from search.spec import StudySpec
from studies.demo import corpus
from studies.gpu import candidate, environment, summarise, trials

ROOT = Path(environment.__file__).resolve().parents[2]
SCRIPT = ROOT / "studies" / "gpu" / "run_all.sh"
MINUTES_IN_ALL, MINUTES_A_STEP = 28, 10

# Stands in for the interpreter: notes how it was called, and does what FAKE says.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$FAKE" in
fail) seq 1 40; echo "the reason" >&2; exit 7 ;;
nothing) exit 0 ;;
wait) trap 'echo tidied up; exit 0' TERM; sleep 30 & wait $! ;;
facts) while [[ $# -gt 1 ]]; do if [[ $1 == --out ]]; then echo '{}' >"$2"; fi; shift; done ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """The script's environment: folders of its own, and an interpreter that does what FAKE says."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    names = {"WORK": "work", "OUT": "out", "CALLS": "calls"}
    mine = {name: str(tmp_path / folder) for name, folder in names.items()}
    return {**os.environ, **mine, "PYTHON": str(python), "FAKE": "nothing"}


def script(env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True, check=False)


def table() -> dict[str, int]:
    lines = script(os.environ, "--list").stdout.splitlines()
    return {name: int(limit) for name, limit in (line.split() for line in lines)}


def test_the_steps_fit_into_the_time() -> None:
    limits = table()
    assert list(limits)[:4] == ["environment", "gpu-tests", "train", "train-stock"]
    assert sum(limits.values()) <= 60 * MINUTES_IN_ALL
    assert max(limits.values()) <= 60 * MINUTES_A_STEP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "STEP: name steps, or all; --list prints them"),
        (["sing"], "STEP: must be all or one of those that --list prints, got 'sing'"),
        (["--size", "70b", "all"], "--size: must be 1b or tiny, got '70b'"),
        (["--size"], "--size: needs a value"),
        (["--within", "soon", "all"], "--within: must be a whole number of seconds, got 'soon'"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(place: dict[str, str], arguments: list[str], message: str) -> None:
    done = script(place, *arguments)
    assert done.returncode == 2
    assert done.stderr == f"run_all.sh: error: {message}\n"
    assert not Path(place["WORK"]).exists()


def test_a_failing_step_ends_the_run_with_its_name_and_last_lines(place: dict[str, str]) -> None:
    done = script(place | {"FAKE": "fail"}, "--size", "tiny", "all")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1].split(" ", 1)[1].startswith("environment failed with exit code 7; the last lines of ")
    assert [line.strip() for line in lines[2:]] == [*map(str, range(27, 41)), "the reason"]
    assert len(Path(place["CALLS"]).read_text().splitlines()) == 1
    assert (Path(place["OUT"]) / "environment.log").read_text().endswith("40\nthe reason\n")
    assert (Path(place["OUT"]) / "steps.tsv").read_text().split("\t")[3] == "7\n"


def test_a_step_that_leaves_no_result_has_failed(place: dict[str, str]) -> None:
    done = script(place, "--size", "tiny", "environment", "train")
    assert done.returncode == 1
    assert "environment failed: it left no " in done.stdout
    assert "train" not in done.stdout.replace("environment", "")


def test_finished_steps_are_skipped_and_the_rest_is_done(place: dict[str, str]) -> None:
    results = Path(place["WORK"]) / "results"
    results.mkdir(parents=True)
    (results / "layerskip-training.json").write_text("{}")
    done = script(place | {"FAKE": "facts", "PACK": "1"}, "--size", "tiny", "environment", "gpu-tests", "train")
    assert done.returncode == 0, done.stdout
    assert "train: done before" in done.stdout
    calls = Path(place["CALLS"]).read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith("-m studies.gpu.environment --device cpu ")
    again = script(place | {"FAKE": "fail"}, "--size", "tiny", "environment", "gpu-tests", "train")
    assert again.returncode == 0
    assert again.stdout.count("done before") == 3
    with tarfile.open(Path(place["OUT"]) / "results.tar.gz") as packed:
        assert {"./environment.json", "./gpu-tests.txt", "./steps.tsv"} <= set(packed.getnames())


def test_wheels_are_installed_for_this_run_alone(place: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one-1.0-py3-none-any.whl").touch()
    script(place | {"FAKE": "facts", "WHEELS": str(tmp_path / "wheels")}, "--size", "1b", "environment")
    call = Path(place["CALLS"]).read_text().splitlines()[0]
    assert call.startswith("-m pip install --quiet --no-index --no-deps --upgrade --target ")
    assert call.endswith(f"/work/site {tmp_path}/wheels/one-1.0-py3-none-any.whl")


def test_no_step_starts_that_could_end_too_late(place: dict[str, str]) -> None:
    done = script(place | {"FAKE": "facts"}, "--within", "65", "environment", "train")
    assert done.returncode == 3
    assert re.search(r"train: may take \d+ s, more than is left of 65", done.stdout)
    assert (Path(place["OUT"]) / "environment.json").exists()


def test_a_stopped_run_waits_for_its_step_and_says_so(place: dict[str, str]) -> None:
    command = ["bash", str(SCRIPT), "--size", "tiny", "environment"]
    with subprocess.Popen(command, env=place | {"FAKE": "wait"}, stdout=subprocess.PIPE, text=True) as running:
        calls, patience = Path(place["CALLS"]), 600
        while not calls.exists() and patience:
            time.sleep(0.05)
            patience -= 1
        running.send_signal(signal.SIGTERM)
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out.rstrip().endswith("stopped; the same command goes on")
    assert (Path(place["OUT"]) / "environment.log").read_text() == "tidied up\n"


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
    flags = ["--device", "cpu", "--work", str(tmp_path), "--out", str(tmp_path / "facts.json")]
    assert environment.main([*flags, "--min-disk-gib", "1e9"]) == 1
    assert "lacking: 1e+09 GiB of disk" in capsys.readouterr().out
    assert not (tmp_path / "facts.json").exists()
    assert environment.main(flags) == 0
    assert json.loads((tmp_path / "facts.json").read_text())["packages"]["torch"] == torch.__version__


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


def test_trials_fill_the_time_and_no_more() -> None:
    spec = StudySpec(
        model="m", prompts="p", max_new_tokens=32, prompts_per_trial=4, num_confirm_prompts=12, trial_seconds=1.0
    )
    # A pair takes 1.25 * 2 * 32 / 400 = 0.2 s; 14 runs: 11.2 s a trial of each, 33.6 s of confirming.
    assert trials.trials_that_fit(400.0, 240.0, 14, spec, 25) == int((240 - 45 - 33.6) / 11.2) == 14
    assert trials.trials_that_fit(400.0, 240.0, 14, spec, 5) == 5
    assert trials.trials_that_fit(1.0, 240.0, 14, spec, 25) == 1
    with pytest.raises(ValueError, match="plain_tokens_per_s: must be above 0, got 0"):
        trials.trials_that_fit(0.0, 240.0, 14, spec, 25)


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


def test_a_page_says_what_was_not_run_and_which_file_is_broken(tmp_path: Path) -> None:
    text = summarise.page(tmp_path)
    assert text.count("Not run.") == 10
    (tmp_path / "audit.json").write_text('{"checks": {"sharp": {}}, "violations": ["prompt \'a\'"]}')
    assert "- NOT LOSSLESS: prompt 'a'" in summarise.page(tmp_path)
    (tmp_path / "bench.json").write_text('{"rows": [{"name": "plain"}]}')
    with pytest.raises(ValueError, match=r"bench\.json: not what its step writes \(KeyError: 'tokens_per_s'\)"):
        summarise.page(tmp_path)
    assert summarise.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "page.md")]) == 2


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


@pytest.mark.slow
def test_all_steps_run_on_a_cpu(tmp_path: Path, small_library: Path) -> None:
    """Real models, searches and timings, tiny: every file has what its step is run for, and nothing is done twice."""
    out = tmp_path / "out"
    env = {
        **os.environ,
        "WORK": str(tmp_path / "work"),
        "OUT": str(out),
        "CORPUS": str(small_library),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    done = script(env, "--size", "tiny", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": done in ") == len(table())

    def result(name: str) -> Any:
        return json.loads((out / name).read_text(encoding="utf-8"))

    for recipe in ("layerskip", "stock"):
        facts = result(f"{recipe}-training.json")
        assert (facts["size"], facts["recipe"], facts["steps"], facts["vocab"]) == ("tiny", recipe, 10, 4352)
        assert facts["held_out_loss"] < 8.35 < math.log(facts["vocab"])  # better than knowing nothing
        assert DecodeConfig.load(out / f"{recipe}-best.json").skip_mask.num_layers == 4
        summary = result(f"{recipe}-summary.json")
        assert summary["trials"]["counted"] == 3
        assert summary["not_lossless"] == []
    assert set(result("compare.json")["strategies"]) == {"ours", "random"}
    assert "| ours |" in (out / "compare-table.md").read_text(encoding="utf-8")
    rows = {row["name"]: row for row in result("bench.json")["rows"]}
    for name in ("hf_generate", "plain"):
        assert rows[name]["tokens_per_s"] > 0
        assert rows[name]["identical"] == rows[name]["num_outputs"] == 2
    assert result("audit.json")["checks"]["sharp"]["num_settings"] == 3
    page = (out / "results.md").read_text(encoding="utf-8")
    assert "Not run." not in page
    assert page.count("| 0 |") >= len(table()) - 1  # the exit codes of the steps before the summary
    assert not [path for path in out.rglob("*") if path.suffix in (".safetensors", ".pt", ".db")]
    assert sum(path.stat().st_size for path in out.rglob("*")) < 1_000_000

    again = script(env, "--size", "tiny", "all")
    assert again.returncode == 0
    assert again.stdout.count("done before") == len(table()) - 1
