"""Setting effects: what gamma and thresholds are worth on the average of good masks.

Of the hundreds of settings that a mask is predicted under, the best on some dozens of texts is to a good part the one
that happens to suit these texts. Good masks mostly agree about settings, and what they agree about is known better than
what one of them says alone. So a mask is judged by its level over the settings that are good for many, by what a
setting adds to that on average, and only by a share of what is the mask's own (a two-way analysis of variance with the
interaction shrunk).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from layerskip.config import DecodeConfig
from search.lookup_choice import LookupChoice, read_choice, write_choice
from search.replay import Floats, Settings

_KEPT_SHARE = 0.5
"""Of the settings: those that are best on average are looked at further."""
_OTHER_LOOKUP = 10.0
"""How far apart settings are that look up otherwise: further than any two of one lookup."""
_OWN_SHARE = 0.3
"""Of what a mask says beyond level and average: believed."""


@dataclass(frozen=True)
class SettingEffects:
    """K settings, and what each is worth beyond the average of all, in log speedup."""

    settings: Settings
    effects: Floats
    """(K,), of mean zero."""

    @classmethod
    def of(cls, grid: Settings, logs: Floats) -> SettingEffects:
        """From the log speedups (M, S) of M masks under all settings of the grid."""
        average = logs.mean(axis=0)
        kept = np.sort(np.argsort(-average, kind="stable")[: max(1, round(_KEPT_SHARE * len(grid)))])
        return cls(grid.select(kept), average[kept] - average[kept].mean())

    def discount(self, logs: Floats) -> Floats:
        """(K,): what to add to a mask's log speedups (K,) under these settings, for the share that is not believed."""
        return (1.0 - _OWN_SHARE) * (float(logs.mean()) + self.effects - logs)

    def nearest(self, config: DecodeConfig) -> int:
        """Place of the setting that is most like a config's."""
        one = self.settings
        apart = np.abs(one.gamma - config.gamma) / max(1, int(one.gamma.max()))
        apart += np.abs(one.draft_threshold - config.draft_threshold)
        apart += np.abs(one.target_threshold - config.target_threshold)
        like = [choice == LookupChoice.of(config) for choice in one.lookups]
        apart += np.where(np.array(like)[one.lookup], 0.0, _OTHER_LOOKUP)
        return int(np.argmin(apart))

    def to_json(self) -> str:
        """One line, for a study's attributes."""
        one = self.settings
        columns = (one.gamma.tolist(), one.draft_threshold.tolist(), one.target_threshold.tolist())
        lookups = [] if one.lookups == (None,) else [one.lookup.tolist(), [write_choice(each) for each in one.lookups]]
        return json.dumps([*columns, np.round(self.effects, 5).tolist(), *lookups], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SettingEffects:
        """The inverse of `to_json`."""
        gamma, draft_threshold, target_threshold, effects, *lookups = json.loads(text)
        places, choices = lookups or ([0] * len(gamma), [None])
        settings = Settings(
            np.array(gamma, dtype=np.int64),
            np.array(draft_threshold, dtype=np.float64),
            np.array(target_threshold, dtype=np.float64),
            np.array(places, dtype=np.int64),
            tuple(read_choice(one) for one in choices),
        )
        return cls(settings, np.array(effects, dtype=np.float64))
