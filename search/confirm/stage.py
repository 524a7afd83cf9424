"""Confirm: the best few against plain decoding on held-out prompts; one winner, or "do not speculate".

The candidates: the leading configs by pooled lower bound, no more than half of them under one mask, and the best of
every other drafter, see `shortlist`.
First pass: plain and every candidate on each prompt, one after the other as a user runs them. It only chooses, and is a
race (Maron and Moore 1994): from the eighth prompt on a candidate that is surely slower than the leading one, by more
than a tie, drops out (one-sided paired t interval of 99 %), and the pass ends once one is left.
Then fresh passes of the chosen one against plain give the number that is reported, so the luck that helped it win is
not in it. Where there are prompts enough, others report than choose, see `split_held_out`; where tokens are sampled
each pass continues the prompts anew, from other seeds.

The choice: best geometric mean of per-prompt ratios; candidates whose paired difference to it is at most
max(1 %, noise / sqrt(prompts) * sqrt(2)) tie with it, and the tie goes to one drafter instead of a hybrid, then to
fewer skipped sublayers, then smaller gamma, then lower draft_threshold, then lower target_threshold. The chosen one is
exported only if the low end of its 95 % interval lies above 1.0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from scipy import stats

from layerskip.analysis.repetition import repeated_ngram_share
from layerskip.config.decode_config import Confirmed, DecodeConfig
from layerskip.config.skip_mask import SkipMask
from layerskip.machine.watch import describe_machine
from search.confirm.held_out import HeldOut, held_out_of, typical_rate
from search.measure.decoder import Decoder
from search.measure.pairs import Fault, Pair, PromptCase, Timed, add_up, fault_of, measure_pair, time_able
from search.measure.statistics import CI_LEVEL, Interval, geometric_mean, prompt_interval, ratio_interval
from search.progress import Tell, nobody
from search.study.config_words import describe
from search.study.leaderboard import Entry, Standings

TIE = 0.01
RACE_FROM = 8
"""Prompts that all candidates see before the first may drop out."""
RACE_LEVEL = 0.99


@dataclass(frozen=True)
class ConfirmOptions:
    """How much to measure."""

    num_layers: int
    repeats: int
    noise_sigma: float
    seed: int


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


@dataclass(frozen=True)
class Confirmation:
    """The verdict."""

    config: DecodeConfig
    """The winner with its confirmed numbers, or plain decoding with the reason; provenance is the exporter's to add."""
    winner: Entry | None
    measured: Confirmed | None
    """The chosen candidate's numbers, also where they did not suffice."""
    candidates: tuple[Candidate, ...]
    raw: dict[str, list[list[float]]] = field(default_factory=dict)
    """See `HeldOut.rates`: per prompt, every fresh repeat."""
    held_out: HeldOut | None = None
    """The same with prompt ids and counters, for the study."""

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
    case_sets: Sequence[Sequence[PromptCase]],
    entries: Sequence[Entry],
    options: ConfirmOptions,
    tell: Callable[[str], None] = lambda _line: None,
    progress: Callable[[str], Tell] = lambda _what: nobody,
) -> Confirmation:
    """Choose among the entries, measure the chosen one afresh, decide.

    case_sets: the first chooses; the fresh passes go through the others in turn, which have the same prompts, or
    through the first where there is no other. Cost: prompts x (1 + candidates + 2 x repeats) decodings.
    """
    cases, fresh_sets = case_sets[0], case_sets[1:] or case_sets[:1]
    if not entries or not all(case_sets):
        reason = "no config was measured losslessly on all tuning prompts" if not entries else "no held-out prompt"
        return Confirmation(DecodeConfig.plain(options.num_layers, reason=reason), None, None, ())
    candidates = _choosing_pass(decoder, cases, entries, tell, progress("prompts under every candidate"))
    order = choose(candidates, options.noise_sigma)
    while order:
        chosen = order[0]
        tell(f"chosen: {describe(chosen.entry.config)}; measuring it afresh {options.repeats} times")
        watch = decoder.watch_machine()
        try:
            heard = progress("pairs of the chosen one and plain decoding")
            passes = _fresh_passes(decoder, fresh_sets, chosen.entry.config, options.repeats, heard)
        except Exception as error:  # noqa: BLE001 (as in a trial: it rules out this candidate alone)
            fault = fault_of(error)
        else:
            share = repeated_ngram_share((case.prompt_ids, case.reference_ids) for some in fresh_sets for case in some)
            differ = len(fresh_sets) > 1
            measured = summarise(passes, seed=options.seed, repeated_ngram_share=share, texts_differ=differ)
            measured = measured.model_copy(update={"machine": describe_machine(watch.record())})
            held_out = held_out_of(passes, chosen.entry.config, texts_differ=differ)
            return _verdict(measured, held_out, chosen.entry, candidates)
        decoder.free_memory()  # outside the except block: there the traceback would keep the tensors alive
        tell(f"EXCLUDED {describe(chosen.entry.config)}: {fault.reason}")
        candidates = tuple(_excluded(one.entry, fault) if one is chosen else one for one in candidates)
        order = choose(candidates, options.noise_sigma)
    reasons = "; ".join(sorted({one.excluded or "" for one in candidates}))
    plain = DecodeConfig.plain(options.num_layers, reason=f"no candidate passed: {reasons}"[:500])
    return Confirmation(plain, None, None, candidates)


def choose(candidates: Sequence[Candidate], noise_sigma: float) -> list[Candidate]:
    """Candidates in the order of preference (see the module's rule); excluded ones are left out."""
    able = _fastest_first(candidates)
    if not able:
        return []
    longest = max(len(one.ratios) for one in able)
    dropped = [one for one in able if len(one.ratios) < longest]
    able = [one for one in able if len(one.ratios) == longest]
    tolerance = max(TIE, math.sqrt(2) * noise_sigma / math.sqrt(len(able[0].ratios)))
    best = able[0]
    tied = [one for one in able if _log_difference(best.ratios, one.ratios) <= tolerance]
    tied.sort(key=lambda one: _simplicity(one.entry.config))
    return tied + [one for one in able if one not in tied] + dropped


def is_surely_slower(ratios: Sequence[float], leading: Sequence[float]) -> bool:
    """Whether a way to decode is slower than the leading one on the same prompts by more than a tie, by a one-sided
    interval of their log ratios at `RACE_LEVEL`."""
    differences = np.log(ratios) - np.log(leading)
    spread = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()) + float(stats.t.ppf(RACE_LEVEL, len(differences) - 1)) * spread < -TIE


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
    ratios = _ratios(fast, plain)
    means = geometric_mean(fast), geometric_mean(plain)
    speedup = means[0] / means[1]
    # One prompt has no interval; an interval down to (nearly) nothing never confirms anything.
    interval = ratio_interval(ratios, seed=seed) or Interval(min(speedup, 1.0) * 1e-3, speedup * 1e3)
    return _Comparison(*means, ratios, interval)


def _choosing_pass(
    decoder: Decoder,
    cases: Sequence[PromptCase],
    entries: Sequence[Entry],
    tell: Callable[[str], None],
    progress: Tell,
) -> tuple[Candidate, ...]:
    plain = DecodeConfig.plain(entries[0].config.skip_mask.num_layers)
    configs = [plain] + [entry.config for entry in entries]
    rates: list[list[float]] = [[] for _ in configs]
    faults: dict[int, Fault] = {}
    racing = list(range(1, len(configs)))
    for row, case in enumerate(cases):
        able = {0, *racing}
        turns = [i for turn in range(len(configs)) if (i := (row + turn) % len(configs)) in able]
        for i, one in zip(turns, time_able(decoder, case, [configs[i] for i in turns]), strict=True):
            if isinstance(one, Fault):
                faults[i] = one
                racing.remove(i)
                tell(f"EXCLUDED {describe(configs[i])}: {one.reason}")
            else:
                rates[i].append(one.tokens_per_s)
        progress(row + 1, len(cases))
        if row + 1 >= RACE_FROM and racing:
            leading = rates[max(racing, key=lambda i: geometric_mean(rates[i]))]
            racing = [i for i in racing if rates[i] is leading or not is_surely_slower(rates[i], leading)]
            if len(racing) == 1:
                progress(len(cases), len(cases))
                break
    ratios = [_ratios(one, rates[0][: len(one)]) for one in rates]
    best = max((ratios[i] for i in racing), key=geometric_mean, default=())
    return tuple(
        _excluded(entry, faults[i])
        if i in faults
        else Candidate(entry, ratios[i], handicap=_handicap(best, len(ratios[i])))
        for i, entry in enumerate(entries, start=1)
    )


def _handicap(best: Sequence[float], num_seen: int) -> float:
    return geometric_mean(best) / geometric_mean(best[:num_seen]) if best else 1.0


def _excluded(entry: Entry, fault: Fault) -> Candidate:
    return Candidate(entry, (), fault.reason, fault.lossless)


def _fresh_passes(
    decoder: Decoder,
    case_sets: Sequence[Sequence[PromptCase]],
    config: DecodeConfig,
    repeats: int,
    progress: Tell,
) -> list[list[Pair]]:
    passes: list[list[Pair]] = [[] for _ in range(repeats)]
    for repeat, pairs in enumerate(passes):
        cases = case_sets[repeat % len(case_sets)]
        for row, case in enumerate(cases):
            pairs.append(measure_pair(decoder, case, config, plain_first=(row + repeat) % 2 == 0))
            progress(repeat * len(cases) + row + 1, repeats * len(cases))
    return passes


def _verdict(measured: Confirmed, held_out: HeldOut, entry: Entry, candidates: tuple[Candidate, ...]) -> Confirmation:
    raw = {name: [list(one) for one in rates] for name, rates in held_out.rates.items()}
    if measured.speedup_ci_low > 1.0:
        config = entry.config.model_copy(update={"confirmed": measured})
        return Confirmation(config, entry, measured, candidates, raw, held_out)
    reason = (
        f"do not speculate: the best candidate ({describe(entry.config)}) reached {measured.speedup:.3f}x on "
        f"{measured.num_prompts} held-out prompts, 95 % interval {measured.speedup_ci_low:.3f} to "
        f"{measured.speedup_ci_high:.3f}, which does not lie above 1.0"
    )
    plain = DecodeConfig.plain(entry.config.skip_mask.num_layers, reason=reason)
    return Confirmation(plain, None, measured, candidates, raw, held_out)


def _ratios(rates: Sequence[float], plain: Sequence[float]) -> tuple[float, ...]:
    return tuple(one / other for one, other in zip(rates, plain, strict=True))


def _log_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return math.log(geometric_mean(one) / geometric_mean(other))


def _simplicity(config: DecodeConfig) -> tuple[bool, bool, int, int, float, float]:
    is_hybrid = config.drafter == "hybrid"
    mask = config.skip_mask
    return (is_hybrid, mask.int8, mask.num_skipped, config.max_gamma, config.draft_threshold, config.target_threshold)
