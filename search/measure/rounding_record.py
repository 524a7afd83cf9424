"""What logit ties of a study in reduced precision were judged by: its attribute, and the words for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optuna

from layerskip.huggingface.rounding import RoundingSpread
from search.study.attributes import ROUNDING


class RoundingRecord:
    """Keeps in a study what this process has judged ties by, as soon as there was one to judge."""

    def __init__(self, measured: Callable[[], RoundingSpread | None]) -> None:
        self._measured = measured
        self._kept: RoundingSpread | None = None

    def keep(self, study: optuna.Study) -> None:
        """Store it, if that is still to do; of several processes, each of which measures its own, the widest."""
        spread = self._measured()
        if spread is None or spread == self._kept:
            return
        stored = study.user_attrs.get(ROUNDING)
        if stored is None or stored["tolerance"] < spread.tolerance:
            facts = {"largest": spread.largest, "tolerance": spread.tolerance, "num_positions": spread.num_positions}
            study.set_user_attr(ROUNDING, facts)
        self._kept = spread


def describe_rounding(stored: Mapping[str, Any]) -> str:
    """How far below the best logit a token of a tie may lie, and why."""
    factor = stored["tolerance"] / stored["largest"]
    return (
        f"up to {stored['tolerance']:.3g} logits below the best, {factor:g} times the most that rounding alone changed "
        f"at {stored['num_positions']} positions"
    )
