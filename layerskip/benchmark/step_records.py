"""The step costs of one benchmark as plain values: seconds, bytes, and what the loop attains of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerskip.benchmark.alternation import Case, Row
from layerskip.benchmark.memory import StepBytes
from layerskip.benchmark.steps import (
    StepTurn,
    attained,
    draft_estimates,
    draft_ratio,
    middle_of,
    target_estimates,
    target_ratios,
)
from layerskip.benchmark.summary import Estimate
from layerskip.config.decode_config import DecodeConfig


@dataclass(frozen=True)
class Machine:
    """What steps are held against."""

    step_bytes: StepBytes
    bandwidth: float
    """Bytes/s."""
    weights_bytes: int = 0
    """Of the config's trained draft weights."""


def step_records(
    steps: StepTurn, config: DecodeConfig, cases: Sequence[Case], machine: Machine, rows: Mapping[str, Row]
) -> dict[str, object]:
    """`target` and `draft` by length, `draft_ratio`, `attained` and `loop_overhead` by row, and the bandwidth."""
    context = round(statistics.median(len(middle_of(case)) for case in cases))
    ratios = target_ratios(steps)
    target = []
    for n, seconds in target_estimates(steps).items():
        record: dict[str, object] = {"num_tokens": n, **seconds.to_dict("seconds"), "ratio": ratios[n].to_dict("ratio")}
        target.append(record | _traffic(machine, machine.step_bytes.of(None, n, context), seconds))
    draft_bytes = machine.step_bytes.of(config.skip_mask, 1, context)
    if config.draft_weights is not None:  # cached keys and values are left out
        # A layer on the model's states ends with its output embedding, a draft model with its own.
        ends = machine.step_bytes.head if config.draft_weights.reads_states else 0
        draft_bytes = ends + machine.weights_bytes
    draft = [
        {"draft_length": k, **seconds.to_dict("seconds"), **_traffic(machine, draft_bytes, seconds)}
        for k, seconds in draft_estimates(steps).items()
    ]
    shares = {name: attained(row, steps) for name, row in rows.items()}
    return {
        "context_tokens": context,
        "target": target,
        "draft": draft,
        "draft_ratio": _record(draft_ratio(steps), "ratio"),
        "attained": {name: _record(share, "share") for name, share in shares.items()},
        "loop_overhead": {name: None if share is None else 1.0 - share.value for name, share in shares.items()},
        "bandwidth_bytes_per_s": machine.bandwidth,
    }


def _traffic(machine: Machine, num_bytes: int, seconds: Estimate) -> dict[str, object]:
    per_s = num_bytes / seconds.value
    return {"bytes": num_bytes, "bytes_per_s": per_s, "bandwidth_share": per_s / machine.bandwidth}


def _record(share: Estimate | None, name: str) -> dict[str, float | None] | None:
    return None if share is None else share.to_dict(name)
