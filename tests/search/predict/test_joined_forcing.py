"""Joined forcings read as one forcing on all the texts does, part by part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from layerskip import SkipMask
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, WrongDraft
from search.predict.joined_forcing import JoinedForcing, KeptReadings, join_readings
from search.predict.replay import TextRows
from tests.search.helpers.forcing import FakeForcing

LENGTHS = (9, 17, 5, 21, 3)
TEXTS = [ForcedText((i,), tuple(range(length))) for i, length in enumerate(LENGTHS)]
MASK = SkipMask.contiguous(6, 1, 4)


class Chatty(FakeForcing):
    """Says what it was asked, and goes on after a wrong token for as long as its row says."""

    def __init__(self, texts: Sequence[ForcedText]) -> None:
        super().__init__(texts)
        self.asked: list[tuple[int, list[int] | None]] = []

    def read(self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        self.asked.append((depth, None if texts is None else list(texts)))
        return super().read(mask, depth, texts)

    def overrun(self, mask: SkipMask, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        return [1000 * len(self.texts[one.text].continuation_ids) + one.row for one in wrong]


def rows_of(forcing: FakeForcing) -> TextRows:
    return TextRows(forcing.lengths, forcing.target_probs, 24)


def joined(split: int = 2) -> tuple[JoinedForcing, list[Chatty]]:
    parts = [Chatty(TEXTS[:split]), Chatty(TEXTS[split:])]
    return JoinedForcing([(one, rows_of(one)) for one in parts]), parts


def same(one: DraftReadings, other: DraftReadings) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("accepted", "confidence", "choices")
    )


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("texts", [None, [0, 1, 2, 3, 4], [1, 3], [0], [3, 4]])
def test_readings_are_those_of_one_forcing(split: int, depth: int, texts: list[int] | None) -> None:
    assert same(joined(split)[0].read(MASK, depth, texts), FakeForcing(TEXTS).read(MASK, depth, texts))


def test_rows_are_those_of_one_forcing() -> None:
    together, alone = joined()[0].rows, rows_of(FakeForcing(TEXTS))
    assert together.lengths.tolist() == alone.lengths.tolist()
    assert np.array_equal(together.target_probs, alone.target_probs)
    assert together.max_new_tokens == 24


def test_parts_are_asked_for_their_own_texts_alone() -> None:
    forcing, (first, second) = joined()
    forcing.read(MASK, 2, [1, 2, 4])
    forcing.read(MASK, 1, [0])
    forcing.read(MASK)
    assert first.asked == [(2, [1]), (1, [0]), (0, None)]
    assert second.asked == [(2, [0, 2]), (0, None)]


def test_overruns_come_in_the_order_they_were_asked_in() -> None:
    wrong = [WrongDraft(text, row, 1, 0, 3) for text, row in [(4, 1), (0, 2), (3, 3), (1, 4)]]
    assert joined()[0].overrun(MASK, wrong, 0.5) == [3001, 9002, 21003, 17004]
    assert joined()[0].overrun(MASK, [], 0.5) == []


def test_one_part_that_approximates_makes_all_an_approximation() -> None:
    parts = [FakeForcing(TEXTS[:2]), FakeForcing(TEXTS[2:])]
    parts[1].keys = "own"
    assert JoinedForcing([(one, rows_of(one)) for one in parts]).keys == "own"
    assert joined()[0].keys == "target"


def test_the_last_depth_stands_for_later_ones() -> None:
    """One part read deep, the other not, as where it can only approximate."""
    deep, flat = FakeForcing(TEXTS[:2]).read(MASK, 2), FakeForcing(TEXTS[2:]).read(MASK)
    together = join_readings([deep, flat], 21)
    assert together.accepted.shape == (3, 5, 21)
    for depth in range(3):
        assert np.array_equal(together.confidence[depth, 2:], flat.confidence[0])


def test_the_reading_longest_unused_is_forgotten_first() -> None:
    num_bytes = FakeForcing(TEXTS).read(MASK).nbytes
    assert num_bytes == 5 * 21 * (4 + 4 + 8 + 1)
    kept, read = KeptReadings(2 * num_bytes), []

    def reading_of(mask: SkipMask) -> DraftReadings:
        def work() -> DraftReadings:
            read.append(mask)
            return FakeForcing(TEXTS).read(mask)

        return kept.of(mask, work)

    masks = [SkipMask.from_layers(6, [i]) for i in range(3)]
    for i in (0, 1, 0, 2, 0, 2, 1):
        reading_of(masks[i])
    assert read == [masks[0], masks[1], masks[2], masks[1]]


def test_a_reading_larger_than_the_bound_is_kept_until_the_next() -> None:
    kept, read = KeptReadings(1), []
    for i in (0, 0, 1, 0):
        mask = SkipMask.from_layers(6, [i])
        kept.of(mask, lambda mask=mask: (read.append(mask), FakeForcing(TEXTS).read(mask))[1])
    assert [mask.skipped_layers for mask in read] == [(0,), (1,), (0,)]
