"""The Optuna study: create or reopen, refuse a mismatch, count its trials."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import optuna
from optuna.pruners import NopPruner
from optuna.storages import BaseStorage

from layerskip.machine.host import num_cores, threads_are_fixed
from search.storages.address import storage_file
from search.storages.opening import storage_at
from search.study.attributes import CREATED_AT, FINGERPRINT
from search.study.fingerprint import Fingerprint, compare
from search.study.spec import StudyPaths, StudySpec


def open_study(storage: BaseStorage, name: str, fingerprint: Fingerprint, facts: Mapping[str, Any]) -> optuna.Study:
    """Create the study, or reopen it if it was measured on the same things.

    `facts` are stored at creation only (environment, command, spec).
    Raises: FingerprintMismatch naming the fields; ValueError if the name belongs to a study of something else.
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
    stored = study.user_attrs.get(FINGERPRINT)
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise ValueError(f"study {name!r}: has trials that search.run did not make; use another --study-name")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([fingerprint.objective])
        for key, value in {CREATED_AT: now_utc(), **facts}.items():
            study.set_user_attr(key, value)
        study.set_user_attr(FINGERPRINT, asdict(fingerprint))  # last: a study with it has all the rest
    else:
        compare(stored, fingerprint)
    return study


def stored_study(storage: BaseStorage, name: str) -> optuna.Study | None:
    """The study, if there is one that `open_study` made."""
    if name not in optuna.get_all_study_names(storage):
        return None
    study = optuna.load_study(study_name=name, storage=storage)
    return study if FINGERPRINT in study.user_attrs else None


def as_before(spec: StudySpec, paths: StudyPaths) -> StudySpec:
    """The spec with what an existing study was measured with, and searches, in place of what is left open."""
    choices = (spec.gamma_max, spec.draft_vocab, spec.int8, spec.int4, spec.siblings, spec.trees)
    if spec.engine != "auto" and not _leaves_threads_open(spec) and None not in choices:
        return spec
    return with_choices(spec, _stored_fingerprint(paths.storage_url(spec), paths.study_name(spec)))


def with_choices(spec: StudySpec, fingerprint: Mapping[str, Any] | None) -> StudySpec:
    """The spec with a fingerprint's engine, CPU threads, `gamma_max`, `draft_vocab`, `int8`, `int4`, `siblings` and
    `trees`, where it leaves them open: a study goes on as it was begun, whatever a new one is like.

    Threads are measured anew where workers may differ, and where there are fewer cores than the fingerprint's.
    """
    known = fingerprint or {}
    update: dict[str, Any] = {}
    if spec.gamma_max is None and "gamma_max" in known:
        update["gamma_max"] = known["gamma_max"]
    if spec.draft_vocab is None and known:
        update["draft_vocab"] = bool(known.get("draft_vocabs"))
    update |= {name: known.get(name, False) for name in ("int8", "int4") if known and getattr(spec, name) is None}
    # On another engine than the study's, what is to be said is that it is another.
    if spec.siblings is None and known and spec.engine in ("auto", known.get("engine")):
        update["siblings"] = known.get("siblings", 0) > 0
    # What has trees is left open: with other weights than the study's, those are what is to be said.
    if spec.trees is None and known and not known.get("trees"):
        update["trees"] = False
    engine, threads = known.get("engine"), known.get("num_threads")
    if spec.engine == "auto" and isinstance(engine, str):
        update["engine"] = engine
    if _leaves_threads_open(spec) and isinstance(threads, int) and threads <= num_cores():
        update["num_threads"] = threads
    return spec.model_copy(update=update)


def _leaves_threads_open(spec: StudySpec) -> bool:
    return spec.num_threads is None and spec.objective != "speedup" and not threads_are_fixed()


def _stored_fingerprint(url: str, name: str) -> dict[str, Any] | None:
    file = storage_file(url)
    if file is not None and not file.is_file():
        return None
    with storage_at(url) as storage:
        if name not in optuna.get_all_study_names(storage):
            return None
        stored = optuna.load_study(study_name=name, storage=storage).user_attrs.get(FINGERPRINT)
    return stored if isinstance(stored, dict) else None


def quiet_optuna() -> None:
    """Optuna prints a line per trial and warns of experimental parts that this package uses knowingly."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def now_utc() -> str:
    """ISO 8601, seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
