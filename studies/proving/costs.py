"""What steps cost on four kinds of machine: stated assumptions, but for the one that this repository has measured.

All is told in steps of the target, and taken to be alike for models of any depth: the layers of a shallow model are
taken to be as large a part of its step as those of a deep one.
"""

from __future__ import annotations

from dataclasses import dataclass

from search.cost_model import CostModel

_GAMMA_MAX = 8


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

    def model(self, num_layers: int) -> CostModel:
        """Seconds of every step of a model so deep, as the search would know them without noise."""
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


def _growing(by: float) -> tuple[float, ...]:
    """Each draft token makes a verification dearer by so many target steps."""
    return tuple(1.0 + by * n for n in range(_GAMMA_MAX + 1))


COSTS = {
    one.name: one
    for one in (
        CostTable(
            "cpu",
            "measured: studies/demo/summary.json, costs.first, of 2026-11-23 (2 CPU cores, float32, 12 layers)",
            0.003536,
            (1.0, 1.325, 1.474, 1.422, 1.605, 1.635, 1.821, 1.695, 1.874),
            fixed=0.096,
            attention=0.362,
            mlp=0.363,
            threshold=0.033,
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
