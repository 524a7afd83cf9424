"""Files beside a study that its dashboard page offers for download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.artifacts import FileSystemArtifactStore, upload_artifact

from search.study.attributes import ATTACHED


def attach(study: optuna.Study, folder: Path, files: Sequence[Path]) -> dict[str, str]:
    """Copy the files that exist into the store at `folder` and name them in the study; returns their ids by name.

    A file that was attached before is overwritten under its id, so that runs do not pile up copies; one that a person
    deleted in the dashboard is attached anew.
    """
    folder.mkdir(exist_ok=True)
    store = FileSystemArtifactStore(folder)
    # Optuna's own list cannot be read any more once the dashboard has deleted something from it.
    known: dict[str, str] = json.loads(study.user_attrs.get(ATTACHED, "{}"))
    ids = dict(known)
    for file in files:
        if not file.is_file():
            continue
        if file.name in known and (folder / known[file.name]).is_file():
            with file.open("rb") as body:
                store.write(known[file.name], body)
        else:
            ids[file.name] = upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=study)
    if ids != known:
        study.set_user_attr(ATTACHED, json.dumps(ids))
    return ids
