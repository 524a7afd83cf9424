"""How figures look: one small template, and looks that differ in colour and in form alike."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#007a5a", "#a0508c", "#555555"
"""Told apart by colour-blind eyes (after Okabe and Ito), and dark enough on white."""
LOOKS = (
    (BLUE, "circle"),
    (ORANGE, "square"),
    (GREEN, "diamond"),
    (PURPLE, "triangle-up"),
    ("#8a6d00", "triangle-down"),
    (GREY, "pentagon"),
)
"""Colour and marker of the first group, the second one, ...: never the colour alone."""
_SMALL = 13
_AXIS = {"gridcolor": "#e3e3e3", "linecolor": "#888888", "showline": True, "zeroline": False, "automargin": True}


class MissingData(ValueError):  # noqa: N818 (reads as the fact it states)
    """The study does not keep what a figure draws; the message names it."""


def look(place: int) -> tuple[str, str]:
    """Colour and marker of the group at a place; they repeat after six."""
    return LOOKS[place % len(LOOKS)]


def finish(figure: go.Figure, title: str, below: str) -> go.Figure:
    """Give the figure its title, a line of facts below it, and the template; returns it.

    The template is written out in every stored figure, and a storage takes one row per 2 kB: so it is not plotly's.
    """
    top = 100 + 20 * below.count("<br>") + 20 * len(figure.layout.annotations[:1])
    figure.update_layout(
        title={"text": f"{title}<br><span style='font-size:{_SMALL}px'>{below}</span>", "x": 0.01, "xanchor": "left"},
        template=_template(),
        hovermode="closest",
        legend={"bgcolor": "rgba(255,255,255,0.7)"},
        margin={"t": top, "l": 70, "r": 20, "b": 60},
    )
    return figure


def ratio_line(value: float, text: str) -> dict[str, Any]:
    """Arguments of `add_hline`: a dotted line with its name at the right end."""
    return {
        "y": value,
        "line": {"dash": "dot", "color": GREY, "width": 1.5},
        "annotation": {"text": text, "font": {"size": _SMALL - 1, "color": GREY}},
        "annotation_position": "bottom right",
    }


def _template() -> go.layout.Template:
    font = {"family": "system-ui, sans-serif", "size": _SMALL, "color": "#222222"}
    return go.layout.Template(
        layout={
            "font": font,
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "colorway": [colour for colour, _ in LOOKS],
            "xaxis": _AXIS,
            "yaxis": _AXIS,
        }
    )
