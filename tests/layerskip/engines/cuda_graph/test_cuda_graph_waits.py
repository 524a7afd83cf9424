"""What is recorded never waits for the device, and the host reads once a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from layerskip import DecodeConfig, SkipMask
from layerskip.engines.recording.graph_pool import Replay, RerunRecorder, warm_up
from layerskip.engines.recording.sync_watch import SyncError, SyncWatch
from layerskip.rounds import round_work
from tests.layerskip import zoo
from tests.layerskip.tape import engine_of, graph_model

MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [2])


class Watched:
    """Warms up under a watch that refuses whatever would make the host wait."""

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        def watched() -> None:
            with SyncWatch():
                work()

        warm_up(watched, preserve)
        return RerunRecorder().record(work, preserve)


@zoo.each(zoo.RECORDED)
def test_no_recorded_round_waits_for_the_device(name: str) -> None:
    model = graph_model(name, Watched())
    model.generate(zoo.prompt_of(3), config=DecodeConfig(skip_mask=MASK, gamma=2), max_new_tokens=4)
    assert engine_of(model).pool.stats.num_captures


def test_no_piece_of_any_kind_of_round_waits_for_the_device() -> None:
    model = graph_model("llama", Watched())
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "seed": 1}
    for arguments in ({}, sampled):
        for draft_threshold in (0.0, 0.4):
            config = DecodeConfig(skip_mask=MASK, gamma=2, draft_threshold=draft_threshold, target_threshold=0.4)
            model.generate(zoo.prompt_of(3), config=config, max_new_tokens=12, **arguments)
    recorded = {key[0] for key in engine_of(model).pool._replays}
    assert recorded == {"round", "draft", "verify"}


def test_a_round_that_waits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch itself works in here."""
    model = graph_model("llama", Watched())
    monkeypatch.setattr(round_work, "_prefix_length", lambda kept: torch.tensor([int(kept.long().cumprod(0).sum())]))
    with pytest.raises(SyncError, match="__int__ waits"):
        model.generate(zoo.prompt_of(3), config=DecodeConfig(skip_mask=MASK, gamma=2), max_new_tokens=4)


class Reads(TorchFunctionMode):
    """Counts what reads a number back from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
        self.count += getattr(func, "__name__", "") in names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampled", [False, True])
def test_one_read_a_round_and_one_more_a_draft_token_that_is_looked_at(
    sampled: bool,
) -> None:
    model = graph_model("llama")
    for draft_threshold, target_threshold in ((0.0, 0.0), (0.0, 0.35), (0.45, 0.0)):
        config = DecodeConfig(
            skip_mask=MASK, gamma=4, draft_threshold=draft_threshold, target_threshold=target_threshold
        )
        stream = model.stream(zoo.prompt_of(5), config=config, max_new_tokens=24, do_sample=sampled, seed=0)
        next(stream)  # the prompt's own forward
        rounds = alone = 0
        looks = draft_threshold > 0.0
        while True:
            before = stream.stats.num_drafted
            with Reads() as reads:
                piece = next(stream, None)
            if piece is None:
                break
            drafted = stream.stats.num_drafted - before
            # The confidence of the last wanted draft is not looked at.
            assert reads.count in ((drafted, 1 + drafted) if looks and drafted else (1,))
            rounds, alone = rounds + (drafted > 0), alone + (drafted == 0)
        assert rounds > 2
        assert alone > 2 or not target_threshold
