"""How much of an output repeats what stood before it: greedy text of small models loops, and loops are easy to draft.

A speedup on text that repeats itself says little about text that does not, so the two are shown together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NGRAM = 4
"""Tokens of an n-gram."""


def repeated_ngram_share(texts: Iterable[tuple[Sequence[int], Sequence[int]]], n: int = NGRAM) -> float | None:
    """Share of the outputs' n-grams that occurred earlier in their own prompt or output; texts are (prompt, output).

    All n-grams of all outputs count alike, one that occurs twice twice. None if no output has n tokens.
    Raises: ValueError if n < 1.
    """
    if n < 1:
        raise ValueError(f"n: must be at least 1, got {n}")
    repeated = total = 0
    for prompt, output in texts:
        ids = [*prompt, *output]
        ngrams = list(zip(*(ids[start:] for start in range(n)), strict=False))
        seen = set(ngrams[: len(prompt)])
        for ngram in ngrams[len(prompt) :]:
            total += 1
            repeated += ngram in seen
            seen.add(ngram)
    return repeated / total if total else None
