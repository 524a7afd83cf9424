"""The config that a finished study, or several of one search, exported: made again from the storage alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from layerskip.config.decode_config import DecodeConfig, Provenance
from search.confirm.files import portable_model_name
from search.confirm.regime_settings import combined_config, config_of, read_regimes, sampling_of
from search.study.attributes import COMMAND, CONFIG, ENVIRONMENT, FINGERPRINT, SPEC
from search.study.opening import now_utc
from search.study.trials import counted

_VERSIONS = ("layerskip", "torch", "transformers")


def stored_config(study: optuna.Study, storage: BaseStorage, folder: Path) -> DecodeConfig:
    """What the study's last confirm stage decided, with provenance; for a file in `folder`.

    As best.json was, but for what the storage does not keep: the winner's trial, its pooled speed and the commit are
    left out, and `created_at` is now. Of a search of several regimes the first one's study has them all: each as its
    own study has it now, or where that is not in the storage (an archive holds one study) as the search ended.
    Cost: reads; nothing is measured.
    Raises: ValueError if the confirm stage has not decided yet, or if the study is part of a per-group search, whose
    file is made of several studies.
    """
    own, there = _own_config(study, folder), set(optuna.get_all_study_names(storage))
    others = []
    for name, facts in read_regimes(study.user_attrs).items():
        if facts["study"] == study.study_name:
            continue
        known: Mapping[str, Any] = facts
        if facts["study"] in there:
            known = optuna.load_study(study_name=facts["study"], storage=storage).user_attrs
        others.append(config_of(known if "config" in known else facts, name))
    return combined_config([own, *others]) if others else own


def _own_config(study: optuna.Study, folder: Path) -> DecodeConfig:
    attrs = study.user_attrs
    if CONFIG not in attrs or FINGERPRINT not in attrs:
        raise ValueError(f"study {study.study_name!r}: has no verdict yet; run it to the end of its confirm stage")
    spec: dict[str, Any] = attrs[SPEC]
    if spec.get("per_group"):
        raise ValueError(f"study {study.study_name!r}: belongs to a per-group search; the same command makes its file")
    config = config_of(attrs, sampling_of(attrs))
    return DecodeConfig(
        **{name: getattr(config, name) for name in DecodeConfig.model_fields}
        | {"provenance": _provenance(study, spec, config.skip_mask.num_layers, folder)}
    )


def _provenance(study: optuna.Study, spec: dict[str, Any], num_layers: int, folder: Path) -> Provenance:
    attrs, known = study.user_attrs, study.user_attrs[FINGERPRINT]
    versions = {name: known[name] for name in _VERSIONS}
    if optuna_version := attrs.get(ENVIRONMENT, {}).get("optuna"):
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
        attention_backend=attrs.get(ENVIRONMENT, {}).get("attention_backend"),
        command=attrs.get(COMMAND),
        created_at=now_utc(),
    )
