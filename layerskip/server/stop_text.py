"""Text cut at the first stop string, as it streams."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds back what may yet become a stop string; neither it nor what follows it ever comes out.

    The stop string that is complete first counts, so the result does not depend on how the text is cut into pieces.
    Cost: one search of the held text and the new piece per stop string and `push`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is safe to show now; may be empty."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._release(min(ends)[1])
        return self._release(len(self._held) - self._num_held_back())

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)
