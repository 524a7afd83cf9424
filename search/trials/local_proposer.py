"""LocalProposer: warm starts, repeats, single flips and local moves around measured leaders; no predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from search.outlook.warm_starts import warm_starts
from search.study.leaderboard import make_standings
from search.study.space import (
    DRAFT_INT8,
    DRAFT_THRESHOLD,
    DRAFT_VOCAB,
    GAMMA,
    LOOKUP_GAMMA,
    LOOKUP_THRESHOLD,
    MIN_MATCH,
    MIN_MATCH_MAX,
    MIN_PROBABILITY,
    SHARE_PREFIX,
    SIBLING_THRESHOLD,
    SIBLING_THRESHOLDS,
    SIBLINGS,
    TARGET_THRESHOLD,
    THRESHOLD_MAX,
    WEIGHTS_DRAFT_THRESHOLD,
    WEIGHTS_DRAFT_VOCAB,
    WEIGHTS_GAMMA,
    WEIGHTS_SIBLING_THRESHOLD,
    WEIGHTS_SIBLINGS,
    WEIGHTS_TARGET_THRESHOLD,
    WEIGHTS_TREE,
    SearchSpace,
    snap_threshold,
)
from search.study.trials import key_of
from search.trials.proposals import Proposal, ProposeOptions, measured_keys, not_taken, propose_again

_NUM_PARENTS = 4
_LOCAL_SHARE = 0.7
"""Of the trials that are neither warm starts nor repeats; Optuna's sampler draws the rest."""
_FLIP_SHARE = 0.7
"""Of those, while the leader has neighbours left that nobody has measured."""
_THRESHOLD_CHANCES = {
    WEIGHTS_DRAFT_THRESHOLD: 0.3,
    WEIGHTS_TARGET_THRESHOLD: 0.1,
    DRAFT_THRESHOLD: 0.3,
    TARGET_THRESHOLD: 0.1,
    LOOKUP_THRESHOLD: 0.1,
    MIN_PROBABILITY: 0.3,
}


class LocalProposer:
    """Warm starts first, then every `repeat_every`-th trial measures a leading config again, the rest are proposals.

    `local_share` of those are single flips of the leader and local moves around the leaders; Optuna's sampler, which
    `drawn_by` names, draws the others.
    """

    def __init__(
        self, space: SearchSpace, options: ProposeOptions, *, drawn_by: str, local_share: float = _LOCAL_SHARE
    ) -> None:
        self._space, self._options = space, options
        self._warm = warm_starts(space)
        self._drawn_by, self._local_share = drawn_by, local_share

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        """See `Proposer`."""
        if index < len(self._warm):
            return Proposal(f"warm:{self._warm[index].origin}", dict(self._warm[index].params))
        options = self._options
        entries = make_standings(trials, self._space, options.noise_sigma, options.num_first).entries
        every = options.repeat_every
        if every and index % every == every - 1 and (free := not_taken(entries, trials)):
            return propose_again(free)
        if entries and rng.random() < self._local_share:
            flips = unmeasured_flips(entries[0].params, trials, self._space)
            if flips and rng.random() < _FLIP_SHARE:
                return Proposal("flip", flips[int(rng.integers(len(flips)))])
            best_first = sorted(entries, key=lambda entry: -entry.speedup)[:_NUM_PARENTS]
            parent = best_first[int(rng.integers(len(best_first)))]
            return Proposal("local", local_move(parent.params, self._space, rng))
        return Proposal(self._drawn_by)


def unmeasured_flips(
    params: Mapping[str, Any], trials: Sequence[FrozenTrial], space: SearchSpace
) -> list[dict[str, Any]]:
    """Configs that differ from `params` in one bit of the mask and that no trial has tried.

    A mask has only 2L such neighbours, most of them hopeless and so cheap to measure; trying each of the leader's once
    finds the one sublayer too many or too few that random moves of several bits seldom isolate.
    """
    tried = measured_keys(trials)
    flips = [dict(params) | {name: not params[name]} for name in space.bit_names if name in params]
    return [flip for flip in flips if key_of(flip) not in tried]


def local_move(params: Any, space: SearchSpace, rng: np.random.Generator) -> dict[str, Any]:
    """A neighbour of the same drafter: one or a few bits flipped or a skipped and a kept one swapped; gamma, thresholds
    and the rest now and then.

    Always differs from `params` where the space has more than one point of this drafter.
    """
    moved = dict(params)
    bits = [name for name in space.bit_names if name in moved]
    if bits and rng.random() < 0.8:
        on = [name for name in bits if moved[name]]
        off = [name for name in bits if not moved[name]]
        if on and off and rng.random() < 0.3:
            chosen = [str(rng.choice(on)), str(rng.choice(off))]
        else:
            count = min(len(bits), 1 + int(rng.poisson(0.7)))
            chosen = [str(name) for name in rng.choice(bits, size=count, replace=False)]
        for name in chosen:
            moved[name] = not moved[name]
    gammas = ((GAMMA, space.gamma_max), (WEIGHTS_GAMMA, space.gamma_max))
    for name, most in (*gammas, (MIN_MATCH, MIN_MATCH_MAX), (LOOKUP_GAMMA, space.lookup_gamma_max)):
        if name in moved and rng.random() < 0.3:
            moved[name] = int(np.clip(moved[name] + rng.choice([-2, -1, 1, 2]), 1, most))
    for name, chance in _THRESHOLD_CHANCES.items():
        if name in moved and rng.random() < chance:
            moved[name] = snap_threshold(float(np.clip(moved[name] + rng.normal(0, 0.15), 0, THRESHOLD_MAX)))
    for name in (SHARE_PREFIX, DRAFT_INT8):
        if name in moved and rng.random() < 0.2:
            moved[name] = not moved[name]
    for name in (SIBLINGS, WEIGHTS_SIBLINGS):
        if name in moved and rng.random() < 0.2:
            moved[name] = int(np.clip(moved[name] + rng.choice([-1, 1]), 0, space.siblings_max))
    for name in (SIBLING_THRESHOLD, WEIGHTS_SIBLING_THRESHOLD):
        if name in moved and rng.random() < 0.2:
            moved[name] = float(rng.choice(SIBLING_THRESHOLDS))
    for name in (DRAFT_VOCAB, WEIGHTS_DRAFT_VOCAB):
        if name in moved and rng.random() < 0.2:
            moved[name] = int(rng.choice(space.draft_vocabs))
    if WEIGHTS_TREE in moved and rng.random() < 0.3:
        moved[WEIGHTS_TREE] = int(rng.choice(space.trees))
    # Siblings that a shared prefix or a long draft leaves no room for would be another name of the same config.
    moved, before = (space.to_params(space.to_config(one)) for one in (moved, params))
    if moved == before:
        thresholds = (DRAFT_THRESHOLD, WEIGHTS_DRAFT_THRESHOLD, LOOKUP_THRESHOLD)
        name = str(rng.choice(bits)) if bits else next(one for one in thresholds if one in moved)
        moved[name] = not moved[name] if bits else snap_threshold(0.5 if moved[name] != 0.5 else 0.0)
    return moved
