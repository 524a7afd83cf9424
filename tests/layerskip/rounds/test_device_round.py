"""Rounds on the device: sampled output follows the target's distribution, and a broken round fails the same test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, DecodeStats, SkipMask
from layerskip.engines.cuda_graph.engine import CudaGraphEngine, GraphOptions
from layerskip.engines.recording.graph_pool import RerunRecorder
from layerskip.huggingface.kv_cache import StaticCache
from layerskip.huggingface.placement import Placement
from layerskip.rounds.round_work import RoundPlan
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo
from tests.layerskip.rounds import test_sampling
from tests.layerskip.rounds.test_sampling import (
    PASSES,
    SETTINGS,
    VOCAB,
    TableEngine,
    config_of,
    exactly,
    p_values,
)
from tests.layerskip.tape import TapeRecorder, graph_model

NUM_DRAWS = 1_200
FAILS = 1e-6
"""At a seventh of the draws of the host loop's tests a broken round stays below this."""
MASK = SkipMask.from_layers(4, [2])


class TableExecutor:
    """A `StaticExecutor` that looks up the last two tokens of a text it keeps on the device."""

    vocab_size, logits_dtype, num_compilations = VOCAB, torch.float32, 0

    def __init__(self) -> None:
        tables = TableEngine()
        self._target, self._draft = tables.target, tables.draft

    def use(self, cache: StaticCache) -> None:
        self._cache = cache
        self._text = torch.zeros(cache.num_positions, dtype=torch.long)

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def prepare_draft(self, mask: SkipMask) -> None:
        """Tables are there."""

    def forward(self, ids: torch.Tensor, mask: SkipMask, num_logits: int) -> torch.Tensor:
        start = self._cache.length
        self._cache.advance(len(ids))
        return self.step(ids, torch.arange(start, start + len(ids)), mask, 0, num_logits)

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: SkipMask,
        num_visible: int,
        num_logits: int,
        branches: Any = None,
    ) -> torch.Tensor:
        self._text.index_copy_(0, positions, ids)
        before = self._text.index_select(0, (positions - 1).clamp_min(0))
        table = self._draft if mask.num_skipped else self._target
        return table[before, ids][-num_logits:]


def table_engine(recorder: Any) -> CudaGraphEngine:
    cpu = torch.device("cpu")
    placement = Placement(cpu, (cpu,), is_offloaded=False, device_map=None)
    stub: Any = SimpleNamespace(device=cpu, placement=placement, num_layers=2, windows=(None, None))
    return CudaGraphEngine(stub, TableExecutor(), recorder, GraphOptions(granule=16, min_visible=16))


def draw_many(params: SamplingParams, config: DecodeConfig, recorder: Any) -> tuple[Counter[Any], DecodeStats]:
    engine = table_engine(recorder)
    found = test_sampling.draw_many(params, config, NUM_DRAWS, engine)
    assert engine.pool.stats.num_captures <= 4 + config.gamma
    return found


# Recorded from a tape where that is cheap: what is drawn must come from the noise, not from the recording.
@pytest.mark.parametrize(("setting", "taped"), [("gamma 3", True), ("thresholds", False), ("top-p", False)])
def test_output_follows_the_targets_distribution(setting: str, taped: bool) -> None:
    params, config = SETTINGS[setting]
    draws, stats = draw_many(params, config, TapeRecorder() if taped else RerunRecorder())
    values = p_values(draws, exactly(params))
    assert min(values.values()) > PASSES, values
    assert stats.num_accepted > NUM_DRAWS / 4
    assert stats.num_recovered > NUM_DRAWS / 8
    assert stats.num_bonus > NUM_DRAWS / 8
    if config.target_threshold:
        assert stats.num_target_only > NUM_DRAWS / 4
        assert stats.num_drafted < stats.num_rounds * 2


def test_numbers_of_another_distribution_fail_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sampler.noise
    monkeypatch.setattr(Sampler, "noise", lambda self, *where: right(self, *where) ** 2)
    params, config = SETTINGS["gamma 3"]
    values = p_values(draw_many(params, config, RerunRecorder())[0], exactly(params))
    assert min(values.values()) < FAILS, values


def test_a_limit_is_a_bonus_token_not_a_rejection() -> None:
    """With fewer drafts wanted than gamma, the token after them comes from the target's own row."""
    params = SamplingParams(do_sample=True, top_k=0)
    values = p_values(draw_many(params, config_of(8), RerunRecorder())[0], exactly(params))
    assert min(values.values()) > PASSES, values


def test_a_round_with_a_repetition_penalty_stays_on_the_host() -> None:
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    engine: Any = model.engine
    plan, config = RoundPlan(MASK, 2), DecodeConfig(skip_mask=MASK, gamma=2)
    assert engine.make_round(plan, Sampler(SamplingParams(repetition_penalty=1.3))) is None
    assert engine.make_round(plan, Sampler(SamplingParams())) is not None
    got = model.generate(prompt, config=config, max_new_tokens=12, repetition_penalty=1.3).ids
    expected = zoo.layerskip_of("llama").generate(prompt, config=config, max_new_tokens=12, repetition_penalty=1.3).ids
    assert got == expected != list(zoo.greedy_reference("llama", prompt)[:12])
    assert {key[0] for key in engine.pool._replays} == {"forward"}


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_no_more_is_accepted_than_asked_for(limit: int) -> None:
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    engine: Any = model.engine
    reference = zoo.greedy_reference("llama", prompt)
    rounds = engine.make_round(RoundPlan(SkipMask.none(4), 3), Sampler(SamplingParams()))
    with engine.session(20):
        engine.forward(torch.tensor(prompt))
        result = rounds.run(reference[0], limit)
        assert engine.cache.length == len(prompt) + 1 + limit
        assert engine.cache.position.tensor.tolist() == [engine.cache.length]
    # The draft is the target, so all that was wanted is accepted, and the next token is the target's after it.
    assert tuple(result.draft_ids) == reference[1 : 1 + limit]
    assert (result.verdict.num_accepted, result.verdict.next_token) == (limit, reference[1 + limit])
    assert result.verdict.next_token_prob is None
