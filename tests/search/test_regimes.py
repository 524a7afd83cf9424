"""A search of several ways to choose tokens: one study each, one config with a setting for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.sampling_params import SamplingParams
from layerskip.sampling_regime import Sampling
from search.decoder import ModelDecoder
from search.preflight import first_regime
from search.run import build_parser, main
from search.storage import open_storage
from tests.layerskip import zoo
from tests.search.fakes import Bench, make_spec

PLAIN = DecodeConfig.plain(zoo.NUM_LAYERS)


def names_in(bench: Bench) -> set[str]:
    return set(optuna.get_all_study_names(open_storage(f"sqlite:///{bench.folder / 'study.db'}")))


def warm(temperature: float) -> SamplingParams:
    return SamplingParams(do_sample=True, temperature=temperature)


def test_each_regime_gets_what_wins_there(bench: Bench) -> None:
    bench.decoder.gain_by_regime = {"t0.7": 0.5, "t1": 0.0}
    assert bench.run_regimes("greedy", "t0.7", "t1", trials=60) == 0
    config, whole = DecodeConfig.load(bench.paths.best), bench.folder.name
    assert names_in(bench) == {whole, f"{whole}/t0.7", f"{whole}/t1"}
    assert config.regime_names == ("greedy", "t0.7", "t1")
    greedy, warmer, hot = (config.for_sampling(params) for params in (SamplingParams(), warm(0.7), warm(1.0)))
    assert greedy.confirmed is not None
    assert warmer.confirmed is not None
    assert greedy.confirmed.speedup > warmer.confirmed.speedup > 1
    assert (hot.gamma, hot.confirmed) == (0, None)
    assert hot.reason is not None
    assert config.for_sampling(warm(0.8)).confirmed == warmer.confirmed

    summary = json.loads(bench.paths.summary.read_text())
    assert {name: one["verdict"] for name, one in summary["by_regime"].items()} == {
        "greedy": "speculate",
        "t0.7": "speculate",
        "t1": "do not speculate",
    }
    assert {one["trials"]["total"] for one in summary["by_regime"].values()} == {20}
    own = DecodeConfig.load(bench.folder / "t0.7" / "best.json")
    assert own.sampling == Sampling.parse("t0.7")
    assert own.confirmed == warmer.confirmed
    told = bench.output.getvalue()
    assert "result    greedy: " in told
    assert "result    t1: " in told


def test_a_regime_goes_on_where_it_was_stopped(bench: Bench) -> None:
    assert bench.run_regimes("greedy", "t0.7", trials=24) == 0
    assert bench.run_regimes("greedy", "t0.7", trials=40) == 0
    storage = open_storage(f"sqlite:///{bench.folder / 'study.db'}")
    for name in names_in(bench):
        study = optuna.load_study(study_name=name, storage=storage)
        assert len(study.get_trials()) == 20
        assert study.user_attrs["fingerprint"]["sampling"] in ("greedy", "t0.7")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regimes": ()}, "regimes: must be 1 to 17 names, got 0"),
        ({"regimes": ("warm",)}, "regimes: regime: must be greedy or tTEMPERATURE, .*; got 'warm'"),
        ({"regimes": ("t0",)}, "regimes: .*temperature: must be above 0"),
        ({"regimes": ("t0.7", "t0.70")}, r"regimes: must name each regime once, got t0\.7 2 times"),
        ({"regimes": ("greedy", "t1"), "per_group": True}, "regimes: must be one in a per-group search, got 2"),
    ],
)
def test_bad_regimes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(**fields)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "0.7"], "temperature: must be left out where do_sample is false"),
        (["--do-sample", "--temperature", "0"], "temperature: must be above 0"),
        (["--do-sample", "--regimes", "greedy"], "regimes: must be given alone"),
        (["--regimes", "greedy,t1", "--devices", "cpu,cpu"], "workers: must be 1 for several regimes, got 2"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ["--model", "nowhere", "--prompts", str(tmp_path / "p.jsonl"), "--study", str(tmp_path / "s")]
    assert main([*files, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_flags_of_generate_name_a_regime() -> None:
    from search.run import _regimes

    flags = ["--do-sample", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "40"]
    assert _regimes(build_parser().parse_args(flags)) == ["t0.7_p0.9_k40"]
    assert _regimes(build_parser().parse_args([])) is None


def test_without_a_regime_the_models_own_defaults_say() -> None:
    hf = zoo.build("llama")
    model = LayerSkipModel(hf, engine="eager")
    assert first_regime(make_spec(), model).name == "greedy"
    hf.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    assert first_regime(make_spec(), model).name == "t0.6_p0.9"
    assert first_regime(make_spec(regimes=("greedy",)), model).name == "greedy"


@pytest.mark.parametrize("regime", ["t0.7", "t1_p0.9_r1.3"])
def test_the_same_prompt_is_continued_alike_under_every_config(regime: str) -> None:
    model = zoo.layerskip_of("llama fused")
    decoder = ModelDecoder(model, 20).with_sampling(Sampling.parse(regime))
    prompts = [zoo.prompt_of(4, seed) for seed in range(4)]
    texts = [decoder.decode(prompt, PLAIN).ids for prompt in prompts]
    config = DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [1]), gamma=3)
    for prompt, ids in zip(prompts, texts, strict=True):
        assert [out.ids for out in decoder.decode_in_lockstep(prompt, [PLAIN, config])] == [ids, ids]
        assert decoder.check(prompt, ids, ids).identical
        other = (*ids[:5], (ids[5] + 1) % zoo.VOCAB, *ids[6:])
        report = decoder.check(prompt, other, ids)
        assert (report.lossless, report.first_difference) == (False, 5)
        assert report.logit_gap is not None
        assert report.logit_gap > 0
    reseeded = ModelDecoder(model, 20, seed=1).with_sampling(Sampling.parse(regime))
    assert [reseeded.decode(prompt, PLAIN).ids for prompt in prompts] != texts
