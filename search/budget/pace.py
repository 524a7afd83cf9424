"""Pace: how long a token and a prompt take here, from a few timed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from search.measure.decoder import Decoder
from search.study.prompts import EncodedPrompt


@dataclass(frozen=True)
class Pace:
    """Seconds of what decoding is made of."""

    token_s: float
    """A target step."""
    further_s: float
    """What each further token of a verification adds to it."""
    prompt_s: float
    """The forward over a tuning prompt of mean length."""

    def forward_s(self, num_tokens: float) -> float:
        """A target forward over so many tokens after a text."""
        return self.token_s + self.further_s * max(0.0, num_tokens - 1)

    def decoding_s(self, new_tokens: int, ways: int = 1) -> float:
        """One prompt decoded in so many ways in turn, each as fast as plainly, the forward over it made once."""
        return self.prompt_s + ways * (new_tokens - 1) * self.token_s

    def as_seen(self, pair_s: float, new_tokens: int) -> Pace:
        """Scaled to what a plain pair really took."""
        expected = self.decoding_s(new_tokens, 2)
        factor = pair_s / expected if expected > 0 else 1.0
        return Pace(factor * self.token_s, factor * self.further_s, factor * self.prompt_s)


def measure_pace(
    decoder: Decoder, prompts: Sequence[EncodedPrompt], most_tokens: int, clock: Callable[[], float]
) -> Pace:
    """The pace on a prompt of middling length.

    most_tokens: of a verification, to tell what further tokens cost. Cost: two forwards over the prompt, six steps.
    """
    lengths = [len(one.ids) for one in prompts]
    text = sorted(prompts, key=lambda one: len(one.ids))[len(prompts) // 2].ids
    timer = decoder.timer(max(1, most_tokens - 1))
    timer.verify_s(text, (1,))  # wakes threads, fills caches
    start = clock()
    steps = timer.verify_s(text, (1, most_tokens, 1, most_tokens, 1))
    prompt_s = max(0.0, clock() - start - sum(steps))
    token_s, many_s = median(steps[::2]), min(steps[1::2])
    return Pace(
        token_s=token_s,
        further_s=max(0.0, many_s - token_s) / max(1, most_tokens - 1),
        prompt_s=prompt_s * (sum(lengths) / len(lengths)) / len(text),
    )
