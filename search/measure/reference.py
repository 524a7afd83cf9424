"""Reference: the target's own continuations of the prompts, its plain speed, and the noise of a paired ratio."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from layerskip.analysis.intervals import geometric_mean, log_spread
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.measure.decoder import Decoder
from search.measure.pairs import PromptCase, SeededPrompt, Timed, measure_pair, time_one, time_with_plain
from search.progress import Tell, nobody
from search.study.prompts import EncodedPrompt, continuation_seed
from search.study.stored import Stored

LOG = logging.getLogger(__name__)
MIN_PROMPTS_PER_TRIAL = 4
MAX_PROMPTS_PER_TRIAL = 16
MIN_NOISE_PAIRS = 12
_NUM_TO_ESTIMATE = 3
MAX_TRIALS_APART = 8
"""So many trials of one config see different texts, if there are enough; then they repeat."""
MAX_CONTINUATIONS = 8
"""Of a prompt, where tokens are sampled: each is another text. Two prompts suffice for a search."""


@dataclass(frozen=True)
class ReferenceOptions:
    """How many prompts a trial gets, and in which order."""

    num_layers: int
    seed: int
    trial_seconds: float
    prompts_per_trial: int | None
    is_sampled: bool = False
    """Whether a prompt can be continued in more than one way."""
    max_texts: int | None = None
    """Tuning prompts, each with a continuation, at most; None = enough for eight trials."""
    num_noise_pairs: int = MIN_NOISE_PAIRS
    """Plain against plain: at least."""


@dataclass(frozen=True)
class Reference(Stored):
    """The tuning prompts in their fixed order, with what plain decoding does on them. Where tokens are sampled a prompt
    may come again with another continuation, after all prompts have come once."""

    cases: tuple[PromptCase, ...]
    num_per_trial: int
    """Prompts of a full trial: a config's first trial uses the first ones, its second the next ones, and so on."""
    plain_tokens_per_s: float
    """Geometric mean over the first trial's prompts of the median plain speed: the study's unit of speed."""
    noise_sigma: float
    """Standard deviation of the log of a plain/plain ratio: what a paired ratio owes to the clock alone."""
    pair_s: float
    """Seconds of a plain/plain pair, the forward over the prompt, made once, included."""
    dropped: tuple[str, ...]
    """Prompts whose continuation ends before its second token: nothing to time."""

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return max(len(case.reference_ids) for case in self.cases)

    @property
    def trial_s(self) -> float:
        """Seconds of a full trial, at the cost of plain pairs."""
        return self.num_per_trial * self.pair_s

    def steps(self, num_earlier_trials: int) -> tuple[int, ...]:
        """Places of the prompts of a config's next full trial, given how many it had. Goes round at the end."""
        start = num_earlier_trials * self.num_per_trial
        return tuple((start + i) % len(self.cases) for i in range(self.num_per_trial))


def make_reference(
    decoder: Decoder, prompts: Sequence[EncodedPrompt], options: ReferenceOptions, tell: Tell = nobody
) -> Reference:
    """Warm up and decode the tuning prompts plainly until eight trials have enough of them, the first ones twice in a
    row: plain against plain.

    The order of prompts is a shuffle from the seed. Sampled prompts are continued anew, from other seeds, while there
    are not enough. Cost: a plain decoding of every prompt used, and one more without its prompt for each noise pair.
    Raises: ValueError if no prompt can be timed; LosslessViolation if plain decoding does not repeat itself.
    """
    plain = DecodeConfig.plain(options.num_layers)
    shuffled = [prompts[i] for i in np.random.default_rng(options.seed).permutation(len(prompts))]
    warm_up(decoder, shuffled[0].ids, options.num_layers)
    decoder = decoder.remembering()
    cases: list[PromptCase] = []
    dropped: dict[str, None] = {}
    seconds: list[float] = []
    rates: list[list[float]] = []
    ratios: list[float] = []
    per_trial = options.prompts_per_trial or MAX_PROMPTS_PER_TRIAL
    numbers = range(MAX_CONTINUATIONS if options.is_sampled else 1)

    def wanted() -> int:
        return min(MAX_TRIALS_APART * per_trial, options.max_texts or len(numbers) * len(shuffled))

    for number, prompt in itertools.product(numbers, shuffled):
        if len(cases) >= wanted():
            break
        twice = len(ratios) < options.num_noise_pairs
        seen = time_with_plain(decoder, _seeded(prompt, options.seed, number), [plain] * (1 + twice))
        tell(len(cases) + 1, min(wanted(), len(numbers) * len(shuffled)))
        if seen is None:
            dropped[_too_short(prompt)] = None
            continue
        cases.append(seen[0])
        timed = [one for one in seen[1] if isinstance(one, Timed)]
        rates.append([one.tokens_per_s for one in timed])
        seconds.append(timed[0].stats.prefill_s + 2 * timed[0].stats.decode_s)
        ratios += [rates[-1][0] / rates[-1][1]] if twice else []
        if options.prompts_per_trial is None and len(cases) == _NUM_TO_ESTIMATE:
            per_trial = prompts_for(options.trial_seconds, float(np.mean(seconds)))
    if not cases:
        raise ValueError("prompts: the model ends the text before a second token on every tuning prompt")
    for i in itertools.islice(itertools.cycle(range(len(cases))), max(0, options.num_noise_pairs - len(ratios))):
        pair = measure_pair(decoder, cases[i], plain, plain_first=True)
        rates[i] += [pair.plain.tokens_per_s, pair.speculative.tokens_per_s]
        ratios.append(pair.ratio)
    per_trial = min(per_trial, len(cases))
    return Reference(
        cases=tuple(cases),
        num_per_trial=per_trial,
        plain_tokens_per_s=geometric_mean([median(values) for values in rates[:per_trial]]),
        noise_sigma=log_spread(ratios),
        pair_s=float(np.mean(seconds)),
        dropped=tuple(dropped),
    )


@dataclass(frozen=True)
class Continuing:
    """Which continuations of prompts are made."""

    num_layers: int
    """Of the model."""
    seed: int = 0
    """The study's; of sampled text."""
    number: int = 0
    """Of sampled text: the how manieth continuation of each prompt."""


def make_cases(
    decoder: Decoder, prompts: Sequence[EncodedPrompt], which: Continuing, tell: Tell = nobody
) -> tuple[tuple[PromptCase, ...], tuple[str, ...]]:
    """The target's continuation of every prompt, and the ids of those too short to time.

    Cost: a plain decoding each.
    """
    plain = DecodeConfig.plain(which.num_layers)
    cases: list[PromptCase] = []
    dropped: list[str] = []
    for place, prompt in enumerate(prompts):
        seen = time_with_plain(decoder, _seeded(prompt, which.seed, which.number), [plain])
        tell(place + 1, len(prompts))
        if seen is None:
            dropped.append(_too_short(prompt))
        else:
            cases.append(seen[0])
    return tuple(cases), tuple(dropped)


def _seeded(prompt: EncodedPrompt, seed: int, number: int) -> SeededPrompt:
    return SeededPrompt(prompt.prompt_id, prompt.ids, continuation_seed(seed, prompt.ids, number))


def _too_short(prompt: EncodedPrompt) -> str:
    LOG.warning("prompt %r: its continuation ends before a second token, left out", prompt.prompt_id)
    return prompt.prompt_id


def warm_up(decoder: Decoder, prompt_ids: Sequence[int], num_layers: int) -> None:
    """Decode one prompt both ways, untimed: allocators, caches and kernels settle."""
    decoder.decode(prompt_ids, DecodeConfig.plain(num_layers))
    decoder.decode(prompt_ids, DecodeConfig(skip_mask=SkipMask.none(num_layers), gamma=1))


def plain_speed(decoder: Decoder, reference: Reference, num_layers: int) -> float:
    """Plain tokens/s right now on the first trial's prompts, to compare with the stored one. Raises as `time_one`."""
    plain = DecodeConfig.plain(num_layers)
    cases = reference.cases[: reference.num_per_trial]
    return geometric_mean([time_one(decoder, case, plain).tokens_per_s for case in cases])


def prompts_for(trial_seconds: float, pair_s: float) -> int:
    """How many prompts fit a trial's time, at the cost of plain pairs; at least 4, at most 16."""
    fitting = int(trial_seconds / pair_s) if pair_s > 0 else MAX_PROMPTS_PER_TRIAL
    return min(max(fitting, MIN_PROMPTS_PER_TRIAL), MAX_PROMPTS_PER_TRIAL)
