"""Refinement: how far down the pool is predicted on all texts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from layerskip import DecodeConfig, SkipMask
from search.outlook.forecast import Candidate, Pool
from search.outlook.refinement import refine_pool
from search.study.trials import key_of
from tests.search.helpers.fakes import SPACE, FakeClock


class Planted:
    """Candidates whose masks lose on all texts what they have been told to, else nothing."""

    def __init__(self, losses: dict[SkipMask, float] | None = None, clock: FakeClock | None = None) -> None:
        self.losses, self.clock = losses or {}, clock
        self.asked: list[SkipMask] = []

    def mask(self, one: Candidate) -> SkipMask:
        return SPACE.to_mask(one.params)

    def of(self, mask: SkipMask, *, full_fidelity: bool = False) -> Candidate:
        assert full_fidelity
        assert mask not in self.asked, "nothing is refined twice"
        self.asked.append(mask)
        if self.clock is not None:
            self.clock.advance(1.0)
        return candidate(mask, FIRST[mask] - self.losses.get(mask, 0.0))


def candidate(mask: SkipMask, log: float) -> Candidate:
    return Candidate(key_of(SPACE.to_params(DecodeConfig(skip_mask=mask, gamma=4))), log)


MASKS = [SkipMask.from_sublayers(6, attention=[i % 6, i // 6], mlp=[i % 5]) for i in range(36)]
MASKS = list(dict.fromkeys(MASKS))
FIRST = {mask: 1.0 - 0.01 * i for i, mask in enumerate(MASKS)}
POOL = Pool(tuple(candidate(mask, log) for mask, log in FIRST.items()))


def refined(planted: Planted, *, seconds: float = 1e9, clock: Callable[[], float] = time.perf_counter) -> Pool:
    return refine_pool(POOL, planted, seconds=seconds, clock=clock)  # type: ignore[arg-type]


def test_the_best_eight_of_a_pool_are_predicted_on_all_texts() -> None:
    """None loses there, so the order stays, and eight are enough."""
    planted = Planted()
    pool = refined(planted)
    assert planted.asked == MASKS[:8]
    assert [one.full_fidelity for one in pool.candidates] == [True] * 8 + [False] * (len(MASKS) - 8)
    assert pool.num_full_fidelity == 8
    assert pool.best.log_speedup == pytest.approx(1.0)


def test_what_loses_more_than_others_makes_room_for_others() -> None:
    planted = Planted(dict.fromkeys(MASKS[:3], 0.9))
    pool = refined(planted)
    assert pool.best.params == POOL.candidates[3].params
    assert {SPACE.to_mask(one.params) for one in pool.candidates[:8]}.isdisjoint(MASKS[:3])
    assert all(one.full_fidelity for one in pool.candidates[:8])
    assert len(pool.candidates) == len(MASKS)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 1), (2.5, 3), (1e9, 8)])
def test_refining_keeps_to_its_seconds_but_for_the_best(seconds: float, expected: int) -> None:
    clock = FakeClock()
    planted = Planted(clock=clock)
    pool = refined(planted, seconds=seconds, clock=clock)
    assert len(planted.asked) == expected
    assert pool.best.full_fidelity
