"""StudyRecord: all that a study keeps, read once, with what is derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip.config.decode_config import OWN_LAYERS, TRAINED, DecodeConfig, DraftWeights, trained_by
from layerskip.config.skip_mask import SkipMask
from search.confirm.held_out import HeldOut
from search.measure.reference import Reference
from search.study.attributes import CONFIG, DRAFT_WEIGHTS, HELD_OUT, RATIOS, REFERENCE, SKIP_MASK
from search.study.leaderboard import Entry, Standings
from search.study.space import (
    BITS,
    DRAFT_INT8,
    DRAFT_VOCAB,
    DRAFTER,
    GAMMA,
    LOOKUP_GAMMA,
    LOOKUP_GAMMA_MAX,
    SIBLINGS,
    WEIGHTS_DRAFT_VOCAB,
    WEIGHTS_SIBLINGS,
    WEIGHTS_TREE,
    SearchSpace,
    weights_of,
)
from search.study.trials import is_full
from search.trials.objective import standings_of

_MAX_STANDINGS = 200
"""Points of the leader's curve: each costs a fit over all earlier trials."""


class MissingData(ValueError):  # noqa: N818 (reads as the fact it states)
    """The study does not keep what a figure draws; the message names it."""


@dataclass(frozen=True)
class Choice:
    """The config that a report is about."""

    config: DecodeConfig
    words: str
    """What it is: the exported one, or one that was not good enough, or what leads so far."""


@dataclass(frozen=True)
class StudyRecord:
    """A study at one moment; it may be going on in another process."""

    study: optuna.Study
    attrs: Mapping[str, Any]
    trials: tuple[FrozenTrial, ...]
    held_out: HeldOut | None
    """None before the confirm stage."""

    @property
    def name(self) -> str:
        return self.study.study_name

    @cached_property
    def finished(self) -> tuple[FrozenTrial, ...]:
        """Trials that are over, however they ended."""
        return tuple(trial for trial in self.trials if trial.state.is_finished())

    @cached_property
    def measured(self) -> tuple[FrozenTrial, ...]:
        """Trials with a measurement, stopped early or not."""
        return tuple(t for t in self.trials if t.state == TrialState.COMPLETE and t.user_attrs.get(RATIOS))

    @cached_property
    def reference(self) -> Reference:
        """Raises: MissingData if the study keeps none."""
        if REFERENCE not in self.attrs:
            raise MissingData(f"{REFERENCE}: study {self.name!r} keeps none")
        return Reference.from_json(self.attrs[REFERENCE])

    @cached_property
    def standings(self) -> Standings | None:
        """None before anything was measured."""
        if not self.measured or REFERENCE not in self.attrs:
            return None
        return standings_of(self.trials, space_of(self.measured), self.reference)

    @cached_property
    def leaders(self) -> Sequence[tuple[int, Entry]]:
        """(trial number, leader once that trial was in): after every trial, or some 200 of them; none before any led.

        Cost: a fit over all earlier trials each. Raises: MissingData if the study keeps no reference.
        """
        if not (trials := self.measured):
            return []
        space, num_points = space_of(trials), min(len(trials), _MAX_STANDINGS)
        counts = np.unique(np.linspace(1, len(trials), num_points).round().astype(int)).tolist()
        found = [(trials[n - 1].number, standings_of(trials[:n], space, self.reference).leader) for n in counts]
        return [(number, leader) for number, leader in found if leader is not None]

    @property
    def leader(self) -> Entry | None:
        return self.standings.leader if self.standings else None

    @cached_property
    def choice(self) -> Choice | None:
        """None before any config was measured in full."""
        stored = self.attrs.get(CONFIG)
        if stored is not None and (config := DecodeConfig(**stored)).speculates:
            return Choice(config, "the exported config")
        if self.held_out is not None:
            return Choice(self.held_out.config, "the best candidate, not good enough to be exported")
        return Choice(self.leader.config, "the leader on the tuning prompts") if self.leader else None

    def trials_of(self, config: DecodeConfig) -> list[FrozenTrial]:
        """Full trials of this very config."""
        space, wanted = space_of(self.measured), config.bare()
        full = [trial for trial in self.measured if is_full(trial) and space.holds(trial.params)]
        return [trial for trial in full if space.to_config(trial.params) == wanted]


def space_of(trials: Sequence[FrozenTrial]) -> SearchSpace:
    """The space that these trials were drawn from, as far as they tell.

    Raises: KeyError for trials that the search did not make; ValueError without any.
    """
    if not trials:
        raise ValueError("trials: must hold at least one, got none")
    seen = {name: one for trial in trials for name, one in trial.distributions.items()}
    bits: dict[str, set[int]] = {"attn": set(), "mlp": set(), "layer": set()}
    for name in seen:
        if name.startswith("skip."):
            _, kind, layer = name.split(".")
            bits[kind].add(int(layer))
    attention, mlp, layers = (tuple(sorted(some)) for some in bits.values())
    drafters = tuple(getattr(seen.get(DRAFTER), "choices", ("layer_skip",)))
    vocabs = tuple(getattr(seen.get(DRAFT_VOCAB) or seen.get(WEIGHTS_DRAFT_VOCAB), "choices", ()))
    rounded = getattr(seen.get(BITS), "choices", ())
    weights = _weights_of(trials, drafters)
    return SearchSpace(
        SkipMask.parse(trials[0].user_attrs[SKIP_MASK]).num_layers,
        int(getattr(seen.get(GAMMA), "high", 1)),
        attention,
        mlp,
        layers,
        draft_vocabs=vocabs,
        draft_ids=_draft_ids_of(trials),
        int8=DRAFT_INT8 in seen or 8 in rounded,
        int4=4 in rounded,
        drafters=drafters,
        lookup_gamma_max=int(getattr(seen.get(LOOKUP_GAMMA), "high", LOOKUP_GAMMA_MAX)),
        draft_weights=weights,
        narrows_weights=bool({WEIGHTS_DRAFT_VOCAB, WEIGHTS_SIBLINGS} & seen.keys()) or not (vocabs and weights),
        trees=tuple(getattr(seen.get(WEIGHTS_TREE), "choices", ())),
        siblings_max=int(getattr(seen.get(SIBLINGS) or seen.get(WEIGHTS_SIBLINGS), "high", 0)),
    )


def _draft_ids_of(trials: Sequence[FrozenTrial]) -> tuple[tuple[int, str], ...]:
    masks = {SkipMask.parse(text) for one in trials if (text := one.user_attrs.get(SKIP_MASK))}
    return tuple({(one.draft_vocab, one.draft_ids) for one in masks if one.draft_vocab and one.draft_ids})


def _weights_of(trials: Sequence[FrozenTrial], drafters: Sequence[str]) -> tuple[DraftWeights, ...]:
    """Of each way to draft by trained weights those that the trials drafted by, and names for those that none did."""
    used = {one["path"]: one for trial in trials if (one := trial.user_attrs.get(DRAFT_WEIGHTS))}
    seen = {name: one for trial in trials for name, one in trial.distributions.items()}
    found: list[DraftWeights] = []
    for drafter in TRAINED:
        if not any(trained_by(one) == drafter for one in drafters):
            continue
        known = [DraftWeights(**one).narrowed(None) for one in used.values() if one.get("drafter", "eagle") == drafter]
        names = getattr(seen.get(weights_of(drafter)), "choices", ())
        of_name = {name: one for one in known for name in (one.path, Path(one.path).name)}
        places = {name: OWN_LAYERS if drafter == "mtp" else name for name in names or ("unknown",)}
        missing = [DraftWeights(drafter=drafter, path=at, fingerprint=name) for name, at in places.items()]
        found += [of_name.get(one.path, one) for one in missing] if names else known[:1] or missing
    return tuple(found)


def read_record(study: optuna.Study) -> StudyRecord:
    """Read the study."""
    attrs = study.user_attrs
    trials = tuple(study.get_trials(deepcopy=False))
    stored = attrs.get(HELD_OUT)
    held_out = HeldOut.from_json(stored) if stored is not None else None
    return StudyRecord(study, attrs, trials, held_out)
