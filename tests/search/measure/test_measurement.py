"""A pair is decoded one after the other: each output checked, a tie or none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from layerskip import DecodeConfig, DecodeStats, SkipMask
from search.measure.decoder import Decoded
from search.measure.pairs import (
    Fault,
    LosslessViolation,
    PromptCase,
    SeededPrompt,
    measure_pair,
    time_able,
    time_one,
    time_with_plain,
)
from tests.search.helpers.fakes import NUM_LAYERS, FakeDecoder, true_speedup

PLAIN = DecodeConfig.plain(NUM_LAYERS)
DRAFT = DecodeConfig(skip_mask=SkipMask.contiguous(NUM_LAYERS, 1, 4), gamma=4)


CASE = PromptCase("p", (7, 1, 2), FakeDecoder().decode((7, 1, 2), PLAIN).ids)


class Speculated(list[bool]):
    """Notes of what was decoded whether it speculated."""

    def __call__(self, _ids: Sequence[int], config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
        self.append(config.speculates)
        return out


def one_token(_ids: Sequence[int], _config: DecodeConfig, _seed: int, _out: Decoded) -> Decoded:
    return Decoded((3,), DecodeStats(num_emitted=1))


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_pair_is_decoded_one_after_the_other(plain_first: bool) -> None:
    calls = Speculated()
    pair = measure_pair(FakeDecoder(noise=0.0, then=calls), CASE, DRAFT, plain_first=plain_first)
    assert calls == [not plain_first, plain_first]
    assert pair.ratio == pytest.approx(true_speedup(DRAFT))
    stats = [one.stats for one in (pair.plain, pair.speculative)]
    ends = [one.prefill_s + one.decode_s for one in stats]  # each has a prefill of its own
    assert pair.speculative.end_to_end_tokens_per_s / pair.plain.end_to_end_tokens_per_s == pytest.approx(
        ends[0] / ends[1]
    )
    assert pair.speculative.stats.num_rounds > pair.plain.stats.num_rounds == 0


def test_a_tie_is_told_and_timed_as_any_output() -> None:
    decoder = FakeDecoder(noise=0.0, tie_on=lambda _config: True)
    pair = measure_pair(decoder, CASE, DRAFT, plain_first=True)
    assert (pair.plain.is_tie, pair.speculative.is_tie) == (False, True)
    assert pair.ratio == pytest.approx(true_speedup(DRAFT))


def test_a_wrong_output_is_a_violation_of_the_config_that_made_it() -> None:
    decoder = FakeDecoder(wrong_on=lambda config: config.gamma == 2)
    wrong = DRAFT.model_copy(update={"gamma": 2})
    assert not time_one(decoder, CASE, DRAFT).is_tie
    with pytest.raises(LosslessViolation) as violation:
        measure_pair(decoder, CASE, wrong, plain_first=True)
    assert violation.value.config == wrong
    _, fine, fault = time_able(decoder, CASE, [PLAIN, DRAFT, wrong])
    assert fine == time_one(decoder, CASE, DRAFT)
    assert getattr(fault, "lossless", True) is False


def test_a_wrong_output_too_short_to_time_is_a_violation_too() -> None:
    def cut(_ids: Sequence[int], config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
        return Decoded(out.ids[:1], DecodeStats(num_emitted=1)) if config.speculates else out

    with pytest.raises(LosslessViolation):
        measure_pair(FakeDecoder(then=cut), CASE, DRAFT, plain_first=True)


def test_an_output_without_a_second_token_has_no_rate() -> None:
    with pytest.raises(ValueError, match=r"prompt 'p': 1 tokens, 0\.0 s decoding: no rate"):
        time_one(FakeDecoder(then=one_token), PromptCase("p", (7, 1, 2), (3,)), PLAIN)


@pytest.mark.parametrize("turn", [0, 1, 2, 5])
def test_plain_decoding_is_the_reference_wherever_its_turn_is(turn: int) -> None:
    """Each way is decoded once, in turn; outputs are checked against plain decoding's, also those that came before."""
    wrong = DRAFT.model_copy(update={"gamma": 2})
    calls = Speculated()
    decoder = FakeDecoder(noise=0.0, wrong_on=lambda config: config == wrong, then=calls)
    seen = time_with_plain(decoder, SeededPrompt("p", (7, 1, 2), seed=4), [PLAIN, DRAFT, wrong], turn)
    assert seen is not None
    case, (plain, fast, fault) = seen
    assert calls == [([False, True, True] * 3)[place + turn % 3] for place in range(3)]
    assert case == PromptCase("p", (7, 1, 2), CASE.reference_ids, 4)
    assert not isinstance(plain, Fault)
    assert not isinstance(fast, Fault)
    assert fast.tokens_per_s / plain.tokens_per_s == pytest.approx(true_speedup(DRAFT))
    assert isinstance(fault, Fault)
    assert not fault.lossless


def test_a_prompt_without_a_second_token_is_left_out_and_plain_decoding_that_fails_stops_all() -> None:
    prompt = SeededPrompt("p", (7, 1, 2))
    assert time_with_plain(FakeDecoder(then=one_token), prompt, [PLAIN, DRAFT]) is None
    broken = FakeDecoder(break_on=lambda config: None if config.speculates else RuntimeError("no device"))
    with pytest.raises(RuntimeError, match="no device"):
        time_with_plain(broken, prompt, [PLAIN, DRAFT], turn=1)


def test_plain_decoding_that_does_not_repeat_itself_is_a_violation() -> None:
    outputs = iter([(1, 2, 3), (1, 2, 4)])
    decoder = FakeDecoder(then=lambda *_: Decoded(next(outputs), DecodeStats(num_emitted=3, decode_s=1.0)))
    with pytest.raises(LosslessViolation):
        time_with_plain(decoder, SeededPrompt("p", (7, 1, 2)), [PLAIN, PLAIN])
