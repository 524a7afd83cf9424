"""What the studies of several regimes found: one config of all their settings, and what the first study keeps of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from layerskip.config.decode_config import Confirmed, DecodeConfig, RegimeSetting
from layerskip.config.sampling_regime import Sampling
from search.confirm.files import finite
from search.study.attributes import BY_REGIME, CONFIRMED_ON, DRAFT_IDS, FINGERPRINT
from search.study.draft_ids import sets_in, with_sets

_FOUND = ("study", "verdict", "reason", "confirmed", "config", "by_drafter", "trials", "seconds", "noise", "budget")
_IF_MEASURED = ("lossy",)
_KEPT = ("verdict", "reason", "confirmed", "config")


def combined_config(configs: Sequence[DecodeConfig]) -> DecodeConfig:
    """The first one's, with the others' settings as regimes. Each has its `sampling`."""
    first, *others = configs
    names = RegimeSetting.model_fields
    regimes = tuple(RegimeSetting(**{name: getattr(one, name) for name in names}) for one in others)
    fields = {name: getattr(first, name) for name in DecodeConfig.model_fields}
    sets = {name: packed for one in configs for name, packed in (one.draft_ids or {}).items()}
    return with_sets(DecodeConfig(**(fields | {"regimes": regimes or None})), sets)


def found_in(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a regime's study found, of its summary."""
    return {name: summary[name] for name in _FOUND} | {name: summary[name] for name in _IF_MEASURED if name in summary}


def regime_facts(by_regime: Mapping[str, Mapping[str, Any]], sets: Mapping[str, Mapping[str, str] | None]) -> str:
    """What the first regime's study keeps of all of them as JSON: each one's study, verdict, numbers and setting, and
    the sets of token ids that this names."""
    facts = {
        name: {"study": one["study"]["name"], DRAFT_IDS: sets[name]} | {key: one[key] for key in _KEPT}
        for name, one in by_regime.items()
    }
    return json.dumps(finite(facts), separators=(",", ":"), allow_nan=False)


def read_regimes(attrs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts by the regime's name; empty for a study that is not the first of several regimes."""
    stored = attrs.get(BY_REGIME)
    facts: dict[str, dict[str, Any]] = json.loads(stored) if stored else {}
    return facts


def sampling_of(attrs: Mapping[str, Any]) -> str:
    """The name of the way in which a study's tokens were chosen."""
    return str(attrs.get(FINGERPRINT, {}).get("sampling", "greedy"))


def measured_on(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint of a study's verdict, or before it of its beginning; empty for a study without one."""
    return {**attrs.get(FINGERPRINT, {}), **attrs.get(CONFIRMED_ON, {})}


def config_of(facts: Mapping[str, Any], sampling: str) -> DecodeConfig:
    """The setting of a regime that a study decided on, with its numbers; without provenance.

    `facts` are a study's attributes, or a regime's of `read_regimes`.
    """
    setting: dict[str, Any] = facts["config"]
    # The numbers are kept where they did not suffice too; the file has them only for a winner.
    confirmed = facts.get("confirmed") if setting["gamma"] else None
    config = DecodeConfig(
        **setting, sampling=Sampling.parse(sampling), confirmed=Confirmed(**confirmed) if confirmed else None
    )
    return with_sets(config, sets_in(facts))
