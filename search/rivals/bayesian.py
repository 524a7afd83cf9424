"""Rivals that let a Gaussian process look for the mask: Draft & Verify by measured speed, SWIFT by agreement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.rivals.common import Departure, Setup, bits_of, union
from search.rivals.gaussian_process import Array, GaussianProcess, upper_bound_points
from search.study.attributes import ACCEPTED_BY_POSITION, DRAFTED_BY_POSITION
from search.study.space import THRESHOLD_MAX
from search.study.trials import key_of, was_interrupted
from search.trials.proposals import Proposal, measured_keys


class DraftVerify:
    """Draft & Verify (2309.08168): a Gaussian process on relaxed bits, cut at one half, by measured tokens/s.

    The two masks come first that the authors' program probes by hand, then the point with the highest upper confidence
    bound; gamma is 12 at most. The draft threshold starts at 0.6 and follows the acceptance rate: a thousandth up for
    every round while less than 0.9 of the drafts are accepted, else down for every round that it ended.
    """

    KAPPA = 2.576
    MAX_GAMMA = 12
    FIRST_THRESHOLD = 0.6
    ACCEPTANCE = 0.9
    STEP = 0.001
    PROBES = (
        ((8, 10, 15, 18, 20, *range(24, 39)), ()),
        ((3, 5, 6, 8, 10, 11, 14, 15, 18, *range(22, 32), *range(33, 38)), (6, 9, 10, 11, 15, 24, 25, 27, 28, 35)),
    )
    """Attention and MLP sublayers to skip of the 40 layers that the program has in mind."""
    PROBED_LAYERS = 40
    DEPARTURES = (
        Departure("probed masks stretched from the 40 layers of the authors' model to those here", "hurts it"),
        Departure(
            "the process sees the bits that were measured, not the relaxed point they were cut from", "either way"
        ),
        Departure("no mask is measured twice while a new one is left, but for leaders", "helps it"),
        Departure("the threshold goes on from trial to trial, where theirs starts anew with every text", "helps it"),
        Departure("the threshold stands still within a trial, and moves in steps of 0.05", "hurts it"),
        Departure("some hundred trials at most, where the paper takes a thousand", "hurts it"),
    )

    def __init__(self, setup: Setup) -> None:
        self._setup, self._space = setup, setup.space
        self._gamma = min(self.MAX_GAMMA, self._space.gamma_max)

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """The probes, then the untried mask with the best upper confidence bound."""
        names = self._space.bit_names
        seen = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
        done = {self._space.to_mask(trial.params) for trial in trials if not was_interrupted(trial)}
        if left := [mask for mask in self._probes if mask not in done]:
            return self._proposal(left[0], seen)
        points = rng.random((1, len(names)))
        if seen:
            bits = np.array([[float(trial.params[name]) for name in names] for trial in seen])
            process = GaussianProcess(bits, np.array([trial.value for trial in seen], dtype=float))
            points = upper_bound_points(process, len(names), self.KAPPA, rng)
        for point in points:
            mask = self._space.to_mask(dict(zip(names, (point > 0.5).tolist(), strict=True)))
            if mask not in done:
                return self._proposal(mask, seen)
        return self._setup.measure_again(trials, rng)

    @cached_property
    def _probes(self) -> list[SkipMask]:
        count = self._space.num_layers
        place = [int((i + 0.5) * self.PROBED_LAYERS / count) for i in range(count)]
        probes = []
        for skipped in self.PROBES:
            attention, mlp = ([i for i in range(count) if place[i] in kind] for kind in skipped)
            probes.append(self._setup.mask(SkipMask.from_sublayers(count, attention=attention, mlp=mlp)))
        return [mask for mask in probes if mask.num_skipped]

    def _proposal(self, mask: SkipMask, seen: Sequence[FrozenTrial]) -> Proposal:
        config = DecodeConfig(skip_mask=mask, gamma=self._gamma, draft_threshold=self.threshold_after(seen))
        return Proposal("draft-verify", self._setup.params(config))

    def threshold_after(self, trials: Sequence[FrozenTrial]) -> float:
        """Where the draft threshold stands after the rounds of these trials."""
        threshold = self.FIRST_THRESHOLD
        for trial in trials:
            drafted, accepted = (trial.user_attrs.get(name) for name in (DRAFTED_BY_POSITION, ACCEPTED_BY_POSITION))
            if not drafted or not accepted:
                continue
            if sum(accepted) < self.ACCEPTANCE * sum(drafted):
                threshold += self.STEP * drafted[0]
            else:
                threshold -= self.STEP * (drafted[0] - drafted[-1])
            threshold = min(max(threshold, 0.0), THRESHOLD_MAX)
        return threshold


class Swift:
    """SWIFT (2410.06916): of the masks that skip 45 % of the sublayers but no sublayer of the first and last layer, the
    one with the best agreement, by random draws and every 25th time a Gaussian process on relaxed bits.

    It ends after 1,000 steps, 300 without progress or an agreement of 0.95. A trial measures the best mask so far.
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
    DEPARTURES = (
        Departure("one mask for all text; the paper goes on looking as the stream of text changes", "hurts it"),
        Departure("25 steps before every trial, where the paper takes one a round while decoding", "helps it"),
        Departure("agreement on all tuning texts, where the paper has the latest 32 tokens", "helps it"),
        Departure("one draft at the largest gamma, where the paper verifies a tree of drafts", "hurts it"),
    )

    def __init__(self, setup: Setup) -> None:
        self._setup, self._space, self._hints, self._seed = setup, setup.space, setup.hints, setup.seed
        self._points: list[Array] = []
        self._agreements: list[float] = []
        """Of every step so far; a step follows from the seed and the steps before it alone."""

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        """The best mask after 25 more steps; if it is measured already, a leader is measured again."""
        mask = self._best_after(self.STEPS_PER_TRIAL * (index + 1))
        gamma = min(self.MAX_GAMMA, self._space.gamma_max)
        config = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=self.DRAFT_THRESHOLD)
        params = self._setup.params(config)
        if key_of(params) in measured_keys(trials):
            return self._setup.measure_again(trials, rng)
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
            seen = np.array(self._points).tobytes(), np.array(self._agreements).tobytes()
            point = _best_bound(*seen, dim, self.KAPPA, (self._seed, number))
        else:
            point = np.zeros(dim)
            point[rng.choice(dim, size=self._num_skipped, replace=False)] = 1.0
        self._points.append(point)
        self._agreements.append(self._hints.agreement(self._mask(point)))

    def _mask(self, point: Array) -> SkipMask:
        chosen = np.argsort(-point, kind="stable")[: self._num_skipped]
        return union(self._space.num_layers, [self._bits[i] for i in chosen])


@lru_cache(maxsize=1 << 10)
def _best_bound(points: bytes, values: bytes, dim: int, kappa: float, seed: tuple[int, int]) -> Array:
    """The point (dim,) with the best upper confidence bound. Kept, for it is the same whatever steps cost."""
    process = GaussianProcess(np.frombuffer(points).reshape(-1, dim), np.frombuffer(values))
    return np.asarray(upper_bound_points(process, dim, kappa, np.random.default_rng(seed))[0])
