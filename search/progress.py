"""Tell: whoever wants to hear how far a long part of a run is."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[int, int], None]
"""Hears how many of how many steps are done, after each of them, and 0 where the first one begins if much comes before
it; outside of anything timed."""


def nobody(_done: int, _total: int) -> None:
    """Hears and says nothing."""
