"""What a search leaves: best.json for the decoder, summary.json for people, study.toml to go on; written atomically."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna

from layerskip.config.decode_config import DecodeConfig, Provenance, near_path, write_atomically
from layerskip.config.sampling_regime import Sampling
from search.storages.address import FROM_ENVIRONMENT, holds_secret, storage_argument
from search.study.opening import now_utc
from search.study.spec import StudyPaths, StudySpec, to_toml
from search.study.trials import counted


def make_provenance(
    study: optuna.Study, known: Mapping[str, Any], optuna_version: str | None, **facts: Any
) -> Provenance:
    """What the study's config was measured on.

    known: the fields of its fingerprint, of which an old study has fewer; facts: the provenance's other fields.
    """
    versions = {name: known[name] for name in ("layerskip", "torch", "transformers")}
    if optuna_version is not None:
        versions["optuna"] = optuna_version
    return Provenance(
        weights_fingerprint=known["weights"],
        device=known["device"],
        dtype=known["dtype"],
        quantization=known.get("quantization"),
        versions=versions,
        study=study.study_name,
        num_trials=counted(study.get_trials(deepcopy=False)),
        prompts_fingerprint=known["tuning_prompts"],
        held_out_fingerprint=known["held_out_prompts"],
        max_new_tokens=known["max_new_tokens"],
        num_threads=known["num_threads"],
        engine=known["engine"],
        created_at=now_utc(),
        **facts,
    )


def with_provenance(config: DecodeConfig, sampling: Sampling | None, provenance: Provenance) -> DecodeConfig:
    """The config, complete: ready to be saved and loaded by `layerskip`."""
    fields = {name: getattr(config, name) for name in DecodeConfig.model_fields}
    return DecodeConfig(**(fields | {"sampling": sampling, "provenance": provenance}))


def save_best(config: DecodeConfig, paths: StudyPaths) -> Path | None:
    """Write best.json; returns where an unreadable best.json that stood there was kept, else None."""
    kept = None
    if paths.best.exists():
        try:
            DecodeConfig.load(paths.best)
        except (ValueError, OSError):
            kept = paths.best.with_name(paths.best.name + ".bak")
            paths.best.replace(kept)
    config.save(paths.best)
    return kept


def save_summary(summary: Mapping[str, Any], paths: StudyPaths) -> None:
    """Write summary.json. Numbers that are not finite become null: JSON knows none."""
    write_atomically(paths.summary, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")


def save_spec(spec: StudySpec, paths: StudyPaths) -> bool:
    """Write study.toml; returns whether it holds a password, which makes it its owner's alone to read."""
    has_password = spec.storage is not None and holds_secret(spec.storage)
    if has_password and spec.storage == storage_argument(None):
        # It was kept from the command line; the file says where to look.
        spec, has_password = spec.model_copy(update={"storage": FROM_ENVIRONMENT}), False
    write_atomically(paths.spec_file, to_toml(spec, paths.folder), mode=0o600 if has_password else 0o644)
    return has_password


def portable_model_name(model: str, folder: Path) -> str:
    """The model as best.json names it: `./path` where it lies inside the study's folder, else as it was given: a file
    that is copied alone still finds it."""
    path, folder = Path(model).resolve(), folder.resolve()
    return near_path(path, folder) if Path(model).is_absolute() and path.is_relative_to(folder) else model


def one_folder_down(model: str) -> str:
    """The same name of a model for a file in a folder of the study's."""
    return f"../{model.removeprefix('./')}" if model.startswith(("./", "../")) else model


def finite(value: Any) -> Any:
    """The same JSON value with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value
