"""What steps cost on four kinds of machine: stated assumptions, but for the one that this repository has measured.

All is told in steps of the target, and taken to be alike for models of any depth: the layers of a shallow model are
taken to be as large a part of its step as those of a deep one.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from layerskip.config.skip_mask import SkipMask
from search.predict.costs import CostModel

_GAMMA_MAX = 16
QUIRK = 0.02
"""Standard deviation of the log by which a mask's draft step is off the sum of its terms: assumed. On this CPU the sum
fits masks to 2.5 to 3.3 % in the median (`studies/demo/summary.json`, `costs`), with the noise of timing them in it."""


@dataclass(frozen=True)
class CostTable:
    """One machine."""

    name: str
    about: str
    """Where the numbers come from."""
    step_s: float
    """Seconds of one target step."""
    verifications: tuple[float, ...]
    """Entry n: verifying n draft tokens, in target steps; entry 0 is 1."""
    fixed: float
    """Of a draft step, what no mask saves; in target steps, as all that follows."""
    attention: float
    """All attention sublayers together."""
    mlp: float
    """All MLP sublayers together."""
    threshold: float
    """What looking at the draft's confidence adds to a draft step."""

    def __post_init__(self) -> None:
        if len(self.verifications) != _GAMMA_MAX + 1 or self.verifications[0] != 1.0:
            raise ValueError(f"verifications: must be {_GAMMA_MAX + 1}, the first one 1, got {self.verifications}")
        if self.fixed + self.attention + self.mlp > 1.0 + 1e-9:
            raise ValueError(
                f"fixed, attention and mlp: a draft step must cost no more than a target step: {self.name}"
            )

    def prices(self, model: str, num_layers: int) -> Prices:
        """What a model of this name and depth really costs."""
        return Prices(self.model(num_layers), f"{self.name} {model}")

    def model(self, num_layers: int) -> CostModel:
        """Seconds of every step of a model so deep, as far as a sum of terms can tell them."""
        return CostModel(
            verify_s=tuple(self.step_s * one for one in self.verifications),
            fixed_s=self.step_s * self.fixed,
            attention_s=(self.step_s * self.attention / num_layers,) * num_layers,
            mlp_s=(self.step_s * self.mlp / num_layers,) * num_layers,
            threshold_s=self.step_s * self.threshold,
            fit_error=0.0,
            context_tokens=0,
            measured_on={},
        )


@dataclass(frozen=True)
class Prices:
    """Seconds of every step, a mask's own quirk included, which no sum of terms knows."""

    terms: CostModel
    label: str
    """Quirks follow from it."""
    quirk: float = QUIRK

    def draft_s(self, mask: SkipMask, *, threshold: bool) -> float:
        """One draft token under a mask."""
        return self.terms.draft_s(mask, threshold=threshold) * math.exp(self.quirk * _luck(self.label, mask))

    @property
    def verify_s(self) -> tuple[float, ...]:
        """Entry n: verifying n draft tokens, entry 0 the target alone."""
        return self.terms.verify_s

    @property
    def alone_s(self) -> float:
        """A step of the target alone."""
        return self.verify_s[0]


@lru_cache(maxsize=1 << 11)
def _luck(label: str, mask: SkipMask) -> float:
    return float(np.random.default_rng(zlib.crc32(f"{label} {mask}".encode())).standard_normal())


def _growing(by: float) -> tuple[float, ...]:
    """Each draft token makes a verification dearer by so many target steps."""
    return tuple(1.0 + by * n for n in range(_GAMMA_MAX + 1))


_DEMO = (
    1.0, 1.304, 1.363, 1.407, 1.653, 1.626, 1.894, 1.690, 1.922, 1.996, 2.070, 2.144, 2.218, 2.317, 2.416, 2.516, 2.615,
)  # fmt: skip

COSTS = {
    one.name: one
    for one in (
        CostTable(
            "cpu",
            "measured: studies/demo/summary.json, costs.first (2 CPU cores, float32, 12 layers)",
            0.003978,
            _DEMO,
            fixed=0.067,
            attention=0.428,
            mlp=0.410,
            threshold=0.041,
        ),
        CostTable(
            "cpu_dear",
            "assumed: a CPU that is short of arithmetic, where every token verified costs half a step",
            0.02,
            _growing(0.5),
            fixed=0.08,
            attention=0.31,
            mlp=0.61,
            threshold=0.01,
        ),
        CostTable(
            "gpu_memory",
            "assumed: a large model on a GPU, whose step is reading weights once; a third of a layer's are attention's",
            0.02,
            _growing(0.01),
            fixed=0.05,
            attention=0.315,
            mlp=0.63,
            threshold=0.005,
        ),
        CostTable(
            "gpu_launch",
            "assumed: a small model on a GPU, whose step is launching kernels and a synchronisation that no mask saves",
            0.005,
            _growing(0.02),
            fixed=0.5,
            attention=0.28,
            mlp=0.2,
            threshold=0.02,
        ),
    )
}
