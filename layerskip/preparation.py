"""What decoding a text may ask of an engine, as far as it is known before the text begins."""

from __future__ import annotations

from dataclasses import dataclass

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask


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
    def of(cls, config: DecodeConfig, num_prompt_tokens: int, max_new_tokens: int) -> Starts:
        """Of a text with a prompt of this length that may get so many new tokens."""
        # The prompt's forward gives the first token. The last one, where it is left to a step of its own, is always
        # the target's alone.
        steps = range(num_prompt_tokens, num_prompt_tokens + max_new_tokens - 1)
        always_alone = not config.drafts_by_mask or config.target_threshold > 0.0
        return cls(rounds=steps[:-1] if config.gamma else steps[:0], alone=steps if always_alone else steps[-1:])


def plan_forwards(config: DecodeConfig, starts: Starts) -> list[ForwardPlan]:
    """The forwards of decoding step by step under this config."""
    plans = [ForwardPlan(None, 1, starts.alone)]
    if config.drafts_by_mask:
        plans.append(ForwardPlan(config.skip_mask, 1, starts.rounds))
    if config.continue_lookup:
        most = min(config.gamma - 1, config.lookup_gamma)
        plans += [ForwardPlan(config.skip_mask, num_found + 1, starts.rounds) for num_found in range(1, most + 1)]
    for num_drafts in range(1, config.max_gamma + 1):
        # There must be room for the drafts and, after them, for the target's own token.
        room = starts.rounds[: max(0, len(starts.rounds) - num_drafts + 1)]
        if config.lookup is None and num_drafts < config.gamma and config.draft_threshold == 0.0:
            room = room[-1:]  # a draft that nothing cuts short fills what room there is
        plans.append(ForwardPlan(None, num_drafts + 1, room))
    return [plan for plan in plans if plan.starts]
