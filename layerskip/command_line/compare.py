"""Plain and speculative decoding of one prompt side by side: same process, engine, cache and sampler."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.analysis.identity import IdentityReport, check_identity
from layerskip.analysis.repetition import repeated_ngram_share
from layerskip.config.decode_config import DecodeConfig
from layerskip.model import GenerateOutput, GenerationStream, LayerSkipModel

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Comparison:
    """Repeats of one prompt, plain and speculative in turns."""

    stream: GenerationStream
    """A speculative run that was not begun; its config is, of one with regimes, the setting for their sampling."""
    output: GenerateOutput
    """The last speculative run."""
    tokens_per_s: float | None
    """Median over the repeats, prefill apart; None below two tokens."""
    plain_tokens_per_s: float | None
    speedup: float | None
    """Median over the repeats of the paired ratio."""
    end_to_end_tokens_per_s: float | None
    """As `tokens_per_s` with the prompt's own forward in the seconds; the next two likewise."""
    plain_end_to_end_tokens_per_s: float | None
    end_to_end_speedup: float | None
    repeated_ngram_share: float | None
    """See `layerskip.analysis.repetition`; of the last speculative output."""
    identity: IdentityReport | None
    """None when sampling from a caller's generator, which no two runs draw the same numbers from."""

    @property
    def config(self) -> DecodeConfig:
        """What the speculative runs followed."""
        return self.stream.config


def compare(
    model: LayerSkipModel, prompt_ids: list[int], config: DecodeConfig, *, num_repeats: int = 5, **arguments: Any
) -> Comparison:
    """Decode `prompt_ids` plainly and under `config` in turns, the order flipped every repeat, after one warm-up each.

    Arguments are those of `LayerSkipModel.generate`; both ways of a repeat sample with the same seed, every repeat with
    another one. Cost: 2 × num_repeats generations.
    """
    seeds: list[dict[str, int]] = [{}] * num_repeats
    if arguments.get("generator") is None:
        first_seed = arguments.pop("seed", None)
        first_seed = int(torch.randint(1 << 62, ())) if first_seed is None else first_seed
        seeds = [{"seed": first_seed + repeat} for repeat in range(num_repeats)]
    stream = model.stream(prompt_ids, config=config, **arguments)  # decodes nothing
    config = stream.config
    plain_config = DecodeConfig.plain(model.num_layers)
    warm_up = arguments | {"max_new_tokens": min(_WARM_UP_TOKENS, arguments.get("max_new_tokens", _WARM_UP_TOKENS))}
    for each in (plain_config, config):
        model.generate(prompt_ids, config=each, **warm_up)
    pairs: list[tuple[GenerateOutput, GenerateOutput]] = []
    for repeat in range(num_repeats):
        order = (plain_config, config) if repeat % 2 == 0 else (config, plain_config)
        first, second = (model.generate(prompt_ids, config=each, **arguments, **seeds[repeat]) for each in order)
        pairs.append((first, second) if repeat % 2 == 0 else (second, first))
    plain, speculative = pairs[-1]
    plain_rate, rate, speedup = _medians([(p.stats.tokens_per_s, s.stats.tokens_per_s) for p, s in pairs])
    end_to_end = [(p.stats.end_to_end_tokens_per_s, s.stats.end_to_end_tokens_per_s) for p, s in pairs]
    plain_end_to_end_rate, end_to_end_rate, end_to_end_speedup = _medians(end_to_end)
    comparable = not speculative.sampled or bool(seeds[-1])
    sampler = model.sampler(**arguments, **seeds[-1]) if speculative.sampled else None
    return Comparison(
        stream=stream,
        output=speculative,
        tokens_per_s=rate,
        plain_tokens_per_s=plain_rate,
        speedup=speedup,
        end_to_end_tokens_per_s=end_to_end_rate,
        plain_end_to_end_tokens_per_s=plain_end_to_end_rate,
        end_to_end_speedup=end_to_end_speedup,
        repeated_ngram_share=repeated_ngram_share([(prompt_ids, speculative.ids)]),
        identity=check_identity(model, prompt_ids, speculative.ids, plain.ids, sampler) if comparable else None,
    )


def _medians(
    pairs: Sequence[tuple[float | None, float | None]],
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Medians of plain rates, speculative rates and paired ratios, of (plain, speculative); None without a pair."""
    timed = [(plain, fast) for plain, fast in pairs if plain is not None and fast is not None]
    if not timed:
        return None, None, None
    columns = zip(*((plain, fast, fast / plain) for plain, fast in timed), strict=True)
    plain, fast, ratio = map(statistics.median, columns)
    return plain, fast, ratio
