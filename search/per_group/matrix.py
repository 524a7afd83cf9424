"""Matrix: every setting on every group's held-out prompts, paired with plain decoding, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerskip.analysis.repetition import repeated_ngram_share
from layerskip.config.decode_config import Confirmed, DecodeConfig
from search.confirm.held_out import held_out_of
from search.confirm.stage import summarise
from search.measure.decoder import Decoder
from search.measure.pairs import LosslessViolation, Pair, PromptCase, fault_of, measure_pair
from search.study.config_words import describe

_TABLE_WIDTH = 110
_NAME_WIDTH = 24
_GAP = "  "
NO_PROMPT = "no held-out prompt of the group is long enough to be timed"


@dataclass(frozen=True)
class Cell:
    """One setting on the held-out prompts of one group."""

    config: DecodeConfig
    """The bare setting: mask, gamma, thresholds."""
    measured: Confirmed | None = None
    """Against plain decoding; None for plain decoding itself and for what was excluded."""
    excluded: str | None = None
    """Why it has no number and can be no group's setting."""
    lossless: bool = True
    raw: Mapping[str, list[list[float]]] | None = None
    """See `HeldOut.rates`: per prompt, every repeat."""

    @property
    def speedup(self) -> float | None:
        """Geometric mean over prompts; 1 for plain decoding, by definition."""
        if self.excluded is not None:
            return None
        return self.measured.speedup if self.measured else 1.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the speedup's interval; None for a single prompt, which has none, and where nothing was measured."""
        measured = self.measured
        if measured is None or measured.num_prompts == 1:
            return None
        return measured.speedup_ci_low, measured.speedup_ci_high

    def to_json(self) -> dict[str, Any]:
        """As summary.json holds it."""
        low, high = self.interval or (None, None)
        record = {"speedup": self.speedup, "speedup_ci_low": low, "speedup_ci_high": high}
        if self.measured is not None:
            names = ("end_to_end_speedup", "num_prompts", "num_repeats", "num_identical", "num_ties", "acceptance_rate")
            record |= {name: getattr(self.measured, name) for name in names} | {"raw": self.raw}
        return record | ({"excluded": self.excluded} if self.excluded else {})


Matrix = Mapping[str, Mapping[str, Cell]]
"""Row (whose setting: `default` or a group) to column (on which group's prompts) to cell."""


def measure_matrix(
    decoder: Decoder,
    settings: Mapping[str, DecodeConfig],
    cases: Mapping[str, Sequence[PromptCase]],
    *,
    repeats: int,
    seed: int,
) -> Matrix:
    """Every setting (by row) on every group's cases; equal settings share their cells, plain decoding is not measured.

    A setting that breaks is excluded: from the group where it failed or, where its output differed, from all.
    Cost: 2 x repeats x prompts x different speculating settings, in decodings.
    Raises: LosslessViolation if plain decoding does not repeat itself.
    """
    bare = {row: _bare(config) for row, config in settings.items()}
    distinct = [config for config in dict.fromkeys(bare.values()) if config.speculates]
    columns: dict[str, dict[DecodeConfig, Cell]] = {}
    broken: dict[DecodeConfig, Cell] = {}
    for group, some in cases.items():
        able = [config for config in distinct if config not in broken]
        columns[group] = _measure_group(decoder, some, able, repeats, seed)
        broken |= {config: cell for config, cell in columns[group].items() if not cell.lossless}

    def cell(config: DecodeConfig, group: str) -> Cell:
        measured = broken.get(config) or columns[group].get(config)
        return measured or Cell(config, excluded=None if cases[group] else NO_PROMPT)

    return {row: {group: cell(config, group) for group in cases} for row, config in bare.items()}


def violations_of(matrix: Matrix) -> list[str]:
    """Settings whose output differed from the target's, one line each."""
    broken = {cell.config: cell for cells in matrix.values() for cell in cells.values() if not cell.lossless}
    return [f"matrix: {cell.excluded} under {describe(config)}" for config, cell in broken.items()]


def table(matrix: Matrix, chosen: Collection[tuple[str, str]]) -> list[str]:
    """The matrix as lines of plain ASCII, broken into blocks of columns where it is wide; `chosen` cells get a `*`."""
    names = ["setting of", *map(_ascii, matrix)]
    columns = [
        [
            f"on {_ascii(group)}",
            *(_words(cells[group]) + ("*" if (row, group) in chosen else "") for row, cells in matrix.items()),
        ]
        for group in next(iter(matrix.values()))
    ]
    lines: list[str] = []
    block = [names]
    for column in columns:
        width = sum(max(map(len, one)) + len(_GAP) for one in [*block, column])
        if len(block) > 1 and width > _TABLE_WIDTH:
            lines += _aligned(block)
            block = [names]
        block.append(column)
    return lines + _aligned(block)


def _measure_group(
    decoder: Decoder, cases: Sequence[PromptCase], configs: Sequence[DecodeConfig], repeats: int, seed: int
) -> dict[DecodeConfig, Cell]:
    """Interleaved prompt by prompt, the order of the settings rotating, plain decoding first every other time."""
    if not cases:
        return {config: Cell(config, excluded=NO_PROMPT) for config in configs}
    passes: list[list[list[Pair]]] = [[[] for _ in range(repeats)] for _ in configs]
    faults: dict[int, Cell] = {}
    for repeat in range(repeats):
        for row, case in enumerate(cases):
            for turn in range(len(configs)):
                i = (row + repeat + turn) % len(configs)
                if i in faults:
                    continue
                try:
                    pair = measure_pair(decoder, case, configs[i], plain_first=(row + repeat + i) % 2 == 0)
                    passes[i][repeat].append(pair)
                except Exception as error:
                    if isinstance(error, LosslessViolation) and not error.config.speculates:
                        raise  # plain decoding itself: there is nothing to compare with
                    fault = fault_of(error)
                    faults[i] = Cell(configs[i], excluded=fault.reason, lossless=fault.lossless)
                if i in faults:  # outside the except block: there the traceback would keep the tensors alive
                    decoder.free_memory()
    return {
        config: faults[i] if i in faults else _cell(config, passes[i], cases, seed) for i, config in enumerate(configs)
    }


def _cell(config: DecodeConfig, passes: Sequence[Sequence[Pair]], cases: Sequence[PromptCase], seed: int) -> Cell:
    share = repeated_ngram_share((case.prompt_ids, case.reference_ids) for case in cases)
    raw = {name: [list(one) for one in rates] for name, rates in held_out_of(passes, config).rates.items()}
    return Cell(config, summarise(passes, seed=seed, repeated_ngram_share=share), raw=raw)


def _bare(config: DecodeConfig) -> DecodeConfig:
    """Equal where two settings decode alike."""
    return config.bare() if config.speculates else DecodeConfig.plain(config.skip_mask.num_layers)


def _words(cell: Cell) -> str:
    if cell.speedup is None:
        return "excluded"
    if cell.measured is None:
        return "1.000 plain"
    if cell.interval is None:
        return f"{cell.speedup:.3f} one prompt"
    low, high = cell.interval
    return f"{cell.speedup:.3f} {low:.3f}..{high:.3f}"


def _ascii(name: str) -> str:
    text = name.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _NAME_WIDTH else text[: _NAME_WIDTH - 2] + ".."


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return [_GAP.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
