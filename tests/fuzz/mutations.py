"""Broken inputs: valid documents with a few fields changed, valid texts with a few characters changed, and rubbish."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

TEXT = st.text(max_size=12)
NASTY_NUMBERS = st.sampled_from(
    [
        *(0, -1, 1, 2, 63, 65, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**400, 0.5, 1.0, 1.5, -0.0, 1e308, 5e-324),
        *(float("inf"), float("-inf"), float("nan")),
    ]
)
NASTY_TEXTS = st.sampled_from(
    [
        *("", " ", "\x00", "a\nb", "\r", "\x7f\x1b[31m", "\u2028", "\u0663", "../" * 9, "x" * 5_000),
        *("journal:", "sqlite:///", "sqlite:///~nobody-of-this-name/x.db", "~nobody-of-this-name/x"),
        *("12:none", "0:none", "4:1 1", "default"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NASTY_NUMBERS | NASTY_TEXTS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | NASTY_TEXTS, inner, max_size=4),
    max_leaves=8,
)
"""Anything JSON can say, and the numbers that it cannot."""

_SNIPPETS = [
    *("\x00", "\ufeff", "\n", "\r", '"', "\\", "{", "}", "[", "]", ",", ":", "=", "-", "0", "9" * 5_000, "null", "NaN"),
    *(
        "1e999",
        "-Infinity",
        "0x" + "f" * 5_000,
        "\\ud800",
        "\u0663",
        '{"a":' * 2_000,
        "[" * 5_000,
        "]" * 9,
        "#",
        "true",
    ),
]


@dataclass(frozen=True)
class Mutant:
    """A document after one change, and the top-level field in which it was made, under its old and new names."""

    document: dict[str, Any]
    fields: tuple[str, ...]


@st.composite
def mutants(draw: st.DrawFn, documents: st.SearchStrategy[dict[str, Any]]) -> Mutant:
    """One change: a value replaced, a field dropped, renamed or added, somewhere in the document."""
    document = copy.deepcopy(draw(documents))
    field = draw(st.sampled_from(sorted(document)))
    fields: tuple[str, ...] = (field,)
    holder, key = _place_in(draw, document, field)
    action = draw(st.sampled_from(["replace", "replace", "replace", "drop", "rename", "add", "wrap"]))
    if action == "replace" or (action in ("rename", "add") and not isinstance(holder, dict)):
        holder[key] = draw(VALUES)
    elif action == "wrap":
        holder[key] = [holder[key]]
    elif action == "drop":
        del holder[key]
    else:
        name = draw((TEXT | NASTY_TEXTS).filter(lambda one: one not in holder))
        holder[name] = holder.pop(key) if action == "rename" else draw(VALUES)
        if holder is document:
            fields = (name,) if action == "add" else (field, name)
    return Mutant(document, fields)


@st.composite
def edits(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> bytes:
    """A text with one to four spans cut out, doubled, or replaced."""
    text = draw(texts)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 12)))
        inserted = draw(
            st.sampled_from(_SNIPPETS).map(lambda one: one.encode("utf-8"))
            | st.binary(max_size=6)
            | st.just(text[start:stop] * 2)
        )
        text = text[:start] + inserted + text[stop:]
    return text


def _place_in(draw: st.DrawFn, document: dict[str, Any], field: str) -> tuple[Any, Any]:
    """(holder, key or index) of a value at or below this field."""
    holder: Any = document
    key: Any = field
    while isinstance(holder[key], (dict, list)) and holder[key] and draw(st.booleans()):
        holder = holder[key]
        key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    return holder, key
