"""The tables of results.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

_WORDS = {"sqlite": "SQLite", "postgres": "PostgreSQL", "proxy": "proxy → PostgreSQL"}


def make_tables(results: Mapping[str, Any]) -> str:
    """Markdown: speed by storage and number of workers, and search quality."""
    lines = [
        f"`{results['command']}` on {results['cpu']}: {results['cores']} core(s) for workers, server and proxy",
        f"together, load average {results['load_average']:.1f} at the end; {results['parameters']} parameters a trial.",
        "",
        "| storage | trial measures | workers | trials/h | of the ideal | storage s/trial | proposing s/trial |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {_WORDS[one['storage']]} | {one['trial_seconds']:g} s | {one['workers']} | {one['trials_per_hour']:.0f} "
        f"| {one['efficiency']:.0%} | {one['storage_s_per_trial']:.2f} | {one['proposing_s_per_trial']:.2f} |"
        for one in results["speed"]
    ]
    lines += ["", "| workers | trials | leader's true speed, share of the optimum | studies |", "|---:|---:|---:|---:|"]
    lines += [
        f"| {one['workers']} | {one['trials']} | {statistics.fmean(one['share_of_optimum']):.3f} "
        f"({min(one['share_of_optimum']):.3f}–{max(one['share_of_optimum']):.3f}) | {len(one['share_of_optimum'])} |"
        for one in results["quality"]
    ]
    return "\n".join(lines) + "\n"
