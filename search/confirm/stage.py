"""Confirm: the best few against plain decoding on held-out prompts; one winner, or "do not speculate".

The candidates: the leading configs by pooled lower bound, no more than half of them under one mask, and the best of
every other drafter, see `shortlist`.
A first pass over all of them only chooses, fresh passes of the chosen one against plain then give the number that is
reported, so the luck that helped it win is not in it (`passes`). Where there are prompts enough, others report than
choose, see `split_held_out`.

The choice: best geometric mean of per-prompt ratios. The chosen one is exported only if the low end of its 95 %
interval lies above 1.0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from layerskip.analysis.intervals import CI_LEVEL, Interval, geometric_mean, prompt_interval, ratio_interval
from layerskip.analysis.repetition import repeated_ngram_share
from layerskip.config.decode_config import Confirmed, DecodeConfig
from layerskip.config.skip_mask import SkipMask
from layerskip.machine.watch import describe_machine
from search.confirm.held_out import HeldOut, held_out_of, typical_rate
from search.confirm.passes import Candidate, ConfirmOptions, HeldOutPrompts, Passes, ratios_of
from search.measure.batches import BatchSpeed
from search.measure.decoder import Decoder
from search.measure.pairs import Fault, Pair, Timed, add_up
from search.progress import Tell, nobody
from search.study.config_words import describe
from search.study.leaderboard import Entry, Standings


@dataclass(frozen=True)
class Confirmation:
    """The verdict."""

    config: DecodeConfig
    """The winner with its confirmed numbers, or plain decoding with the reason; provenance is the exporter's to add."""
    winner: Entry | None
    measured: Confirmed | None
    """The chosen candidate's numbers, also where they did not suffice."""
    candidates: tuple[Candidate, ...]
    held_out: HeldOut | None = None
    """Of the fresh passes: every prompt's numbers, for the study."""
    too_short: tuple[str, ...] = ()
    """Ids of the prompts that were left out, because plain decoding ends before a second token."""
    batches: tuple[BatchSpeed, ...] = ()
    """The winner against plain decoding, several texts at once."""

    @property
    def raw(self) -> dict[str, list[list[float]]]:
        """See `HeldOut.rates`: per prompt, every fresh repeat."""
        rates = self.held_out.rates if self.held_out else {}
        return {name: [list(one) for one in prompts] for name, prompts in rates.items()}

    @property
    def by_drafter(self) -> dict[str, Candidate]:
        """The fastest candidate of each drafter on the choosing pass, fastest first."""
        found: dict[str, Candidate] = {}
        for one in _fastest_first(self.candidates):
            found.setdefault(one.entry.config.way, one)
        return found

    @property
    def violations(self) -> list[str]:
        """Candidates whose output differed from the target's, one line each."""
        return [
            f"confirm: {one.excluded} under {describe(one.entry.config)}" for one in self.candidates if not one.lossless
        ]


def shortlist(standings: Standings, num: int) -> tuple[Entry, ...]:
    """The first `num` of the standings, no more than half of them (rounded up) under one mask while there are others;
    and the best of every other drafter besides, also of one whose trials were all stopped early, so that the verdict
    can tell what each is worth.

    Configs of one mask do much the same on any text. Which mask suits text that was not searched on is what held-out
    prompts can tell.
    """
    entries, share = standings.entries, math.ceil(num / 2)
    masks: Counter[tuple[str, SkipMask]] = Counter()
    within: list[int] = []
    beyond: list[int] = []
    firsts: dict[str, int] = {}
    for place, entry in enumerate(entries):
        config = entry.config
        firsts.setdefault(config.way, place)
        masks[config.way, config.skip_mask] += 1
        (within if masks[config.way, config.skip_mask] <= share else beyond).append(place)
    chosen = tuple(entries[place] for place in sorted({*(within + beyond)[:num], *firsts.values()}))
    return chosen + standings.stopped if chosen else ()


def confirm(
    decoder: Decoder,
    prompts: HeldOutPrompts,
    entries: Sequence[Entry],
    options: ConfirmOptions,
    tell: Callable[[str], None] = lambda _line: None,
    progress: Callable[[str], Tell] = lambda _what: nobody,
) -> Confirmation:
    """Choose among the entries, measure the chosen one afresh, decide.

    Cost: 1 + candidates decodings of the prompts that choose, 2 x repeats of those that report.
    """
    if not entries:
        return _nothing("no config was measured losslessly on all tuning prompts", options)
    passes = Passes(decoder, prompts, options)
    candidates = passes.choosing(entries, tell, progress("prompts under every candidate"))
    while order := choose(candidates):
        chosen = order[0]
        tell(f"chosen: {describe(chosen.entry.config)}; measuring it afresh {options.repeats} times")
        watch = decoder.watch_machine()
        fresh = passes.fresh(chosen.entry.config, progress("pairs of the chosen one and plain decoding"))
        if isinstance(fresh, Fault):
            tell(f"EXCLUDED {describe(chosen.entry.config)}: {fresh.reason}")
            candidates = tuple(chosen.failed(fresh) if one is chosen else one for one in candidates)
            continue
        if not fresh[0]:
            break
        pairs = [[pair for _, pair in one] for one in fresh]
        share = repeated_ngram_share((case.prompt_ids, case.reference_ids) for one in fresh for case, _ in one)
        differ = passes.texts_differ
        measured = summarise(pairs, seed=options.seed, repeated_ngram_share=share, texts_differ=differ)
        told = {"machine": describe_machine(watch.record()), "num_choosing": len(prompts.choosing)}
        measured = measured.model_copy(update=told)
        held_out = held_out_of(pairs, chosen.entry.config, texts_differ=differ)
        return replace(_verdict(measured, held_out, chosen.entry, candidates), too_short=passes.too_short)
    reasons = "; ".join(sorted({one.excluded for one in candidates if one.excluded}))
    reason = f"no candidate passed: {reasons}"[:500] if reasons else "no held-out prompt"
    return replace(_nothing(reason, options), candidates=candidates, too_short=passes.too_short)


def _nothing(reason: str, options: ConfirmOptions) -> Confirmation:
    return Confirmation(DecodeConfig.plain(options.num_layers, reason=reason), None, None, ())


def choose(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that stayed to the end, then those that dropped out, the fastest first; excluded ones are left out."""
    return sorted(_fastest_first(candidates), key=lambda one: -len(one.ratios))


def _fastest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """By their ratios; excluded ones are left out."""
    return sorted((one for one in candidates if one.ratios), key=lambda one: -(one.speedup or 0.0))


def summarise(
    passes: Sequence[Sequence[Pair]],
    *,
    seed: int,
    repeated_ngram_share: float | None = None,
    texts_differ: bool = False,
) -> Confirmed:
    """The numbers to report from fresh passes, each holding one pair per prompt in the same order.

    A prompt's ratio is the ratio of its two typical rates over the passes (see `typical_rate`); speedup is the
    geometric mean of the ratios and so equals tokens_per_s / plain_tokens_per_s, themselves geometric means over
    prompts.
    """
    by_prompt = list(zip(*passes, strict=True))
    decoding = _compare(by_prompt, lambda timed: timed.tokens_per_s, seed, texts_differ=texts_differ)
    end_to_end = _compare(by_prompt, lambda timed: timed.end_to_end_tokens_per_s, seed, texts_differ=texts_differ)
    single = prompt_interval(decoding.ratios)
    ties = sum(any(pair.speculative.is_tie for pair in pairs) for pairs in by_prompt)
    acceptance = add_up([pair.speculative.stats for pairs in passes for pair in pairs])
    return Confirmed(
        tokens_per_s=decoding.fast,
        plain_tokens_per_s=decoding.plain,
        speedup=decoding.speedup,
        speedup_ci_low=decoding.interval.low,
        speedup_ci_high=decoding.interval.high,
        ci_level=CI_LEVEL,
        speedup_prompt_low=single.low if single else None,
        speedup_prompt_high=single.high if single else None,
        end_to_end_speedup=end_to_end.speedup,
        end_to_end_speedup_ci_low=end_to_end.interval.low,
        end_to_end_speedup_ci_high=end_to_end.interval.high,
        num_prompts=len(by_prompt),
        num_identical=len(by_prompt) - ties,
        num_ties=ties,
        num_repeats=len(passes),
        acceptance_rate=acceptance.acceptance_rate,
        mean_accepted_length=acceptance.mean_accepted_length,
        repeated_ngram_share=repeated_ngram_share,
    )


@dataclass(frozen=True)
class _Comparison:
    """Two ways to decode the same prompts; rates are geometric means over prompts."""

    fast: float
    plain: float
    ratios: tuple[float, ...]
    """Per prompt."""
    interval: Interval
    """Of the speedup."""

    @property
    def speedup(self) -> float:
        return self.fast / self.plain


def _compare(
    by_prompt: Sequence[Sequence[Pair]], rate: Callable[[Timed], float], seed: int, *, texts_differ: bool
) -> _Comparison:
    """Each prompt's typical rates over its pairs, held against each other."""
    fast, plain = (
        [typical_rate([rate(way(pair)) for pair in pairs], texts_differ=texts_differ) for pairs in by_prompt]
        for way in (attrgetter("speculative"), attrgetter("plain"))
    )
    ratios = ratios_of(fast, plain)
    means = geometric_mean(fast), geometric_mean(plain)
    speedup = means[0] / means[1]
    # One prompt has no interval; an interval down to (nearly) nothing never confirms anything.
    interval = ratio_interval(ratios, seed=seed) or Interval(min(speedup, 1.0) * 1e-3, speedup * 1e3)
    return _Comparison(*means, ratios, interval)


def _verdict(measured: Confirmed, held_out: HeldOut, entry: Entry, candidates: tuple[Candidate, ...]) -> Confirmation:
    if measured.speedup_ci_low > 1.0:
        config = entry.config.model_copy(update={"confirmed": measured})
        return Confirmation(config, entry, measured, candidates, held_out)
    reason = (
        f"do not speculate: the best candidate ({describe(entry.config)}) reached {measured.speedup:.3f}x on "
        f"{measured.num_prompts} held-out prompts, 95 % interval {measured.speedup_ci_low:.3f} to "
        f"{measured.speedup_ci_high:.3f}, which does not lie above 1.0"
    )
    plain = DecodeConfig.plain(entry.config.skip_mask.num_layers, reason=reason)
    return Confirmation(plain, None, measured, candidates, held_out)
