"""Predictor: tokens/s of a config before it is measured, from a reading of its draft and the cost of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from optuna.trial import FrozenTrial

from layerskip.analysis.teacher_forcing import DraftReadings, TreeReadings, WrongDraft
from layerskip.config.decode_config import DecodeConfig, DraftedBy, DraftWeights
from layerskip.config.lookup_settings import LookupSettings
from layerskip.config.skip_mask import SkipMask
from search.measure.decoder import Forcing
from search.predict.costs import CostModel
from search.predict.joined_forcing import JoinedForcing, KeptReadings, Readings, join_readings
from search.predict.learnt_costs import CostLearner
from search.predict.lookup_readings import LookupReader, LookupReadings
from search.predict.replay import Counts, Floats, Round, Settings, SiblingRows, TextRows, replay, walk
from search.study.lookup_choice import LookupChoice
from search.study.space import (
    FACTORS,
    LOOKUP_GAMMA_MAX,
    MIN_MATCH_MAX,
    SIBLING_THRESHOLDS,
    THRESHOLD_MAX,
    THRESHOLD_STEP,
    TREES,
    lookup_settings,
    snap_threshold,
)

_SHARP_DEPTH = 7
_SHARP_ROWS = 4096
"""A config about to be measured is read with the draft's own keys as many drafts into a round as its gamma needs: up to
a gamma of 8 always, beyond that while a text has no more rows than this, because attention among them is quadratic."""
_DRAFT_THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_TREE_THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
_TARGET_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6)
_LOOKUP_GAMMAS = (2, 3, 4, 6, 8, 12, 16, LOOKUP_GAMMA_MAX)
_LOOKUP_THRESHOLDS = (0.0, 0.3, 0.6)
_MIN_PROBABILITIES = (0.1, 0.5)
_KEPT_BYTES = 1 << 23
"""8 MiB of readings on the first texts, and as much on all: hundreds of masks on short texts, dozens on long ones."""


@runtime_checkable
class LayerStates(Protocol):
    """The target's and a draft's hidden states (rows, hidden) on the continuations of the tuning texts."""

    num_layers: int

    def embed(self) -> torch.Tensor:
        """Before layer 0."""

    def attention(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """After the attention sublayer of `layer`, residual included."""

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """After the MLP sublayer of `layer`, residual included."""

    def target(self, layer: int) -> torch.Tensor:
        """The target's after its first `layer` layers, 0..num_layers."""


@runtime_checkable
class Replays(Protocol):
    """A forcing that can count what settings do on its texts without a replay of a reading."""

    def replay(self, mask: DraftedBy, settings: Settings, verify_s: Floats) -> Counts:
        """See `search.predict.replay.replay`."""


@dataclass(frozen=True)
class Predicted:
    """A config and the speedup predicted for it on all texts."""

    config: DecodeConfig
    speedup: float
    """Geometric mean over texts."""


@dataclass(frozen=True)
class TrialPrediction:
    """What a trial is expected to show on its own prompts, in their order."""

    ratios: tuple[float, ...]
    """Speculative over plain tokens/s."""
    forwards: tuple[tuple[float, float, float], ...]
    """Drafts, verifications and target-only steps."""
    draft_s: float
    """One draft token of this mask, at the pace of the cost model; 0 where nothing is drafted under one."""


@dataclass(frozen=True)
class ExtraTexts:
    """Texts of a trial that are not read for every mask, but for this trial alone."""

    steps: tuple[int, ...]
    """Their places among the tuning texts, ascending."""
    predictor: Predictor


class Predictor:
    """Predicts configs from readings, kept by mask up to 16 MiB, and from costs, see `set_costs` and `learn`.

    There are two fidelities where there are texts after the first ones (see `with_more`). Screening predicts a mask on
    the first texts alone, which is cheap and enough to drop the hopeless; `full_fidelity` is on all texts. What is
    asked decides, never what is kept, so an answer does not depend on the questions before it.
    """

    def __init__(self, forcing: Forcing, rows: TextRows, cost: CostModel, gamma_max: int | None = None) -> None:
        """gamma_max: of drafts under a mask; as far as `cost` goes without it."""
        self._forcing: Forcing | JoinedForcing = forcing
        self._first: Forcing = forcing
        self._more: Forcing | None = None
        self._rows = self._first_rows = rows
        self._gamma_max = len(cost.verify_s) - 1 if gamma_max is None else gamma_max
        self._lookups = LookupReader(LOOKUP_GAMMA_MAX)
        self._readings, self._full_readings = KeptReadings(_KEPT_BYTES), KeptReadings(_KEPT_BYTES)
        self.look_up_with(())
        self._learner = CostLearner()
        self._measured = self.cost = cost

    def look_up_with(self, lookups: Sequence[LookupChoice], *, or_not: bool = True) -> None:
        """From now on masks are predicted as the rest of a hybrid with one of these; or_not: and without any."""
        choices: list[LookupChoice | None] = [None] if or_not or not lookups else []
        gammas = coarse_gammas(self._gamma_max)
        self._grid = Settings.grid(gammas, _DRAFT_THRESHOLDS, _TARGET_THRESHOLDS, [*choices, *lookups])

    def set_costs(self, measured: CostModel) -> None:
        """Use costs measured anew, uncorrected until the next `learn`."""
        self._measured = self.cost = measured

    def learn(self, trials: Sequence[FrozenTrial]) -> None:
        """Costs as measured, corrected by these trials: see `CostLearner`."""
        self.cost = self._learner.learn(self._measured, trials)

    def with_more(self, forcing: Forcing, rows: TextRows) -> Predictor:
        """This one, with these texts after its own; its readings are kept."""
        joint = Predictor(self._first, self._first_rows, self.cost, self._gamma_max)
        joint._grid = self._grid
        joined = JoinedForcing([(self._first, self._first_rows), (forcing, rows)])
        joint._forcing, joint._more, joint._rows = joined, forcing, joined.rows
        joint._readings, joint._lookups = self._readings, self._lookups
        return joint

    @property
    def num_texts(self) -> int:
        """Of all texts."""
        return len(self._rows.lengths)

    @property
    def num_first(self) -> int:
        """Of those that are always read."""
        return len(self._first_rows.lengths)

    @property
    def has_more(self) -> bool:
        """Whether there are texts after the first ones; if not, every prediction is on all texts."""
        return self._more is not None

    @property
    def keys(self) -> str:
        """Whose keys the readings saw: `target`, or `own` as an approximation."""
        return self._forcing.keys

    def agreement(self, mask: SkipMask, *, full_fidelity: bool = False) -> float:
        """Share of positions where the draft's choice is the target's token."""
        lengths = self._rows_of(full_fidelity=full_fidelity).lengths
        reading = self._reading(mask, full_fidelity=full_fidelity)
        assert isinstance(reading, DraftReadings)
        return float(reading.accepted[0].sum() / max(1, (lengths - 1).sum()))

    def best_setting(self, mask: SkipMask, *, full_fidelity: bool = False) -> Predicted:
        """The gamma and thresholds with the best predicted speedup: a coarse grid, then steps of 0.05 around its best.

        Cost: a reading if the mask is new, and some milliseconds, up to a tenth of a second for a hundred texts.
        """
        rough = self._best(mask, self._grid, full_fidelity=full_fidelity)
        config = rough.config
        near: list[list[float]] = [
            sorted({snap_threshold(value + step * THRESHOLD_STEP) for step in (-1, 0, 1)})
            for value in (config.draft_threshold, config.target_threshold)
        ]
        gammas = gammas_around(config.gamma, self._gamma_max)
        return self._best(
            mask, Settings.grid(gammas, near[0], near[1], [LookupChoice.of(config)]), full_fidelity=full_fidelity
        )

    def best_lookups(
        self, methods: Sequence[str], gamma_max: int, config: DecodeConfig | None = None, *, count: int = 1
    ) -> list[Predicted]:
        """The `count` best lookups of each of these methods on all texts, best first; alone, or as part of a hybrid
        whose other part is `config`'s.

        Cost: a lookup at every place of every text for each setting of the grid, kept for the next time; seconds for a
        hundred texts.
        """
        found: list[Predicted] = []
        for method in methods:
            choices = lookup_grid(method, gamma_max)
            if config is None:
                grid = Settings.of_lookups(choices)
                drafted_by: DraftedBy = SkipMask.none(len(self.cost.attention_s))
            else:
                grid = Settings.grid([config.gamma], [config.draft_threshold], [config.target_threshold], choices)
                drafted_by = config.drafted_by
            logs = self._log_speedups(drafted_by, grid, full_fidelity=True)
            order = np.argsort(-logs, kind="stable")[:count]
            found += [Predicted(self._config(drafted_by, grid, int(i)), float(np.exp(logs[i]))) for i in order]
        return sorted(found, key=lambda one: -one.speedup)

    def best_by_weights(
        self, weights: DraftWeights, lookups: Sequence[LookupChoice | None], *, count: int
    ) -> list[Predicted]:
        """The `count` best settings of trained weights on all texts, after one of these lookups or, for None, alone;
        best first. Cost: a reading, and a replay of the coarse grid."""
        gammas, tree_tokens = coarse_gammas(self._gamma_max), weights.tree_tokens or 0
        grid = Settings.grid(
            gammas, _TREE_THRESHOLDS if tree_tokens else _DRAFT_THRESHOLDS, _TARGET_THRESHOLDS, lookups
        )
        logs = self._log_speedups(weights, replace(grid, tree_tokens=tree_tokens), full_fidelity=True)
        order = np.argsort(-logs, kind="stable")[:count]
        return [Predicted(self._config(weights, grid, int(i)), float(np.exp(logs[i]))) for i in order]

    def log_speedups_by_text(self, lookups: Settings) -> Floats:
        """(S, P): of lookups alone, on every text."""
        return self._text_logs(SkipMask.none(len(self.cost.attention_s)), lookups, full_fidelity=True)

    def best_settings(
        self, mask: SkipMask, count: int, *, full_fidelity: bool = False, hybrid: bool | None = None
    ) -> list[Predicted]:
        """The `count` best of the coarse grid, best first; of hybrids alone, or of those without a lookup, if asked."""
        grid = self._grid
        logs = self._log_speedups(mask, grid, full_fidelity=full_fidelity)
        if hybrid is not None:
            is_none = np.array([one is None for one in grid.lookups])[grid.lookup]
            logs = np.where(is_none == hybrid, -np.inf, logs)
        order = [i for i in np.argsort(-logs, kind="stable")[:count] if np.isfinite(logs[i])]
        return [Predicted(self._config(mask, grid, int(i)), float(np.exp(logs[i]))) for i in order]

    def extra_texts(
        self, steps: Sequence[int], force: Callable[[Sequence[int]], tuple[Forcing, TextRows]]
    ) -> ExtraTexts | None:
        """Texts at `steps` that are not among all texts; None if all are. Cost: what `force` takes for them."""
        places = tuple(sorted({step for step in steps if step >= self.num_texts}))
        return ExtraTexts(places, Predictor(*force(places), self.cost, self._gamma_max)) if places else None

    def forecast(
        self, config: DecodeConfig, steps: Sequence[int], extra: ExtraTexts | None = None
    ) -> tuple[list[float], float]:
        """(Speedups on the texts at `steps`, speedup on texts like all of them) as configs are ranked: one draft deep,
        costs by terms. `extra` holds those of `steps` that are not among all texts."""
        logs = self._config_logs(config, full_fidelity=True)
        at = dict(enumerate(logs.tolist()))
        if extra is not None:
            others = extra.predictor._config_logs(config, full_fidelity=True)
            at |= dict(zip(extra.steps, others.tolist(), strict=True))
        mean = float(np.exp(logs.mean()))
        return [math.exp(at[step]) for step in steps], mean

    def with_siblings(self, one: Predicted, most: int, *, full_fidelity: bool = False) -> Predicted | None:
        """The same thresholds with the best number of siblings, 1..most, where to have them, and the gamma that suits,
        as far as costs of verifying so many are known; None where not even one is worth it.

        Cost: four replays of a few gammas for each number of siblings up to the first that is not worth it."""
        best = one
        for siblings in range(1, most + 1):
            found = [self._with_siblings(one.config, siblings, below, full_fidelity) for below in SIBLING_THRESHOLDS]
            better = [each for each in found if each is not None and each.speedup > best.speedup]
            if not better:
                break
            best = max(better, key=lambda each: each.speedup)
        return None if best is one else best

    def _with_siblings(
        self, config: DecodeConfig, siblings: int, below: float, full_fidelity: bool
    ) -> Predicted | None:
        gammas = range(1, min(config.gamma + 1, self._most_drafts(siblings)) + 1)
        if not gammas:
            return None
        thresholds = [config.draft_threshold], [config.target_threshold]
        grid = Settings.grid(list(gammas), *thresholds, [LookupChoice.of(config)])
        grid = replace(grid, siblings=siblings, sibling_threshold=below)
        return self._best(config.drafted_by, grid, full_fidelity=full_fidelity)

    def _most_drafts(self, siblings: int) -> int:
        """Of a round whose verification has a measured cost."""
        return min(self._gamma_max, (len(self.cost.verify_s) - 1) // (1 + siblings))

    def surface(self, config: DecodeConfig) -> tuple[Floats, Floats, Floats]:
        """(gammas, draft thresholds, speedups (gammas, thresholds)) on all texts of what else this config has, for
        plotting."""
        thresholds = np.arange(0.0, THRESHOLD_MAX + 1e-9, THRESHOLD_STEP)
        gammas = np.arange(1, self._most_drafts(config.siblings) + 1)
        grid = Settings.grid(gammas.tolist(), thresholds.tolist(), [config.target_threshold])
        grid = replace(grid, siblings=config.siblings, sibling_threshold=config.sibling_threshold)
        logs = self._text_logs(config.skip_mask, grid, full_fidelity=True).mean(axis=1)
        values = np.exp(logs).reshape(len(gammas), len(thresholds))
        return gammas.astype(np.float64), thresholds, values

    def trial(self, config: DecodeConfig, steps: Sequence[int], extra: ExtraTexts | None = None) -> TrialPrediction:
        """A sharper prediction for a config about to be measured: read several drafts deep.

        `steps` are places of texts; `extra` holds those that are not among all texts. Cost: up to `gamma`
        readings of these texts alone and a few short ones.
        """
        draft_s = self._draft_s(config)
        places = sorted({step for step in steps if step < self.num_texts})
        found = dict(zip(places, self._shown(config, places, draft_s), strict=True))
        if extra is not None:
            others = extra.predictor._shown(config, range(len(extra.steps)), draft_s)
            found |= dict(zip(extra.steps, others, strict=True))
        return TrialPrediction(
            ratios=tuple(found[step][0] for step in steps),
            forwards=tuple(found[step][1] for step in steps),
            draft_s=draft_s,
        )

    def _shown(
        self, config: DecodeConfig, places: Sequence[int], draft_s: float
    ) -> list[tuple[float, tuple[float, float, float]]]:
        """(Ratio, (drafts, verifications, target-only steps)) on each of the texts at these places, ascending."""
        if not places:
            return []
        counts = self.counts(config, sharp=True, texts=places)
        ratios = np.exp(_logs_at(self.cost, counts, self._rows.select(places), np.array([draft_s]))[0])
        drafts = counts.drafted[0] + counts.looked_up[0]
        forwards = zip(drafts, counts.rounds[0], counts.target_only[0], strict=True)
        return [
            (float(ratio), (float(d), float(r), float(a))) for ratio, (d, r, a) in zip(ratios, forwards, strict=True)
        ]

    def _draft_s(self, config: DecodeConfig) -> float:
        """One computed draft token; 0 where none is."""
        if not config.computes_drafts:
            return 0.0
        return self.cost.draft_s(config.drafted_by, threshold=config.watches_confidence)

    def counts(self, config: DecodeConfig, *, sharp: bool, texts: Sequence[int] | None = None) -> Counts:
        """Counts (1, P) of one config on the texts at these places, ascending; on all without.

        sharp: from a reading several drafts deep, drafts after a wrong token included; else as configs are ranked,
        which of trees is as exact.
        """
        places = list(range(self.num_texts)) if texts is None else list(texts)
        if sharp and not config.tree_tokens:
            return self._sharp_counts(config, places)
        settings = Settings.of(config)
        reading = self._reading_for(config.drafted_by, settings, full_fidelity=True).select(places)
        return replay(
            reading,
            self._rows.select(places),
            settings,
            self.cost.verify_s,
            lambda one: self._lookup(one).select(places),
        )

    def _sharp_counts(self, config: DecodeConfig, places: list[int]) -> Counts:
        rows = self._rows.select(places)
        depth = sharp_depth(config.gamma, int(rows.lengths.max()))
        reading = self._forcing.read(config.drafted_by, depth, places) if config.computes_drafts else no_reading(rows)
        rounds = walk(reading, rows, config, lambda one: self._lookup(one).select(places))
        open_ended = [one for one in rounds if one.wrong_and_sure]
        wrong = [self._wrong_draft(reading, one, places) for one in open_ended]
        added = dict(
            zip(
                map(id, open_ended),
                self._forcing.overrun(config.drafted_by, wrong, config.draft_threshold),
                strict=True,
            )
        )
        siblings = None if config.siblings == 0 else SiblingRows(reading, Settings.of(config))
        drafted, looked_up, num_rounds, alone, verify_s = np.zeros((5, 1, len(places)))
        for one in rounds:
            by_mask = one.drafted + added.get(id(one), 0)
            count = by_mask + one.looked_up
            drafted[0, one.text] += by_mask
            looked_up[0, one.text] += one.looked_up
            num_rounds[0, one.text] += count > 0
            alone[0, one.text] += count == 0
            verified = by_mask + one.looked_up
            if siblings is not None:
                verified += int(siblings.count(one.text, one.row, by_mask))
            verify_s[0, one.text] += self.cost.verify_s[verified] if count else 0.0
        return Counts(drafted, looked_up, num_rounds, alone, verify_s)

    @staticmethod
    def _wrong_draft(reading: DraftReadings, one: Round, places: Sequence[int]) -> WrongDraft:
        depth = min(one.accepted, len(reading.choices) - 1)
        row = one.row + one.accepted
        token = int(reading.choices[depth, one.text, row])
        return WrongDraft(places[one.text], row, one.accepted, token, one.room - one.drafted)

    def _best(self, mask: DraftedBy, grid: Settings, *, full_fidelity: bool) -> Predicted:
        logs = self._log_speedups(mask, grid, full_fidelity=full_fidelity)
        best = int(np.argmax(logs))
        return Predicted(self._config(mask, grid, best), float(np.exp(logs[best])))

    def _config(self, drafted_by: DraftedBy, grid: Settings, i: int) -> DecodeConfig:
        choice = grid.lookups[int(grid.lookup[i])]
        if choice is not None and grid.gamma[i] == 0:
            return choice.alone(len(self.cost.attention_s))
        fields: dict[str, Any] = {"skip_mask": drafted_by}
        if isinstance(drafted_by, DraftWeights):
            none = SkipMask.none(len(self.cost.attention_s))
            fields = {"drafter": drafted_by.drafter, "skip_mask": none, "draft_weights": drafted_by}
        if choice is not None:
            fields |= {"drafter": "hybrid", "lookup": choice.in_hybrid()}
        return DecodeConfig(
            gamma=int(grid.gamma[i]),
            draft_threshold=snap_threshold(float(grid.draft_threshold[i])),
            target_threshold=snap_threshold(float(grid.target_threshold[i])),
            siblings=grid.siblings,
            sibling_threshold=grid.sibling_threshold,
            **fields,
        )

    def _log_speedups(self, drafted_by: DraftedBy, grid: Settings, *, full_fidelity: bool) -> Floats:
        """(S,): mean log speedup over texts."""
        means: Floats = self._text_logs(drafted_by, grid, full_fidelity=full_fidelity).mean(axis=1)
        return means

    def _config_logs(self, config: DecodeConfig, *, full_fidelity: bool) -> Floats:
        """(P,): log speedup on each text."""
        one: Floats = self._text_logs(config.drafted_by, Settings.of(config), full_fidelity=full_fidelity)[0]
        return one

    def _text_logs(self, drafted_by: DraftedBy, grid: Settings, *, full_fidelity: bool) -> Floats:
        """(S, P): log speedup on each text."""
        readings, rows, cost = (
            self._reading_for(drafted_by, grid, full_fidelity=full_fidelity),
            self._rows_of(full_fidelity=full_fidelity),
            self.cost,
        )
        table = np.array(cost.verify_s)
        texts = range(len(rows.lengths))
        width = rows.target_probs.shape[1]
        parts = [self._first] if self._more is None or not full_fidelity else [self._first, self._more]
        able = [one for one in parts if isinstance(one, Replays)]
        if len(able) == len(parts):
            counts = Counts.join([one.replay(drafted_by, grid, table) for one in able])
        else:
            counts = replay(
                readings,
                rows,
                grid,
                table,
                lambda one: self._lookup(one).select(texts).narrowed(width),
            )
        plain, watched = (cost.draft_s(drafted_by, threshold=threshold) for threshold in (False, True))
        watches = (grid.draft_threshold > 0) | (grid.sibling_threshold < 1.0)
        return _logs_at(cost, counts, rows, np.where(watches, watched, plain))

    def _lookup(self, settings: LookupSettings) -> LookupReadings:
        """On all texts; those on the first ones are its first rows."""
        return self._lookups.read(self._forcing.texts, settings, self._rows.target_probs.shape[1])

    def _reading_for(self, drafted_by: DraftedBy, grid: Settings, *, full_fidelity: bool) -> Readings:
        """The draft's; of lookups alone none is needed."""
        return (
            self._reading(drafted_by, full_fidelity=full_fidelity)
            if grid.gamma.any()
            else no_reading(self._rows_of(full_fidelity=full_fidelity))
        )

    def _rows_of(self, *, full_fidelity: bool) -> TextRows:
        return self._rows if full_fidelity else self._first_rows

    def _reading(self, drafted_by: DraftedBy, *, full_fidelity: bool) -> Readings:
        more = self._more
        if isinstance(drafted_by, DraftWeights) and drafted_by.tree_tokens:
            # What is read for large trees tells of smaller ones.
            drafted_by = drafted_by.branching(max(TREES[-1], drafted_by.tree_tokens))
        if not full_fidelity or more is None:
            return self._readings.of(drafted_by, lambda: self._read(self._first, drafted_by))
        return self._full_readings.of(drafted_by, lambda: self._join(drafted_by, more))

    def _read(self, forcing: Forcing, drafted_by: DraftedBy) -> Readings:
        if isinstance(drafted_by, DraftWeights) and drafted_by.tree_tokens:
            return forcing.read_trees(drafted_by, self._gamma_max)
        return forcing.read(drafted_by)

    def _join(self, drafted_by: DraftedBy, more: Forcing) -> Readings:
        """The reading of the first texts, and a new one of the others."""
        readings = [self._reading(drafted_by, full_fidelity=False), self._read(more, drafted_by)]
        width = self._rows.target_probs.shape[1]
        if trees := [one for one in readings if isinstance(one, TreeReadings)]:
            return TreeReadings.join(trees, width)
        return join_readings([one for one in readings if isinstance(one, DraftReadings)], width)


def no_reading(rows: TextRows) -> DraftReadings:
    """What lookups alone need of a mask."""
    nothing = np.zeros((1, *rows.target_probs.shape), dtype=np.float32)
    return DraftReadings(nothing, nothing, nothing.astype(np.int64))


def coarse_gammas(most: int) -> list[int]:
    """All up to 8, then in steps that grow with them, and the most: long rounds differ less from one gamma to the
    next, and every gamma of the grid costs a replay of all thresholds."""
    gammas = list(range(1, min(most, 8) + 1))
    while gammas[-1] < most:
        gammas.append(min(most, gammas[-1] + max(2, gammas[-1] // 4)))
    return gammas


def gammas_around(gamma: int, most: int) -> list[int]:
    """From the coarse gamma before this one, which is one too, to the one after it."""
    gammas = coarse_gammas(most)
    place = gammas.index(gamma)
    return list(range(gammas[max(0, place - 1)], gammas[min(place + 1, len(gammas) - 1)] + 1))


def sharp_depth(gamma: int, longest: int) -> int:
    """How many drafts into a round texts of up to so many continuation tokens are read for this gamma."""
    return max(0, min(gamma - 1, max(_SHARP_DEPTH, _SHARP_ROWS // longest - 1)))


def lookup_grid(method: str, gamma_max: int) -> list[LookupChoice]:
    """All lookups of one method that are predicted."""
    suffix = method == "suffix"
    settings = [
        lookup_settings(method, least, factor, probability)
        for least in range(1, MIN_MATCH_MAX + 1)
        for factor in (FACTORS if suffix else FACTORS[:1])
        for probability in (_MIN_PROBABILITIES if suffix else (0.0,))
    ]
    gammas = sorted({min(gamma, gamma_max) for gamma in _LOOKUP_GAMMAS})
    return [LookupChoice(one, gamma, at) for one in settings for gamma in gammas for at in _LOOKUP_THRESHOLDS]


def _logs_at(cost: CostModel, counts: Counts, rows: TextRows, draft_s: Floats) -> Floats:
    """(S, P): log of plain over speculative seconds."""
    alone = cost.verify_s[0]
    seconds = counts.drafted * draft_s[:, None] + counts.verify_s + counts.target_only * alone
    # A text of one token has no step to save: ratio 1.
    steps = np.maximum(rows.lengths - 1, 0)
    logs: Floats = np.log(np.where(steps > 0, steps * alone, 1.0) / np.where(steps > 0, seconds, 1.0))
    return logs
