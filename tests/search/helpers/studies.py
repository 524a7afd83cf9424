"""Finished studies: their trials, and copies of them that say something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, create_trial

from tests.search.helpers.fakes import Bench


def trials_of(folder: Path) -> list[FrozenTrial]:
    """Of the study that the command made in this folder."""
    return Bench(folder, in_sqlite=True).trials()


def copy_of(
    study: optuna.Study,
    *,
    name: str | None = None,
    without: Sequence[str] = (),
    **attrs: object,
) -> optuna.Study:
    """In memory, without some attributes of the study and its trials, and with others of the study."""
    copy = optuna.create_study(direction="maximize", study_name=name or study.study_name)
    for key, value in ({key: one for key, one in study.user_attrs.items() if key not in without} | attrs).items():
        copy.set_user_attr(key, value)
    for trial in study.get_trials():
        copy.add_trial(
            create_trial(
                state=trial.state,
                value=trial.value,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs={key: one for key, one in trial.user_attrs.items() if key not in without},
            )
        )
    return copy
