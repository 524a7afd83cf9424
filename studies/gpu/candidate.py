"""The config that the bench step measures: `python -m studies.gpu.candidate --help`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerskip.command_line.cli import OneLineParser, run_command
from layerskip.config.decode_config import DecodeConfig

PROG = "studies.gpu.candidate"


def bench_config(best: DecodeConfig, summary: Mapping[str, Any]) -> DecodeConfig:
    """The exported config; where the search says "do not speculate", its best candidate on held-out prompts.

    A losing setting is worth a row too. Without any candidate that was lossless, the exported config all the same.
    """
    able = [one for one in summary["candidates"] if one["speedup"] is not None and not one["excluded"]]
    if best.speculates or not able:
        return best
    leader = max(able, key=lambda one: float(one["speedup"]))
    config = DecodeConfig.model_validate_json(json.dumps(leader["config"]))
    return config.model_copy(update={"provenance": best.provenance})


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Write the config that the bench measures: the exported one, or, where the search says not to "
        "speculate, its best candidate.",
    )
    parser.add_argument("study", type=Path, help="study folder with best.json and summary.json")
    parser.add_argument("--out", type=Path, required=True, help="the config; beside best.json, for its model's sake")
    given = parser.parse_args(argv)

    def write() -> int:
        summary = json.loads((given.study / "summary.json").read_text(encoding="utf-8"))
        bench_config(DecodeConfig.load(given.study / "best.json"), summary).save(given.out)
        return 0

    return run_command(PROG, write)


if __name__ == "__main__":
    raise SystemExit(main())
