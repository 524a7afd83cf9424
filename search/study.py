"""The Optuna study: create or reopen, refuse a mismatch, clear away what dead processes left."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from search.fingerprint import Fingerprint, compare
from search.storage import close_storage, open_storage, storage_file

METRIC = "tokens_per_s"
_FINGERPRINT = "fingerprint"


class StudyBusy(ValueError):  # noqa: N818 (reads as the fact it states)
    """Another live process is measuring on this study."""


def open_study(storage: BaseStorage, name: str, fingerprint: Fingerprint, facts: Mapping[str, Any]) -> optuna.Study:
    """Create the study, or reopen it if it was measured on the same things.

    `facts` are stored at creation only (environment, command, spec).
    Raises: FingerprintMismatch naming the fields; ValueError if the name belongs to a study of something else;
    StudyBusy if another live process works on it.
    """
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        direction="maximize",
        load_if_exists=True,
        # The objective stops hopeless trials itself, against the pooled leader and with prompts' difficulty taken out.
        # WilcoxonPruner compares with the single luckiest trial, and only on prompts that both have seen.
        pruner=NopPruner(),
    )
    stored = study.user_attrs.get(_FINGERPRINT)
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise ValueError(f"study {name!r}: has trials that search.run did not make; use another --study-name")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([METRIC])
        for key, value in {"created_at": now_utc(), **facts}.items():
            study.set_user_attr(key, value)
        study.set_user_attr(_FINGERPRINT, asdict(fingerprint))  # last: a study with it has all the rest
    else:
        compare(stored, fingerprint)
    _clear_dead_trials(study)
    return study


def stored_engine(url: str, name: str) -> str | None:
    """The engine an existing study was measured with, so that `auto` does not choose another one on a resume."""
    file = storage_file(url)
    if file is not None and not file.is_file():
        return None
    storage = open_storage(url)
    try:
        if name not in optuna.get_all_study_names(storage):
            return None
        stored = optuna.load_study(study_name=name, storage=storage).user_attrs.get(_FINGERPRINT)
    finally:
        close_storage(storage)
    return stored["engine"] if isinstance(stored, dict) and isinstance(stored.get("engine"), str) else None


def set_sampler(study: optuna.Study, sampler: BaseSampler) -> None:
    """Give the opened study its sampler."""
    study.sampler = sampler


def trials_by_state(trials: list[FrozenTrial]) -> dict[str, int]:
    """Counts by state, in words of this package."""
    words = dict.fromkeys(("measured", "stopped_early", "not_lossless", "failed", "interrupted"), 0)
    for trial in trials:
        if trial.state == TrialState.COMPLETE:
            words["stopped_early" if trial.user_attrs.get("stopped_early") else "measured"] += 1
        elif trial.state == TrialState.PRUNED:
            words["not_lossless"] += 1
        elif trial.state == TrialState.FAIL:
            failed = trial.user_attrs.get("failure", "interrupted") != "interrupted"
            words["failed" if failed else "interrupted"] += 1
    return words


def process_token() -> str:
    """This process as `host pid start`, so that a reused pid is not taken for it."""
    return f"{platform.node()} {os.getpid()} {_start_time(os.getpid())}"


def now_utc() -> str:
    """ISO 8601, seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _clear_dead_trials(study: optuna.Study) -> None:
    """Fail trials left RUNNING by processes of this host that are gone (kill -9, power loss).

    Other hosts' trials are left to the storage's heartbeat.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        token = trial.user_attrs.get("process")
        host, pid, start = token.rsplit(" ", 2) if isinstance(token, str) else (platform.node(), "0", "")
        if host != platform.node():
            continue
        if int(pid) not in (0, os.getpid()) and start == _start_time(int(pid)):
            raise StudyBusy(
                f"study {study.study_name!r}: process {pid} is measuring on it (trial {trial.number}); "
                "one search at a time, or the timings disturb each other"
            )
        with suppress(optuna.exceptions.UpdateFinishedTrialError, ValueError):  # somebody else was faster
            study.tell(trial.number, state=TrialState.FAIL)


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the process's start; `alive` where only its existence can be told, `` if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return "gone"
    try:
        os.kill(pid, 0)
    except OSError:
        return "gone"
    return "alive"
