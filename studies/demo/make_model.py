"""Train, evaluate and export the demo model: `python -m studies.demo.make_model --help`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from studies.demo import corpus, export
from studies.demo.recipe import RECIPES
from studies.demo.training import SIZES, Run, Settings, train

log = logging.getLogger("demo")
HERE = Path(__file__).resolve().parent


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with its default folders filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.demo.make_model",
        description="Train the demo model on the standard library's sources, write its prompts, and export both. "
        "Stop it at any moment; the same command resumes from the last checkpoint.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--recipe", choices=sorted(RECIPES), default="layerskip", help="how training treats the layers")
    add("--dropout-max", type=float, help="override the recipe: drop probability of the last layer")
    add("--exit-scale", type=float, help="override the recipe: weight of the early-exit loss")
    add("--first-exit", type=int, help="override the recipe: earliest exit that takes the loss, in layers")
    add("--exit-power", type=float, help="override the recipe: how steeply the exit's weight rises with depth")
    add("--late-from", type=float, help="override the recipe: share of training after which the exits move forward")
    add("--late-last-exit", type=int, help="override the recipe: last exit that then takes the loss, in layers")
    add("--size", choices=sorted(SIZES), default="demo", help="row of the size table")
    add("--batch", type=int, help="override the size: windows a step")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=70.0, help="training time to fit the number of steps to")
    budget.add_argument("--steps", type=int, help="training steps, instead of --minutes; on resuming, a new end")
    budget.add_argument("--tokens", type=int, help="training tokens, likewise")
    add("--decay-share", type=float, default=0.5, help="share of the steps over which the learning rate falls to zero")
    add("--seed", type=int, default=0, help="seed of weights, batches and dropped layers")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--device", default="cpu", help="torch device")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="autocast type; weights train in float32")
    add("--work-dir", type=Path, help="checkpoints; resumed from when not empty [studies/demo/.work/SIZE-RECIPE]")
    add(
        "--out",
        type=Path,
        help="folder to export to, the prompts beside it [studies/demo/model for the demo size and the layerskip "
        "recipe, else WORK_DIR/model]",
    )
    add("--export-only", action="store_true", help="export the checkpoint as it stands, without training")
    add("--evaluate", action="store_true", help="also rank draft masks on the tuning prompts: about a minute")
    args = parser.parse_args(argv)
    if args.work_dir is None:
        args.work_dir = HERE / ".work" / f"{args.size}-{args.recipe}"
    if args.out is None:
        args.out = HERE / "model" if (args.size, args.recipe) == ("demo", "layerskip") else args.work_dir / "model"
    return args


def settings_from(args: argparse.Namespace) -> Settings:
    """Validated settings of a command line."""
    size = SIZES[args.size]
    if args.batch is not None:
        size = dataclasses.replace(size, batch=args.batch)
    overrides = {
        name: getattr(args, name)
        for name in ("dropout_max", "exit_scale", "first_exit", "exit_power", "late_from", "late_last_exit")
        if getattr(args, name) is not None
    }
    recipe = dataclasses.replace(RECIPES[args.recipe], **overrides)
    num_steps = args.steps if args.tokens is None else max(args.tokens // (size.window * size.batch), 1)
    return Settings(
        size,
        recipe,
        seed=args.seed,
        num_steps=num_steps,
        minutes=args.minutes,
        decay_share=args.decay_share,
        device=args.device,
        dtype=getattr(torch, args.dtype),
    )


def load_tokenizer(work_dir: Path, split: corpus.Split, vocab_size: int) -> PreTrainedTokenizerFast:
    """The run's tokenizer: trained once, then read back, so that resuming cannot shift an id."""
    folder = work_dir / "tokenizer"
    if not folder.exists():
        corpus.train_tokenizer(split.train, vocab_size).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Train (or resume), write the prompts, export."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    settings = settings_from(args)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    split = corpus.split_modules(corpus.read_modules())
    tokenizer = load_tokenizer(args.work_dir, split, settings.size.vocab)
    stream = corpus.token_stream(tokenizer, split.train)
    log.info("%d training modules, %d tokens, recipe %s", len(split.train), len(stream), settings.recipe)
    run = Run(settings, stream, split.fingerprint(), int(tokenizer.eos_token_id))
    checkpoint = args.work_dir / "checkpoint.pt"
    if checkpoint.exists():
        run.load(checkpoint)
        log.info("resumed at step %d of %s", run.step, run.num_steps)
    if not args.export_only and not train(run, checkpoint):
        log.info("stopped at step %d; the same command resumes", run.step)
        return
    facts = export.training_facts(run.step, run.num_steps, run.seconds, len(stream), settings)
    export.export(run.model, tokenizer, split, facts, args.out, rank=args.evaluate)


if __name__ == "__main__":
    main()
