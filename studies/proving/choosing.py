"""python -m studies.proving.choosing: what ending the confirm stage's choice early costs and saves.

On the speedups of the candidates that the committed studies took to the end of that pass, prompt by prompt: a race on
two thirds of the prompts in random order chooses, the last third tells how good the choice is. "To the end" ends only
once one candidate is left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layerskip.command_line.cli import OneLineParser, check_least, run_command
from search.confirm.passes import RACE_FROM, expected_loss, still_racing
from studies.results import facts, markdown_table, say, write_json

PROG = "studies.proving.choosing"
_STUDIES = Path(__file__).parent.parent
_SETTLED_AT = (None, 0.0025, 0.005, 0.01, 0.02)
"""None: to the end."""


@dataclass(frozen=True)
class Outcome:
    """Of one study's races that end at the same expectation, on average."""

    study: str
    num_candidates: int
    settled_at: float | None
    lost: float
    """Share of the speed on prompts that chose nothing, behind the choice of races to the end."""
    num_decodings: float


def race(ratios: NDArray[np.float64], settled_at: float | None) -> tuple[int, int]:
    """(The chosen row, decodings including the plain ones) of ratios (candidates, prompts)."""
    racing, num_decodings = list(range(len(ratios))), 0
    for seen in range(1, ratios.shape[1] + 1):
        num_decodings += 1 + len(racing)
        if seen < RACE_FROM:
            continue
        racing = still_racing({i: ratios[i, :seen].tolist() for i in racing})
        rates = ratios[racing, :seen].tolist()
        if len(racing) == 1 or (settled_at is not None and expected_loss(rates) <= settled_at):
            break
    return max(racing, key=lambda i: float(np.log(ratios[i, :seen]).mean())), num_decodings


def outcomes(name: str, ratios: NDArray[np.float64], orders: int) -> list[Outcome]:
    """Of every rule, over the same random orders of the prompts."""
    rng = np.random.default_rng(0)
    num_telling = ratios.shape[1] // 3
    found: list[list[tuple[float, int]]] = [[] for _ in _SETTLED_AT]
    for _ in range(orders):
        order = rng.permutation(ratios.shape[1])
        truth = np.log(ratios[:, order[:num_telling]]).mean(axis=1)
        for of_rule, settled_at in zip(found, _SETTLED_AT, strict=True):
            chosen, num_decodings = race(ratios[:, order[num_telling:]], settled_at)
            of_rule.append((float(truth[chosen]), num_decodings))
    means = [np.mean(of_rule, axis=0) for of_rule in found]
    return [
        Outcome(name, len(ratios), settled_at, 1 - float(np.exp(log - means[0][0])), float(decodings))
        for settled_at, (log, decodings) in zip(_SETTLED_AT, means, strict=True)
    ]


def committed_candidates(folder: Path) -> dict[str, NDArray[np.float64]]:
    """By study, the ratios of the candidates that stayed to the end, where there are two or more."""
    found = {}
    for path in sorted(folder.rglob("summary.json")):
        ratios = [one["ratios"] for one in json.loads(path.read_text(encoding="utf-8"))["candidates"]]
        most = max(map(len, ratios), default=0)
        stayed = [one for one in ratios if len(one) == most]
        if len(stayed) > 1 and most >= 2 * RACE_FROM:
            found[path.parent.relative_to(folder).as_posix()] = np.array(stayed)
    return found


def table(found: Sequence[Outcome]) -> str:
    """A line a study, a column a rule: per cent lost, and decodings."""
    header = ["study", "candidates", *("to the end" if at is None else f"{100 * at:g} %" for at in _SETTLED_AT)]
    names = list(dict.fromkeys(one.study for one in found))
    rows = []
    for name in names:
        own = [one for one in found if one.study == name]
        cells = [f"{100 * one.lost:+.2f} ({one.num_decodings:.0f})" for one in own]
        rows.append([name, str(own[0].num_candidates), *cells])
    means = []
    for settled_at in _SETTLED_AT:
        own = [one for one in found if one.settled_at == settled_at]
        means.append(f"{100 * np.mean([one.lost for one in own]):+.2f} ({np.mean([o.num_decodings for o in own]):.0f})")
    return markdown_table(header, [*rows, ["all", "", *means]])


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--orders", type=int, default=100, help="random orders of each study's prompts")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, orders=1)
    studies = committed_candidates(_STUDIES)
    found = [one for name, ratios in studies.items() for one in outcomes(name, ratios, arguments.orders)]
    if arguments.out is not None:
        write_json(
            arguments.out, facts(f"python -m {PROG} --out {arguments.out}") | {"races": list(map(asdict, found))}
        )
    say("per cent lost on prompts that chose nothing, and decodings, by what is expected of going on\n")
    say(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
