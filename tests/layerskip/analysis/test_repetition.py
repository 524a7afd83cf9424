"""The share of repeated n-grams, by hand and against a naive count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.analysis.repetition import repeated_ngram_share

TOKENS = st.lists(st.integers(0, 2), max_size=30)


@pytest.mark.parametrize(
    ("prompt", "output", "share"),
    [
        ([], [1, 2, 3, 4, 5], 0.0),
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),  # copied from the prompt
        ([9], [1, 1, 1, 1, 1, 1], 2 / 3),  # a loop: all n-grams but the first
        ([], [1, 2, 1, 2, 1, 2, 1, 2], 3 / 5),
        ([1, 2], [3, 4, 1, 2, 3, 4], 1 / 3),  # what came earlier may begin in the prompt and end in the output
        ([1, 2], [3, 4, 1, 2, 3, 4, 1, 2], 3 / 5),
        ([1, 2, 3, 4], [1, 2, 3], None),  # no n-gram
        ([], [], None),
    ],
)
def test_by_hand(prompt: list[int], output: list[int], share: float | None) -> None:
    assert repeated_ngram_share([(prompt, output)]) == share


def test_n_grams_of_all_texts_are_pooled_and_texts_do_not_see_each_other() -> None:
    loop, other = ([], [7] * 8), ([], [1, 2, 3, 4, 5, 6])
    assert repeated_ngram_share([loop, other, other]) == 4 / (5 + 3 + 3)


def test_an_n_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="n: must be at least 1, got 0"):
        repeated_ngram_share([], 0)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_the_same_as_looking_for_each_n_gram_from_the_start(prompt: list[int], output: list[int], n: int) -> None:
    ids = [*prompt, *output]
    places = range(len(prompt), len(ids) - n + 1)
    found = [any(ids[j : j + n] == ids[i : i + n] for j in range(i)) for i in places]
    assert repeated_ngram_share([(prompt, output)], n) == (sum(found) / len(found) if found else None)
