"""Record: what the audit found so far, as one JSON file that a killed run leaves whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import write_atomically
from studies.audit.cases import Case
from studies.audit.subjects import Outcome

VERDICTS = ("identical", "tie", "failure")
_COUNTED = ("num_emitted", "num_rounds", "num_drafted", "num_accepted", "num_bonus", "num_target_only", "num_cut")
_COUNTED += ("num_lookup_rounds", "num_looked_up", "num_looked_up_accepted")
_SAME = ("seed", "versions", "cases_version")
"""What a file must share with the run that goes on with it."""


@dataclass
class Record:
    """Counts by dtype, engine, architecture and drafter; every tie and every failure with its case."""

    facts: dict[str, Any]
    """Command, machine, versions, commit and seed."""
    num_done: int = 0
    by_dtype: dict[str, dict[str, int]] = field(default_factory=dict)
    by_engine: dict[str, dict[str, int]] = field(default_factory=dict)
    by_architecture: dict[str, dict[str, int]] = field(default_factory=dict)
    by_drafter: dict[str, dict[str, int]] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    """Counters added up: drafts that are never right, or always, would show nothing."""
    ties: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count one more case."""
        self.num_done += 1
        verdict = outcome.verdict
        named = [(self.by_dtype, case.dtype), (self.by_engine, case.engine), (self.by_architecture, case.architecture)]
        named.append((self.by_drafter, case.drafter))
        for table, name in named:
            table.setdefault(name, dict.fromkeys(VERDICTS, 0))[verdict] += 1
        for name in _COUNTED if outcome.stats is not None else ():
            self.decoded[name] += getattr(outcome.stats, name)
        if verdict == "identical":
            return
        report = None if outcome.report is None else asdict(outcome.report)
        if verdict == "tie":  # of many, and the number makes the case again
            self.ties.append({"number": case.number, "dtype": case.dtype, "report": report})
            return
        found = {"case": case.to_dict(), "report": report}
        self.failures.append(found | {"ids": outcome.ids, "expected": outcome.expected, "error": outcome.error})

    def save(self, path: Path) -> None:
        """Replace the file by this state."""
        data = asdict(self)
        for name in ("by_dtype", "by_engine", "by_architecture", "by_drafter"):
            data[name] = dict(sorted(data[name].items()))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(data.pop("facts") | data, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """What `save` wrote. Raises: ValueError naming the file if it is no such record, FileNotFoundError."""
        names = [name for name in cls.__dataclass_fields__ if name != "facts"]
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            state = {name: data.pop(name) for name in names}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: not a record of this audit ({type(error).__name__}: {error})") from None
        return cls(facts=data, **state)

    def check_same(self, facts: Mapping[str, Any], path: Path) -> None:
        """Raises: ValueError where the record was made with another seed or on other versions."""
        for name in _SAME:
            if self.facts.get(name) != facts[name]:
                raise ValueError(
                    f"{path}: {name}: must be {facts[name]} to be continued, got {self.facts.get(name)}; "
                    "start anew with --fresh"
                )

    @property
    def found_cases(self) -> list[Case]:
        """Those that failed."""
        return [Case.from_dict(found["case"]) for found in self.failures]
