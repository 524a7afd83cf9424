"""The study of regimes: every drafter over plain decoding, greedy and sampled, on equally many tokens."""

from __future__ import annotations

from dataclasses import asdict

from layerskip import DecodeConfig, SkipMask
from search.prompts import EncodedPrompt
from studies.regimes import Regime, measure, table, ways_of
from tests.layerskip import zoo

MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [1])
SUMMARY = {
    "candidates": [
        {"config": {"skip_mask": str(MASK), "gamma": 2}, "speedup": 1.1},
        {"config": {"skip_mask": str(MASK), "gamma": 3}, "speedup": 1.3},
        {
            "config": {
                "drafter": "suffix",
                "skip_mask": f"{zoo.NUM_LAYERS}:none",
                "gamma": 5,
                "lookup": {"method": "suffix", "min_match": 2},
            },
            "speedup": None,
        },
    ]
}


def test_the_fastest_finalist_of_every_drafter_is_measured() -> None:
    ways = ways_of(SUMMARY, DecodeConfig(skip_mask=MASK, gamma=2, reason="exported"))
    assert list(ways) == ["n-grams as usual", "exported", "best layer_skip", "best suffix"]
    assert (ways["best layer_skip"].gamma, ways["best suffix"].gamma) == (3, 5)
    assert ways["exported"].reason is None


def test_rows_and_table() -> None:
    model = zoo.layerskip_of("llama fused")
    ways = ways_of(SUMMARY, DecodeConfig(skip_mask=MASK, gamma=2))
    prompts = [EncodedPrompt(str(seed), None, zoo.prompt_of(6, seed=seed)) for seed in range(3)]
    found = []
    for regime in (Regime("greedy", 12), Regime("warm", 12, 0.7)):
        rows, share = measure(model, regime, ways, prompts, seed=1)
        assert set(rows) == set(ways)
        assert all(row.num_prompts == 3 and row.low <= row.speedup <= row.high for row in rows.values())
        expected = 3 if regime.temperature is None else None
        assert {row.num_identical for row in rows.values()} == {expected}
        told = {name: asdict(row) for name, row in rows.items()}
        found.append(asdict(regime) | {"rows": told, "repeated_ngram_share": share})
    text = table({"regimes": found, "ways": list(ways)})
    assert text.splitlines()[0] == "| way | greedy | warm |"
    assert len(text.splitlines()) == 2 + len(ways) + 1
