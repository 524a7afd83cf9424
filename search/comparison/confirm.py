"""The picks of all runs against plain decoding on held-out prompts, each measurement kept in a journal."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from layerskip.analysis.intervals import geometric_mean
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.strict_json import printable
from search.comparison.journal import Journal
from search.measure.decoder import Decoder
from search.measure.pairs import Fault, PromptCase, Timed, time_able
from search.stop import StopSignal

GROUP = 6
"""Picks beside one plain decoding: more share it, and stand further apart in time."""


@dataclass(frozen=True)
class Confirmed:
    """A pick on the held-out prompts; a prompt's speed is the median of its repeats."""

    tokens_per_s: float | None = None
    """Geometric mean over prompts, as measured; compare by the speedup, which is paired."""
    plain_tokens_per_s: float | None = None
    num_ties: int = 0
    excluded: str | None = None
    """Why it has no numbers."""
    lossless: bool = True
    ratios: tuple[float, ...] = ()
    """Speculative over plain, per prompt; empty if it was excluded."""

    @property
    def speedup(self) -> float | None:
        """Geometric mean over prompts of the paired ratios."""
        return geometric_mean(self.ratios) if self.ratios else None


def pick_key(params: Mapping[str, Any]) -> str:
    """The text by which a pick is known in the journal and in the results."""
    return json.dumps(dict(params), sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Turns:
    """What is measured: every pick on every prompt, so many times."""

    picks: Mapping[str, DecodeConfig]
    cases: Sequence[PromptCase]
    repeats: int

    def __len__(self) -> int:
        return len(self.cases) * self.repeats


def confirm_picks(
    decoder: Decoder, turns: Turns, journal: Journal, stop: StopSignal, tell: Callable[[int], None] = lambda _: None
) -> None:
    """Measure every pick on every prompt, a few and plain decoding one after the other; who is together changes.

    What the journal holds is not measured again. A pick that fails or is not lossless is excluded. `tell` hears after
    each prompt how many are done, every pass counted.
    Cost: (1 + 1 / GROUP) x picks x prompts x repeats decodings. Raises: KeyboardInterrupt between two measurements.
    """
    known = _Known(read_measurements(journal))
    picks, keys = turns.picks, list(turns.picks)
    with stop.deferred():
        for turn, (repeat, case) in enumerate(itertools.product(range(turns.repeats), turns.cases)):
            order = np.random.default_rng(turn).permutation(len(keys))
            missing = [keys[i] for i in order if (keys[i], repeat, case.prompt_id) not in known.measured]
            for start in range(0, len(missing), GROUP):
                group = {key: picks[key] for key in missing[start : start + GROUP] if key not in known.excluded}
                if not group:
                    continue
                with stop.interruptible():
                    records = _measure(decoder, case, group)
                for key, record in records.items():
                    whole = {"pick": key, "repeat": repeat, "prompt_id": case.prompt_id} | record
                    journal.append(whole)
                    known.note(whole)
            if missing:
                tell(turn + 1)


def sum_up(
    measurements: Iterable[dict[str, Any]], picks: Iterable[str], prompt_ids: Sequence[str], repeats: int
) -> dict[str, Confirmed]:
    """What the measurements say of every pick. Raises: KeyError if one of a pick is missing that was not excluded."""
    known = _Known(measurements)
    return {key: known.sum_up(key, prompt_ids, repeats) for key in picks}


def read_measurements(journal: Journal) -> list[dict[str, Any]]:
    """The journal's records. Raises: ValueError naming file, line and field for what is no measurement of a pick."""
    records = journal.read()
    for number, record in enumerate(records, start=1):
        check_measurement(record, f"{journal.path}: line {number}")
    return records


class _Known:
    """Measurements by pick, repeat and prompt; a later one of the same stands."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.measured: dict[tuple[str, int, str], dict[str, Any]] = {}
        self.excluded: dict[str, dict[str, Any]] = {}
        for record in records:
            self.note(record)

    def note(self, record: dict[str, Any]) -> None:
        if "excluded" in record:
            self.excluded[record["pick"]] = record
        else:
            self.measured[record["pick"], record["repeat"], record["prompt_id"]] = record

    def sum_up(self, key: str, prompt_ids: Sequence[str], repeats: int) -> Confirmed:
        if (why := self.excluded.get(key)) is not None:
            return Confirmed(excluded=why["excluded"], lossless=why["lossless"])
        fast, plain, ties = [], [], 0
        for prompt_id in prompt_ids:
            records = [self.measured[key, repeat, prompt_id] for repeat in range(repeats)]
            fast.append(median(record["tokens_per_s"] for record in records))
            plain.append(median(record["plain_tokens_per_s"] for record in records))
            ties += any(record["is_tie"] for record in records)
        ratios = tuple(one / other for one, other in zip(fast, plain, strict=True))
        return Confirmed(geometric_mean(fast), geometric_mean(plain), ties, ratios=ratios)


def _measure(decoder: Decoder, case: PromptCase, group: Mapping[str, DecodeConfig]) -> dict[str, dict[str, Any]]:
    """A record per pick."""
    layers = next(iter(group.values())).skip_mask.num_layers
    plain, *fast = time_able(decoder, case, [DecodeConfig.plain(layers), *group.values()])
    assert isinstance(plain, Timed)  # a fault of plain decoding's is raised
    return {key: _record(one, plain) for key, one in zip(group, fast, strict=True)}


def _record(fast: Timed | Fault, plain: Timed) -> dict[str, Any]:
    if isinstance(fast, Fault):
        return {"excluded": fast.reason, "lossless": fast.lossless}
    return {
        "tokens_per_s": fast.tokens_per_s,
        "plain_tokens_per_s": plain.tokens_per_s,
        "is_tie": fast.is_tie,
    }


def check_measurement(record: dict[str, Any], where: str) -> None:
    """Raises: ValueError naming file, line and field if the line is no measurement of a pick."""
    kinds: dict[str, type] = {"pick": str, "repeat": int, "prompt_id": str}
    if "excluded" in record:
        kinds |= {"excluded": str, "lossless": bool}
    else:
        kinds |= {"tokens_per_s": float, "plain_tokens_per_s": float, "is_tie": bool}
    for name, kind in kinds.items():
        value: Any = record.get(name)
        if type(value) is not kind:
            raise ValueError(f"{where}: {name}: must be of type {kind.__name__}, got {_short(value)}")
        if kind is float and not 0 < record[name] < math.inf:
            raise ValueError(f"{where}: {name}: must be above 0 and finite, got {value}")
    for name in sorted(record.keys() - kinds.keys()):
        raise ValueError(f"{where}: {printable(name)}: unknown field")


def _short(value: object) -> str:
    return ascii(value)[:80]
