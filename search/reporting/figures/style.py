"""How figures look: one small template, and looks that differ in colour and in form alike."""

from __future__ import annotations

import textwrap
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
DOTTED = {"dash": "dot", "color": GREY, "width": 1.5}
_SMALL, _LARGE = 13, 16
_LINE = 21
"""Pixels from one line of the title to the next: 1.3 times the larger font."""
_BUTTONS = 40
"""Pixels at the top that belong to Plotly's buttons; in a card they lie beside the title."""
_PHONE_WIDTH, _CARD_WIDTH = 46, 72
"""Characters of the smaller font."""
_CARD_HEIGHT = 450
_AXIS = {
    "gridcolor": "#e3e3e3",
    "linecolor": "#888888",
    "showline": True,
    "zeroline": False,
    "automargin": True,
    "title": {"font": {"size": _SMALL}},
}


def look(place: int) -> tuple[str, str]:
    """Colour and marker of the group at a place; they repeat after six."""
    return LOOKS[place % len(LOOKS)]


def add_bars(figure: go.Figure, name: str, colour: str, pattern: str, **trace: Any) -> None:
    """Bars told apart by a hatching too; `trace` is what else Plotly takes."""
    hatch = {"shape": pattern, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)", "size": 7, "solidity": 0.12}
    figure.add_bar(name=name, marker={"color": colour, "pattern": hatch}, **trace)


def finish(figure: go.Figure, title: str, facts: str) -> go.Figure:
    """Give the figure its title, facts below it, the template, and a legend at the foot; returns it.

    Readable from a phone's width on: text is wrapped, and nothing stands beside the plot. The template is written out
    in every stored figure, and a storage takes a row per 2 kB: so it is not plotly's.
    """
    figure.update_layout(
        meta={"title": title, "facts": facts},
        title={"font": {"size": _LARGE}, "x": 0, "xanchor": "left", "y": 1, "yanchor": "top"},
        template=_template(),
        hovermode="closest",
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    )
    figure.update_annotations(font={"size": _SMALL})
    return _titled(figure, _PHONE_WIDTH, _BUTTONS)


def fit_card(figure: go.Figure) -> go.Figure:
    """Make a finished figure fit the dashboard's cards, half a page wide, which cover what is higher; returns it."""
    figure.update_layout(height=_CARD_HEIGHT)
    return _titled(figure, _CARD_WIDTH, 12)


def fit_page(figure: go.Figure) -> go.Figure:
    """Make a finished figure part of a page that has its title and facts as text, and scrolls by touch; returns it."""
    # A finger on the plot scrolls the page.
    return figure.update_layout(title=None, dragmode=False, margin=_margin(figure, 12, 0))


def _titled(figure: go.Figure, width: int, above: int) -> go.Figure:
    """The title with its facts in lines of so many characters, so many pixels from the top."""
    lines = textwrap.wrap(figure.layout.meta["facts"], width)
    small = [f"<span style='font-size:{_SMALL}px'>{line}</span>" for line in lines]
    return figure.update_layout(
        title={"text": "<br>".join([figure.layout.meta["title"], *small]), "pad": {"t": above, "l": 14}},
        margin=_margin(figure, above, 1 + len(lines)),
    )


def _margin(figure: go.Figure, above: int, lines: int) -> dict[str, int]:
    """Room for so many lines at the top, and for the heading of the first plot where there are several."""
    heading = [one.text.count("<br>") + 1 for one in figure.layout.annotations[:1] if one.yref == "paper"]
    return {"t": above + _LINE * (lines + sum(heading)), "l": 14, "r": 14, "b": 40}


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
