"""A search space and an objective without a model: what a config is worth follows from a formula, plus noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from layerskip.config.decode_config import DecodeConfig
from search.study.space import SearchSpace

NUM_LAYERS, GAMMA_MAX = 24, 8
NUM_PROMPTS = 8
NOISE = 0.03
"""Standard deviation of one pair's log ratio."""
SPACE = SearchSpace(
    num_layers=NUM_LAYERS,
    gamma_max=GAMMA_MAX,
    attention_bits=tuple(range(NUM_LAYERS)),
    mlp_bits=tuple(range(NUM_LAYERS)),
    layer_bits=(),
)
_VERIFY_OVERHEAD = 0.05
_MLP_SHARE = 0.6
"""Of a layer's cost."""


class Landscape:
    """One instance: sublayers near both ends matter much, a few elsewhere too, and neighbours that go together more."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, NUM_LAYERS])
        depth = np.abs(np.linspace(-1, 1, NUM_LAYERS))
        scale = 0.004 + 0.05 * depth**4
        self._harm = scale[None, :] * rng.lognormal(0.0, 0.6, size=(2, NUM_LAYERS))
        critical = rng.choice(2 * NUM_LAYERS, size=4, replace=False)
        self._harm.flat[critical] *= 8

    def speedup(self, config: DecodeConfig) -> float:
        """Noise-free speedup over plain decoding, which is 1."""
        mask = config.skip_mask
        skipped = np.array([mask.attention, mask.mlp], dtype=float)
        both = skipped.sum(axis=0)
        harm = float((self._harm * skipped).sum()) + 0.006 * float((both[1:] * both[:-1]).sum()) / 4
        share = float((1 - _MLP_SHARE) * skipped[0].sum() + _MLP_SHARE * skipped[1].sum()) / NUM_LAYERS
        harm += 2.0 * max(0.0, share - 0.55)
        accepted, cost = 0.985 * math.exp(-harm), 1 - share
        # The best threshold ends a draft early where it is likely wrong; away from it half of that is lost.
        accepted *= 1 - 0.05 * abs(config.draft_threshold - 0.4) - 0.1 * config.target_threshold
        gamma = config.gamma
        emitted = (1 - accepted ** (gamma + 1)) / (1 - accepted)
        return emitted / (gamma * cost + 1 + _VERIFY_OVERHEAD)

    def optimum(self) -> float:
        """The best that steepest ascent finds from many starts: a lower bound of the optimum, and close to it."""
        rng = np.random.default_rng(0)
        return max(self._ascend(rng) for _ in range(6))

    def _ascend(self, rng: np.random.Generator) -> float:
        params: dict[str, Any] = {name: bool(rng.random() < 0.3) for name in SPACE.bit_names}
        params |= {"gamma": 4, "draft_threshold": 0.4, "target_threshold": 0.0}
        best = self.speedup(SPACE.to_config(params))
        while True:
            moves = [params | {name: not params[name]} for name in SPACE.bit_names]
            moves += [params | {"gamma": gamma} for gamma in range(1, GAMMA_MAX + 1)]
            values = [self.speedup(SPACE.to_config(move)) for move in moves]
            if max(values) <= best + 1e-9:
                return best
            best = max(values)
            params = moves[values.index(best)]

    def measure(self, config: DecodeConfig, rng: np.random.Generator) -> list[float]:
        """Noisy ratios on the prompts, as a trial measures them."""
        return [self.speedup(config) * math.exp(NOISE * float(rng.normal())) for _ in range(NUM_PROMPTS)]
