"""Refinement: a mask predicted on the first texts is predicted on all once it leads, and only then believed.

Of many masks compared on few texts the first are always some that happen to suit these texts, so what leads there
promises too much. How much, is known of the masks that were predicted both ways, and expected of those like them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip.config.skip_mask import SkipMask
from search.outlook.forecast import Candidate, Candidates, Pool
from search.study.space import SearchSpace
from search.study.trials import Key

Floats = NDArray[np.float64]
_NUM_AHEAD = 8
_MAX_REFINED = 24
_REACH = 2.0
"""Bits that differ for a likeness of 1/e."""
_COMMON_WEIGHT = 0.2
"""Of the average mask that was predicted both ways, against those alike, which weigh up to 1 each."""


class Refiner:
    """What candidates are worth on all texts: predicted, or expected. Keeps masks and bits of what it has seen."""

    def __init__(self, candidates: Candidates, space: SearchSpace) -> None:
        self._candidates, self._space = candidates, space
        self._masks: dict[Key, SkipMask] = {}
        self._bits: dict[Key, Floats] = {}

    def mask(self, candidate: Candidate) -> SkipMask:
        """A candidate's."""
        if candidate.key not in self._masks:
            self._masks[candidate.key] = self._space.to_mask(candidate.params)
        return self._masks[candidate.key]

    def refine(self, candidate: Candidate) -> Candidate:
        """Its mask predicted on all texts, at the setting that is best there. Cost: a full-fidelity reading."""
        return self._candidates.of(self.mask(candidate), full_fidelity=True)

    def expected(self, found: Sequence[Candidate]) -> Floats:
        """(N,): log speedups on all texts. Of what was predicted on the first ones alone: that, and the difference that
        looking at all made to the masks among these that were predicted both ways, those alike above all."""
        logs = np.array([one.log_speedup for one in found])
        coarse = [i for i, one in enumerate(found) if not one.full_fidelity]
        both = [one for one in found if one.first_log_speedup is not None]
        if not coarse or not both:
            return logs
        differences = np.array([one.log_speedup - (one.first_log_speedup or 0.0) for one in both])
        points, others = self._points([found[i] for i in coarse]), self._points(both)
        apart = points.sum(1)[:, None] + others.sum(1) - 2 * points @ others.T
        weights = np.exp(-apart / _REACH)
        total = weights @ differences + _COMMON_WEIGHT * differences.mean()
        logs[coarse] += total / (weights.sum(1) + _COMMON_WEIGHT)
        return logs

    def best_first(self, found: Sequence[Candidate]) -> list[Candidate]:
        """By what is expected; those alike stay in order."""
        return [found[int(i)] for i in np.argsort(-self.expected(found), kind="stable")]

    def _points(self, found: Sequence[Candidate]) -> Floats:
        """(N, bits): 0 or 1."""
        for one in found:
            if one.key not in self._bits:
                params = one.params
                self._bits[one.key] = np.array([float(params.get(name, False)) for name in self._space.bit_names])
        return np.stack([self._bits[one.key] for one in found])


def refine_pool(
    pool: Pool, refiner: Refiner, *, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Pool:
    """A pool that was made on the first texts, best first by what is expected on all, with its best predicted on all.

    Goes on until the eight best are, two dozen are, or the time is up; the best one in any case.
    Cost: a full-fidelity reading each.
    """
    start = clock()
    left = [Candidate(one.key, one.log_speedup, full_fidelity=False) for one in pool.candidates]
    for count in range(_MAX_REFINED):
        ahead = next((i for i, one in enumerate(left[:_NUM_AHEAD]) if not one.full_fidelity), None)
        if ahead is None or (count > 0 and clock() - start > seconds):
            break
        left[ahead] = refiner.refine(left[ahead])
        left = refiner.best_first(left)
    return Pool(tuple(left))
