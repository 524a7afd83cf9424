"""TrialWatch: after each trial, say how it went and whether to go on."""

from __future__ import annotations

import math

import optuna
from optuna.trial import FrozenTrial, TrialState

from search.outlook.outlook import RECHECK_EVERY
from search.study.attributes import FAILURE
from search.study.trials import counted, was_interrupted
from search.terminal.progress_events import Drifted, TrialDone
from search.trials.setup import TrialSetup


class TrialWatch:
    """Optuna callback: tells each trial, and says in `broken` if failures in a row end the search."""

    def __init__(self, setup: TrialSetup, *, done: int, total: int, ends_at: float = math.inf) -> None:
        """ends_at: by the tools' clock, when the trials end at the latest."""
        self._setup, self._tools, self._total = setup, setup.tools, total
        self._start, self._ends_at = self._tools.clock(), ends_at
        self._num_at_start = self._num_done = done
        self._failures_in_row = 0
        self.broken: str | None = None
        """Why the search cannot go on."""

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if was_interrupted(trial):
            return  # a signal, or one too many: nothing to tell
        trials, total = study.get_trials(deepcopy=False), self._total
        done = counted(trials)
        num_before, self._num_done = self._num_done, done
        # Of the study: what other workers have measured meanwhile counts.
        pace = (self._tools.clock() - self._start) / max(1, done - self._num_at_start)
        eta_s = min(pace * max(0, total - done), max(0.0, self._ends_at - self._tools.clock()))
        self._tools.reporter.tell(TrialDone(trial, done, total, self._setup.leader_of(trials), eta_s))
        self._failures_in_row = self._failures_in_row + 1 if trial.state == TrialState.FAIL else 0
        if self._failures_in_row >= self._setup.spec.max_failures:
            reason = trial.user_attrs.get(FAILURE, "unknown")
            self.broken = f"{self._failures_in_row} trials in a row failed, the last one with {reason}"
        goes_on = self.broken is None and self._tools.stop.received is None and done < total
        if goes_on and done // RECHECK_EVERY > num_before // RECHECK_EVERY:
            self._recheck(study)

    def _recheck(self, study: optuna.Study) -> None:
        """Follow the machine: a cost that moved changes what is worth measuring."""
        try:
            moved = self._setup.outlook.recheck(study)
        except Exception as error:  # noqa: BLE001 (the search can do without; the next trial tells what is wrong)
            self._tools.reporter.warn(f"the costs could not be measured again: {type(error).__name__}: {error}")
            return
        self._tools.reporter.tell(Drifted(moved))
