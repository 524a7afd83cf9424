"""What decoding a text may ask of an engine, as far as it is known before the text begins."""

from __future__ import annotations

from dataclasses import dataclass

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask


@dataclass(frozen=True)
class ForwardPlan:
    """Forwards that a text may run."""

    mask: SkipMask | None
    num_tokens: int
    starts: range
    """Tokens in the cache before one of them."""

    @property
    def num_logits(self) -> int:
        """Of each token where the target verifies; of the last one where a draft goes on."""
        return self.num_tokens if self.mask is None else 1


@dataclass(frozen=True)
class Starts:
    """How many tokens the cache may hold before a step, by kind of step."""

    rounds: range
    alone: range
    """The target's own steps, the prompt's forward apart."""

    @classmethod
    def of(
        cls, config: DecodeConfig, num_prompt_tokens: int, max_new_tokens: int, *, with_grammar: bool = False
    ) -> Starts:
        """Of a text with a prompt of this length that may get so many new tokens."""
        # The prompt's forward gives the first token. The last one, where it is left to a step of its own, is always
        # the target's alone.
        steps = range(num_prompt_tokens, num_prompt_tokens + max_new_tokens - 1)
        always_alone = not config.drafts_by_mask or config.target_threshold > 0.0 or with_grammar
        return cls(rounds=steps[:-1] if config.gamma else steps[:0], alone=steps if always_alone else steps[-1:])


def plan_forwards(config: DecodeConfig, starts: Starts, *, with_grammar: bool = False) -> list[ForwardPlan]:
    """The forwards of decoding step by step under this config. with_grammar: a draft ends where that says."""
    plans = [ForwardPlan(None, 1, starts.alone)]
    if config.drafts_by_mask:
        plans.append(ForwardPlan(config.skip_mask, 1, starts.rounds))
    may_stop = config.lookup is not None or config.draft_threshold > 0.0 or with_grammar
    verified = verifications(starts.rounds, config.max_gamma, may_stop=may_stop)
    plans += [ForwardPlan(None, num_drafts + 1, where) for num_drafts, where in verified.items()]
    return [plan for plan in plans if plan.starts]


def verifications(rounds: range, gamma: int, *, may_stop: bool) -> dict[int, range]:
    """Tokens in the cache before a round that verifies so many drafts, by their number.

    may_stop: whether a round may make fewer drafts than it could.
    """
    found = {}
    for num_drafts in range(1, gamma + 1):
        # There must be room for the drafts and, after them, for the target's own token.
        room = rounds[: max(0, len(rounds) - num_drafts + 1)]
        found[num_drafts] = (
            room if may_stop or num_drafts == gamma else room[-1:]
        )  # else a round fills what room it has
    return found
