"""python -m studies.engine.growth: how the costs of a step and of a round grow with layers, context and gamma."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch

from layerskip import LayerSkipModel, SkipMask
from layerskip.analysis.step_times import StepTimer
from layerskip.command_line.cli import OneLineParser, check_folders, check_least, quiet_libraries, run_command
from layerskip.config.decode_config import ENGINE_NAMES
from layerskip.machine.host import cpu_name
from search.reporting.figures.style import finish, fit_card, look
from studies.engine.random_models import random_llama, random_text
from studies.engine.results import FOLDER, facts, markdown_table, say, write_picture, write_study

PROG = "studies.engine.growth"
_SHOTS = 4
_VERIFY = 5
_UNITS = {"layers": "a layer", "context": "a thousand tokens", "gamma": "a draft token"}
_PLAIN = "plain decoding of gamma + 1 tokens"


@dataclass(frozen=True)
class Sweep:
    """What is varied, and what stays."""

    name: str
    axis: str
    values: tuple[int, ...]
    hidden_size: int
    num_layers: int
    context: int
    gamma: int = _VERIFY - 1


FULL = (
    Sweep("layers", "layers", (2, 4, 8, 12, 16, 24, 32), 256, 0, 128),
    Sweep("context", "tokens of text before the step", (64, 128, 256, 512, 1024, 2048, 4096), 256, 8, 0),
    Sweep("gamma", "gamma", (1, 2, 3, 4, 6, 8, 12, 16), 256, 12, 128, 0),
)
QUICK = (
    Sweep("layers", "layers", (2, 4, 6), 64, 0, 16),
    Sweep("context", "tokens of text before the step", (8, 16, 32), 64, 2, 0),
    Sweep("gamma", "gamma", (1, 2, 4), 64, 4, 16, 0),
)


@dataclass
class Line:
    """One curve: milliseconds by value, the median of its shots, and a straight line through them."""

    name: str
    unit: str
    """What the slope is for."""
    values: list[int]
    ms: list[float] = field(default_factory=list)
    low_ms: list[float] = field(default_factory=list)
    """Quartiles of the shots."""
    high_ms: list[float] = field(default_factory=list)
    fixed_ms: float = 0.0
    slope_ms: float = 0.0
    fit_error: float = 0.0
    """Median distance from the line, as a share."""

    def fill(self, shots: Sequence[Sequence[float]]) -> None:
        """shots: seconds, by value."""
        quartiles = [np.percentile(1000 * np.asarray(one), (25, 50, 75)) for one in shots]
        self.low_ms, self.ms, self.high_ms = ([float(one[i]) for one in quartiles] for i in range(3))
        # Relative errors weigh alike, or the longest step alone would draw the line.
        x, y = np.asarray(self.values, dtype=float), np.asarray(self.ms)
        slope, fixed = np.polyfit(x, y, 1, w=1 / y)
        self.slope_ms, self.fixed_ms = float(slope), float(fixed)
        self.fit_error = float(np.median(np.abs((fixed + slope * x) / y - 1)))


def measure(sweep: Sweep, repeats: int, engine: str) -> list[Line]:
    """The curves of one sweep, all its points in turns."""
    points = [_point(sweep, value, engine) for value in sweep.values]
    shots: list[dict[str, list[float]]] = [{} for _ in points]
    for repeat in range(repeats + 1):
        order = range(len(points)) if repeat % 2 else reversed(range(len(points)))
        for place in order:
            for name, seconds in points[place]().items():
                if repeat:  # the first round warms up
                    shots[place].setdefault(name, []).extend(seconds)
    lines = []
    for name in shots[0]:
        line = Line(name, _UNITS[sweep.name], list(sweep.values))
        line.fill([one[name] for one in shots])
        lines.append(line)
    return lines


def _point(sweep: Sweep, value: int, engine: str) -> Callable[[], dict[str, list[float]]]:
    """Times a few shots of everything at one value."""
    num_layers, context, gamma = (
        {"layers": value}.get(sweep.name, sweep.num_layers),
        {"context": value}.get(sweep.name, sweep.context),
        {"gamma": value}.get(sweep.name, sweep.gamma),
    )
    model, text = _model(num_layers, sweep.hidden_size, engine), random_text(context)
    mask = SkipMask.early_exit(num_layers, num_layers // 2)
    timer = StepTimer(model, max(gamma, _VERIFY - 1))

    def steps() -> dict[str, list[float]]:
        counts = [1, _VERIFY]
        seconds = timer.verify_s(text, counts * _SHOTS)
        draft = timer.draft_s(text, [mask] * _SHOTS, gamma=gamma, threshold=False)
        return {"plain step": seconds[::2], f"verify of {_VERIFY}": seconds[1::2], "draft step, half the layers": draft}

    def rounds() -> dict[str, list[float]]:
        seconds = timer.verify_s(text, [1, gamma + 1] * _SHOTS)
        drafts = [gamma * one for one in timer.draft_s(text, [mask] * _SHOTS, gamma=gamma, threshold=False)]
        verify = seconds[1::2]
        both = [a + b for a, b in zip(drafts, verify, strict=True)]
        plain = [(gamma + 1) * one for one in seconds[::2]]
        return {"a round": both, "its verification": verify, "its draft, half the layers": drafts, _PLAIN: plain}

    return rounds if sweep.name == "gamma" else steps


@functools.cache
def _model(num_layers: int, hidden_size: int, engine: str) -> LayerSkipModel:
    return random_llama(num_layers, hidden_size, engine=engine)


def draw(sweep: Sweep, lines: Sequence[Line], machine: str) -> go.Figure:
    """Medians with quartiles, and the straight lines through them."""
    figure = go.Figure()
    wide = sweep.values[-1] / sweep.values[0] > 16
    for place, line in enumerate(lines):
        colour, symbol = look(place)
        x = np.asarray(line.values, dtype=float)
        figure.add_scatter(
            x=line.values,
            y=line.ms,
            mode="markers",
            name=f"{line.name}: {line.fixed_ms:.2f} ms + {_slope_words(line)}",
            marker={"color": colour, "symbol": symbol, "size": 9},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": np.subtract(line.high_ms, line.ms),
                "arrayminus": np.subtract(line.ms, line.low_ms),
                "thickness": 1.2,
            },
        )
        fitted = line.fixed_ms + line.slope_ms * x
        figure.add_scatter(x=x, y=fitted, mode="lines", line={"color": colour, "width": 1.5}, showlegend=False)
    figure.update_xaxes(title=sweep.axis, type="log" if wide else "linear", tickvals=sweep.values)
    figure.update_yaxes(title="ms", rangemode="tozero")
    fit_card(finish(figure, f"What grows with {sweep.name}", machine))
    return figure.update_layout(margin={"b": 40 + 24 * len(lines)}, legend={"orientation": "v"})


def _slope_words(line: Line) -> str:
    thousand = line.unit == _UNITS["context"]
    return f"{line.slope_ms * (1000 if thousand else 1):.3g} ms {line.unit}"


def table(found: Sequence[tuple[Sweep, Sequence[Line]]]) -> str:
    """The straight lines as Markdown."""
    rows = [
        [sweep.name, line.name, f"{line.fixed_ms:.3f}", _slope_words(line), f"{100 * line.fit_error:.1f} %"]
        for sweep, lines in found
        for line in lines
    ]
    return markdown_table(("grows with", "what", "fixed ms", "and", "median distance"), rows)


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--repeats", type=int, default=6, help="visits of every point")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--engine", choices=ENGINE_NAMES, default="fused", help="how a forward is executed")
    parser.add_argument("--quick", action="store_true", help="tiny models, for a test")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for growth.json, growth.md and three PNGs")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, repeats=1, threads=1)
    check_folders(arguments, "out")
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    found = []
    for sweep in QUICK if arguments.quick else FULL:
        lines = measure(sweep, arguments.repeats, arguments.engine)
        found.append((sweep, lines))
        machine = (
            f"{_fixed_words(sweep)}, float32 on {cpu_name()}, threads: {arguments.threads}, engine {arguments.engine}; "
            f"medians and quartiles of {arguments.repeats * _SHOTS} shots, random weights"
        )
        write_picture(arguments.out / f"growth_{sweep.name}.png", draw(sweep, lines, machine))
        say(f"measured: {sweep.name}")
    record: dict[str, Any] = facts(f"python -m {PROG}") | {
        "num_threads": arguments.threads,
        "engine": arguments.engine,
        "dtype": "float32",
        "shots": arguments.repeats * _SHOTS,
        "sweeps": [{**asdict(sweep), "lines": [asdict(line) for line in lines]} for sweep, lines in found],
    }
    write_study(arguments.out, "growth", record, table(found))
    return 0


def _fixed_words(sweep: Sweep) -> str:
    fixed = [f"hidden size {sweep.hidden_size}"]
    fixed += [f"{sweep.num_layers} layers"] if sweep.num_layers else []
    fixed += [f"after {sweep.context} tokens"] if sweep.context else []
    return ", ".join(fixed)


if __name__ == "__main__":
    raise SystemExit(main())
