"""A study that is shared by workers on unlike devices, as each of them sees it: with measurements of its own device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import optuna

from search.study.attributes import FINGERPRINT, PER_DEVICE, SHARED
from search.study.fingerprint import DEVICE_FIELDS, Fingerprint


class StudyOnDevice(optuna.Study):
    """The same study; what was measured on the device before the trials is kept under names of that device."""

    def __init__(self, study: optuna.Study, device: str) -> None:
        self.__dict__ = study.__dict__  # one study: the sampler set on either is both's
        self._own_names = {name: f"{name}@{device}" for name in PER_DEVICE}

    @property
    def user_attrs(self) -> dict[str, Any]:
        """The shared ones and this device's own."""
        attrs = super().user_attrs
        own = {name: attrs[key] for name, key in self._own_names.items() if key in attrs}
        return {name: value for name, value in attrs.items() if name not in self._own_names} | own

    def set_user_attr(self, key: str, value: Any) -> None:
        """Under this device's name where that is due. Raises: ValueError for a name that is not registered."""
        if key not in PER_DEVICE | SHARED:
            raise ValueError(f"attribute: must be one of search.study.attributes, got {key!r}")
        super().set_user_attr(self._own_names.get(key, key), value)


def as_seen_on(study: optuna.Study, fingerprint: Fingerprint) -> optuna.Study:
    """The study itself on the device that it began on, else the view of this device."""
    stored, now = study.user_attrs[FINGERPRINT], asdict(fingerprint)
    if all(stored.get(name) == now[name] for name in DEVICE_FIELDS):
        return study
    return StudyOnDevice(study, ", ".join(str(now[name]) for name in DEVICE_FIELDS))
