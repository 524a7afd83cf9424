"""Pairs in lockstep and apart: each output checked, speeds over equal numbers of tokens, a tie or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from layerskip import DecodeConfig, DecodeStats, SkipMask
from search.measure.decoder import Decoded
from search.measure.pairs import (
    LosslessViolation,
    PromptCase,
    measure_pair,
    measure_pair_apart,
    time_all,
)
from tests.search.fakes import NUM_LAYERS, FakeDecoder, true_speedup

PLAIN = DecodeConfig.plain(NUM_LAYERS)
DRAFT = DecodeConfig(skip_mask=SkipMask.contiguous(NUM_LAYERS, 1, 4), gamma=4)


@dataclass
class WatchedDecoder(FakeDecoder):
    """Notes what was decoded together and what alone."""

    calls: list[tuple[str, tuple[bool, ...]]] = field(default_factory=list)

    def decode_in_lockstep(
        self, prompt_ids: Sequence[int], configs: Sequence[DecodeConfig], seed: int = 0
    ) -> list[Decoded]:
        self.calls.append(("lockstep", tuple(config.speculates for config in configs)))
        outs = super().decode_in_lockstep(prompt_ids, configs, seed)
        del self.calls[-len(outs) :]  # the fake decodes one after the other
        return outs

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        self.calls.append(("alone", (config.speculates,)))
        return super().decode(prompt_ids, config, seed)


def case_of(decoder: FakeDecoder) -> PromptCase:
    return PromptCase("p", (7, 1, 2), FakeDecoder.decode(decoder, (7, 1, 2), PLAIN).ids)


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_pair_is_decoded_in_lockstep(plain_first: bool) -> None:
    decoder = WatchedDecoder(noise=0.0)
    pair = measure_pair(decoder, case_of(decoder), DRAFT, plain_first=plain_first)
    assert decoder.calls == [("lockstep", (False, True) if plain_first else (True, False))]
    assert pair.ratio == pytest.approx(true_speedup(DRAFT))
    assert pair.speculative.stats.num_rounds > pair.plain.stats.num_rounds == 0


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_pair_apart_is_decoded_one_after_the_other(plain_first: bool) -> None:
    decoder = WatchedDecoder(noise=0.0)
    pair = measure_pair_apart(decoder, case_of(decoder), DRAFT, plain_first=plain_first)
    assert decoder.calls == [("alone", (not plain_first,)), ("alone", (plain_first,))]
    assert pair.ratio == pytest.approx(true_speedup(DRAFT))
    assert pair.speculative.stats.num_rounds > pair.plain.stats.num_rounds == 0


def test_a_tie_that_parts_the_outputs_keeps_the_lockstep() -> None:
    decoder = WatchedDecoder(noise=0.0, tie_on=lambda _config: True)
    pair = measure_pair(decoder, case_of(decoder), DRAFT, plain_first=True)
    assert decoder.calls == [("lockstep", (False, True))]
    assert (pair.plain.is_tie, pair.speculative.is_tie) == (False, True)
    assert pair.ratio == pytest.approx(true_speedup(DRAFT))


def test_texts_of_different_lengths_compare_over_equal_numbers_of_tokens() -> None:
    """A tie may end one text early; the later tokens of the other, at another price, are no part of the ratio."""

    class Uneven(WatchedDecoder):
        def decode_in_lockstep(
            self, prompt_ids: Sequence[int], configs: Sequence[DecodeConfig], seed: int = 0
        ) -> list[Decoded]:
            long = DecodeStats(num_emitted=5, decode_s=8.0, token_s=[1.0, 1.0, 3.0, 3.0])
            short = DecodeStats(num_emitted=3, decode_s=1.0, token_s=[0.5, 0.5])
            return [Decoded((1, 2, 3, 4, 5), long), Decoded((1, 2, 9), short)]

    decoder = Uneven(tie_on=lambda _config: True)
    pair = measure_pair(decoder, PromptCase("p", (7,), (1, 2, 3, 4, 5)), DRAFT, plain_first=True)
    assert pair.plain.tokens_per_s == pytest.approx(1.0)
    assert pair.ratio == pytest.approx(2.0)


def test_a_wrong_output_is_a_violation_of_the_config_that_made_it() -> None:
    decoder = WatchedDecoder(wrong_on=lambda config: config.gamma == 2)
    wrong = DRAFT.model_copy(update={"gamma": 2})
    assert len(time_all(decoder, case_of(decoder), [PLAIN, DRAFT])) == 2
    with pytest.raises(LosslessViolation) as violation:
        time_all(decoder, case_of(decoder), [PLAIN, DRAFT, wrong])
    assert violation.value.config == wrong


def test_a_wrong_output_too_short_to_time_is_a_violation_too() -> None:
    class Cut(WatchedDecoder):
        def decode_in_lockstep(
            self, prompt_ids: Sequence[int], configs: Sequence[DecodeConfig], seed: int = 0
        ) -> list[Decoded]:
            plain, draft = super().decode_in_lockstep(prompt_ids, configs, seed)
            return [plain, Decoded(draft.ids[:1], DecodeStats(num_emitted=1))]

    with pytest.raises(LosslessViolation):
        measure_pair(Cut(), case_of(Cut()), DRAFT, plain_first=True)
