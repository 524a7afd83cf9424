"""What configs of a table are worth without noise, and the best of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.predict.replay import Counts, Settings, drafts_before
from search.study.space import snap_threshold
from studies.proving.costs import Prices
from studies.proving.table import THRESHOLDS, Table

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Steps:
    """What S settings of one mask do on P texts of one length, whatever it costs."""

    settings: Settings
    counts: Bytes
    """(S, P, gamma_max + 1): steps that draft 0 (the target alone), 1, 2, ... tokens."""
    num_plain: int
    """Steps of plain decoding on each text."""

    @classmethod
    def of(
        cls, table: Table, mask: SkipMask, settings: Settings, places: Sequence[int], depth: int | None = None
    ) -> Steps:
        """By walking through all rounds of every setting and text side by side, on readings so many drafts deep.

        Cost: a tenth of a second for 1,296 settings on 100 texts of 32 tokens.
        """
        moves = _moves(table, mask, settings, places, depth)
        width, num_counts = moves.shape[-1], table.space.gamma_max + 1
        counts = np.zeros((*moves.shape[:2], num_counts), dtype=np.uint8)
        flat, flat_counts = moves.reshape(-1), counts.reshape(-1)
        walker = np.arange(moves.shape[0] * moves.shape[1], dtype=np.int32)
        at, base = walker * width, walker * num_counts
        end = at + (width - 1)
        while len(at):
            move = flat.take(at)
            flat_counts[base + move // _MOVE] += 1
            at += move % _MOVE
            goes_on = at < end
            at, base, end = at[goes_on], base[goes_on], end[goes_on]
        return cls(settings, counts, width - 1)

    def log_speedups(self, prices: Prices, mask: SkipMask) -> Floats:
        """(S,): mean over texts of the log of plain over speculative seconds."""
        drafts = np.arange(self.counts.shape[-1])
        verify_s = np.array(prices.verify_s)[: len(drafts)]
        logs = np.empty(len(self.settings))
        for threshold in (False, True):
            here = (self.settings.draft_threshold > 0) == threshold
            step_s = verify_s + drafts * prices.draft_s(mask, threshold=threshold)
            seconds = self.counts[here] @ step_s.astype(np.float32)
            logs[here] = np.log(self.num_plain * prices.alone_s / seconds).mean(axis=1)
        return logs


_MOVE = 64
"""A move is _MOVE times the drafts of a step, plus the tokens that it moves on."""


def _moves(
    table: Table, mask: SkipMask, settings: Settings, places: Sequence[int], depth: int | None
) -> NDArray[np.int16]:
    """(S, P, T): what each setting's step does at each place of each text."""
    rows, reading = table.rows(places), table.reading(mask, places, depth)
    width = rows.max_new_tokens
    if width >= _MOVE or table.space.gamma_max >= 1 << 9:
        raise ValueError(f"max_new_tokens: must be below {_MOVE}, got {width}")
    levels, level = np.unique(settings.draft_threshold, return_inverse=True)
    unsure = np.stack([drafts_before(reading.confidence < one) for one in levels])
    limits, limit = np.unique(settings.target_threshold, return_inverse=True)
    alone = rows.target_probs[None] < limits[:, None, None]
    wrong = np.minimum(drafts_before(reading.accepted == 0.0), _MOVE).astype(np.int16)
    room = np.maximum(width - 2 - np.arange(width), 0).astype(np.int16)
    most = np.minimum(np.minimum(unsure, _MOVE).astype(np.int16) + np.int16(1), room)
    drafted = np.minimum(settings.gamma.astype(np.int16)[:, None, None], most[level])
    drafted[alone[limit]] = 0
    moves: NDArray[np.int16] = drafted * np.int16(_MOVE) + np.minimum(drafted, wrong) + np.int16(1)
    return moves


@dataclass(frozen=True)
class GridSteps:
    """What every setting of a table's grid does on the tuning texts under one mask, as predictions have it: from first
    drafts. It depends neither on seeds nor on prices, so all runs of a process share it, see `of`."""

    counts: Bytes
    """(gamma_max + 1, S, P): steps that draft so many tokens."""
    drafted: NDArray[np.uint16]
    """(S, P)"""

    @staticmethod
    @lru_cache(maxsize=256)
    def of(table: Table, mask: SkipMask) -> GridSteps:
        """Cost: three hundredths of a second and 0.8 MB for 1,296 settings on 32 texts, once."""
        counts = np.moveaxis(Steps.of(table, mask, grid_of(table), range(table.num_tuning), depth=0).counts, -1, 0)
        drafted = np.tensordot(np.arange(len(counts), dtype=np.uint16), counts, 1)
        return GridSteps(np.ascontiguousarray(counts), drafted)

    def replay(self, settings: Settings, places: Sequence[int], verify_s: Floats) -> Counts:
        """See `search.predict.replay.replay`: the same counts without walking, where nothing is looked up.

        A step of every number of drafts is priced in turn: so settings that do the same cost the same to the last bit.
        """
        draft, target = (
            np.searchsorted(THRESHOLDS, one, side="right")
            for one in (settings.draft_threshold, settings.target_threshold)
        )
        each = len(THRESHOLDS) + 1
        at = ((settings.gamma - 1) * each + draft) * each + target
        every = len(places) == self.drafted.shape[1]  # and in order, as prompts are numbered
        counts, drafted = self.counts[:, at], self.drafted[at]
        if not every:
            counts, drafted = counts[:, :, places], drafted[:, places]
        seconds = np.zeros(counts.shape[1:])
        for steps, step_s in zip(counts[1:], verify_s[1:].tolist(), strict=False):
            seconds += steps * step_s
        alone = counts[0].astype(np.float64)
        rounds = counts[1:].sum(axis=0, dtype=np.float64)
        return Counts(drafted.astype(np.float64), np.zeros_like(alone), rounds, alone, seconds)


@dataclass(frozen=True)
class Optimum:
    """The best config of a space that drafts."""

    config: DecodeConfig
    speedup: float
    """Below 1 where nothing beats plain decoding."""
    share_faster: float
    """Of all configs, those that beat plain decoding."""
    on_tuning: float = 1.0
    """What the config that is best on the tuning texts is worth here: as far as these can tell, no search has more."""

    @property
    def value(self) -> float:
        """Of the best decision: this config, or plain decoding."""
        return max(1.0, self.speedup)


def speedup_of(table: Table, prices: Prices, config: DecodeConfig, places: Sequence[int]) -> float:
    """Exact, on these texts; 1 for plain decoding."""
    if not config.speculates:
        return 1.0
    steps = Steps.of(table, config.skip_mask, Settings.of(config), places)
    return float(np.exp(steps.log_speedups(prices, config.skip_mask)[0]))


def grid_of(table: Table) -> Settings:
    """Every gamma and every pair of thresholds that decides otherwise than its neighbours."""
    thresholds = [0.0, *THRESHOLDS]
    return Settings.grid(range(1, table.space.gamma_max + 1), thresholds, thresholds)


def optima_of(
    table: Table, prices: Mapping[str, Prices], places: Sequence[int], grid: Settings | None = None
) -> dict[str, Optimum]:
    """The best of every mask and setting, at each of these prices: nothing is left out or sampled.

    grid: settings to go through, all of the space's without it. Cost: `Steps.of` and a product for each price, a mask;
    about half a minute for 256 masks on 100 texts.
    """
    settings = grid_of(table) if grid is None else grid
    best: dict[str, tuple[float, SkipMask, int]] = {}
    num_faster, total = dict.fromkeys(prices, 0), 0
    for mask in table.masks:
        steps = Steps.of(table, mask, settings, places)
        total += len(settings)
        for name, one in prices.items():
            logs = steps.log_speedups(one, mask)
            top = int(np.argmax(logs))
            num_faster[name] += int((logs > 0.0).sum())
            if name not in best or logs[top] > best[name][0]:
                best[name] = (float(logs[top]), mask, top)
    return {
        name: Optimum(_config(settings, mask, i), float(np.exp(log)), num_faster[name] / total)
        for name, (log, mask, i) in best.items()
    }


def worth_of_tuning_optima(table: Table, prices: Mapping[str, Prices]) -> dict[str, float]:
    """What the best decision by the tuning texts, all of them and nothing else, is worth on those that report."""
    found = optima_of(table, prices, range(table.num_tuning))
    return {
        name: speedup_of(table, prices[name], best.config, table.reporting) if best.speedup > 1.0 else 1.0
        for name, best in found.items()
    }


def _config(settings: Settings, mask: SkipMask, i: int) -> DecodeConfig:
    return DecodeConfig(
        skip_mask=mask,
        gamma=int(settings.gamma[i]),
        draft_threshold=snap_threshold(float(settings.draft_threshold[i])),
        target_threshold=snap_threshold(float(settings.target_threshold[i])),
    )
