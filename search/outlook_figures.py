"""What a study knew before its first trial, drawn: costs of the steps, and what every sublayer is worth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import optuna
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from layerskip.skip_mask import SkipMask
from search.figure_style import BLUE, GREEN, GREY, ORANGE, MissingData, finish, ratio_line
from search.outlook import COSTS, SENSITIVITY
from search.sensitivity import Sensitivity, SublayerWorth

_KINDS = {
    "attn": ("attention", BLUE, "circle", "solid"),
    "mlp": ("MLP", ORANGE, "square", "dash"),
    "layer": ("whole layer", GREEN, "diamond", "solid"),
}
"""Second word of a bit's name: what it skips, and how that looks."""
_NUM_NAMED = 3
_HATCH = {"fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)", "size": 7, "solidity": 0.12}
_LOSSES = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Ticks of the axis of agreement, as 1 - agreement."""


def cost_figure(study: optuna.Study) -> go.Figure:
    """Measured costs in steps of the target: of verifying n draft tokens, and of a draft token by its terms.

    The first and the latest measurement, each against the target step measured with it, so that a clock that merely
    runs slower shows in the legend and a price that changed shows in the curve.
    Raises: MissingData if the study keeps no costs.
    """
    costs: list[dict[str, Any]] = [json.loads(one) for one in json.loads(study.user_attrs.get(COSTS, "[]"))]
    if not costs:
        raise MissingData(f"{COSTS}: study {study.study_name!r} keeps no measured costs")
    shown = {"first": costs[0], "latest": costs[-1]} if len(costs) > 1 else {"only": costs[0]}
    figure = make_subplots(
        cols=2,
        column_widths=[0.55, 0.45],
        horizontal_spacing=0.1,
        subplot_titles=("verifying draft tokens", "one draft token, nothing skipped"),
    )
    looks = {"first": (GREY, "dash", "circle-open"), "latest": (BLUE, "solid", "circle")}
    for name, cost in shown.items():
        colour, dash, symbol = looks.get(name, looks["latest"])
        steps = [seconds / cost["verify_s"][0] for seconds in cost["verify_s"]]
        figure.add_scatter(
            x=list(range(len(steps))),
            y=steps,
            name=f"{name}: target step {1000 * cost['verify_s'][0]:.2f} ms",
            line={"color": colour, "dash": dash},
            marker={"symbol": symbol, "size": 9},
            mode="lines+markers",
            customdata=[1000 * seconds for seconds in cost["verify_s"]],
            hovertemplate="%{x} draft tokens: %{y:.2f} target steps, %{customdata:.2f} ms<extra>" + name + "</extra>",
            row=1,
            col=1,
        )
    _add_terms(figure, shown)
    figure.update_xaxes(title="draft tokens verified at once", col=1)
    figure.update_yaxes(title="cost (target steps)", rangemode="tozero", col=1)
    figure.update_xaxes(title="measurement", col=2)
    figure.update_yaxes(title="cost (target steps)", rangemode="tozero", col=2)
    figure.update_layout(barmode="stack", height=480, legend={"traceorder": "normal"})
    one = costs[-1]
    below = (
        f"{len(costs)} measurement{'s' * (len(costs) > 1)} on texts of about {one['context_tokens']} tokens, "
        f"{_device(one['measured_on'])}; "
        f"the sum of terms misses a draft step by {100 * one['fit_error']:.1f} % (median)"
    )
    return finish(figure, "What a step costs", below)


def sensitivity_figure(study: optuna.Study) -> go.Figure:
    """By layer, attention and MLP apart: agreement of the draft without it, and agreement that it adds to a thin draft.

    Raises: MissingData if the study keeps no sensitivity.
    """
    stored = study.user_attrs.get(SENSITIVITY)
    if stored is None:
        raise MissingData(f"{SENSITIVITY}: study {study.study_name!r} keeps none")
    sensitivity = Sensitivity.from_json(stored)
    base = SkipMask.parse(sensitivity.base)
    figure = make_subplots(
        rows=2,
        shared_xaxes=True,
        vertical_spacing=0.13,
        subplot_titles=(
            "left out alone: low = hard to do without",
            "added alone to a draft of the shaded layers, those taken out of it: high = worth its place",
        ),
    )
    _add_worths(figure, 1, sensitivity, "leave_one_out")
    _add_worths(figure, 2, sensitivity, "keep_one_out")
    figure.add_hline(y=0.0, line={"dash": "dot", "color": GREY, "width": 1.5}, row=2, col=1)
    if base.exit_layer is not None:
        figure.add_vrect(
            x0=-0.5, x1=base.exit_layer - 0.5, fillcolor="#888888", opacity=0.14, line_width=0, row=2, col=1
        )
    figure.update_xaxes(range=[-0.5, base.num_layers - 0.5], dtick=1 if base.num_layers <= 24 else 5)
    figure.update_xaxes(title="layer", row=2)
    figure.update_yaxes(title="agreement (stretched near 1)", row=1, type="log", autorange="reversed")
    figure.update_yaxes(tickvals=_LOSSES, ticktext=[f"{1 - loss:g}" for loss in _LOSSES], row=1)
    figure.update_yaxes(title="agreement gained", row=2)
    figure.update_layout(height=640)
    worst = sorted(sensitivity.sublayers, key=lambda one: one.leave_one_out)[:_NUM_NAMED]
    below = (
        f"agreement = share of draft tokens that the target accepts; the thin draft ({sensitivity.base}) has "
        f"{sensitivity.base_agreement:.2f}<br>hardest to do without: {', '.join(map(_told, worst))}"
    )
    return finish(figure, "Which sublayers matter", below)


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
        figure.add_bar(
            x=list(shown),
            y=steps,
            name=words,
            width=0.5,
            marker={"color": colour, "pattern": {"shape": pattern, **_HATCH}},
            text=[f"{name} {value:.2f}" for value in steps],
            textfont={"color": "white"},
            insidetextanchor="middle",
            textangle=0,
            customdata=[1000 * one for one in seconds],
            hovertemplate="%{y:.3f} target steps, %{customdata:.3f} ms<extra>" + words + "</extra>",
            row=1,
            col=2,
        )
    figure.add_hline(**ratio_line(1.0, "a target step"), row=1, col=2)


def _add_worths(figure: go.Figure, row: int, sensitivity: Sensitivity, field: str) -> None:
    """A line per kind of sublayer. Row 1 is drawn as what is lost, on a log axis: one dire layer hides all others else.

    No loss at all is drawn at half the smallest one.
    """
    losses = [1.0 - one.leave_one_out for one in sensitivity.sublayers]
    least = min((loss for loss in losses if loss > 0.0), default=0.02) / 2
    for kind, (words, colour, symbol, dash) in _KINDS.items():
        some = [one for one in sensitivity.sublayers if _kind(one) == kind]
        if not some:
            continue
        values = [getattr(one, field) for one in some]
        figure.add_scatter(
            x=[_layer(one) for one in some],
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


def _kind(one: SublayerWorth) -> str:
    return one.name.split(".")[1]


def _layer(one: SublayerWorth) -> int:
    return int(one.name.rpartition(".")[2])


def _told(one: SublayerWorth) -> str:
    return f"{_KINDS[_kind(one)][0]} {_layer(one)} ({one.leave_one_out:.2f})"


def _device(measured_on: Mapping[str, object]) -> str:
    where = measured_on.get("cpu") if measured_on.get("device") == "cpu" else measured_on.get("device")
    return f"{where}, {measured_on.get('dtype')}, engine {measured_on.get('engine')}"
