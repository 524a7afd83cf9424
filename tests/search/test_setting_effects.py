"""What settings are worth on the average of good masks, and what that does to the prediction of one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from layerskip import DecodeConfig, SkipMask
from search.replay import Floats, Settings
from search.setting_effects import SettingEffects

GRID = Settings.grid([2, 4], [0.0, 0.3], [0.0, 0.2])
"""Eight settings."""
TASTE = np.array([0.30, 0.28, 0.10, 0.12, 0.26, 0.24, -0.50, -0.40])
LEVELS = np.array([0.05, 0.0, -0.05])[:, None]


def test_the_better_half_is_kept_with_what_it_adds() -> None:
    effects = SettingEffects.of(GRID, LEVELS + TASTE)
    assert effects.settings.gamma.tolist() == [2, 2, 4, 4]
    assert effects.settings.draft_threshold.tolist() == [0.0] * 4
    assert effects.settings.target_threshold.tolist() == [0.0, 0.2, 0.0, 0.2]
    assert effects.effects == pytest.approx([0.03, 0.01, -0.01, -0.03])


def test_a_mask_that_agrees_is_left_as_it_is() -> None:
    effects = SettingEffects.of(GRID, LEVELS + TASTE)
    assert effects.discount(0.7 + TASTE[[0, 1, 4, 5]]) == pytest.approx(np.zeros(4), abs=1e-12)


def test_what_is_a_masks_own_counts_for_less() -> None:
    effects = SettingEffects.of(GRID, LEVELS + TASTE)
    own = np.array([0.0, 0.0, 0.0, 0.04])  # it likes the last one better than others do
    judged = TASTE[[0, 1, 4, 5]] + own + effects.discount(TASTE[[0, 1, 4, 5]] + own)
    assert judged.mean() == pytest.approx((TASTE[[0, 1, 4, 5]] + own).mean()), "its level stays"
    assert judged == pytest.approx(TASTE[[0, 1, 4, 5]] + 0.01 + 0.3 * (own - 0.01))
    assert int(np.argmax(TASTE[[0, 1, 4, 5]] + 3 * own)) == 3
    assert int(np.argmax(judged)) == 0


def test_settings_are_chosen_better_on_other_texts() -> None:
    """Planted: masks that agree but for a little, seen through the noise of a few texts."""
    rng = np.random.default_rng(0)
    grid = Settings.grid(range(1, 9), (0.0, 0.2, 0.4, 0.6), (0.0, 0.2))
    lost: dict[str, list[float]] = {"alone": [], "judged": []}
    for _ in range(200):
        truth = rng.normal(0, 0.03, len(grid)) + rng.normal(0, 0.005, (10, len(grid)))
        seen = truth + rng.normal(0, 0.02, truth.shape)
        effects = SettingEffects.of(grid, seen)
        kept = [_place(grid, effects.settings, i) for i in range(len(effects.settings))]
        judged = seen[0, kept] + effects.discount(seen[0, kept])
        lost["alone"].append(truth[0].max() - truth[0, int(np.argmax(seen[0]))])
        lost["judged"].append(truth[0].max() - truth[0, kept[int(np.argmax(judged))]])
    assert np.mean(lost["judged"]) < 0.6 * np.mean(lost["alone"])


def _place(grid: Settings, settings: Settings, i: int) -> int:
    same: Floats = (
        (grid.gamma == settings.gamma[i])
        & (grid.draft_threshold == settings.draft_threshold[i])
        & (grid.target_threshold == settings.target_threshold[i])
    )
    (place,) = np.flatnonzero(same)
    return int(place)


@pytest.mark.parametrize(
    ("gamma", "draft_threshold", "target_threshold", "place"),
    [(2, 0.0, 0.0, 0), (4, 0.0, 0.2, 3), (4, 0.1, 0.15, 3), (3, 0.0, 0.0, 0), (8, 0.9, 0.0, 2)],
)
def test_a_config_between_the_settings_goes_with_the_nearest(
    gamma: int, draft_threshold: float, target_threshold: float, place: int
) -> None:
    effects = SettingEffects.of(GRID, LEVELS + TASTE)
    config = DecodeConfig(
        skip_mask=SkipMask.none(3), gamma=gamma, draft_threshold=draft_threshold, target_threshold=target_threshold
    )
    assert effects.nearest(config) == place


def test_they_survive_being_stored() -> None:
    effects = SettingEffects.of(GRID, LEVELS + TASTE + math.pi / 1e6)
    stored = SettingEffects.from_json(effects.to_json())
    assert stored.to_json() == effects.to_json()
    assert stored.settings.gamma.tolist() == effects.settings.gamma.tolist()
    assert stored.effects == pytest.approx(effects.effects, abs=1e-5)
    assert SettingEffects.of(Settings.grid([3], [0.0], [0.0]), np.array([[0.2]])).effects.tolist() == [0.0]
