"""TrialPhase: measure trials up to the total, or a handful where predictions say that nothing can win."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip.machine.host import trim_heap
from search.context import Tools
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.outlook.outlook import RECHECK_EVERY, Outlook
from search.storages.errors import storage_failures_shown
from search.study.attributes import CANNOT_WIN, FAILURE, PROCESS
from search.study.leaderboard import Entry
from search.study.spec import StudySpec
from search.study.trials import WORKER_DIED, counted, expected_gains, was_interrupted
from search.terminal.progress_events import Drifted, SearchBegins, TrialDone
from search.trials.objective import Objective, standings_of
from search.trials.proposals import ProposeOptions
from search.trials.sampler import make_sampler
from search.workers.crew import Crew
from search.workers.process import process_token

Callback = Callable[[optuna.Study, FrozenTrial], None]
SETTLED_AFTER = 3
"""Proposals in a row that expect no gain; each has looked at new neighbours of the best."""
HANDFUL = 6
"""Trials that check a prediction of no gain."""
_FREE_EVERY = 10
"""Trials of this process after which garbage is collected; what a trial freed is given back after each."""
_NUM_LATEST = 5
"""Trials, the longest of which tells how long the next one may take."""


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of one run are proposed and measured with."""

    study: optuna.Study
    subject: Subject
    spec: StudySpec
    reference: Reference
    outlook: Outlook
    tools: Tools
    crew: Crew | None = None
    """The workers that share the study; None for a run by itself."""

    @property
    def trials(self) -> list[FrozenTrial]:
        """The study's trials so far."""
        return self.study.get_trials(deepcopy=False)

    def leader_of(self, trials: Sequence[FrozenTrial]) -> Entry | None:
        """The config with the best pooled lower bound."""
        return standings_of(trials, self.subject.space, self.reference).leader


class TrialPhase:
    """The search proper of one run."""

    def __init__(self, setup: TrialSetup, *, deadline: float = math.inf) -> None:
        """deadline: by the tools' clock, when the last trial must be over; one trial is measured in any case."""
        self._setup, self._study, self._spec, self._tools = setup, setup.study, setup.spec, setup.tools
        self._crew, self._say = setup.crew, setup.tools.reporter
        self._num_run = 0
        self._deadline = deadline
        self._latest_s = deque([setup.reference.trial_s], maxlen=_NUM_LATEST)
        self.broken: str | None = None
        """Why the search cannot go on."""

    def run(self, callbacks: Sequence[Callback] = ()) -> str | None:
        """Returns why the run must end without a result, else None. Raises: KeyboardInterrupt if stopped.

        `callbacks` are called after each trial, outside of anything timed.
        """
        self._callbacks = list(callbacks)
        self._start = self._tools.clock()
        reason = None if self._spec.force else self._setup.outlook.cannot_win()
        if self._study.user_attrs.get(CANNOT_WIN) is not None:
            self._study.set_user_attr(CANNOT_WIN, None)  # an earlier run's word, to be found out again
        if reason is not None:
            few = min(HANDFUL, self._spec.trials)
            self._say.warn(f"{reason}; measuring {few} trials to confirm (--force searches on)")
            self._measure(few)
            leader = self._setup.leader_of(self._setup.trials)
            if self.broken is not None or leader is None or leader.speedup <= 1.0:
                best = (
                    "nothing was measured in full"
                    if leader is None
                    else f"the best is estimated at {leader.speedup:.3f}x"
                )
                self._study.set_user_attr(CANNOT_WIN, f"{reason}; {best}")
                return self.broken
            self._say.warn(f"trial {leader.trials[0]} is estimated at {leader.speedup:.3f}x all the same: searching on")
        self._measure(self._spec.trials)
        return self.broken

    def _measure(self, total: int) -> None:
        spec, subject, reference, outlook = self._spec, self._setup.subject, self._setup.reference, self._setup.outlook
        done = counted(self._setup.trials)
        if done >= total:
            self._say.phase("search", f"all {total} trials are done: straight to the confirm stage")
            return
        self._say.tell(SearchBegins(done, total, spec.sampler, spec.seed))
        options = ProposeOptions.of(spec, reference)
        crew, tools = self._crew, self._tools
        claims = crew.claims if crew else None
        if claims is not None:
            claims.is_stopped = lambda: tools.stop.received is not None
        sampler = make_sampler(spec.sampler, subject.space, options, outlook, claims)
        self._study.sampler = sampler
        objective = Objective(
            subject.decoder,
            subject.space,
            reference,
            sampler,
            tools.stop,
            tools.clock,
            outlook,
            queues_again=crew is not None,
            is_speedup=spec.objective == "speedup",
            limit_s=spec.trial_timeout_s,
            hang_grace_s=tools.patience.hang_grace_s,
        )
        self._total, self._num_at_start, self._num_done = total, done, done
        self._measuring_since = tools.clock()
        self._failures_in_row = 0
        with tools.stop.deferred():
            while self._goes_on(total):
                self._one_trial(objective)
        if tools.stop.received is not None:
            raise KeyboardInterrupt
        if self.broken is None and counted(self._setup.trials) < total and not self._is_settled():
            self._say.phase("search", self._why_ended())
        if self.broken is None and self._is_settled():
            trials = self._setup.trials
            most = max(expected_gains(trials, SETTLED_AFTER))
            self._say.phase(
                "search",
                f"settled after {counted(trials)} trials: no config that was not measured is expected to beat "
                f"the best by more than {self._spec.until_settled:g} %; at most by {max(0.0, 100 * most):.1f} %",
            )

    def _is_settled(self) -> bool:
        """Whether the spec asks for no more than what is measured already."""
        if self._spec.until_settled is None:
            return False
        gains = expected_gains(self._setup.trials, SETTLED_AFTER)
        return len(gains) == SETTLED_AFTER and max(gains) <= self._spec.until_settled / 100

    def _goes_on(self, total: int) -> bool:
        """Whether there is a trial to begin here; waits where only others' trials are missing, for one may yet die."""
        while self.broken is None and self._tools.stop.received is None and self._has_time():
            if self._is_settled():
                return False
            if self._crew is None:
                return counted(self._setup.trials) < total
            self._crew.rejoin_if_lost()
            self._crew.sweep()
            if self._crew.may_begin(total):
                return True
            if counted(self._setup.trials) >= total:
                return False
            with self._tools.stop.interruptible():
                self._crew.pause()
        return False

    def _one_trial(self, objective: Objective) -> None:
        number, start = len(self._setup.trials), self._tools.clock()
        try:
            with storage_failures_shown():
                callbacks: list[Callback] = [self._give_back, self._after, *self._callbacks]
                self._study.optimize(objective, n_trials=1, catch=(Exception,), callbacks=callbacks)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            mine = [one for one in self._setup.trials[number:] if one.user_attrs.get(PROCESS) == process_token()]
            if not any(one.user_attrs.get(FAILURE, "").startswith(WORKER_DIED) for one in mine):
                raise
            # Others took this worker for dead, because it slept, and have queued its config again.
            self._say.warn(f"trial {mine[-1].number} came too late: others took this worker for dead meanwhile")
        self._latest_s.append(self._tools.clock() - start)

    @property
    def _ends_at(self) -> float:
        """When no trial goes on any more, by the time limit or the budget."""
        limit = self._spec.timeout_s
        return min(self._deadline, math.inf if limit is None else self._start + limit)

    def _has_time(self) -> bool:
        """Before the time limit a trial may begin; with a budget it must be expected to end in time."""
        now, limit = self._tools.clock(), self._spec.timeout_s
        if limit is not None and now - self._start >= limit:
            return False
        return now + max(self._latest_s) <= self._deadline or not counted(self._setup.trials)

    def _why_ended(self) -> str:
        limit = self._spec.timeout_s
        if limit is not None and self._tools.clock() - self._start >= limit:
            return f"time limit of {limit:g} s reached"
        if self._deadline < math.inf:
            return f"{counted(self._setup.trials)} trials; what is left of the budget is the confirm stage's"
        return "ended early"

    def _give_back(self, _study: optuna.Study, _trial: FrozenTrial) -> None:
        """A proposal's arrays come and go: what they leave in the heap wanders by a tenth of all memory otherwise.

        Nothing is timed meanwhile.
        """
        self._num_run += 1
        if self._num_run % _FREE_EVERY:
            trim_heap()
        else:
            self._setup.subject.decoder.free_memory()

    def _after(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Tell how a trial went, find out whether to go on, and now and then measure the costs again."""
        if was_interrupted(trial):
            return  # a signal, or one too many: nothing to tell
        trials, total = study.get_trials(deepcopy=False), self._total
        done = counted(trials)
        num_before, self._num_done = self._num_done, done
        # Of the study: what other workers have measured meanwhile counts.
        pace = (self._tools.clock() - self._measuring_since) / max(1, done - self._num_at_start)
        eta_s = min(pace * max(0, total - done), max(0.0, self._ends_at - self._tools.clock()))
        self._say.tell(TrialDone(trial, done, total, self._setup.leader_of(trials), eta_s))
        self._failures_in_row = self._failures_in_row + 1 if trial.state == TrialState.FAIL else 0
        if self._failures_in_row >= self._spec.max_failures:
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
            self._say.warn(f"the costs could not be measured again: {type(error).__name__}: {error}")
            return
        self._say.tell(Drifted(moved))
