"""Paired measurement: plain and speculative decoding of a prompt, one after the other, outputs checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import TypeVar

from layerskip.analysis.intervals import geometric_mean
from layerskip.analysis.teacher_forcing import ForcedText
from layerskip.config.decode_config import DecodeConfig
from layerskip.decoding.stats import DecodeStats
from layerskip.machine.host import no_garbage_collection
from search.measure.decoder import Decoded, Decoder

Number = TypeVar("Number", int, float)
Result = TypeVar("Result")


@dataclass(frozen=True)
class PromptCase:
    """One prompt as token ids with the target's own continuation."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]
    seed: int = 0
    """What a sampled continuation is drawn from."""

    @property
    def text(self) -> ForcedText:
        """Prompt and continuation."""
        return ForcedText(self.prompt_ids, self.reference_ids, self.seed)


@dataclass(frozen=True)
class SeededPrompt:
    """One prompt as token ids, whose continuation is still to be made."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    seed: int = 0
    """What a sampled continuation is drawn from."""

    def case(self, reference_ids: tuple[int, ...]) -> PromptCase:
        """With its continuation."""
        return PromptCase(self.prompt_id, self.prompt_ids, reference_ids, self.seed)


class LosslessViolation(Exception):  # noqa: N818 (it is the event, whoever is to blame)
    """An output differs from the target's own: a bug, never a low score."""

    def __init__(self, prompt_id: str, config: DecodeConfig, position: int | None, gap: float | None) -> None:
        where = "" if position is None else f" from token {position} on"
        logits = "" if gap is None else f" (the target's logits differ by {gap:.4g})"
        super().__init__(f"prompt {prompt_id!r}: output differs from the target's{where}{logits}")
        self.prompt_id = prompt_id
        self.config = config


@dataclass(frozen=True)
class Timed:
    """One checked decoding of one prompt."""

    tokens_per_s: float
    """Prompt apart."""
    end_to_end_tokens_per_s: float
    """The same with the prompt's own forward in the seconds."""
    is_tie: bool
    stats: DecodeStats


@dataclass(frozen=True)
class Pair:
    """Plain and speculative decoding of one prompt."""

    prompt_id: str
    plain: Timed
    speculative: Timed

    @property
    def ratio(self) -> float:
        """Speculative tokens/s over plain tokens/s."""
        return self.speculative.tokens_per_s / self.plain.tokens_per_s


@dataclass(frozen=True)
class Fault:
    """Why a config has no numbers."""

    reason: str
    lossless: bool = True
    """False: its output differs from the target's own."""


def time_one(decoder: Decoder, case: PromptCase, config: DecodeConfig) -> Timed:
    """Decode one prompt with garbage collection off, and check the output against the reference.

    Raises: LosslessViolation if the output is neither identical nor a logit tie; ValueError if nothing could be timed.
    """
    return _checked(decoder, case, config, _decode(decoder, case, config))


def time_with_plain(
    decoder: Decoder, prompt: SeededPrompt, configs: Sequence[DecodeConfig], turn: int = 0
) -> tuple[PromptCase, list[Timed | Fault]] | None:
    """Plain decoding, the first of the configs, and others of one prompt, one after the other as a user runs them.

    What plain decoding says is the reference that the others are checked against; those that fail become faults. None
    where plain decoding ends before a second token: nothing to time.
    turn: which of them begins, the others follow in their order; the caller's to change from prompt to prompt.
    Raises: what plain decoding raises, for then there is nothing to compare with.
    """
    found: dict[int, Decoded | Fault] = {}
    for i in ((place + turn) % len(configs) for place in range(len(configs))):
        found[i] = _decoded_or_fault(decoder, prompt, configs[i])
    plain = found[0]
    assert not isinstance(plain, Fault)
    if len(plain.ids) < 2:
        return None
    case = prompt.case(plain.ids)
    return case, [_checked_or_fault(decoder, case, config, found[i]) for i, config in enumerate(configs)]


def measure_pair(decoder: Decoder, case: PromptCase, config: DecodeConfig, *, plain_first: bool) -> Pair:
    """Both ways to decode one prompt, one after the other, as a user runs them.

    Which goes first is the caller's to flip. Raises as `time_one`.
    """
    plain = _plain(config.skip_mask.num_layers)
    order = [plain, config] if plain_first else [config, plain]
    timed = [time_one(decoder, case, one) for one in order]
    return Pair(case.prompt_id, *(timed if plain_first else reversed(timed)))


@lru_cache(maxsize=8)
def _plain(num_layers: int) -> DecodeConfig:
    return DecodeConfig.plain(num_layers)


def time_able(decoder: Decoder, case: PromptCase, configs: Sequence[DecodeConfig]) -> list[Timed | Fault]:
    """Several ways to decode one prompt, one after the other as a user runs them; those that fail become faults.

    Raises: what plain decoding among them raises, for then there is nothing to compare with.
    """
    return [_checked_or_fault(decoder, case, one, _decoded_or_fault(decoder, case, one)) for one in configs]


def fault_of(error: Exception) -> Fault:
    """The error in one line."""
    line = " ".join(str(error).split())[:300]
    if isinstance(error, LosslessViolation):
        return Fault(f"not lossless: {line}", lossless=False)
    return Fault(f"{type(error).__name__}: {line}")


def speedup(pairs: Sequence[Pair]) -> float:
    """Geometric mean of the per-prompt ratios."""
    return geometric_mean([pair.ratio for pair in pairs])


def add_up(stats: Sequence[DecodeStats]) -> DecodeStats:
    """Several runs as one: all counters and seconds added up, so its rates are totals over totals."""
    total, counters = DecodeStats(), [vars(one) for one in stats]
    for name, none in vars(total).items():
        values = [one[name] for one in counters]
        setattr(total, name, add_lists(values) if isinstance(none, list) else sum(values))
    return total


def add_lists(lists: Sequence[Sequence[Number]]) -> list[Number]:
    """Place by place, as far as the longest goes."""
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _decode(decoder: Decoder, prompt: SeededPrompt | PromptCase, config: DecodeConfig) -> Decoded:
    with no_garbage_collection():
        return decoder.decode(prompt.prompt_ids, config, prompt.seed)


def _checked(decoder: Decoder, case: PromptCase, config: DecodeConfig, out: Decoded) -> Timed:
    """Raises: as `time_one`."""
    identity = decoder.check(case.prompt_ids, out.ids, case.reference_ids, case.seed)
    if not identity.lossless:
        raise LosslessViolation(case.prompt_id, config, identity.first_difference, identity.logit_gap)
    rate, end_to_end = out.stats.tokens_per_s, out.stats.end_to_end_tokens_per_s
    if rate is None or end_to_end is None:
        num_tokens, seconds = out.stats.num_emitted, out.stats.decode_s
        raise ValueError(f"prompt {case.prompt_id!r}: {num_tokens} tokens, {seconds} s decoding: no rate")
    return Timed(rate, end_to_end, identity.is_tie, out.stats)


def _decoded_or_fault(decoder: Decoder, prompt: SeededPrompt | PromptCase, config: DecodeConfig) -> Decoded | Fault:
    return _or_fault(decoder, config, lambda: _decode(decoder, prompt, config))


def _checked_or_fault(decoder: Decoder, case: PromptCase, config: DecodeConfig, out: Decoded | Fault) -> Timed | Fault:
    return out if isinstance(out, Fault) else _or_fault(decoder, config, lambda: _checked(decoder, case, config, out))


def _or_fault(decoder: Decoder, config: DecodeConfig, step: Callable[[], Result]) -> Result | Fault:
    try:
        return step()
    except Exception as error:
        if not config.speculates:
            raise
        fault = fault_of(error)
    decoder.free_memory()  # outside the except block: there the traceback would keep the tensors alive
    return fault
