"""TabularDecoder: decodes by a table's readings on a simulated clock, so that the search runs on it as on a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.analysis.identity import IdentityReport
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, WrongDraft
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.sampling_regime import Sampling
from layerskip.config.skip_mask import SkipMask
from layerskip.decoding.stats import DecodeStats
from search.measure.decoder import Decoded
from search.predict.predictor import no_reading
from search.predict.replay import Counts, Floats, Round, Settings, TextRows, drafts_before, walk
from studies.proving.costs import Prices
from studies.proving.table import Table
from studies.proving.truth import GridSteps

_PREFILL_STEPS = 2.0
"""What a prompt's own forward takes, in target steps; no speed is told with it."""
_DRIFT_PERIOD_S = 1800.0


@dataclass(frozen=True)
class Noise:
    """What a clock gets wrong."""

    pair_sigma: float = 0.0
    """Standard deviation of the log of a plain/plain ratio, 0.01 for 1 %."""
    drift: float = 0.0
    """Share by which what a verification costs beyond a target step swings, over half an hour."""
    burst: float = 0.0
    """Standard deviation of the log by which all verifications timed in one go are off together: a machine's moment."""

    def __post_init__(self) -> None:
        for name in ("pair_sigma", "drift", "burst"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: must be from 0 to below 1, got {getattr(self, name)}")


@dataclass
class SimulatedMachine:
    """A clock that passes as steps are taken, and what they cost on it at the moment."""

    prices: Prices
    noise: Noise
    rng: np.random.Generator
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def factor(self) -> float:
        """By which one measurement is off; two of them make a pair."""
        if not self.noise.pair_sigma:
            return 1.0
        return math.exp(self.noise.pair_sigma / math.sqrt(2) * self.rng.standard_normal())

    def verify_s(self, count: int) -> float:
        """Verifying so many draft tokens, 0 for a target step."""
        alone = self.prices.alone_s
        swing = self.noise.drift * math.sin(2 * math.pi * self.now / _DRIFT_PERIOD_S)
        return alone + (self.prices.verify_s[count] - alone) * (1.0 + swing)

    def pass_time(self, seconds: float) -> None:
        """So much later."""
        self.now += seconds


@dataclass
class TabularDecoder:
    """See `search.measure.decoder.Decoder`. Greedy only; prompts are those of the table.

    A config's seconds are its rounds, known exactly, at the machine's prices, times the clock's noise. Everything
    follows from the machine's generator and the order of the calls.
    """

    table: Table
    machine: SimulatedMachine
    devices: tuple[Any, ...] = (None,)
    is_sampled: bool = False
    batch_refusal: str | None = "a model"
    _places: dict[tuple[int, ...], int] = field(init=False, repr=False)
    _known: dict[int, tuple[DecodeConfig, _KnownConfig]] = field(init=False, repr=False, default_factory=dict)
    """By identity: to compare configs takes longer than to decode with them."""

    def __post_init__(self) -> None:
        prompts = [tuple(one) for one in self.table.prompts.tolist()]
        self._places = {one: place for place, one in enumerate(prompts)}

    def with_sampling(self, sampling: Sampling) -> TabularDecoder:
        """Itself, if that is greedy. Raises: ValueError otherwise: no table holds what is sampled."""
        if sampling.do_sample:
            raise ValueError(f"sampling: a table is greedy, got {sampling.name}")
        return self

    def remembering(self) -> TabularDecoder:
        """Itself: what a prompt costs is told apart."""
        return self

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:  # noqa: ARG002
        """The target's continuation, with the seconds that `config` takes for it."""
        place = self._place(prompt_ids)
        if id(config) not in self._known:
            self._known[id(config)] = config, _KnownConfig.of(config, self.machine.prices)
        known = self._known[id(config)][1]
        counts = known.counts.get(place)
        if counts is None:
            counts = known.counts[place] = _counts_of(self.table, place, config)
        stats = self._timed(counts, known)
        self.machine.pass_time(stats.prefill_s + stats.decode_s)
        return Decoded(self.table.text(place).continuation_ids, stats)

    def check(
        self,
        prompt_ids: Sequence[int],  # noqa: ARG002
        ids: Sequence[int],
        reference_ids: Sequence[int],
        seed: int = 0,  # noqa: ARG002
    ) -> IdentityReport:
        """Identical or not; there are no logits to tie."""
        return IdentityReport(identical=tuple(ids) == tuple(reference_ids), is_tie=False)

    def free_memory(self) -> None:
        """A table has none to free."""

    def watch_machine(self) -> NothingToWatch:
        """A simulated machine has no state."""
        return NothingToWatch()

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> TabularForcing:
        """The table's readings of these texts. Raises: ValueError for a text that the table has not."""
        places = [self._place(one.prompt_ids) for one in texts]
        return TabularForcing(self.table, places, self._tick_reading)

    def timer(self, gamma_max: int) -> TabularTimer:  # noqa: ARG002
        """Tells the machine's prices."""
        return TabularTimer.at_a_moment(self.machine)

    def _place(self, prompt_ids: Sequence[int]) -> int:
        place = self._places.get(tuple(prompt_ids))
        if place is None:
            raise ValueError(f"prompt: must be one of the table's {len(self._places)}, got {list(prompt_ids)[:8]}...")
        return place

    def _tick_reading(self, num_texts: int) -> None:
        """A reading is taken to cost a target step a text: a draft forward over it, many positions at once."""
        self.machine.pass_time(num_texts * self.machine.prices.alone_s)

    def _timed(self, counts: DecodeStats, known: _KnownConfig) -> DecodeStats:
        """A copy with seconds; those of single tokens are left out, for no speed is told with them."""
        machine, stats = self.machine, DecodeStats.__new__(DecodeStats)
        vars(stats).update(vars(counts))
        factor, alone_s = machine.factor(), machine.verify_s(0)
        stats.prefill_s = _PREFILL_STEPS * alone_s * factor
        stats.target_only_s = counts.num_target_only * alone_s * factor
        seconds = [0.0] * len(counts.rounds_by_drafted)
        for i, rounds in enumerate(counts.rounds_by_drafted):
            if rounds:
                draft_s = rounds * (i + 1) * known.draft_s * factor
                verify_s = rounds * machine.verify_s(i + 1) * factor
                stats.draft_s += draft_s
                stats.verify_s += verify_s
                seconds[i] = draft_s + verify_s
        stats.round_s_by_drafted = seconds
        stats.decode_s = stats.target_only_s + sum(seconds)
        return stats


class TabularForcing:
    """See `search.measure.decoder.TextForcing`: the table's readings of some of its texts."""

    keys = "target"

    def __init__(self, table: Table, places: Sequence[int], tick: Callable[[int], None] = lambda _num: None) -> None:
        """tick: called with the number of texts before each reading."""
        self._table, self._all_places, self._tick = table, list(places), tick
        self.texts = tuple(table.text(place) for place in self._all_places)
        rows = table.rows(self._all_places)
        self.lengths: NDArray[Any] = rows.lengths
        self.target_probs: NDArray[Any] = rows.target_probs

    @property
    def nbytes(self) -> int:
        """Of the readings."""
        return int(self._table.codes.nbytes)

    def read(self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        """So many drafts into a round, or as many as the table has: the deepest says what later ones say."""
        places = self._all_places if texts is None else [self._all_places[text] for text in texts]
        self._tick(len(places))
        return self._table.reading(mask, places, depth)

    def replay(self, mask: SkipMask, settings: Settings, verify_s: Floats) -> Counts:
        """See `search.predict.predictor.Replays`. Raises: ValueError for settings with lookups or siblings."""
        if settings.lookups != (None,) or settings.siblings:
            raise ValueError("settings: a table knows drafts under a mask alone, got lookups or siblings")
        return GridSteps.of(self._table, mask).replay(settings, self._all_places, verify_s)

    def overrun(self, mask: SkipMask, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        """As replay has it: after a wrong token confidence is that along the right text."""
        found = []
        for one in wrong:
            confidence = self._table.reading(mask, [self._all_places[one.text]]).confidence
            until_unsure = int(drafts_before(confidence < threshold)[0, one.row - one.drafted])
            found.append(min(one.room, until_unsure - one.drafted))
        return found


@dataclass(frozen=True)
class TabularTimer:
    """See `search.measure.decoder.Timer`: the machine's prices, each with the noise of one measurement."""

    machine: SimulatedMachine
    moment: float = 1.0
    """By which verifications of several tokens are off while this timer is used."""

    @classmethod
    def at_a_moment(cls, machine: SimulatedMachine) -> TabularTimer:
        """With a moment's luck, if the machine has moments."""
        burst = machine.noise.burst
        return cls(machine, math.exp(burst * machine.rng.standard_normal()) if burst else 1.0)

    def verify_s(self, text_ids: Sequence[int], counts: Sequence[int]) -> list[float]:  # noqa: ARG002
        """Forwards over so many tokens, from 1."""
        return [self._timed(self.machine.verify_s(n - 1) * (self.moment if n > 1 else 1.0)) for n in counts]

    def draft_s(
        self, text_ids: Sequence[int], masks: Sequence[SkipMask], *, gamma: int, threshold: bool  # noqa: ARG002
    ) -> list[float]:  # fmt: skip
        """A draft token under each mask."""
        return [self._timed(self.machine.prices.draft_s(mask, threshold=threshold), gamma) for mask in masks]

    def _timed(self, seconds: float, times: int = 1) -> float:
        told = seconds * self.machine.factor()
        self.machine.pass_time(told * times)
        return told


class NothingToWatch:
    """See `search.measure.decoder.Watch`."""

    def record(self) -> dict[str, Any]:
        """What a confirmation puts into words, as unknown."""
        moment = {"gpus": [], "load": None}
        facts = {"attention_backend": "none", "num_preparations": 0, "peak_resident_bytes": None}
        return facts | {"before": moment, "after": moment}


@dataclass(frozen=True)
class _KnownConfig:
    """What one config costs at a machine's prices, and does on each text that it has decoded."""

    draft_s: float
    counts: dict[int, DecodeStats] = field(default_factory=dict)

    @classmethod
    def of(cls, config: DecodeConfig, prices: Prices) -> _KnownConfig:
        """No text yet."""
        mask = config.skip_mask
        draft_s = prices.draft_s(mask, threshold=config.draft_threshold > 0) if config.speculates else 0.0
        return cls(draft_s)


@lru_cache(maxsize=1 << 14)
def _counts_of(table: Table, place: int, config: DecodeConfig) -> DecodeStats:
    """What decoding one text does, wrong drafts' own drafts included; no seconds yet.

    The same in every run, so all runs of a process share it.
    """
    rounds = whole_rounds(TabularForcing(table, [place]), table.rows([place]), config)
    text = table.text(place)
    counts = DecodeStats(num_prompt_tokens=len(text.prompt_ids), num_emitted=len(text.continuation_ids))
    counts.make_room(config.gamma)
    for one in rounds:
        if one.drafted:
            counts.count_round(one.drafted, one.accepted, looked_up=False)
        else:
            counts.num_target_only += 1
    counts.num_cut = max(0, 1 + sum(one.accepted + 1 for one in rounds) - counts.num_emitted)
    return counts


def whole_rounds(forcing: TabularForcing, rows: TextRows, config: DecodeConfig) -> list[Round]:
    """The rounds of one config with all that they draft: those of `search.predict.replay.walk` end at a wrong token.

    Raises: ValueError for a config that looks tokens up.
    """
    if config.speculates and config.drafter != "layer_skip":
        raise ValueError(f"drafter: a table knows drafts under a mask alone, got {config.drafter}")
    reading = forcing.read(config.skip_mask, config.gamma) if config.speculates else no_reading(rows)
    rounds = walk(reading, rows, config)
    open_ended = [i for i, one in enumerate(rounds) if one.wrong_and_sure]
    wrong = [
        WrongDraft(one.text, one.row + one.accepted, one.accepted, 0, one.room - one.drafted)
        for one in (rounds[i] for i in open_ended)
    ]
    added = forcing.overrun(config.skip_mask, wrong, config.draft_threshold)
    for i, count in zip(open_ended, added, strict=True):
        rounds[i] = replace(rounds[i], drafted=rounds[i].drafted + count)
    return rounds
