"""The trials of a study as CSV, and the whole of it as JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from optuna.trial import FrozenTrial

from search.confirm.files import finite
from search.predict.accuracy import check_predictions
from search.reporting.record import StudyRecord
from search.study import attributes as names
from search.study.space import DRAFT_THRESHOLD, GAMMA, TARGET_THRESHOLD
from search.study.trials import tokens_per_s_of

_FIRST = (
    "number",
    "state",
    "tokens_per_s",
    names.SPEEDUP,
    names.SPEEDUP_CI_LOW,
    names.SPEEDUP_CI_HIGH,
    names.SKIP_MASK,
    GAMMA,
    DRAFT_THRESHOLD,
    TARGET_THRESHOLD,
    names.ORIGIN,
    names.ACCEPTANCE_RATE,
    names.MEAN_ACCEPTED_LENGTH,
    names.STOPPED_EARLY,
)
_OF_THE_STUDY = (
    names.VERDICT,
    names.REASON,
    names.CONFIRMED,
    names.CONFIRMED_ON,
    names.CONFIG,
    names.CANNOT_WIN,
    names.GAMMA_LOWERED,
    names.PLAIN_TOKENS_PER_S,
    names.NOISE_SIGMA,
    names.ROUNDING,
    names.FINGERPRINT,
    names.ENVIRONMENT,
    names.COMMAND,
    names.CREATED_AT,
)
_PARSED = (
    names.COSTS,
    names.SENSITIVITY,
    names.POOL,
    names.SURFACES,
    names.CANDIDATES,
    names.HELD_OUT,
    names.LOSSY,
    names.PER_GROUP,
    names.BY_REGIME,
)
"""Attributes that hold JSON as text."""


def to_csv(record: StudyRecord) -> str:
    """A line per trial, with what is one value; unfinished trials are left out."""
    rows = [_flat(trial) for trial in record.finished]
    rest = sorted({name for row in rows for name in row} - set(_FIRST))
    file = io.StringIO()
    writer = csv.DictWriter(file, [*_FIRST, *rest], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_json(record: StudyRecord) -> str:
    """The study's facts by the names of summary.json where that has them too, and all finished trials in full."""
    data: dict[str, Any] = {"study": record.name}
    data |= {name: record.attrs.get(name) for name in _OF_THE_STUDY}
    data |= {name: _parsed(record.attrs[name]) for name in _PARSED if name in record.attrs}
    data |= check_predictions(record.trials, record.attrs.get(names.NOISE_SIGMA))
    data["trials"] = [_flat(trial) | _lists(trial) for trial in record.finished]
    return json.dumps(finite(data), indent=1, allow_nan=False) + "\n"


def _flat(trial: FrozenTrial) -> dict[str, Any]:
    params = {name: value for name, value in trial.params.items() if not name.startswith("skip.")}
    single = {name: value for name, value in trial.user_attrs.items() if not isinstance(value, list | dict)}
    times = {
        name: None if moment is None else moment.isoformat(timespec="seconds")
        for name, moment in (("started", trial.datetime_start), ("ended", trial.datetime_complete))
    }
    return {
        **single,
        **params,
        **times,
        "number": trial.number,
        "state": trial.state.name.lower(),
        "tokens_per_s": None if trial.value is None else tokens_per_s_of(trial),
    }


def _lists(trial: FrozenTrial) -> dict[str, Any]:
    return {name: value for name, value in trial.user_attrs.items() if isinstance(value, list | dict)}


def _parsed(text: Any) -> Any:
    value = json.loads(text) if isinstance(text, str) else text
    if isinstance(value, list):
        return [json.loads(one) if isinstance(one, str) and one.startswith("{") else one for one in value]
    return value
