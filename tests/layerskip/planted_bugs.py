"""Mistakes that an engine or the loop could make, put in on purpose: each is silent and changes what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from layerskip.decoding.loop import DecodeLoop
from layerskip.drafters.base import Draft
from layerskip.engines import fused
from layerskip.engines.lean.rotary import rotary_rows
from layerskip.huggingface import adapter as adapter_module
from layerskip.huggingface import kv_cache
from layerskip.rounds.verifier import Verdict

Bug = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is there inside."""
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        yield


def rollback_one_short(patch: pytest.MonkeyPatch) -> None:
    """After a round the cache lacks its last token; those that follow are one position too early."""
    verify = DecodeLoop._verify_draft

    def wrong(self: DecodeLoop, draft: Draft, context: Sequence[int]) -> Verdict:
        verdict = verify(self, draft, context)
        self._engine.cache.rollback_to(self._engine.cache.length - 1)
        return verdict

    patch.setattr(DecodeLoop, "_verify_draft", wrong)


def rollback_one_long(patch: pytest.MonkeyPatch) -> None:
    """Where a draft token was rejected, its keys and values stay."""
    verify = DecodeLoop._verify_draft

    def wrong(self: DecodeLoop, draft: Draft, context: Sequence[int]) -> Verdict:
        cache = self._engine.cache
        verdict = verify(self, draft, context)
        cache.advance(int(verdict.num_accepted < len(draft.ids) and cache.length < len(context) + 2))
        return verdict

    patch.setattr(DecodeLoop, "_verify_draft", wrong)


def fused_positions_one_late(patch: pytest.MonkeyPatch) -> None:
    """Verifications rotate queries and keys as if they came one position later."""
    make = fused.FusedEngine._step

    def wrong(self: fused.FusedEngine, forward: fused.Forward) -> Any:
        step = make(self, forward)
        if step.start > 0 and step.num_tokens > 1:
            step.rotary = rotary_rows(self._rotations, slice(step.start + 1, step.stop + 1))
        return step

    patch.setattr(fused.FusedEngine, "_step", wrong)


def fused_stale_key(patch: pytest.MonkeyPatch) -> None:
    """A verification leaves the draft's keys and values of the last emitted token."""
    run = fused.FusedEngine._run

    def wrong(self: fused.FusedEngine, x: torch.Tensor, gates: Any, steps: Any, *args: Any) -> torch.Tensor:
        (step,) = steps
        rows = [layer.states[:, :, step.start] for layer in self.cache.layers]
        before = [row.clone() for row in rows]
        out = run(self, x, gates, steps, *args)
        if len(x) > 1 and step.start > 0:
            for row, stale in zip(rows, before, strict=True):
                row.copy_(stale)
        return out

    patch.setattr(fused.FusedEngine, "_run", wrong)


def fused_window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Sliding layers see one position more."""
    visible = fused._Step._visible

    def wrong(self: Any, first: int, window: int | None, device: torch.device) -> Any:
        return visible(self, first, window if window is None else window + 1, device)

    patch.setattr(fused._Step, "_visible", wrong)


def eager_positions_one_late(patch: pytest.MonkeyPatch) -> None:
    """As on the fused engine."""
    arange = torch.arange

    def wrong(*args: int, **kwargs: Any) -> torch.Tensor:
        late = len(args) == 2 and args[0] > 0 and args[1] - args[0] > 1
        return arange(*args, **kwargs) + late

    patch.setattr(adapter_module.torch, "arange", wrong)


def eager_stale_key(patch: pytest.MonkeyPatch) -> None:
    """As on the fused engine."""
    update = kv_cache._SharedLengthLayer.update

    def wrong(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object) -> Any:
        start = self._cache.length
        before = [one[:, :, start].clone() for one in (self.keys, self.values)] if self.is_initialized else []
        seen = update(self, keys, values, *args, **kwargs)
        if keys.shape[-2] > 1 and start > 0:
            self.keys[:, :, start], self.values[:, :, start] = before
        return seen

    patch.setattr(kv_cache._SharedLengthLayer, "update", wrong)


def eager_window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Sliding layers do not see their furthest position."""
    first_visible = kv_cache._SharedLengthLayer._first_visible

    def wrong(self: Any) -> int:
        first = first_visible(self)
        return first + (self._window is not None and 0 < first < self._cache.length)

    patch.setattr(kv_cache._SharedLengthLayer, "_first_visible", wrong)


LOOP: dict[str, Bug] = {"rollback one short": rollback_one_short, "rollback one long": rollback_one_long}
FUSED: dict[str, Bug] = {"positions one late": fused_positions_one_late, "stale key": fused_stale_key}
EAGER: dict[str, Bug] = {"positions one late": eager_positions_one_late, "stale key": eager_stale_key}
FUSED_SLIDING: dict[str, Bug] = {"window off by one": fused_window_off_by_one}
EAGER_SLIDING: dict[str, Bug] = {"window off by one": eager_window_off_by_one}
