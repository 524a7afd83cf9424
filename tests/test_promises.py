"""What SECURITY.md promises and no test of a single module shows."""

from __future__ import annotations

import ast
import base64
import json
import re
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel
from layerskip.command_line.api_key import KEY_VARIABLE
from search import dashboard, run
from search.dashboard_guard import DashboardGuard
from search.run import _make_folder
from search.study.spec import StudyPaths, StudySpec
from tests.layerskip import zoo
from tests.search.helpers.servers import serving

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("layerskip", "search", "studies") for path in (ROOT / folder).rglob("*.py"))
KEY = "correct-horse-battery"

# No code in what is read.

_FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
_FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def offences(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (f"{where}: {name}" for name in names if name.partition(".")[0] in _FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in _FORBIDDEN_CALLS or (called == "torch.load" and safe.get("weights_only") != "True"):
                yield f"{where}: {called}"
            if any(name == "shell" and value == "True" for name, value in safe.items()) or called == "os.system":
                yield f"{where}: a shell"
            if safe.get("trust_remote_code") == "True" or safe.get("use_safetensors") == "False":
                yield f"{where}: {called} trusts what it loads"


def test_nothing_that_is_read_can_become_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(SOURCES) > 100
    assert [found for path in SOURCES for found in offences(path)] == []
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle\nfrom yaml import load\neval('1')\ntorch.load(x)\nrun(y, shell=True)\nf(trust_remote_code=True)"
    )
    assert len(list(offences(bad))) == 6


# No wall clock, which jumps, for anything but a date to be shown.

_WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
_DATED = {"search/study/opening.py": 1, "layerskip/server/answers.py": 1, "layerskip/server/app.py": 1}
"""When a study was created, and `created` in the server's answers: nothing is computed from them."""


def wall_clocks(path: Path) -> int:
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return sum(ast.unparse(call.func).replace("datetime.datetime", "datetime") in _WALL_CLOCKS for call in calls)


def test_nothing_is_timed_by_a_clock_that_jumps(tmp_path: Path) -> None:
    packages = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("layerskip", "search")]
    found = {path.relative_to(ROOT).as_posix(): count for path in packages if (count := wall_clocks(path))}
    assert found == _DATED
    bad = tmp_path / "bad.py"
    bad.write_text("limit = time.time() + 60\nsince = datetime.now(UTC)\nfine = time.monotonic()")
    assert wall_clocks(bad) == 2


class _Bomb:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


def test_a_pickled_checkpoint_is_refused_unopened(tmp_path: Path) -> None:
    model = zoo.build("llama")
    model.config.save_pretrained(tmp_path)
    torch.save({"weights": _Bomb(tmp_path / "went off")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="model: cannot load"):
        LayerSkipModel.from_pretrained(tmp_path, engine="eager")
    assert not (tmp_path / "went off").exists()


def test_a_models_own_code_stays_unrun_unless_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "model"
    zoo.build("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(ValueError, match="model: cannot load") as caught:
        LayerSkipModel.from_pretrained(folder, engine="eager")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert not caplog.records
    with pytest.raises((ValueError, AttributeError)):
        LayerSkipModel.from_pretrained(folder, engine="eager", trust_remote_code=True)
    assert "may run its own code on this machine" in caplog.text


# What a config may ask for.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"skip_mask": "9999:none"}, "number of layers must be in 1..1024"),
        ({"gamma": 65}, "gamma: input should be less than or equal to 64"),
        (
            {"provenance": {"max_new_tokens": 10**9}},
            "provenance.max_new_tokens: input should be less than or equal to 100",
        ),
        ({"provenance": {"num_threads": 10**6}}, "provenance.num_threads: input should be less than or equal to 1024"),
        ({"reason": "x" * (1 << 20)}, "a decode config is at most 1048576 bytes"),
        ({"trust_remote_code": True}, "trust_remote_code: unknown field"),
    ],
)
def test_a_config_cannot_ask_for_much(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text(json.dumps({"schema_version": 1, "skip_mask": "4:1", "gamma": 2} | change))
    with pytest.raises(ValueError, match=re.escape(said)):
        DecodeConfig.load(path)


def test_a_study_file_has_a_bound(tmp_path: Path, refused: Any) -> None:
    (tmp_path / "study.toml").write_text("#" * (1 << 20) + "\n")
    error = refused(run.main, ["--study", str(tmp_path)])
    assert "study.toml: a study file is at most 1048576 bytes, got 1048577" in error


# Secrets.


class _Told:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def phase(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("storage", "mode"),
    [
        ("postgresql://me:s3cret@host/db", 0o600),
        ("postgresql://me@host/db", 0o644),
        (f"sqlite:///{Path.cwd()}/x.db", 0o644),  # shown by a shorter path, which is no secret
    ],
)
def test_a_study_file_with_a_password_is_the_users_alone(storage: str, mode: int, tmp_path: Path) -> None:
    told: Any = _Told()
    _make_folder(told, StudySpec(model="m", prompts="p", storage=storage), StudyPaths(tmp_path))
    file = tmp_path / "study.toml"
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert ("s3cret" in file.read_text()) == (mode == 0o600)
    assert len(told.warnings) == (mode == 0o600)
    assert "s3cret" not in "".join(told.warnings)


# The dashboard.


def test_a_dashboard_for_other_machines_needs_a_key(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert f"give --api-key-file or {KEY_VARIABLE}" in refused(dashboard.main, ["--host", "0.0.0.0", "--port", "0"])
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    error = refused(dashboard.main, ["--port", "0"])
    assert "API key: must be at least 16" in error
    assert "s3cret" not in error


@pytest.fixture(params=[None, KEY], ids=["open", "with a key"])
def guarded(request: pytest.FixtureRequest) -> Iterator[tuple[str, str | None]]:
    def app(_environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"the studies"]

    with serving(DashboardGuard(app, request.param, "127.0.0.1")) as address:
        yield f"{address}/", request.param


def status_of(url: str, **headers: str) -> int:
    """Also makes sure that only an answer of 200 shows anything."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        answer: Any = urllib.request.urlopen(urllib.request.Request(url, headers=names))
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        assert (b"the studies" in answer.read()) == (answer.status == 200)
        return int(answer.status)


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


def test_who_may_use_the_dashboard(guarded: tuple[str, str | None]) -> None:
    url, key = guarded
    if key is None:
        assert status_of(url) == status_of(url, Host="localhost:8080") == status_of(url, Host="[::1]:8080") == 200
        assert status_of(url, Host="evil.example") == status_of(url, Host="") == 421
        return
    assert status_of(url, Authorization=basic(key)) == 200
    assert status_of(url, Authorization=basic(key), Host="study.example") == 200
    for wrong in ("", "Basic", "Basic ?", basic(""), basic(key[:-1]), basic(key + "x"), f"Bearer {key}", basic("ü")):
        assert status_of(url, Authorization=wrong) == 401
    assert status_of(url) == 401


@pytest.mark.parametrize("document", ["SECURITY.md", "studies/scaling/README.md"])
def test_every_test_that_a_promise_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    files = sorted((ROOT / "tests").rglob("*.py"))
    there = {path.stem for path in files}
    there |= {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)}
    named = set(re.findall(r"\btest_\w+", text))
    assert len(named) > 15
    assert named - there == set()
