"""Plain decoding that reads its tokens late: the same tokens, and no wait for the device in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.free_running import FreeRunning
from layerskip.decoding.loop import DecodeRequest
from layerskip.engines.recording.sync_watch import SyncError, SyncWatch
from layerskip.rounds.device_free_steps import DeviceFreeSteps
from tests.layerskip import zoo
from tests.layerskip.tape import engine_of, graph_model

BUDGET = 24


def decode(model: LayerSkipModel, prompt: tuple[int, ...], budget: int = BUDGET, **arguments: Any) -> list[list[int]]:
    eos = frozenset(arguments.pop("eos", ()))
    return list(FreeRunning(model.engine, DecodeRequest(prompt, budget, eos), **arguments).run())


@zoo.each(("llama", "llama fused", "qwen2-sliding", "gemma2"))
def test_the_tokens_are_those_of_generate_on_engines_that_run_forward_by_forward(name: str) -> None:
    prompt = zoo.prompt_of(7)
    first, rest = decode(zoo.layerskip_of(name), prompt)
    assert (len(first), (*first, *rest)) == (1, zoo.greedy_reference(name, prompt, BUDGET))


@zoo.each(("llama", "qwen2-sliding", "gemma2", "gpt2", "mixtral"))
def test_the_tokens_are_those_of_generate_where_steps_are_recorded(name: str) -> None:
    """Over several sizes of what attention sees, and in buffers that another text has used."""
    model = graph_model(name)
    for length, budget in ((7, BUDGET), (3, 2), (12, 1), (20, 12), (1, BUDGET)):
        prompt = zoo.prompt_of(length)
        ids = tuple(token for some in decode(model, prompt, budget) for token in some)
        assert ids == zoo.greedy_reference(name, prompt, BUDGET)[:budget]
        plain = model.generate(prompt, max_new_tokens=budget, do_sample=False)
        assert tuple(plain.ids) == ids, "the loop finds cache and position as it left them"


@pytest.mark.parametrize("make", [graph_model, zoo.layerskip_of])
@pytest.mark.parametrize("read_every", [1, 4, 100])
def test_the_text_ends_at_its_end_wherever_that_lies_between_two_reads(make: Any, read_every: int) -> None:
    model, prompt = make("llama"), zoo.prompt_of(5)
    whole = list(zoo.greedy_reference("llama", prompt, BUDGET))
    for eos in sorted(set(whole)):
        expected = whole[: whole.index(eos) + 1]
        pieces = decode(model, prompt, eos=[eos], read_every=read_every)
        assert [token for some in pieces for token in some] == expected
        assert max(map(len, pieces)) <= read_every
    unread = decode(model, prompt, read_every=read_every)
    assert list(map(len, unread)) == [1, BUDGET - 1], "with nothing to look for, the host reads once"


def test_steps_wait_for_nothing_and_record_nothing_once_prepared() -> None:
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    engine = engine_of(model)
    run = FreeRunning(engine, DecodeRequest(prompt, BUDGET, frozenset()))
    run.prepare()
    prepared = engine.num_preparations
    with engine.session(len(prompt) + BUDGET):
        token = int(engine.forward(torch.tensor(prompt)).argmax())
        steps = engine.make_free_steps()
        steps.begin(token)
        with SyncWatch():
            steps.run(BUDGET - 1)
            with pytest.raises(SyncError, match="tolist"):
                steps.read(BUDGET - 1)
        ids = steps.read(BUDGET - 1)
    assert (token, *ids) == zoo.greedy_reference("llama", prompt, BUDGET)
    assert engine.num_preparations == prepared > 0
    list(run.run())
    assert engine.num_preparations == prepared


def test_an_exception_between_two_steps_leaves_the_engine_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    engine = engine_of(model)
    decode(model, prompt)
    calls, play = [0], engine.play

    def broken(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 7:
            raise RuntimeError("the driver has gone")
        play(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "play", broken)
        with pytest.raises(RuntimeError, match="the driver has gone"):
            decode(model, prompt)
    config = DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [2]), gamma=3)
    out = model.generate(prompt, config=config, max_new_tokens=BUDGET, do_sample=False)
    assert tuple(out.ids) == zoo.greedy_reference("llama", prompt, BUDGET)


def test_more_steps_than_the_cache_holds_are_refused() -> None:
    engine = engine_of(graph_model("llama"))
    with engine.session(8):
        engine.forward(torch.tensor(zoo.prompt_of(5)))
        steps = engine.make_free_steps()
        assert isinstance(steps, DeviceFreeSteps)
        steps.begin(1)
        with pytest.raises(ValueError, match="cache: capacity is 8 tokens, 4 steps need 9"):
            steps.run(4)


def test_a_read_every_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="read_every: must be at least 1, got 0"):
        decode(zoo.layerskip_of("llama"), (1,), read_every=0)
