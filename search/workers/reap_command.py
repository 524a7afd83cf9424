"""search.run --reap: clear away what dead workers left, without measuring anything."""

from __future__ import annotations

from collections.abc import Callable

import optuna

from search.storages.opening import check_storage, close_storage, open_storage, redact, storage_file
from search.workers.crew import Crew
from search.workers.witness import Patience


def reap(url: str, study_name: str, tell: Callable[[str], None], patience: Patience | None = None) -> int:
    """Fail and queue again every trial whose worker is dead. Returns the exit code.

    Workers of other hosts are watched for a sign of life first, which takes as long as `Patience` says.
    Raises: ValueError if there is no such study.
    """
    check_storage(url)
    file = storage_file(url)
    if file is not None and not file.is_file():
        raise ValueError(f"study {study_name!r}: no such study yet in {redact(url)}")
    storage = open_storage(url)
    crew = Crew(storage, study_name, tell=tell, patience=patience)
    try:
        try:
            study = optuna.load_study(study_name=study_name, storage=storage)
        except KeyError:
            raise ValueError(f"study {study_name!r}: no such study in {redact(url)}") from None
        done = crew.reap(study)
        for one in done:
            tell(str(one))
        if not done:
            tell("nothing to do: no trial of a dead worker")
    finally:
        crew.leave()
        close_storage(storage)
    return 0
