"""TrialPhase: measure trials up to the total, or a handful where predictions say that nothing can win."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import optuna

from layerskip.machine.host import trim_heap
from search.storages.errors import storage_failures_shown
from search.study.attributes import CANNOT_WIN, FAILURE, PROCESS
from search.study.opening import set_sampler
from search.study.trials import WORKER_DIED, counted, expected_gains
from search.terminal.progress_events import SearchBegins
from search.trials.objective import Objective
from search.trials.proposals import ProposeOptions
from search.trials.sampler import make_sampler
from search.trials.setup import TrialSetup
from search.trials.watch import TrialWatch
from search.workers.process import process_token

Callback = Callable[[optuna.Study, optuna.trial.FrozenTrial], None]
SETTLED_AFTER = 3
"""Proposals in a row that expect no gain; each has looked at new neighbours of the best."""
HANDFUL = 6
"""Trials that check a prediction of no gain."""
_FREE_EVERY = 10
"""Trials of this process after which garbage is collected; what a trial freed is given back after each."""
_NUM_LATEST = 5
"""Trials, the longest of which tells how long the next one may take."""


class TrialPhase:
    """The search proper of one run."""

    def __init__(self, setup: TrialSetup, *, deadline: float = math.inf) -> None:
        """deadline: by the tools' clock, when the last trial must be over; one trial is measured in any case."""
        self._setup, self._study, self._spec, self._tools = setup, setup.study, setup.spec, setup.tools
        self._crew, self._say = setup.crew, setup.tools.reporter
        self._num_run = 0
        self._deadline = deadline
        self._latest_s = deque([setup.reference.trial_s], maxlen=_NUM_LATEST)

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
            broken = self._measure(few)
            leader = self._setup.leader_of(self._setup.trials)
            if broken is not None or leader is None or leader.speedup <= 1.0:
                best = (
                    "nothing was measured in full" if leader is None else f"the best measured is {leader.speedup:.3f}x"
                )
                self._study.set_user_attr(CANNOT_WIN, f"{reason}; {best}")
                return broken
            self._say.warn(f"trial {leader.trials[0]} reached {leader.speedup:.3f}x all the same: searching on")
        return self._measure(self._spec.trials)

    def _measure(self, total: int) -> str | None:
        spec, subject, reference, outlook = self._spec, self._setup.subject, self._setup.reference, self._setup.outlook
        done = counted(self._setup.trials)
        if done >= total:
            self._say.phase("search", f"all {total} trials are done: straight to the confirm stage")
            return None
        self._say.tell(SearchBegins(done, total, spec.sampler, spec.seed))
        options = ProposeOptions.of(spec, reference)
        crew, tools = self._crew, self._tools
        claims = crew.claims if crew else None
        if claims is not None:
            claims.is_stopped = lambda: tools.stop.received is not None
        sampler = make_sampler(spec.sampler, subject.space, options, outlook, claims)
        set_sampler(self._study, sampler)
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
        watch = TrialWatch(self._setup, done=done, total=total, ends_at=self._ends_at)
        with tools.stop.deferred():
            while self._goes_on(total, watch):
                self._one_trial(objective, watch)
        if tools.stop.received is not None:
            raise KeyboardInterrupt
        if watch.broken is None and counted(self._setup.trials) < total and not self._is_settled():
            self._say.phase("search", self._why_ended())
        if watch.broken is None and self._is_settled():
            trials = self._setup.trials
            most = max(expected_gains(trials, SETTLED_AFTER))
            self._say.phase(
                "search",
                f"settled after {counted(trials)} trials: no config that was not measured is expected to beat "
                f"the best by more than {self._spec.until_settled:g} %; at most by {max(0.0, 100 * most):.1f} %",
            )
        return watch.broken

    def _is_settled(self) -> bool:
        """Whether the spec asks for no more than what is measured already."""
        if self._spec.until_settled is None:
            return False
        gains = expected_gains(self._setup.trials, SETTLED_AFTER)
        return len(gains) == SETTLED_AFTER and max(gains) <= self._spec.until_settled / 100

    def _goes_on(self, total: int, watch: TrialWatch) -> bool:
        """Whether there is a trial to begin here; waits where only others' trials are missing, for one may yet die."""
        while watch.broken is None and self._tools.stop.received is None and self._has_time():
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

    def _one_trial(self, objective: Objective, watch: TrialWatch) -> None:
        number, start = len(self._setup.trials), self._tools.clock()
        try:
            with storage_failures_shown():
                callbacks: list[Callback] = [self._give_back, watch, *self._callbacks]
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

    def _give_back(self, _study: optuna.Study, _trial: optuna.trial.FrozenTrial) -> None:
        """A proposal's arrays come and go: what they leave in the heap wanders by a tenth of all memory otherwise.

        Nothing is timed meanwhile.
        """
        self._num_run += 1
        if self._num_run % _FREE_EVERY:
            trim_heap()
        else:
            self._setup.subject.decoder.free_memory()
