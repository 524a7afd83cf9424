"""The config that a finished study exported, made again from its storage alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna

from layerskip.config import Confirmed, DecodeConfig, Provenance
from layerskip.sampling_regime import Sampling
from layerskip.skip_mask import SkipMask
from search.leaderboard import counted
from search.results import portable_model_name
from search.study import now_utc

_VERSIONS = ("layerskip", "torch", "transformers")


def stored_config(study: optuna.Study, folder: Path) -> DecodeConfig:
    """What the study's last confirm stage decided, with provenance; for a file in `folder`.

    As best.json was, but for what the storage does not keep: the winner's trial, its pooled speed and the commit are
    left out, and `created_at` is now. Cost: reads; nothing is measured.
    Raises: ValueError if the confirm stage has not decided yet, or if the study is part of a per-group search, whose
    file is made of several studies.
    """
    attrs = study.user_attrs
    if "config" not in attrs or "fingerprint" not in attrs:
        raise ValueError(f"study {study.study_name!r}: has no verdict yet; run it to the end of its confirm stage")
    spec: dict[str, Any] = attrs["spec"]
    if spec.get("per_group"):
        raise ValueError(f"study {study.study_name!r}: belongs to a per-group search; the same command makes its file")
    setting: dict[str, Any] = attrs["config"]
    # The numbers are kept where they did not suffice too; the file has them only for a winner.
    confirmed = attrs.get("confirmed") if setting["gamma"] else None
    return DecodeConfig(
        **setting,
        sampling=Sampling.parse(attrs["fingerprint"].get("sampling", "greedy")),
        confirmed=Confirmed(**confirmed) if confirmed else None,
        provenance=_provenance(study, spec, SkipMask.parse(setting["skip_mask"]).num_layers, folder),
    )


def _provenance(study: optuna.Study, spec: dict[str, Any], num_layers: int, folder: Path) -> Provenance:
    attrs, known = study.user_attrs, study.user_attrs["fingerprint"]
    versions = {name: known[name] for name in _VERSIONS}
    if optuna_version := attrs.get("environment", {}).get("optuna"):
        versions["optuna"] = optuna_version
    return Provenance(
        model=portable_model_name(spec["model"], folder),
        weights_fingerprint=known["weights"],
        device=known["device"],
        dtype=known["dtype"],
        num_layers=num_layers,
        versions=versions,
        study=study.study_name,
        seed=spec["seed"],
        num_trials=counted(study.get_trials(deepcopy=False)),
        prompts_fingerprint=known["tuning_prompts"],
        held_out_fingerprint=known["held_out_prompts"],
        max_new_tokens=known["max_new_tokens"],
        num_threads=known["num_threads"],
        engine=known["engine"],
        attention_backend=attrs.get("environment", {}).get("attention_backend"),
        command=attrs.get("command"),
        created_at=now_utc(),
    )
