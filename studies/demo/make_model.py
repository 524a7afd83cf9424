"""Train, evaluate and export the demo model: `python -m studies.demo.make_model --help`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from layerskip.command_line.cli import OneLineParser, quiet_libraries, run_command
from layerskip.huggingface.loading import resolve_device
from studies.demo import corpus, export
from studies.demo.recipe import RECIPES
from studies.demo.training import SIZES, Run, Settings, Size, progress_line, train

log = logging.getLogger("demo")
PROG = "studies.demo.make_model"
STOPPED = 130
HERE = Path(__file__).resolve().parent
SHIPPED = HERE / "model"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with its default folders filled in."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Train the demo model on the standard library's sources, write its prompts, and export both. "
        "Stop it at any moment; the same command resumes from the last checkpoint. Exit codes: 0 done, 2 bad input, "
        "130 stopped.",
    )
    add = parser.add_argument
    add("--recipe", choices=sorted(RECIPES), default="layerskip", help="how training treats the layers")
    add("--dropout-max", type=float, help="override the recipe: drop probability of the last layer")
    add("--exit-scale", type=float, help="override the recipe: weight of the early-exit loss")
    add("--first-exit", type=int, help="override the size: earliest exit that takes the loss, in layers")
    add("--exit-power", type=float, help="override the recipe: how steeply the exit's weight rises with depth")
    add("--late-from", type=float, help="override the recipe: share of training after which the exits move forward")
    add("--late-last-exit", type=int, help="override the size: last exit that then takes the loss, in layers")
    add("--size", choices=sorted(SIZES), default="demo", help="row of the size table")
    add("--batch", type=int, help="override the size: windows a step")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes",
        type=float,
        help="training time, reading, export and checkpoints apart; learning rate and recipe follow the share of it "
        "that is spent [the size's: 70 for demo, 4 for 1b]",
    )
    budget.add_argument("--seconds", type=float, help="the same in seconds")
    budget.add_argument("--steps", type=int, help="training steps instead; on resuming, a new end")
    budget.add_argument("--tokens", type=int, help="training tokens, likewise")
    add("--decay-share", type=float, default=0.5, help="share of the budget over which the learning rate falls to zero")
    add("--seed", type=int, default=0, help="seed of weights, batches and dropped layers")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--device", default="cpu", help="torch device: cpu, cuda, cuda:N")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="autocast type; weights train in float32")
    add("--corpus", type=Path, help="folder of Python sources to train on [the running interpreter's library]")
    add("--work-dir", type=Path, help="checkpoints; resumed from when not empty [studies/demo/.work/SIZE-RECIPE]")
    add(
        "--no-checkpoints",
        action="store_true",
        help="write none, resume from none: a large model's take longer than they are worth in minutes of training",
    )
    add(
        "--out",
        type=Path,
        help="folder to export to, the prompts beside it [studies/demo/model for the demo size and the layerskip "
        "recipe, else WORK_DIR/model]",
    )
    add("--export-only", action="store_true", help="export the checkpoint as it stands, without training")
    args = parser.parse_args(argv)
    if args.work_dir is None:
        args.work_dir = HERE / ".work" / f"{args.size}-{args.recipe}"
    if args.out is None:
        args.out = SHIPPED if (args.size, args.recipe) == ("demo", "layerskip") else args.work_dir / "model"
    return args


def settings_from(args: argparse.Namespace) -> Settings:
    """Validated settings of a command line. Raises: ValueError naming the flag or field, the rule and the value."""
    size = SIZES[args.size]
    if args.batch is not None:
        size = dataclasses.replace(size, batch=args.batch)
    for name in ("minutes", "seconds", "steps", "tokens", "threads"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name}: must be above 0, got {value}")
    recipe = RECIPES[args.recipe]
    if recipe.exit_scale > 0:
        recipe = dataclasses.replace(recipe, first_exit=size.exits[0], late_last_exit=size.exits[1])
    overrides = {
        name: getattr(args, name)
        for name in ("dropout_max", "exit_scale", "first_exit", "exit_power", "late_from", "late_last_exit")
        if getattr(args, name) is not None
    }
    recipe = dataclasses.replace(recipe, **overrides)
    num_steps = args.steps if args.tokens is None else max(args.tokens // (size.window * size.batch), 1)
    minutes = args.seconds / 60 if args.seconds is not None else args.minutes
    return Settings(
        size,
        recipe,
        seed=args.seed,
        num_steps=num_steps,
        minutes=size.minutes if minutes is None else minutes,
        decay_share=args.decay_share,
        device=str(resolve_device(args.device)),
        dtype=getattr(torch, args.dtype),
    )


def load_tokenizer(work_dir: Path, split: corpus.Split, size: Size) -> PreTrainedTokenizerFast:
    """The run's tokenizer: the shipped one, or one trained once and then read back, so that no resume shifts an id."""
    if not size.own_tokenizer:
        return PreTrainedTokenizerFast.from_pretrained(SHIPPED)
    folder = work_dir / "tokenizer"
    if not folder.exists():
        corpus.train_tokenizer(split.train, size.vocab).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Train (or resume), write the prompts, export; returns the exit code."""
    args = parse(argv)
    return run_command(PROG, lambda: make(args))


def make(args: argparse.Namespace) -> int:
    """What `main` does. Raises: ValueError or OSError in one line for bad input."""
    settings = settings_from(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    quiet_libraries()
    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    split = corpus.split_modules(corpus.read_modules(args.corpus))
    tokenizer = load_tokenizer(args.work_dir, split, settings.size)
    stream = corpus.token_stream(tokenizer, split.train)
    log.info("%d training modules, %d tokens, recipe %s", len(split.train), len(stream), settings.recipe)
    run = Run(settings, stream, split.fingerprint(), int(tokenizer.eos_token_id))
    checkpoint = None if args.no_checkpoints else args.work_dir / "checkpoint.pt"
    if args.export_only and (checkpoint is None or not checkpoint.exists()):
        raise ValueError(f"--export-only: needs a checkpoint in {args.work_dir}, found none")
    if checkpoint is not None and checkpoint.exists():
        run.load(checkpoint)
        log.info("resumed: %s", progress_line(run))
    if not args.export_only and not train(run, checkpoint):
        log.info("stopped: %s%s", progress_line(run), "" if checkpoint is None else "; the same command resumes")
        return STOPPED
    facts = export.training_facts(run, len(stream))
    export.export(run.model, tokenizer, split, facts, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
