"""The rows of a benchmark as a bar chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_OURS, _OTHERS = "#0072b2", "#555555"


def write_plot(path: Path, rows: Sequence[Mapping[str, Any]], facts: str) -> None:
    """Tokens/s of every row that ran, with its interval, as an HTML page that needs no network."""
    import plotly.graph_objects as go

    ran = [row for row in rows if row["tokens_per_s"] is not None]
    rates = [row["tokens_per_s"] for row in ran]
    # Of few prompts an interval may be many times the rate; it is cut off rather than everything else made invisible.
    limit = min(
        1.6 * max(rates, default=1.0), 1.05 * max((row["ci_high"] or row["tokens_per_s"] for row in ran), default=1.0)
    )
    figure = go.Figure(
        go.Bar(
            y=[row["name"] for row in ran],
            x=rates,
            orientation="h",
            marker_color=[_OTHERS if row["name"].startswith("hf_") else _OURS for row in ran],
            # Beside the interval's end, or it would lie on the bar's own.
            text=[f" {rate:.1f}{_ratio_words(row)}" for rate, row in zip(rates, ran, strict=True)],
            textposition="inside",
            insidetextanchor="start",
            textfont={"color": "white"},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [(row["ci_high"] or rate) - rate for rate, row in zip(rates, ran, strict=True)],
                "arrayminus": [rate - (row["ci_low"] or rate) for rate, row in zip(rates, ran, strict=True)],
                "color": "#222222",
            },
            hovertemplate="%{y}: %{x:.1f} tokens/s<extra></extra>",
        )
    )
    figure.update_layout(
        title={
            "text": f"Tokens a second, prompt apart<br><sub>{facts}</sub>",
            "x": 0,
            "xanchor": "left",
            "pad": {"l": 14},
        },
        template="plotly_white",
        xaxis={"title": "tokens/s, geometric mean over prompts with its 95 % interval", "range": [0, limit]},
        yaxis={"autorange": "reversed", "automargin": True, "ticksuffix": " "},
        margin={"l": 14, "r": 14, "t": 80, "b": 50},
        showlegend=False,
    )
    figure.write_html(path, include_plotlyjs=True)


def _ratio_words(row: Mapping[str, Any]) -> str:
    against, end_to_end = row.get("vs_hf_generate"), row.get("end_to_end_vs_hf_generate")
    if not against or not end_to_end:
        return ""
    return f"  ({against['ratio']:.2f}× hf_generate, {end_to_end['ratio']:.2f}× prompt included)"
