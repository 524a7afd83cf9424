"""Among how many texts decoded at once drafts still pay: measured, exported, and what the decoder then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from layerskip import DecodeConfig, SkipMask
from search.budget.pace import Pace
from search.budget.work import Work
from search.confirm.stored_config import stored_config
from search.measure.batches import BatchSpeed, batch_speeds, most_drafting
from search.measure.decoder import ModelDecoder
from search.storages.opening import open_storage
from tests.layerskip import zoo
from tests.search.helpers.fakes import NUM_LAYERS, Bench, FakeDecoder, prompts

CONFIG = DecodeConfig(skip_mask=SkipMask.from_layers(NUM_LAYERS, [2, 3]), gamma=4)


def test_sizes_are_tried_until_drafting_is_no_faster() -> None:
    texts = [one.ids for one in prompts(20)]
    speeds = batch_speeds(FakeDecoder(batch_refusal=None), texts, CONFIG)
    assert [one.size for one in speeds] == [2, 4, 8]
    assert [one.speedup > 1.0 for one in speeds] == [True, True, False]
    assert most_drafting(speeds) == 4
    assert [one.size for one in batch_speeds(FakeDecoder(), texts[:3], CONFIG)] == [2]
    assert batch_speeds(FakeDecoder(), texts[:1], CONFIG) == ()
    assert most_drafting([BatchSpeed(2, 100.0, 90.0)]) == 1


def test_a_winner_is_exported_with_what_was_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeDecoder(noise=0.0, batch_refusal=None))
    assert bench.run(trials=4) == 0
    assert DecodeConfig.load(bench.paths.best).max_drafting == 4
    assert [one["size"] for one in bench.summary()["batches"]] == [2, 4, 8]
    assert "drafts among up to 4 texts" in bench.output.getvalue()
    again = stored_config(bench.study(), open_storage(bench.url), bench.folder)
    assert again.max_drafting == 4


@pytest.mark.parametrize("gain", [0.0, 1.0])
def test_nothing_is_measured_without_a_winner_or_an_engine_for_it(tmp_path: Path, gain: float) -> None:
    bench = Bench(tmp_path, FakeDecoder(gain=gain, batch_refusal=None if gain == 0.0 else "another engine"))
    assert bench.run(trials=4) == 0
    assert DecodeConfig.load(bench.paths.best).max_drafting is None
    assert bench.summary()["batches"] == []


def test_a_failure_in_it_leaves_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(FakeDecoder, "batch_rate", fails)
    bench = Bench(tmp_path, FakeDecoder(noise=0.0, batch_refusal=None))
    assert bench.run(trials=4) == 0
    assert DecodeConfig.load(bench.paths.best).speculates
    assert "several texts at once: RuntimeError: out of memory" in bench.output.getvalue()


def test_a_budget_counts_them() -> None:
    pace = Pace(token_s=0.01, prompt_s=0.02, further_s=0.001)
    work = Work(1, None, 1.0, None, 4, 8, 4, (10, 0), 17, 1, 1)
    amounts = work.amounts(pace)
    more = replace(work, num_in_batches=5).confirm_s(amounts, pace) - work.confirm_s(amounts, pace)
    assert more == pytest.approx(2 * 5 * (4 * 0.02 + 17 * (0.011 / 2 + 0.013 / 4)))


@pytest.mark.skipif("llama" not in zoo.FUSED, reason="no engine for it")
def test_a_model_tells_tokens_a_second_of_all_texts() -> None:
    decoder = ModelDecoder(zoo.layerskip_of("llama fused"), 6)
    config = DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [1]), gamma=2)
    assert decoder.batch_refusal is None
    assert decoder.batch_rate([(3, 5), (4, 2, 1)], config, 2) > 0
    assert ModelDecoder(zoo.layerskip_of("llama"), 6).batch_refusal == "the engine fused, it is eager"
