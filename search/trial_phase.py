"""TrialPhase: measure trials up to the total, or a handful where predictions say that nothing can win."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optuna

from search.leaderboard import counted
from search.objective import Objective, standings_of
from search.outlook import Outlook
from search.proposals import ProposeOptions
from search.reference import Reference
from search.samplers import make_sampler
from search.spec import StudySpec
from search.study import set_sampler
from search.subject import Subject, Tools
from search.terminal.progress_events import SearchBegins
from search.trial_watch import TrialWatch

Callback = Callable[[optuna.Study, optuna.trial.FrozenTrial], None]
HANDFUL = 6
"""Trials that check a prediction of no gain."""
CANNOT_WIN = "cannot_win"
"""Attribute of the study: why the search was cut short."""


class TrialPhase:
    """The search proper of one run."""

    def __init__(
        self,
        study: optuna.Study,
        reference: Reference,
        outlook: Outlook,
        subject: Subject,
        spec: StudySpec,
        tools: Tools,
    ) -> None:
        self._study, self._reference, self._outlook = study, reference, outlook
        self._subject, self._spec, self._tools = subject, spec, tools
        self._say = tools.reporter

    def run(self, callbacks: Sequence[Callback] = ()) -> str | None:
        """Returns why the run must end without a result, else None. Raises: KeyboardInterrupt if stopped.

        `callbacks` are called after each trial, outside of anything timed.
        """
        self._callbacks = list(callbacks)
        self._start = self._tools.clock()
        reason = None if self._spec.force else self._outlook.cannot_win()
        if self._study.user_attrs.get(CANNOT_WIN) is not None:
            self._study.set_user_attr(CANNOT_WIN, None)  # an earlier run's word, to be found out again
        if reason is not None:
            few = min(HANDFUL, self._spec.trials)
            self._say.warn(f"{reason}; measuring {few} trials to confirm (--force searches on)")
            broken = self._measure(few)
            leader = standings_of(self._trials(), self._subject.space, self._reference).leader
            if broken is not None or leader is None or leader.speedup <= 1.0:
                best = (
                    "nothing was measured in full" if leader is None else f"the best measured is {leader.speedup:.3f}x"
                )
                self._study.set_user_attr(CANNOT_WIN, f"{reason}; {best}")
                return broken
            self._say.warn(f"trial {leader.trials[0]} reached {leader.speedup:.3f}x all the same: searching on")
        return self._measure(self._spec.trials)

    def _measure(self, total: int) -> str | None:
        spec, subject, reference = self._spec, self._subject, self._reference
        done = counted(self._trials())
        if done >= total:
            self._say.phase("search", f"all {total} trials are done: straight to the confirm stage")
            return None
        self._say.tell(SearchBegins(done, total, spec.sampler, spec.seed))
        options = ProposeOptions(spec.repeat_every, reference.noise_sigma, reference.num_per_trial)
        sampler = make_sampler(spec.sampler, subject.space, spec.seed, options, self._outlook)
        set_sampler(self._study, sampler)
        objective = Objective(
            subject.decoder, subject.space, reference, sampler, self._tools.stop, self._tools.clock, self._outlook
        )
        watch = TrialWatch(spec, subject.space, reference, self._tools, total=total, outlook=self._outlook)
        with self._tools.stop.deferred():
            self._study.optimize(
                objective,
                n_trials=total - done,
                timeout=self._time_left(),
                catch=(Exception,),
                callbacks=[watch, *self._callbacks],
            )
        if self._tools.stop.received is not None:
            raise KeyboardInterrupt
        if watch.broken is None and counted(self._trials()) < total:
            self._say.phase(
                "search", f"time limit of {spec.timeout_s:g} s reached" if spec.timeout_s else "ended early"
            )
        return watch.broken

    def _time_left(self) -> float | None:
        if self._spec.timeout_s is None:
            return None
        return max(0.0, self._spec.timeout_s - (self._tools.clock() - self._start))

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)
