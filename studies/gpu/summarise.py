"""The GPU study's results in one page: `python -m studies.gpu.summarise FOLDER --out results.md`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerskip.cli import OneLineParser, run_command
from layerskip.config import write_atomically

PROG = "studies.gpu.summarise"
NOT_RUN = "Not run."
MODELS = ("layerskip", "stock")


def page(folder: Path) -> str:
    """Markdown of all results in `folder`; a part whose file is missing says that it was not run.

    Raises: ValueError naming the file that is not what its step writes.
    """
    parts: list[tuple[str, str, Callable[[Any], str]]] = [
        ("Machine", "environment.json", machine),
        *((f"Training: {name}", f"{name}-training.json", training) for name in MODELS),
        *((f"Search: {name}", f"{name}-summary.json", search) for name in MODELS),
        ("Comparison of strategies", "compare.json", comparison),
        ("Bench", "bench.json", bench),
        ("Replay audit", "audit.json", audit),
    ]
    lines = ["# GPU study", "", "Written by `studies/gpu/run_all.sh` from the JSON files beside this page.", ""]
    for title, name, write in parts:
        lines += [f"## {title}", "", _part(folder / name, write), ""]
    tests = folder / "gpu-tests.txt"
    lines += ["## Tests marked gpu", "", _last_line(tests) if tests.is_file() else NOT_RUN, ""]
    lines += ["## Steps", "", steps(folder / "steps.tsv"), ""]
    return "\n".join(lines)


def _part(file: Path, write: Callable[[Any], str]) -> str:
    if not file.is_file():
        return NOT_RUN
    try:
        return write(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: not what its step writes ({type(error).__name__}: {error})") from None


def machine(facts: Mapping[str, Any]) -> str:
    """Device and versions."""
    memory = f", {facts['memory_gib']} GiB" if "memory_gib" in facts else ""
    packages = ", ".join(f"{name} {found}" for name, found in facts["packages"].items())
    return f"{facts['device']}{memory}; {facts['num_cpus']} CPUs; Python {facts['python']}; {packages}."


def training(facts: Mapping[str, Any]) -> str:
    """What was trained, how fast, and how well it reads text it has not seen."""
    return (
        f"{facts['layers']} layers of width {facts['hidden_size']}, {facts['num_parameters']} parameters: "
        f"{facts['steps']} steps, {facts['training_tokens']} tokens ({facts['epochs']} passes) in "
        f"{facts['training_minutes']} minutes, {facts['training_tokens_per_s']} tokens/s. Loss, nats a token: training "
        f"{facts['training_loss']}, held out {facts['held_out_loss']}, tuning modules {facts['tuning_loss']}."
    )


def search(facts: Mapping[str, Any]) -> str:
    """Verdict, confirmed number, and how good the predictions were."""
    noise = facts["noise"]["plain_against_plain_sigma"]
    lines = [f"**{facts['verdict']}**" if facts["reason"] is None else facts["reason"]]
    lines += [confirmed(facts["confirmed"], facts["config"])] if facts["confirmed"] else []
    lines += [
        f"- Tuning prompts: plain {facts['reference']['plain_tokens_per_s']:.1f} tok/s, "
        f"A/A noise {_percent(noise)} a pair.",
        f"- {facts['trials']['counted']} trials; {facts['seconds']['total']:.0f} s in all "
        f"({', '.join(f'{name} {value:.0f}' for name, value in facts['seconds'].items() if name != 'total')}).",
    ]
    prediction, replay = facts.get("prediction"), facts.get("replay")
    if prediction:
        rank = prediction["spearman"]
        lines.append(
            f"- Predictions of {prediction['num_trials']} trials: median error "
            f"{_percent(prediction['median_abs_error'])}, rank correlation {'-' if rank is None else f'{rank:.2f}'}."
        )
    if replay:
        lines.append(
            f"- Replayed counts exact in {_percent(replay['exact_share'])} of {replay['num_settings']} settings."
        )
    lines += [f"- NOT LOSSLESS: {one}" for one in facts["not_lossless"]]
    return "\n".join(lines)


def confirmed(numbers: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The number that may be quoted: held-out prompts, interval over prompts."""
    setting = (
        f"`{config['skip_mask']}`, gamma {config['gamma']}, draft_threshold {config['draft_threshold']:g}, "
        f"target_threshold {config['target_threshold']:g}"
    )
    return (
        f"- {setting if config['gamma'] else 'The best candidate'}: on {numbers['num_prompts']} held-out prompts x "
        f"{numbers['num_repeats']} {numbers['speedup']:.3f}x "
        f"({numbers['speedup_ci_low']:.3f}..{numbers['speedup_ci_high']:.3f}), {numbers['tokens_per_s']:.1f} against "
        f"{numbers['plain_tokens_per_s']:.1f} tok/s; identical outputs {numbers['num_identical']}, ties "
        f"{numbers['num_ties']}."
    )


def comparison(facts: Mapping[str, Any]) -> str:
    """Strategies at their last checkpoint, fastest first."""
    rows = [(name, one["checkpoints"][-1]) for name, one in facts["strategies"].items()]
    rows.sort(key=lambda row: -row[1]["speedup"])
    lines = ["| strategy | trials | confirmed speedup (95 % over seeds) |", "|---|---:|---|"]
    for name, row in rows:
        low, high = row["speedup_ci_low"], row["speedup_ci_high"]
        interval = "-" if low is None else f"{low:.3f}..{high:.3f}"
        lines.append(f"| {name} | {row['trials']} | {row['speedup']:.3f} ({interval}) |")
    return "\n".join(lines)


def bench(facts: Mapping[str, Any]) -> str:
    """Ways to decode, with intervals and identical outputs."""
    lines = ["| way to decode | tokens/s (95 %) | identical outputs |", "|---|---|---|"]
    for row in facts["rows"]:
        speed = f"not run: {row['reason']}" if row.get("reason") else "-"
        if row["tokens_per_s"] is not None:
            low, high = row.get("ci_low"), row.get("ci_high")
            speed = f"{row['tokens_per_s']:.1f}" + ("" if low is None or high is None else f" ({low:.1f}..{high:.1f})")
        lines.append(f"| {row['name']} | {speed} | {row['identical']} of {row['num_outputs']} |")
    of_steps, target = facts["steps"], facts["steps"]["target"][0]
    overhead = ", ".join(f"{name} {_percent(share)}" for name, share in of_steps["loop_overhead"].items())
    lines += [
        "",
        f"One target token: {1000 * target['seconds']:.2f} ms, {_percent(target['bandwidth_share'])} of the measured "
        f"copy bandwidth of {of_steps['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s. Loop overhead: {overhead}. Engine "
        f"{facts['facts']['engine']} ({facts['facts']['engine_reason']}).",
    ]
    return "\n".join(lines)


def audit(facts: Mapping[str, Any]) -> str:
    """Replayed counts against those of really decoding."""
    lines = [
        f"- {name}: exact in {_percent(one['exact_share'])} of {one['num_settings']} random settings, median error "
        f"{_percent(one['median_error'])}, 95th percentile {_percent(one['p95_error'])}."
        for name, one in facts["checks"].items()
        if one
    ]
    return "\n".join([*lines, *(f"- NOT LOSSLESS: {one}" for one in facts["violations"])]) or "Nothing to compare."


def steps(file: Path) -> str:
    """Seconds of every attempt at a step."""
    if not file.is_file():
        return NOT_RUN
    lines = ["| step | seconds | limit | exit code |", "|---|---:|---:|---:|"]
    lines += [f"| {' | '.join(row.split(chr(9)))} |" for row in file.read_text(encoding="utf-8").splitlines()]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").strip().splitlines()
    return f"`{lines[-1]}`" if lines else NOT_RUN


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog=f"python -m {PROG}", description="Write the results of the GPU study as one page.")
    parser.add_argument("folder", type=Path, help="where the steps left their files")
    parser.add_argument("--out", type=Path, required=True, help="the page, markdown")
    given = parser.parse_args(argv)

    def write() -> int:
        if not given.folder.is_dir():
            raise ValueError(f"folder: no such folder: {given.folder}")
        write_atomically(given.out, page(given.folder))
        return 0

    return run_command(PROG, write)


if __name__ == "__main__":
    raise SystemExit(main())
