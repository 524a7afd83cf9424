"""What a search leaves: best.json for the decoder, summary.json for people, study.toml to go on; written atomically."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import DecodeConfig, Provenance, write_atomically
from layerskip.config.sampling_regime import Sampling
from search.confirm.stage import Confirmation
from search.storages.address import FROM_ENVIRONMENT, holds_secret, storage_argument
from search.study.fingerprint import Origin
from search.study.spec import StudyPaths, StudySpec, to_toml


@dataclass(frozen=True)
class SearchFacts:
    """What the end of a search knows."""

    study: str
    seed: int
    num_trials: int
    max_new_tokens: int
    command: str
    created_at: str
    commit: str | None
    plain_tokens_per_s: float
    """The study's reference plain speed on tuning prompts."""


def with_provenance(confirmation: Confirmation, origin: Origin, facts: SearchFacts, sampling: Sampling) -> DecodeConfig:
    """The confirmed config, complete: ready to be saved and loaded by `layerskip`."""
    winner = confirmation.winner
    provenance = Provenance(
        model=origin.model,
        weights_fingerprint=origin.weights_fingerprint,
        device=origin.device,
        dtype=origin.dtype,
        num_layers=origin.num_layers,
        versions=dict(origin.versions),
        study=facts.study,
        trial=winner.trials[0] if winner else None,
        seed=facts.seed,
        num_trials=facts.num_trials,
        prompts_fingerprint=origin.prompts_fingerprint,
        held_out_fingerprint=origin.held_out_fingerprint,
        max_new_tokens=facts.max_new_tokens,
        num_threads=origin.num_threads,
        engine=origin.engine,
        attention_backend=origin.attention_backend,
        commit=facts.commit,
        command=facts.command,
        created_at=facts.created_at,
        searched_tokens_per_s=winner.speedup * facts.plain_tokens_per_s if winner else None,
    )
    fields = {name: getattr(confirmation.config, name) for name in DecodeConfig.model_fields}
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
    """The model as best.json names it: `./path` where it lies inside the study folder, else as it was given."""
    path = Path(model)
    if not path.is_absolute():
        return model
    relative = os.path.relpath(path.resolve(), folder.resolve())
    return model if relative.startswith("..") else f"./{relative}"


def one_folder_down(model: str) -> str:
    """The same name of a model for a file in a folder of the study's."""
    return f"./../{model.removeprefix('./')}" if model.startswith("./") else model


def finite(value: Any) -> Any:
    """The same JSON value with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value
