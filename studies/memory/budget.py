"""python -m studies.memory.budget: minutes by phase and peak memory of a search within a budget, of a model made here.

A model with random weights, by default of Qwen2-0.5B's shape in bfloat16, with the demo's tokenizer and thirty of its
prompts; then the real `search.run --budget`, in a process of its own and with a study in a temporary folder.
Writes budget.json; exit code 1 if the run takes longer than its budget, or more memory than twice the weights and one
copy of the layers, which an engine may keep, beside what the program takes to search a model of almost no weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from layerskip.command_line.cli import OneLineParser, check_folders, check_least, run_command
from studies.memory.course import FOLDER, check_proc, peak_mib
from studies.memory.searching import events_of
from studies.results import command_of, facts, markdown_table, say, write_json
from studies.scaling.servers import ROOT

PROG = "studies.memory.budget"
_DEMO = ROOT / "studies" / "demo"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUM_PROMPTS = 30
_MIB = 1 << 20
_TOLERANCE = 1.05
_LEAST_VOCABULARY = 4096
"""Of the demo's tokenizer."""


@dataclass(frozen=True)
class Weights:
    """Bytes of the model that was made."""

    all: int
    layers: int

    @property
    def limit(self) -> int:
        """What the run may take at its peak, beside the program itself."""
        return 2 * self.all + self.layers


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=10.0, help="minutes (default: %(default)g)")
    shape = {"layers": 24, "hidden": 896, "heads": 14, "kv-heads": 2, "mlp": 4864, "vocabulary": 151_936}
    for name, number in (shape | {"max-new-tokens": 64, "trials": 200, "threads": 1}).items():
        parser.add_argument(f"--{name}", type=int, default=number, metavar="N", help="default: %(default)d")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for budget.json")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments, sys.argv[1:] if argv is None else argv))


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    check_proc()
    check_least(
        arguments,
        layers=2,
        hidden=8,
        heads=1,
        kv_heads=1,
        mlp=8,
        vocabulary=_LEAST_VOCABULARY,
        max_new_tokens=10,
        trials=1,
    )
    if not arguments.budget > 0:
        raise ValueError(f"--budget: must be above 0, got {arguments.budget}")
    check_folders(arguments, "out")
    with tempfile.TemporaryDirectory() as tiny, tempfile.TemporaryDirectory() as name:
        say("a model with almost no weights: what the program itself takes")
        program = program_mib(Path(tiny), arguments)
        folder = Path(name)
        weights = make_model(folder / "model", arguments)
        say(f"{weights.all / _MIB:.0f} MiB of weights, {weights.layers / _MIB:.0f} MiB of them the layers'")
        start = time.monotonic()
        plan, peak = search(folder, arguments)
        total_s = time.monotonic() - start
        summary = json.loads((folder / "study" / "summary.json").read_text(encoding="utf-8"))
    record = facts(command_of(PROG, argv))
    record |= {"num_trials": summary["trials"]["counted"], "verdict": summary["verdict"]}
    record |= {"budget": summary["budget"], "seconds": summary["seconds"], "total_s": round(total_s, 1)}
    record |= _memory(weights, peak, program)
    for line in _told(record, plan):
        say(line)
    write_json(arguments.out / "budget.json", record)
    return 0 if record["is_within_memory"] and total_s <= _TOLERANCE * 60 * arguments.budget else 1


def make_model(folder: Path, arguments: argparse.Namespace) -> Weights:
    """A random Qwen2 with the demo's tokenizer; no token ends a text."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.mlp,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(_DTYPES[arguments.dtype]).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(_DEMO / "model").save_pretrained(folder)
    sizes = [sum(one.nbytes for one in part.parameters()) for part in (model, model.model.layers)]
    return Weights(*sizes)


def search(folder: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Runs it, telling which phase it has reached; returns what it planned and MiB at its peak.

    Raises: CommandError if it fails.
    """
    values = {
        "--model": folder / "model",
        "--prompts": folder / "prompts.jsonl",
        "--study": folder / "study",
        "--device": "cpu",
        "--dtype": arguments.dtype,
        "--trials": arguments.trials,
        "--max-new-tokens": arguments.max_new_tokens,
        "--threads": arguments.threads,
        "--budget": arguments.budget,
    }
    lines = (_DEMO / "tuning.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:_NUM_PROMPTS]), encoding="utf-8")
    flags = [str(word) for pair in values.items() for word in pair]
    command = [sys.executable, "-m", "search.run", "--json", "--force", *flags]
    plan: dict[str, Any] = {}
    peak = 0.0
    start = time.monotonic()
    with closing(events_of(command, OMP_NUM_THREADS=str(arguments.threads))) as events:
        for event, pid in events:
            peak = max(peak, peak_mib(pid))
            plan = event if event["event"] == "plan" else plan
            if event["event"] in ("plan", "reference", "outlook", "search", "result"):
                say(f"{time.monotonic() - start:6.0f} s: {event['event']}")
    return plan, peak


def program_mib(folder: Path, arguments: argparse.Namespace) -> float:
    """What the program itself takes: the peak of a search of a model with almost no weights, on the same prompts."""
    tiny = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "mlp": 64, "vocabulary": _LEAST_VOCABULARY}
    numbers = tiny | {"trials": 4, "budget": 5.0}
    arguments = argparse.Namespace(**(vars(arguments) | numbers))
    make_model(folder / "model", arguments)
    return search(folder, arguments)[1]


def _memory(weights: Weights, peak: float, program: float) -> dict[str, Any]:
    """Both in MiB, against the weights."""
    limit = program + weights.limit / _MIB
    return {
        "weights_mib": round(weights.all / _MIB, 1),
        "layers_mib": round(weights.layers / _MIB, 1),
        "program_mib": round(program, 1),
        "peak_mib": round(peak, 1),
        "limit_mib": round(limit, 1),
        "is_within_memory": peak <= limit,
    }


def _told(record: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    columns = (plan["expected_without_budget_s"], plan["expected_s"], record["seconds"])
    rows = [[name, *(f"{one.get(name, 0.0) / 60:.1f}" for one in columns)] for name in plan["expected_s"]]
    table = markdown_table(("phase", "minutes without a budget", "planned", "taken"), rows)
    cuts = ", ".join(record["budget"]["cuts"]) or "nothing was cut"
    return [
        *table.splitlines(),
        f"{record['total_s'] / 60:.1f} minutes in all, loading included; {record['num_trials']} trials; {cuts}",
        f"peak {record['peak_mib']:.0f} MiB, of which the program itself {record['program_mib']:.0f}; at most "
        f"{record['limit_mib']:.0f}: it, twice the weights ({record['weights_mib']:.0f}) and one copy of the layers "
        f"({record['layers_mib']:.0f})",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
