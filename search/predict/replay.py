"""Replay: what decoding under gamma and thresholds would do, from one reading of the draft, without decoding.

Speculative output, sampled or greedy, is the target's own continuation, known in advance. A reading (see
`analysis.teacher_forcing`) tells for every position of it whether the draft is right there and how sure it is; from
that the rounds of any gamma, draft_threshold and target_threshold follow one by one. Two things are approximated: the
drafts of a round beyond the reading's depth see the target's keys and values where the live draft sees its own, and how
long a draft goes on after its first wrong token is taken from the confidence along the right text. What is replayed for
a config about to be measured needs neither (see `Predictor.counts`): it is read as deep as a gamma of 8 goes, and every
wrong draft is followed.

What a lookup proposes follows from the text alone, so rounds of looked-up tokens are replayed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.analysis.teacher_forcing import DraftReadings, TreeReadings
from layerskip.analysis.teacher_forcing.by_other_tokenizer import NOTHING
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.lookup_settings import LookupSettings
from layerskip.decoding.stats import DecodeStats
from search.predict.lookup_readings import LookupReadings
from search.study.lookup_choice import LookupChoice

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TextRows:
    """What replay needs of P texts besides the draft's readings."""

    lengths: Ints
    """Continuation tokens per text, (P,), each at least 1."""
    target_probs: NDArray[np.float32]
    """(P, T): the target's probability of each continuation token."""
    max_new_tokens: int
    """Budget of the decodings; a text that is shorter ended by itself."""

    def __post_init__(self) -> None:
        if self.lengths.size == 0 or self.lengths.min() < 1:
            raise ValueError(f"lengths: every text needs at least one token, got {self.lengths.tolist()[:8]}")
        if self.lengths.max() > self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens: must be at least the longest continuation ({self.lengths.max()}), "
                f"got {self.max_new_tokens}"
            )

    def select(self, texts: Sequence[int]) -> TextRows:
        """The texts at these places."""
        chosen = list(texts)
        return TextRows(self.lengths[chosen], self.target_probs[chosen], self.max_new_tokens)


@dataclass(frozen=True)
class Settings:
    """S combinations of what is not the mask; arrays (S,)."""

    gamma: Ints
    """Of layer skipping; 0 where tokens are looked up alone."""
    draft_threshold: Floats
    target_threshold: Floats
    lookup: Ints
    """Places among the lookups."""
    lookups: tuple[LookupChoice | None, ...] = (None,)
    """None: nothing is looked up."""
    siblings: int = 0
    """Of a computed draft token, the same for all settings."""
    sibling_threshold: float = 1.0
    """Tokens whose top probability is below it have them; the same for all settings."""
    tree_tokens: int = 0
    """Of a tree, the same for all settings; 0 for chains."""

    @classmethod
    def grid(
        cls,
        gammas: Sequence[int],
        draft_thresholds: Sequence[float],
        target_thresholds: Sequence[float],
        lookups: Sequence[LookupChoice | None] = (None,),
    ) -> Settings:
        """All combinations; gammas from 1."""
        if not gammas or min(gammas) < 1:
            raise ValueError(f"gamma: must be at least 1 to draft, got {list(gammas)[:8]}")
        axes = np.meshgrid(gammas, draft_thresholds, target_thresholds, range(len(lookups)), indexing="ij")
        gamma, draft, target, lookup = (axis.reshape(-1) for axis in axes)
        return cls(
            gamma.astype(np.int64),
            draft.astype(np.float64),
            target.astype(np.float64),
            lookup.astype(np.int64),
            tuple(lookups),
        )

    @classmethod
    def of_lookups(cls, lookups: Sequence[LookupChoice]) -> Settings:
        """Lookups alone: the target alone where they find nothing."""
        none = np.zeros(len(lookups))
        return cls(none.astype(np.int64), none, none, np.arange(len(lookups)), tuple(lookups))

    @classmethod
    def of(cls, config: DecodeConfig) -> Settings:
        """One config's. Raises: ValueError if it does not speculate."""
        choice = LookupChoice.of(config)
        if choice is not None and not config.computes_drafts:
            return cls.of_lookups([choice])
        one = cls.grid([config.gamma], [config.draft_threshold], [config.target_threshold], [choice])
        below = config.sibling_threshold
        return replace(one, siblings=config.siblings, sibling_threshold=below, tree_tokens=config.tree_tokens)

    @property
    def most_verified(self) -> int:
        """Most tokens that any round verifies, siblings among them."""
        computed = self.tree_tokens or int(self.gamma.max()) * (1 + self.siblings)
        return max(computed, *(0 if one is None else one.gamma for one in self.lookups))

    def select(self, places: Ints) -> Settings:
        """The settings at these places."""
        return replace(
            self,
            gamma=self.gamma[places],
            draft_threshold=self.draft_threshold[places],
            target_threshold=self.target_threshold[places],
            lookup=self.lookup[places],
        )

    def __len__(self) -> int:
        return len(self.gamma)


@dataclass(frozen=True)
class Counts:
    """Forwards per setting and text, arrays (S, P)."""

    drafted: Floats
    """Tokens drafted under the mask or by trained weights; of a tree its levels."""
    looked_up: Floats
    """Tokens drafted by lookup."""
    rounds: Floats
    target_only: Floats
    verify_s: Floats
    """Seconds of the rounds' verifications, from the table given; zero without one."""

    @classmethod
    def join(cls, parts: Sequence[Counts]) -> Counts:
        """Of the same settings on several sets of texts, one after the other."""
        arrays = ([getattr(one, each.name) for one in parts] for each in fields(cls))
        return cls(*(np.concatenate(one, axis=1) for one in arrays))

    def total(self) -> Floats:
        """(S, 3): drafts of both kinds, verifications and target-only steps over all texts."""
        drafts = self.drafted + self.looked_up
        return np.stack([drafts.sum(1), self.rounds.sum(1), self.target_only.sum(1)], axis=1)


ReadLookup = Callable[[LookupSettings], LookupReadings]
"""What lookups with these settings would propose along the texts at hand."""


def replay(
    reading: DraftReadings | TreeReadings,
    rows: TextRows,
    settings: Settings,
    verify_s: Sequence[float] | Floats | None = None,
    read_lookup: ReadLookup | None = None,
) -> Counts:
    """Counts of every setting on every text.

    reading: on the texts of `rows`; of lookups alone it is not looked at.
    verify_s: seconds of verifying n tokens, siblings too, n = 0..most of a round. read_lookup: needed where settings
    look up.
    Cost: 1,000 settings x 2,000 positions take some tenths of a second on one core.
    Raises: ValueError if the shapes do not fit.
    """
    drafts = _Trees(reading, rows, settings) if isinstance(reading, TreeReadings) else _Chains(reading, rows, settings)
    table = np.zeros(settings.most_verified + 1) if verify_s is None else np.asarray(verify_s, dtype=np.float64)
    if len(table) <= settings.most_verified:
        raise ValueError(f"verify_s: must reach gamma {settings.most_verified}, has {len(table)} entries")
    lookups = _Lookups(rows, settings.lookups, read_lookup)
    return _run(_Steps(drafts, rows, settings, lookups), table)


@dataclass(frozen=True)
class Round:
    """One step of one text: a round, or the target alone where nothing is drafted or looked up."""

    text: int
    row: int
    """Index of the continuation token that it starts from."""
    drafted: int
    accepted: int
    room: int
    """Draft tokens that it could have had."""
    wrong_and_sure: bool
    """Its first wrong token is not an unsure one, so how long the draft goes on after it is not in the reading."""
    looked_up: int = 0
    """Tokens that were looked up; then none was drafted under the mask."""
    hit: bool = False
    """A sibling of the first wrong token is right; it is not among the accepted ones."""


def walk(
    reading: DraftReadings, rows: TextRows, config: DecodeConfig, read_lookup: ReadLookup | None = None
) -> list[Round]:
    """The rounds of one config, one by one; `drafted` ends at the first wrong token.

    Cost: a millisecond or so per thousand tokens. The same rounds as `replay` counts, but one by one.
    """
    depth, last = len(reading.accepted) - 1, rows.target_probs.shape[1] - 1
    # As lists: single places of an array take several times as long.
    is_wrong, is_unsure = (reading.accepted == 0.0).tolist(), (reading.confidence < config.draft_threshold).tolist()
    is_alone = (rows.target_probs < config.target_threshold) | (reading.confidence[0] == NOTHING)
    alone = is_alone.tolist()
    lookups = _Lookups(rows, [LookupChoice.of(config)], read_lookup)
    gamma = config.gamma if config.computes_drafts else 0
    found = []
    for text, length in enumerate(rows.lengths.tolist()):
        emitted = 1
        while emitted < length:
            row = emitted - 1
            most = max(0, rows.max_new_tokens - emitted - 1)
            proposed, right = lookups.one(text, row)
            if looked_up := min(most, proposed):
                accepted = min(looked_up, right)
                found.append(Round(text, row, 0, accepted, room=looked_up, wrong_and_sure=False, looked_up=looked_up))
                emitted += accepted + 1
                continue
            room = 0 if alone[text][row] else min(gamma, most)
            drafted, wrong, unsure = 0, False, False
            while drafted < room and not wrong and not unsure:
                at_depth, place = min(drafted, depth), min(row + drafted, last)
                wrong, unsure = is_wrong[at_depth][text][place], is_unsure[at_depth][text][place]
                drafted += 1
            accepted = drafted - wrong
            hit = False
            if wrong and config.siblings and reading.ranks is not None:
                at = min(accepted, depth), text, row + accepted
                unsure_there = config.sibling_threshold >= 1.0 or reading.confidence[at] < config.sibling_threshold
                hit = bool(unsure_there and 0 < reading.ranks[at] <= config.siblings)
            open_ended = wrong and not unsure and drafted < room
            found.append(Round(text, row, drafted, accepted, room, open_ended, hit=hit))
            emitted += accepted + hit + 1
    return found


def live_counts(stats: Sequence[DecodeStats]) -> Ints:
    """(3,): drafts, verifications and target-only steps that really happened."""
    return np.array(
        [
            sum(one.num_drafted for one in stats),
            sum(one.num_rounds for one in stats),
            sum(one.num_target_only for one in stats),
        ]
    )


@dataclass(frozen=True)
class ReplayCheck:
    """Replayed counts against live ones, over many settings."""

    num_settings: int
    exact_share: float
    """Settings whose three counts are all the same."""
    median_error: float
    """Of the settings' errors: forwards miscounted (differences of the three counts added up) over forwards made."""
    p95_error: float


def check_replay(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> ReplayCheck | None:
    """Compare (replayed, live) counts of three numbers each; None without any."""
    if not pairs:
        return None
    replayed, live = (np.array([pair[side] for pair in pairs], dtype=np.float64) for side in (0, 1))
    wrong = np.abs(replayed - live).sum(axis=1)
    errors = wrong / np.maximum(live.sum(axis=1), 1.0)
    return ReplayCheck(
        num_settings=len(pairs),
        exact_share=float((wrong < 0.5).mean()),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
    )


class _Lookups:
    """What each of L lookups proposes at a place, and how much of it is right.

    Readings are kept for settings that differ, (R, P, T): lookups that differ in gamma or threshold alone share one.
    """

    def __init__(self, rows: TextRows, lookups: Sequence[LookupChoice | None], read_lookup: ReadLookup | None) -> None:
        chosen = [one for one in lookups if one is not None]
        self.any = bool(chosen)
        if not chosen:
            return
        if read_lookup is None:
            raise ValueError("read_lookup: is required where settings look tokens up")
        distinct = list(dict.fromkeys(one.settings for one in chosen))
        readings = [read_lookup(one) for one in distinct]
        self._proposed = np.stack([one.proposed for one in readings])
        self._right = np.stack([one.right for one in readings])
        self._target_probs = rows.target_probs
        # Without a lookup nothing is proposed, whatever reading stands in.
        self._reading = np.array([0 if one is None else distinct.index(one.settings) for one in lookups])
        self._gamma = np.array([0 if one is None else one.gamma for one in lookups])
        self._threshold = np.array([0.0 if one is None else one.target_threshold for one in lookups])

    def at(self, lookup: Ints, text: Ints, row: Ints) -> tuple[Ints, Ints]:
        """(tokens proposed, how many of them are right) by these lookups at these places."""
        reading = self._reading[lookup]
        is_unsure = self._target_probs[text, row] < self._threshold[lookup]
        proposed = np.minimum(self._proposed[reading, text, row], self._gamma[lookup])
        return np.where(is_unsure, 0, proposed), self._right[reading, text, row]

    def one(self, text: int, row: int) -> tuple[int, int]:
        """The same of the first lookup at one place; nothing without a lookup."""
        if not self.any:
            return 0, 0
        proposed, right = self.at(np.array(0), np.array(text), np.array(row))
        return int(proposed), int(right)


@dataclass(frozen=True)
class _Step:
    """What each of some settings does at a place of a text; arrays."""

    drafted: Ints
    """Tokens that are computed; with nothing looked up either, 0 is the target alone."""
    looked_up: Ints
    kept: Ints
    """Tokens that are accepted."""
    verified: Ints
    """Siblings and other branches among them."""


class _Chains:
    """What each setting drafts at each place one token after the other, and what is right of it."""

    def __init__(self, reading: DraftReadings, rows: TextRows, settings: Settings) -> None:
        shapes = reading.accepted.shape, reading.confidence.shape
        wanted = rows.target_probs.shape
        if shapes[0][1:] != wanted or shapes[1] != shapes[0]:
            raise ValueError(f"reading: must have shape (depths, *{wanted}), got {shapes[0]}, {shapes[1]}")
        if settings.siblings and reading.ranks is None:
            raise ValueError(f"reading: must have ranks to replay {settings.siblings} siblings, has none")
        confidence = reading.confidence
        levels, self._level = np.unique(settings.draft_threshold, return_inverse=True)
        until = np.stack([drafts_before(confidence < level) for level in levels])  # (levels, P, T)
        self._until_unsure = np.where(confidence[0] == NOTHING, -1, until)
        self._until_wrong = drafts_before(reading.accepted == 0.0)
        self._gamma = settings.gamma
        self._siblings = SiblingRows(reading, settings) if settings.siblings else None
        self._is_hit = None if self._siblings is None else self._siblings.hits(self._until_wrong)

    def at(self, setting: Ints, text: Ints, row: Ints, room: Ints) -> tuple[Ints, Ints, Ints]:
        """(drafted, accepted, verified)."""
        unsure = self._until_unsure[self._level[setting], text, row] + 1
        count = np.maximum(np.minimum(np.minimum(self._gamma[setting], room), unsure), 0)
        right = self._until_wrong[text, row]
        kept = np.minimum(count, right)
        if self._siblings is None or self._is_hit is None:
            return count, kept, count
        kept = kept + ((count > right) & self._is_hit[text, row])
        return count, kept, count + self._siblings.count(text, row, count)


class _Trees:
    """The same of trees: levels drafted, tokens on the text's own path, and all that are verified."""

    def __init__(self, reading: TreeReadings, rows: TextRows, settings: Settings) -> None:
        shape, most = reading.scores.shape[:2], settings.tree_tokens
        if shape != rows.target_probs.shape:
            raise ValueError(f"reading: must have shape ({rows.target_probs.shape}, M), got {reading.scores.shape}")
        if not 1 <= most <= reading.most:
            raise ValueError(f"tree_tokens: must be from 1 to {reading.most}, as many as were read, got {most}")
        levels, self._level = np.unique(settings.draft_threshold, return_inverse=True)
        with np.errstate(divide="ignore"):
            logs = np.log(levels)
        self._gamma = np.minimum(settings.gamma, reading.depth)
        drafted, kept, verified = self._found = np.zeros((3, len(levels), int(self._gamma.max()) + 1, *shape), int)
        """By draft threshold and depth of the tree."""
        going = np.ones((len(levels), *shape), dtype=bool)
        own, is_own = np.maximum(reading.own, 0), reading.own >= 0
        for depth in range(1, drafted.shape[1]):
            for i, least in enumerate(logs):
                within = (reading.depths <= depth) & (reading.behind >= least)
                chosen = within & (np.cumsum(within, axis=-1) <= most)
                drafted[i, depth] = drafted[i, depth - 1] + going[i]
                on_path = np.take_along_axis(chosen, own, axis=-1) & is_own
                kept[i, depth], verified[i, depth] = on_path[..., :depth].sum(-1), chosen.sum(-1)
                going[i] &= (chosen & (reading.depths == depth) & (reading.scores >= least)).any(axis=-1)

    def at(self, setting: Ints, text: Ints, row: Ints, room: Ints) -> tuple[Ints, Ints, Ints]:
        """(drafted, accepted, verified)."""
        depth = np.clip(room, 0, self._gamma[setting])
        drafted, kept, verified = self._found[:, self._level[setting], depth, text, row]
        return drafted, kept, verified


class _Steps:
    """How many tokens each setting drafts at each position, or that the target goes alone there."""

    def __init__(self, drafts: _Chains | _Trees, rows: TextRows, settings: Settings, lookups: _Lookups) -> None:
        self.rows, self.settings, self._drafts, self._lookups = rows, settings, drafts, lookups
        self.num_texts = len(rows.lengths)
        self._unsure_target = rows.target_probs[None] < np.unique(settings.target_threshold)[:, None, None]
        self._target_level = np.unique(settings.target_threshold, return_inverse=True)[1]

    def at(self, setting: Ints, text: Ints, emitted: Ints) -> _Step:
        """The step after `emitted` tokens."""
        last = emitted - 1
        room = self.rows.max_new_tokens - emitted - 1
        computed = np.stack(self._drafts.at(setting, text, last, room))
        is_unsure = self._unsure_target[self._target_level[setting], text, last]
        drafted, kept, verified = np.where(is_unsure | (computed[0] == 0), 0, computed)
        if not self._lookups.any:
            return _Step(drafted, np.zeros_like(drafted), kept, verified)
        proposed, right = self._lookups.at(self.settings.lookup[setting], text, last)
        looked_up = np.maximum(np.minimum(proposed, room), 0)
        found = looked_up > 0
        kept = np.where(found, np.minimum(right, looked_up), kept)
        return _Step(np.where(found, 0, drafted), looked_up, kept, np.where(found, looked_up, verified))


def _run(steps: _Steps, table: Floats) -> Counts:
    """Every (setting, text) walks through its rounds, all of them side by side."""
    shape = (len(steps.settings), steps.num_texts)
    drafted, looked_up, rounds, target_only, verify_s = (np.zeros(shape[0] * shape[1]) for _ in range(5))
    setting, text = (axis.reshape(-1) for axis in np.indices(shape))
    emitted = np.ones(len(setting), dtype=np.int64)
    lengths = steps.rows.lengths[text]
    alive = np.flatnonzero(emitted < lengths)
    while len(alive):
        at = emitted[alive]
        step = steps.at(setting[alive], text[alive], at)
        alone = step.verified == 0
        drafted[alive] += step.drafted
        looked_up[alive] += step.looked_up
        rounds[alive] += ~alone
        target_only[alive] += alone
        verify_s[alive] += np.where(alone, 0.0, table[step.verified])
        emitted[alive] = at + step.kept + 1
        alive = alive[emitted[alive] < lengths[alive]]
    return Counts(*(one.reshape(shape) for one in (drafted, looked_up, rounds, target_only, verify_s)))


class SiblingRows:
    """Siblings of the drafts of a round that starts at each place of each text."""

    def __init__(self, reading: DraftReadings, settings: Settings) -> None:
        flags = np.full(reading.accepted.shape, fill_value=True)
        if settings.sibling_threshold < 1.0:
            flags = reading.confidence < settings.sibling_threshold
        self._flags = flags
        """At every depth and place, whether the draft there has any."""
        self._reading, self._settings = reading, settings
        # Drafts beyond the text are taken to be unsure.
        ahead = [_ahead(flags[min(d, len(flags) - 1)], d, filler=True) for d in range(int(settings.gamma.max()))]
        self._until = settings.siblings * np.cumsum([np.zeros_like(ahead[0], dtype=np.int64), *ahead], axis=0)

    def count(self, text: Ints | int, row: Ints | int, drafted: Ints | int) -> Ints:
        """Of rounds that start at these places, of so many drafts."""
        found: Ints = self._until[drafted, text, row]
        return found

    def hits(self, until_wrong: Ints) -> NDArray[np.bool_]:
        """(P, T): whether one of a round's first wrong draft, which comes after so many right ones, is right."""
        ranks = self._reading.ranks
        assert ranks is not None
        depth, num_texts, width = ranks.shape
        places = np.minimum(np.arange(width) + until_wrong, width - 1)
        at = np.minimum(until_wrong, depth - 1), np.arange(num_texts)[:, None], places
        found: NDArray[np.bool_] = self._flags[at] & (ranks[at] > 0) & (ranks[at] <= self._settings.siblings)
        return found


def drafts_before(flags: NDArray[np.bool_]) -> Ints:
    """(P, T): drafts of a round that starts at each place before the first flagged one; large where there is none.

    flags: (D + 1, P, T), the last depth standing for later ones.
    """
    width, depth = flags.shape[-1], len(flags) - 1
    far = 2 * width + (1 << 20)
    places = np.where(flags[depth], np.arange(width), far)
    following = np.minimum.accumulate(places[:, ::-1], axis=-1)[:, ::-1]
    distance: Ints = _ahead(following - np.arange(width), depth, far) + depth
    for d in range(depth - 1, -1, -1):
        distance = np.where(_ahead(flags[d], d, 0), d, distance)
    return distance


def _ahead(values: NDArray[Any], count: int, filler: int | bool) -> NDArray[Any]:
    """(P, T): what stands `count` places further on."""
    count = min(count, values.shape[1])
    padding = np.full((len(values), count), filler, dtype=values.dtype)
    return np.concatenate([values[:, count:], padding], axis=1)
