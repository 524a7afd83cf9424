"""Attributes: whatever a search keeps in a storage is registered, and shared by unlike devices or kept apart."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import optuna
import pytest

from layerskip.huggingface.rounding import RoundingSpread
from search.measure.pairs import PromptCase
from search.measure.reference import Reference
from search.outlook.opening import OutlookOpening
from search.outlook.outlook import OutlookOptions
from search.storages.opening import open_storage
from search.study import attributes
from search.study.attributes import MORE, PER_DEVICE, POOL, SHARED, WORKER_ENTRY
from search.workers.device import StudyOnDevice, as_seen_on
from tests.search.conftest import quiet
from tests.search.helpers.fakes import FINGERPRINT, SPACE, Bench, prompts
from tests.search.helpers.outlook import PlantedTimer, WatchedDecoder

WRITERS = {"set_user_attr", "set_study_user_attr", "set_trial_user_attr"}
CASES = tuple(PromptCase(f"p{i}", (i, 1, 2), tuple(range(17))) for i in range(6))
REFERENCE = Reference(CASES, num_per_trial=5, plain_tokens_per_s=100.0, noise_sigma=0.02, pair_s=0.4, dropped=())
ELSEWHERE = dataclasses.replace(FINGERPRINT, device="another", cpu="another")


NAMES = [value for name, value in vars(attributes).items() if name.isupper() and isinstance(value, str)]


def test_every_name_of_a_study_is_shared_or_of_a_device() -> None:
    """Two constants of one value would be a name of which nobody knows whose it is."""
    assert len(NAMES) == len(set(NAMES))
    assert set(NAMES) >= PER_DEVICE | SHARED
    assert not PER_DEVICE & SHARED


def test_no_attribute_is_written_by_a_name_of_its_own() -> None:
    """A literal where a name is written would be one that the registry need not know."""
    root = Path(attributes.__file__).parents[1]
    calls = [
        (file.name, node.lineno, argument.value)
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS
        for argument in node.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    assert calls == []


def kept_by(folder: Path) -> tuple[set[str], set[str]]:
    """(Names that the studies in a folder's storage keep something under, names of their trials)."""
    storage = open_storage(Bench(folder).url)
    studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    of_trials = {name for study in studies for trial in study.trials for name in trial.user_attrs}
    return {name for study in studies for name in study.user_attrs}, of_trials


@pytest.mark.slow
@pytest.mark.publishes
def test_all_that_a_search_keeps_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one device, of another, of regimes and of groups; with a budget, ties, failures, lossy rules and a resume."""
    for name in ("devices", "regimes", "groups"):
        (tmp_path / name).mkdir()
    space = dataclasses.replace(SPACE, drafters=("layer_skip", "hybrid"))
    first = Bench(tmp_path / "devices", space=space, rounding=lambda: RoundingSpread(0.1, 3))
    first.decoder.tie_on = lambda config: config.gamma == 3
    order = {"objective": "speedup", "budget_minutes": 600.0}
    here = dataclasses.replace(FINGERPRINT, objective="speedup")
    assert first.run(fingerprint=here, trials=6, **order) == 0
    quiet(monkeypatch)  # a report keeps the same of every study
    second = Bench(tmp_path / "devices", space=space)
    second.decoder.break_on = lambda config: MemoryError("no room") if config.gamma == 2 else None
    there = dataclasses.replace(here, device="another", cpu="another")
    assert second.run(fingerprint=there, trials=12, max_failures=12, **order) == 0
    third = Bench(tmp_path / "devices", space=space)
    third.decoder.wrong_on = lambda config: config.gamma == 1
    third.run(fingerprint=there, trials=16, **order)
    Bench(tmp_path / "regimes").run_regimes("greedy", "t0.7", trials=4, allow_lossy=True)
    Bench(tmp_path / "groups").run_groups({"calm": 6, "wild": 6}, trials=2)
    kept = [kept_by(tmp_path / name) for name in ("devices", "regimes", "groups")]
    names = {
        name.partition("@")[0] for of_studies, _ in kept for name in of_studies if not name.startswith(WORKER_ENTRY)
    }
    assert names <= PER_DEVICE | SHARED
    assert (PER_DEVICE | SHARED) - names == {attributes.GAMMA_LOWERED, attributes.CANNOT_WIN, attributes.DRAFT_IDS}
    assert set().union(*(of_trials for _, of_trials in kept)) <= set(NAMES) - SHARED - PER_DEVICE | {
        attributes.PLAIN_TOKENS_PER_S
    }
    own = {name.partition("@")[0] for name in kept[0][0] if "@" in name}
    assert own == PER_DEVICE - {attributes.GAMMA_LOWERED}


def test_what_is_measured_before_the_trials_is_each_devices_own() -> None:
    """A resume must not read one device's beside the other's pool."""
    study, other = views()
    for name in PER_DEVICE:
        study.set_user_attr(name, "of the first")
        assert name not in other.user_attrs
        other.set_user_attr(name, "of the other")
        assert (study.user_attrs[name], other.user_attrs[name]) == ("of the first", "of the other")
    for name in SHARED - {attributes.FINGERPRINT}:
        other.set_user_attr(name, "shared")
        assert study.user_attrs[name] == "shared"
    with pytest.raises(ValueError, match=r"attribute: must be one of search\.study\.attributes, got 'forgotten'"):
        other.set_user_attr("forgotten", 1)


def views() -> tuple[optuna.Study, optuna.Study]:
    """A new study as the device sees it that it began on, and as another one does."""
    study = optuna.create_study(direction="maximize")
    study.set_user_attr(attributes.FINGERPRINT, dataclasses.asdict(FINGERPRINT))
    first, other = as_seen_on(study, FINGERPRINT), as_seen_on(study, ELSEWHERE)
    assert first is study
    assert isinstance(other, StudyOnDevice)
    return first, other


def test_a_resume_reads_the_further_texts_and_the_pool_of_its_own_device() -> None:
    """Two devices that read at unlike paces, so that one makes more texts than the other."""
    options = OutlookOptions(max_new_tokens=17, seed=0, trials=300, trial_seconds=1.0)
    tuning = tuple(
        dataclasses.replace(one, ids=tuple(range(50 * i, 50 * i + 40)), is_text=True)
        for i, one in enumerate(prompts(30))
    )
    found: list[Mapping[str, object]] = []
    for study, fingerprint, reading_s in zip(views(), (FINGERPRINT, ELSEWHERE), (0.001, 0.05), strict=True):
        made, again = (WatchedDecoder(step_times=PlantedTimer(), reading_s=reading_s) for _ in range(2))
        outlook = OutlookOpening(
            study, made, SPACE, REFERENCE, fingerprint, options, prompts=tuning, clock=made.clock
        ).outlook()
        before = dict(study.user_attrs)
        resumed = OutlookOpening(
            study, again, SPACE, REFERENCE, fingerprint, options, prompts=tuning, clock=again.clock
        ).outlook()
        assert again.num_readings == 0
        assert dict(study.user_attrs) == before
        assert resumed.predictor.num_texts == outlook.predictor.num_texts
        assert resumed.pool == outlook.pool
        found.append(before | {"num_texts": resumed.predictor.num_texts})
    assert found[0]["num_texts"] != found[1]["num_texts"]
    assert all(found[0][name] != found[1][name] for name in (MORE, POOL))
    assert math.isfinite(outlook.pool.best.log_speedup)
