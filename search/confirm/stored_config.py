"""The config that a finished study, or several of one search, exported: made again from the storage alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from layerskip.config.decode_config import DecodeConfig
from search.confirm.files import make_provenance, portable_model_name, with_provenance
from search.confirm.regime_settings import combined_config, config_of, measured_on, read_regimes, sampling_of
from search.study.attributes import COMMAND, CONFIG, ENVIRONMENT, FINGERPRINT, SPEC


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
    fingerprint = measured_on(attrs)
    provenance = make_provenance(
        study,
        fingerprint,
        attrs.get(ENVIRONMENT, {}).get("optuna"),
        model=portable_model_name(spec["model"], folder),
        num_layers=config.skip_mask.num_layers,
        seed=spec["seed"],
        attention_backend=fingerprint.get("attention_backend"),
        command=attrs.get(COMMAND),
    )
    return with_provenance(config, config.sampling, provenance)
