"""Refinement: a mask predicted on the first texts is predicted on all once it leads, and only then believed.

Of many masks compared on few texts the first are always some that happen to suit these texts, so what leads there
promises too much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from layerskip.config.skip_mask import SkipMask
from search.outlook.forecast import Candidate, Candidates, Pool
from search.study.space import SearchSpace
from search.study.trials import Key

_NUM_AHEAD = 8


class Refiner:
    """Predicts candidates' masks on all texts."""

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


def best_first(found: Iterable[Candidate]) -> list[Candidate]:
    """By prediction; those alike stay in order."""
    return sorted(found, key=lambda one: -one.log_speedup)


def refine_pool(
    pool: Pool, refiner: Refiner, *, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Pool:
    """A pool that was made on the first texts, best first, with its best predicted on all.

    Goes on until the eight best are or the time is up; the best one in any case.
    Cost: a full-fidelity reading each.
    """
    start = clock()
    left = [Candidate(one.key, one.log_speedup, full_fidelity=False) for one in pool.candidates]
    while (ahead := next((i for i, one in enumerate(left[:_NUM_AHEAD]) if not one.full_fidelity), None)) is not None:
        left[ahead] = refiner.refine(left[ahead])
        left = best_first(left)
        if clock() - start > seconds:
            break
    return Pool(tuple(left))
