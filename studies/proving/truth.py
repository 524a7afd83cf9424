"""What configs of a table are worth without noise, and the best of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask
from search.cost_model import CostModel
from search.replay import Settings, replay
from search.space import snap_threshold
from studies.proving.table import THRESHOLDS, Table

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """What S settings of one mask do on P texts of one length, whatever it costs."""

    settings: Settings
    rounds: Floats
    """(S, P, gamma_max): rounds that draft 1, 2, ... tokens."""
    alone: Floats
    """(S, P): steps of the target alone."""
    num_plain: int
    """Steps of plain decoding on each text."""

    @classmethod
    def of(cls, table: Table, mask: SkipMask, settings: Settings, places: Sequence[int]) -> Steps:
        """By replay. Rounds by their number of drafts are read off one sum, where each number has a digit of its own.

        Raises: ValueError where texts are so long that a digit could run over.
        """
        rows, reading = table.rows(places), table.reading(mask, places)
        gamma_max, base = table.space.gamma_max, float(rows.max_new_tokens)
        if base**gamma_max > 2.0**53:
            raise ValueError(f"max_new_tokens: {rows.max_new_tokens} is too many to tell rounds of {gamma_max} drafts")
        digits = base ** np.arange(gamma_max)
        counts = replay(reading.accepted, reading.confidence, rows, settings, [0.0, *digits])
        rounds = np.stack([counts.verify_s // digit % base for digit in digits], axis=-1)
        return cls(settings, rounds, counts.target_only, rows.max_new_tokens - 1)

    def log_speedups(self, cost: CostModel, mask: SkipMask) -> Floats:
        """(S,): mean over texts of the log of plain over speculative seconds."""
        drafts = np.arange(1, self.rounds.shape[-1] + 1)
        plain, watched = (cost.draft_s(mask, threshold=one) for one in (False, True))
        draft_s = np.where(self.settings.draft_threshold > 0, watched, plain)
        seconds = self.rounds @ np.array(cost.verify_s[1 : len(drafts) + 1])
        seconds += (self.rounds @ drafts) * draft_s[:, None] + self.alone * cost.verify_s[0]
        logs: Floats = np.log(self.num_plain * cost.verify_s[0] / seconds).mean(axis=1)
        return logs


@dataclass(frozen=True)
class Optimum:
    """The best config of a space that drafts."""

    config: DecodeConfig
    speedup: float
    """Below 1 where nothing beats plain decoding."""
    share_faster: float
    """Of all configs, those that beat plain decoding."""

    @property
    def value(self) -> float:
        """Of the best decision: this config, or plain decoding."""
        return max(1.0, self.speedup)


def speedup_of(table: Table, cost: CostModel, config: DecodeConfig, places: Sequence[int]) -> float:
    """Exact, on these texts; 1 for plain decoding."""
    if not config.speculates:
        return 1.0
    steps = Steps.of(table, config.skip_mask, Settings.of(config), places)
    return float(np.exp(steps.log_speedups(cost, config.skip_mask)[0]))


def grid_of(table: Table) -> Settings:
    """Every gamma and every pair of thresholds of the space."""
    thresholds = [0.0, *THRESHOLDS]
    return Settings.grid(range(1, table.space.gamma_max + 1), thresholds, thresholds)


def optima_of(
    table: Table, costs: Mapping[str, CostModel], places: Sequence[int], grid: Settings | None = None
) -> dict[str, Optimum]:
    """The best of every mask and setting, for each of these costs: nothing is left out, nothing is sampled.

    grid: settings to go through, all of the space's without it. Cost: a replay of them a mask, for all costs together;
    about a minute for 256 masks on some dozens of texts.
    """
    settings = grid_of(table) if grid is None else grid
    best: dict[str, tuple[float, SkipMask, int]] = {}
    num_faster = dict.fromkeys(costs, 0)
    for mask in table.masks:
        steps = Steps.of(table, mask, settings, places)
        for name, cost in costs.items():
            logs = steps.log_speedups(cost, mask)
            top = int(np.argmax(logs))
            num_faster[name] += int((logs > 0.0).sum())
            if name not in best or logs[top] > best[name][0]:
                best[name] = (float(logs[top]), mask, top)
    total = len(table.masks) * len(settings)
    return {
        name: Optimum(_config(settings, mask, i), float(np.exp(log)), num_faster[name] / total)
        for name, (log, mask, i) in best.items()
    }


def _config(settings: Settings, mask: SkipMask, i: int) -> DecodeConfig:
    return DecodeConfig(
        skip_mask=mask,
        gamma=int(settings.gamma[i]),
        draft_threshold=snap_threshold(float(settings.draft_threshold[i])),
        target_threshold=snap_threshold(float(settings.target_threshold[i])),
    )
