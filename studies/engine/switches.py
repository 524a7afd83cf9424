"""python -m studies.engine.switches: what it costs to draft under another mask each time, in seconds and in memory."""

from __future__ import annotations

import argparse
import gc
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.step_times import StepTimer
from layerskip.command_line.cli import OneLineParser, check_folders, check_least, quiet_libraries, run_command
from layerskip.config.decode_config import ENGINE_NAMES
from studies.engine.random_models import random_llama, random_text
from studies.engine.results import FOLDER, markdown_table, say, write_study

PROG = "studies.engine.switches"
_CONTEXT = 64
_NEW_TOKENS = 4
_WARM_UP = 100
"""Masks before memory is looked at for the first time: by then every buffer of a run has been made once."""


@dataclass(frozen=True)
class Switches:
    """One engine under many masks, no two alike."""

    engine: str
    num_layers: int
    hidden_size: int
    num_switches: int
    extra_ms: tuple[float, float, float]
    """A draft step right after a switch less the next one under the same mask: median, 95th percentile, most."""
    draft_ms: float
    """The later step, median."""
    rss_mib: tuple[float, ...]
    """Resident memory after the warm-up and after every tenth of the runs that follow."""

    @property
    def growth(self) -> float:
        """From after the warm-up to the end, as a share."""
        return self.rss_mib[-1] / self.rss_mib[0] - 1


def random_masks(num_layers: int, count: int) -> list[SkipMask]:
    """Different ones; at least one sublayer kept."""
    draw, found = random.Random(0), dict[SkipMask, None]()
    while len(found) < count:
        bits = [draw.random() < 0.6 for _ in range(2 * num_layers)]
        if not all(bits):
            found[SkipMask(tuple(bits[:num_layers]), tuple(bits[num_layers:]))] = None
    return list(found)


def measure(model: LayerSkipModel, hidden_size: int, num_switches: int) -> Switches:
    """Step times first, whole runs after them: each is done under every mask once."""
    num_layers = model.num_layers
    masks = random_masks(num_layers, num_switches + _WARM_UP)
    timer, text = StepTimer(model, 1), random_text(_CONTEXT)
    pairs = []
    for start in range(0, len(masks), _WARM_UP):
        twice = [mask for mask in masks[start : start + _WARM_UP] for _ in range(2)]
        seconds = timer.draft_s(text, twice, gamma=1, threshold=False)
        pairs.extend(zip(seconds[::2], seconds[1::2], strict=True))
    first, second = 1000 * np.asarray(pairs[_WARM_UP:]).T
    extra = np.percentile(first - second, (50, 95, 100))
    rss = []
    every = max(num_switches // 10, 1)
    for number, mask in enumerate(masks, start=1):
        model.generate(text, max_new_tokens=_NEW_TOKENS, config=DecodeConfig(skip_mask=mask, gamma=3))
        if number >= _WARM_UP and (number - _WARM_UP) % every == 0:
            gc.collect()
            rss.append(_resident_mib())
    median, p95, most = map(float, extra)
    return Switches(
        model.engine_name,
        num_layers,
        hidden_size,
        num_switches,
        (median, p95, most),
        float(np.median(second)),
        tuple(rss),
    )


def table(results: list[Switches]) -> str:
    """One line an engine and size."""
    header = ("engine", "layers", "hidden", "switches", "a draft step, ms", "a switch adds, ms: median", "95 %", "most")
    rows = [
        [one.engine, str(one.num_layers), str(one.hidden_size), str(one.num_switches), f"{one.draft_ms:.2f}"]
        + [f"{ms:.3f}" for ms in one.extra_ms]
        + [f"{one.rss_mib[0]:.0f}", f"{one.rss_mib[-1]:.0f}", f"{100 * one.growth:+.1f} %"]
        for one in results
    ]
    return markdown_table((*header, "MiB at first", "in the end", "growth"), rows)


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--switches", type=int, default=1000, help="masks, after a warm-up under 100 others")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 32], help="of the models")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--engines", nargs="+", choices=ENGINE_NAMES, default=["eager", "fused"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for switches.json and switches.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    results = []
    for num_layers in arguments.layers:
        for engine in arguments.engines:
            model = random_llama(num_layers, arguments.hidden_size, engine=engine)
            results.append(measure(model, arguments.hidden_size, arguments.switches))
            say(table(results[-1:]).splitlines()[-1])
    record = {
        "num_threads": arguments.threads,
        "dtype": "float32",
        "results": [asdict(one) | {"growth": one.growth} for one in results],
    }
    write_study(arguments.out, "switches", record, table(results))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not Path("/proc/self/statm").is_file():
        raise ValueError("resident memory is read from /proc, which this system does not have")
    check_least(arguments, switches=1, layers=1, hidden_size=1, threads=1)
    num_masks, least = arguments.switches + _WARM_UP, min(arguments.layers)
    if 4**least < 2 * num_masks:
        raise ValueError(f"--layers: must have more than {num_masks} different masks, got {least}")
    check_folders(arguments, "out")


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    raise SystemExit(main())
