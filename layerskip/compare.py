"""Plain and speculative decoding of one prompt side by side: same process, engine, cache and sampler."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from layerskip.config import DecodeConfig
from layerskip.identity import IdentityReport, check_greedy
from layerskip.model import GenerateOutput, LayerSkipModel

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Comparison:
    """Repeats of one prompt, plain and speculative in turns."""

    output: GenerateOutput
    """The last speculative run."""
    plain_output: GenerateOutput
    tokens_per_s: float | None
    """Median over the repeats, prefill apart; None below two tokens."""
    plain_tokens_per_s: float | None
    speedup: float | None
    """Median over the repeats of the paired ratio."""
    identity: IdentityReport | None
    """None when sampling: two runs draw different tokens."""


def compare(
    model: LayerSkipModel, prompt_ids: list[int], config: DecodeConfig, *, num_repeats: int = 5, **arguments: Any
) -> Comparison:
    """Decode `prompt_ids` plainly and under `config` in turns, the order flipped every repeat, after one warm-up each.

    Arguments are those of `LayerSkipModel.generate`. Cost: 2 × num_repeats generations.
    """
    plain_config = DecodeConfig.plain(model.num_layers)
    warm_up = arguments | {"max_new_tokens": min(_WARM_UP_TOKENS, arguments.get("max_new_tokens", _WARM_UP_TOKENS))}
    for each in (plain_config, config):
        model.generate(prompt_ids, config=each, **warm_up)
    pairs: list[tuple[GenerateOutput, GenerateOutput]] = []
    for repeat in range(num_repeats):
        order = (plain_config, config) if repeat % 2 == 0 else (config, plain_config)
        first, second = (model.generate(prompt_ids, config=each, **arguments) for each in order)
        pairs.append((first, second) if repeat % 2 == 0 else (second, first))
    plain, speculative = pairs[-1]
    rates = [(p.stats.tokens_per_s, s.stats.tokens_per_s) for p, s in pairs]
    timed = [(p, s) for p, s in rates if p is not None and s is not None]
    greedy = not speculative.sampled
    return Comparison(
        output=speculative,
        plain_output=plain,
        tokens_per_s=statistics.median(s for _, s in timed) if timed else None,
        plain_tokens_per_s=statistics.median(p for p, _ in timed) if timed else None,
        speedup=statistics.median(s / p for p, s in timed) if timed else None,
        identity=check_greedy(model, prompt_ids, speculative.ids, plain.ids) if greedy else None,
    )
