"""Train the proving ground's models and read their drafts: `python -m studies.proving.make --help`."""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from layerskip.command_line.cli import OneLineParser, quiet_libraries, run_command
from layerskip.config.decode_config import write_atomically
from studies.demo.make_prompts import write_prompts
from studies.demo.training import Run, train
from studies.proving.readings import NUM_REPORTING, NUM_TUNING, take_readings
from studies.proving.recipes import RECIPES, ModelRecipe
from studies.proving.texts import Text

log = logging.getLogger("proving")
PROG = "studies.proving.make"
STOPPED = 130
HERE = Path(__file__).resolve().parent
READINGS = HERE / "readings"
WORK = HERE / ".work"
SUFFIX = ".npz.xz"
_CHECKPOINT = "checkpoint.pt"
STUDY = """\
# One of the proving ground's models, to be timed: `python -m studies.proving.make --only NAME --study DIR` wrote it.
model = "./model"
prompts = "./tuning.jsonl"
held_out = "./held_out.jsonl"
device = "cpu"
dtype = "float32"
num_threads = 1
max_new_tokens = 32
num_confirm_prompts = 104
prompts_per_trial = 4
engine = "fused"
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Train every model of the recipes on one core, minutes each, and read its drafts under every mask. "
        "What is there already is left alone; stop it at any moment, the same command goes on. Exit codes: 0 done, 2 "
        "bad input, 130 stopped.",
    )
    add = parser.add_argument
    add("--only", action="append", choices=sorted(RECIPES), metavar="NAME", help="this model alone; may be repeated")
    add("--out", type=Path, default=READINGS, help="folder of the tables [studies/proving/readings]")
    add("--work-dir", type=Path, default=WORK, help="weights and tokenizers, not committed [studies/proving/.work]")
    add(
        "--study",
        type=Path,
        metavar="DIR",
        help="instead of reading, write DIR/NAME: the model with its prompts as a "
        "study, for `python -m search.compare --study DIR/NAME` to time",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train and read; returns the exit code."""
    args = parse(argv)
    return run_command(PROG, lambda: make(args))


def make(args: argparse.Namespace) -> int:
    """What `main` does. Raises: ValueError or OSError in one line for bad input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("demo").setLevel(logging.WARNING)
    quiet_libraries()
    torch.set_num_threads(1)
    for name in args.only or RECIPES:
        file = args.out / f"{name}{SUFFIX}" if args.study is None else args.study / name / "study.toml"
        write = make_table if args.study is None else make_study
        if file.exists():
            log.info("%s: is there", name)
        elif not write(RECIPES[name], file, args.work_dir):
            log.info("%s: stopped; the same command goes on", name)
            return STOPPED
    return 0


def make_table(recipe: ModelRecipe, file: Path, work_dir: Path) -> bool:
    """One model's table; False if a signal stopped its training."""
    folder = work_dir / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = Text(recipe.text, work_dir)
    run = trained(recipe, text, folder / _CHECKPOINT)
    if run is None:
        return False
    facts = {
        "recipe": recipe.name,
        "learns": recipe.learns,
        "text": recipe.text,
        "seed": recipe.seed,
        "text_fingerprint": text.fingerprint,
        "training_tokens": run.step * run.settings.size.window * run.settings.size.batch,
        "training_s": round(run.seconds, 1),
        "training_loss": round(run.recent_loss, 4),
        "num_parameters": sum(one.numel() for one in run.model.parameters()),
    }
    table = take_readings(run.model, text, recipe, facts, told(recipe.name))
    table.save(file)
    log.info(
        "%s: %d masks on %d texts, %d bytes", recipe.name, len(table.masks), len(table.prompts), file.stat().st_size
    )
    return True


def make_study(recipe: ModelRecipe, file: Path, work_dir: Path) -> bool:
    """One model as a study's folder, study.toml last; False if a signal stopped its training."""
    (work_dir / recipe.name).mkdir(parents=True, exist_ok=True)
    text = Text(recipe.text, work_dir)
    run = trained(recipe, text, work_dir / recipe.name / _CHECKPOINT)
    if run is None:
        return False
    folder = file.parent
    folder.mkdir(parents=True, exist_ok=True)
    run.model.save_pretrained(folder / "model")
    text.tokenizer.save_pretrained(folder / "model")
    parts = {"tuning": (text.documents.tuning, NUM_TUNING), "held_out": (text.documents.reporting, NUM_REPORTING)}
    for name, (documents, num) in parts.items():
        windows = itertools.islice(text.prompts(documents), num)
        write_prompts(folder / f"{name}.jsonl", ({"prompt": text.tokenizer.decode(ids)} for ids in windows))
    write_atomically(file, STUDY)
    return True


def trained(recipe: ModelRecipe, text: Text, checkpoint: Path) -> Run | None:
    """The model's run at its end, from its checkpoint as far as that goes; None if a signal stopped it."""
    run = Run(recipe.settings, text.stream, text.fingerprint, int(text.tokenizer.eos_token_id))
    if checkpoint.exists():
        run.load(checkpoint)
    log.info("%s: %d layers, %s, %s text, step %d", recipe.name, recipe.layers, recipe.learns, recipe.text, run.step)
    if not train(run, checkpoint):
        return None
    log.info("%s: loss %.3f after %d steps, %.0f s", recipe.name, run.recent_loss, run.step, run.seconds)
    model: LlamaForCausalLM = run.model
    model.eval()
    return run


def told(name: str, every_s: float = 30.0) -> Callable[[], None]:
    """Logs now and then how many masks have been read."""
    state = [0, time.monotonic()]

    def tell() -> None:
        state[0] += 1
        if time.monotonic() - state[1] > every_s:
            state[1] = time.monotonic()
            log.info("%s: %d masks read", name, state[0])

    return tell


if __name__ == "__main__":
    raise SystemExit(main())
