"""Rivals that let a Gaussian process look for the mask: Draft & Verify by measured speed, SWIFT by agreement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask
from search.leaderboard import key_of
from search.proposals import Proposal, measured_keys
from search.rivals.common import Hints, Params, bits_of, measure_again, union
from search.rivals.gaussian_process import Array, GaussianProcess, upper_bound_points
from search.space import DRAFT_THRESHOLD, GAMMA, SHARE_PREFIX, TARGET_THRESHOLD, SearchSpace


class DraftVerify:
    """Draft & Verify (2309.08168): a Gaussian process on relaxed bits, cut at one half, by measured tokens/s.

    The next point maximises the upper confidence bound; five random points come first; gamma is 12 at most.
    Deviations: the process sees the bits that were measured, since a trial stores nothing else, not the relaxed point;
    a config is not measured twice while a new one is left; the draft threshold stays at 0.6 instead of following the
    acceptance rate during decoding.
    """

    NUM_RANDOM = 5
    KAPPA = 2.576
    MAX_GAMMA = 12
    DRAFT_THRESHOLD = 0.6

    def __init__(self, space: SearchSpace) -> None:
        self._space = space

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """The untried config with the best upper confidence bound."""
        names = self._space.bit_names
        seen = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
        points = rng.random((1, len(names)))
        if len(seen) >= self.NUM_RANDOM:
            bits = np.array([[float(trial.params[name]) for name in names] for trial in seen])
            process = GaussianProcess(bits, np.array([trial.value for trial in seen], dtype=float))
            points = upper_bound_points(process, len(names), self.KAPPA, rng)
        done = measured_keys(trials)
        for point in points:
            params = self._params(point)
            if key_of(params) not in done:
                return Proposal("draft-verify", params)
        return measure_again(trials, self._space, rng)

    def _params(self, point: Array) -> Params:
        params: Params = dict(zip(self._space.bit_names, (point > 0.5).tolist(), strict=True))
        gamma = min(self.MAX_GAMMA, self._space.gamma_max)
        params |= {SHARE_PREFIX: False} if self._space.share_prefix else {}
        return params | {GAMMA: gamma, DRAFT_THRESHOLD: self.DRAFT_THRESHOLD, TARGET_THRESHOLD: 0.0}


class Swift:
    """SWIFT (2410.06916): of the masks that skip 45 % of the sublayers but no sublayer of the first and last layer, the
    one with the best agreement, by random draws and every 25th time a Gaussian process on relaxed bits.

    It ends after 1,000 steps, 300 without progress or an agreement of 0.95. A trial measures the best mask so far.
    Deviations: 25 steps a trial, where the paper takes one a round while decoding; agreement on all tuning texts, where
    it has the last 32 tokens; one draft at the largest gamma, where it has a tree of drafts.
    """

    SKIP_RATIO = 0.45
    STEPS_PER_TRIAL = 25
    BAYES_EVERY = 25
    MAX_STEPS = 1000
    MAX_TOLERANCE = 300
    ENOUGH = 0.95
    KAPPA = 2.5
    MAX_GAMMA = 25
    DRAFT_THRESHOLD = 0.8

    def __init__(self, space: SearchSpace, hints: Hints, seed: int) -> None:
        self._space = space
        self._hints = hints
        self._seed = seed
        self._points: list[Array] = []
        self._agreements: list[float] = []
        """Of every step so far; a step follows from the seed and the steps before it alone."""

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        """The best mask after 25 more steps; if it is measured already, a leader is measured again."""
        mask = self._best_after(self.STEPS_PER_TRIAL * (index + 1))
        gamma = min(self.MAX_GAMMA, self._space.gamma_max)
        config = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=self.DRAFT_THRESHOLD)
        params = self._space.to_params(config)
        if key_of(params) in measured_keys(trials):
            return measure_again(trials, self._space, rng)
        return Proposal("swift", params)

    @cached_property
    def _bits(self) -> tuple[SkipMask, ...]:
        last = self._space.num_layers - 1
        ends = SkipMask.from_layers(last + 1, {0, last})
        inner = [mask for _, mask in bits_of(self._space) if union(last + 1, [mask, ends]) != ends]
        return tuple(inner)

    @property
    def _num_skipped(self) -> int:
        return int(len(self._bits) * self.SKIP_RATIO)

    def _best_after(self, num_steps: int) -> SkipMask:
        if not self._num_skipped:
            return SkipMask.none(self._space.num_layers)
        while len(self._points) < num_steps and not self._ended():
            self._step()
        seen = self._agreements[:num_steps]
        return self._mask(self._points[int(np.argmax(seen))])

    def _ended(self) -> bool:
        count = len(self._agreements)
        if not count:
            return False
        best = int(np.argmax(self._agreements))
        return count >= self.MAX_STEPS or self._agreements[best] > self.ENOUGH or count - best > self.MAX_TOLERANCE

    def _step(self) -> None:
        number, dim = len(self._points), len(self._bits)
        rng = np.random.default_rng([self._seed, number])
        if (number + 1) % self.BAYES_EVERY == 0:
            process = GaussianProcess(np.array(self._points), np.array(self._agreements))
            point = upper_bound_points(process, dim, self.KAPPA, rng)[0]
        else:
            point = np.zeros(dim)
            point[rng.choice(dim, size=self._num_skipped, replace=False)] = 1.0
        self._points.append(point)
        self._agreements.append(self._hints.agreement(self._mask(point)))

    def _mask(self, point: Array) -> SkipMask:
        chosen = np.argsort(-point, kind="stable")[: self._num_skipped]
        return union(self._space.num_layers, [self._bits[i] for i in chosen])
