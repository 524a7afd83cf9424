"""Workers on unlike devices share a study and keep apart what was measured on their device."""

from __future__ import annotations

import dataclasses

import optuna

from search.outlook import outlook
from search.workers.unlike import StudyOnDevice, as_seen_on
from tests.search.fakes import FINGERPRINT


def test_what_is_measured_before_the_trials_is_each_devices_own() -> None:
    """A resume must not read one device's beside the other's pool."""
    names = [value for name, value in vars(outlook).items() if name.isupper() and isinstance(value, str) and value]
    assert {outlook.LOOKUPS, outlook.POOL} <= set(names)
    study = optuna.create_study()
    study.set_user_attr("fingerprint", dataclasses.asdict(FINGERPRINT))
    first = as_seen_on(study, FINGERPRINT)
    other = as_seen_on(study, dataclasses.replace(FINGERPRINT, device="another", cpu="another"))
    assert first is study
    assert isinstance(other, StudyOnDevice)
    for name in names:
        first.set_user_attr(name, "of the first")
        assert name not in other.user_attrs
        other.set_user_attr(name, "of the other")
        assert (first.user_attrs[name], other.user_attrs[name]) == ("of the first", "of the other")
    other.set_user_attr("verdict", "shared")
    assert first.user_attrs["verdict"] == "shared"
