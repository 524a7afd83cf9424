"""What the confirm stage saw of every held-out prompt, and what decoding did there: compact, for a study to keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from layerskip.analysis.intervals import geometric_mean
from layerskip.config.decode_config import DecodeConfig
from search.measure.by_position import SecondsByPosition, seconds_by_position
from search.measure.pairs import Pair, add_up
from search.study.stored import Stored

_DIGITS = 6
"""Significant ones of what is stored."""


@dataclass(frozen=True)
class Counters:
    """Forwards and seconds of many decodings under one config, added up, with plain decoding of the same texts."""

    num_tokens: int
    """Timed ones: without the first token of each text, which comes from the prefill."""
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_target_only: int
    accepted_by_position: tuple[int, ...]
    drafted_by_position: tuple[int, ...]
    draft_s: float
    verify_s: float
    target_only_s: float
    decode_s: float
    """All of it, the loop around the forwards included."""
    plain_decode_s: float


@dataclass(frozen=True)
class HeldOut(Stored):
    """The fresh passes of the chosen config, whether it was exported in the end or not."""

    config: DecodeConfig
    """Bare, see `DecodeConfig.bare`."""
    prompt_ids: tuple[str, ...]
    tokens_per_s: tuple[tuple[float, ...], ...]
    """Per prompt, every pass."""
    plain_tokens_per_s: tuple[tuple[float, ...], ...]
    counters: Counters
    end_to_end_tokens_per_s: tuple[tuple[float, ...], ...]
    """As the next, with the prompt's own forward in the seconds."""
    plain_end_to_end_tokens_per_s: tuple[tuple[float, ...], ...]
    texts_differ: bool = False
    """Whether each pass continued the prompts anew, as sampled text is."""
    by_position: SecondsByPosition | None = None
    """None where no text was long enough."""

    @property
    def rates(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        """All of them, by name."""
        return {name: getattr(self, name) for name in _RATES}

    @property
    def typical(self) -> dict[str, list[float]]:
        """The same per prompt, see `typical_rate`."""
        differ = self.texts_differ
        return {name: [typical_rate(one, texts_differ=differ) for one in rates] for name, rates in self.rates.items()}

    @property
    def average(self) -> str:
        """What a typical rate is."""
        return "geometric mean" if self.texts_differ else "median"

    def to_json(self) -> str:
        """One line, for a study's attributes, its numbers rounded."""
        data = asdict(self) | {"config": self.config.model_dump(mode="json", exclude_none=True)}
        return json.dumps(_short(data), separators=(",", ":"))


def typical_rate(rates: Sequence[float], *, texts_differ: bool) -> float:
    """Of one prompt's passes: the median, which a moment of the clock does not move; where each pass had a text of its
    own, which differ by more than moments, the geometric mean."""
    return geometric_mean(rates) if texts_differ else median(rates)


def held_out_of(passes: Sequence[Sequence[Pair]], config: DecodeConfig, *, texts_differ: bool = False) -> HeldOut:
    """From fresh passes, each holding one pair per prompt in the same order."""
    by_prompt = list(zip(*passes, strict=True))
    every = [pair for pairs in by_prompt for pair in pairs]
    return HeldOut(
        config=config.bare(),
        prompt_ids=tuple(pairs[0].prompt_id for pairs in by_prompt),
        tokens_per_s=tuple(tuple(pair.speculative.tokens_per_s for pair in pairs) for pairs in by_prompt),
        plain_tokens_per_s=tuple(tuple(pair.plain.tokens_per_s for pair in pairs) for pairs in by_prompt),
        counters=_counters(every),
        end_to_end_tokens_per_s=tuple(
            tuple(pair.speculative.end_to_end_tokens_per_s for pair in pairs) for pairs in by_prompt
        ),
        plain_end_to_end_tokens_per_s=tuple(
            tuple(pair.plain.end_to_end_tokens_per_s for pair in pairs) for pairs in by_prompt
        ),
        texts_differ=texts_differ,
        by_position=seconds_by_position(every),
    )


_RATES = ("tokens_per_s", "plain_tokens_per_s", "end_to_end_tokens_per_s", "plain_end_to_end_tokens_per_s")


def _counters(pairs: Sequence[Pair]) -> Counters:
    total = add_up([pair.speculative.stats for pair in pairs])
    return Counters(
        num_tokens=sum(max(0, pair.speculative.stats.num_emitted - 1) for pair in pairs),
        num_rounds=total.num_rounds,
        num_drafted=total.num_drafted,
        num_accepted=total.num_accepted,
        num_target_only=total.num_target_only,
        accepted_by_position=tuple(total.accepted_by_position),
        drafted_by_position=tuple(total.drafted_by_position),
        draft_s=total.draft_s,
        verify_s=total.verify_s,
        target_only_s=total.target_only_s,
        decode_s=total.decode_s,
        plain_decode_s=sum(pair.plain.stats.decode_s for pair in pairs),
    )


def _short(value: Any) -> Any:
    """Floats at a few significant digits: a row of a storage is small."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return value
