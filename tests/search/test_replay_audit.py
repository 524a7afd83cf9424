"""The audit command on a tiny random model: its three figures, what it writes, and every error in one line."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerskip import DecodeConfig, DecodeStats, LayerSkipModel, SkipMask
from layerskip.analysis.identity import IdentityReport
from search import replay_audit
from search.measure.decoder import Decoded, ModelDecoder
from search.predict.predictor import Predictor
from search.predict.replay import Counts, check_replay
from search.replay_audit import random_setting
from search.study.fingerprint import environment
from search.study.space import SearchSpace
from tests.layerskip import zoo
from tests.search.conftest import write_jsonl
from tests.search.helpers.outlook import space_of

NUM_SETTINGS = 12
_LINE = (
    r"replay +(?P<name>[\w ]+), (?P<num>\d+) settings: exact in (?P<exact>[\d.]+) %, "
    r"error median (?P<median>[\d.]+) %, 95th percentile (?P<p95>[\d.]+) %"
)


@pytest.fixture
def study(tiny_model: Path, tmp_path: Path) -> Path:
    """A study folder with nothing but study.toml."""
    folder = tmp_path / "study"
    folder.mkdir()
    write_jsonl(folder / "tuning.jsonl", [{"prompt": f"w{i} w{i + 1} w3"} for i in range(6)])
    write_jsonl(folder / "held_out.jsonl", [{"prompt": f"w{i} w{i + 2} w9"} for i in range(20, 25)])
    lines = [f'model = "{tiny_model}"', 'prompts = "./tuning.jsonl"', 'held_out = "./held_out.jsonl"']
    lines += ["max_new_tokens = 20", "gamma_max = 6", 'device = "cpu"', "num_threads = 1", 'engine = "eager"']
    (folder / "study.toml").write_text("\n".join(lines) + "\n")
    return folder


def run_main(*flags: object) -> int:
    try:
        return replay_audit.main([str(flag) for flag in flags])
    except SystemExit as ended:  # argparse
        return int(ended.code or 0)


def test_it_prints_and_writes_the_three_figures(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit.json"
    flags = f"--study {study} --drafters layer_skip --settings {NUM_SETTINGS} --prompts 3 --seed 5 --out {out}"
    assert run_main(*flags.split()) == 0
    result = json.loads(out.read_text())
    said = {found["name"]: found for found in re.finditer(_LINE, capsys.readouterr().out)}
    assert said.keys() == result["checks"].keys() == {"sharp", "ranked", "sharp in int8", "ranked in int8"}
    assert len(result["settings"]) == NUM_SETTINGS
    for name, check in result["checks"].items():
        of_kind = [one for one in result["settings"] if ("int8" in one["config"]["skip_mask"]) is ("int8" in name)]
        assert check["num_settings"] == int(said[name]["num"]) == len(of_kind) > 0
        for field, word in (("exact_share", "exact"), ("median_error", "median"), ("p95_error", "p95")):
            assert float(said[name][word]) == pytest.approx(100 * check[field], abs=0.051)
        again = check_replay([(one[name.split()[0]], one["live"]) for one in of_kind])
        assert again is not None
        assert dataclasses.asdict(again) == check
    assert result["checks"]["sharp"]["exact_share"] >= result["checks"]["ranked"]["exact_share"]
    assert result["checks"]["sharp"]["median_error"] == 0.0
    assert (result["num_prompts"], result["seed"], result["keys"]) == (3, 5, "target")
    assert result["commit"] == environment().get("commit")
    assert result["command"] == f"python -m search.replay_audit {flags}"
    assert {path.name for path in study.iterdir()} == {"study.toml", "tuning.jsonl", "held_out.jsonl"}


DEMO = Path(__file__).parents[2] / "studies" / "demo"
LONG_ROUNDS = "12:1-2,5-10,m3"
"""Not a mask that the demo was trained for: more than half of what it drafts is wrong, and sure enough to be drafted on
from. Replay that followed wrong drafts with the target's keys was wrong about each of the four settings below."""


@pytest.mark.slow
def test_long_rounds_with_wrong_and_sure_drafts_are_counted_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a trained model; a rounding may decide one setting on some machine, not two."""
    drawn = iter([(8, 0.3, 0.3), (8, 0.2, 0.0), (6, 0.3, 0.0), (8, 0.1, 0.0)])

    def settings(space: SearchSpace, rng: np.random.Generator) -> dict[str, Any]:
        gamma, draft, target = next(drawn)
        mask = SkipMask.parse(LONG_ROUNDS)
        config = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=draft, target_threshold=target)
        return space.to_params(config)

    monkeypatch.setattr(replay_audit, "random_setting", settings)
    out = tmp_path / "audit.json"
    assert run_main("--study", DEMO, "--settings", 4, "--prompts", 2, "--out", out) == 0
    result = json.loads(out.read_text())
    assert all(one["live"][1] >= 3 for one in result["settings"])  # there are rounds to count
    exact = [one["sharp"] == one["live"] for one in result["settings"]]
    assert sum(exact) >= 3, result["settings"]
    assert result["checks"]["sharp"]["median_error"] == 0.0


def test_texts_that_part_at_a_tie_are_left_out_and_counted(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the first text parted under every config: its counts are those of another text."""
    own = ModelDecoder.decode

    def parts(self: ModelDecoder, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        out = own(self, prompt_ids, config, seed)
        first = seen.setdefault("prompt", tuple(prompt_ids))
        if config.speculates and tuple(prompt_ids) == first:
            return Decoded((*out.ids[:-1], out.ids[-1] + 1), DecodeStats(num_drafted=10_000))
        return out

    seen: dict[str, tuple[int, ...]] = {}
    tie = IdentityReport(identical=False, is_tie=True)
    monkeypatch.setattr(ModelDecoder, "decode", parts)
    monkeypatch.setattr(ModelDecoder, "check", lambda *_: tie)
    out = tmp_path / "audit.json"
    assert run_main("--study", study, "--settings", 5, "--prompts", 3, "--out", out) == 0
    result = json.loads(out.read_text())
    assert result["num_parted"] == 5
    assert [one["sharp"] for one in result["settings"]] == [one["live"] for one in result["settings"]]
    assert "5 outputs parted from the target's at ties and are not compared" in capsys.readouterr().out


def test_lookups_and_hybrids_are_counted_exactly(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    drafters = "prompt_lookup,suffix,hybrid"
    assert run_main("--study", study, "--drafters", drafters, "--settings", 24, "--prompts", 3, "--out", out) == 0
    found = json.loads(out.read_text())["settings"]
    assert {one["config"]["drafter"] for one in found} == set(drafters.split(","))
    assert [one["sharp"] for one in found] == [one["live"] for one in found]
    assert sum(one["live"][1] for one in found) > 50  # there are rounds to count


def test_drafts_by_weights_are_counted_exactly(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    """By a draft model that is the model itself, beside masks and lookups: not every config has every parameter."""
    with (study / "study.toml").open("a") as file:
        file.write(f'draft_weights = ["{shutil.copytree(tiny_model, tmp_path / "draft_model")}"]\n')
    out = tmp_path / "audit.json"
    drafters = "layer_skip,draft_model,hybrid,hybrid_draft_model"
    assert run_main("--study", study, "--drafters", drafters, "--settings", 24, "--prompts", 3, "--out", out) == 0
    found = json.loads(out.read_text())["settings"]
    ways = {(one["config"].get("drafter"), "draft_weights" in one["config"]) for one in found}
    assert {("draft_model", True), ("hybrid", False), ("hybrid", True)} < ways
    assert [one["sharp"] for one in found] == [one["live"] for one in found]


def test_live_counts_are_those_of_decoding_the_first_prompts(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    assert run_main("--study", study, "--settings", 4, "--prompts", 2, "--out", out) == 0
    model = LayerSkipModel.from_pretrained(tiny_model, engine="eager", device="cpu")
    texts = [json.loads(line)["prompt"] for line in (study / "tuning.jsonl").read_text().splitlines()]
    for one in json.loads(out.read_text())["settings"]:
        config = DecodeConfig(**one["config"])
        counts = np.zeros(3, dtype=int)
        for text in texts[:2]:
            stats = model.generate(text, config=config, max_new_tokens=20, do_sample=False).stats
            counts += [stats.num_drafted, stats.num_rounds, stats.num_target_only]
        assert counts.tolist() == one["live"]


def test_sharp_and_ranked_replays_are_told_apart(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tiny model both are exact; here the sharp one counts 1 forward of a kind and text, the other 100."""

    def counts(self: Predictor, config: DecodeConfig, *, sharp: bool, texts: Sequence[int]) -> Counts:
        one = np.full((1, len(texts)), 1.0 if sharp else 100.0)
        return Counts(one, np.zeros_like(one), one, one, one)

    monkeypatch.setattr(Predictor, "counts", counts)
    with (study / "study.toml").open("a") as file:
        file.write("int8 = false\n")
    out = tmp_path / "audit.json"
    assert run_main("--study", study, "--settings", 2, "--prompts", 2, "--out", out) == 0
    result = json.loads(out.read_text())
    assert [(one["sharp"], one["ranked"]) for one in result["settings"]] == [([2.0] * 3, [200.0] * 3)] * 2
    assert result["checks"]["ranked"]["exact_share"] == 0.0
    assert result["checks"]["ranked"]["median_error"] > 1.0 > result["checks"]["sharp"]["median_error"] > 0.0


def test_the_seed_alone_chooses_the_configs(study: Path, tmp_path: Path) -> None:
    def settings(name: str, seed: int) -> list[Any]:
        out = tmp_path / name
        assert run_main("--study", study, "--settings", 3, "--prompts", 1, "--seed", seed, "--out", out) == 0
        found: list[Any] = json.loads(out.read_text())["settings"]
        return found

    one = settings("a.json", 1)
    assert settings("b.json", 1) == one
    assert settings("c.json", 2) != one


def test_an_output_that_is_not_lossless_is_exit_code_1(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode: Callable[..., Decoded] = ModelDecoder.decode

    def wrong(self: ModelDecoder, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        out = decode(self, prompt_ids, config, seed)
        return dataclasses.replace(out, ids=(*out.ids[:-1], out.ids[-1] ^ 1)) if config.speculates else out

    monkeypatch.setattr(ModelDecoder, "decode", wrong)
    assert run_main("--study", study, "--settings", 2, "--prompts", 1) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--settings", "0"], "--settings: must be at least 1, got 0"),
        (["--prompts", "-3"], "--prompts: must be at least 1, got -3"),
        (["--settings", "many"], "argument --settings: invalid int value: 'many'"),
        (["--seed", "-1"], "seed: must be at least 0, got -1"),
        (["--study", "{tmp}/nowhere"], "nowhere/study.toml: no such file"),
        (["--study", "{tmp}/half"], "half/study.toml: not valid TOML"),
        (["--settings", "1", "--prompts", "1", "--out", "{tmp}/no/such/file.json"], "no/such"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], said: str, study: Path, tmp_path: Path, refused: Any) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half/study.toml").write_text("model = ")
    error = refused(run_main, "--study", study, *(flag.format(tmp=tmp_path) for flag in flags))
    assert said in error


def by_weights(*drafters: str) -> SearchSpace:
    """A space with every kind of parameter that drafts by weights have."""
    given = (zoo.draft_model_of("llama"), zoo.eagle_of("llama"))
    layers = tuple(range(zoo.NUM_LAYERS))
    return SearchSpace(
        *(zoo.NUM_LAYERS, 4, layers, layers, ()),
        drafters=drafters,
        draft_weights=given,
        draft_vocabs=(61, 30),
        siblings_max=2,
        trees=(0, 4),
        int8=True,
        int4=True,
    )


@pytest.mark.parametrize(
    ("space", "num_masks"),
    [
        (space_of(1), 4),
        (space_of(12), 200),
        (space_of(6, whole=True), 40),
        (SearchSpace(4, 2, (1, 2, 3), (1, 2, 3), (0,)), 80),
        (SearchSpace(6, 4, tuple(range(6)), tuple(range(6)), (), drafters=("layer_skip", "hybrid")), 200),
        (by_weights("layer_skip", "draft_model", "hybrid"), 40),
        (by_weights("eagle", "draft_model", "hybrid_eagle"), 1),
    ],
    ids=[
        "one layer",
        "twelve layers",
        "whole layers",
        "some whole layers",
        "hybrids",
        "masks and weights",
        "weights alone",
    ],
)
def test_random_configs_are_points_of_the_space_of_many_kinds(space: SearchSpace, num_masks: int) -> None:
    rng, seen = np.random.default_rng(1), Counter[str]()
    for _ in range(300):
        params = random_setting(space, rng)
        config = space.to_config(params)
        assert space.to_params(config) == params
        seen["no draft threshold"] += config.draft_threshold == 0.0
        seen["no target threshold"] += config.target_threshold == 0.0
        seen[f"gamma {config.gamma}"] += 1
        seen[f"mask {config.skip_mask}"] += 1
    assert 120 < seen["no draft threshold"] < 190
    assert 120 < seen["no target threshold"] < 190
    assert {name for name in seen if name.startswith("gamma")} == {f"gamma {g + 1}" for g in range(space.gamma_max)}
    assert sum(name.startswith("mask") for name in seen) >= num_masks
