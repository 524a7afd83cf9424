"""How a round on the device stops at a draft_threshold: by seconds measured and by the length of drafts so far."""

from __future__ import annotations

import pytest

from layerskip.rounds.draft_stopping import Stopping


def test_cutting_pays_from_the_mean_draft_on_at_which_both_ways_take_equally_long() -> None:
    # Rounds that look: 3 s with one draft and 1 s for each more. A round that cuts: 5 s, so as long as with 3 drafts.
    stopping = Stopping.measured(6, 3.0, 8.0, 5.0)
    assert stopping.break_even == pytest.approx(3.0)
    assert stopping.cuts  # before the first round a draft of (1 + 6) / 2 is expected
    stopping.add(2)
    assert not stopping.cuts
    for num_drafted in (5, 5):
        stopping.add(num_drafted)
    assert (stopping.num_rounds, stopping.num_drafted) == (3, 12)
    assert stopping.cuts


@pytest.mark.parametrize(("cutting_s", "expected"), [(1.0, True), (9.0, False)])
def test_one_way_may_be_faster_whatever_the_drafts(cutting_s: float, expected: bool) -> None:
    for longest_s in (8.0, 2.0):  # timings may be so noisy that a longer round took less time
        stopping = Stopping.measured(6, 3.0, longest_s, cutting_s)
        for num_drafted in (1, 6, 6, 6):
            assert stopping.cuts == expected
            stopping.add(num_drafted)


def test_with_a_single_draft_the_faster_way_is_taken() -> None:
    assert Stopping.measured(1, 3.0, 3.0, 2.0).cuts
    assert not Stopping.measured(1, 3.0, 3.0, 4.0).cuts
