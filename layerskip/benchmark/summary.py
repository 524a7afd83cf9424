"""From samples to rows: rates, ratios to the baselines, and their intervals over prompts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from layerskip.analysis.intervals import geometric_mean, ratio_interval
from layerskip.benchmark.alternation import Row
from layerskip.benchmark.names import BASELINES
from layerskip.benchmark.ways import Refused, Sample

SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A geometric mean over prompts, with its 95 % interval."""

    value: float
    ci_low: float | None
    """None for a single prompt, which tells nothing of others."""
    ci_high: float | None

    def to_dict(self, name: str = "value") -> dict[str, float | None]:
        return {name: self.value, "ci_low": self.ci_low, "ci_high": self.ci_high}


def estimate(by_prompt: Sequence[Sequence[float]]) -> Estimate | None:
    """Of positive numbers by prompt and repeat: the median over each prompt's repeats, the geometric mean over prompts.

    The interval is about other prompts of the same kind: a bootstrap over the prompts' medians (BCa; Student's t on
    their logarithms below 8 prompts). Prompts without numbers are left out; None if that leaves none.
    """
    medians = [statistics.median(values) for values in by_prompt if values]
    if not medians:
        return None
    interval = ratio_interval(medians, seed=SEED)
    value = geometric_mean(medians)
    return Estimate(value, None, None) if interval is None else Estimate(value, interval.low, interval.high)


Rate = Literal["tokens_per_s", "end_to_end_tokens_per_s"]
"""As a `Sample` names them: prompt apart, prompt and all."""
_RATES: dict[str, Rate] = {"": "tokens_per_s", "end_to_end_": "end_to_end_tokens_per_s"}
"""By what stands before the names of their ratios."""


def mean_rate(row: Row, rate: Rate) -> Estimate | None:
    """Of a row, over its prompts."""
    return estimate([[r for one in samples if (r := getattr(one, rate))] for samples in row.samples])


def ratio(row: Row, baseline: Row, rate: Rate = "tokens_per_s") -> Estimate | None:
    """Tokens/s of a row over those of another, paired: same prompt, same repeat."""
    return estimate([_ratios(a, b, rate) for a, b in zip(row.samples, baseline.samples, strict=True)])


def _ratios(samples: Sequence[Sample], baseline: Sequence[Sample], rate: Rate) -> list[float]:
    pairs = ((getattr(a, rate), getattr(b, rate)) for a, b in zip(samples, baseline, strict=True))
    return [a / b for a, b in pairs if a and b]


def row_records(rows: Mapping[str, Row], refused: Sequence[Refused], order: Sequence[str]) -> list[dict[str, object]]:
    """One plain record a row, in `order`; a row that did not run has a `reason` and no numbers."""
    reasons = {one.name: one.reason for one in refused}
    records = []
    for name in order:
        if name in reasons:
            records.append(_without_numbers(name, reasons[name]))
        elif name in rows:
            records.append(_record(rows[name], {base: rows[base] for base in BASELINES if base in rows}))
    return records


def _record(row: Row, baselines: Mapping[str, Row]) -> dict[str, object]:
    speed, end_to_end = mean_rate(row, "tokens_per_s"), mean_rate(row, "end_to_end_tokens_per_s")
    if speed is None or end_to_end is None:
        return _without_numbers(row.name, "no output was longer than its first tokens: too short to time")
    record: dict[str, object] = {"name": row.name, **speed.to_dict("tokens_per_s")}
    record |= {
        "identical": row.num_identical,
        "ties": row.num_ties,
        "num_outputs": row.num_outputs,
        "differing": sorted(set(row.differing)),
        "repeated_ngram_share": row.repeated_ngram_share,
        "end_to_end": end_to_end.to_dict("tokens_per_s"),
        "settings": row.settings,
    }
    for name, baseline in baselines.items():
        for prefix, rate in _RATES.items():
            found = None if baseline is row else ratio(row, baseline, rate)
            record[f"{prefix}vs_{name}"] = None if found is None else found.to_dict("ratio")
    record |= _acceptance(row)
    record["samples"] = [
        [[len(one.ids), one.num_timed, one.decode_s, one.total_s] for one in samples] for samples in row.samples
    ]
    return record


def _acceptance(row: Row) -> dict[str, object]:
    """Totals over totals of our own loop's counters; nothing for the others."""
    stats = [one.stats for samples in row.samples for one in samples if one.stats is not None]
    drafted, accepted = sum(one.num_drafted for one in stats), sum(one.num_accepted for one in stats)
    rounds = sum(one.num_rounds for one in stats)
    if not drafted:
        return {}
    found: dict[str, object] = {
        "acceptance_rate": accepted / drafted,
        "mean_accepted_length": (accepted + rounds) / rounds,
    }
    if siblings := sum(one.num_siblings for one in stats):
        found |= {"num_siblings": siblings, "num_sibling_hits": sum(one.num_sibling_hits for one in stats)}
    return found


def _without_numbers(name: str, reason: str) -> dict[str, object]:
    nothing = dict.fromkeys(("tokens_per_s", "ci_low", "ci_high"))
    return {"name": name, **nothing, "identical": 0, "num_outputs": 0, "reason": reason}
