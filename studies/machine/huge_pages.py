"""python -m studies.machine.huge_pages: weights in pages of 2 MiB and of 4 KiB, the same model decoded in turns.

Each repeat loads the model twice, once for each kind of page, and takes the shortest of its rounds.
"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.command_line.cli import CommandError, OneLineParser, check_least
from layerskip.decoding.stats import DecodeStats
from layerskip.engines.native import huge_pages
from layerskip.engines.native.layers import NativeLayers
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, spread

PROG = "studies.machine.huge_pages"
_PROMPT = "Explain why the sky is blue and the sea is not. " * 8
_GAMMA = 4


@dataclass(frozen=True)
class Times:
    """Of one loaded model, in ms, the shortest of its rounds."""

    step: float
    """A token of plain decoding."""
    draft: float
    """A token of drafts with rounded weights."""
    verification: float
    """Of `_GAMMA` drafts."""


def load(name: str, dtype: str, mask: str, *, huge: bool) -> tuple[LayerSkipModel, DecodeConfig]:
    """A model and how it drafts, its weights packed already. Raises: CommandError where there are no kernels."""
    with patch.object(huge_pages, "ADVICE", mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE):
        model = LayerSkipModel.from_pretrained(name, device="cpu", dtype=dtype, engine="fused", looks_for_config=False)
        maker = getattr(model.engine, "maker", None)
        if not isinstance(maker, NativeLayers) or maker.in_place:
            raise CommandError("weights are not packed: that takes kernels for this CPU, and memory for a copy of them")
        config = DecodeConfig(skip_mask=SkipMask.parse(f"{model.num_layers}:{mask}"), gamma=_GAMMA)
        model.generate(_PROMPT, max_new_tokens=8, config=config, do_sample=False, eos_token_id=[])
    return model, config


def measure(models: Sequence[tuple[LayerSkipModel, DecodeConfig]], rounds: int, new_tokens: int) -> list[Times]:
    """Of each model, in turns."""
    found: list[list[tuple[float, float, float]]] = [[] for _ in models]
    for turn in range(rounds):
        for place in ((one + turn) % len(models) for one in range(len(models))):
            model, config = models[place]
            plain, drafting = (
                _decode(model, one, new_tokens) for one in (DecodeConfig.plain(model.num_layers), config)
            )
            times = 1.0 / plain.tokens_per_s, drafting.draft_s / drafting.num_drafted
            found[place].append((*times, drafting.verify_s / drafting.num_rounds))
    return [Times(*(1000 * min(column) for column in zip(*some, strict=True))) for some in found]


def _decode(model: LayerSkipModel, config: DecodeConfig, new_tokens: int) -> DecodeStats:
    return model.generate(_PROMPT, max_new_tokens=new_tokens, config=config, do_sample=False, eos_token_id=[]).stats


def table(repeats: Sequence[tuple[Times, Times]]) -> str:
    """Medians, lowest and highest over the repeats."""
    rows = []
    for name, said in (
        ("step", "a token of plain decoding"),
        ("draft", "a drafted token"),
        ("verification", "a verification"),
    ):
        huge, ordinary = ([getattr(one[place], name) for one in repeats] for place in (0, 1))
        ratios = [other / own for own, other in zip(huge, ordinary, strict=True)]
        rows.append([said, spread(huge, 2), spread(ordinary, 2), spread(ratios, 2)])
    return markdown_table(["ms", "pages of 2 MiB", "pages of 4 KiB", "times as long"], rows)


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(STUDIES / "smollm2" / "model"), help="Hugging Face id or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--mask", default="int4", help="what drafts leave out, as in a config, without the layers")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8, help="that a loaded model decodes")
    parser.add_argument("--repeats", type=int, default=5, help="times that the model is loaded both ways")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, new_tokens=2, rounds=1, repeats=1, threads=1)
    check_out(arguments.out)
    torch.set_num_threads(arguments.threads)
    repeats = []
    for repeat in range(arguments.repeats):
        first = repeat % 2 == 0  # who is loaded first finds other memory
        models = {
            huge: load(arguments.model, arguments.dtype, arguments.mask, huge=huge) for huge in (first, not first)
        }
        huge, ordinary = measure([models[True], models[False]], arguments.rounds, arguments.new_tokens)
        repeats.append((huge, ordinary))
        del models
    record = facts(arguments.command) | {"num_threads": arguments.threads}
    record["repeats"] = [{"huge": asdict(huge), "ordinary": asdict(ordinary)} for huge, ordinary in repeats]
    finish(arguments.out, record, table(repeats))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
