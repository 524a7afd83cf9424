"""WarmProposer: warm starts and repeats; an Optuna sampler draws the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from optuna.trial import FrozenTrial

from search.outlook.warm_starts import warm_starts
from search.study.leaderboard import make_standings
from search.study.space import SearchSpace
from search.trials.proposals import Proposal, ProposeOptions, not_taken, propose_again


class WarmProposer:
    """Warm starts first, then every `repeat_every`-th trial measures a leading config again."""

    def __init__(self, space: SearchSpace, options: ProposeOptions, *, drawn_by: str) -> None:
        """drawn_by: the name of the Optuna sampler that draws the other trials."""
        self._space, self._options, self._drawn_by = space, options, drawn_by
        self._warm = warm_starts(space)

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """See `Proposer`."""
        if index < len(self._warm):
            return Proposal(f"warm:{self._warm[index].origin}", dict(self._warm[index].params))
        options, every = self._options, self._options.repeat_every
        if every and index % every == every - 1:
            entries = make_standings(trials, self._space, options.noise_sigma, options.num_first).entries
            if free := not_taken(entries, trials):
                return propose_again(free)
        return Proposal(self._drawn_by)
