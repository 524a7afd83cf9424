"""The study that holds lockstep against one after the other: its sums, its turns, and a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerskip import DecodeConfig, SkipMask
from search.measure.decoder import ModelDecoder
from search.measure.pairs import PromptCase
from search.measure.reference import make_cases
from search.study.prompts import EncodedPrompt
from studies import lockstep
from studies.lockstep import configs_of, main, measure, spread, table
from tests.layerskip import zoo
from tests.search.fakes import NUM_LAYERS, FakeDecoder

DRAFT = DecodeConfig(skip_mask=SkipMask.from_layers(NUM_LAYERS, [1, 2]), gamma=2, reason="exported")


class Slowed(FakeDecoder):
    """In lockstep a draft pays 10 % that it does not pay one after the other."""

    def decode_in_lockstep(self, prompt_ids: Any, configs: Any, seed: int = 0) -> Any:
        outs = super().decode_in_lockstep(prompt_ids, configs, seed)
        for config, out in zip(configs, outs, strict=True):
            if config.speculates:
                out.stats.decode_s /= 0.9
                out.stats.token_s = [one / 0.9 for one in out.stats.token_s]
        return outs


def cases_of(decoder: FakeDecoder, number: int) -> tuple[PromptCase, ...]:
    prompts = [EncodedPrompt(str(i), None, (i, 1, 2)) for i in range(number)]
    return make_cases(decoder, prompts, NUM_LAYERS)[0]


def test_a_bias_of_lockstep_is_found_and_plain_decoding_has_none() -> None:
    decoder = Slowed()
    rows = measure(decoder, {"plain": DecodeConfig.plain(NUM_LAYERS), "draft": DRAFT}, cases_of(decoder, 10), 2)
    plain, draft = rows
    assert plain.ratio == pytest.approx((1.0, 1.0, 1.0))
    assert draft.ratio == pytest.approx((0.9, 0.9, 0.9))
    assert draft.lockstep[0] == pytest.approx(0.9 * draft.apart[0])
    assert draft.apart[1] < draft.apart[0] < draft.apart[2]
    assert {way: np.shape(found) for way, found in draft.raw.items()} == {"lockstep": (2, 10), "apart": (2, 10)}
    assert draft.half_width_percent == pytest.approx(0.0, abs=1e-6)
    assert draft.config["gamma"] == 2
    assert (plain.num_ties, draft.num_ties) == (0, 0)
    told = table(rows).splitlines()[3]
    assert told.startswith("| draft | ")
    assert "| 0.9000 (0.9000..0.9000) | 0.0 and 0.0 |" in told


def test_ways_take_turns_and_each_begins_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, bool]] = []

    def spied(way: str) -> Any:
        real = lockstep.WAYS[way]

        def call(decoder: Any, case: PromptCase, config: DecodeConfig, *, plain_first: bool) -> Any:
            seen.append((case.prompt_id, way, plain_first))
            return real(decoder, case, config, plain_first=plain_first)

        return call

    monkeypatch.setattr(lockstep, "WAYS", {way: spied(way) for way in lockstep.WAYS})
    decoder = FakeDecoder()
    measure(decoder, {"draft": DRAFT}, cases_of(decoder, 4), 2)
    assert [(prompt, way) for prompt, way, _ in seen] == [
        *(("0", way) for way in ("lockstep", "apart") * 2),
        *(("1", way) for way in ("apart", "lockstep") * 2),
        *(("2", way) for way in ("lockstep", "apart") * 2),
        *(("3", way) for way in ("apart", "lockstep") * 2),
    ]
    # Both orders in a pair as often as each other, with either way at the beginning.
    for beginning in (("0", "2"), ("1", "3")):
        first = [plain_first for prompt, _, plain_first in seen if prompt in beginning]
        assert sum(first) == len(first) / 2
        assert all(first[i] == first[i + 1] for i in range(0, len(first), 2))


def test_spread_is_within_prompts() -> None:
    """Prompts that differ from each other add nothing; repeats of one that differ by 0.2 do."""
    value, low, high = spread(np.array([[0.0, 5.0], [0.2, 5.2]]))
    assert value == pytest.approx(math.sqrt((2 * 0.1**2 + 2 * 0.1**2) / 2))
    assert low < value < high


def test_five_configs_on_a_tiny_model() -> None:
    model = zoo.layerskip_of("llama fused")
    exported = DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [1]), gamma=2, reason="exported")
    configs = configs_of(exported)
    assert len(configs) == 5
    assert configs["exported"] == exported.bare()
    assert not configs["plain against plain"].speculates
    halves = [config for name, config in configs.items() if name.startswith("half of the layers")]
    assert [config.target_threshold for config in halves] == [0.9, 0.0]
    assert all(sum(config.skip_mask.attention) == zoo.NUM_LAYERS // 2 for config in halves)
    decoder = ModelDecoder(model, 10)
    prompts = [EncodedPrompt(str(seed), None, zoo.prompt_of(6, seed=seed)) for seed in range(2)]
    cases, _ = make_cases(decoder, prompts, zoo.NUM_LAYERS)
    rows = measure(decoder, configs, cases, 1)
    assert [row.name for row in rows] == list(configs)
    for row in rows:
        assert row.ratio[0] == pytest.approx(row.lockstep[0] / row.apart[0])
        assert row.ratio[1] <= row.ratio[0] <= row.ratio[2]
        assert row.half_width_percent == pytest.approx(50 * (row.ratio[2] - row.ratio[1]))
        assert (row.num_ties, row.spread_percent) == (0, {})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prompts", "1"], "--prompts: must be at least 2"),
        (["--repeats", "0"], "--repeats: must be at least 1"),
        (["--tokens", "1"], "--tokens: must be at least 2"),
    ],
)
def test_bad_numbers_are_told(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_on_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--prompts", "2", "--tokens", "12", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (len(found["rows"]), len(found["prompts"]), found["repeats"]) == (5, 2, 2)
    assert found["command"].startswith("python -m studies.lockstep --prompts 2 --tokens 12")
    assert found["fingerprint"]["max_new_tokens"] == 12
    assert found["machine"]["num_threads"] == found["fingerprint"]["num_threads"] == 1
    assert all(set(row["spread_percent"]) == {"lockstep", "apart"} for row in found["rows"])
    assert capsys.readouterr().out.count("\n") == 7
    assert main(["--prompts", "1000"]) == 2
    assert "--prompts: must be at most 144" in capsys.readouterr().err
