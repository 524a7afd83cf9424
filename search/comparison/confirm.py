"""The picks of all runs against plain decoding on held-out prompts, interleaved and paired, each kept in a journal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from layerskip.config import DecodeConfig
from search.comparison.journal import Journal
from search.decoder import Decoder
from search.measurement import LosslessViolation, PromptCase, measure_pair
from search.statistics import geometric_mean
from search.stop import StopSignal


@dataclass(frozen=True)
class Confirmed:
    """A pick on the held-out prompts; a prompt's speed is the median of its repeats."""

    ratios: tuple[float, ...]
    """Speculative over plain, per prompt; empty if it was excluded."""
    tokens_per_s: float | None = None
    """Geometric mean over prompts, as measured; compare by the speedup, which is paired."""
    plain_tokens_per_s: float | None = None
    num_ties: int = 0
    excluded: str | None = None
    """Why it has no numbers."""
    lossless: bool = True

    @property
    def speedup(self) -> float | None:
        """Geometric mean over prompts of the paired ratios."""
        return geometric_mean(self.ratios) if self.ratios else None


def pick_key(params: Mapping[str, Any]) -> str:
    """The text by which a pick is known in the journal and in the results."""
    return json.dumps(dict(params), sort_keys=True, separators=(",", ":"))


def confirm_picks(
    decoder: Decoder,
    cases: Sequence[PromptCase],
    picks: Mapping[str, DecodeConfig],
    repeats: int,
    journal: Journal,
    stop: StopSignal,
) -> dict[str, Confirmed]:
    """Every pick with its own plain decoding beside it on every prompt, the order of the picks rotating.

    What the journal holds is not measured again. A pick that fails or is not lossless is excluded.
    Cost: 2 x picks x prompts x repeats decodings. Raises: KeyboardInterrupt between two measurements.
    """
    measured: dict[tuple[str, int, str], dict[str, Any]] = {}
    excluded: dict[str, dict[str, Any]] = {}
    for record in journal.read():
        if "excluded" in record:
            excluded[record["pick"]] = record
        else:
            measured[record["pick"], record["repeat"], record["prompt_id"]] = record
    keys = list(picks)
    with stop.deferred():
        for turn, (repeat, case) in enumerate((repeat, case) for repeat in range(repeats) for case in cases):
            for i in range(len(keys)):
                key = keys[(i + turn) % len(keys)]
                place = (key, repeat, case.prompt_id)
                if key in excluded or place in measured:
                    continue
                with stop.interruptible():
                    record = _measure(decoder, case, picks[key], plain_first=(turn + i) % 2 == 0)
                record = {"pick": key, "repeat": repeat, "prompt_id": case.prompt_id} | record
                journal.append(record)
                if "excluded" in record:
                    excluded[key] = record
                else:
                    measured[place] = record
    return {key: _sum_up(key, cases, repeats, measured, excluded.get(key)) for key in keys}


def _measure(decoder: Decoder, case: PromptCase, config: DecodeConfig, *, plain_first: bool) -> dict[str, Any]:
    try:
        pair = measure_pair(decoder, case, config, plain_first=plain_first)
    except LosslessViolation as violation:
        return {"excluded": f"not lossless: {violation}", "lossless": False}
    except Exception as error:  # noqa: BLE001 (as in a trial: it rules out this pick alone)
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    else:
        return {
            "tokens_per_s": pair.speculative.tokens_per_s,
            "plain_tokens_per_s": pair.plain.tokens_per_s,
            "is_tie": pair.speculative.is_tie,
        }
    decoder.free_memory()  # outside the except block: there the traceback would keep the tensors alive
    return {"excluded": line, "lossless": True}


def _sum_up(
    key: str,
    cases: Sequence[PromptCase],
    repeats: int,
    measured: Mapping[tuple[str, int, str], dict[str, Any]],
    excluded: dict[str, Any] | None,
) -> Confirmed:
    if excluded is not None:
        return Confirmed((), excluded=excluded["excluded"], lossless=excluded["lossless"])
    fast, plain, ties = [], [], 0
    for case in cases:
        records = [measured[key, repeat, case.prompt_id] for repeat in range(repeats)]
        fast.append(median(record["tokens_per_s"] for record in records))
        plain.append(median(record["plain_tokens_per_s"] for record in records))
        ties += any(record["is_tie"] for record in records)
    ratios = tuple(one / other for one, other in zip(fast, plain, strict=True))
    return Confirmed(ratios, geometric_mean(fast), geometric_mean(plain), ties)
