"""Archive: a study with all its trials in one small file that a repository can hold, to look at before anything is run.

It is an Optuna journal under xz. The search never reads it: a run on a folder with an archive begins a new study.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend

from search.compact import read_lines, write_lines
from search.storages.address import storage_file
from search.study.attributes import ATTACHED, SPEC, WORKER_ENTRY

_HERE, _ABOVE = "./", "../"
_PATHS = ("model", "prompts", "held_out")
_NOT_KEPT = (ATTACHED, WORKER_ENTRY, "artifacts:")
"""What attributes begin with that tell of files in the dashboard's store, and of who is at work."""


class _Lines(BaseJournalBackend):
    """A journal in memory."""

    def __init__(self, logs: Iterable[dict[str, Any]] = ()) -> None:
        self.logs = list(logs)

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """See the base class."""
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """See the base class."""
        self.logs.extend(logs)


def write_archive(study: optuna.Study, file: Path) -> None:
    """Keep the study's attributes and trials; paths of its spec that lie in the file's folder, or in the one above
    as those of a regime's study do, become relative to it.

    Cost: a second at 200 trials.
    """
    journal = _Lines()
    storage = JournalStorage(journal)
    copy = storage.create_new_study(study.directions, study.study_name)
    # Optuna has no public way to read what the dashboard keeps in a study, its figures and note.
    for key, value in study._storage.get_study_system_attrs(study._study_id).items():
        if not key.startswith(_NOT_KEPT):
            storage.set_study_system_attr(copy, key, value)
    for key, value in study.user_attrs.items():
        if not key.startswith(_NOT_KEPT):
            storage.set_study_user_attr(copy, key, _portable(value, file) if key == SPEC else value)
    for trial in study.get_trials(deepcopy=False):
        storage.create_new_trial(copy, template_trial=trial)
    # Who wrote a line is a random name, which would make two archives of one study differ.
    write_lines(file, (line | {"worker_id": "archive"} for line in journal.logs))


def read_archive(file: Path) -> BaseStorage:
    """A storage in memory that holds the study as if it lay in the file's folder; what is changed in it is not kept.

    Raises: OSError; ValueError in one line for what is no archive.
    """
    lines = read_lines(file)
    try:
        storage = JournalStorage(_Lines(lines))
        (name,) = optuna.get_all_study_names(storage)
        study = optuna.load_study(study_name=name, storage=storage)
        if isinstance(spec := study.user_attrs.get(SPEC), dict):
            study.set_user_attr(SPEC, _resolved(spec, file))
    except Exception as error:  # noqa: BLE001 (a line that is no journal's makes Optuna raise what it likes)
        raise ValueError(f"{file}: not the archive of a study ({type(error).__name__}: {error})") from None
    return storage


def _portable(spec: Mapping[str, Any], file: Path) -> dict[str, Any]:
    changed = {name: _near(one, file) for name in _PATHS if isinstance(one := spec.get(name), str)}
    if isinstance(storage := spec.get("storage"), str) and (path := storage_file(storage)) is not None:
        changed["storage"] = storage.replace(str(path), _near(str(path), file), 1)
    return {**spec, **changed}


def _near(path: str, file: Path) -> str:
    for folder, word in _folders(file):
        if path.startswith(folder):
            return word + path.removeprefix(folder)
    return path


def _resolved(spec: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """As if the study had been made where the archive lies."""
    changed = {
        name: folder + one.removeprefix(word)
        for name in _PATHS
        for folder, word in _folders(file)
        if isinstance(one := spec.get(name), str) and one.startswith(word)
    }
    return {**spec, **changed}


def _folders(file: Path) -> tuple[tuple[str, str], ...]:
    """The file's own and the one above, and what stands for each."""
    own = file.absolute().parent
    return (f"{own}{os.sep}", _HERE), (f"{own.parent}{os.sep}", _ABOVE)
