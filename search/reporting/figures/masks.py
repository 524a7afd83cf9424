"""Which sublayers the draft skips, drawn: in the chosen config, and trial by trial."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from layerskip.config.skip_mask import SkipMask
from search.reporting.figures.style import ORANGE, finish
from search.reporting.record import MissingData, StudyRecord
from search.study.attributes import SKIP_MASK

_KEPT, _SKIPPED = "#0072b2", "#eef1f4"
_SCALE = [[0.0, _KEPT], [1.0, _SKIPPED]]
_SHARES = [[0.0, _KEPT], [0.5, "#8fbbd6"], [1.0, _SKIPPED]]
_MAX_MARKED = 48
"""Layers, at most, whose cells have room for a cross."""
_MAX_NUMBERED = 16
"""Layers, at most, whose cells have room for a number on a phone."""
_MAX_COLUMNS = 200


def mask_figure(record: StudyRecord) -> go.Figure:
    """Layers by attention and MLP: kept or skipped by the chosen config, and the share of trials that skipped them.

    Raises: MissingData before any config was measured in full.
    """
    choice = record.choice
    if choice is None:
        raise MissingData(f"skip_mask: no trial of study {record.name!r} has been measured in full")
    mask = choice.config.skip_mask
    masks = [SkipMask.parse(trial.user_attrs[SKIP_MASK]) for trial in record.measured]
    figure = make_subplots(
        rows=2,
        shared_xaxes=True,
        vertical_spacing=0.24,
        subplot_titles=("the draft's sublayers (× = skipped)", "skipped in so many % of the trials"),
    )
    layers = list(range(mask.num_layers))
    rows = [mask.attention, mask.mlp]
    names = ["attention", "MLP"]
    figure.add_heatmap(
        z=[[int(one) for one in row] for row in rows],
        x=layers,
        y=names,
        colorscale=_SCALE,
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=2,
        ygap=4,
        text=[["×" if one and mask.num_layers <= _MAX_MARKED else "" for one in row] for row in rows],
        texttemplate="%{text}",
        textfont={"size": 15, "color": "#222222"},
        customdata=[["skipped" if one else "kept" for one in row] for row in rows],
        hovertemplate="%{y} %{x}: %{customdata}<extra></extra>",
        row=1,
        col=1,
    )
    shares = [_shares(masks, kind) for kind in ("attention", "mlp")]
    figure.add_heatmap(
        z=shares,
        x=layers,
        y=names,
        colorscale=_SHARES,
        zmin=0,
        zmax=1,
        xgap=2,
        ygap=4,
        text=[[f"{100 * share:.0f}" for share in row] for row in shares] if mask.num_layers <= _MAX_NUMBERED else None,
        texttemplate="%{text}" if mask.num_layers <= _MAX_NUMBERED else None,
        textfont={"size": 10},
        showscale=mask.num_layers > _MAX_NUMBERED,
        colorbar={"thickness": 8, "len": 0.5, "y": 0, "yanchor": "bottom", "tickformat": ".0%", "outlinewidth": 0},
        hovertemplate="%{y} %{x}: skipped in %{z:.0%} of trials<extra></extra>",
        row=2,
        col=1,
    )
    figure.update_xaxes(showgrid=False, showline=False, dtick=1 if mask.num_layers <= 16 else 5)
    figure.update_xaxes(title="layer", row=2)
    figure.update_yaxes(showgrid=False, showline=False, autorange="reversed")
    figure.update_layout(height=340)
    facts = (
        f"{choice.words}: {mask}; it skips {mask.num_skipped_attention} attention and {mask.num_skipped_mlp} MLP "
        f"sublayers of {mask.num_layers} layers while drafting; verification runs them all"
    )
    return finish(figure, "The mask", facts)


def tried_figure(record: StudyRecord) -> go.Figure:
    """The mask of every trial, a column each (of more than 200, evenly chosen ones); a line where another mask led.

    Raises: MissingData before any trial was measured.
    """
    trials = record.measured
    if not trials:
        raise MissingData(f"skip_mask: no trial of study {record.name!r} has been measured")
    places = np.unique(np.linspace(0, len(trials) - 1, min(len(trials), _MAX_COLUMNS)).round().astype(int))
    shown = [trials[i] for i in places]
    masks = [SkipMask.parse(trial.user_attrs[SKIP_MASK]) for trial in shown]
    numbers = [trial.number for trial in shown]
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=("attention", "MLP"))
    for row, kind in enumerate(("attention", "mlp"), start=1):
        flags = [getattr(mask, kind) for mask in masks]
        figure.add_heatmap(
            z=[[int(one[layer]) for one in flags] for layer in range(masks[0].num_layers)],
            x=numbers,
            y=list(range(masks[0].num_layers)),
            colorscale=_SCALE,
            zmin=0,
            zmax=1,
            showscale=False,
            hovertemplate="trial %{x}, layer %{y}: %{z} (1 = skipped)<extra></extra>",
            row=row,
            col=1,
        )
    led = [(number, entry.config.skip_mask) for number, entry in record.leaders]
    changes = [number for (_, before), (number, after) in pairwise(led) if before != after]
    for number in changes:
        figure.add_vline(x=number - 0.5, line={"color": ORANGE, "width": 2, "dash": "dash"})
    figure.update_xaxes(showgrid=False)
    figure.update_xaxes(title="trial", row=2)
    figure.update_yaxes(title="layer", showgrid=False, dtick=None if masks[0].num_layers > 16 else 2)
    figure.update_layout(height=480)
    facts = f"dark = kept, light = skipped; {len({str(mask) for mask in masks})} different masks in {len(shown)} trials"
    if led:
        times = f"{len(changes)} time{'s' * (len(changes) != 1)} (dashed)"
        facts += f"; another mask took the lead {times}, now" if changes else "; from the first on"
        facts += f" {led[-1][1]} leads"
    return finish(figure, "Masks tried, trial by trial", facts)


def _shares(masks: Sequence[SkipMask], kind: str) -> list[float]:
    flags = [getattr(mask, kind) for mask in masks]
    return [sum(one[layer] for one in flags) / len(flags) for layer in range(len(flags[0]))] if flags else []
