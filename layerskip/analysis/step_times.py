"""StepTimer: seconds of the steps that decoding is made of, run as decoding runs them on this engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import torch

from layerskip.analysis.timed_steps import DeviceSteps, HostSteps, Step, StepMaker, TextEnd
from layerskip.config.decode_config import DecodeConfig, DraftedBy
from layerskip.config.skip_mask import SkipMask
from layerskip.decoding.prefix_cache import PrefixCache
from layerskip.decoding.step_clock import StepClock
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import SamplingParams, seeded_sampler

_NUM_WARM = 8
"""Forwards over a token before what counts. Timed right after a text, a target step of eight small layers on a CPU took
1.58 times what it takes in plain decoding, one of the demo model 1.08 times; after four others 1.07 and 1.01, after
eight 1.01 and 1.02."""
_LEAST_SHARE = 0.001
"""Of a round that its draft takes at least, whatever a disturbed clock says."""
_KNOWN_BYTES = 1 << 26
"""Of the texts' keys and values."""


class StepTimer:
    """Times single steps of decoding after a given text, greedy or sampled. Every call is one repeat: interleave and
    repeat.

    Where the engine runs rounds on the device, those are timed, and a draft is what a round takes beyond its
    verification by itself. Elsewhere drafts and verifications are the host's, each after another kind of step, as
    decoding has them: a processor takes longer for what it did not do just before. Verifying four drafts of the demo
    model took 1.4 plain steps after its like, 1.5 after a draft, and 1.7 in decoding.

    Cost of a call: the steps timed and, untimed, a forward over the text the first time, a step of another kind before
    each, and what has not been recorded before.
    """

    def __init__(self, model: LayerSkipModel, gamma_max: int, sampling: SamplingParams | None = None) -> None:
        """sampling: how tokens are chosen, greedily without it."""
        self._engine = model.engine
        self._sampler = seeded_sampler(sampling or SamplingParams(), 0, model.device)
        self._gamma_max, self._num_layers = gamma_max, model.num_layers
        self._known = PrefixCache(_KNOWN_BYTES)
        self._on_device: DeviceSteps | None = None
        # Rounds that need the text on the host for a penalty are run there, and so timed there.
        if model.engine.name == "cuda_graph" and not self._sampler.needs_host:
            self._on_device = DeviceSteps(cast(CudaGraphEngine, model.engine), self._sampler)
        self._steps: StepMaker = self._on_device or HostSteps(model.engine, self._sampler)

    @property
    def rounds_on_device(self) -> bool:
        """Whether a round is recorded work, of which a draft is told apart by calculation alone."""
        return self._on_device is not None

    def verify_s(self, text_ids: Sequence[int], counts: Sequence[int]) -> list[float]:
        """Seconds of a target forward over n tokens, its verdict and the rollback, for each n (n = 1: target alone, as
        in plain decoding, after its like)."""
        steps = [self._steps.verification(n) for n in counts]
        exit_early = SkipMask.early_exit(self._num_layers, 1)
        before = None if self._steps.draft_verifies else self._steps.draft(exit_early, 1, threshold=False)
        return self._time(text_ids, steps, _NUM_WARM, [None if n == 1 else before for n in counts])

    def draft_s(
        self, text_ids: Sequence[int], drafted_by: Sequence[DraftedBy], *, gamma: int, threshold: bool
    ) -> list[float]:
        """Seconds of one draft token of each, a mask or trained weights, averaged over a round of `gamma` of them; of a
        tree, of one level.

        threshold: with the look at the confidence that a `draft_threshold` costs.
        """
        after = [self._steps.verification(gamma + 1)] if self._steps.draft_verifies else []
        steps: list[Step] = []
        for one in drafted_by:
            steps += [self._steps.draft(one, gamma, threshold=threshold), *after]
        before = None if after else self._steps.verification(1)
        seconds = self._time(text_ids, steps, math.ceil(_NUM_WARM / gamma), [before] * len(steps))
        if not after:
            return [one / step.num_drafts for one, step in zip(seconds, steps, strict=True)]
        rounds = zip(seconds[::2], seconds[1::2], strict=True)
        return [max(whole - verify, _LEAST_SHARE * whole) / gamma for whole, verify in rounds]

    def rounds_s(self, text_ids: Sequence[int], config: DecodeConfig, counts: Sequence[int]) -> list[float] | None:
        """Seconds of rounds that make n drafts under this config, for each n, as `generate` runs them.

        None where a round is no more than its draft and its verification.
        """
        if self._on_device is None:
            return None
        return self._time(
            text_ids, [self._on_device.whole_round(config, n) for n in counts], _NUM_WARM, [None] * len(counts)
        )

    @torch.inference_mode()
    def _time(
        self, text_ids: Sequence[int], steps: Sequence[Step], num_warm: int, before: Sequence[Step | None]
    ) -> list[float]:
        """Seconds of each step after the text, one after the other; everything is prepared before the first.

        num_warm: how often the first is run before, because in decoding a step comes after others and not after a
        text's forward, which leaves caches cold. before: what each step comes after, untimed.
        """
        if not steps:
            return []
        engine, text = self._engine, list(text_ids)
        room = max(self._gamma_max + 1, *(step.room for step in steps))
        seconds = []
        with ExitStack() as sessions:
            sessions.enter_context(engine.session(len(text) + room))
            for other in dict.fromkeys(step.drafts_on for step in steps):
                if other is not None:
                    sessions.enter_context(other.session(len(text) + room))
            for step in (*steps, *filter(None, before)):
                step.prepare(len(text))
            num_known = self._known.fill(engine, text)
            logits = engine.forward(torch.tensor(text[num_known:], device=engine.device))
            self._known.keep(engine, text)
            end = TextEnd(text, int(logits[-1].argmax()))
            for step, first in ((steps[0], None),) * num_warm + tuple(zip(steps, before, strict=True)):
                for one in (first, step) if first is not None else (step,):
                    one.place(end)
                    self._draw_noise(len(text) + 1, one.num_verified, logits.shape[-1])
                    clock = StepClock(engine)
                    one.run(end)
                seconds.append(clock.lap())
        return seconds[num_warm:]

    def _draw_noise(self, place: int, count: int, vocab_size: int) -> None:
        """As decoding would have left it: what a verification rejects has drawn its places' numbers for the next."""
        self._sampler.begin(place)
        if not self._sampler.greedy and count:
            self._sampler.noise(place, count, vocab_size, self._engine.device)
