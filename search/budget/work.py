"""Work: what a run is to measure and how long that takes, at the pace of a few timed steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from layerskip.config.lossy_acceptance import LADDER
from search.budget.pace import Pace
from search.measure.batches import MOST_TEXTS, SIZES
from search.measure.reference import MAX_CONTINUATIONS, MAX_TRIALS_APART, MIN_NOISE_PAIRS, Reference, prompts_for
from search.measure.subject import MOST_RANKED, Subject
from search.predict.costs import NUM_REPEATS, num_further
from search.study.prompts import split_held_out
from search.study.spec import StudySpec

PHASES = ("reference", "outlook", "search", "confirm")
COST_REPEATS = (NUM_REPEATS, 7, 5, 3, 2, 1)
"""Of measuring the costs: the most that there is time for."""
GOOD_NUMBER = 20
"""Of trials: where there is time for fewer, trials have fewer prompts."""
TRIAL_OVERHEAD = 1.2
"""A trial in seconds of its pairs: with proposing and predicting it."""
_PROMPT_SHARES, _TOKEN_SHARES = (0.7, 0.5, 0.35, 0.25, 0.1), (0.75, 0.5, 0.375, 0.25)
_FEW, _LEAST = 8, 4
"""Prompts of each kind: above the first number they are what is cut first, below it what is cut last."""
_FEW_TOKENS = 16
_DRAFT_STEPS, _DRAFT_SHARE, _STEPS_BEFORE = 40, 0.55, 20
"""Draft tokens that one repeat of measuring the costs times, what one takes in target steps, and how many of these come
before drafts, untimed."""
_FURTHER_STEPS = 2
"""What each further mask takes in target steps: four draft tokens of fewer bits or ids, and what comes before them."""
NUM_TIMED_TEXTS = 3
"""After which steps are timed."""
_LOOKUP_COUNTS = (13, 17, 25)
MIN_OPENING_S, OPENING_SHARE = 10.0, 0.05
"""What predicting before the first trial may take where no budget says so: about this share of what all trials may."""
SENSITIVITY_SHARE, POOL_SHARE, MORE_SHARE, REFINE_SHARE, WEIGHTS_SHARE = 0.5, 0.4, 0.4, 0.15, 0.4
"""Of that: each sublayer left out and left in, the pool, more texts, the best of the pool on all of them, and what is
drafted by trained weights, where there are any."""
READINGS_A_BIT = 1.4
"""What a sublayer's two readings cost at most, in readings of the whole model: one of them runs few sublayers."""
_LEAST_READINGS, _TEXTS_READ, _POOL_READINGS = 12, 4, 400


@dataclass(frozen=True)
class Amounts:
    """How much a run measures."""

    prompts_per_trial: int
    num_texts: int
    """Of the reference: tuning prompts with a continuation."""
    num_held_out: int
    """Held-out prompts that report."""
    num_choosing: int
    """Other held-out prompts, that choose among the candidates; 0 = those that report choose as well."""
    max_new_tokens: int
    num_noise_pairs: int
    """Plain against plain, for the noise: at least."""
    confirm_repeats: int
    num_candidates: int
    """Configs in the confirm stage, the best of each drafter included."""

    def with_prompts(self, share: float, least: int) -> Amounts:
        """A share of all prompts, at least so many of each kind as far as there are as many."""

        def cut(count: int) -> int:
            return min(count, max(least, round(share * count)))

        return replace(
            self,
            prompts_per_trial=min(self.prompts_per_trial, max(_LEAST, round(share * self.prompts_per_trial))),
            num_texts=cut(self.num_texts),
            num_held_out=cut(self.num_held_out),
            num_choosing=cut(self.num_choosing),
        )

    def cuts_from(self, asked: Amounts) -> list[str]:
        """What there is less of than was asked for, in words."""
        pairs = [(words, getattr(self, name), getattr(asked, name)) for name, words in _WORDS.items()]
        return [f"{now} of {before} {words}" for words, now, before in pairs if now < before]


_WORDS = {
    "prompts_per_trial": "prompts a trial",
    "num_texts": "tuning texts",
    "num_held_out": "held-out prompts",
    "num_choosing": "held-out prompts that choose",
    "max_new_tokens": "new tokens",
    "num_noise_pairs": "noise pairs",
    "confirm_repeats": "fresh passes",
    "num_candidates": "candidates",
}


@dataclass(frozen=True)
class Work:
    """What is to be done: the spec's numbers and the subject's."""

    trials: int
    """That are not measured yet."""
    timeout_s: float | None
    trial_seconds: float
    prompts_per_trial: int | None
    gamma_max: int
    num_bits: int
    num_texts: int
    """Tuning prompts, times the ways to continue each."""
    held_out: tuple[int, int]
    """Held-out prompts that report, and others that choose."""
    max_new_tokens: int
    confirm_repeats: int
    num_candidates: int
    gamma_is_fixed: bool = True
    """Whether there must be room for it; else it is lowered to what there is."""
    tokens_are_fixed: bool = False
    """By what the study has measured already, or is about to."""
    over: frozenset[str] = frozenset()
    """Phases that this run has behind it."""
    kept: frozenset[str] = frozenset()
    """Phases whose results the study keeps: they are read, which takes little."""
    num_further: int = 0
    """Masks whose draft steps are timed, see `search.predict.costs.num_further`."""
    uses_weights: bool = False
    """Whether trained weights draft, too."""
    num_ranked: int = 0
    """Texts on which token ids are ranked, where drafts may choose among few."""
    num_in_batches: int = 0
    """Prompts that are decoded at once, see `search.measure.batches`."""
    num_lossy: int = 0
    """Lossy rules that are measured on the winner, with plain decoding and the winner beside them."""

    @classmethod
    def of(cls, spec: StudySpec, subject: Subject, num_done: int = 0, kept: frozenset[str] = frozenset()) -> Work:
        """A study's, of which so many trials are done."""
        choosing, reporting = split_held_out(subject.held_out, spec.num_confirm_prompts)
        return cls(
            trials=max(0, spec.trials - num_done),
            timeout_s=spec.timeout_s,
            trial_seconds=spec.trial_seconds,
            prompts_per_trial=spec.prompts_per_trial,
            gamma_max=subject.space.gamma_max,
            gamma_is_fixed=spec.gamma_max is not None,
            num_bits=len(subject.space.bit_names),
            num_texts=len(subject.tuning) * (MAX_CONTINUATIONS if subject.sampling.do_sample else 1),
            held_out=(len(reporting), len(choosing)),
            max_new_tokens=spec.max_new_tokens,
            confirm_repeats=spec.confirm_repeats,
            num_candidates=spec.num_confirm_candidates + len(subject.space.drafters) - 1,
            kept=kept,
            num_further=num_further(subject.space),
            uses_weights=subject.space.uses_weights,
            num_ranked=MOST_RANKED if subject.ranks_ids else 0,
            num_in_batches=0 if subject.decoder.batch_refusal else min(MOST_TEXTS, len(subject.tuning)),
            num_lossy=len(LADDER) if spec.allow_lossy else 0,
        )

    def after(self, *phases: str) -> Work:
        """The same with these phases behind it."""
        return replace(self, over=self.over | set(phases))

    def on(self, reference: Reference) -> Work:
        """The same with the prompts of a reference that was made."""
        return replace(
            self,
            num_texts=len(reference.cases),
            prompts_per_trial=reference.num_per_trial,
            tokens_are_fixed=True,
        )

    @property
    def is_begun(self) -> bool:
        """Whether there is a reference, whose texts stay as they are."""
        return "reference" in self.over | self.kept

    def amounts(self, pace: Pace, trial_seconds: float | None = None) -> Amounts:
        """All that the spec asks for; `trial_seconds` of its own for the time of a trial."""
        fitting = prompts_for(trial_seconds or self.trial_seconds, pace.decoding_s(self.max_new_tokens, 2))
        per_trial = min(self.prompts_per_trial or fitting, self.num_texts)
        num_held_out, num_choosing = self.held_out
        return Amounts(
            prompts_per_trial=per_trial,
            num_texts=min(MAX_TRIALS_APART * per_trial, self.num_texts),
            num_held_out=num_held_out,
            num_choosing=num_choosing,
            max_new_tokens=self.max_new_tokens,
            num_noise_pairs=MIN_NOISE_PAIRS,
            confirm_repeats=self.confirm_repeats,
            num_candidates=self.num_candidates,
        )

    def levels(self, full: Amounts) -> Iterator[Amounts]:
        """From all to the least that is worth measuring, each with less than the one before.

        Prompts go first, down to eight of each kind; then new tokens, to a quarter but 16, which a study that is begun
        keeps; then repeats, then candidates, and last prompts down to four.
        """
        yield full
        now = full
        for share in _PROMPT_SHARES:
            yield (now := self._on_what_there_is(full.with_prompts(share, _FEW), full))
        if not self.tokens_are_fixed:
            least = min(full.max_new_tokens, max(_FEW_TOKENS, self.gamma_max + 2 if self.gamma_is_fixed else 0))
            for share in _TOKEN_SHARES:
                yield (now := replace(now, max_new_tokens=max(least, round(share * full.max_new_tokens))))
        for repeats in (2, 1):
            pairs = min(now.num_noise_pairs, _LEAST * repeats)
            repeats = min(repeats, full.confirm_repeats)
            yield (now := replace(now, confirm_repeats=repeats, num_noise_pairs=pairs))
        for count in (4, 2, 1):
            yield (now := replace(now, num_candidates=min(count, full.num_candidates)))
        yield replace(self._on_what_there_is(now.with_prompts(0.0, _LEAST), full), num_choosing=0)

    def reference_s(self, amounts: Amounts, pace: Pace) -> float:
        """Warming up, the continuations, plain once more for plain against plain, and ranking token ids."""
        tokens, per_trial = amounts.max_new_tokens, amounts.prompts_per_trial
        if "reference" in self.over:
            return 0.0
        if "reference" in self.kept:
            return (2 + per_trial) * pace.decoding_s(tokens)
        both_again = max(0, amounts.num_noise_pairs - amounts.num_texts)
        again = amounts.num_noise_pairs + both_again
        ranked_s = min(self.num_ranked, amounts.num_texts) * (pace.prompt_s + tokens * pace.further_s)
        return (2 + amounts.num_texts) * pace.decoding_s(tokens) + again * (tokens - 1) * pace.token_s + ranked_s

    def costs_s(self, repeats: int, pace: Pace) -> float:
        """Measuring the costs of the steps so often."""
        counts = (*range(1, self.gamma_max + 2), *_LOOKUP_COUNTS)
        steps = _DRAFT_STEPS * _DRAFT_SHARE + _STEPS_BEFORE + _FURTHER_STEPS * self.num_further
        once_s = sum(pace.forward_s(count) for count in counts) + steps * pace.token_s
        return NUM_TIMED_TEXTS * pace.prompt_s + (repeats + 1) * once_s

    def outlook_s(self, amounts: Amounts, pace: Pace) -> float:
        """The costs, and predictions that take as long as they like."""
        if "outlook" in self.over:
            return 0.0
        texts_s = self._texts_s(amounts, pace)
        if "outlook" in self.kept:
            return texts_s
        opening_s = max(MIN_OPENING_S, OPENING_SHARE * self.search_s(amounts, pace))
        few_s, all_s = (self._reading_s(n, amounts, pace) for n in (_TEXTS_READ, amounts.num_texts))
        bits = READINGS_A_BIT * self.num_bits
        predicting_s = max(bits * min(few_s, all_s), min(SENSITIVITY_SHARE * opening_s, bits * all_s))
        pool_s = (POOL_SHARE + REFINE_SHARE) * opening_s
        others = MORE_SHARE + WEIGHTS_SHARE * self.uses_weights
        predicting_s += min(pool_s, _POOL_READINGS * all_s) + others * opening_s
        return self.costs_s(NUM_REPEATS, pace) + texts_s + predicting_s

    def least_outlook_s(self, amounts: Amounts, pace: Pace) -> float:
        """The same with every part as short as it can be."""
        if "outlook" in self.over | self.kept:
            return self.outlook_s(amounts, pace)
        readings_s = _LEAST_READINGS * self._reading_s(2, amounts, pace)
        return self.costs_s(1, pace) + self._texts_s(amounts, pace) + readings_s

    def trial_s(self, amounts: Amounts, pace: Pace) -> float:
        """A full trial."""
        return TRIAL_OVERHEAD * amounts.prompts_per_trial * pace.decoding_s(amounts.max_new_tokens, 2)

    def search_s(self, amounts: Amounts, pace: Pace) -> float:
        """All trials, or as many as their own time limit allows."""
        if "search" in self.over:
            return 0.0
        whole_s = self.trials * self.trial_s(amounts, pace)
        return whole_s if self.timeout_s is None else min(whole_s, self.timeout_s)

    def confirm_s(self, amounts: Amounts, pace: Pace) -> float:
        """The pass that chooses, the fresh passes of the chosen one, one under each lossy rule, and batches."""
        reporting, choosing = amounts.num_held_out, amounts.num_choosing
        chosen_s = (choosing or reporting) * pace.decoding_s(amounts.max_new_tokens, 1 + amounts.num_candidates)
        lossy = (self.num_lossy + 2) * reporting if self.num_lossy else 0
        others = 2 * amounts.confirm_repeats * reporting + lossy
        batches_s = self._batches_s(amounts.max_new_tokens, pace)
        return chosen_s + others * pace.decoding_s(amounts.max_new_tokens) + batches_s

    def _batches_s(self, new_tokens: int, pace: Pace) -> float:
        """Texts decoded at once, plainly and drafting."""
        steps_s = sum(new_tokens * pace.forward_s(size) / size for size in SIZES if size <= self.num_in_batches)
        return 2 * self.num_in_batches * (len(SIZES) * pace.prompt_s + steps_s)

    def seconds(self, amounts: Amounts, pace: Pace) -> dict[str, float]:
        """By phase, each as long as it likes."""
        parts = (self.reference_s, self.outlook_s, self.search_s, self.confirm_s)
        return {name: part(amounts, pace) for name, part in zip(PHASES, parts, strict=True)}

    def _on_what_there_is(self, amounts: Amounts, full: Amounts) -> Amounts:
        """With the texts of the reference, where there is one."""
        if not self.is_begun:
            return amounts
        return replace(amounts, prompts_per_trial=full.prompts_per_trial, num_texts=full.num_texts)

    def _texts_s(self, amounts: Amounts, pace: Pace) -> float:
        return amounts.num_texts * (pace.prompt_s + amounts.max_new_tokens * pace.further_s)

    def _reading_s(self, num_texts: int, amounts: Amounts, pace: Pace) -> float:
        """A mask's reading on so many texts, on the average of all masks."""
        return 0.7 * pace.forward_s(num_texts * amounts.max_new_tokens)
