"""Watched and disturbed fakes for tests of what is predicted before and between trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from layerskip import SkipMask
from layerskip.analysis.teacher_forcing import ForcedText
from layerskip.config.decode_config import DraftedBy, DraftWeights
from search.study.space import SearchSpace
from tests.search.helpers.fakes import FakeDecoder
from tests.search.helpers.forcing import READING_S, FakeForcing, FakeTimer


@dataclass
class PlantedTimer(FakeTimer):
    """Attention and MLPs cost different times; says what it was asked, and has moments in which all takes longer."""

    fixed_s: float = 1e-3
    attention_s: float = 2e-4
    mlp_s: float = 5e-4
    threshold_s: float = 3e-5
    slowdown: Callable[[int], float] = lambda _repeat: 1.0
    """Factor on all times of the n-th repeat; one begins with the verifications."""
    verified: list[tuple[int, ...]] = field(default_factory=list)
    """Texts of the calls that verified, in order."""
    drafted: list[tuple[tuple[int, ...], tuple[SkipMask, ...], int, bool]] = field(default_factory=list)
    """Text, masks, gamma and threshold of the calls that drafted, in order."""

    def verify_s(self, text_ids: Sequence[int], counts: Sequence[int]) -> list[float]:
        self.verified.append(tuple(text_ids))
        return [one * self._factor for one in super().verify_s(text_ids, counts)]

    def draft_s(
        self, text_ids: Sequence[int], masks: Sequence[SkipMask], *, gamma: int, threshold: bool
    ) -> list[float]:
        self.drafted.append((tuple(text_ids), tuple(masks), gamma, threshold))
        return [self.true_draft_s(mask, threshold=threshold) * self._factor for mask in masks]

    def true_draft_s(self, mask: DraftedBy, *, threshold: bool) -> float:
        if isinstance(mask, DraftWeights):
            return self.fixed_s
        kept = mask.attention.count(False) * self.attention_s + mask.mlp.count(False) * self.mlp_s
        return self.fixed_s + kept + (self.threshold_s if threshold else 0.0)

    @property
    def num_calls(self) -> int:
        return len(self.verified) + len(self.drafted)

    @property
    def _factor(self) -> float:
        return self.slowdown(len(self.verified) - 1)


@dataclass
class WatchedDecoder(FakeDecoder):
    """A fake decoder whose timer and forcings can be set and looked at."""

    step_times: FakeTimer = field(default_factory=FakeTimer)
    reading_s: float = 0.2
    """Seconds that a reading of six texts takes on the fake clock; of more or fewer in proportion."""
    forcings: list[FakeForcing] = field(default_factory=list)

    def timer(self, gamma_max: int) -> FakeTimer:
        return self.step_times

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> FakeForcing:
        pace = self.reading_s / READING_S
        self.forcings.append(FakeForcing(texts, lambda seconds: self.clock.advance(seconds * pace)))
        return self.forcings[-1]

    @property
    def num_readings(self) -> int:
        return sum(one.num_readings for one in self.forcings)


def space_of(num_layers: int, *, whole: bool = False, gamma_max: int = 6) -> SearchSpace:
    layers, none = tuple(range(num_layers)), ()
    return SearchSpace(num_layers, gamma_max, *((none, none, layers) if whole else (layers, layers, none)))


def record(
    study: optuna.Study, space: SearchSpace, params: Mapping[str, Any], ratios: Sequence[float], **attrs: object
) -> FrozenTrial:
    """Add a full trial that measured these ratios on prompts 0, 1, ...; returns it with its number."""
    facts = {
        "lossless": True,
        "stopped_early": False,
        "ratios": list(ratios),
        "prompt_steps": list(range(len(ratios))),
    }
    return _add(study, space, params, TrialState.COMPLETE, facts | attrs)


def record_failure(
    study: optuna.Study, space: SearchSpace, params: Mapping[str, Any], reason: str, **attrs: object
) -> FrozenTrial:
    """Add a trial that failed; `interrupted` is a reason that does not count."""
    return _add(study, space, params, TrialState.FAIL, {"failure": reason} | attrs)


def _add(
    study: optuna.Study, space: SearchSpace, params: Mapping[str, Any], state: TrialState, attrs: dict[str, Any]
) -> FrozenTrial:
    value = 100.0 if state == TrialState.COMPLETE else None
    study.add_trial(
        create_trial(state=state, value=value, params=dict(params), distributions=space.distributions, user_attrs=attrs)
    )
    return study.get_trials(deepcopy=False)[-1]
