"""Files of the confirm stage: what a study and its model are moved with stays right in best.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip.model import resolve_model_path
from search.confirm.files import portable_model_name


@pytest.mark.parametrize(
    ("model", "study", "name"),
    [("s/a/model", "s/a", "./model"), ("s/m/model", "s/a", "./../m/model"), ("s/m/model", "s/a/t1", "./../../m/model")],
)
def test_a_model_beside_its_study_is_found_from_there(tmp_path: Path, model: str, study: str, name: str) -> None:
    folder = tmp_path / study
    for one in (tmp_path / model, folder):
        one.mkdir(parents=True, exist_ok=True)
    assert portable_model_name(str(tmp_path / model), folder) == name
    assert resolve_model_path(name, folder / "best.json") == str(tmp_path / model)


def test_a_model_elsewhere_is_named_as_it_was_given(tmp_path: Path) -> None:
    far, study = tmp_path / "models", tmp_path / "a" / "b" / "c"
    for one in (far, study):
        one.mkdir(parents=True, exist_ok=True)
    assert portable_model_name(str(far), study) == str(far)
    assert portable_model_name("org/name", study) == "org/name"
