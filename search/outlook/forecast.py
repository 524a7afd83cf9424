"""Forecast: everything that is known before the first trial, and the pool of configs worth measuring."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerskip.config.decode_config import DecodeConfig, DrafterName, DraftWeights, ways_by
from layerskip.config.skip_mask import SkipMask
from search.outlook.warm_starts import warm_starts
from search.predict.costs import named
from search.predict.predictor import Predicted, Predictor
from search.predict.sensitivity import Sensitivity
from search.study.lookup_choice import LookupChoice
from search.study.space import GAMMA, SearchSpace
from search.study.trials import Key, key_of

_NUM_ELITE = 4
_NUM_ORDERED = 12
_NUM_EXITS = 12
_LEAST_READINGS = 3
"""However little time there is."""
_NUM_BY_WEIGHTS = 6
"""Settings of trained weights, alone and after each lookup."""
_WEIGHTS = "weights"
"""Stands for a mask in what is written down, with their fingerprint."""
_NUM_LOOKUPS = 4
"""Of each method, to be measured if they lead: predictions leave out what a lookup itself takes."""


@dataclass(frozen=True)
class Candidate:
    """A config that was predicted, and not necessarily measured."""

    key: Key
    """Its parameters: a search keeps every config it ever predicted, and keys share their pairs."""
    log_speedup: float
    """Predicted."""
    full_fidelity: bool = True
    """On all texts; if not, on the first ones alone, and the setting is the best on those."""

    @property
    def params(self) -> dict[str, Any]:
        """By name."""
        return dict(self.key)


def best_first(found: Iterable[Candidate]) -> list[Candidate]:
    """By prediction; those alike stay in order."""
    return sorted(found, key=lambda one: -one.log_speedup)


class Candidates:
    """Predicts masks of a space and writes configs down in a few characters."""

    def __init__(self, predictor: Predictor, space: SearchSpace) -> None:
        self.predictor = predictor
        self._space = space
        self._masks: dict[Key, SkipMask] = {}

    def mask(self, candidate: Candidate) -> SkipMask:
        """A candidate's."""
        if candidate.key not in self._masks:
            self._masks[candidate.key] = self._space.to_mask(candidate.params)
        return self._masks[candidate.key]

    def of(self, mask: SkipMask, *, full_fidelity: bool = False) -> Candidate:
        """The mask at its best predicted setting, on the first texts or on all. Cost: a reading if the mask is new."""
        return self._candidate(self._best(mask, full_fidelity=full_fidelity), full_fidelity=full_fidelity)

    def variants(self, mask: SkipMask, count: int, *, full_fidelity: bool = False) -> list[Candidate]:
        """The mask at its `count` best settings, and each with siblings where the space has them and they are worth
        it."""
        found = self.predictor.best_settings(mask, count, full_fidelity=full_fidelity)
        return [
            self._candidate(one, full_fidelity=full_fidelity)
            for best in found
            for one in (best, *self._siblings(best, full_fidelity=full_fidelity))
        ]

    def _best(self, mask: SkipMask, *, full_fidelity: bool) -> Predicted:
        best = self.predictor.best_setting(mask, full_fidelity=full_fidelity)
        others = self._siblings(best, full_fidelity=full_fidelity)
        return max(best, *others, key=lambda one: one.speedup) if others else best

    def _siblings(self, one: Predicted, *, full_fidelity: bool) -> list[Predicted]:
        found = self.predictor.with_siblings(one, self._space.siblings_max, full_fidelity=full_fidelity)
        return [] if found is None else [found]

    def lookups_alone(self, methods: Sequence[str]) -> list[Candidate]:
        """The best lookups of each method, without a mask, on all texts; best first. Cost: see `best_lookups`."""
        found = self.predictor.best_lookups(methods, self._space.lookup_gamma_max, count=_NUM_LOOKUPS)
        return [self._candidate(one, full_fidelity=True) for one in found if one.config.drafter in self._space.drafters]

    def by_weights(self, lookups: Sequence[LookupChoice | None]) -> list[Candidate]:
        """The best settings of each of the space's trained weights, alone and after one of these lookups, as far as it
        has both. Cost: of each a reading on all texts and a replay of the grid."""
        found: list[Predicted] = []
        for weights in self._space.draft_weights:
            alone, hybrid = ways_by(weights)
            variants = self._space.variants_of(weights)
            if alone in self._space.drafters:
                found += self._best_by_weights(variants, [None])
            if hybrid in self._space.drafters and lookups:
                found += self._best_by_weights(variants, lookups)
        return [self._candidate(one, full_fidelity=True) for one in found]

    def _best_by_weights(self, each: Sequence[DraftWeights], lookups: Sequence[LookupChoice | None]) -> list[Predicted]:
        def best(some: Iterable[DraftWeights]) -> list[Predicted]:
            return [one for by in some for one in self.predictor.best_by_weights(by, lookups, count=_NUM_BY_WEIGHTS)]

        found = best(one for one in each if not one.tree_tokens)
        # A tree is read with as many ids as the best chain has.
        own = max(found, key=lambda one: one.speedup).config.draft_weights
        found += best(one for one in each if one.tree_tokens and own == one.branching(None))
        if self._space.has_weights_siblings(each[0].drafter):
            found += [more for one in found for more in self._siblings(one, full_fidelity=True)]
        return sorted(found, key=lambda one: -one.speedup)[:_NUM_BY_WEIGHTS]

    def best_by_drafter(self, pool: Pool) -> dict[str, Candidate]:
        """The best of each drafter of the space that can be told from the pool, best first.

        Cost: up to two replays of the pool's best mask.
        """
        found: dict[str, Candidate] = {}
        for one in best_first(pool.candidates):
            if one.full_fidelity:
                found.setdefault(self._space.to_config(one.params).way, one)
        for drafter in {"layer_skip", "hybrid"} & set(self._space.drafters) - found.keys():
            mask = self._space.to_mask(pool.best_mask.params)
            if best := self.predictor.best_settings(mask, 1, full_fidelity=True, hybrid=drafter == "hybrid"):
                found[drafter] = self._candidate(best[0], full_fidelity=True)
        return dict(sorted(found.items(), key=lambda item: -item[1].log_speedup))

    def _candidate(self, one: Predicted, *, full_fidelity: bool) -> Candidate:
        key, log = key_of(self._space.to_params(one.config)), float(np.log(one.speedup))
        return Candidate(key, log, full_fidelity=full_fidelity or not self.predictor.has_more)

    def write(self, candidates: Iterable[Candidate]) -> list[list[Any]]:
        """JSON values: mask in text form, gamma, thresholds, log speedup; siblings, where the space has them; true for
        a mask that was read on all texts, where there are more than the first ones; and the lookup, alone where it has
        no gamma of its own."""
        rows: list[list[Any]] = []
        for one in candidates:
            config = self._space.to_config(one.params)
            weights = config.draft_weights
            by = str(config.skip_mask)
            if weights is not None:
                by = ":".join([_WEIGHTS, *named(weights).split()])
            row = [by, config.gamma, config.draft_threshold, config.target_threshold]
            on_all = [True] if self.predictor.has_more and config.drafts_by_mask and one.full_fidelity else []
            lookup = [] if config.lookup is None else [config.lookup.model_dump(exclude_none=True)]
            siblings = [[config.siblings, config.sibling_threshold]] if self._space.siblings_max else []
            rows.append([*row, round(one.log_speedup, 5), *siblings, *on_all, *lookup])
        return rows

    def read(self, rows: Iterable[Sequence[Any]]) -> list[Candidate]:
        """The inverse of `write`."""
        found = []
        for mask, gamma, draft_threshold, target_threshold, log_speedup, *more in rows:
            lookup = more.pop() if more and isinstance(more[-1], dict) else None
            siblings, below = more.pop(0) if self._space.siblings_max else (0, 1.0)
            weights = self._weights_called(mask)
            alone: DrafterName = "layer_skip" if weights is None else weights.drafter
            config = DecodeConfig(
                drafter=alone if lookup is None else "hybrid" if "gamma" in lookup else lookup["method"],
                skip_mask=SkipMask.none(self._space.num_layers) if weights else SkipMask.parse(mask),
                draft_weights=weights,
                gamma=gamma,
                draft_threshold=draft_threshold,
                target_threshold=target_threshold,
                siblings=siblings,
                sibling_threshold=below,
                lookup=lookup,
            )
            full_fidelity = bool(more) or not self.predictor.has_more or not config.drafts_by_mask
            key = key_of(self._space.to_params(config))
            found.append(Candidate(key, float(log_speedup), full_fidelity=full_fidelity))
        return found

    def _weights_called(self, text: str) -> DraftWeights | None:
        word, fingerprint, *sizes = [*text.split(":"), ""]
        if word != _WEIGHTS:
            return None
        found = next(one for one in self._space.draft_weights if one.fingerprint == fingerprint)
        vocab = next((int(one[1:]) for one in sizes if one.startswith("v")), None)
        tree = next((int(one[1:]) for one in sizes if one.startswith("t")), None)
        return found.narrowed(vocab).branching(tree)


@dataclass(frozen=True)
class Pool:
    """Masks predicted before the first trial, best first."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The first that was predicted on all texts, as long as there is one."""
        return next((one for one in self.candidates if one.full_fidelity), self.candidates[0])

    @property
    def best_mask(self) -> Candidate:
        """The same of those that draft under a mask, as long as there is one."""
        masks = [one for one in self.candidates if any(name == GAMMA for name, _ in one.key)]
        return Pool(tuple(masks)).best if masks else self.best

    def with_others(self, others: Sequence[Candidate]) -> Pool:
        """These too, each in its place by prediction."""
        return Pool(tuple(best_first([*self.candidates, *others])))

    @property
    def num_full_fidelity(self) -> int:
        """Masks that were predicted on all texts."""
        return sum(one.full_fidelity for one in self.candidates)

    def to_json(self, candidates: Candidates) -> str:
        """One line, for a study's attributes."""
        return json.dumps(candidates.write(self.candidates), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, candidates: Candidates) -> Pool:
        """The inverse of `to_json`."""
        return cls(tuple(candidates.read(json.loads(text))))


def make_pool(
    candidates: Candidates,
    space: SearchSpace,
    sensitivity: Sensitivity,
    *,
    seed: int,
    seconds: float,
    max_readings: int = 400,
    clock: Callable[[], float] = time.perf_counter,
) -> Pool:
    """Known shapes, exits, sublayers skipped in order of sensitivity; the best of them with weights of fewer bits, and
    with fewer token ids to choose from; then climbs from the best by single flips.

    Cost: at most `max_readings` readings, and about `seconds`; three readings in any case.
    """
    start = clock()
    found: dict[SkipMask, Candidate] = {}

    def spent() -> bool:
        return len(found) >= max_readings or (len(found) >= _LEAST_READINGS and clock() - start > seconds)

    for mask in (*known_masks(space), *_ordered_masks(space, sensitivity)):
        if mask not in found and not spent():
            found[mask] = candidates.of(mask)
    best = _elite(found)
    for fewer in space.draft_bits:
        # With nothing skipped it is a good draft (a warm start), so masks that skip little are worth a look.
        for mask in (*_ordered_masks(space, sensitivity)[:_NUM_ELITE], *best):
            rounded = mask.rounded(fewer)
            if rounded not in found and not spent():
                found[rounded] = candidates.of(rounded)
    for mask in _elite(found):
        for size in space.draft_vocabs[1:]:
            if (mask.num_skipped or mask.bits) and not spent():
                narrow = space.narrowed(mask, size)
                found[narrow] = candidates.of(narrow)
    rng = np.random.default_rng(seed)
    climbed: set[SkipMask] = set()
    while not spent():
        parent = next((mask for mask in _elite(found) if mask not in climbed), None)
        if parent is None:
            break
        climbed.add(parent)
        for bit in rng.permutation(np.array(space.bit_names)):
            bits = space.to_bits(parent)
            neighbour = space.to_mask(bits | {str(bit): not bits[str(bit)]})
            if neighbour not in found and not spent():
                found[neighbour] = candidates.of(neighbour)
    return Pool(tuple(best_first(found.values())))


def _elite(found: Mapping[SkipMask, Candidate]) -> list[SkipMask]:
    return sorted(found, key=lambda mask: -found[mask].log_speedup)[:_NUM_ELITE]


def known_masks(space: SearchSpace) -> list[SkipMask]:
    """The warm starts' masks and early exits at up to a dozen depths."""
    masks = [space.to_mask(start.params) for start in warm_starts(space)]
    if space.num_layers > 1:
        exits = np.unique(np.linspace(1, space.num_layers - 1, _NUM_EXITS).round().astype(int)).tolist()
        masks += [space.to_mask(space.to_bits(SkipMask.early_exit(space.num_layers, i))) for i in exits]
    return list(dict.fromkeys(masks))


def _ordered_masks(space: SearchSpace, sensitivity: Sensitivity) -> list[SkipMask]:
    """The most dispensable sublayers skipped, a few of them to nearly all."""
    order = sensitivity.order()
    sizes = np.unique(np.linspace(1, max(1, len(order) - 1), _NUM_ORDERED).round().astype(int))
    return [space.to_mask({name: name in set(order[:size]) for name in space.bit_names}) for size in sizes]
