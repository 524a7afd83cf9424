"""What lossy rules would make of the confirmed winner: told beside the verdict with the distance, never part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.analysis.distance import Emitted
from layerskip.analysis.intervals import Interval, geometric_mean, ratio_interval
from layerskip.config.decode_config import Confirmed, DecodeConfig
from layerskip.config.lossy_acceptance import LADDER
from layerskip.machine.host import no_garbage_collection
from search.confirm.files import one_folder_down
from search.confirm.passes import ratios_of
from search.confirm.stage import summarise
from search.measure.decoder import Decoded, Decoder
from search.measure.pairs import Pair, Timed
from search.progress import Tell, nobody
from search.study.prompts import EncodedPrompt, continuation_seed

_CONTINUATION = 100
"""Of a prompt, where tokens are sampled: one that no pass before had."""


@dataclass(frozen=True)
class LossyRung:
    """The winner under one lossy rule, on the held-out prompts that confirmed it."""

    config: DecodeConfig
    """With the rule, and in `confirmed` what was measured; `confirmed.num_identical` promises nothing."""
    against_lossless: float
    """Speedup over the winner itself, paired: geometric mean over prompts."""
    interval: Interval | None
    """Of that; None for a single prompt."""

    @property
    def name(self) -> str:
        """The rule's."""
        return "" if self.config.lossy is None else self.config.lossy.name

    @property
    def measured(self) -> Confirmed:
        """The numbers."""
        assert self.config.confirmed is not None
        return self.config.confirmed

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for summary.json and the study."""
        return {
            "rule": self.name,
            "confirmed": self.measured.model_dump(exclude_none=True),
            "against_lossless": {"speedup": self.against_lossless}
            | ({} if self.interval is None else {"ci_low": self.interval.low, "ci_high": self.interval.high}),
        }

    def __str__(self) -> str:
        one = self.measured
        return (
            f"{self.name} {one.speedup:.3f}x ({one.speedup_ci_low:.3f}..{one.speedup_ci_high:.3f}), "
            f"{self.against_lossless:.3f}x the lossless one; {one.num_identical} of {one.num_prompts} outputs "
            f"identical, {one.distance}"
        )


def measure_ladder(
    decoder: Decoder, prompts: Sequence[EncodedPrompt], winner: DecodeConfig, seed: int, progress: Tell = nobody
) -> tuple[LossyRung, ...]:
    """The winner under every rule of `LADDER`, beside plain decoding and itself, in turns on every prompt.

    seed: the study's. Cost: a decoding of every prompt under each of them; two forwards over each output and its text.
    Raises: whatever decoding raises.
    """
    lossless = winner.model_copy(update={"confirmed": None})
    rungs = [lossless.model_copy(update={"lossy": rule}) for rule in LADDER]
    configs = [DecodeConfig.plain(winner.skip_mask.num_layers), lossless, *rungs]
    seen: list[list[Decoded]] = []
    for row, prompt in enumerate(prompts):
        found, own_seed = dict[int, Decoded](), continuation_seed(seed, prompt.ids, _CONTINUATION)
        for i in ((place + row) % len(configs) for place in range(len(configs))):
            with no_garbage_collection():
                found[i] = decoder.decode(prompt.ids, configs[i], own_seed)
        seen.append([found[i] for i in range(len(configs))])
        progress(row + 1, len(prompts))
    timed = [
        (one, runs) for one, runs in zip(prompts, seen, strict=True) if all(run.stats.tokens_per_s for run in runs)
    ]
    return tuple(_rung(decoder, timed, place, config, seed) for place, config in enumerate(rungs, start=2) if timed)


def _rung(
    decoder: Decoder, seen: Sequence[tuple[EncodedPrompt, list[Decoded]]], place: int, config: DecodeConfig, seed: int
) -> LossyRung:
    """place: of the rung among a prompt's runs, of which plain decoding is the first and the winner the second."""
    pairs = [Pair(prompt.prompt_id, _timed(runs[0], runs[0]), _timed(runs[place], runs[0])) for prompt, runs in seen]
    seeds = [continuation_seed(seed, prompt.ids, _CONTINUATION) for prompt, _ in seen]
    outputs = [Emitted(one.ids, runs[place].ids, runs[0].ids, by) for (one, runs), by in zip(seen, seeds, strict=True)]
    distance = decoder.distance(outputs)
    # What is not identical was counted as a tie, which it is not.
    measured = summarise([pairs], seed=seed).model_copy(update={"num_ties": 0, "distance": distance})
    lossless = [_timed(runs[1], runs[0]).tokens_per_s for _, runs in seen]
    ratios = ratios_of([pair.speculative.tokens_per_s for pair in pairs], lossless)
    return LossyRung(
        config.model_copy(update={"confirmed": measured}), geometric_mean(ratios), ratio_interval(ratios, seed=seed)
    )


def _timed(out: Decoded, plain: Decoded) -> Timed:
    rate, end_to_end = out.stats.tokens_per_s, out.stats.end_to_end_tokens_per_s
    assert rate is not None
    assert end_to_end is not None
    return Timed(rate, end_to_end, out.ids != plain.ids, out.stats)


def save_ladder(rungs: Sequence[LossyRung], best: DecodeConfig, folder: Path) -> list[Path]:
    """Write each rung as `lossy/RULE.json` beside best.json, with that one's origin; returns the files."""
    (folder / "lossy").mkdir(exist_ok=True)
    origin = best.provenance
    if origin is not None:
        changes = {"searched_tokens_per_s": None, "model": one_folder_down(origin.model)}
        origin = origin.model_copy(update=changes)
    files = [folder / "lossy" / f"{rung.name}.json" for rung in rungs]
    for rung, file in zip(rungs, files, strict=True):
        origins = {"provenance": origin, "sampling": best.sampling, "draft_ids": best.draft_ids}
        rung.config.model_copy(update=origins).save(file)
    return files
