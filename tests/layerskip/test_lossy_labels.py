"""Whatever decodes under a lossy config asks for consent and says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from layerskip import Confirmed, DecodeConfig, LayerSkipModel, SkipMask, bench, generate, serve
from layerskip.config.lossy_acceptance import Distance, ProbabilityAcceptance, lossy_label
from layerskip.server.settings import ServerSettings
from tests.layerskip import zoo

RULE = ProbabilityAcceptance(threshold=0.001)
LABEL = lossy_label(RULE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_model: LayerSkipModel) -> Path:
    """A lossy config beside its model and prompts."""
    root = tmp_path_factory.mktemp("study")
    provenance = zoo.saved_beside(root, text_model, max_new_tokens=12)
    rates = dict.fromkeys(("tokens_per_s", "plain_tokens_per_s", "speedup", "speedup_ci_low", "speedup_ci_high"), 1.5)
    distance = Distance(unlike_share=0.25, log_prob=-2.0, target_log_prob=-1.0)
    confirmed = Confirmed(**rates, num_prompts=4, num_identical=1, num_repeats=1, distance=distance)
    mask = SkipMask.from_layers(zoo.NUM_LAYERS, [1, 2])
    config = DecodeConfig(skip_mask=mask, gamma=3, lossy=RULE, provenance=provenance, confirmed=confirmed)
    config.save(root / "lossy.json")
    prompts = [json.dumps({"prompt": text}) for text in ("def f(", "class A", "naive")]
    (root / "held_out.jsonl").write_text("\n".join(prompts), encoding="utf-8")
    return root


@pytest.mark.parametrize("main", [generate.main, bench.main, serve.main], ids=["generate", "bench", "serve"])
def test_commands_ask_for_consent(main: Any, folder: Path, capsys) -> None:
    given = ["--config", str(folder / "lossy.json")]
    given += {generate.main: ["--prompt", "def f("], bench.main: [], serve.main: ["--port", "0"]}[main]
    assert main(given) == 2
    error = capsys.readouterr().err
    said = "lossy: must be left out unless it is allowed (allow_lossy=True, or --allow-lossy on a command)"
    assert f"error: {said}, got probability_0.001: {LABEL}" in error


def test_generate_says_that_it_is_lossy(folder: Path, capsys) -> None:
    given = ["--config", str(folder / "lossy.json"), "--prompt", "def f(", "--allow-lossy"]
    for more in ([], ["--show-drafts"], ["--compare", "--repeats", "1"]):
        assert generate.main([*given, *more]) == 0
        assert f"\n{LABEL}\n" in (error := capsys.readouterr().err)
    assert "tokens identical: no, from token" in error
    assert "on: the setting is lossy\n" in error
    assert "1 outputs identical, 25.0% of the tokens are not the target's choice" in error
    assert generate.main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lossy"] == {"rule": "probability", "threshold": 0.001}


def test_the_server_says_so_when_it_starts(folder: Path) -> None:
    model = LayerSkipModel.from_config(folder / "lossy.json", allow_lossy=True)
    lines = serve.describe(model, ServerSettings("m", 96), None, "http://x")
    assert LABEL in lines
    assert any("lossy probability_0.001" in line for line in lines if line.startswith("config"))


@pytest.mark.slow
def test_bench_tells_speed_and_distance_and_claims_no_identity(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "bench.json"
    given = ["--config", str(folder / "lossy.json"), "--allow-lossy", "--repeats", "1", "--json", str(out)]
    rows = [flag for name in ("plain", "speculative", "prompt_lookup", "hybrid", "lossy") for flag in ("--only", name)]
    assert bench.main([*given, *rows]) == 0
    record = json.loads(out.read_text())
    found = {row["name"]: row for row in record["rows"]}
    assert list(found)[-1] == "lossy"
    lossy = found.pop("lossy")
    assert lossy["identical"] < lossy["num_outputs"] == 3
    assert lossy["settings"]["lossy"] == {"rule": "probability", "threshold": 0.001}
    distance = Distance(**lossy["distance"])
    assert 0.0 < distance.unlike_share < 1.0
    assert math.isfinite(distance.log_prob)
    for row in found.values():  # the config without the rule, and what is made of it
        assert (row["identical"], row["num_outputs"]) == (3, 3)
        assert "lossy" not in row["settings"]
        assert "distance" not in row
    assert record["facts"]["lossy"] == LABEL
    printed = capsys.readouterr().out
    assert f"row lossy: {LABEL}" in printed
    assert f"lossy: {distance}" in printed


def test_bench_has_no_lossy_row_of_a_lossless_config(folder: Path, tmp_path: Path, capsys) -> None:
    config = DecodeConfig.load(folder / "lossy.json").model_copy(update={"lossy": None})
    config.save(folder / "best.json")
    given = ["--config", str(folder / "best.json"), "--repeats", "1", "--num-prompts", "1", "--prompt", "def f("]
    assert bench.main([*given, "--only", "plain", "--only", "lossy"]) == 0
    assert "lossy: not run: the config is lossless" in capsys.readouterr().out
