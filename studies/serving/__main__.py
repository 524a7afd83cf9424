"""python -m studies.serving: what a client sees of our server and of others, on this machine, in turns.

The same prompts are sent to all of them, streamed, one request after the other and several at once, answers all of the
same length, each turn after some that are not measured. All serve the same weights in the same number format, on as
many threads as the config was tuned with. vLLM needs an environment of its own, whose Python is named with --vllm; any
other server that runs already and speaks the OpenAI protocol is named with --server NAME=URL.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerskip import DecodeConfig
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.model import resolve_model_path
from layerskip.prompts import Prompt, read_prompts
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say, spread, write_json
from studies.serving.requests import Endpoint, Load, load
from studies.serving.servers import OURS, PLAIN, VLLM, VLLM_NGRAMS, Subject, running

PROG = "studies.serving"
_NUM_BEFORE = 16
"""Tokens of answers that are not measured, as many at once as then are, before each turn."""


def measure(
    servers: Sequence[Endpoint], prompts: Sequence[Prompt], at_once: int, options: Mapping[str, Any], repeats: int
) -> list[dict[str, Any]]:
    """A record for each server, which take turns within a repeat; who begins goes round, and each turn begins with
    requests that are not measured. The same answers as the first one's are counted in the last repeat."""
    found: dict[str, list[Load]] = {one.name: [] for one in servers}
    for repeat in range(repeats):
        for turn in range(len(servers)):
            server = servers[(repeat + turn) % len(servers)]
            # Who has waited while others computed is slow at first.
            load(server, prompts[:at_once], at_once, {**options, "max_tokens": _NUM_BEFORE})
            found[server.name].append(load(server, prompts, at_once, options))
    texts = {name: [one.text for one in loads[-1].answers] for name, loads in found.items()}
    first = texts[servers[0].name]
    return [
        {
            "server": name,
            "at_once": at_once,
            "repeats": [one.facts() for one in loads],
            "num_tokens": sorted({answer.num_tokens for one in loads for answer in one.answers}),
            "num_prompt_tokens": sum(answer.num_prompt_tokens for answer in loads[-1].answers),
            "num_same": sum(one == other for one, other in zip(texts[name], first, strict=True)),
        }
        for name, loads in found.items()
    ]


def table(record: Mapping[str, Any]) -> str:
    """A line for each number of requests at once and each server; medians over the repeats, with the lowest and the
    highest of them."""
    rows = []
    for regime in record["regimes"]:
        for cell in regime["cells"]:
            base = next(one for one in regime["cells"] if one["at_once"] == cell["at_once"])
            rates = [one["tokens_per_s"] for one in cell["repeats"]]
            ours = [one["tokens_per_s"] for one in base["repeats"]]
            times = "" if cell is base else spread([own / other for own, other in zip(ours, rates, strict=True)], 2)
            waits = [spread([1000 * one[name] for one in cell["repeats"]], 0) for name in ("first_s", "token_s")]
            same = f"{cell['num_same']} of {regime['num_prompts'][str(cell['at_once'])]}"
            same = same if regime["temperature"] == 0.0 else ""
            name = f"{_regime(regime['temperature'])}, {cell['at_once']} at once: {cell['server']}"
            rows.append([name, spread(rates, 1), times, *waits, same])
    first = record["regimes"][0]["cells"][0]["server"]
    header = ("", "tokens/s", f"{first} over it", "to the first token, ms", "a token, ms", f"texts of {first}")
    return markdown_table(header, rows)


def _regime(temperature: float) -> str:
    return "greedy" if temperature == 0.0 else f"at {temperature:g}"


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    demo = STUDIES / "demo"
    parser.add_argument("--config", type=Path, default=demo / "best.json", help="what ours decodes with")
    parser.add_argument("--prompts", type=Path, help="default: held_out.jsonl beside the config")
    parser.add_argument("--servers", nargs="*", default=[OURS, PLAIN], choices=[OURS, PLAIN, VLLM, VLLM_NGRAMS])
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of the environment that vLLM is installed in")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL", help="another one that runs")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=16, help="at least, and twice as many as there are at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, requests=1, new_tokens=2, repeats=1)
    if min(arguments.at_once) < 1:
        raise ValueError(f"--at-once: must be at least 1, got {min(arguments.at_once)}")
    check_out(arguments.out)
    others = dict(_named(one) for one in arguments.server)
    if not arguments.servers and not others:
        raise ValueError("--servers: there is nobody to ask, name one of them, or one that runs with --server")
    names = [*arguments.servers, *(_named(one)[0] for one in arguments.server)]
    if (twice := next((one for one in names if names.count(one) > 1), None)) is not None:
        raise ValueError(f"--servers: must have a name each, {twice!r} is there twice")
    if arguments.vllm is not None and not arguments.vllm.is_file():
        raise ValueError(f"--vllm: must be a Python, no such file: {arguments.vllm}")
    prompts = read_prompts(arguments.prompts or arguments.config.parent / "held_out.jsonl")
    most = max(arguments.at_once)
    config = DecodeConfig.load(arguments.config)
    subject = _subject(arguments, config)
    commands = {name: _shown(subject.command(name, 0, most)) for name in arguments.servers}
    record = facts(arguments.command) | {"commands": commands, "new_tokens": arguments.new_tokens, "regimes": []}
    with tempfile.TemporaryDirectory() as logs, running(subject, arguments.servers, most, Path(logs)) as own:
        servers = own + [Endpoint.at(name, url) for name, url in others.items()]
        for temperature in arguments.temperatures:
            options = {"temperature": temperature, "max_tokens": arguments.new_tokens, "ignore_eos": True}
            cells, counts = list[dict[str, Any]](), dict[str, int]()
            record["regimes"].append({"temperature": temperature, "num_prompts": counts, "cells": cells})
            for at_once in arguments.at_once:
                asked = prompts[: max(arguments.requests, 2 * at_once)]
                counts[str(at_once)] = len(asked)
                cells += measure(servers, asked, at_once, options, arguments.repeats)
                if arguments.out is not None:  # should a server fail later
                    write_json(arguments.out, record)
                say(f"{_regime(temperature)}, {at_once} at once: measured")
    finish(arguments.out, record, table(record))
    return 0


def _subject(arguments: argparse.Namespace, config: DecodeConfig) -> Subject:
    provenance = config.provenance
    if provenance is None or provenance.num_threads is None:
        raise ValueError(f"--config: must name its model and threads, {arguments.config} does not")
    if provenance.quantization is not None:
        raise ValueError(f"--config: must be of whole weights, which all servers have, got {provenance.quantization}")
    model = resolve_model_path(provenance.model, arguments.config)
    return Subject(arguments.config, model, provenance.dtype, provenance.num_threads, arguments.vllm)


def _named(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not found or not name:
        raise ValueError(f"--server: must be NAME=URL, got {text!r}")
    return name, url.rstrip("/")


def _shown(command: Sequence[str]) -> str:
    """Without this machine's folders."""
    return " ".join(Path(one).name if one.startswith("/") else one for one in command)


if __name__ == "__main__":
    raise SystemExit(main())
