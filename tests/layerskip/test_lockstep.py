"""Decoding in lockstep: each output and each count is what decoding alone gives, whoever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.decode import DecodeLoop, Emitted, Run
from layerskip.lockstep import Diverged
from tests.layerskip import zoo


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


def test_outputs_that_part_are_reported_and_leave_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, configs = zoo.layerskip_of("llama"), zoo.prompt_of(5), configs_of("llama")
    step = DecodeLoop.step

    def lying(self: DecodeLoop, run: Run) -> Emitted:
        emitted = step(self, run)
        if self._config.gamma == 7 and len(run.context) > 12:
            run.context[-1] = (run.context[-1] + 1) % zoo.VOCAB
        return emitted

    with monkeypatch.context() as patched:
        patched.setattr(DecodeLoop, "step", lying)
        with pytest.raises(Diverged, match=r"tokens \d+\.\.\d+"):
            model.generate_in_lockstep(prompt, configs, max_new_tokens=20)
    assert model.generate(prompt, max_new_tokens=20).ids == list(zoo.greedy_reference("llama", prompt)[:20])


@pytest.mark.parametrize(
    ("configs", "arguments", "message"),
    [
        ([], {}, "configs: must hold at least one, got none"),
        ([DecodeConfig.plain(3)], {}, "skip_mask: must have the model.s 4 layers, got 3"),
        ([DecodeConfig.plain(4)], {"do_sample": True}, "do_sample: must be off"),
        ([DecodeConfig.plain(4)], {"config": DecodeConfig.plain(4)}, "config, group: must not be given"),
        ([DecodeConfig.plain(4)], {"max_new_tokens": 0}, "max_new_tokens: must be"),
    ],
)
def test_bad_input(configs: Sequence[DecodeConfig], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.layerskip_of("llama").generate_in_lockstep(zoo.prompt_of(3), configs, **arguments)


def test_a_tie_in_bfloat16_parts_outputs_or_not_but_never_lies() -> None:
    model = LayerSkipModel(zoo.build("llama").to(torch.bfloat16), engine="eager")
    config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [2, 3]), gamma=4)
    num_shared = 0
    for seed in range(6):
        prompt = zoo.prompt_of(6, seed)
        try:
            plain, draft = model.generate_in_lockstep(prompt, [DecodeConfig.plain(4), config], max_new_tokens=20)
        except Diverged:
            continue
        num_shared += 1
        assert plain.ids == draft.ids
    assert num_shared > 0


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
