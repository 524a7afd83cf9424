"""PatientStorage: a storage behind a server that may restart. Calls wait, with growing pauses, and are made again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.storages.errors import ConnectionLost, StorageLost

_T = TypeVar("_T")
_TOKEN = "layerskip:created"
"""System attribute of a trial: one value per request to create it, by which a request made again finds its trial."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait for a server that went away. Times in seconds."""

    limit_s: float = 600.0
    """From the first failure of a call until it is given up."""
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    """Pauses double up to this; each is cut by a random part, so that workers do not come back all at once."""


def _made_again(method: Callable[..., Any]) -> Any:
    """A method that makes the same call of the storage inside, as often as it takes: twice is as good as once."""
    name = method.__name__

    def call(self: PatientStorage, *arguments: Any, **named: Any) -> Any:
        return self._persist(lambda _again: getattr(self.inner, name)(*arguments, **named))

    return call


class PatientStorage(BaseStorage):
    """Makes a call again whose connection was lost, until it is answered or `RetryPolicy.limit_s` is over.

    A lost connection does not tell whether the call took effect. Setting attributes, parameters and intermediate
    values twice is harmless. A trial created twice is found again by its token; an end that was told already is seen.
    Left open is taking a queued trial: it may stay RUNNING with nobody at it and no attribute of a worker, to be
    cleared like a dead worker's. And a study created just before the loss is reported as DuplicatedStudyError.

    Raises: StorageLost in one line once the policy gives up; from then on calls are tried once, until one is answered.
    """

    def __init__(
        self,
        inner: BaseStorage,
        shown: str,
        policy: RetryPolicy | None = None,
        *,
        judge: Callable[[Exception], Exception] = lambda error: error,
        notice: Callable[[str], None] = _logger.warning,
    ) -> None:
        """`shown` is the URL without secrets. `judge` turns an error of `inner` into ConnectionLost, if it is one.

        `notice` is told once when a server goes away, and once when it is back.
        """
        self.inner = inner
        self._shown, self._policy = shown, policy or RetryPolicy()
        self._judge, self._notice = judge, notice
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._given_up = False

    create_new_study: Any = _made_again(BaseStorage.create_new_study)
    set_study_user_attr: Any = _made_again(BaseStorage.set_study_user_attr)
    set_study_system_attr: Any = _made_again(BaseStorage.set_study_system_attr)
    get_study_id_from_name: Any = _made_again(BaseStorage.get_study_id_from_name)
    get_study_name_from_id: Any = _made_again(BaseStorage.get_study_name_from_id)
    get_study_directions: Any = _made_again(BaseStorage.get_study_directions)
    get_study_user_attrs: Any = _made_again(BaseStorage.get_study_user_attrs)
    get_study_system_attrs: Any = _made_again(BaseStorage.get_study_system_attrs)
    get_all_studies: Any = _made_again(BaseStorage.get_all_studies)
    set_trial_intermediate_value: Any = _made_again(BaseStorage.set_trial_intermediate_value)
    set_trial_user_attr: Any = _made_again(BaseStorage.set_trial_user_attr)
    set_trial_system_attr: Any = _made_again(BaseStorage.set_trial_system_attr)
    get_trial: Any = _made_again(BaseStorage.get_trial)
    get_trial_id_from_study_id_trial_number: Any = _made_again(BaseStorage.get_trial_id_from_study_id_trial_number)
    get_all_trials: Any = _made_again(BaseStorage.get_all_trials)
    get_best_trial: Any = _made_again(BaseStorage.get_best_trial)

    def delete_study(self, study_id: int) -> None:
        def attempt(again: bool) -> None:
            try:
                self.inner.delete_study(study_id)
            except KeyError:
                if not again:
                    raise

        self._persist(attempt)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        trial = create_trial(state=TrialState.RUNNING) if template_trial is None else copy(template_trial)
        token = uuid4().hex
        trial.system_attrs = {**trial.system_attrs, _TOKEN: token}

        def attempt(again: bool) -> int:
            if again:
                for known in self.inner.get_all_trials(study_id, deepcopy=False):
                    if known.system_attrs.get(_TOKEN) == token:
                        return known._trial_id
            return self.inner.create_new_trial(study_id, trial)

        return self._persist(attempt)

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        def attempt(_again: bool) -> None:
            try:
                self.inner.set_trial_param(trial_id, param_name, param_value_internal, distribution)
            except KeyError:
                if not self._get_to_know(trial_id):
                    raise
                self.inner.set_trial_param(trial_id, param_name, param_value_internal, distribution)

        self._persist(attempt)

    def _get_to_know(self, trial_id: int) -> bool:
        """Read all trials, until this one is found. Whether it is.

        Optuna's cache around a database takes parameters only of trials that have passed through it (5.0). A proxy that
        was started again has seen none of those that are being measured.
        """
        if not isinstance(self.inner, _CachedStorage):
            return False
        studies = reversed(self.inner.get_all_studies())
        trials = (one for study in studies for one in self.inner.get_all_trials(study._study_id, deepcopy=False))
        return any(one._trial_id == trial_id for one in trials)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        def attempt(again: bool) -> bool:
            try:
                return self.inner.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                stored = self.inner.get_trial(trial_id) if again else None
                if stored is None or stored.state != state or list(stored.values or ()) != list(values or ()):
                    raise
                return True

        return self._persist(attempt)

    def remove_session(self) -> None:
        self.inner.remove_session()

    def _persist(self, attempt: Callable[[bool], _T]) -> _T:
        """`attempt` is told whether an earlier one may have taken effect."""
        start, again, pause_s = time.monotonic(), False, self._policy.first_pause_s
        while True:
            try:
                result = attempt(again)
            except Exception as error:
                judged = self._judge(error)
                if not isinstance(judged, ConnectionLost):
                    if judged is error:
                        raise
                    raise judged from error
                reason = str(judged)
            else:
                self._is_back()
                return result
            again = True
            waited_s = time.monotonic() - start
            self._is_away(start, reason)
            if self._given_up or waited_s >= self._policy.limit_s:
                self._given_up = True
                raise StorageLost(
                    f"storage {self._shown}: no answer for {waited_s:.0f} s: {reason}; "
                    "the same command continues the study once it is back"
                )
            time.sleep(min(pause_s * random.uniform(0.5, 1.0), self._policy.limit_s - waited_s))
            pause_s = min(2 * pause_s, self._policy.longest_pause_s)

    def _is_away(self, since: float, reason: str) -> None:
        with self._lock:
            news, self._away_since = self._away_since is None, self._away_since or since
        if news:
            self._notice(f"storage {self._shown}: {reason}; waiting up to {self._policy.limit_s:.0f} s for it")

    def _is_back(self) -> None:
        if self._away_since is None:
            return
        with self._lock:
            since, self._away_since, self._given_up = self._away_since, None, False
        if since is not None:
            self._notice(f"storage {self._shown}: answers again after {time.monotonic() - since:.1f} s")
