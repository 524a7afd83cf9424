"""python -m studies.scaling.worker: one worker; reads jobs from stdin, a line each, and answers on stdout."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.storages import BaseStorage, get_storage

from search.storages.opening import close_storage, open_storage
from search.study.attributes import FAILURE
from search.study.opening import quiet_optuna
from search.study.trials import WITHDRAWN
from search.trials.proposals import ProposeOptions
from search.trials.sampler import ProposalSampler, make_sampler
from search.workers.crew import Crew
from studies.scaling.landscape import NOISE, NUM_PROMPTS, SPACE, Landscape

_REPEAT_EVERY = 4
_METHODS = (
    *("create_new_trial", "set_trial_param", "set_trial_state_values", "set_trial_intermediate_value"),
    *("set_trial_user_attr", "set_trial_system_attr", "get_trial", "get_all_trials", "get_best_trial"),
    *("get_trial_id_from_study_id_trial_number", "get_study_user_attrs", "get_study_system_attrs"),
    *("get_study_directions", "get_study_name_from_id", "set_study_user_attr", "get_study_id_from_name"),
)


@dataclass(frozen=True)
class Job:
    """A worker's part in one study."""

    url: str
    study: str
    seconds: float
    """A trial takes, measuring; the storage's part comes on top."""
    trials: int
    """Of the study, in total."""
    seed: int


def main() -> int:
    """Per job: `ready` once the study is open, then after a line of any text the job, and its numbers as JSON."""
    quiet_optuna()
    for line in sys.stdin:
        job = Job(**json.loads(line))
        storage = get_storage(open_storage(job.url))
        crew = Crew(storage, job.study)
        with crew.setting_up():
            study = optuna.create_study(
                study_name=job.study, storage=storage, direction="maximize", load_if_exists=True
            )
            crew.join(study)
        _say("ready")
        sys.stdin.readline()
        told = _work(job, study, storage, crew)
        crew.leave()
        close_storage(storage)  # before the answer: then the server may go
        _say(json.dumps(told))
    return 0


def _work(job: Job, study: optuna.Study, storage: BaseStorage, crew: Crew) -> dict[str, Any]:
    options = ProposeOptions(_REPEAT_EVERY, NOISE, NUM_PROMPTS, job.seed)
    sampler = make_sampler("tpe", SPACE, options, None, crew.claims)
    study.sampler = sampler
    objective = _Objective(job, sampler)
    clock = _clocked(storage)
    start = end = time.monotonic()
    while crew.may_begin(job.trials):
        num_before = objective.num_trials
        study.optimize(objective, n_trials=1, catch=(_Surplus,))
        if objective.num_trials > num_before:
            end = time.monotonic()
    return {
        "start": start,
        "end": end,
        "trials": objective.num_trials,
        "storage_s": clock.seconds,
        "proposing_s": objective.proposing_s,
    }


class _Surplus(Exception):  # noqa: N818 (a trial too many, no error)
    pass


class _Objective:
    """What a trial of a search writes, around a sleep."""

    def __init__(self, job: Job, sampler: ProposalSampler) -> None:
        self._job, self._sampler = job, sampler
        self._landscape = Landscape(job.seed)
        self.num_trials, self.proposing_s = 0, 0.0

    def __call__(self, trial: optuna.Trial) -> float:
        """The speedup that the noisy ratios say."""
        if self._sampler.is_surplus:
            trial.set_user_attr(FAILURE, WITHDRAWN)
            raise _Surplus
        self.proposing_s += self._sampler.proposing_s
        config = SPACE.suggest(trial)
        rng = np.random.default_rng([self._job.seed, trial.number])
        ratios = self._landscape.measure(config, rng)
        for step, ratio in enumerate(ratios):
            time.sleep(self._job.seconds / len(ratios))
            trial.report(ratio, step)
        value = float(np.exp(np.mean(np.log(ratios))))
        attributes: dict[str, Any] = {
            "speedup": value,
            "stopped_early": False,
            "lossless": True,
            "ratios": ratios,
            "prompt_steps": list(range(len(ratios))),
            "skip_mask": str(config.skip_mask),
        }
        attributes |= {f"number_{i}": value for i in range(20)}  # acceptance, intervals and the like
        for name, one in attributes.items():
            trial.set_user_attr(name, one)
        self.num_trials += 1
        return value


class _Clock:
    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0


def _clocked(storage: BaseStorage) -> _Clock:
    """Adds up the seconds that the main thread's calls of this storage take, from now on."""
    clock = _Clock()

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return method(*arguments, **named)
            start = time.perf_counter()
            clock.depth += 1
            try:
                return method(*arguments, **named)
            finally:
                clock.depth -= 1
                if not clock.depth:
                    clock.seconds += time.perf_counter() - start

        return call

    for name in _METHODS:
        setattr(storage, name, timed(getattr(storage, name)))
    return clock


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
