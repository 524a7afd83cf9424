"""What a study knew before its first trial, drawn: costs of the steps, and what every sublayer is worth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from layerskip.config.decode_config import number_format
from layerskip.config.skip_mask import SkipMask
from search.predict.learnt_costs import learnt_costs_of
from search.predict.sensitivity import Sensitivity, SublayerWorth
from search.reporting.figures.style import BLUE, DOTTED, GREEN, GREY, ORANGE, add_bars, finish
from search.reporting.record import MissingData, StudyRecord
from search.study.attributes import COSTS, SENSITIVITY
from search.study.space import kind_of, layer_of

_KINDS = {
    "attn": ("attention", BLUE, "circle", "solid"),
    "mlp": ("MLP", ORANGE, "square", "dash"),
    "layer": ("whole layer", GREEN, "diamond", "solid"),
}
"""Second word of a bit's name: what it skips, and how that looks."""
_CURVES = {"first": (GREY, "dash", "circle-open"), "in the trials": (ORANGE, "dot", "diamond")}
"""How a measurement of the costs looks; the latest one like none of these."""
_NUM_NAMED = 3
_LOSSES = (0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Ticks of the axis of agreement, as 1 - agreement."""


def cost_figure(record: StudyRecord) -> go.Figure:
    """Measured costs in steps of the target: of verifying n draft tokens, and of a draft token by its terms.

    The first and the latest measurement, each against the target step measured with it, so that a clock that merely
    runs slower shows in the legend and a cost that changed shows in the curve; and what the trials' own steps taught.
    Raises: MissingData if the study keeps no costs.
    """
    history: list[str] = json.loads(record.attrs.get(COSTS, "[]"))
    costs: list[dict[str, Any]] = [json.loads(one) for one in history]
    if not costs:
        raise MissingData(f"{COSTS}: study {record.name!r} keeps no measured costs")
    shown = {"first": costs[0], "latest": costs[-1]} if len(costs) > 1 else {"only": costs[0]}
    if (learnt := learnt_costs_of(record.study, history)) is not None:
        shown["in the trials"] = json.loads(learnt.to_json())
    figure = make_subplots(
        rows=2,
        row_heights=[0.62, 0.38],
        vertical_spacing=0.27,
        subplot_titles=(
            "verifying so many draft tokens at once",
            "one draft token, nothing skipped<br>(dotted: a target step)",
        ),
    )
    _add_verifications(figure, shown)
    _add_terms(figure, shown)
    figure.update_yaxes(title="target steps", rangemode="tozero", row=1)
    figure.update_xaxes(title="target steps", rangemode="tozero", row=2)
    figure.update_yaxes(autorange="reversed", row=2)
    figure.update_layout(
        barmode="stack", height=680, uniformtext={"minsize": 10, "mode": "hide"}, legend={"traceorder": "normal"}
    )
    one = costs[-1]
    facts = (
        f"{len(costs)} measurement{'s' * (len(costs) > 1)} on texts of about {one['context_tokens']} tokens, "
        f"{_device(one['measured_on'])}; "
        f"the sum of terms misses a draft step by {100 * one['fit_error']:.1f} % (median)"
    )
    return finish(figure, "What a step costs", facts)


def sensitivity_figure(record: StudyRecord) -> go.Figure:
    """By layer, attention and MLP apart: agreement of the draft without it, and agreement that it adds to a thin draft.

    Raises: MissingData if the study keeps no sensitivity.
    """
    stored = record.attrs.get(SENSITIVITY)
    if stored is None:
        raise MissingData(f"{SENSITIVITY}: study {record.name!r} keeps none")
    sensitivity = Sensitivity.from_json(stored)
    base = SkipMask.parse(sensitivity.base)
    figure = make_subplots(
        rows=2,
        shared_xaxes=True,
        vertical_spacing=0.16,
        subplot_titles=(
            "left out alone: low = hard to do without<br>(stretched near 1)",
            "added to the draft of the shaded layers,<br>or taken out of it: high = worth its place",
        ),
    )
    _add_worths(figure, 1, sensitivity, "leave_one_out")
    _add_worths(figure, 2, sensitivity, "keep_one_out")
    figure.add_hline(y=0.0, line=DOTTED, row=2, col=1)
    if base.exit_layer is not None:
        figure.add_vrect(
            x0=-0.5, x1=base.exit_layer - 0.5, fillcolor="#888888", opacity=0.14, line_width=0, row=2, col=1
        )
    figure.update_xaxes(range=[-0.5, base.num_layers - 0.5], dtick=1 if base.num_layers <= 16 else 5)
    figure.update_xaxes(title="layer", row=2)
    figure.update_yaxes(title="agreement", row=1, type="log", autorange="reversed")
    figure.update_yaxes(tickvals=_LOSSES, ticktext=[f"{1 - loss:g}" for loss in _LOSSES], row=1)
    figure.update_yaxes(title="agreement gained", row=2)
    figure.update_layout(height=680)
    worst = sorted(sensitivity.sublayers, key=lambda one: one.leave_one_out)[:_NUM_NAMED]
    facts = (
        f"hardest to do without: {', '.join(map(_told, worst))}; agreement = share of draft tokens that the target "
        f"accepts; the draft of the shaded layers has {sensitivity.base_agreement:.2f}"
    )
    return finish(figure, "Which sublayers matter", facts)


def _add_verifications(figure: go.Figure, shown: Mapping[str, Mapping[str, Any]]) -> None:
    """A curve per measurement: target steps that verifying 0, 1, ... draft tokens takes."""
    for name, cost in shown.items():
        colour, dash, symbol = _CURVES.get(name, (BLUE, "solid", "circle"))
        alone = cost["verify_s"][0]
        figure.add_scatter(
            x=list(range(len(cost["verify_s"]))),
            y=[seconds / alone for seconds in cost["verify_s"]],
            name=f"{name}: target step {1000 * alone:.2f} ms",
            line={"color": colour, "dash": dash},
            marker={"symbol": symbol, "size": 9},
            mode="lines+markers",
            customdata=[1000 * seconds for seconds in cost["verify_s"]],
            hovertemplate="%{x} draft tokens: %{y:.2f} target steps, %{customdata:.2f} ms<extra>" + name + "</extra>",
            row=1,
            col=1,
        )


def _add_terms(figure: go.Figure, shown: Mapping[str, Mapping[str, Any]]) -> None:
    """Stacked bars of a draft token's terms, one bar per measurement."""
    count = len(next(iter(shown.values()))["attention_s"])
    terms = (
        ("fixed", "fixed_s", GREY, "", "fixed"),
        ("attention", "attention_s", BLUE, "/", f"{count} attentions"),
        ("MLP", "mlp_s", ORANGE, ".", f"{count} MLPs"),
        ("confidence", "threshold_s", GREEN, "x", "confidence (with a threshold)"),
    )
    for name, field, colour, pattern, words in terms:
        seconds = [sum(cost[field]) if isinstance(cost[field], list) else cost[field] for cost in shown.values()]
        steps = [one / cost["verify_s"][0] for one, cost in zip(seconds, shown.values(), strict=True)]
        add_bars(
            figure,
            words,
            colour,
            pattern,
            x=steps,
            y=list(shown),
            orientation="h",
            width=0.7,
            text=[f"{name} {value:.2f}" for value in steps],
            textfont={"color": "white"},
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            customdata=[1000 * one for one in seconds],
            hovertemplate="%{x:.3f} target steps, %{customdata:.3f} ms<extra>" + words + "</extra>",
            row=2,
            col=1,
        )
    figure.add_vline(x=1.0, line=DOTTED, row=2, col=1)


def _add_worths(figure: go.Figure, row: int, sensitivity: Sensitivity, field: str) -> None:
    """A line per kind of sublayer. Row 1 is drawn as what is lost, on a log axis: one dire layer hides all others else.

    No loss at all is drawn at half the smallest one.
    """
    losses = [1.0 - one.leave_one_out for one in sensitivity.sublayers]
    least = min((loss for loss in losses if loss > 0.0), default=0.02) / 2
    for kind, (words, colour, symbol, dash) in _KINDS.items():
        some = [one for one in sensitivity.sublayers if kind_of(one.name) == kind]
        if not some:
            continue
        values = [getattr(one, field) for one in some]
        figure.add_scatter(
            x=[layer_of(one.name) for one in some],
            y=[max(1.0 - value, least) for value in values] if row == 1 else values,
            name=words,
            legendgroup=kind,
            showlegend=row == 1,
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 1},
            marker={"symbol": symbol, "size": 8},
            customdata=values,
            hovertemplate=words + " %{x}: %{customdata:.3f}<extra></extra>",
            row=row,
            col=1,
        )


def _told(one: SublayerWorth) -> str:
    return f"{_KINDS[kind_of(one.name)][0]} {layer_of(one.name)} ({one.leave_one_out:.2f})"


def _device(measured_on: Mapping[str, Any]) -> str:
    where = measured_on.get("cpu") if measured_on.get("device") == "cpu" else measured_on.get("device")
    numbers = number_format(str(measured_on.get("dtype")), measured_on.get("quantization"))
    return f"{where}, {numbers}, engine {measured_on.get('engine')}"
