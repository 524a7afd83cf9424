"""Hidden states, agreements, readings and seconds that follow from formulas, for tests of rivals and comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from optuna.trial import FrozenTrial, TrialState, create_trial

from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.predict.costs import CostModel
from search.rivals import Setup
from search.rivals.common import Plan
from search.rivals.hidden_states import layer_plan, sublayer_plan
from search.study.space import SearchSpace
from search.trials.proposals import ProposeOptions
from tests.search.helpers.fakes import NUM_LAYERS, FakeClock, FakeDecoder
from tests.search.helpers.forcing import FakeForcing

READING_S, FORCING_S = 0.13, 5.0
"""Seconds that divide no budget evenly, so that rounding decides nothing."""


def make_cost(num_layers: int, attention_s: float = 1e-3, mlp_s: float = 2e-3) -> CostModel:
    whole = 1e-3 + num_layers * (attention_s + mlp_s)
    return CostModel(
        verify_s=tuple(whole * (1 + 0.01 * n) for n in range(17)),
        fixed_s=1e-3,
        attention_s=(attention_s,) * num_layers,
        mlp_s=(mlp_s,) * num_layers,
        threshold_s=1e-4,
        fit_error=0.0,
        context_tokens=10,
        measured_on={},
    )


class OrthogonalStates:
    """Every sublayer adds a fixed vector at a right angle to all others, so the squared cosine with the target is the
    share of squared lengths that is kept: what dynamic programming assumes holds exactly."""

    def __init__(self, lengths: Sequence[float]) -> None:
        """`lengths`: attention 0, MLP 0, attention 1, ..."""
        self.num_layers = len(lengths) // 2
        self._vectors = torch.diag(torch.tensor([1.0, *lengths], dtype=torch.float64))
        self.num_run = 0

    def embed(self) -> torch.Tensor:
        return self._vectors[0].repeat(2, 1)

    def attention(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        self.num_run += 1
        return hidden + self._vectors[1 + 2 * layer]

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        self.num_run += 1
        return hidden + self._vectors[2 + 2 * layer]

    def target(self, layer: int) -> torch.Tensor:
        return self._vectors[: 1 + 2 * layer].sum(dim=0).repeat(2, 1)

    def similarity(self, mask: SkipMask) -> float:
        """Cosine of the draft's last state with the target's, by running the draft."""
        hidden = self.embed()
        for layer in range(self.num_layers):
            hidden = hidden if mask.attention[layer] else self.attention(layer, hidden)
            hidden = hidden if mask.mlp[layer] else self.mlp(layer, hidden)
        cosine = torch.nn.functional.cosine_similarity(hidden, self.target(self.num_layers), dim=-1)
        return float(cosine.mean())


def agreement_of(mask: SkipMask) -> float:
    """A product over skipped sublayers, the ends of the model being the dearest."""
    last = mask.num_layers - 1
    product = 1.0
    for skips in (mask.attention, mask.mlp):
        for layer, skipped in enumerate(skips):
            product *= (0.7 if layer in (0, last) else 0.97 - 0.002 * layer) if skipped else 1.0
    return product


@dataclass
class FakeHints:
    """Formulas in place of a model."""

    space: SearchSpace
    attention_s: float = 1e-3
    mlp_s: float = 2e-3
    agree: Callable[[SkipMask], float] = agreement_of
    num_asked: int = 0
    num_settings: int = 0
    states: Any = field(init=False)
    cost: CostModel = field(init=False)

    def __post_init__(self) -> None:
        num_layers = self.space.num_layers
        lengths = np.random.default_rng(0).uniform(0.2, 1.0, 2 * num_layers).tolist()
        self.states = OrthogonalStates(lengths)
        self.cost = make_cost(num_layers, self.attention_s, self.mlp_s)

    def agreement(self, mask: SkipMask) -> float:
        self.num_asked += 1
        return self.agree(mask)

    def confidences(self, mask: SkipMask) -> tuple[float, float]:
        return 0.5 + 0.5 * self.agree(mask), 0.5 * self.agree(mask)

    def best_setting(self, mask: SkipMask) -> DecodeConfig:
        self.num_settings += 1
        gamma = min(3, self.space.gamma_max)
        return DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=0.35, target_threshold=0.1)

    def layer_plan(self) -> Plan:
        return layer_plan(self.states, self.space)

    def sublayer_plan(self, attention: int, mlp: int) -> Plan:
        return sublayer_plan(self.states, self.space, attention, mlp)


class ClockedForcing(OrthogonalStates, FakeForcing):
    """Readings of the fake outlook, each taking its time on the clock, and hidden states."""

    nbytes = 1 << 20

    def __init__(self, texts: Sequence[ForcedText], clock: FakeClock) -> None:
        OrthogonalStates.__init__(self, np.random.default_rng(0).uniform(0.2, 1.0, 2 * NUM_LAYERS).tolist())
        FakeForcing.__init__(self, texts)
        self._clock = clock

    def read(self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        self._clock.now += READING_S
        return super().read(mask, depth, texts)


@dataclass
class ReadableDecoder(FakeDecoder):
    """A fake decoder on which making a teacher forcing takes its time too."""

    has_states: bool = True
    forcings: list[FakeForcing] = field(default_factory=list)

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> FakeForcing:
        self.clock.now += FORCING_S
        self.forcings.append(ClockedForcing(texts, self.clock) if self.has_states else FakeForcing(texts))
        return self.forcings[-1]


def make_space(num_layers: int, *, whole: bool = False, gamma_max: int = 6) -> SearchSpace:
    every = tuple(range(num_layers))
    apart = () if whole else every
    return SearchSpace(num_layers, gamma_max, apart, apart, every if whole else ())


def make_setup(
    space: SearchSpace, hints: Any = None, seed: int = 0, *, repeat_every: int = 0, with_settings: bool = False
) -> Setup:
    """Leaders are measured again at the end of a list alone, unless asked for."""
    known = FakeHints(space) if hints is None else hints
    return Setup(space, known, seed, ProposeOptions(repeat_every, 0.0, 3), with_settings)


def landscape(config: DecodeConfig) -> float:
    """A speedup for a config of any size: skipping pays in the middle, costs at the ends; gamma 4 is best."""
    mask = config.skip_mask
    ends = {0, mask.num_layers - 1}
    gain = 0.0
    for skips in (mask.attention, mask.mlp):
        gain += sum((-0.15 if i in ends else 0.5 / mask.num_layers) for i, skipped in enumerate(skips) if skipped)
    return max(0.2, 1 + gain - 0.02 * abs(config.gamma - 4))


def measured(space: SearchSpace, params: dict[str, Any], number: int, speedup: float | None = None) -> FrozenTrial:
    """A trial as the objective leaves it: a speedup on three prompts, a little apart."""
    config = space.to_config(params)
    middle = landscape(config) if speedup is None else speedup
    ratios = [middle * (1 + 0.01 * i) for i in (-1, 0, 1)]
    attrs = {"lossless": True, "stopped_early": False, "ratios": ratios, "prompt_steps": [0, 1, 2]}
    trial = create_trial(value=100 * middle, params=params, distributions=space.distributions, user_attrs=attrs)
    trial.number = number
    return trial


def failed(space: SearchSpace, params: dict[str, Any], number: int, reason: str) -> FrozenTrial:
    attrs = {"failure": reason}
    trial = create_trial(state=TrialState.FAIL, params=params, distributions=space.distributions, user_attrs=attrs)
    trial.number = number
    return trial
