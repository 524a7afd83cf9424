"""SkipMask: what the draft leaves out: attention and MLP sublayers, rows of the output embedding, bits of weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

MAX_LAYERS = 1024  # far above any published model; bounds what a config file can make us allocate
MAX_VOCABULARY = 1 << 24
_ITEM = re.compile(r"(?P<kind>[am]?)(?P<first>[0-9]{1,4})(?:-(?P<last>[0-9]{1,4}))?")

_VOCABULARY = re.compile(r"v(?P<size>[0-9]{1,8})(@(?P<ids>[0-9a-f]{8}))?")
DraftBits = Literal[8, 4]
DRAFT_BITS: tuple[DraftBits, ...] = get_args(DraftBits)
_BITS: dict[str, DraftBits] = {f"int{bits}": bits for bits in DRAFT_BITS}


@dataclass(frozen=True)
class SkipMask:
    """One flag per layer and sublayer; True = skipped while drafting. The target never skips.

    The text form is `LAYERS:ITEMS`, items separated by commas: `3` or `4-7` are whole layers, `a2` or `a2-5` attention
    alone, `m9` MLP alone, `v8192` all token ids from 8192 on, `v8192@1f2e3d4c` all but the 8192 of that set, `int8` or
    `int4` all but eight or four bits of the weights, `none` nothing. `12:4-7,a2,m9` skips layers 4 to 7, attention 2
    and MLP 9 of twelve layers. Layers count from 0.
    """

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]
    draft_vocab: int | None = None
    """The draft chooses among so many token ids, those of `draft_ids` or the first ones; None = all. A small model with
    a large vocabulary spends much of a step on its output embedding."""
    bits: DraftBits | None = None
    """The draft computes with copies of the weights of what it keeps, of so many bits: where a step waits for weights
    to come from memory, 8 take a quarter of float32's time and half of bfloat16's. Of 4, in groups of 32 inputs, are
    those of layers alone; the output embedding's have 8 then. Small models suffer by 4."""
    draft_ids: str | None = None
    """The name of the set of token ids, see `layerskip.config.draft_ids`; None: the first ones."""

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp):
            raise ValueError(
                f"skip_mask: attention and mlp must have one flag per layer each, got {len(self.attention)} and "
                f"{len(self.mlp)}"
            )
        _check_num_layers(len(self.attention))
        if self.bits is not None and self.bits not in DRAFT_BITS:
            raise ValueError(f"skip_mask: bits must be one of {', '.join(map(str, DRAFT_BITS))}, got {self.bits}")
        if self.draft_vocab is not None and not 1 <= self.draft_vocab <= MAX_VOCABULARY:
            raise ValueError(f"skip_mask: draft_vocab must be in 1..{MAX_VOCABULARY}, got {self.draft_vocab}")
        if self.draft_ids is not None and self.draft_vocab is None:
            raise ValueError(f"skip_mask: draft_ids need a draft_vocab, got {self.draft_ids} without")

    @classmethod
    def none(cls, num_layers: int) -> SkipMask:
        """Skip nothing: the draft is the target."""
        return cls.from_layers(num_layers, ())

    @classmethod
    def from_layers(cls, num_layers: int, layers: Iterable[int]) -> SkipMask:
        """Skip these whole layers."""
        layers = tuple(layers)
        return cls.from_sublayers(num_layers, attention=layers, mlp=layers)

    @classmethod
    def from_sublayers(cls, num_layers: int, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> SkipMask:
        """Skip these attention and these MLP sublayers, by layer index."""
        _check_num_layers(num_layers)
        return cls(_flags("attention", attention, num_layers), _flags("mlp", mlp, num_layers))

    @classmethod
    def early_exit(cls, num_layers: int, exit_layer: int) -> SkipMask:
        """Skip layer `exit_layer` and all later ones."""
        if not 0 <= exit_layer <= num_layers:
            raise ValueError(f"exit_layer: must be in 0..{num_layers}, got {exit_layer}")
        return cls.from_layers(num_layers, range(exit_layer, num_layers))

    @classmethod
    def contiguous(cls, num_layers: int, first: int, count: int) -> SkipMask:
        """Skip `count` whole layers from `first` on."""
        if count < 0:
            raise ValueError(f"count: must be at least 0, got {count}")
        return cls.from_layers(num_layers, range(first, first + count))

    @classmethod
    def alternating(cls, num_layers: int, *, offset: int = 1) -> SkipMask:
        """Skip every second layer from `offset` on, but never the last, which shapes the logits."""
        return cls.from_layers(num_layers, range(offset, num_layers - 1, 2))

    @classmethod
    def parse(cls, text: str) -> SkipMask:
        """Read the text form. Raises ValueError naming the item that does not fit."""
        head, colon, tail = (part.strip(" ") for part in text.partition(":"))
        if not colon or not head.isascii() or not head.isdigit() or len(head) > 4:
            raise ValueError(f"skip_mask: must look like '12:4-7,a2,m9' or '12:none', got {text[:80]!r}")
        num_layers = int(head)
        _check_num_layers(num_layers)
        attention: set[int] = set()
        mlp: set[int] = set()
        draft_vocab: int | None = None
        draft_ids: str | None = None
        bits: DraftBits | None = None
        for item in [] if tail == "none" else [one.strip(" ") for one in tail.split(",")]:
            if draft_vocab is None and (size := _VOCABULARY.fullmatch(item)):
                draft_vocab, draft_ids = int(size["size"]), size["ids"]
                continue
            if bits is None and item in _BITS:
                bits = _BITS[item]
                continue
            match = _ITEM.fullmatch(item)
            if match is None:
                raise ValueError(
                    "skip_mask: item must look like '3', '4-7', 'a2' or 'm9', or once like 'v8192' and 'int8' or "
                    f"'int4'; got {item[:40]!r}"
                )
            first = int(match["first"])
            last = int(match["last"] or first)
            if not first <= last < num_layers:
                raise ValueError(f"skip_mask: item must name layers in 0..{num_layers - 1}, got {item!r}")
            layers = range(first, last + 1)
            if match["kind"] != "m":
                attention.update(layers)
            if match["kind"] != "a":
                mlp.update(layers)
        mask = cls.from_sublayers(num_layers, attention=attention, mlp=mlp)
        return mask.narrowed(draft_vocab, draft_ids).rounded(bits)

    def narrowed(self, draft_vocab: int | None, draft_ids: str | None = None) -> SkipMask:
        """The same sublayers, with this `draft_vocab` and these `draft_ids`."""
        return replace(self, draft_vocab=draft_vocab, draft_ids=draft_ids)

    def rounded(self, bits: DraftBits | None) -> SkipMask:
        """The same sublayers, with weights of so many bits; None: as they are."""
        return replace(self, bits=bits)

    @property
    def whole(self) -> SkipMask:
        """The same sublayers, with weights as they are and all token ids."""
        return self.narrowed(None).rounded(None)

    def __str__(self) -> str:
        both = [a and m for a, m in zip(self.attention, self.mlp, strict=True)]
        items = _ranges("", both)
        items += _ranges("a", [a and not b for a, b in zip(self.attention, both, strict=True)])
        items += _ranges("m", [m and not b for m, b in zip(self.mlp, both, strict=True)])
        named = "" if self.draft_ids is None else f"@{self.draft_ids}"
        items += [] if self.draft_vocab is None else [f"v{self.draft_vocab}{named}"]
        items += [] if self.bits is None else [f"int{self.bits}"]
        return f"{self.num_layers}:{','.join(items) or 'none'}"

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_skipped_attention(self) -> int:
        return sum(self.attention)

    @property
    def num_skipped_mlp(self) -> int:
        return sum(self.mlp)

    @property
    def num_skipped(self) -> int:
        """Skipped sublayers, 0..2L."""
        return self.num_skipped_attention + self.num_skipped_mlp

    @property
    def skipped_layers(self) -> tuple[int, ...]:
        """Layers skipped whole."""
        return tuple(i for i in range(self.num_layers) if self.attention[i] and self.mlp[i])

    @property
    def exit_layer(self) -> int | None:
        """First layer not run, if the mask is an early exit (a skipped tail and nothing else); else None."""
        first = self.num_layers - len(self.skipped_layers)
        exits = SkipMask.early_exit(self.num_layers, first)
        is_exit = (self.attention, self.mlp) == (exits.attention, exits.mlp)
        return first if is_exit and self.num_skipped else None

    def picture(self) -> str:
        """Two rows of one character per layer, for terminals: `.` kept, `x` skipped."""
        rows = (("attn", self.attention), ("mlp ", self.mlp))
        return "\n".join(f"{name} {''.join('x' if flag else '.' for flag in flags)}" for name, flags in rows)


def _check_num_layers(num_layers: int) -> None:
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ValueError(f"skip_mask: number of layers must be in 1..{MAX_LAYERS}, got {num_layers}")


def _flags(name: str, layers: Iterable[int], num_layers: int) -> tuple[bool, ...]:
    chosen = set(layers)
    outside = sorted(i for i in chosen if not 0 <= i < num_layers)
    if outside:
        raise ValueError(f"skip_mask: {name} layers must be in 0..{num_layers - 1}, got {outside}")
    return tuple(i in chosen for i in range(num_layers))


def _ranges(prefix: str, flags: list[bool]) -> list[str]:
    items: list[str] = []
    start: int | None = None
    for i, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            items.append(f"{prefix}{start}" if start == i - 1 else f"{prefix}{start}-{i - 1}")
            start = None
    return items
