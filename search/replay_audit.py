"""python -m search.replay_audit: replayed counts of random configs against those of really decoding with them."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command, split_list
from search.command_line import demo_folder
from search.study.spec import StudySpec, load_spec

if TYPE_CHECKING:
    from layerskip.config.decode_config import DecodeConfig
    from search.measure.subject import Subject
    from search.study.space import SearchSpace

PROG = "search.replay_audit"
_SHARES = (0.1, 0.6)
"""Of the sublayers that a random mask skips."""


def build_parser() -> OneLineParser:
    """Flags of the command."""
    epilog = "Counts alone, nothing is timed. Exit codes: 0 done, 1 an output was not lossless, 2 bad input."
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__, epilog=epilog)
    parser.add_argument("--study", help="study folder, or its study.toml (default: the demo study)")
    parser.add_argument("--drafters", metavar="LIST", help="ways to draft, as for search.run (default: the study's)")
    parser.add_argument("--regimes", metavar="NAME", help="how tokens are chosen, as for search.run; one regime")
    parser.add_argument("--settings", type=int, default=200, metavar="N", help="random configs (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="tuning prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the configs (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write every count here, as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(given)
    return run_command(PROG, lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    check_least(arguments, settings=1, prompts=1, seed=0)
    lists = {"drafters": arguments.drafters, "regimes": arguments.regimes}
    flags = {name: split_list(value) for name, value in lists.items() if value is not None}
    spec, paths = load_spec(flags, arguments.study, demo=demo_folder())
    if arguments.regimes is not None and spec.has_several_regimes:
        raise ValueError(f"regimes: must be one at a time, got {arguments.regimes!a}")
    from search.preflight import open_subject
    from search.study.opening import quiet_optuna
    from search.study.prompts import load_prompts
    from search.terminal.reporter import Reporter

    quiet_libraries()
    quiet_optuna()
    subject = open_subject(spec, paths, load_prompts(spec.prompts, spec.held_out))
    result = audit(subject, spec, num_settings=arguments.settings, num_prompts=arguments.prompts, seed=arguments.seed)
    say = Reporter()
    for name, check in result["checks"].items():
        if not check:
            continue  # every text parted
        say.phase(
            "replay",
            f"{name}, {check['num_settings']} settings: exact in {100 * check['exact_share']:.1f} %, error median "
            f"{100 * check['median_error']:.2f} %, 95th percentile {100 * check['p95_error']:.2f} %",
        )
    if result["num_parted"]:
        say.phase(
            "replay",
            f"{result['num_parted']} outputs parted from the target's at ties and are not compared; in float32 "
            "there are none, and a run there is the proof of the code",
        )
    if arguments.out is not None:
        from layerskip.config.decode_config import write_atomically
        from search.study.fingerprint import environment

        facts = {"command": shlex.join(["python", "-m", PROG, *argv]), "commit": environment().get("commit")}
        write_atomically(arguments.out, json.dumps(facts | result, indent=1) + "\n")
    for line in result["violations"]:
        say.warn(f"NOT LOSSLESS, a bug to report: {line}")
    return 1 if result["violations"] else 0


def audit(subject: Subject, spec: StudySpec, *, num_settings: int, num_prompts: int, seed: int) -> dict[str, Any]:
    """Decode `num_prompts` tuning prompts under every random config, and replay the same.

    `checks` has `sharp` (as predictions on trials are made) and `ranked` (as candidates are ranked: one reading, no
    look at drafts after a wrong token), and both `in int8`, of drafts with rounded weights, which can be right on
    average alone (`replay_check_of`). Cost: settings x prompts decodings.
    """
    from search.measure.reference import Continuing, make_cases
    from search.predict.costs import free_costs
    from search.predict.predictor import Predictor
    from search.predict.replay import TextRows, check_replay, live_counts
    from search.study.config_words import describe

    which = Continuing(subject.space.num_layers, spec.seed)
    cases, _ = make_cases(subject.decoder, subject.tuning[:num_prompts], which)
    forcing = subject.decoder.teacher_forcing([case.text for case in cases])
    rows = TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), spec.max_new_tokens)
    predictor = Predictor(forcing, rows, free_costs(subject.space, subject.space.gamma_limit), subject.space.gamma_max)
    rng = np.random.default_rng(seed)
    records: list[dict[str, Any]] = []
    violations: list[str] = []
    num_parted = 0
    for _ in range(num_settings):
        config = subject.space.to_config(random_setting(subject.space, rng))
        outs = [subject.decoder.decode(case.prompt_ids, config, case.seed) for case in cases]
        # A text that parted at a logit tie goes on as another one, of which replay says nothing.
        whole = [i for i, (case, out) in enumerate(zip(cases, outs, strict=True)) if out.ids == case.reference_ids]
        num_parted += len(cases) - len(whole)
        for case, out in zip(cases, outs, strict=True):
            if not subject.decoder.check(case.prompt_ids, out.ids, case.reference_ids, case.seed).lossless:
                violations.append(f"prompt {case.prompt_id!r} under {describe(config)}")
        if not whole:
            continue
        live = live_counts([outs[i].stats for i in whole])
        sharp, ranked = (predictor.counts(config, sharp=one, texts=whole) for one in (True, False))
        records.append(
            {
                "config": _told(config),
                "live": live.tolist(),
                "sharp": sharp.total()[0].tolist(),
                "ranked": ranked.total()[0].tolist(),
            }
        )
    checks = {}
    for name, rounded in itertools.product(("sharp", "ranked"), (False, True)):
        of_kind = [one for one in records if ("int" in one["config"]["skip_mask"]) is rounded]
        if of_kind or not rounded:
            check = check_replay([(record[name], record["live"]) for record in of_kind])
            checks[f"{name} in int8" if rounded else name] = asdict(check) if check else {}
    facts = {"checks": checks, "violations": violations, "keys": predictor.keys, "num_parted": num_parted}
    return facts | {"num_prompts": len(cases), "seed": seed, "settings": records}


def _told(config: DecodeConfig) -> dict[str, Any]:
    """What it sets, as a config reads it."""
    told: dict[str, Any] = config.bare().model_dump(mode="json", exclude_defaults=True)
    return told if config.lookup is None else told | {"lookup": told["lookup"] | {"method": config.lookup.method}}


def random_setting(space: SearchSpace, rng: np.random.Generator) -> dict[str, Any]:
    """Parameters of a random config of any drafter of the space, with a random mask where that drafts under one.

    Each threshold is off half of the time and anywhere on its grid otherwise.
    """
    from search.study.space import GAMMA, THRESHOLDS, random_params

    params = random_params(space, rng)
    if GAMMA in params:
        params |= zip(space.bit_names, random_bits(space, rng), strict=True)
    for name in THRESHOLDS:
        if name in params and rng.random() < 0.5:
            params[name] = 0.0
    return params


def random_bits(space: SearchSpace, rng: np.random.Generator) -> list[bool]:
    """Of masks a third each: bits at random, more skipped towards the end, an early exit with a few bits flipped."""
    from search.study.space import layer_of

    depth = np.array([layer_of(name) for name in space.bit_names]) / space.num_layers
    kind = int(rng.integers(3))
    if kind == 0:
        skipped = rng.random(len(depth)) < rng.uniform(*_SHARES)
    elif kind == 1:
        skipped = rng.random(len(depth)) < depth
    else:
        skipped = (depth >= rng.uniform(0.15, 0.8)) ^ (rng.random(len(depth)) < 0.08)
    return [bool(one) for one in skipped]


if __name__ == "__main__":
    raise SystemExit(main())
