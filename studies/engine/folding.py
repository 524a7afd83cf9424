"""python -m studies.engine.folding: attention of a few queries over a text, with query heads folded and as they are."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from layerskip.command_line.cli import OneLineParser, check_folders, check_least
from layerskip.engines.recording.stopwatch import SecondsOf, Stopwatch
from layerskip.huggingface.growing_keys import additive, attend_folded
from studies.results import ENGINE, facts, finish, markdown_table, run_study

PROG = "studies.engine.folding"
_BUFFERS_BYTES = 1 << 26
"""Of keys and values that one timing goes through in turn: layers do not find theirs in the processor's own cache."""
_MOST_BUFFERS = 30


@dataclass(frozen=True)
class Heads:
    """Of a model's attention."""

    of: str
    num_queries: int
    num_keys: int
    head_dim: int


HEADS = (
    Heads("SmolLM2-135M", 9, 3, 64),
    Heads("Llama-3.1-8B", 32, 8, 128),
    Heads("GPT-2", 12, 12, 64),
)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Times:
    """Of one layer's attention, in microseconds."""

    model: str
    dtype: str
    num_seen: int
    """Positions."""
    num_rows: int
    """Queries at once: 1 is a plain or a draft step, more a verification."""
    as_they_are_us: float
    folded_us: float


def measure(heads: Heads, dtype: torch.dtype, num_seen: int, num_rows: int, seconds_of: SecondsOf) -> Times:
    """Random numbers laid out as in a step over the last positions that it sees."""
    generator = torch.Generator().manual_seed(0)
    num_bytes = 2 * heads.num_keys * num_seen * heads.head_dim * dtype.itemsize
    count = min(max(1, _BUFFERS_BYTES // num_bytes), _MOST_BUFFERS)
    shape = (1, 2 * heads.num_keys, num_seen, heads.head_dim)
    buffers = [torch.randn(shape, generator=generator).to(dtype).chunk(2, dim=1) for _ in range(count)]
    rows = torch.randn((1, num_rows, heads.num_queries, heads.head_dim), generator=generator).to(dtype)
    queries, scale = rows.transpose(1, 2), heads.head_dim**-0.5
    mask = None
    if num_rows > 1:
        visible = torch.ones(num_rows, num_seen, dtype=torch.bool).tril(num_seen - num_rows)
        mask = additive(visible, dtype)
    by_head = None if mask is None else mask.repeat(heads.num_queries // heads.num_keys, 1)  # once for all layers

    def in_turn(attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for keys, values in buffers:
                attend(keys, values)

        return run

    shared = heads.num_queries != heads.num_keys
    as_they_are = in_turn(
        lambda keys, values: F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=shared
        )
    )
    folded = in_turn(lambda keys, values: attend_folded(queries, keys, values, by_head, scale))
    with torch.inference_mode():
        first, second = (1e6 * one / count for one in seconds_of([as_they_are, folded]))
    return Times(heads.of, str(dtype).removeprefix("torch."), num_seen, num_rows, first, second)


def table(found: Sequence[Times]) -> str:
    """A line for each model, format and number of queries; a column for each number of positions."""
    sizes = sorted({one.num_seen for one in found})
    rows: dict[tuple[str, str, int], dict[int, Times]] = {}
    for one in found:
        rows.setdefault((one.model, one.dtype, one.num_rows), {})[one.num_seen] = one
    header = ["model", "format", "queries", *(f"over {size}" for size in sizes)]
    lines = [
        [model, dtype, str(num_rows), *(_cell(by_size[size]) for size in sizes)]
        for (model, dtype, num_rows), by_size in rows.items()
    ]
    return markdown_table(header, lines)


def _cell(one: Times) -> str:
    return f"{one.as_they_are_us:.0f} / {one.folded_us:.0f} ({one.as_they_are_us / one.folded_us:.1f}×)"


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096], help="positions that are seen")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 9, 16], help="queries at once")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=ENGINE, help="folder for folding.json and folding.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, sizes=1, rows=1, threads=1)
    if max(arguments.rows) > min(arguments.sizes):
        raise ValueError(f"--rows: must be at most {min(arguments.sizes)}, the fewest seen, got {max(arguments.rows)}")
    check_folders(arguments, "out")
    torch.set_num_threads(arguments.threads)
    seconds_of = Stopwatch(torch.device("cpu"))
    found = [
        measure(heads, dtype, num_seen, num_rows, seconds_of)
        for heads in HEADS
        for dtype in DTYPES
        for num_rows in arguments.rows
        for num_seen in arguments.sizes
    ]
    record = {"num_threads": arguments.threads, "times": [asdict(one) for one in found]}
    finish(arguments.out / "folding.json", facts(arguments.command) | record, table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
