"""python -m studies.lockstep: is a speedup measured in lockstep the one that is had one after the other?

Trials decode plainly and with a config in turns of a step, finalists one after the other. Here both ways measure the
same configs on the same prompts, A/B/A/B on each, so that both share the machine's moods: what is left is a bias.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from layerskip.analysis.intervals import geometric_mean, ratio_interval
from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.config.decode_config import DecodeConfig, write_atomically
from layerskip.config.skip_mask import SkipMask
from layerskip.config.usual_lookups import NGRAMS, lookup_alone
from layerskip.machine.host import git_commit
from search.measure.decoder import Decoder
from search.measure.pairs import Pair, PromptCase, measure_pair, measure_pair_apart
from search.measure.reference import make_cases, warm_up
from search.measure.subject import Subject
from search.regime_run import regime_study
from search.study.prompts import EncodedPrompt, load_prompts
from search.study.spec import load_spec

WAYS: Mapping[str, Callable[..., Pair]] = {"lockstep": measure_pair, "apart": measure_pair_apart}
GAMMA = 3
"""Of the configs that are made here; what the demo's searches chose for masks."""
THRESHOLD = 0.9
_TOLD_EVERY = 10
"""Prompts."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One config by both ways; intervals are over prompts, 95 %."""

    name: str
    lockstep: tuple[float, float, float]
    """Speedup over plain decoding: geometric mean over prompts, low, high."""
    apart: tuple[float, float, float]
    ratio: tuple[float, float, float]
    """lockstep / apart, paired by prompt and repeat: 1 is no bias."""
    half_width_percent: float
    """Of the ratio's interval: what this run can resolve."""
    spread_percent: Mapping[str, tuple[float, float, float]]
    """By way, standard deviation of a prompt's ratio from repeat to repeat, low, high; empty for one repeat."""
    num_ties: int
    """Outputs that parted from the target's own by a logit tie; all others were identical."""
    config: Mapping[str, Any]
    raw: Mapping[str, list[list[float]]]
    """By way, speedups by repeat and prompt."""


def configs_of(exported: DecodeConfig) -> dict[str, DecodeConfig]:
    """Plain decoding against itself, the exported setting, a mask of half of the layers, the same where the target is
    hardly ever sure enough to draft, and n-grams."""
    num_layers = exported.skip_mask.num_layers
    half = SkipMask.from_layers(num_layers, range(num_layers // 4, num_layers // 4 + num_layers // 2))
    return {
        "plain against plain": DecodeConfig.plain(num_layers),
        f"half of the layers, target_threshold {THRESHOLD}": DecodeConfig(
            skip_mask=half, gamma=GAMMA, target_threshold=THRESHOLD
        ),
        "exported": exported.bare(),
        "half of the layers": DecodeConfig(skip_mask=half, gamma=GAMMA),
        "n-grams as usual": lookup_alone(num_layers, NGRAMS),
    }


def measure(
    decoder: Decoder,
    configs: Mapping[str, DecodeConfig],
    cases: Sequence[PromptCase],
    repeats: int,
    tell: Callable[[int], None] = lambda _done: None,
) -> list[Row]:
    """A row per config. On each prompt both ways take turns, `repeats` times; which way begins, and whether plain
    decoding is first in a pair, goes round.

    Cost: 4 x configs x repeats decodings a prompt. Raises: LosslessViolation.
    """
    pairs: dict[tuple[str, str], list[list[Pair]]] = {
        (name, way): [[] for _ in range(repeats)] for name in configs for way in WAYS
    }
    for place, case in enumerate(cases):
        order = list(WAYS) if place % 2 == 0 else list(WAYS)[::-1]
        for name, config in configs.items():
            for repeat in range(repeats):
                plain_first = (place // 2 + repeat) % 2 == 0
                for way in order:
                    pairs[name, way][repeat].append(WAYS[way](decoder, case, config, plain_first=plain_first))
        tell(place + 1)
    return [row_of(name, config, {way: pairs[name, way] for way in WAYS}) for name, config in configs.items()]


def row_of(name: str, config: DecodeConfig, pairs: Mapping[str, Sequence[Sequence[Pair]]]) -> Row:
    """The sums; pairs by way, repeat and prompt."""
    ratios = {way: np.array([[pair.ratio for pair in one] for one in found]) for way, found in pairs.items()}
    by_prompt = {way: np.exp(np.log(found).mean(axis=0)) for way, found in ratios.items()}
    bias = _with_interval(by_prompt["lockstep"] / by_prompt["apart"])
    many = len(ratios["apart"]) > 1
    return Row(
        name=name,
        lockstep=_with_interval(by_prompt["lockstep"]),
        apart=_with_interval(by_prompt["apart"]),
        ratio=bias,
        half_width_percent=100 * (bias[2] - bias[1]) / 2,
        spread_percent={way: spread(100 * np.log(found)) for way, found in ratios.items()} if many else {},
        num_ties=sum(
            one.speculative.is_tie + one.plain.is_tie for found in pairs.values() for row in found for one in row
        ),
        config=config.model_dump(mode="json", exclude_none=True),
        raw={way: found.tolist() for way, found in ratios.items()},
    )


def spread(logs: Floats) -> tuple[float, float, float]:
    """Pooled standard deviation over repeats (first axis) of each prompt, with its 95 % interval (chi-square)."""
    freedom = (logs.shape[0] - 1) * logs.shape[1]
    squares = float(((logs - logs.mean(axis=0)) ** 2).sum())
    low, high = (math.sqrt(squares / float(stats.chi2.ppf(level, freedom))) for level in (0.975, 0.025))
    return math.sqrt(squares / freedom), low, high


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| config | in lockstep | one after the other | ratio of the two | a pair's spread, % |", f"|{'---|' * 5}"]
    for row in rows:
        cells = [f"{value:.3f} ({low:.3f}..{high:.3f})" for value, low, high in (row.lockstep, row.apart)]
        value, low, high = row.ratio
        spreads = " and ".join(f"{row.spread_percent[way][0]:.1f}" for way in WAYS) if row.spread_percent else "-"
        lines.append(f"| {row.name} | {' | '.join(cells)} | {value:.4f} ({low:.4f}..{high:.4f}) | {spreads} |")
    return "\n".join(lines) + "\n"


def _with_interval(ratios: Floats) -> tuple[float, float, float]:
    """Geometric mean over prompts, low, high."""
    values = ratios.tolist()
    interval = ratio_interval(values, seed=0)
    assert interval is not None  # two prompts at least
    return geometric_mean(values), interval.low, interval.high


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="python -m studies.lockstep", description=__doc__)
    parser.add_argument("--study", type=Path, default=Path("studies/demo"), help="folder of a finished study")
    parser.add_argument("--prompts", type=int, default=100, help="held-out ones first (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="of both ways on a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="new ones of each decoding (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    arguments = parser.parse_args(given)
    return run_command("studies.lockstep", lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    check_least(arguments, prompts=2, repeats=1, tokens=2)
    start = time.monotonic()
    commit = git_commit(Path(__file__).parent)
    quiet_libraries()
    from search.preflight import open_subject

    spec, paths = load_spec({}, str(arguments.study), demo=arguments.study)
    if spec.regimes:
        spec, paths = regime_study(spec, paths, spec.regimes[0])
    spec = spec.model_copy(update={"max_new_tokens": arguments.tokens})
    subject = open_subject(spec, paths, load_prompts(spec.prompts, spec.held_out))
    prompts = prompts_of(subject, arguments.prompts)
    configs = configs_of(DecodeConfig.load(paths.best))
    watch = subject.decoder.watch_machine()
    cases, dropped = make_cases(subject.decoder, prompts, subject.space.num_layers, spec.seed)
    warm_up(subject.decoder, cases[0].prompt_ids, subject.space.num_layers)
    measure(subject.decoder, configs, cases[:2], 1)  # allocators, caches and kernels settle
    rows = measure(subject.decoder, configs, cases, arguments.repeats, _Teller(len(cases)))
    result = {
        "command": shlex.join(["python", "-m", "studies.lockstep", *argv]),
        "commit": commit,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - start, 1),
        "fingerprint": asdict(subject.fingerprint),
        "cores": os.cpu_count(),
        "machine": watch.record(),
        "prompts": [case.prompt_id for case in cases],
        "too_short": list(dropped),
        "repeats": arguments.repeats,
        "rows": [asdict(row) for row in rows],
    }
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table(rows))
    return 0


def prompts_of(subject: Subject, number: int) -> list[EncodedPrompt]:
    """Held-out prompts, and tuning ones where these do not suffice. Raises: ValueError if both do not."""
    prompts = [*subject.held_out, *subject.tuning]
    if number > len(prompts):
        raise ValueError(f"--prompts: must be at most {len(prompts)}, which the study has, got {number}")
    return prompts[:number]


class _Teller:
    """Says every few prompts how far it is, on standard error."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = time.monotonic()

    def __call__(self, done: int) -> None:
        if done % _TOLD_EVERY == 0:
            left = (time.monotonic() - self._start) / done * (self._total - done)
            sys.stderr.write(f"{done} of {self._total} prompts, {left:.0f} s left\n")


if __name__ == "__main__":
    raise SystemExit(main())
