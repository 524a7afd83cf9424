"""Which sublayers the draft skips, drawn: trial by trial, and in the chosen config."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from layerskip.config.skip_mask import SkipMask
from search.reporting.figures.style import ORANGE, finish
from search.reporting.record import MissingData, StudyRecord
from search.study.attributes import SKIP_MASK

_SCALE = [[0.0, "#0072b2"], [1.0, "#eef1f4"]]
"""Kept, skipped."""
_MAX_MARKED = 24
"""Layers, at most, whose cells have room for a cross."""
_MAX_COLUMNS = 200


def mask_figure(record: StudyRecord) -> go.Figure:
    """The mask of every trial, a column each (of more than 200, evenly chosen ones), and at the right the chosen one.

    A line stands where another mask took the lead.
    Raises: MissingData before any trial was measured.
    """
    trials = record.measured
    if not trials:
        raise MissingData(f"skip_mask: no trial of study {record.name!r} has been measured")
    places = np.unique(np.linspace(0, len(trials) - 1, min(len(trials), _MAX_COLUMNS)).round().astype(int))
    numbers = [trials[i].number for i in places]
    masks = [SkipMask.parse(trials[i].user_attrs[SKIP_MASK]) for i in places]
    num_layers, choice = masks[0].num_layers, record.choice
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=("attention", "MLP"))
    columns = [(numbers, masks, "trial %{x}", "")]
    if choice is not None:
        # As wide as eight hundredths of the trials, which lie left of it: its left and right edge.
        span = numbers[-1] - numbers[0] + 1
        edges = [numbers[-1] + 0.5 + share * span for share in (0.03, 0.11)]
        columns.append((edges, [choice.config.skip_mask], "chosen", "×" if num_layers <= _MAX_MARKED else ""))
    for row, kind in enumerate(("attention", "mlp"), start=1):
        for x, shown, words, cross in columns:
            cells = [[int(getattr(mask, kind)[layer]) for mask in shown] for layer in range(num_layers)]
            figure.add_heatmap(
                z=cells,
                x=x,
                y=list(range(num_layers)),
                colorscale=_SCALE,
                zmin=0,
                zmax=1,
                showscale=False,
                text=[[cross * cell for cell in one] for one in cells] if cross else None,
                texttemplate="%{text}" if cross else None,
                hovertemplate=words + ", layer %{y}: %{z} (1 = skipped)<extra></extra>",
                row=row,
                col=1,
            )
    led = [(number, entry.config.skip_mask) for number, entry in record.leaders]
    changes = [number for (_, before), (number, after) in pairwise(led) if before != after]
    for number in changes:
        figure.add_vline(x=number - 0.5, line={"color": ORANGE, "width": 2, "dash": "dash"})
    figure.update_xaxes(showgrid=False)
    figure.update_xaxes(title="trial (at the right the chosen mask)" if choice else "trial", row=2)
    figure.update_yaxes(title="layer", showgrid=False, dtick=None if num_layers > 16 else 2)
    figure.update_layout(height=520)
    facts = f"dark = kept, light = skipped; {len({str(mask) for mask in masks})} different masks in {len(masks)} trials"
    if led:
        times = f"{len(changes)} time{'s' * (len(changes) != 1)} (dashed)"
        facts += f"; another mask took the lead {times}, now" if changes else "; from the first on"
        facts += f" {led[-1][1]} leads"
    if choice is not None:
        mask = choice.config.skip_mask
        facts = (
            f"{choice.words}: {mask}; it skips {mask.num_skipped_attention} attention and {mask.num_skipped_mlp} MLP "
            f"sublayers of {num_layers} layers while drafting; verification runs them all; {facts}"
        )
    return finish(figure, "The mask, and those tried", facts)
