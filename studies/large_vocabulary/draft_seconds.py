"""python -m studies.large_vocabulary.draft_seconds: a draft step on random weights of real shapes, by `draft_vocab`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from layerskip.analysis.step_times import StepTimer
from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.config.skip_mask import SkipMask
from layerskip.machine.host import cpu_name, git_commit
from layerskip.model import LayerSkipModel
from search.study.space import vocabs_of

PROG = "studies.large_vocabulary.draft_seconds"
SHAPES = {  # layers, hidden size, width of the MLP, attention heads, key heads, vocabulary: of the published configs
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151_936),
    "Llama-3.2-1B": (16, 2048, 8192, 32, 8, 128_256),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151_936),
}
_TEXT = 64
_GAMMA = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Time, print the table, write the result; returns the exit code."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=["Qwen2.5-0.5B"], help="whose")
    parser.add_argument("--repeats", type=int, default=12, help="times that everything is timed, in turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    return run_command(PROG, lambda: _measure(arguments))


def _measure(arguments: argparse.Namespace) -> int:
    check_least("--repeats", arguments.repeats, 3)
    check_least("--threads", arguments.threads, 1)
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    rows = [row for name in arguments.shapes for row in measure(name, arguments.repeats, arguments.dtype)]
    sys.stdout.write("| shape | draft keeps | token ids | ms | of the whole vocabulary's | of the target's step |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for row in rows:
        sys.stdout.write(
            f"| {row['shape']} | {row['kept']} of {row['layers']} layers | {row['draft_vocab']} | {row['ms']:.1f} | "
            f"{row['of_whole']:.2f} ({row['of_whole_low']:.2f}..{row['of_whole_high']:.2f}) | "
            f"{row['of_target']:.2f} |\n"
        )
    if arguments.out is not None:
        command = shlex.join(["python", "-m", PROG, *sys.argv[1:]])
        facts: dict[str, Any] = {"command": command, "commit": git_commit(Path(__file__).parent), "cpu": cpu_name()}
        facts |= {"threads": arguments.threads, "dtype": arguments.dtype, "repeats": arguments.repeats}
        write_atomically(arguments.out, json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return 0


def measure(name: str, repeats: int, dtype: str, shape: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Rows for a half and a quarter of the layers, with every size of vocabulary that a search has.

    Cost: repeats x ten rounds of four drafts; memory: twice the weights.
    """
    layers, hidden, mlp, heads, key_heads, vocab = shape or SHAPES[name]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    with torch.device("cpu"):
        model: Any = Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()
    timer = StepTimer(LayerSkipModel(model, engine="fused"), _GAMMA)
    text = torch.randint(0, vocab, (_TEXT,)).tolist()
    exits = (layers // 2, layers // 4)
    sizes = vocabs_of(vocab)
    masks = [
        SkipMask.early_exit(layers, kept).narrowed(None if size == vocab else size) for kept in exits for size in sizes
    ]
    target, drafts = [], []
    for _ in range(repeats + 1):
        target.append(timer.verify_s(text, [1])[0])
        drafts.append(timer.draft_s(text, masks, gamma=_GAMMA, threshold=False))
    seconds = np.array(drafts[1:]).reshape(repeats, len(exits), len(sizes))  # the first repeat warms up
    target_s = float(np.median(target[1:]))
    rows = []
    for i, kept in enumerate(exits):
        for j, size in enumerate(sizes):
            ratios = seconds[:, i, j] / seconds[:, i, 0]
            median = float(np.median(seconds[:, i, j]))
            rows.append(
                {
                    "shape": name,
                    "layers": layers,
                    "kept": kept,
                    "draft_vocab": size,
                    "ms": round(1e3 * median, 3),
                    "of_whole": round(float(np.median(ratios)), 4),
                    "of_whole_low": round(float(ratios.min()), 4),
                    "of_whole_high": round(float(ratios.max()), 4),
                    "of_target": round(median / target_s, 4),
                }
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
