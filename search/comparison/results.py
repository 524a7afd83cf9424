"""What came out: confirmed speedups per strategy and checkpoint, with intervals over seeds, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from layerskip.analysis.intervals import CI_LEVEL, geometric_mean, student_half
from layerskip.config.decode_config import DecodeConfig
from search.comparison.confirm import Confirmed, pick_key
from search.comparison.plan import ComparisonPlan
from search.comparison.runs import Run
from search.rivals import STRATEGIES
from search.rivals.registry import OURS
from search.study.config_words import describe

Runs = Mapping[tuple[str, int], Run]


@dataclass(frozen=True)
class Mean:
    """A geometric mean with its two-sided interval; no interval for a single value."""

    value: float
    low: float | None
    high: float | None

    def excludes(self, value: float) -> bool:
        """Whether the interval is there and lies to one side of the value."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def t_mean(logs: Sequence[float]) -> Mean:
    """exp of the mean of the logs, with Student's t interval at 95 %. All equal: that value at both ends."""
    mean = math.fsum(logs) / len(logs)
    if len(logs) < 2:
        return Mean(math.exp(mean), None, None)
    half = student_half(logs)
    return Mean(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def picks_of(plan: ComparisonPlan, runs: Runs, ngrams: DecodeConfig) -> dict[str, DecodeConfig]:
    """Every distinct leader of a run at a checkpoint, and the n-grams that they are confirmed beside, by their keys."""
    leaders = (runs[key].leader(count) for count in plan.checkpoints for key in plan.runs)
    picks = {pick_key(leader.params): leader.config for leader in leaders if leader is not None}
    return picks | {_ngrams_key(ngrams): ngrams}


def summarise(
    plan: ComparisonPlan, runs: Runs, confirmed: Mapping[str, Confirmed], ngrams: DecodeConfig
) -> dict[str, Any]:
    """Per strategy and checkpoint: the confirmed speedup of each seed, their mean and interval, and the seconds.

    A run without a leader, or whose pick was excluded, counts as plain decoding, 1.0: that is what it would export.
    `ngrams`: their config, for a row of their own.
    """
    plain = [one.plain_tokens_per_s for one in confirmed.values() if one.plain_tokens_per_s is not None]
    plain_tokens_per_s = geometric_mean(plain) if plain else None
    num_prompts = max((len(one.ratios) for one in confirmed.values()), default=0)
    seed_rows = {
        (name, count): [_seed_row(runs[name, seed], count, confirmed) for seed in plan.seeds]
        for name in plan.strategies
        for count in plan.checkpoints
    }
    strategies: dict[str, Any] = {}
    for name in plan.strategies:
        rows = []
        for count in plan.checkpoints:
            seeds = seed_rows[name, count]
            row = _checkpoint_row(count, seeds, plain_tokens_per_s)
            if OURS in plan.strategies and name != OURS:
                ours = _logs(seed_rows[OURS, count], confirmed, num_prompts)
                row["vs_ours"] = _versus(_logs(seeds, confirmed, num_prompts), ours)
            rows.append(row)
        info = STRATEGIES[name]
        strategies[name] = {"about": info.about, "source": info.source, "checkpoints": rows}
    return {
        "plain_tokens_per_s": plain_tokens_per_s,
        "num_held_out_prompts": num_prompts,
        "ci_level": CI_LEVEL,
        "ngrams": _ngrams_row(ngrams, strategies, confirmed, plain_tokens_per_s),
        "strategies": strategies,
        "ours_of_best": _ours_of_best(strategies, confirmed, num_prompts),
        "picks": {key: {"speedup": one.speedup} | _rounded(one) for key, one in confirmed.items()},
    }


def make_table(results: Mapping[str, Any]) -> str:
    """The results in markdown: n-grams, then per checkpoint the strategies, fastest first."""
    lines = [
        "| trials | strategy | confirmed speedup (95 %) | tokens/s | seconds | of which proposing | vs ours (95 %) |",
        "|---:|---|---|---:|---:|---:|---|",
        _ngrams_line(results["ngrams"]),
    ]
    rows = [(name, row) for name, one in results["strategies"].items() for row in one["checkpoints"]]
    rows.sort(key=lambda one: (one[1]["trials"], -one[1]["speedup"]))
    for name, row in rows:
        tokens = f"{row['tokens_per_s']:.1f}" if row["tokens_per_s"] is not None else "-"
        lines.append(
            f"| {row['trials']} | {name} | {_with_interval(row)} | {tokens} | {row['seconds']:.1f} | "
            f"{row['proposal_s']:.1f} | {_versus_text(name, row.get('vs_ours'))} |"
        )
    lines += [
        "",
        f"Speedup: geometric mean over {results['num_held_out_prompts']} held-out prompts of paired ratios to plain "
        "decoding, then over seeds; its interval is over seeds and says how much a strategy owes to luck, not how well "
        "the clock is known; `one pick` means that all seeds picked the same config. Seconds: mean over seeds until "
        "that trial, one-off preparation included.",
        "vs ours: ratio of the speedups, paired by seed. `<` and `>` mark a strategy that is slower or faster than "
        "ours beyond two intervals, over seeds and over prompts.",
        *_of_best_lines(results["ours_of_best"]),
        *_ngrams_notes(results["ngrams"]),
    ]
    return "\n".join(lines) + "\n"


def _rounded(one: Confirmed) -> dict[str, Any]:
    return asdict(one) | {"ratios": [round(ratio, 5) for ratio in one.ratios]}


def _ngrams_key(config: DecodeConfig) -> str:
    """By its settings, so that others are measured anew; without defaults, so that a new field does not change it."""
    return pick_key(config.model_dump(mode="json", exclude_defaults=True))


def _ngrams_row(
    config: DecodeConfig, strategies: Mapping[str, Any], confirmed: Mapping[str, Confirmed], plain: float | None
) -> dict[str, Any]:
    """N-grams on the held-out prompts, with an interval over prompts, and against ours at the last checkpoint."""
    key = _ngrams_key(config)
    one = confirmed[key]
    row: dict[str, Any] = {"config": describe(config), "pick": key, "excluded": one.excluded}
    if not one.ratios:
        return row | {"speedup": None}
    logs = np.log(one.ratios)
    mean = t_mean(logs.tolist())
    row |= {"speedup": mean.value, "speedup_ci_low": mean.low, "speedup_ci_high": mean.high}
    row["tokens_per_s"] = mean.value * plain if plain is not None else None
    if OURS in strategies:
        ours = strategies[OURS]["checkpoints"][-1]["seeds"]
        row["vs_ours"] = _versus(logs, _logs(ours, confirmed, len(logs)))
    return row


def _ngrams_line(row: Mapping[str, Any]) -> str:
    if row["speedup"] is None:
        return "| - | ngrams | - | - | - | - | - |"
    interval = f" ({_span(row['speedup_ci_low'], row['speedup_ci_high'])})"
    versus = row.get("vs_ours")
    if versus is not None:  # one measurement for all seeds: over them only ours can differ
        versus = versus | {"low": versus["prompts_low"], "high": versus["prompts_high"]}
    ratio = _versus_text("ngrams", versus)
    return f"| - | ngrams | {row['speedup']:.3f}{interval} | {row['tokens_per_s']:.1f} | - | - | {ratio} |"


def _ngrams_notes(row: Mapping[str, Any]) -> list[str]:
    """What that row is, and why it is empty if it is."""
    note = (
        f"ngrams: no strategy but the usual lookup in the text so far ({row['config']}), without mask and search, "
        "confirmed beside the picks. Its intervals are over prompts, its ratio is to ours after the last trial."
    )
    return [note] if row["excluded"] is None else [note, f"ngrams has no numbers: {row['excluded']}"]


def _seed_row(run: Run, count: int, confirmed: Mapping[str, Confirmed]) -> dict[str, Any]:
    records, leader = run.records[:count], run.leader(count)
    key = pick_key(leader.params) if leader else None
    speedup = confirmed[key].speedup if key else None
    return {
        "seed": run.seed,
        "speedup": 1.0 if speedup is None else speedup,
        "is_plain": speedup is None,
        "pick": key,
        "config": describe(leader.config) if leader else "plain decoding",
        "speedup_tuning": leader.speedup if leader else None,
        "seconds": records[-1].seconds,
        "proposal_s": math.fsum(record.proposal_s for record in records),
        "measure_s": math.fsum(record.measure_s for record in records),
        "num_failed": sum(record.state == "FAIL" for record in records),
    }


def _checkpoint_row(count: int, seeds: Sequence[Mapping[str, Any]], plain: float | None) -> dict[str, Any]:
    mean = t_mean([math.log(one["speedup"]) for one in seeds])
    means = {name: float(np.mean([one[name] for one in seeds])) for name in ("seconds", "proposal_s", "measure_s")}
    return {
        "trials": count,
        "speedup": mean.value,
        "speedup_ci_low": mean.low,
        "speedup_ci_high": mean.high,
        "num_picks": len({one["pick"] for one in seeds}),
        "tokens_per_s": mean.value * plain if plain is not None else None,
        **means,
        "seeds": list(seeds),
    }


def _logs(seeds: Sequence[Mapping[str, Any]], confirmed: Mapping[str, Confirmed], num_prompts: int) -> Any:
    """Log ratios (seeds, prompts); zeros where plain decoding stands in."""
    rows = [confirmed[one["pick"]].ratios if not one["is_plain"] else (1.0,) * num_prompts for one in seeds]
    return np.log(np.array(rows, dtype=float).reshape(len(rows), num_prompts))


def _versus(strategy: Any, ours: Any) -> dict[str, Any]:
    """Ratio of the speedups, paired by seed and prompt: interval over seeds, and over prompts."""
    difference = strategy - ours
    if not difference.size:
        return {"ratio": 1.0, "low": None, "high": None, "prompts_low": None, "prompts_high": None, "outside": False}
    seeds, prompts = t_mean(difference.mean(axis=1).tolist()), t_mean(difference.mean(axis=0).tolist())
    return {
        "ratio": seeds.value,
        "low": seeds.low,
        "high": seeds.high,
        "prompts_low": prompts.low,
        "prompts_high": prompts.high,
        "outside": seeds.excludes(1.0) and prompts.excludes(1.0),
    }


def _ours_of_best(
    strategies: Mapping[str, Any], confirmed: Mapping[str, Confirmed], num_prompts: int
) -> dict[str, Any] | None:
    """Ours at every checkpoint against the strategy that is best at the last one; None where ours takes no part."""
    if OURS not in strategies:
        return None
    ends = {name: one["checkpoints"][-1] for name, one in strategies.items()}
    best = max(ends, key=lambda name: float(ends[name]["speedup"]))
    end = _logs(ends[best]["seeds"], confirmed, num_prompts)
    rows = [
        {"trials": row["trials"], **_versus(_logs(row["seeds"], confirmed, num_prompts), end)}
        for row in strategies[OURS]["checkpoints"]
    ]
    return {"strategy": best, "trials": ends[best]["trials"], "speedup": ends[best]["speedup"], "checkpoints": rows}


def _of_best_lines(of_best: Mapping[str, Any] | None) -> list[str]:
    """What part of the best strategy's last speedup ours has after fewer trials."""
    if of_best is None or len(of_best["checkpoints"]) < 2:
        return []
    parts = [
        f"{row['ratio']:.3f} (seeds {_span(row['low'], row['high'])}, prompts "
        f"{_span(row['prompts_low'], row['prompts_high'])}) after {row['trials']}"
        for row in of_best["checkpoints"]
    ]
    head = (
        f"ours as a part of the best after {of_best['trials']} trials ({of_best['strategy']}, {of_best['speedup']:.3f})"
    )
    return [f"{head}: {'; '.join(parts)}."]


def _span(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.3f}..{high:.3f}"


def _with_interval(row: Mapping[str, Any]) -> str:
    if row["num_picks"] == 1:  # measured once for all seeds: no spread is no certainty
        return f"{row['speedup']:.3f} (one pick)"
    return f"{row['speedup']:.3f} ({row['speedup_ci_low']:.3f}..{row['speedup_ci_high']:.3f})"


def _versus_text(name: str, versus: Mapping[str, Any] | None) -> str:
    if versus is None:
        return "ours" if name == OURS else "-"
    if versus["low"] is None:
        return f"{versus['ratio']:.3f}"
    mark = ("<" if versus["ratio"] < 1 else ">") if versus["outside"] else ""
    return f"{versus['ratio']:.3f} ({versus['low']:.3f}..{versus['high']:.3f}) {mark}".rstrip()
