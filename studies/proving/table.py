"""Table: what one model's drafts say under every mask of a space, on fixed texts, small enough to be committed.

Readings go D drafts into a round: deeper ones see the draft's own keys and values of the round, later ones are taken
from the deepest. Decoding by the table is defined by that, so a config's value needs no clock and no further reading.
Confidences are kept as places among some thresholds: between these, a threshold of the space decides nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText
from layerskip.config.decode_config import write_atomically
from layerskip.config.skip_mask import SkipMask
from search.predict.replay import TextRows
from search.study.space import SearchSpace

Codes = NDArray[np.uint8]
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Those that a confidence may fall below: what lies between two of them is not kept, which halves the files. So a
threshold of the space decides as the largest of these that is not above it."""
_NUM_LEVELS = len(THRESHOLDS) + 1
_CONFIDENCES = np.array([THRESHOLDS[0] - 0.025, *(one + 0.075 for one in THRESHOLDS)], dtype=np.float32)
_ARRAYS = ("codes", "target_levels", "prompts", "continuations")


@dataclass(frozen=True, eq=False)
class Table:
    """Readings of every mask of `space` on P texts of a prompt and T tokens of the target's own continuation."""

    space: SearchSpace
    codes: Codes
    """(D + 1, P, T, M): `encode` of every mask's readings; masks in the order of `masks_of`."""
    target_levels: Codes
    """(P, T): `levels_of` the target's probability of each token."""
    prompts: NDArray[np.uint16]
    """(P, N) token ids: first the tuning prompts, then those that confirm, then those that report."""
    continuations: NDArray[np.uint16]
    """(P, T) token ids."""
    num_tuning: int
    num_confirming: int
    facts: Mapping[str, Any]
    """Where it comes from."""

    def __post_init__(self) -> None:
        texts = self.target_levels.shape
        expected = (len(self.codes), *texts, 1 << len(self.space.bit_names))
        if self.codes.shape != expected or self.continuations.shape != texts or len(self.prompts) != texts[0]:
            raise ValueError(f"codes: must have shape {expected}, got {self.codes.shape}")
        if not 0 < self.num_tuning < self.num_tuning + self.num_confirming < texts[0]:
            raise ValueError(
                f"prompts: must be tuning, confirming and reporting ones, got {self.num_tuning}, "
                f"{self.num_confirming} and {texts[0]} in all"
            )

    @cached_property
    def digest(self) -> bytes:
        """Of all that it holds: two tables with the same one are the same table, in whichever process."""
        facts = json.dumps(dict(self.facts), sort_keys=True)
        found = hashlib.sha256(repr((self.space, self.num_tuning, self.num_confirming, facts)).encode())
        for name in _ARRAYS:
            found.update(getattr(self, name).tobytes())
        return found.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def reporting(self) -> range:
        """Places of the texts that no search sees."""
        return range(self.num_tuning + self.num_confirming, len(self.prompts))

    @cached_property
    def masks(self) -> tuple[SkipMask, ...]:
        """Every mask, in the order of the readings."""
        return masks_of(self.space)

    def text(self, place: int) -> ForcedText:
        """Prompt and continuation."""
        return self._texts[place]

    def rows(self, places: Sequence[int]) -> TextRows:
        """What replay needs of these texts besides the readings."""
        probs = confidence_of(self.target_levels[list(places)])
        return TextRows(np.full(len(probs), probs.shape[1]), probs, probs.shape[1])

    @property
    def depth(self) -> int:
        """Drafts of a round, after the first, that have readings of their own."""
        return len(self.codes) - 1

    def reading(self, mask: SkipMask, places: Sequence[int], depth: int | None = None) -> DraftReadings:
        """The mask's on these texts, so many drafts into a round, as many as there are without a number.

        Raises: ValueError for a mask that the space has not.
        """
        if mask not in self._places:
            raise ValueError(f"skip_mask: must be one of the {len(self.masks)} masks of the space, got {mask}")
        most = self.depth if depth is None else depth
        return decode(self.codes[: most + 1, ..., self._places[mask]][:, list(places)])

    @cached_property
    def _texts(self) -> tuple[ForcedText, ...]:
        pairs = zip(self.prompts.tolist(), self.continuations.tolist(), strict=True)
        return tuple(ForcedText(tuple(prompt), tuple(continuation)) for prompt, continuation in pairs)

    @cached_property
    def _places(self) -> dict[SkipMask, int]:
        return {mask: place for place, mask in enumerate(self.masks)}

    def save(self, file: Path) -> None:
        """One compressed file."""
        packed = io.BytesIO()
        space = self.space
        told = {
            "num_layers": space.num_layers,
            "gamma_max": space.gamma_max,
            "attention_bits": space.attention_bits,
            "mlp_bits": space.mlp_bits,
            "layer_bits": space.layer_bits,
            "num_tuning": self.num_tuning,
            "num_confirming": self.num_confirming,
            "facts": dict(self.facts),
        }
        np.savez(packed, told=np.array(json.dumps(told)), **{name: getattr(self, name) for name in _ARRAYS})
        write_atomically(file, lzma.compress(packed.getvalue(), filters=_FILTERS))

    @classmethod
    def load(cls, file: Path) -> Table:
        """The inverse. Raises: OSError; ValueError naming the file if it holds something else."""
        try:
            arrays = np.load(io.BytesIO(lzma.decompress(file.read_bytes())), allow_pickle=False)
            told = json.loads(str(arrays["told"]))
            bits = {name: tuple(told[name]) for name in ("attention_bits", "mlp_bits", "layer_bits")}
            space = SearchSpace(told["num_layers"], told["gamma_max"], **bits)
            rest = {name: told[name] for name in ("num_tuning", "num_confirming", "facts")}
            return cls(space, **{name: arrays[name] for name in _ARRAYS}, **rest)
        except (lzma.LZMAError, EOFError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: not a table of readings: {error}") from None


_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0, "dict_size": 1 << 24}
]


def masks_of(space: SearchSpace) -> tuple[SkipMask, ...]:
    """Every mask of a space, each differing from the one before it in a single bit (a Gray code): so neighbours in the
    file say much the same, which compresses."""
    names = space.bit_names
    codes = (i ^ (i >> 1) for i in range(1 << len(names)))
    return tuple(space.to_mask({name: bool(code >> bit & 1) for bit, name in enumerate(names)}) for code in codes)


def levels_of(probabilities: NDArray[Any]) -> Codes:
    """How many of the thresholds each probability does not fall below."""
    return np.searchsorted(np.array(THRESHOLDS), np.asarray(probabilities, dtype=np.float64), side="right").astype(
        np.uint8
    )


def confidence_of(levels: NDArray[Any]) -> NDArray[np.float32]:
    """A probability on the same side of every threshold as the one that was read."""
    found: NDArray[np.float32] = _CONFIDENCES[levels]
    return found


def encode(accepted: NDArray[Any], confidence: NDArray[Any]) -> Codes:
    """One byte each of what a draft says: whether the target agrees, and how sure it is."""
    return (accepted.astype(np.uint8) * _NUM_LEVELS + levels_of(confidence)).astype(np.uint8)


def decode(codes: Codes) -> DraftReadings:
    """Readings of codes (D + 1, P, T); which tokens are proposed is not kept, only whether they are right."""
    accepted, levels = np.divmod(codes, _NUM_LEVELS)
    return DraftReadings(accepted.astype(np.float32), confidence_of(levels), np.zeros(accepted.shape, dtype=np.int64))
