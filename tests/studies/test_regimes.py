"""The study of regimes: every drafter over plain decoding, greedy and sampled, on the same text."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from layerskip import DecodeConfig, SkipMask
from layerskip.config.decode_config import RegimeSetting
from layerskip.config.sampling_regime import GREEDY, Sampling
from search.measure.decoder import ModelDecoder
from search.study.prompts import EncodedPrompt
from studies.regimes import Regime, by_group, details, main, measure, table, ways_in
from tests.layerskip import zoo

MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [1])
WARM = Sampling.parse("t0.7")
SUFFIX = {
    "drafter": "suffix",
    "skip_mask": f"{zoo.NUM_LAYERS}:none",
    "gamma": 5,
    "lookup": {"method": "suffix", "min_match": 2},
}
SUMMARIES = {
    "greedy": {
        "candidates": [
            {"config": {"skip_mask": str(MASK), "gamma": 2}, "speedup": 1.1},
            {"config": {"skip_mask": str(MASK), "gamma": 3}, "speedup": 1.3},
            {"config": SUFFIX, "speedup": None},
        ]
    },
    "t0.7": {"candidates": [{"config": SUFFIX, "speedup": 1.2}]},
}
CONFIG = DecodeConfig(
    skip_mask=MASK,
    gamma=2,
    sampling=GREEDY,
    reason="exported",
    regimes=(RegimeSetting(skip_mask=MASK, gamma=1, sampling=WARM),),
)


def test_each_regime_has_its_own_ways() -> None:
    greedy = ways_in(Regime(GREEDY, 12), CONFIG, SUMMARIES)
    assert list(greedy) == ["exported", "n-grams as usual", "best layer_skip"]
    assert (greedy["exported"].gamma, greedy["exported"].reason, greedy["best layer_skip"].gamma) == (2, None, 3)
    for regime in (Regime(WARM, 12), Regime(Sampling.parse("t1"), 12)):
        sampled = ways_in(regime, CONFIG, SUMMARIES)
        assert list(sampled) == ["exported", "n-grams as usual", "best suffix"]
        assert sampled["exported"].gamma == 1
    others = ways_in(Regime(WARM, 12), CONFIG, SUMMARIES, {"eagle": CONFIG})
    assert list(others) == ["exported", "n-grams as usual", "best suffix", "exported by eagle"]
    assert others["exported by eagle"] == others["exported"]
    alone = ways_in(Regime(WARM, 12), DecodeConfig(skip_mask=MASK, gamma=2), {"greedy": SUMMARIES["greedy"]})
    assert list(alone) == ["exported", "n-grams as usual", "best layer_skip"]


def test_rows_and_table() -> None:
    model = zoo.layerskip_of("llama fused")
    prompts = [EncodedPrompt(str(seed), group, zoo.prompt_of(6, seed=seed)) for seed, group in enumerate("aba")]
    found = []
    for regime in (Regime(GREEDY, 12), Regime(WARM, 12)):
        ways = ways_in(regime, CONFIG, SUMMARIES)
        rows, share = measure(ModelDecoder(model, 12, regime.sampling.params()), ways, prompts, 2)
        assert list(rows) == list(ways)
        assert all((row.num_prompts, row.num_identical) == (3, 3) for row in rows.values())
        assert all(0 < row.low <= row.speedup <= row.high for row in rows.values())
        told = {name: asdict(row) for name, row in rows.items()}
        found.append({"name": regime.name, "rows": told, "repeated_ngram_share": share})
        computed = rows["best layer_skip" if regime.sampling == GREEDY else "exported"]
        assert computed.draft_cost > 0 < computed.verify_cost
        assert 1 <= computed.mean_accepted_length <= 1 + computed.config["gamma"]
        assert len(computed.accepted_by_position) <= computed.config["gamma"]
        assert rows["n-grams as usual"].extra_bytes == rows["n-grams as usual"].training_minutes == 0
        told = details(found[-1]).splitlines()
        assert [line.split(" | ")[0].strip("| ") for line in told] == [
            regime.name,
            "---|---|---|---|---|---|---|---|---|---|---",
            *rows,
        ]
        grouped = [line.split(" | ") for line in by_group(found[-1]).splitlines()]
        assert [grouped[0], *[line[0] for line in grouped[2:]]] == [
            [f"| {regime.name}", "a", "b", "all |"],
            *(f"| {name}" for name in rows),
        ]
        exported = rows["exported"]
        assert exported.by_group["a"][0] ** 2 * exported.by_group["b"][0] == pytest.approx(exported.speedup**3)
    assert by_group({"name": "t1", "rows": {"exported": {"by_group": {}}}}) == ""
    lines = table({"regimes": found}).splitlines()
    assert lines[0] == "| way | greedy, 12 tokens | t0.7, 12 tokens |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| exported",
        "| n-grams as usual",
        "| best layer_skip",
        "| best suffix",
        "| *4-grams that were there before*",
    ]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--regimes", "t9x"], "t9x"),
        (["--tokens", "0"], "--tokens: must be at least 2, got 0"),
    ],
)
def test_bad_arguments_are_named_before_a_model_is_loaded(
    arguments: list[str], rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("studies.regimes.LayerSkipModel", None)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert rule in error
    assert error.count("\n") == 1
