"""What a study's trials measured, drawn beside what was predicted of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go
from optuna.trial import FrozenTrial

from search.predict.accuracy import (
    PredictionCheck,
    describe_ranks,
    predicted_and_measured,
    prediction_check_of,
    replay_check_of,
)
from search.reporting.figures.style import BLUE, DOTTED, GREEN, ORANGE, PURPLE, finish, look
from search.reporting.record import MissingData, StudyRecord
from search.study.attributes import (
    CONFIRMED,
    ORIGIN,
    PLAIN_TOKENS_PER_S,
    POOL,
    PREDICTED_SPEEDUP,
    SKIP_MASK,
)
from search.study.space import (
    DRAFT_THRESHOLD,
    DRAFTER,
    GAMMA,
    LOOKUP_GAMMA,
    MIN_MATCH,
    TARGET_THRESHOLD,
)
from search.study.trials import is_full, trials_by_state

_DISPLAY = {
    "warm": "known shape",
    "drafter": "best of a drafter",
    "repeat": "measured again",
    "replay": "neighbour by replay",
}


def prediction_figure(record: StudyRecord) -> go.Figure:
    """Predicted against measured speedup, a point per trial, each on the prompts that it was measured on.

    Raises: MissingData if no trial has both.
    """
    trials = record.trials
    found = [(trial, pair) for trial in trials if (pair := predicted_and_measured(trial)) is not None]
    check = prediction_check_of(trials)
    if not found or check is None:
        raise MissingData(f"predicted_ratios: no trial of study {record.name!r} has them and a measurement")
    values = [value for _, pair in found for value in pair]
    low, high = 0.95 * min(values), 1.05 * max(values)
    figure = go.Figure()
    ends = [low, high]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="measured = predicted", line=DOTTED, hoverinfo="skip")
    groups = dict.fromkeys(_origin(trial) for trial, _ in found)
    for place, origin in enumerate(groups):
        some = [(trial, pair) for trial, pair in found if _origin(trial) == origin]
        some.sort(key=lambda one: not is_full(one[0]))  # the legend shows the first one's form
        colour, symbol = look(place)
        figure.add_scatter(
            x=[predicted for _, (predicted, _) in some],
            y=[measured for _, (_, measured) in some],
            mode="markers",
            name=f"{_DISPLAY.get(origin, origin)} ({len(some)})",
            marker={"color": colour, "size": 9, "symbol": [symbol + "-open" * (not is_full(t)) for t, _ in some]},
            customdata=[_about(trial) for trial, _ in some],
            hovertemplate="%{customdata}<br>predicted %{x:.3f}, measured %{y:.3f}<extra></extra>",
        )
    figure.update_xaxes(title="predicted speedup over plain decoding", range=[low, high], constrain="domain")
    figure.update_yaxes(title="measured speedup", range=[low, high], scaleanchor="x", constrain="domain")
    figure.update_layout(height=640)
    return finish(figure, "Predicted against measured", _prediction_facts(check, trials))


def convergence_figure(record: StudyRecord) -> go.Figure:
    """Measured and predicted speedup of every trial, and the pooled lower bound of whatever led after it.

    Predictions are drawn where there are some. Cost: as `StudyRecord.leaders`.
    Raises: MissingData if no trial has been measured, or the study keeps no reference.
    """
    trials, measured = record.trials, record.measured
    if not measured:
        raise MissingData(f"speedup: no trial of study {record.name!r} has been measured")
    led = record.leaders
    figure = go.Figure()
    full, partial = ([trial for trial in measured if is_full(trial) == wanted] for wanted in (True, False))
    _add_trials(figure, full, "speedup", "measured", (BLUE, "circle"))
    _add_trials(figure, partial, "speedup", "measured, stopped early", (BLUE, "circle-open"))
    predicted = [trial for trial in trials if PREDICTED_SPEEDUP in trial.user_attrs]
    _add_trials(figure, predicted, "predicted_speedup", "predicted", (ORANGE, "x-thin-open"))
    if led:
        figure.add_scatter(
            x=[number for number, _ in led],
            y=[entry.lower for _, entry in led],
            mode="lines",
            name="leader, pooled lower bound",
            line={"color": GREEN, "width": 2.5, "shape": "hv"},
            customdata=[f"#{e.trials[0]}, {len(e.trials)} trials, pooled {e.speedup:.3f}" for _, e in led],
            hovertemplate="leader %{customdata}<br>lower bound %{y:.3f}<extra></extra>",
        )
    if confirmed := record.attrs.get(CONFIRMED):
        _add_confirmed(figure, len(trials) + 1 + len(trials) // 30, confirmed)
    figure.add_hline(y=1.0, line=DOTTED, annotation={"text": "plain decoding"}, annotation_position="bottom right")
    figure.update_xaxes(title="trial")
    figure.update_yaxes(title="speedup over plain decoding")
    figure.update_layout(height=560)
    return finish(figure, "Speedup by trial", _convergence_facts(record))


def _add_trials(
    figure: go.Figure, trials: Sequence[FrozenTrial], field: str, words: str, appearance: tuple[str, str]
) -> None:
    if not trials:
        return
    colour, symbol = appearance
    tells = field == "speedup"  # which config it is need not be stored twice
    figure.add_scatter(
        x=[trial.number for trial in trials],
        y=[trial.user_attrs[field] for trial in trials],
        mode="markers",
        name=words,
        marker={"color": colour, "symbol": symbol, "size": 8, "line": {"width": 2, "color": colour}},
        customdata=[_about(trial) for trial in trials] if tells else None,
        hovertemplate=("%{customdata}" if tells else "#%{x}") + f"<br>{words} %{{y:.3f}}<extra></extra>",
    )


def _add_confirmed(figure: go.Figure, x: int, confirmed: dict[str, Any]) -> None:
    """A diamond beside the trials; one prompt has no interval, and what stands for it is a thousandfold."""
    speedup, low, high = (confirmed[name] for name in ("speedup", "speedup_ci_low", "speedup_ci_high"))
    bar = {"type": "data", "symmetric": False, "array": [high - speedup], "arrayminus": [speedup - low]}
    has_interval = confirmed["num_prompts"] > 1
    figure.add_scatter(
        x=[x],
        y=[speedup],
        mode="markers",
        name="confirmed, 95 % interval" if has_interval else "confirmed on one prompt",
        marker={"color": PURPLE, "symbol": "diamond", "size": 11},
        error_y=bar if has_interval else None,
        hovertemplate=f"confirmed on {confirmed['num_prompts']} held-out prompts: %{{y:.3f}}<extra></extra>",
    )


def _about(trial: FrozenTrial) -> str:
    """Hover text: which config. Short, as it is stored once a trial and figure."""
    params, attrs = trial.params, trial.user_attrs
    text = f"#{trial.number} {attrs.get(ORIGIN, '?')}"
    if DRAFTER in params:
        text += f"<br>{params[DRAFTER]}"
    if GAMMA in params:
        text += f"<br>mask {attrs.get(SKIP_MASK, '?')}<br>gamma {params[GAMMA]}"
        text += "".join(f", {name} {params[name]:g}" for name in (DRAFT_THRESHOLD, TARGET_THRESHOLD) if params[name])
    if LOOKUP_GAMMA in params:
        text += f"<br>lookup of {params[MIN_MATCH]} or more tokens, gamma {params[LOOKUP_GAMMA]}"
    return text


def _origin(trial: FrozenTrial) -> str:
    return str(trial.user_attrs.get(ORIGIN, "?")).partition(":")[0]


def _prediction_facts(check: PredictionCheck, trials: Sequence[FrozenTrial]) -> str:
    text = (
        f"{check.num_trials} trials: median error {100 * check.median_abs_error:.1f} %, "
        f"{describe_ranks(asdict(check))}, predicted / measured {check.bias:.3f}; open = stopped early"
    )
    if check.noise_spearman is not None:
        text += f"; the clock's noise alone would leave a rank correlation of {check.noise_spearman:.2f}"
    if (replayed := replay_check_of(trials)) is not None:
        text += f"; forwards replayed exactly in {100 * replayed.exact_share:.0f} %"
    return text


def _convergence_facts(record: StudyRecord) -> str:
    words = {
        "measured": "in full",
        "stopped_early": "stopped early",
        "not_lossless": "NOT LOSSLESS",
        "failed": "failed",
        "interrupted": "interrupted",
    }
    counts = trials_by_state(list(record.trials))
    parts = [f"{counts[state]} {said}" for state, said in words.items() if counts[state]]
    text = f"{len(record.trials)} trials: {', '.join(parts)}"
    if (plain := record.attrs.get(PLAIN_TOKENS_PER_S)) is not None:
        text += f"; plain decoding {plain:.1f} tokens/s"
    pool = json.loads(record.attrs.get(POOL, "[]"))
    if pool:
        text += f"; best of {len(pool)} predicted before the first trial {math.exp(pool[0][4]):.2f}"
    return text
