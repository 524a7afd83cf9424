"""plot.html: confirmed speedup against measured trials and against seconds, a line a strategy, a dashed one n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

_PANELS = (("trials", "measured trials"), ("seconds", "seconds of searching (mean over seeds)"))


def make_plot(results: Mapping[str, Any], title: str) -> str:
    """A page that needs no network: the plotting library (about 5 MB) is in it."""
    ngrams = results["ngrams"]["speedup"]
    figure = make_subplots(
        rows=1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=("by measured trials", "by seconds, preparation included"),
    )
    for i, (name, strategy) in enumerate(results["strategies"].items()):
        colour = qualitative.Dark24[i % len(qualitative.Dark24)]
        for column, (field, _) in enumerate(_PANELS, start=1):
            figure.add_trace(_line(name, strategy, field, colour, show=column == 1), row=1, col=column)
    for column, (_, label) in enumerate(_PANELS, start=1):
        figure.update_xaxes(title_text=label, rangemode="tozero", row=1, col=column)
        figure.add_hline(y=1.0, line_dash="dot", line_color="grey", row=1, col=column)
        if ngrams is not None:
            figure.add_hline(ngrams, line_dash="dash", line_color="black", annotation_text="ngrams", row=1, col=column)
    figure.update_yaxes(range=_speedup_range(results))
    figure.update_yaxes(title_text="confirmed speedup over plain decoding", row=1, col=1)
    figure.update_layout(
        title=f"{title}<br><sub>{_subtitle(results)}</sub>",
        template="plotly_white",
        height=620,
        margin={"t": 110},
        legend={"title": "strategy"},
    )
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def _line(name: str, strategy: Mapping[str, Any], field: str, colour: str, *, show: bool) -> Any:
    rows = strategy["checkpoints"]
    hover = [
        f"{name} ({strategy['source']})<br>{row['trials']} trials, {row['seconds']:.1f} s<br>"
        f"{row['speedup']:.3f}x ({row['speedup_ci_low']:.3f}..{row['speedup_ci_high']:.3f})"
        + (f"<br>{row['tokens_per_s']:.1f} tokens/s" if row["tokens_per_s"] is not None else "")
        for row in rows
    ]
    return go.Scatter(
        x=[row[field] for row in rows],
        y=[row["speedup"] for row in rows],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [row["speedup_ci_high"] - row["speedup"] for row in rows],
            "arrayminus": [row["speedup"] - row["speedup_ci_low"] for row in rows],
            "thickness": 1,
        },
        mode="lines+markers",
        name=name,
        legendgroup=name,
        showlegend=show,
        line={"color": colour, "width": 4 if name == "ours" else 2},
        text=hover,
        hoverinfo="text",
    )


def _speedup_range(results: Mapping[str, Any]) -> tuple[float, float]:
    """All means; a strategy of which the seeds know nothing may have an interval that runs out of the picture."""
    values = [row["speedup"] for one in results["strategies"].values() for row in one["checkpoints"]]
    values += [1.0, results["ngrams"]["speedup"] or 1.0]
    room = 0.1 * max(max(values) - min(values), 0.1)
    return min(values) - room, max(values) + room


def _subtitle(results: Mapping[str, Any]) -> str:
    seeds = max(len(row["seeds"]) for one in results["strategies"].values() for row in one["checkpoints"])
    dashed = "" if results["ngrams"]["speedup"] is None else ", the dashed one n-grams without mask and search"
    return (
        f"mean and 95 % interval over {seeds} seeds of each run's leader, measured on "
        f"{results['num_held_out_prompts']} held-out prompts; the dotted line is plain decoding{dashed}"
    )
