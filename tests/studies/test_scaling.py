"""The scaling study: its examples are valid, its landscape is one to search, and a small run counts right."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from layerskip.config.skip_mask import SkipMask
from search import run as search_run
from search import storage_proxy
from studies.scaling import run
from studies.scaling.landscape import SPACE, Landscape
from tests.search.helpers.servers import PostgresServer

FOLDER = Path(run.__file__).parent


def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text())
    return found


def test_the_slurm_script_is_valid_and_starts_one_worker_per_gpu() -> None:
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    assert options.keys() >= {"nodes", "ntasks-per-node", "gpus-per-task", "cpus-per-task", "time", "signal", "requeue"}
    assert options["gpus-per-task"] == "1"
    assert text.startswith("#!/bin/bash\n")
    # Slurm stops reading its options at the first command.
    lines = text.splitlines()
    last_option = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last_option + 1])


def test_the_kubernetes_job_is_valid() -> None:
    spec = job()["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert (job()["apiVersion"], job()["kind"]) == ("batch/v1", "Job")
    assert spec["parallelism"] > 1
    assert "completions" not in spec
    assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    named = [
        rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert named == [container["name"]]


def test_the_job_takes_its_password_from_a_secret() -> None:
    container = job()["spec"]["template"]["spec"]["containers"][0]
    assert container["env"][0]["name"] == "PGPASSWORD"
    assert container["env"][0]["valueFrom"]["secretKeyRef"].keys() == {"name", "key"}


@pytest.mark.parametrize("name", ["slurm.sh", "job.yaml", "README.md"])
def test_no_example_holds_a_password(name: str) -> None:
    for account in re.findall(r"://([^@\s/]+)@", (FOLDER / name).read_text()):
        assert ":" not in account


def commands() -> list[list[str]]:
    """Every command of the examples."""
    container = job()["spec"]["template"]["spec"]["containers"][0]
    found = [[*container["command"], *container["args"]]]
    for name in ("slurm.sh", "README.md"):
        text = (FOLDER / name).read_text().replace("\\\n", " ")
        for line in re.findall(r"python -m search\.\S+ --.*", text):
            found.append(shlex.split(line, comments=True))
    return found


def test_the_commands_of_the_examples_are_understood() -> None:
    parsers = {"search.run": search_run.build_parser(), "search.storage_proxy": storage_proxy.build_parser()}
    seen = set()
    for python, m, module, *flags in commands():
        assert (python, m) == ("python", "-m")
        parsers[module].parse_args(flags)
        seen.add(module)
    assert seen == parsers.keys()
    assert len(commands()) == 6


def test_the_landscape_has_something_to_find() -> None:
    landscape = Landscape(0)
    rng = np.random.default_rng(0)
    params = {"gamma": 4, "draft_threshold": 0.4, "target_threshold": 0.0}
    random = [
        landscape.speedup(SPACE.to_config(params | {name: bool(rng.random() < 0.5) for name in SPACE.bit_names}))
        for _ in range(200)
    ]
    none = SPACE.to_config(params | dict.fromkeys(SPACE.bit_names, False))
    assert none.skip_mask == SkipMask.none(SPACE.num_layers)
    assert landscape.speedup(none) < 1.0
    assert max(random) < landscape.optimum() < 2.0
    assert landscape.optimum() > 1.1
    measured = landscape.measure(none, np.random.default_rng(1))
    assert np.mean(measured) == pytest.approx(landscape.speedup(none), rel=0.05)
    assert Landscape(1).optimum() != landscape.optimum()


@pytest.mark.slow
def test_a_small_run_counts_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_server: PostgresServer
) -> None:
    monkeypatch.setattr(run, "_QUALITY_TRIALS", 6)
    flags = ["--workers", "1", "2", "--seconds", "0.01", "--trials-per-worker", "2", "--seeds", "1"]
    assert run.main([*flags, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(one["storage"], one["workers"], one["trials"]) for one in results["speed"]] == [
        (storage, count, 2 * count) for storage in ("sqlite", "postgres", "proxy") for count in (1, 2)
    ]
    for one in results["speed"]:
        assert one["storage_s_per_trial"] > 0
        assert one["trials_per_hour"] == pytest.approx(3600 * one["trials"] / one["seconds"])
    assert all(0.5 < share <= 1.0 for one in results["quality"] for share in one["share_of_optimum"])
    assert (tmp_path / "table.md").read_text().count("\n|") == 2 + 6 + 2 + 2
