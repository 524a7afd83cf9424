"""Refinement: a mask predicted on the first texts is predicted on all once it leads, and only then believed.

Of many masks compared on few texts the first are always some that happen to suit these texts, so what leads there
promises too much. How much, is known of the masks that were predicted both ways, and expected of the others.
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


class Refiner:
    """What candidates are worth on all texts: predicted, or expected."""

    def __init__(self, candidates: Candidates, space: SearchSpace) -> None:
        self._candidates, self._space = candidates, space
        self._masks: dict[Key, SkipMask] = {}

    def mask(self, candidate: Candidate) -> SkipMask:
        """A candidate's."""
        if candidate.key not in self._masks:
            self._masks[candidate.key] = self._space.to_mask(candidate.params)
        return self._masks[candidate.key]

    def refine(self, candidate: Candidate) -> Candidate:
        """Its mask predicted on all texts, at the setting that is best there. Cost: a full-fidelity reading."""
        return self._candidates.of(self.mask(candidate), full_fidelity=True)

    @staticmethod
    def expected(found: Sequence[Candidate]) -> Floats:
        """(N,): log speedups on all texts. Of what was predicted on the first ones alone: that, and the difference that
        looking at all made on average to the masks among these that were predicted both ways."""
        differences = [one.log_speedup - one.first_log_speedup for one in found if one.first_log_speedup is not None]
        usual = float(np.mean(differences)) if differences else 0.0
        return np.array([one.log_speedup + (0.0 if one.full_fidelity else usual) for one in found])

    def best_first(self, found: Sequence[Candidate]) -> list[Candidate]:
        """By what is expected; those alike stay in order."""
        return [found[int(i)] for i in np.argsort(-self.expected(found), kind="stable")]


def refine_pool(
    pool: Pool, refiner: Refiner, *, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Pool:
    """A pool that was made on the first texts, best first by what is expected on all, with its best predicted on all.

    Goes on until the eight best are or the time is up; the best one in any case.
    Cost: a full-fidelity reading each.
    """
    start = clock()
    left = [Candidate(one.key, one.log_speedup, full_fidelity=False) for one in pool.candidates]
    while (ahead := next((i for i, one in enumerate(left[:_NUM_AHEAD]) if not one.full_fidelity), None)) is not None:
        left[ahead] = refiner.refine(left[ahead])
        left = refiner.best_first(left)
        if clock() - start > seconds:
            break
    return Pool(tuple(left))
