"""ReplayProposer: proposes the config with the best prediction that nobody has measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from layerskip.config.skip_mask import SkipMask
from search.outlook.forecast import Candidate, Candidates, Pool, best_first
from search.outlook.outlook import Outlook
from search.study.attributes import CONSIDERED
from search.study.space import DRAFT_VOCAB, GAMMA, SearchSpace
from search.study.trials import Key, was_interrupted
from search.trials.proposals import Proposal, ProposeOptions, measured_keys, repeat_due

_NUM_PARENTS = 6
_NUM_VARIANTS = 6
_CHANCE = 0.1
"""That a neighbour has the same sublayers, and differs in one of the two other things that a mask has."""


class _Field:
    """The candidates of one proposal, ranked by prediction."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self.best_first: list[Candidate] = []

    def add(self, candidates: Sequence[Candidate]) -> None:
        """Rank these among the others."""
        self.best_first = best_first([*self.best_first, *candidates])

    def settle(self, measured: Set[Key]) -> list[Candidate]:
        """Predict the leading one of the unmeasured on all texts, if it was on the first ones alone. Returns it."""
        best = next((one for one in self.best_first if one.key not in measured), None)
        if best is None or best.full_fidelity:
            return []
        mask = self._candidates.mask(best)
        refined = self._candidates.of(mask, full_fidelity=True)
        self.best_first = [one for one in self.best_first if one.full_fidelity or self._candidates.mask(one) != mask]
        self.add([refined])
        return [refined]

    def gain(self, measured: Set[Key]) -> float | None:
        """What the best of the unmeasured is expected to be above the best measured, as a share."""
        sides: tuple[list[float], list[float]] = ([], [])
        for one in self.best_first:
            if one.full_fidelity:
                sides[one.key in measured].append(one.log_speedup)
        unmeasured, tried = sides
        return math.expm1(max(unmeasured) - max(tried)) if unmeasured and tried else None


class ReplayProposer:
    """Every proposal follows from (trials, index, random generator), so that a resume equals an uninterrupted run.

    In turn: at the start the best of each drafter, where there are several; every `repeat_every`-th trial a leader
    again; otherwise new neighbours of the leading
    masks are predicted, and of all configs ever predicted and not measured the one with the best
    prediction is measured: `pool` if its mask was known before the first trial, else `replay`.

    Where configs can be predicted on more texts than the first ones (see `Predictor.with_more`), only one predicted on
    all of them is proposed: whatever leads on the first ones alone is predicted on all before it counts, because among
    many configs the first are always some that happen to suit a few texts. One is, a proposal, which has no time for
    neighbours then, unless all else is measured; if it does not lead any more, the best of those that were predicted on
    all is proposed.

    Cost: `num_readings` readings a proposal or a full-fidelity one, and some milliseconds.
    """

    @classmethod
    def of(cls, outlook: Outlook, options: ProposeOptions) -> ReplayProposer:
        """The one that proposes by a study's predictions."""
        return cls(outlook.space, options, outlook.candidates, outlook.pool, num_readings=outlook.num_readings)

    def __init__(
        self, space: SearchSpace, options: ProposeOptions, candidates: Candidates, pool: Pool, *, num_readings: int
    ) -> None:
        self._space, self._options = space, options
        self._candidates, self._pool = candidates, pool
        self._num_readings = num_readings
        self._read: dict[int, list[Candidate]] = {}
        self._pool_masks = {self._candidates.mask(one) for one in pool.candidates}

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        """See `Proposer`."""
        if again := repeat_due(trials, index, self._space, self._options):
            return again
        measured = measured_keys(trials)
        if first := next((one for one in self._best_by_drafter if one.key not in measured), None):
            return Proposal("drafter", first.params)
        self._candidates.predictor.learn(trials)
        predicted = self._all_predicted(trials)
        field = _Field(self._candidates)
        field.add(predicted)
        refined = field.settle(measured)
        leading = [one for one in field.best_first if self._has_mask(one)][:_NUM_PARENTS]
        is_used_up = all(one.key in measured for one in field.best_first)
        fresh = self._neighbours(leading, predicted, rng) if leading and (is_used_up or not refined) else []
        field.add(fresh)
        if leading:
            field.add(
                self._candidates.variants(
                    self._candidates.mask(leading[0]), _NUM_VARIANTS, full_fidelity=leading[0].full_fidelity
                )
            )
        left = [one for one in field.best_first if one.key not in measured]
        if not left:
            return Proposal("random")
        chosen = next((one for one in left if one.full_fidelity), left[0])
        origin = "pool" if self._candidates.mask(chosen) in self._pool_masks else "replay"
        considered = self._candidates.write([*refined, *fresh])
        return Proposal(origin, chosen.params, considered=considered, gain=field.gain(measured))

    @cached_property
    def _best_by_drafter(self) -> list[Candidate]:
        """What is measured first, each at the setting that was best for it before the first trial; none of a single
        drafter's, whose best comes first in any case."""
        if len(self._space.drafters) == 1:
            return []
        self._candidates.predictor.learn(())
        return list(self._candidates.best_by_drafter(self._pool).values())

    def _all_predicted(self, trials: Sequence[FrozenTrial]) -> list[Candidate]:
        """The pool and what earlier proposals predicted, each config once, full fidelity replacing screening."""
        found = {one.key: one for one in self._pool.candidates}
        for trial in trials:
            rows = trial.user_attrs.get(CONSIDERED)
            if not rows or was_interrupted(trial):
                continue
            if trial.number not in self._read:
                self._read[trial.number] = self._candidates.read(rows)
            found.update((one.key, one) for one in self._read[trial.number])
        if all(one.full_fidelity for one in found.values()):
            return list(found.values())
        full = {self._candidates.mask(one) for one in found.values() if one.full_fidelity and self._has_mask(one)}
        return [one for one in found.values() if one.full_fidelity or self._candidates.mask(one) not in full]

    @staticmethod
    def _has_mask(one: Candidate) -> bool:
        """Whether it drafts under a mask, and is not a lookup alone."""
        return any(name == GAMMA for name, _ in one.key)

    def _neighbours(
        self, parents: Sequence[Candidate], predicted: Sequence[Candidate], rng: np.random.Generator
    ) -> list[Candidate]:
        """New masks near the parents, predicted."""
        seen = {self._candidates.mask(one) for one in predicted}
        fresh: list[Candidate] = []
        for _ in range(4 * self._num_readings):
            if len(fresh) == self._num_readings:
                break
            # The best parent is the likeliest.
            place = min(int(rng.geometric(0.4)) - 1, len(parents) - 1)
            other = parents[int(rng.integers(len(parents)))]
            mask = self._near(parents[place].params, other.params, rng)
            if mask not in seen:
                seen.add(mask)
                fresh.append(self._candidates.of(mask))
        return fresh

    def _near(self, params: Mapping[str, Any], other: Mapping[str, Any], rng: np.random.Generator) -> SkipMask:
        """Mostly the sublayers change, now and then how many token ids the draft chooses from, or the bits of its
        weights."""
        if self._space.draft_vocabs and rng.random() < _CHANCE:
            changed: dict[str, Any] = {DRAFT_VOCAB: int(rng.choice(self._space.draft_vocabs))}
        elif self._space.draft_bits and rng.random() < _CHANCE:
            before = self._space.to_mask(params).bits
            others = [bits for bits in (None, *self._space.draft_bits) if bits != before]
            changed = self._space.bits_params(others[int(rng.integers(len(others)))])
        else:
            changed = move(params, other, self._space.bit_names, rng)
        return self._space.to_mask(dict(params) | changed)


def move(
    params: Mapping[str, Any], other: Mapping[str, Any], bit_names: Sequence[str], rng: np.random.Generator
) -> dict[str, bool]:
    """Bits of a neighbour: one or two flipped, a skipped and a kept one swapped, or a cross with another parent."""
    bits = {name: bool(params[name]) for name in bit_names}
    kind = rng.random()
    skipped = [name for name in bit_names if bits[name]]
    kept = [name for name in bit_names if not bits[name]]
    if kind < 0.15:
        chosen = [name for name in bit_names if bits[name] != bool(other[name]) and rng.random() < 0.5]
    elif kind < 0.45 and skipped and kept:
        chosen = [str(rng.choice(skipped)), str(rng.choice(kept))]
    else:
        count = min(len(bit_names), 1 if kind < 0.8 else 2)
        chosen = [str(name) for name in rng.choice(np.array(bit_names), size=count, replace=False)]
    return bits | {name: not bits[name] for name in chosen}
