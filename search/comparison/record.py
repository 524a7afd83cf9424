"""Record: all that a comparison's results are computed from, in one small file, so that they can be made again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from layerskip.config.decode_config import DecodeConfig, write_atomically
from layerskip.config.validated import describe_validation_error, without
from search.compact import read_lines, write_lines
from search.comparison.confirm import Confirmed, check_measurement, sum_up
from search.comparison.plan import ComparisonPlan
from search.comparison.plot import make_plot
from search.comparison.results import make_table, picks_of, summarise
from search.comparison.runs import Run, trials_of
from search.study.attributes import (
    FORECAST_RATIOS,
    FORECAST_SPEEDUP,
    LOSSLESS,
    PROMPT_STEPS,
    RATIOS,
    STOPPED_EARLY,
    VIOLATION,
)
from search.study.space import RETIRED, SearchSpace

FILE = "record.jsonl.xz"
RESULTS = ("results.json", "table.md", "plot.html")
_ATTRIBUTES = (
    LOSSLESS,
    VIOLATION,
    STOPPED_EARLY,
    PROMPT_STEPS,
    RATIOS,
    FORECAST_RATIOS,
    FORECAST_SPEEDUP,
)
"""Of a trial, by which leaders are found and violations told."""


@dataclass(frozen=True)
class Record:
    """A finished comparison."""

    facts: Mapping[str, Any]
    """What results.json begins with: the command, what was measured on, the plan and the reference's numbers."""
    title: str
    space: SearchSpace
    prompt_ids: tuple[str, ...]
    """Held-out prompts, in the order of the ratios in results.json."""
    runs: Mapping[tuple[str, int], Run]
    measurements: Sequence[dict[str, Any]]
    """Of the confirm stage, as its journal has them."""
    ngrams: DecodeConfig
    """What the picks were confirmed beside."""

    @cached_property
    def plan(self) -> ComparisonPlan:
        """Raises: ValueError if the facts hold none."""
        return _PLAN.validate_json(json.dumps(self.facts.get("plan")))

    @cached_property
    def confirmed(self) -> dict[str, Confirmed]:
        """Every pick and the n-grams, by their keys."""
        picks = picks_of(self.plan, self.runs, self.ngrams)
        return sum_up(self.measurements, picks, self.prompt_ids, self.plan.confirm_repeats)

    @property
    def violations(self) -> list[str]:
        """Outputs that were not lossless, a line each."""
        lines = [
            f"{name}, seed {seed}, trial {record.number}: {record.user_attrs.get(VIOLATION)}"
            for (name, seed), run in self.runs.items()
            for record in run.records
            if record.user_attrs.get(LOSSLESS) is False
        ]
        return lines + [
            f"confirm: {one.excluded} under {key}" for key, one in self.confirmed.items() if not one.lossless
        ]


class _Header(BaseModel):
    """The first line."""

    model_config = ConfigDict(extra="forbid")

    facts: dict[str, Any]
    title: str
    space: Annotated[SearchSpace, BeforeValidator(lambda space: without(space, RETIRED))]
    prompt_ids: tuple[str, ...]
    ngrams: DecodeConfig


_PLAN = TypeAdapter(ComparisonPlan)


def write_results(record: Record, out: Path) -> str:
    """Write results.json, table.md and plot.html; returns the table. Nothing is measured."""
    results = {**record.facts, "violations": record.violations}
    results |= summarise(record.plan, record.runs, record.confirmed, record.ngrams)
    table = make_table(results)
    text = json.dumps(results, separators=(",", ":")) + "\n"  # a third of it would be blanks
    texts = (text, table, make_plot(results, record.title))
    for name, text in zip(RESULTS, texts, strict=True):
        write_atomically(out / name, text)
    return table


def write_record(record: Record, file: Path) -> None:
    """Keep the record; measurements that no result is made of are left out. Cost: see `write_lines`."""
    write_lines(file, _lines(record))


def read_record(file: Path) -> Record:
    """The inverse, but for each trial's `value`, which is 0, and `steps`, which are empty: no result is made of them.

    Raises: OSError; ValueError naming the file for what is no such record.
    """
    lines = read_lines(file)
    try:
        header = _Header.model_validate_json(json.dumps(lines[0] if lines else {}))
        reference = header.facts["reference"]
        numbers = float(reference["noise_sigma"]), int(reference["num_per_trial"])
    except ValidationError as error:
        raise ValueError(f"{file}: line 1: {describe_validation_error(error)}") from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file}: line 1: facts.reference: must have noise_sigma and num_per_trial") from None
    trials = trials_of(_filled_in(lines), file, header.space)
    runs = {key: Run(key[1], records, header.space, *numbers) for key, records in trials.items()}
    measurements = [(number, one) for number, one in enumerate(lines, start=1) if "pick" in one]
    for number, one in measurements:
        check_measurement(one, f"{file}: line {number}")
    measured = [one for _, one in measurements]
    record = Record(header.facts, header.title, header.space, header.prompt_ids, runs, measured, header.ngrams)
    _check_complete(record, file)
    return record


def _lines(record: Record) -> Iterator[dict[str, Any]]:
    plan = record.plan
    header = {name: getattr(record, name) for name in ("facts", "title", "prompt_ids")}
    ngrams = record.ngrams.model_dump(mode="json", exclude_none=True)
    yield header | {"ngrams": ngrams, "space": asdict(record.space)}
    for key in sorted(plan.runs):  # neighbours that are alike are what compression lives on
        for one in record.runs[key].records[: plan.trials]:
            kept = {name: one.user_attrs[name] for name in _ATTRIBUTES if name in one.user_attrs}
            fields = ("strategy", "seed", "number", "state", "params", "proposal_s", "measure_s")
            yield {name: getattr(one, name) for name in fields} | {"user_attrs": kept}
    for measurement in record.measurements:
        is_used = measurement["prompt_id"] in record.prompt_ids and measurement["repeat"] < plan.confirm_repeats
        if measurement["pick"] in record.confirmed and is_used:
            yield measurement


def _filled_in(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The trials among the lines, numbered, with what can be worked out again: the seconds of their runs so far."""
    seconds: dict[Any, float] = {}
    for number, one in enumerate(lines, start=1):
        if number == 1 or "pick" in one:
            continue
        key = str((one.get("strategy"), one.get("seed")))
        spent = [value for name in ("proposal_s", "measure_s") if isinstance(value := one.get(name), float | int)]
        for value in spent:
            seconds[key] = seconds.get(key, 0.0) + value
        value = 0.0 if one.get("state") == "COMPLETE" else None
        yield number, one | {"value": value, "steps": [], "seconds": seconds.get(key, 0.0)}


def _check_complete(record: Record, file: Path) -> None:
    """Raises: ValueError if results cannot be made of it."""
    try:
        plan = record.plan
        is_whole = all(len(record.runs[key].records) >= plan.trials for key in plan.runs)
        record.confirmed  # noqa: B018 (worked out here, where what is missing can be told with the file's name)
    except ValidationError as error:
        raise ValueError(f"{file}: line 1: facts.plan: {describe_validation_error(error)}") from None
    except KeyError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"{file}: not a whole record: trials or measurements of its plan are missing")
