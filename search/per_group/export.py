"""What a per-group search exports: one config with a setting per group, and the groups' part of the summary."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerskip.config.decode_config import DEFAULT_GROUP, DecodeConfig
from search.confirm.summary import NOT_A_SETTING
from search.measure.subject import Subject
from search.per_group.choice import Decision
from search.per_group.matrix import Matrix, violations_of
from search.pipeline import RunOutcome
from search.study.draft_ids import with_sets


@dataclass(frozen=True)
class GroupResult:
    """All that a per-group search found out. By name: `default`, then the groups; `decisions` has the groups alone."""

    subjects: Mapping[str, Subject]
    outcomes: Mapping[str, RunOutcome]
    matrix: Matrix
    decisions: Mapping[str, Decision]

    @property
    def violations(self) -> list[str]:
        """Outputs that differed from the target's in any study or in the matrix, one line each."""
        return violations_of(self.matrix) + [
            line if name == DEFAULT_GROUP else f"{name}: {line}"
            for name, outcome in self.outcomes.items()
            for line in outcome.summary["not_lossless"]
        ]


def combined_config(result: GroupResult) -> DecodeConfig:
    """The default's config as its own search exports it, with the groups' settings.

    A default whose output differed in the matrix is replaced by plain decoding.
    """
    default = result.outcomes[DEFAULT_GROUP].config
    fields = {name: getattr(default, name) for name in DecodeConfig.model_fields}
    broken = next((cell for cell in result.matrix[DEFAULT_GROUP].values() if not cell.lossless), None)
    if broken is not None:
        plain = DecodeConfig.plain(default.skip_mask.num_layers, reason=f"do not speculate: {broken.excluded}")
        fields = {name: getattr(plain, name) for name in DecodeConfig.model_fields} | {"provenance": default.provenance}
    groups = {name: decision.setting for name, decision in result.decisions.items()}
    sets = {name: packed for one in result.outcomes.values() for name, packed in (one.config.draft_ids or {}).items()}
    return with_sets(DecodeConfig(**(fields | {"groups": groups})), sets)


def group_summary(result: GroupResult, config: DecodeConfig, *, group_field: str) -> dict[str, Any]:
    """The summary of the default's study with what the groups add: `per_group`, all seconds, all violations."""
    seconds: dict[str, float] = defaultdict(float)
    for outcome in result.outcomes.values():
        for phase, value in outcome.summary["seconds"].items():
            seconds[phase] += value
    return result.outcomes[DEFAULT_GROUP].summary | {
        "verdict": "speculate" if config.speculates else "do not speculate",
        "reason": config.reason,
        "config": config.model_dump(mode="json", exclude=NOT_A_SETTING),
        "seconds": seconds,
        "not_lossless": result.violations,
        "per_group": {
            "group_field": group_field,
            "num_prompts": {
                name: {"tuning": len(subject.tuning), "held_out": len(subject.held_out)}
                for name, subject in result.subjects.items()
            },
            "settings": {name: _setting(outcome) for name, outcome in result.outcomes.items()},
            "matrix": {
                row: {group: cell.to_json() for group, cell in cells.items()} for row, cells in result.matrix.items()
            },
            "exported": {
                name: {"source": decision.source, **decision.setting.model_dump(mode="json", exclude_none=True)}
                for name, decision in result.decisions.items()
            },
        },
    }


def matrix_facts(summary: Mapping[str, Any]) -> str:
    """What the study over all prompts keeps of it: the matrix without raw rates, and what each group gets, as JSON."""
    facts = summary["per_group"]
    matrix = {
        row: {group: {name: value for name, value in cell.items() if name != "raw"} for group, cell in cells.items()}
        for row, cells in facts["matrix"].items()
    }
    kept = {"group_field": facts["group_field"], "matrix": matrix, "exported": facts["exported"]}
    return json.dumps(kept, separators=(",", ":"))


def _setting(outcome: RunOutcome) -> dict[str, Any]:
    """What one study found by itself."""
    names = ("study", "verdict", "reason", "confirmed", "config", "trials", "seconds", "noise", "held_out_too_short")
    return {name: outcome.summary[name] for name in names}
