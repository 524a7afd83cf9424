"""Decoding in lockstep: each output and each count is what decoding alone gives, whoever runs beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.identity import check_identity, first_difference
from layerskip.decoding.lockstep import TURN_TOKENS
from layerskip.decoding.loop import DecodeLoop, Emitted, Run
from layerskip.decoding.sampling import SamplingParams, seeded_sampler
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from tests.layerskip import zoo
from tests.layerskip.tape import engine_of, graph_model


def configs_of(name: str) -> list[DecodeConfig]:
    draw = random.Random(name)
    masks = [zoo.masks_of(name)["early exit"], zoo.masks_of(name)["alternating"]]
    masks += [zoo.random_mask(zoo.NUM_LAYERS, draw, sublayers=zoo.spec_of(name).sublayers) for _ in range(2)]
    settings = ((1, 0.0, 0.0), (4, 0.0, 0.0), (7, 0.3, 0.0), (5, 0.0, 0.35))
    drafts = [
        DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=draft, target_threshold=target)
        for mask, (gamma, draft, target) in zip(masks, settings, strict=True)
    ]
    return [DecodeConfig.plain(zoo.NUM_LAYERS), *drafts]


@zoo.each((*zoo.RUNS, "llama graph", "gemma3 graph"))
def test_each_way_decodes_as_it_does_alone(name: str) -> None:
    model, configs = zoo.layerskip_of(name), configs_of(name)
    for length, budget in ((1, 24), (5, 19), (9, 2), (5, 1)):
        prompt = zoo.prompt_of(length)
        outs = model.generate_in_lockstep(prompt, configs, max_new_tokens=budget)
        for config, out in zip(configs, outs, strict=True):
            alone = model.generate(prompt, config=config, max_new_tokens=budget)
            assert out.ids == alone.ids == list(zoo.greedy_reference(name, prompt)[:budget])
            assert (out.origins, out.text, out.finish_reason) == (alone.origins, alone.text, alone.finish_reason)
            assert out.stats.counters() == alone.stats.counters()
            assert out.stats.prefill_s > 0.0
            assert (out.stats.decode_s > 0.0) == (budget > 1)
    assert any(out.stats.num_rounds for out in outs) is False  # one token: the prompt's own forward, and no draft


def test_end_of_text_inside_a_round_ends_each_way() -> None:
    model, prompt, configs = zoo.layerskip_of("llama"), zoo.prompt_of(5), configs_of("llama")
    reference = zoo.greedy_reference("llama", prompt)
    for token in sorted(set(reference)):
        outs = model.generate_in_lockstep(prompt, configs, max_new_tokens=zoo.LONGEST, eos_token_id=token)
        for config, out in zip(configs, outs, strict=True):
            alone = model.generate(prompt, config=config, max_new_tokens=zoo.LONGEST, eos_token_id=token)
            assert (out.ids, out.finish_reason) == (alone.ids, "eos")
            assert out.stats.counters() == alone.stats.counters()


def test_who_is_behind_goes_next_and_level_ones_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    places = record_places(monkeypatch)
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(5)
    plain = DecodeConfig.plain(zoo.NUM_LAYERS)
    draft = DecodeConfig(skip_mask=SkipMask.none(zoo.NUM_LAYERS), gamma=3)  # accepts everything: 4 tokens a round
    model.generate_in_lockstep(prompt, [plain, draft], max_new_tokens=10)
    # Each entry: who stepped, from which length on. The prompt's own forward is shared; level at 6, 10 and 14, where
    # the other one goes first every time.
    expected = [(0, 5), (0, 6), (1, 6), (0, 7), (0, 8), (0, 9), (1, 10), (0, 10), (0, 11), (0, 12), (0, 13)]
    expected += [(1, 14), (0, 14)]
    assert places == expected


def test_a_step_finds_its_own_place_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    step = DecodeLoop.step

    def watched(self: DecodeLoop, run: Run) -> Emitted:
        lengths.append((self._engine.cache.length, run.cached))
        return step(self, run)

    monkeypatch.setattr(DecodeLoop, "step", watched)
    zoo.layerskip_of("gemma3").generate_in_lockstep(zoo.prompt_of(4), configs_of("gemma3"), max_new_tokens=16)
    assert len(lengths) > 30
    assert all(found == expected for found, expected in lengths)


@zoo.each(("llama", "gemma3", "gpt2", "llama fused", "mistral-sliding fused", "llama graph", "gemma3 graph"))
@pytest.mark.parametrize("odd", [1, 4, 7])
def test_texts_that_part_each_go_on_as_their_own(name: str, odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way with this gamma emits another token once, as at a tie; what follows is the target's after that token."""
    model, prompt, budget, place = zoo.layerskip_of(name), zoo.prompt_of(5), 24, 6
    exchange_token(monkeypatch, gamma=odd, place=place)
    outs = model.generate_in_lockstep(prompt, configs_of(name), max_new_tokens=budget)
    monkeypatch.undo()
    reference = list(zoo.greedy_reference(name, prompt))
    for config, out in zip(configs_of(name), outs, strict=True):
        assert len(out.ids) == budget
        if config.gamma != odd:
            assert out.ids == reference
            continue
        parted = first_difference(out.ids, reference)
        assert parted is not None
        assert place <= parted <= place + odd
        start = (*prompt, *out.ids[: parted + 1])
        assert out.ids[parted + 1 :] == list(zoo.greedy_reference(name, start, budget - parted - 1))
    assert model.generate(prompt, max_new_tokens=20).ids == reference[:20]  # and the model is whole


def test_once_texts_have_parted_turns_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(5)
    plain = DecodeConfig.plain(zoo.NUM_LAYERS)
    draft = DecodeConfig(skip_mask=SkipMask.none(zoo.NUM_LAYERS), gamma=3)
    exchange_token(monkeypatch, gamma=3, place=4)
    places = record_places(monkeypatch)
    plain_out, draft_out = model.generate_in_lockstep(prompt, [plain, draft], max_new_tokens=40)
    parted = first_difference(plain_out.ids, draft_out.ids)
    assert parted is not None
    after = [place for place, length in places if length > 5 + parted + draft.gamma + 1]
    assert sum(one != other for one, other in itertools.pairwise(after)) < len(after) / 3
    lengths = {0: 5, 1: 5}
    for place, length in places:
        lengths[place] = length
        assert abs(lengths[0] - lengths[1]) <= TURN_TOKENS + draft.gamma + 1


@zoo.each(("llama", "qwen3-moe", "gemma3", "gpt2", "llama fused", "llama graph", "gemma3 graph"))
def test_drawn_texts_are_those_drawn_alone(name: str) -> None:
    model, configs, prompt = zoo.layerskip_of(name), configs_of(name), zoo.prompt_of(5)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_p": 0.95}
    for seed in range(2):
        outs = model.generate_in_lockstep(prompt, configs, max_new_tokens=20, seed=seed, **sampling)
        for config, out in zip(configs, outs, strict=True):
            alone = model.generate(prompt, max_new_tokens=20, seed=seed, config=config, **sampling)
            assert (out.ids, out.sampled) == (alone.ids, True)
            assert out.stats.counters() == alone.stats.counters()
        assert len({tuple(out.ids) for out in outs}) == 1


def test_where_random_numbers_come_from() -> None:
    model, prompt, configs = zoo.layerskip_of("llama"), zoo.prompt_of(5), configs_of("llama")
    arguments: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}
    generator = torch.Generator().manual_seed(7)
    given = model.generate_in_lockstep(prompt, configs, generator=generator, **arguments)
    seeded = model.generate_in_lockstep(prompt, configs, seed=7, **arguments)
    assert [out.ids for out in given] == [out.ids for out in seeded]
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())
    torch.manual_seed(3)
    free = [[out.ids for out in model.generate_in_lockstep(prompt, configs, **arguments)] for _ in range(2)]
    assert free[0] != free[1]
    torch.manual_seed(3)
    assert [out.ids for out in model.generate_in_lockstep(prompt, configs, **arguments)] == free[0]


def test_nothing_is_recorded_to_hand_over_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What parted runs need again is a forward over a few tokens, of a number that varies: recordings would pile up."""
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    configs = [DecodeConfig.plain(zoo.NUM_LAYERS), DecodeConfig(skip_mask=SkipMask.none(zoo.NUM_LAYERS), gamma=6)]
    model.generate_in_lockstep(prompt, configs, max_new_tokens=40)
    extended: list[int] = []
    extend = CudaGraphEngine.extend

    def watched(self: CudaGraphEngine, ids: torch.Tensor) -> None:
        extended.append(len(ids))
        extend(self, ids)

    monkeypatch.setattr(CudaGraphEngine, "extend", watched)
    exchange_token(monkeypatch, gamma=0, place=8)
    before = engine_of(model).pool.stats.num_captures
    outs = model.generate_in_lockstep(prompt, configs, max_new_tokens=40)
    assert outs[0].ids != outs[1].ids
    assert extended
    assert engine_of(model).pool.stats.num_captures == before


def test_seconds_are_told_token_by_token() -> None:
    model, prompt, configs = zoo.layerskip_of("llama"), zoo.prompt_of(5), configs_of("llama")
    for out in model.generate_in_lockstep(prompt, configs, max_new_tokens=15, do_sample=True, seed=1):
        stats = out.stats
        assert len(stats.token_s) == 14
        assert sum(stats.token_s) == pytest.approx(stats.decode_s)
        assert stats.tokens_per_s_of_first(15) == stats.tokens_per_s
        assert stats.tokens_per_s_of_first(4) == pytest.approx(3 / sum(stats.token_s[:3]))
        assert stats.tokens_per_s_of_first(1) is None
        assert "token_s" not in stats.to_dict()
        with pytest.raises(ValueError, match="num_tokens: must be at most the 15 emitted, got 16"):
            stats.tokens_per_s_of_first(16)


@pytest.mark.parametrize(
    ("configs", "arguments", "message"),
    [
        ([], {}, "configs: must hold at least one, got none"),
        ([DecodeConfig.plain(3)], {}, "skip_mask: must have the model.s 4 layers, got 3"),
        ([DecodeConfig.plain(4)], {"do_sample": True, "temperature": 0.0}, "temperature: must be above 0"),
        ([DecodeConfig.plain(4)], {"config": DecodeConfig.plain(4)}, "config, group: must not be given"),
        ([DecodeConfig.plain(4)], {"max_new_tokens": 0}, "max_new_tokens: must be"),
    ],
)
def test_bad_input(configs: Sequence[DecodeConfig], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.layerskip_of("llama").generate_in_lockstep(zoo.prompt_of(3), configs, **arguments)


def test_drawn_texts_that_part_in_bfloat16_are_ties_and_wrong_tokens_are_not() -> None:
    ways = [SamplingParams(True, 0.7), SamplingParams(True, top_k=8, top_p=0.8), SamplingParams(True, top_k=20)]
    parted = passed = 0
    for name, params in itertools.product(("qwen3", "gemma3", "gpt2"), ways):
        model = LayerSkipModel(zoo.build(name).to(torch.bfloat16), engine="eager")
        configs = [DecodeConfig.plain(4), DecodeConfig(skip_mask=SkipMask.from_layers(4, [2, 3]), gamma=4)]
        for seed in range(20):
            prompt, drawn = zoo.prompt_of(6, seed), seeded_sampler(params, seed, model.device)
            plain, draft = model.generate_in_lockstep(prompt, configs, max_new_tokens=40, seed=seed, **asdict(params))
            report = check_identity(model, prompt, draft.ids, plain.ids, drawn)
            assert report.lossless, report
            parted += not report.identical
            wrong = [*plain.ids[:7], (plain.ids[7] + 5) % zoo.VOCAB, *plain.ids[8:]]
            drawn = seeded_sampler(params, seed, model.device)
            passed += check_identity(model, prompt, wrong, plain.ids, drawn).lossless
    assert parted > 1
    assert passed == 0


def test_ties_in_bfloat16_part_texts_and_lose_none() -> None:
    model = LayerSkipModel(zoo.build("llama").to(torch.bfloat16), engine="eager")
    configs = [DecodeConfig.plain(4), DecodeConfig(skip_mask=SkipMask.from_layers(4, [2, 3]), gamma=4)]
    num_parted = 0
    for seed in range(12):
        prompt = zoo.prompt_of(6, seed)
        plain, draft = model.generate_in_lockstep(prompt, configs, max_new_tokens=40)
        num_parted += plain.ids != draft.ids
        for out in (plain, draft):
            assert len(out.ids) == 40
            assert out.stats.tokens_per_s
            assert check_identity(model, prompt, out.ids, plain.ids).lossless
    assert 0 < num_parted < 12


def record_places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(place of the run, length of its text), filled with every step."""
    steps: list[tuple[int, int]] = []
    loops: list[DecodeLoop] = []
    step = DecodeLoop.step

    def watched(self: DecodeLoop, run: Run) -> Emitted:
        if self not in loops:
            loops.append(self)
        steps.append((loops.index(self), len(run.context)))
        return step(self, run)

    monkeypatch.setattr(DecodeLoop, "step", watched)
    return steps


def exchange_token(monkeypatch: pytest.MonkeyPatch, *, gamma: int, place: int) -> None:
    """The loop of this gamma emits another token than the target's, once, at the end of the step that reaches
    `place`."""
    step = DecodeLoop.step
    done: list[Run] = []

    def lying(self: DecodeLoop, run: Run) -> Emitted:
        emitted = step(self, run)
        if self.config.gamma == gamma and len(run.emitted_ids) > place and not done and not run.finished:
            done.append(run)
            run.context[-1] = (run.context[-1] + 1) % zoo.VOCAB
        return emitted

    monkeypatch.setattr(DecodeLoop, "step", lying)
