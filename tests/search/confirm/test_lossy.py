"""Lossy rules in a search: measured beside the verdict where asked for, labelled, and never what best.json holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerskip import Confirmed, DecodeConfig, LayerSkipModel, generate
from layerskip.config.lossy_acceptance import LADDER
from search.budget.pace import Pace
from search.budget.work import Work
from search.confirm import stage
from search.confirm.lossy import measure_ladder
from search.measure.decoder import Decoded
from search.reporting.digest import digest_of
from search.reporting.record import read_record
from search.run import main
from search.study.config_words import describe
from search.study.spec import to_toml
from tests.search.helpers.fakes import NUM_LAYERS, Bench, FakeDecoder, make_spec, prompts

NAMES = ["probability_0.5", "probability_0.3", "probability_0.1", "typical_0.09_0.3"]


def loosen(prompt_ids: Any, config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
    """A quarter faster under a lossy rule, and wrong in one place of every second prompt."""
    if config.lossy is None:
        return out
    out.stats.decode_s /= 1.25
    ids = out.ids if prompt_ids[0] % 2 else (*out.ids[:5], 99, *out.ids[6:])
    return replace(out, ids=ids)


def record_of(bench: Bench) -> Any:
    return read_record(bench.study())


@pytest.mark.slow
def test_rungs_are_told_and_written_beside_a_lossless_verdict(tmp_path: Path) -> None:
    bench, without = (Bench(tmp_path / name, FakeDecoder(noise=0.0, then=loosen)) for name in ("with", "without"))
    for one in (bench, without):
        one.folder.mkdir()
        assert one.run(allow_lossy=one is bench) == 0
    best = DecodeConfig.load(bench.paths.best)
    assert best.lossy_rules == ()
    assert best.bare() == DecodeConfig.load(without.paths.best).bare()
    summaries = [json.loads(one.paths.summary.read_text()) for one in (bench, without)]
    assert "lossy" not in summaries[1]
    assert "LOSSY" not in without.output.getvalue()
    assert not (without.folder / "lossy").exists()
    rungs = summaries[0].pop("lossy")
    assert summaries[0].keys() == summaries[1].keys()
    assert [one["rule"] for one in rungs] == NAMES == [rule.name for rule in LADDER]
    for rule, rung in zip(LADDER, rungs, strict=True):
        config = DecodeConfig.load(bench.folder / "lossy" / f"{rule.name}.json")
        assert config.bare() == best.bare().model_copy(update={"lossy": rule})
        assert config.provenance is not None
        assert config.confirmed.model_dump(exclude_none=True) == rung["confirmed"]
        assert (config.confirmed.num_identical, config.confirmed.num_prompts, config.confirmed.num_ties) == (6, 12, 0)
        assert config.confirmed.distance.unlike_share == pytest.approx(6 / 12 / 17)
        assert rung["against_lossless"]["speedup"] == pytest.approx(1.25)
        assert config.confirmed.speedup == pytest.approx(1.25 * summaries[0]["confirmed"]["speedup"])
        assert (config.provenance.model, config.sampling) == ("../model", best.sampling)
        assert f"{rule.name} {config.confirmed.speedup:.3f}x" in bench.output.getvalue()
        assert "6 of 12 outputs identical, 2.9% of the tokens are not the target's choice" in bench.output.getvalue()
    assert "LOSSY, not in best.json" in bench.output.getvalue()
    table = next(one for one in digest_of(record_of(bench)).tables if one.key == "lossy")
    assert table.title.startswith("LOSSY")
    assert [row[0] for row in table.rows] == NAMES
    assert table.rows[0][2:] == ("1.25", "2.9%", "-1.029, -1.000", "6 of 12")
    assert all(one.key != "lossy" for one in digest_of(record_of(without)).tables)
    # A verdict that is made anew without it has no rungs of an earlier one.
    assert bench.run() == 0
    assert all(one.key != "lossy" for one in digest_of(record_of(bench)).tables)


def test_nothing_is_measured_where_nothing_won(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeDecoder(gain=0.0, then=loosen))
    assert bench.run(allow_lossy=True, force=True) == 0
    assert not DecodeConfig.load(bench.paths.best).speculates
    assert "lossy" not in json.loads(bench.paths.summary.read_text())
    assert not (tmp_path / "lossy").exists()


def test_each_regime_has_rungs_of_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeDecoder(then=loosen))
    assert bench.run_regimes("greedy", "t0.7", allow_lossy=True) == 0
    best = DecodeConfig.load(bench.paths.best)
    assert (best.regime_names, best.lossy_rules) == (("greedy", "t0.7"), ())
    by_regime = json.loads(bench.paths.summary.read_text())["by_regime"]
    for name, folder, model in (("greedy", tmp_path, "../model"), ("t0.7", tmp_path / "t0.7", "../../model")):
        assert [one["rule"] for one in by_regime[name]["lossy"]] == NAMES
        config = DecodeConfig.load(folder / "lossy" / f"{NAMES[0]}.json")
        assert config.regime_names == (name,)
        assert config.provenance.model == model


def test_the_winner_is_timed_beside_its_rungs_in_turns() -> None:
    order: list[str | None] = []

    def note(prompt_ids: Any, config: DecodeConfig, seed: int, out: Decoded) -> Decoded:
        order.append(None if not config.speculates else "" if config.lossy is None else config.lossy.name)
        return loosen(prompt_ids, config, seed, out)

    winner = DecodeConfig.plain(NUM_LAYERS).model_copy(update={"gamma": 4})
    assert len(measure_ladder(FakeDecoder(then=note), prompts(2), winner, 0)) == 4
    assert order == [None, "", *NAMES, "", *NAMES, None]
    assert measure_ladder(FakeDecoder(num_tokens=1, then=note), prompts(2), winner, 0) == ()


def test_a_budget_counts_them() -> None:
    spec, pace = make_spec(), Pace(token_s=0.01, prompt_s=0.01, further_s=0.001)
    work = Work(1, None, 1.0, None, 4, 8, 4, (10, 0), 17, 1, 1)
    amounts = work.amounts(pace)
    more = replace(work, num_lossy=4).confirm_s(amounts, pace) - work.confirm_s(amounts, pace)
    assert more == pytest.approx(60 * pace.decoding_s(17))
    assert "allow_lossy" not in to_toml(spec, Path("/"))
    assert "allow_lossy = true" in to_toml(make_spec(allow_lossy=True), Path("/"))
    with pytest.raises(ValueError, match="allow_lossy: must not be given in a per-group search, got True"):
        make_spec(allow_lossy=True, per_group=True)


def test_a_lossy_config_is_called_so() -> None:
    config = DecodeConfig.plain(NUM_LAYERS).model_copy(update={"gamma": 4, "lossy": LADDER[0]})
    assert describe(config) == "LOSSY probability_0.5: mask 6:none, gamma 4"


@pytest.mark.slow
def test_a_search_on_a_tiny_model(tiny_study: list[str], tmp_path: Path, capsys, monkeypatch: Any) -> None:
    """End to end: from the flag to files that decode with consent alone."""
    compare = stage._compare
    # Random weights are never worth drafting for, and the clock would decide whether anything is exported.
    monkeypatch.setattr(
        stage, "_compare", lambda *given, **more: replace(compare(*given, **more), interval=stage.Interval(1.1, 1.2))
    )
    assert main([*tiny_study, "--allow-lossy", "--quiet", "--force"]) == 0
    folder = tmp_path / "study"
    assert DecodeConfig.load(folder / "best.json").lossy_rules == ()
    printed = capsys.readouterr().out
    assert "LOSSY" in printed
    files = sorted((folder / "lossy").iterdir())
    assert [one.stem for one in files] == sorted(NAMES)
    for file in files:
        config = DecodeConfig.load(file)
        assert isinstance(config.confirmed, Confirmed)
        assert config.confirmed.distance is not None
        with pytest.raises(ValueError, match="lossy: must be left out unless it is allowed"):
            LayerSkipModel.from_config(file)
    assert generate.main(["--config", str(file), "--prompt", "w3 w4", "--allow-lossy", "--max-new-tokens", "8"]) == 0
    assert "LOSSY" in capsys.readouterr().err
