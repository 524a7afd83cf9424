"""python -m studies.lockstep_noise: the spread of a paired ratio, decoded one after the other and in lockstep."""

from __future__ import annotations

import argparse
import math

import numpy as np
from scipy import stats

from layerskip.cli import OneLineParser, quiet_libraries, run_command
from layerskip.config import DecodeConfig
from search.measurement import PromptCase, measure_pair, measure_pair_apart
from search.preflight import open_subject
from search.prompts import load_prompts
from search.reference import make_cases, warm_up
from search.run import demo_folder
from search.spec import load_spec
from search.subject import Subject


def spread(logs: np.ndarray) -> tuple[float, float, float]:
    """Pooled standard deviation over repeats (first axis) of each prompt, with its 95 % interval (chi-square)."""
    freedom = (logs.shape[0] - 1) * logs.shape[1]
    squares = float(((logs - logs.mean(axis=0)) ** 2).sum())
    ends = [math.sqrt(squares / stats.chi2.ppf(level, freedom)) for level in (0.975, 0.025)]
    return math.sqrt(squares / freedom), ends[0], ends[1]


def measure(subject: Subject, config: DecodeConfig, cases: tuple[PromptCase, ...], repeats: int) -> list[str]:
    """One row of the table per way to measure; both ways alternate on every prompt."""
    ways = {"one after the other": measure_pair_apart, "in lockstep": measure_pair}
    logs = {name: np.zeros((repeats, len(cases))) for name in ways}
    for repeat in range(repeats):
        for i, case in enumerate(cases):
            for name, way in ways.items():
                pair = way(subject.decoder, case, config, plain_first=(repeat + i) % 2 == 0)
                logs[name][repeat, i] = math.log(pair.ratio)
    rows = []
    for name, found in logs.items():
        value, low, high = (100 * one for one in spread(found))
        rows.append(
            f"{name:20} spread {value:5.1f} % ({low:.1f}..{high:.1f})   mean ratio {math.exp(found.mean()):.3f}"
        )
    apart, lockstep = logs.values()
    by_prompt = (apart - lockstep).mean(axis=0)
    half = float(stats.t.ppf(0.975, len(cases) - 1) * by_prompt.std(ddof=1) / math.sqrt(len(cases)))
    low, high = (math.exp(by_prompt.mean() + sign * half) for sign in (-1, 1))
    return [*rows, f"{'apart / lockstep':20} {math.exp(by_prompt.mean()):.3f} ({low:.3f}..{high:.3f})"]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog="python -m studies.lockstep_noise", description=__doc__)
    parser.add_argument("--prompts", type=int, default=12, help="tuning prompts of the demo")
    parser.add_argument("--repeats", type=int, default=4, help="pairs per prompt and way")
    arguments = parser.parse_args(argv)
    return run_command("lockstep_noise", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    for name in ("prompts", "repeats"):
        if (value := getattr(arguments, name)) < 2:
            raise ValueError(f"--{name}: must be at least 2 to have a spread, got {value}")
    spec, paths = load_spec({}, None, demo=demo_folder())
    quiet_libraries()
    subject = open_subject(spec, paths, load_prompts(spec.prompts, spec.held_out))
    tuned = DecodeConfig.load(paths.best)
    layers = subject.space.num_layers
    cases, _ = make_cases(subject.decoder, subject.tuning[: arguments.prompts], layers)
    warm_up(subject.decoder, cases[0].prompt_ids, layers)
    for name, config in (("plain / plain", DecodeConfig.plain(layers)), ("best.json / plain", tuned)):
        print(name)  # noqa: T201 (a command's output)
        for line in measure(subject, config, cases, arguments.repeats):
            print(f"  {line}")  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
