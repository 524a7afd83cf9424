"""summary.json: one run's trials, seconds, best, confirmed numbers and noise, as plain JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from optuna.trial import FrozenTrial

from layerskip.config.decode_config import Provenance
from search.confirm.passes import Candidate
from search.confirm.stage import Confirmation
from search.measure.reference import Reference
from search.study.attributes import (
    ACCEPTANCE_RATE,
    MEAN_ACCEPTED_LENGTH,
    SECONDS,
    SKIP_MASK,
    SPEEDUP,
    SPEEDUP_CI_HIGH,
    SPEEDUP_CI_LOW,
)
from search.study.config_words import describe
from search.study.leaderboard import Entry, Standings
from search.study.trials import counted, is_full, tokens_per_s_of, trials_by_state

SCHEMA_VERSION = 1
NOT_A_SETTING = {"confirmed", "provenance", "draft_ids", "groups", "sampling", "regimes"}
"""Of a decode config: fields left out where its setting alone is told."""


def summarise_run(
    provenance: Provenance,
    confirmation: Confirmation,
    reference: Reference,
    trials: Sequence[FrozenTrial],
    *,
    storage: str,
    total: int,
    standings: Standings,
    seconds: Mapping[str, float],
    violations: Sequence[str],
    fingerprint: Mapping[str, Any],
    machine: Mapping[str, Any],
    prediction: Mapping[str, Any],
    budget: Mapping[str, Any],
    rounding: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The summary as JSON values. `best_measured` is what the search saw on tuning prompts; quote `confirmed`.

    machine: its state by phase, see `layerskip.machine.watch`. prediction: replay and prediction against what was
    measured, and what was known before the first trial. budget: what was planned, and what was measured less than asked
    for; see `search.budget.plan`. rounding: what logit ties were judged by, see `search.measure.rounding_record`.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": "speculate" if confirmation.winner else "do not speculate",
        "reason": confirmation.config.reason,
        "confirmed": confirmation.measured.model_dump() if confirmation.measured else None,
        "config": confirmation.config.model_dump(mode="json", exclude=NOT_A_SETTING),
        "trials": {**trials_by_state(list(trials)), "counted": counted(trials), "total": total},
        "seconds_in_trials": round(sum(trial.user_attrs.get(SECONDS, 0.0) for trial in trials), 3),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "budget": dict(budget),
        "noise": {"plain_against_plain_sigma": reference.noise_sigma, "pair_sigma": standings.sigma},
        "reference": {
            "plain_tokens_per_s": reference.plain_tokens_per_s,
            "num_prompts_per_trial": reference.num_per_trial,
            "num_prompts": len(reference.cases),
            "too_short": list(reference.dropped),
        },
        "best_measured": {
            "single_trial": _single_best(trials),
            "pooled": [_entry(entry, reference) for entry in standings.entries[:5]],
        },
        **prediction,
        "batches": [asdict(one) for one in confirmation.batches],
        "by_drafter": {name: one.speedup for name, one in confirmation.by_drafter.items()},
        "candidates": [_candidate(one) for one in confirmation.candidates],
        "held_out_too_short": list(confirmation.too_short),
        "not_lossless": list(violations),
        "rounding": rounding,
        "study": {"name": provenance.study, "storage": storage, "seed": provenance.seed},
        "command": provenance.command,
        "commit": provenance.commit,
        "created_at": provenance.created_at,
        "fingerprint": dict(fingerprint),
        "machine": dict(machine),
        "raw": confirmation.raw,
    }


def candidates_of(confirmation: Confirmation) -> str:
    """The finalists in few words as JSON, for the study: config, both speedups, why excluded."""
    finalists = [
        {
            "config": describe(one.entry.config),
            "trials": list(one.entry.trials),
            "tuning_speedup": round(one.entry.speedup, 4),
            "speedup": None if one.speedup is None else round(one.speedup, 4),
            "excluded": one.excluded,
        }
        for one in confirmation.candidates
    ]
    return json.dumps(finalists, separators=(",", ":"))


def _single_best(trials: Sequence[FrozenTrial]) -> dict[str, Any] | None:
    """The luckiest trial: overstated by design, shown to be compared with the confirmed number."""
    full = [trial for trial in trials if is_full(trial) and trial.value is not None]
    if not full:
        return None
    best = max(full, key=lambda trial: float(trial.value or 0.0))
    names = (SPEEDUP, SPEEDUP_CI_LOW, SPEEDUP_CI_HIGH, SKIP_MASK, ACCEPTANCE_RATE, MEAN_ACCEPTED_LENGTH)
    return {"trial": best.number, "tokens_per_s": tokens_per_s_of(best)} | {
        name: best.user_attrs[name] for name in names if name in best.user_attrs
    }


def _entry(entry: Entry, reference: Reference) -> dict[str, Any]:
    return {
        "config": entry.config.model_dump(mode="json", exclude_none=True),
        "trials": list(entry.trials),
        "speedup": entry.speedup,
        "speedup_lower": entry.lower,
        "tokens_per_s": entry.speedup * reference.plain_tokens_per_s,
        "num_pairs": entry.num_pairs,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    """A finalist in the choosing pass on held-out prompts."""
    return {
        "config": candidate.entry.config.model_dump(mode="json", exclude_none=True),
        "trials": list(candidate.entry.trials),
        "tuning_speedup": candidate.entry.speedup,
        "speedup": candidate.speedup,
        "ratios": list(candidate.ratios),
        "excluded": candidate.excluded,
    }
