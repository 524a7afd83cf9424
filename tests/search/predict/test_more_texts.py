"""More texts: whole prompts before cuts, cuts of plain text alone, no text twice, within time, number and memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from layerskip import DecodeConfig
from search.measure.decoder import Decoded
from search.predict import more_texts
from search.predict.more_texts import CUT_SHARES, MIN_CUT, MoreOptions, MoreText, MoreTexts, beginnings, make_more_texts
from search.study.prompts import EncodedPrompt
from tests.search.helpers.fakes import NUM_LAYERS, FakeDecoder

NUM_TOKENS = 17


def text(first: int, length: int = 20, *, is_text: bool = True) -> EncodedPrompt:
    return EncodedPrompt(f"p{first}", None, tuple(range(first, first + length)), is_text)


def options(limit: int = 99, seconds: float = 1e9) -> MoreOptions:
    return MoreOptions(NUM_LAYERS, NUM_TOKENS, seed=0, limit=limit, seconds=seconds)


def test_whole_prompts_come_first_then_every_prompt_is_cut_once_before_any_twice() -> None:
    prompts = [text(100 * i) for i in range(5)]
    found = list(beginnings(prompts, [prompts[1].ids, prompts[3].ids], seed=0))
    assert {place for place, num_tokens in found[:3]} == {0, 2, 4}
    assert [num_tokens for _, num_tokens in found[:3]] == [20] * 3
    cuts = found[3:]
    assert [num_tokens for _, num_tokens in cuts] == [int(20 * share) for share in CUT_SHARES for _ in prompts]
    for i in range(0, len(cuts), 5):
        assert [place for place, _ in cuts[i : i + 5]] == [place for place, _ in cuts[:5]]
    assert {place for place, _ in cuts[:5]} == set(range(5))


def test_the_seed_decides_the_order() -> None:
    prompts = [text(100 * i) for i in range(9)]
    one, again, other = (list(beginnings(prompts, (), seed)) for seed in (0, 0, 1))
    assert one == again != other
    assert sorted(one) == sorted(other)


def test_chats_are_never_cut() -> None:
    prompts = [text(0, is_text=False), text(100)]
    assert {num_tokens for place, num_tokens in beginnings(prompts, (), 0) if place == 0} == {20}
    assert len(list(beginnings(prompts, (), 0))) == 2 + len(CUT_SHARES)


def test_short_beginnings_and_equal_ones_are_left_out() -> None:
    short = [text(0, length=MIN_CUT)]
    assert list(beginnings(short, (), 0)) == [(0, MIN_CUT)]
    alike = [text(0, length=20), text(0, length=50)]
    found = [alike[place].ids[:num_tokens] for place, num_tokens in beginnings(alike, (), 0)]
    assert len(set(found)) == len(found) == 2 + 2 * len(CUT_SHARES) - 1, "40 % of one are the other"
    used = [alike[1].ids[:27]]
    assert used[0] not in [alike[place].ids[:num_tokens] for place, num_tokens in beginnings(alike, used, 0)]


def test_each_is_continued_by_the_target_until_there_are_enough() -> None:
    prompts, decoder = [text(100 * i) for i in range(3)], FakeDecoder()
    made = make_more_texts(decoder, prompts, [prompts[0].ids], options(limit=4), clock=decoder.clock)
    assert len(made) == decoder.num_decoded == 4
    assert [one.num_tokens < len(prompts[one.place].ids) for one in made] == [False, False, True, True]
    for one in made:
        forced = one.text(prompts)
        assert forced.prompt_ids == prompts[one.place].ids[: one.num_tokens]
        assert forced.continuation_ids == tuple((sum(forced.prompt_ids) + i) % 50 for i in range(NUM_TOKENS))


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (0.1, 1), (0.3, 2), (1.0, 6)])
def test_it_ends_when_the_time_is_up(seconds: float, expected: int) -> None:
    """A decoding takes 0.17 s on the fake clock; the one under way is finished."""
    prompts, decoder = [text(100 * i) for i in range(3)], FakeDecoder(noise=0.0)
    assert len(make_more_texts(decoder, prompts, (), options(seconds=seconds), clock=decoder.clock)) == expected


def test_what_the_memory_does_not_hold_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 20 + 17 positions fit, with one of 200 + 17 among them not even two: padded, all are as long."""
    monkeypatch.setattr(more_texts, "MAX_POSITIONS", 3 * (20 + NUM_TOKENS))
    prompts = [text(1000, length=200, is_text=False), *(text(100 * i, is_text=False) for i in range(5))]
    made = make_more_texts(FakeDecoder(), prompts, (), options())
    assert len(made) == 3
    assert 0 not in {one.place for one in made}


def end_odd_ones(prompt_ids: Sequence[int], _config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
    """Texts that begin with an odd token end at once."""
    return Decoded(out.ids[:1], out.stats) if prompt_ids[0] % 2 else out


def test_texts_that_end_at_once_are_left_out() -> None:
    prompts = [text(100), text(201), text(300), text(401)]
    made = make_more_texts(FakeDecoder(then=end_odd_ones), prompts, (), options(limit=9))
    assert len(made) == 9
    assert {one.place for one in made} == {0, 2}


def test_what_a_study_keeps_is_read_back() -> None:
    more = MoreTexts(3, (MoreText(0, 11, (1, 2, 3)), MoreText(5, 20, (7, 8))))
    assert "\n" not in more.to_json()
    assert MoreTexts.from_json(more.to_json()) == more
    assert MoreTexts.from_json(MoreTexts().to_json()) == MoreTexts()
