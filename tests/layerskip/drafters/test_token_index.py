"""Lookups in text: matches and continuations are those of a plain search through the text, at a constant cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.config.lookup_settings import MAX_MATCH, LookupSettings, PromptLookup, SuffixLookup
from layerskip.drafters.lookups.drafter import LookupSession
from layerskip.drafters.lookups.text_store import TextStore
from layerskip.drafters.lookups.token_index import MAX_PLACES, Place, TokenIndex, continue_from, vote

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def naive_matches(text: Sequence[int], other: Sequence[int], least: int, longest: int) -> list[tuple[int, int]]:
    """(place, length) of everything in `other` that stands before some token as at the end of `text`."""
    found = []
    for place in range(1, len(other)):
        length = 0
        while length < min(longest, place, len(text)) and other[place - length - 1] == text[len(text) - length - 1]:
            length += 1
        if length >= least:
            found.append((place, length))
    return found


@given(TEXTS, st.integers(1, 5), st.integers(1, 12), st.data())
def test_matches_are_those_of_a_search_through_the_text(ids: list[int], least: int, longest: int, data: st.DataObject):
    longest = max(least, longest)
    index, text = TokenIndex(least), list[int]()
    left = ids
    while left:  # in portions, as a text grows
        size = data.draw(st.integers(1, len(left)))
        index.grow(text, left[:size])
        left = left[size:]
    found, expected = index.match(text, longest), naive_matches(ids, ids, least, longest)[-MAX_PLACES:]
    if not expected:
        assert found is None
        return
    best = max(length for _, length in expected)
    assert found.length == best
    assert [place.position for place in found.places] == [place for place, length in expected if length == best][::-1]


@given(TEXTS, st.integers(1, 12))
def test_a_loop_is_continued_as_a_loop(ids: list[int], num_tokens: int) -> None:
    text = [7, 8, 9, *ids, 4]
    for position in range(1, len(text)):
        copied = continue_from(Place(text, position), num_tokens, text)
        grown = list(text)
        for i in range(num_tokens):
            grown.append(grown[position + i])
        assert copied == grown[len(text) :]
        assert continue_from(Place(text, position), num_tokens) == text[position : position + num_tokens]


@pytest.mark.parametrize(
    ("futures", "least", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4], [1, 5, 4]], 0.0, [1, 2, 3]),  # a tie goes to the first
        ([[1, 2, 3], [1, 2, 4], [1, 5, 4]], 0.5, [1, 2]),  # a third agree on what follows
        ([[2], [1, 1], [1, 1]], 0.6, [1, 1]),
        ([[2], [1, 1], [1, 1]], 0.7, []),
        ([[1], [1, 6]], 0.5, [1, 6]),  # who has ended has no say
        ([[1], [1, 6]], 0.6, [1]),
        ([[]], 0.0, []),
    ],
)
def test_votes(futures: list[list[int]], least: float, expected: list[int]) -> None:
    assert vote(futures, least) == expected


def session_on(ids: Sequence[int], settings: LookupSettings, gamma: int = 8, store: TextStore | None = None):
    session = LookupSession(settings, gamma, 0.0, store)
    session.follow(ids)
    return session


@pytest.mark.parametrize(
    ("ids", "settings", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], PromptLookup(min_match=2, max_match=3), [3, 4, 5, 1]),
        ([1, 2, 3, 4, 5, 1, 2], PromptLookup(min_match=3, max_match=3), []),
        ([9, 1, 2, 7, 8, 1, 2, 3, 4, 9, 1, 2], PromptLookup(min_match=2, max_match=2), [3, 4, 9, 1]),  # latest of two
        ([9, 1, 2, 7, 8, 1, 2, 3, 4, 9, 1, 2], PromptLookup(min_match=2, max_match=3), [7, 8, 1, 2]),  # longest of two
        ([1, 3, 1, 3, 1, 4, 1], PromptLookup(min_match=1, max_match=1, continuation="frequent"), [3, 1, 4, 1]),
        ([6, 6, 6], PromptLookup(min_match=2, max_match=4), [6, 6, 6, 6]),
        ([1, 2, 3, 4, 5, 1, 2], SuffixLookup(min_match=1, factor=1.0), [3, 4]),  # as many as were matched
        ([1, 2, 3, 4, 5, 1, 2], SuffixLookup(min_match=1, factor=1.5), [3, 4, 5]),
        ([1, 3, 1, 4, 1, 5, 1], SuffixLookup(min_match=1, factor=4.0, min_probability=0.4), []),  # a third each
        ([1, 3, 1, 4, 1, 3, 1], SuffixLookup(min_match=3, factor=4.0), [4, 1, 3, 1]),
        ([1, 3, 2, 1, 4, 1, 3, 5, 1], SuffixLookup(min_match=1, factor=4.0, min_probability=0.6), [3]),
    ],
)
def test_proposals(ids: list[int], settings: LookupSettings, expected: list[int]) -> None:
    assert session_on(ids, settings).look_up(4) == expected


def test_limits_of_a_proposal() -> None:
    loop = [1, 2] * 6
    for settings in (PromptLookup(min_match=2, max_match=4), SuffixLookup(min_match=2)):
        session = session_on(loop, settings, gamma=3)
        assert session.look_up(8) == [1, 2, 1]
        assert session.look_up(2) == [1, 2]
        assert session.look_up(0) == []


def test_an_unsure_target_is_left_alone() -> None:
    session = LookupSession(PromptLookup(min_match=1, max_match=1), 4, 0.5)
    assert session.propose([1, 2, 1], 4, 0.49) is None
    draft = session.propose([1, 2, 1, 2], 4, 0.5)
    assert (draft.ids.tolist(), draft.looked_up) == ([1, 2, 1, 2], True)


# A store of earlier texts.


def test_a_store_is_looked_into_where_its_match_is_longer() -> None:
    store, settings = TextStore(100), SuffixLookup(min_match=2, factor=9.0)
    store.add([5, 1, 2, 3, 9, 8, 7, 6])
    assert session_on([4, 1, 2, 3], settings, store=store).look_up(9) == [9, 8, 7, 6]  # an earlier text ends there
    own = [1, 2, 3, 4, 0, 1, 2, 3]
    assert session_on(own, settings, store=store).look_up(3) == [4, 0, 1]  # equally long: the text's own
    assert session_on(own, PromptLookup(min_match=2, max_match=4), store=store).look_up(1) == [4]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), max_size=12), st.integers(1, 40), TEXTS)
def test_a_store_holds_the_latest_texts_that_fit(texts: list[list[int]], room: int, text: list[int]) -> None:
    store = TextStore(room)
    for number, one in enumerate(texts):
        store.add(one)
        if number == len(texts) // 2:
            store.match(text, 2)  # indexed from here on
    kept, free = list[list[int]](), room
    for one in reversed(texts):
        cut = one[-room:]
        if len(cut) > free:
            break
        kept.insert(0, cut)
        free -= len(cut)
    assert (len(store), store.num_tokens) == (len(kept), room - free)
    expected = max((length for one in kept for _, length in naive_matches(text, one, 2, MAX_MATCH)), default=0)
    found = store.match(text, 2)
    assert (0 if found is None else found.length) == expected


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_the_size_of_a_store_is_checked(size: object) -> None:
    with pytest.raises(ValueError, match="max_tokens: must be a whole number of at least 1"):
        TextStore(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[1, -1], [1.0], ["a"], [True]])
def test_what_is_added_to_a_store_is_checked(ids: list[Any]) -> None:
    store = TextStore(9)
    with pytest.raises(ValueError, match="ids: must be whole numbers of at least 0, got"):
        store.add(ids)
    assert (len(store), store.largest_id) == (0, 0)


def test_a_store_of_nothing_but_empty_texts_does_not_grow() -> None:
    """They take no tokens, so no number of them was ever too many."""
    store = TextStore(9)
    for _ in range(3):
        store.add([])
    assert len(store) == 0
    store.add([4, 7, 2])
    assert (len(store), store.largest_id) == (1, 7)


# Cost.


class CountingList(list[int]):
    """Counts the tokens that are looked at."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(ids)
        self.num_read = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def,override]
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("kind", ["loop", "random", "same"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind: str) -> None:
    draw = random.Random(0)
    token = {"loop": lambda i: i % 7, "random": lambda _: draw.randrange(4), "same": lambda _: 3}[kind]
    text, index = CountingList([]), TokenIndex(2)
    read: dict[int, int] = {}
    for length in range(1, 100_001):
        before = text.num_read
        index.grow(text, [token(length)])
        if length % 1_000 == 0:
            index.match(text)
            read[length] = text.num_read - before
    bound = 2 * (MAX_PLACES + 1) * (MAX_MATCH + 2)
    assert max(read.values()) <= bound
    assert max(read[n] for n in read if n > 50_000) <= 1.5 * max(read[n] for n in read if n <= 50_000)
