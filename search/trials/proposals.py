"""Proposal and Proposer: what to measure next, what every way to decide it shares, and the simplest: WarmProposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from optuna.trial import FrozenTrial

from search.measure.reference import Reference
from search.outlook.warm_starts import warm_starts
from search.study.leaderboard import Entry, make_standings
from search.study.space import SearchSpace
from search.study.spec import StudySpec
from search.study.trials import Key, key_of, was_interrupted

_NUM_REPEAT = 4


@dataclass(frozen=True)
class ProposeOptions:
    """What proposers need to know of the study."""

    repeat_every: int
    noise_sigma: float
    num_first: int
    """Prompts of a first trial."""
    seed: int = 0
    """Of what an Optuna sampler draws, and of every proposer's random choices."""

    @classmethod
    def of(cls, spec: StudySpec, reference: Reference) -> ProposeOptions:
        """A study's."""
        return cls(spec.repeat_every, reference.noise_sigma, reference.num_per_trial, spec.seed)


@dataclass(frozen=True)
class Proposal:
    """Where a trial's config comes from; `params` is None where an Optuna sampler draws it."""

    origin: str
    params: dict[str, Any] | None = None
    repeat_of: int | None = None
    considered: list[list[Any]] | None = None
    """Configs that were predicted for this proposal, for later ones to know; see `Candidates.write`."""
    gain: float | None = None
    """What the best config that nobody measured is expected to gain on the best measured one, as a share; None where
    nothing is expected."""


class Proposer(Protocol):
    """Says what to measure next; a pure function of its arguments and of what it was built with."""

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        """The proposal after `index` trials that count or will; `trials` may hold interrupted ones besides.

        Trials that others are measuring, or that are queued, stand among `trials` with the parameters they will have.
        """
        ...


def least_measured(entries: Sequence[Entry]) -> Entry:
    """Of the leaders by point estimate, the one with the fewest trials: the likeliest to be there by luck."""
    leaders = sorted(entries, key=lambda entry: -entry.speedup)[:_NUM_REPEAT]
    return min(leaders, key=lambda entry: len(entry.trials))


def propose_again(entries: Sequence[Entry]) -> Proposal:
    """To measure a leader again; there must be one."""
    again = least_measured(entries)
    return Proposal("repeat", dict(again.params), again.trials[0])


def not_taken(entries: Sequence[Entry], trials: Sequence[FrozenTrial]) -> list[Entry]:
    """Those that nobody is measuring, or is going to."""
    taken = {key_of(trial.params) for trial in trials if not trial.state.is_finished()}
    return [entry for entry in entries if key_of(entry.params) not in taken]


def repeat_due(
    trials: Sequence[FrozenTrial], index: int, space: SearchSpace, options: ProposeOptions
) -> Proposal | None:
    """Every `repeat_every`-th trial measures a leader again that nobody is measuring; None at all other trials."""
    every = options.repeat_every
    if not every or index % every != every - 1:
        return None
    entries = make_standings(trials, space, options.noise_sigma, options.num_first).entries
    free = not_taken(entries, trials)
    return propose_again(free) if free else None


def measured_keys(trials: Sequence[FrozenTrial]) -> set[Key]:
    """Configs that some trial has tried.

    An interrupted trial measured nothing: proposing it again is what makes a resume equal an uninterrupted run.
    """
    return {key_of(trial.params) for trial in trials if not was_interrupted(trial)}


class WarmProposer:
    """Warm starts first, then leaders again where that is due; an Optuna sampler draws the rest."""

    def __init__(self, space: SearchSpace, options: ProposeOptions, *, drawn_by: str) -> None:
        """drawn_by: the name of the Optuna sampler that draws the other trials."""
        self._space, self._options, self._drawn_by = space, options, drawn_by
        self._warm = warm_starts(space)

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """See `Proposer`."""
        if index < len(self._warm):
            return Proposal(f"warm:{self._warm[index].origin}", dict(self._warm[index].params))
        return repeat_due(trials, index, self._space, self._options) or Proposal(self._drawn_by)
