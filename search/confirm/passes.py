"""The passes over held-out prompts: one that chooses among candidates, and fresh ones of the chosen config.

Each prompt is decoded plainly and under the others, one after the other as a user runs them. What plain decoding says
is what the others are checked against, so no prompt is decoded but to be timed. Where tokens are sampled each pass
continues the prompts anew, from other seeds.
The pass that chooses is a race (Maron and Moore 1994): from the eighth prompt on a candidate that is surely slower than
the leading one, by more than a tie, drops out (one-sided paired t interval of 99 %), and the pass ends once one is
left; or, where a run ends once it is settled, once going on is expected to win no more than that (`expected_loss`).
What this costs and saves on the candidates of the committed studies: `python -m studies.proving.choosing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy import special

from layerskip.analysis.intervals import geometric_mean
from layerskip.config.decode_config import DecodeConfig
from search.measure.decoder import Decoder
from search.measure.pairs import Fault, Pair, PromptCase, SeededPrompt, Timed, time_with_plain
from search.progress import Tell
from search.study.config_words import describe
from search.study.leaderboard import Entry
from search.study.prompts import EncodedPrompt, continuation_seed

TIE = 0.01
RACE_FROM = 8
"""Prompts that all candidates see before the first may drop out."""
RACE_LEVEL = 0.99
_NUM_RESAMPLES = 1000

Fresh = list[list[tuple[PromptCase, Pair]]]
"""By pass, by prompt."""


@dataclass(frozen=True)
class ConfirmOptions:
    """How much to measure."""

    num_layers: int
    repeats: int
    seed: int
    is_sampled: bool = False
    """Whether a prompt can be continued in more than one way."""
    settled_at: float | None = None
    """The choosing pass ends once the leading candidate is expected to be slower than the best by no more than this
    share."""


@dataclass(frozen=True)
class HeldOutPrompts:
    """Prompts that no trial saw."""

    reporting: Sequence[EncodedPrompt]
    choosing: Sequence[EncodedPrompt] = ()
    """Others, that choose among the candidates; without any those that report choose as well."""


@dataclass(frozen=True)
class Candidate:
    """A leading config and what the choosing pass saw of it."""

    entry: Entry
    ratios: tuple[float, ...]
    """Per held-out prompt that it saw, the first ones; empty if it was excluded."""
    excluded: str | None = None
    """Why it cannot win."""
    lossless: bool = True

    handicap: float = 1.0
    """What the prompts that it did not see made of the leading one's speedup; 1 for who was in the race to its end."""

    @property
    def speedup(self) -> float | None:
        """Geometric mean of the choosing pass, as on all of its prompts."""
        return geometric_mean(self.ratios) * self.handicap if self.ratios else None

    def failed(self, fault: Fault) -> Candidate:
        """The same excluded."""
        return Candidate(self.entry, (), fault.reason, fault.lossless)


@dataclass
class Passes:
    """The passes of one confirm stage."""

    decoder: Decoder
    prompts: HeldOutPrompts
    options: ConfirmOptions
    _too_short: dict[str, None] = field(default_factory=dict)

    @property
    def too_short(self) -> tuple[str, ...]:
        """Ids of the prompts so far whose continuation has nothing to time; they are left out."""
        return tuple(self._too_short)

    @property
    def texts_differ(self) -> bool:
        """Whether each fresh pass continues the prompts anew."""
        return self.options.is_sampled and self.options.repeats > 1

    def choosing(self, entries: Sequence[Entry], tell: Callable[[str], None], progress: Tell) -> tuple[Candidate, ...]:
        """What the prompts that choose say of every entry. Raises: what plain decoding raises.

        Of each prompt the forward over it is made once: only what follows it is timed here.
        """
        decoder = self.decoder.remembering()
        configs = [self._plain, *(entry.config for entry in entries)]
        rates: list[list[float]] = [[] for _ in configs]
        faults: dict[int, Fault] = {}
        racing = list(range(1, len(configs)))
        prompts = self.prompts.choosing or self.prompts.reporting
        for row, prompt in enumerate(prompts):
            able = [0, *racing]
            seen = self._time(decoder, prompt, 0, [configs[i] for i in able], row)
            progress(row + 1, len(prompts))
            if seen is None:
                continue
            for i, one in zip(able, seen[1], strict=True):
                if isinstance(one, Fault):
                    faults[i] = one
                    racing.remove(i)
                    tell(f"EXCLUDED {describe(configs[i])}: {one.reason}")
                else:
                    rates[i].append(one.tokens_per_s)
            if len(rates[0]) >= RACE_FROM and racing:
                racing = still_racing({i: rates[i] for i in racing})
                if len(racing) == 1 or self._is_settled([rates[i] for i in racing]):
                    progress(len(prompts), len(prompts))
                    tell(f"settled after {row + 1} of {len(prompts)} prompts, {len(racing)} of {len(entries)} left")
                    break
        ratios = [ratios_of(one, rates[0][: len(one)]) for one in rates]
        best = max((ratios[i] for i in racing if ratios[i]), key=geometric_mean, default=())
        found = [
            Candidate(entry, ratios[i], handicap=_handicap(best, len(ratios[i])))
            for i, entry in enumerate(entries, start=1)
        ]
        return tuple(one.failed(faults[i]) if i in faults else one for i, one in enumerate(found, start=1))

    def fresh(self, config: DecodeConfig, progress: Tell) -> Fresh | Fault:
        """Pairs of plain decoding and this config on the prompts that report, all of them in each pass; or why there
        are none. A prompt too short to time in any pass is left out of all."""
        reporting, repeats = self.prompts.reporting, self.options.repeats
        passes: Fresh = [[] for _ in range(repeats)]
        for repeat, pairs in enumerate(passes):
            number = repeat + (not self.prompts.choosing) if self.options.is_sampled else 0
            for row, prompt in enumerate(reporting):
                seen = self._time(self.decoder, prompt, number, [self._plain, config], row + repeat)
                progress(repeat * len(reporting) + row + 1, repeats * len(reporting))
                if seen is None:
                    continue
                case, (plain, fast) = seen
                if isinstance(fast, Fault):
                    return fast
                assert isinstance(plain, Timed)
                pairs.append((case, Pair(case.prompt_id, plain, fast)))
        return [[one for one in pairs if one[0].prompt_id not in self._too_short] for pairs in passes]

    def _is_settled(self, rates: Sequence[Sequence[float]]) -> bool:
        settled_at = self.options.settled_at
        return settled_at is not None and expected_loss(rates, self.options.seed) <= settled_at

    @cached_property
    def _plain(self) -> DecodeConfig:
        return DecodeConfig.plain(self.options.num_layers)

    def _time(
        self, decoder: Decoder, prompt: EncodedPrompt, number: int, configs: Sequence[DecodeConfig], turn: int
    ) -> tuple[PromptCase, list[Timed | Fault]] | None:
        """See `time_with_plain`. number: the how manieth continuation of the prompt, where tokens are sampled."""
        seeded = SeededPrompt(prompt.prompt_id, prompt.ids, continuation_seed(self.options.seed, prompt.ids, number))
        seen = time_with_plain(decoder, seeded, configs, turn)
        if seen is None:
            self._too_short[prompt.prompt_id] = None
        return seen


def still_racing(rates: Mapping[int, Sequence[float]]) -> list[int]:
    """Of ways to decode the same prompts, by number, the leading one and all that are not surely slower."""
    leading = max(rates.values(), key=geometric_mean)
    return [i for i, one in rates.items() if one is leading or not is_surely_slower(one, leading)]


def expected_loss(rates: Sequence[Sequence[float]], seed: int = 0) -> float:
    """The share by which the leading one of these is expected to be slower than the best of them, were all prompts
    seen: the bootstrap's mean, over the prompts, of the best mean log rate less the leading one's.

    Ref: expected opportunity cost, Chick and Inoue 2001.
    """
    differences = np.log(rates) - np.log(max(rates, key=geometric_mean))
    count = differences.shape[1]
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=_NUM_RESAMPLES) / count
    means = differences.mean(axis=1)
    # The bootstrap's spread is too small by this root.
    resampled = means + (drawn @ differences.T - means) * math.sqrt(count / (count - 1))
    return float(resampled.max(axis=1).mean())


def is_surely_slower(ratios: Sequence[float], leading: Sequence[float]) -> bool:
    """Whether a way to decode is slower than the leading one on the same prompts by more than a tie, by a one-sided
    interval of their log ratios at `RACE_LEVEL`."""
    differences = np.log(ratios) - np.log(leading)
    spread = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    # Student's quantile; `stats.t.ppf` takes a hundred times as long.
    return float(differences.mean()) + float(special.stdtrit(len(differences) - 1, RACE_LEVEL)) * spread < -TIE


def ratios_of(rates: Sequence[float], plain: Sequence[float]) -> tuple[float, ...]:
    """Prompt by prompt."""
    return tuple(one / other for one, other in zip(rates, plain, strict=True))


def _handicap(best: Sequence[float], num_seen: int) -> float:
    return geometric_mean(best) / geometric_mean(best[:num_seen]) if best and num_seen else 1.0
