"""Teacher forcings of several sets of texts as one, so that a set can be read alone and read no more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.analysis.teacher_forcing import DraftReadings, TreeReadings, WrongDraft
from layerskip.config.decode_config import DraftedBy
from search.measure.decoder import Forcing
from search.predict.replay import TextRows

Readings = DraftReadings | TreeReadings


class JoinedForcing:
    """See `layerskip.analysis.teacher_forcing.TeacherForcing`; places of texts count through all parts."""

    def __init__(self, parts: Sequence[tuple[Forcing, TextRows]]) -> None:
        """Each part with its texts' rows, in order, one part at least, all with one `max_new_tokens`."""
        self._parts = [forcing for forcing, _ in parts]
        self.texts = tuple(text for forcing, _ in parts for text in forcing.texts)
        self.keys = "target" if all(one.keys == "target" for one in self._parts) else "own"
        self.rows = _join_rows([rows for _, rows in parts])
        counts = [len(rows.lengths) for _, rows in parts]
        self._starts = np.cumsum([0, *counts]).tolist()

    def read(self, drafted_by: DraftedBy, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        """As the parts read; their widths and depths are made the same. `texts` ascending, as ever."""
        readings = [part.read(drafted_by, depth, chosen) for part, chosen in self._chosen(texts)]
        return join_readings(readings, self.rows.target_probs.shape[1])

    def _chosen(self, texts: Sequence[int] | None) -> Iterator[tuple[Forcing, list[int] | None]]:
        """Parts with those of these texts that are theirs, where there are any."""
        for i, part in enumerate(self._parts):
            start, stop = self._starts[i], self._starts[i + 1]
            chosen = None if texts is None else [text - start for text in texts if start <= text < stop]
            if chosen is None or chosen:
                yield part, chosen

    def overrun(self, drafted_by: DraftedBy, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        """As the parts say, each of its own texts."""
        added = [0] * len(wrong)
        for i, part in enumerate(self._parts):
            start, stop = self._starts[i], self._starts[i + 1]
            places = [place for place, one in enumerate(wrong) if start <= one.text < stop]
            if not places:
                continue
            own = [replace(wrong[place], text=wrong[place].text - start) for place in places]
            for place, count in zip(places, part.overrun(drafted_by, own, threshold), strict=True):
                added[place] = count
        return added


class KeptReadings:
    """Readings by what drafts, so many bytes at most; the one longest unused is forgotten first, the latest never."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._used_bytes = most_bytes, 0
        self._readings: OrderedDict[DraftedBy, Readings] = OrderedDict()

    def of(self, drafted_by: DraftedBy, read: Callable[[], Readings]) -> Readings:
        """The reading that is kept, or a new one."""
        if drafted_by in self._readings:
            self._readings.move_to_end(drafted_by)
            return self._readings[drafted_by]
        reading = self._readings[drafted_by] = read()
        self._used_bytes += reading.nbytes
        while self._used_bytes > self._most_bytes and len(self._readings) > 1:
            self._used_bytes -= self._readings.popitem(last=False)[1].nbytes
        return reading


def join_readings(readings: Sequence[DraftReadings], width: int) -> DraftReadings:
    """Readings of one mask on several sets of texts as one, `width` columns wide; the last depth of a reading stands
    for all later ones, as ever."""
    depth = max(len(one.accepted) for one in readings)

    def joined(name: str) -> NDArray[Any]:
        arrays = []
        for reading in readings:
            array = getattr(reading, name)
            deeper, wider = depth - array.shape[0], width - array.shape[2]
            array = np.pad(array, ((0, deeper), (0, 0), (0, 0)), mode="edge") if deeper else array
            arrays.append(np.pad(array, ((0, 0), (0, 0), (0, wider))) if wider else array)
        return np.concatenate(arrays, axis=1)

    ranks = joined("ranks") if all(one.ranks is not None for one in readings) else None
    return DraftReadings(joined("accepted"), joined("confidence"), joined("choices"), ranks)


def _join_rows(parts: Sequence[TextRows]) -> TextRows:
    width = max(one.target_probs.shape[1] for one in parts)
    probs = [np.pad(one.target_probs, ((0, 0), (0, width - one.target_probs.shape[1]))) for one in parts]
    lengths = np.concatenate([one.lengths for one in parts])
    return TextRows(lengths, np.concatenate(probs), parts[0].max_new_tokens)
