"""Lossy acceptance: rules that keep draft tokens which the target would not have chosen, and how far that leads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from layerskip.config.validated import Frozen, OneLineErrors, Probability

_Positive = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class ProbabilityAcceptance(OneLineErrors, Frozen):
    """A draft token is accepted where the target gives it at least a set probability."""

    rule: Literal["probability"] = "probability"
    threshold: _Positive

    @property
    def name(self) -> str:
        """For a file or a table."""
        return f"probability_{self.threshold:g}"

    def __str__(self) -> str:
        return f"a target probability of at least {self.threshold:g}"


class TypicalAcceptance(OneLineErrors, Frozen):
    """A draft token is accepted where its target probability is above min(epsilon, delta * exp(-entropy)), the entropy
    being that of the target's distribution in nats: where many tokens would do, a less likely one is enough.

    The defaults are those of Medusa's published code. Ref: Cai et al. 2024 (2401.10774).
    """

    rule: Literal["typical"] = "typical"
    epsilon: _Positive = 0.09
    delta: _Positive = 0.3

    @property
    def name(self) -> str:
        """For a file or a table."""
        return f"typical_{self.epsilon:g}_{self.delta:g}"

    def __str__(self) -> str:
        return f"a target probability above min({self.epsilon:g}, {self.delta:g} exp(-entropy))"


LossyAcceptance = Annotated[ProbabilityAcceptance | TypicalAcceptance, Field(discriminator="rule")]
LADDER: tuple[ProbabilityAcceptance | TypicalAcceptance, ...] = (
    *(ProbabilityAcceptance(threshold=one) for one in (0.5, 0.3, 0.1)),
    TypicalAcceptance(),
)
"""What a search measures where it may."""


def lossy_label(rule: LossyAcceptance) -> str:
    """What must stand wherever a lossy setting is told."""
    return f"LOSSY, the output is not the target's own: draft tokens are accepted at {rule}"


class Distance(Frozen):
    """How far lossy outputs lie from the target's own continuations of the same prompts."""

    unlike_share: Probability
    """Share of the emitted tokens that the target would not have chosen after the text before them."""
    log_prob: float
    """Mean log-probability of an emitted token under the target, in nats, at temperature 1."""
    target_log_prob: float
    """The same of the target's own text."""

    def __str__(self) -> str:
        return (
            f"{self.unlike_share:.1%} of the tokens are not the target's choice, log-probability {self.log_prob:.3f} a "
            f"token against {self.target_log_prob:.3f} of the target's own text"
        )
