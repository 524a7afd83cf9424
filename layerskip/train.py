"""python -m layerskip.train: train weights that draft for a model, which itself stays as it is."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.command_line.command_model import add_quantization_argument
from layerskip.machine.host import keep_to_cpu_limit

PROG = "layerskip.train"


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Train one decoder layer that drafts from the model's own hidden states (EAGLE). The model stays "
        "as it is, and so does its output. Stop it at any moment; the same command goes on from the last checkpoint.",
    )
    add = parser.add_argument
    add("--drafter", choices=["eagle"], default="eagle", help="what is trained")
    add("--model", required=True, help="Hugging Face id or folder")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="what to train on: of .jsonl files the prompts with the model's own continuations, of others the text",
    )
    add(
        "--own-prompts",
        type=int,
        metavar="N",
        help="train on N prompts that a chat model asks itself, too (Magpie); without --data on them alone",
    )
    add("--out", type=Path, required=True, help="folder for the weights")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="of training [10]")
    budget.add_argument("--steps", type=int, help="training steps instead")
    add("--batch", type=int, default=8, help="sequences a step")
    add("--depth", type=int, default=5, help="draft tokens of a round that are trained")
    add(
        "--aux-layers",
        type=int,
        nargs="*",
        metavar="LAYER",
        help="layers, counted from 0, whose states it reads besides the last one's, as EAGLE-3 does [an early one and "
        "one in the middle]; none after the flag: the last one's alone",
    )
    add(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="train it to choose among N token ids, the commonest of the texts: of a large vocabulary most of the work "
        "is left out, in training and in drafting [all]",
    )
    add("--learning-rate", type=float, help="the highest [0.02 / sqrt(hidden size)]")
    add("--window", type=int, default=256, help="tokens of a sequence")
    add("--new-tokens", type=int, default=128, help="by which the model continues a prompt of --data")
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="at each of which a prompt is continued once; 0 is greedy",
    )
    add("--seed", type=int, default=0, help="of weights, batches and sampled continuations")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add(
        "--dtype",
        default="auto",
        help="of the model: auto, float32, bfloat16 or float16; the weights are float32, but computed with in bfloat16 "
        "where the model is in it",
    )
    add_quantization_argument(parser)
    add("--threads", type=int, help="CPU threads")
    add("--trust-remote-code", action="store_true", help="let the model's repository run its own code")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, steps=1, batch=1, depth=1, window=8, new_tokens=1, threads=1, own_prompts=1, draft_vocab=1)
    for name in ("minutes", "learning_rate"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')}: must be above 0, got {value}")
    if any(not 0 <= one < float("inf") for one in arguments.temperatures):
        raise ValueError(f"--temperatures: must be at least 0, got {arguments.temperatures}")
    if not arguments.data and arguments.own_prompts is None:
        raise ValueError("--data: must name a file, or --own-prompts say how many prompts the model asks itself")
    for file in arguments.data:
        if not file.is_file():
            raise FileNotFoundError(f"--data: no such file: {file}")
    quiet_libraries()
    import torch

    _check_out(arguments.out)
    from layerskip.drafters.eagle.head import check_aux_layers
    from layerskip.model import LayerSkipModel
    from layerskip.training.data import DataOptions, make_sequences
    from layerskip.training.eagle import TrainOptions, train_eagle, usual_aux_layers

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    else:
        keep_to_cpu_limit()
    model = LayerSkipModel.from_pretrained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        engine="eager",
        trust_remote_code=arguments.trust_remote_code,
        looks_for_config=False,
    )
    aux = usual_aux_layers(model.num_layers) if arguments.aux_layers is None else tuple(arguments.aux_layers)
    check_aux_layers(aux, model.num_layers, "--aux-layers")
    if arguments.draft_vocab is not None:
        model.adapter.check_vocab("--draft-vocab", arguments.draft_vocab)
    data = DataOptions(
        window=arguments.window,
        new_tokens=arguments.new_tokens,
        temperatures=tuple(arguments.temperatures),
        own_prompts=arguments.own_prompts or 0,
        seed=arguments.seed,
    )
    sequences = make_sequences(model, arguments.data, arguments.out, data, _tell)
    _tell(
        f"{sequences.num_tokens} tokens in {len(sequences.training)} sequences to train on, "
        f"{len(sequences.held_out)} sequences held out"
    )
    options = TrainOptions(
        minutes=None if arguments.steps else arguments.minutes or 10.0,
        steps=arguments.steps,
        batch=arguments.batch,
        depth=arguments.depth,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        aux_layers=aux,
        draft_vocab=arguments.draft_vocab,
    )
    trained = train_eagle(model, sequences, arguments.out, options, tell=_tell)
    agreement = ", ".join(f"{one:.1%}" for one in trained.facts["held_out_agreement"])
    _tell(f"held out, the target says what is drafted first, second, ...: {agreement}")
    _tell(
        f"written {arguments.out} ({trained.facts['parameters']} parameters, {trained.facts['steps']} steps in "
        f"{trained.facts['seconds']:.0f} s)"
    )
    rounded = f"--quantization {arguments.quantization} " if arguments.quantization else ""
    _tell(
        f"try it: python -m layerskip.generate --model {arguments.model} {rounded}--drafter eagle --gamma 4 "
        f'--draft-weights {arguments.out} --prompt "..." --compare'
    )
    return 0


def _check_out(folder: Path) -> None:
    """Raises: ValueError unless weights may be written there: into a folder that holds none, or where training is not
    done."""
    from layerskip.drafters.eagle.head import CONFIG_NAME, WEIGHTS_NAME, describe_eagle
    from layerskip.training.eagle import CHECKPOINT_NAME

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: must be a folder, got the file {folder}")
    if any((folder / name).exists() for name in (CONFIG_NAME, WEIGHTS_NAME)):
        try:
            describe_eagle(folder)
        except ValueError:
            raise ValueError(
                f"--out: {folder} holds other files of these names, a model's perhaps; use another"
            ) from None
        if not (folder / CHECKPOINT_NAME).exists():
            raise ValueError(f"--out: {folder} holds trained draft weights, which configs may name; use another")


def _tell(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
