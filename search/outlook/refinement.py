"""Refinement: a mask predicted on the first texts is predicted on all once it leads, and only then believed.

Of many masks compared on few texts the first are always some that happen to suit these texts, so what leads there
promises too much.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from search.outlook.forecast import Candidate, Candidates, Pool, best_first

_NUM_AHEAD = 8


def refine_pool(
    pool: Pool, candidates: Candidates, *, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Pool:
    """A pool that was made on the first texts, best first, with its best predicted on all.

    Goes on until the eight best are or the time is up; the best one in any case.
    Cost: a full-fidelity reading each.
    """
    start = clock()
    left = [Candidate(one.key, one.log_speedup, full_fidelity=False) for one in pool.candidates]
    while (ahead := next((i for i, one in enumerate(left[:_NUM_AHEAD]) if not one.full_fidelity), None)) is not None:
        left[ahead] = candidates.of(candidates.mask(left[ahead]), full_fidelity=True)
        left = best_first(left)
        if clock() - start > seconds:
            break
    return Pool(tuple(left))
