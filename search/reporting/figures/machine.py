"""Gamma and threshold around the winner as predicted, and how steady the machine was, drawn."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median

import numpy as np
import plotly.graph_objects as go
from optuna.trial import FrozenTrial

from layerskip.analysis.intervals import geometric_mean, log_spread
from layerskip.config.decode_config import DecodeConfig
from search.predict.accuracy import spread_within
from search.predict.surfaces import surface_around
from search.reporting.figures.style import BLUE, DOTTED, ORANGE, finish
from search.reporting.record import MissingData, StudyRecord, space_of
from search.study.attributes import NOISE_SIGMA, PLAIN_TOKENS_PER_S_BY_PROMPT, PROMPT_STEPS, RATIOS, SURFACES

_SCALE = [[0.0, "#f3f6f9"], [0.45, "#8fbbd6"], [1.0, "#004a75"]]
_NORMAL_95 = 1.96


def surface_figure(record: StudyRecord) -> go.Figure:
    """Predicted speedup over gamma and draft_threshold for the chosen mask, and where trials have measured it.

    Raises: MissingData if the study keeps no surface around the chosen config.
    """
    choice = record.choice
    surface = surface_around(record.attrs.get(SURFACES), choice.config) if choice else None
    if choice is None or surface is None:
        raise MissingData(f"{SURFACES}: study {record.name!r} keeps none around the chosen config")
    gammas, thresholds, values = surface["gammas"], surface["draft_thresholds"], np.array(surface["speedups"])
    figure = go.Figure()
    figure.add_heatmap(
        z=values.tolist(),
        x=thresholds,
        y=gammas,
        colorscale=_SCALE,
        colorbar={"thickness": 10, "outlinewidth": 0, "tickformat": ".2f"},
        hovertemplate="gamma %{y}, draft_threshold %{x}: predicted %{z:.3f}<extra></extra>",
    )
    tried = sorted({(t.params["draft_threshold"], t.params["gamma"]) for t in _alike(record, choice.config)})
    if tried:
        figure.add_scatter(
            x=[x for x, _ in tried],
            y=[y for _, y in tried],
            mode="markers",
            name="measured",
            marker={"symbol": "circle-open", "size": 9, "color": "#222222", "line": {"width": 1.5}},
            hovertemplate="measured at gamma %{y}, draft_threshold %{x}<extra></extra>",
        )
    figure.add_scatter(
        x=[choice.config.draft_threshold],
        y=[choice.config.gamma],
        mode="markers",
        name="chosen",
        marker={"symbol": "star", "size": 16, "color": ORANGE, "line": {"width": 1.5, "color": "white"}},
        hovertemplate="chosen: gamma %{y}, draft_threshold %{x}<extra></extra>",
    )
    figure.update_xaxes(title="draft_threshold (0 = off)", showgrid=False)
    figure.update_yaxes(title="gamma", dtick=1 if len(gammas) <= 16 else 4, showgrid=False)
    figure.update_layout(height=430)
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    here = ""
    if choice.config.gamma in gammas and choice.config.draft_threshold in thresholds:
        own = values[gammas.index(choice.config.gamma), thresholds.index(choice.config.draft_threshold)]
        here = f", {own:.2f}× at the chosen setting"
    near = float((values >= 0.98 * values.max()).mean())
    facts = (
        f"mask {surface['skip_mask']}, target_threshold {surface['target_threshold']:g}: predicted best "
        f"{values.max():.2f}× at gamma {gammas[row]}, draft_threshold {thresholds[column]:g}{here}; "
        f"{100 * near:.0f} % of the settings lie within 2 % of the best"
    )
    return finish(figure, "Gamma and threshold around the chosen mask", facts)


def machine_figure(record: StudyRecord) -> go.Figure:
    """Drift: plain tokens/s against its median on the same prompt; and what pairing leaves of it in repeated ratios.

    Raises: MissingData below two measurements of the same prompt.
    """
    plain: dict[int, list[tuple[int, float]]] = defaultdict(list)
    ratios: dict[tuple[object, ...], list[tuple[int, float]]] = defaultdict(list)
    for trial in record.measured:
        attrs = trial.user_attrs
        for step, rate, ratio in zip(
            attrs[PROMPT_STEPS], attrs.get(PLAIN_TOKENS_PER_S_BY_PROMPT, []), attrs[RATIOS], strict=False
        ):
            plain[step].append((trial.number, rate))
            ratios[(step, *sorted(trial.params.items()))].append((trial.number, ratio))
    drift = sorted(
        (n, rate / median(r for _, r in some)) for some in plain.values() if len(some) > 1 for n, rate in some
    )
    again = sorted(
        (n, ratio / geometric_mean([r for _, r in some]))
        for some in ratios.values()
        if len(some) > 1
        for n, ratio in some
    )
    if not drift:
        raise MissingData(f"plain_tokens_per_s_by_prompt: no prompt of study {record.name!r} was measured twice")
    sigma, figure = record.attrs.get(NOISE_SIGMA), go.Figure()
    for points, name, colour, symbol in (
        (drift, "plain tokens/s, against its prompt's median", BLUE, "circle-open"),
        (again, "speedup measured again, against its mean", ORANGE, "diamond-open"),
    ):
        figure.add_scatter(
            x=[number for number, _ in points],
            y=[round(value, 4) for _, value in points],
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": symbol, "size": 6},
            hovertemplate="trial %{x}: %{y:.3f}",
        )
    figure.add_hline(y=1.0, line=DOTTED)
    if sigma and again:
        low, high = math.exp(-_NORMAL_95 * sigma), math.exp(_NORMAL_95 * sigma)
        figure.add_hrect(y0=low, y1=high, fillcolor="#888888", opacity=0.18, line_width=0)
    figure.update_xaxes(title="trial")
    figure.update_yaxes(title="of its usual value", type="log")
    figure.update_layout(height=480, showlegend=True)  # says what is drawn where one is alone, too
    values = [value for _, value in drift]
    facts = (
        f"plain speed varied by {100 * log_spread(values):.1f} % (standard deviation) on the same prompt over the run, "
        f"from {min(values):.2f} to {max(values):.2f} of its median"
    )
    within, _ = spread_within([[math.log(ratio) for _, ratio in some] for some in ratios.values()])
    facts += (
        f"; repeated paired ratios by {100 * within:.1f} %"
        if again
        else "; no config was measured twice on the same prompt"
    )
    if sigma:
        facts += f"; A/A noise before the first trial: {100 * sigma:.1f} % a pair" + " (shaded: 95 %)" * bool(again)
    return finish(figure, "Noise and drift of the machine", facts)


def _alike(record: StudyRecord, config: DecodeConfig) -> list[FrozenTrial]:
    """Trials of this config but for gamma and draft_threshold, which a surface varies."""
    space = space_of(record.measured)
    trials = [trial for trial in record.measured if space.holds(trial.params)]
    return [trial for trial in trials if _fixed(space.to_config(trial.params)) == _fixed(config)]


def _fixed(config: DecodeConfig) -> DecodeConfig:
    return config.bare().model_copy(update={"gamma": 1, "draft_threshold": 0.0})
