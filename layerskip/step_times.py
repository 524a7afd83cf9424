"""StepTimer: seconds of the steps that decoding is made of, through the loop's own drafter, engine and verifier."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from layerskip.drafters import LayerSkipDrafter, LayerSkipSettings
from layerskip.model import LayerSkipModel
from layerskip.sampling import Sampler, SamplingParams
from layerskip.skip_mask import SkipMask
from layerskip.verifier import verify_greedy

_NEVER = 1e-30
"""A draft_threshold that is looked at after every token and never reached."""


class StepTimer:
    """Times single steps of greedy decoding after a given text. Every call is one repeat: interleave and repeat.

    Cost of a call: the step timed, and a forward over the text when the text changes.
    """

    def __init__(self, model: LayerSkipModel, gamma_max: int) -> None:
        self._engine = model.engine
        self._sampler = Sampler(SamplingParams(), None)
        self._gamma_max = gamma_max

    @torch.inference_mode()
    def verify_s(self, text_ids: Sequence[int], counts: Sequence[int]) -> list[float]:
        """Seconds of a target forward over n tokens, its verdict and the rollback, for each n (n = 1: target alone)."""
        engine, length = self._engine, len(text_ids)
        seconds = []
        with engine.session(length + self._gamma_max + 1):
            ids = torch.tensor(list(text_ids), device=engine.device)
            last = self._greedy(engine.forward(ids))
            engine.cache.rollback_to(length)
            for n in counts:
                seconds.append(self._verify(text_ids, last, n))
        return seconds

    @torch.inference_mode()
    def draft_s(
        self, text_ids: Sequence[int], masks: Sequence[SkipMask], *, gamma: int, threshold: bool
    ) -> list[float]:
        """Seconds of one draft token under each mask, averaged over a round of `gamma` of them.

        threshold: with the look at the confidence that a `draft_threshold` costs.
        """
        engine, length = self._engine, len(text_ids)
        seconds = []
        with engine.session(length + self._gamma_max + 1):
            engine.forward(torch.tensor(list(text_ids), device=engine.device))
            for mask in masks:
                seconds.append(self._draft(text_ids, mask, gamma, threshold=threshold))
        return seconds

    @torch.inference_mode()
    def draft_and_target_s(
        self, text_ids: Sequence[int], mask: SkipMask, *, gamma: int, threshold: bool, repeats: int
    ) -> list[tuple[float, float]]:
        """(seconds of one draft token, seconds of the target alone), `repeats` times, in turns.

        Their ratio holds whatever state the machine is in; compare it rather than seconds of different minutes.
        """
        engine, length = self._engine, len(text_ids)
        with engine.session(length + self._gamma_max + 1):
            last = self._greedy(engine.forward(torch.tensor(list(text_ids), device=engine.device)))
            engine.cache.rollback_to(length)
            return [
                (self._draft(text_ids, mask, gamma, threshold=threshold), self._verify(text_ids, last, 1))
                for _ in range(repeats)
            ]

    def _verify(self, text_ids: Sequence[int], last: torch.Tensor, num_tokens: int) -> float:
        """One target forward over `last` and copies of it, its verdict and the rollback."""
        engine = self._engine
        draft = last.repeat(num_tokens - 1)
        start = self._now()
        logits = engine.forward(torch.cat([last, draft]), num_logits=num_tokens)
        verify_greedy(draft, self._sampler.shape(logits, text_ids, draft), with_prob=False)
        engine.cache.rollback_to(len(text_ids))
        return self._now() - start

    def _draft(self, text_ids: Sequence[int], mask: SkipMask, gamma: int, *, threshold: bool) -> float:
        """One token of a round of `gamma`; the drafter rolls back."""
        settings = LayerSkipSettings(mask, gamma, _NEVER if threshold else 0.0)
        drafter = LayerSkipDrafter(self._engine, self._sampler, settings)
        start = self._now()
        drafter.draft(text_ids, gamma)
        return (self._now() - start) / gamma

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return self._sampler.shape(logits, [0]).max(dim=-1).indices

    def _now(self) -> float:
        self._engine.synchronize()
        return time.perf_counter()
