"""The command lines on a tiny random model: a run, a resume, a dry run, the dashboard, and every error in one line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel
from search import dashboard, run
from search.dashboard import bind, open_app
from tests.search.conftest import write_jsonl
from tests.search.helpers.fakes import Bench
from tests.search.helpers.servers import get_json, serving


def run_main(flags: list[str]) -> int:
    try:
        return run.main(flags)
    except SystemExit as ended:  # argparse
        return int(ended.code or 0)


def changed(flags: list[str], **changes: str) -> list[str]:
    flags = list(flags)
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        if flag in flags:
            flags[flags.index(flag) + 1] = value
        else:
            flags += [flag, value]
    return flags


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_end_to_end_and_again(tiny_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert run_main(tiny_study) == 0
    study = tmp_path / "study"
    best = DecodeConfig.load(study / "best.json")
    assert best.provenance.dtype == "float32"
    model = LayerSkipModel.from_config(study / "best.json")
    assert model.generate("w1 w2", max_new_tokens=4).ids
    summary = json.loads((study / "summary.json").read_text())
    assert summary["trials"]["counted"] == 4
    assert summary["not_lossless"] == []
    output = capsys.readouterr().out
    assert "trial 4/4" in output
    assert output.isascii()
    # The same folder alone is enough to go on: study.toml was written.
    assert run_main(["--study", str(study), "--trials", "5"]) == 0
    assert "4 of 5 trials done" in capsys.readouterr().out
    # Handlers are put back.
    assert signal.getsignal(signal.SIGINT) is before


def test_a_dry_run_writes_nothing(tiny_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(tmp_path)
    assert run_main([*tiny_study, "--dry-run"]) == 0
    assert tree(tmp_path) == before
    assert "dry run" in capsys.readouterr().out


def test_another_fingerprint_is_exit_code_2(tiny_study: list[str], tmp_path: Path, refused: Any) -> None:
    assert run_main(changed(tiny_study, trials="1")) == 0
    best = (tmp_path / "study/best.json").read_text()
    error = refused(run_main, changed(tiny_study, max_new_tokens="9"))
    assert "max_new_tokens was 8, now 9" in error
    assert (tmp_path / "study/best.json").read_text() == best


ERRORS: dict[str, tuple[dict[str, str], str]] = {
    "unknown model": ({"model": "no-such-org/no-such-model"}, "no-such-org/no-such-model"),
    "folder without weights": ({"model": "{tmp}"}, "{tmp}"),
    "missing prompts": ({"prompts": "{tmp}/none.jsonl"}, "none.jsonl: no such prompt file"),
    "empty prompts": ({"prompts": "{tmp}/empty.jsonl"}, "empty.jsonl: has no prompts"),
    "malformed prompts": ({"prompts": "{tmp}/bad.jsonl"}, "bad.jsonl:2: not valid JSON"),
    "prompt too long": ({"prompts": "{tmp}/long.jsonl"}, "long.jsonl:2: 60 prompt tokens + 8 to decode do not fit"),
    "chat without template": ({"prompts": "{tmp}/chat.jsonl"}, "chat.jsonl:1: a chat prompt needs a chat template"),
    "no trials": ({"trials": "0"}, "trials: input should be greater than or equal to 1, got '0'"),
    "trials in words": ({"trials": "many"}, "argument --trials: invalid int value"),
    "gamma": ({"gamma_max": "0"}, "gamma_max: input should be greater than or equal to 1, got '0'"),
    "sampler": ({"sampler": "magic"}, "argument --sampler: invalid choice"),
    "storage": ({"storage": "postgresql://me:s3cret@127.0.0.1:1/db"}, "storage postgresql://me:***@127.0.0.1:1/db"),
    "storage folder": ({"storage": "sqlite:////no/such/folder/s.db"}, "no such folder"),
    "read-only study folder": ({"study": "/proc/study"}, "cannot write in /proc"),
    "unknown flag": ({"speed": "9"}, "unrecognized arguments: --speed 9"),
    "unknown device": ({"device": "abacus"}, "abacus"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_one_line_and_harms_nothing(
    case: str, tiny_study: list[str], tmp_path: Path, refused: Any
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "w1"}\n{"prompt": \n')
    write_jsonl(tmp_path / "long.jsonl", [{"prompt": "w1"}, {"prompt": "w2 " * 60}])
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": f"w{i}"}]} for i in range(3)])
    before = tree(tmp_path)
    changes, said = ERRORS[case]
    flags = changed(tiny_study, **{name: value.format(tmp=tmp_path) for name, value in changes.items()})
    error = refused(run_main, flags)
    assert said.format(tmp=tmp_path) in error
    assert "Traceback" not in error
    assert "s3cret" not in error
    assert tree(tmp_path) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that this machine has")
def test_cuda_where_there_is_none(tiny_study: list[str], refused: Any) -> None:
    error = refused(run_main, changed(tiny_study, device="cuda"))
    assert "cuda" in error.lower()


@pytest.fixture
def browsed(bench: Bench) -> str:
    bench.in_sqlite = True
    bench.run(trials=3)
    (bench.folder / "study.toml").write_text('model = "x"\nprompts = "p.jsonl"\n')
    return str(bench.folder)


def test_the_dashboard_serves_the_study(browsed: str) -> None:
    app, page, _ = open_app(browsed, None)
    with serving(app) as address:
        detail = get_json(f"{address}/api/studies/{page.rpartition('/')[2]}")
    assert len(detail["trials"]) == 3
    assert detail["objective_names"] == ["tokens_per_s"]
    names = {param["name"] for param in detail["union_search_space"]}
    assert {"skip.attn.00", "skip.mlp.05", "gamma", "draft_threshold", "target_threshold"} <= names
    assert {"speedup", "num_skipped_mlp", "acceptance_rate"} <= {one["key"] for one in detail["union_user_attrs"]}


def test_the_dashboard_creates_nothing_and_says_why(tmp_path: Path, refused: Any) -> None:
    (tmp_path / "study.toml").write_text('model = "x"\nprompts = "p.jsonl"\n')
    assert "no such study yet" in refused(dashboard.main, ["--study", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


def test_the_dashboard_names_the_studies_there_are(bench: Bench, refused: Any) -> None:
    bench.in_sqlite = True
    bench.run(trials=1, study_name="other")
    (bench.folder / "study.toml").write_text('model = "x"\nprompts = "p.jsonl"\n')
    assert "only: other" in refused(dashboard.main, ["--study", str(bench.folder)])


def test_a_taken_port_is_one_line(browsed: str, refused: Any) -> None:
    with bind(open_app(browsed, None)[0], "127.0.0.1", 0) as server:
        error = refused(dashboard.main, ["--study", browsed, "--port", str(server.server_port)])
    assert "cannot serve on 127.0.0.1" in error
