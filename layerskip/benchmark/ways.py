"""What a benchmark compares: a way to decode one prompt, and what one run of it gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from layerskip.config import DecodeConfig
from layerskip.model import LayerSkipModel
from layerskip.stats import DecodeStats

PLAIN, SPECULATIVE = "plain", "speculative"
HF_GENERATE, HF_COMPILED = "hf_generate", "hf_generate_compiled"
HF_EARLY_EXIT, HF_PROMPT_LOOKUP = "hf_early_exit", "hf_prompt_lookup"
ROW_NAMES = (HF_GENERATE, HF_COMPILED, HF_EARLY_EXIT, HF_PROMPT_LOOKUP, PLAIN, SPECULATIVE)

GREEDY = {"do_sample": False, "repetition_penalty": 1.0}
"""For both sides: what a generation config says of sampling and penalties is left out."""


class CannotRun(Exception):  # noqa: N818 (reads as the fact it states)
    """This way does not serve this model or config; the message says why in one line."""


@dataclass(frozen=True)
class Sample:
    """One output and its seconds."""

    ids: tuple[int, ...]
    """Emitted tokens, prompt excluded."""
    num_timed: int
    """Tokens emitted within `decode_s`: all but those that came out first, which are the prompt's."""
    decode_s: float
    total_s: float
    """From the call to the last token, the prompt's own forward included."""
    stats: DecodeStats | None = None
    """The counters of our own loop."""

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt apart; None if no token followed the first ones."""
        return self.num_timed / self.decode_s if self.num_timed > 0 and self.decode_s > 0 else None

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        return len(self.ids) / self.total_s if self.total_s > 0 else None


class Way(Protocol):
    """One row of the table."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> dict[str, object]:
        """What a reader needs to know to run it again."""
        ...

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        """Decode one prompt greedily, the device synchronised around it. Raises: CannotRun."""
        ...


class OwnWay:
    """Our own loop under a config; gamma = 0 is plain decoding.

    The decode seconds are the loop's own (`DecodeStats.decode_s`): every step, the device synchronised around it.
    Making text of the tokens, between the steps, is outside of them; Hugging Face's `generate` makes none.
    """

    def __init__(
        self, name: str, model: LayerSkipModel, config: DecodeConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.name = name
        self.settings: dict[str, object] = {
            "skip_mask": str(config.skip_mask),
            "gamma": config.gamma,
            "draft_threshold": config.draft_threshold,
            "target_threshold": config.target_threshold,
            "share_prefix": config.share_prefix,
        }
        self._model = model
        self._config = config
        self._clock = clock

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        start = self._clock()
        output = self._model.generate(list(prompt_ids), config=self._config, max_new_tokens=max_new_tokens, **GREEDY)
        total_s = self._clock() - start  # the loop has synchronised after its last step
        stats = output.stats
        return Sample(tuple(output.ids), stats.num_emitted - 1, stats.decode_s, total_s, stats)


@dataclass(frozen=True)
class Refused:
    """A row that was not even started."""

    name: str
    reason: str


def own_ways(
    model: LayerSkipModel, config: DecodeConfig | None, names: Sequence[str]
) -> tuple[list[OwnWay], list[Refused]]:
    """Plain and speculative decoding, as far as asked for and possible."""
    ways, refused = [], []
    if PLAIN in names:
        ways.append(OwnWay(PLAIN, model, DecodeConfig.plain(model.num_layers)))
    if SPECULATIVE in names:
        if config is not None and config.speculates:
            ways.append(OwnWay(SPECULATIVE, model, config))
        else:
            reason = "needs --config, or --mask with --gamma" if config is None else "the config says gamma 0"
            refused.append(Refused(SPECULATIVE, reason))
    return ways, refused
