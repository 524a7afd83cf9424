"""How the chosen config decodes, drawn: speeds per held-out prompt and over the length of a text, acceptance by draft
position, where the time goes."""

from __future__ import annotations

from html import escape
from statistics import median

import plotly.graph_objects as go

from search.reporting.figures.counters import Shown, counters_of, times_of
from search.reporting.figures.style import BLUE, DOTTED, GREEN, GREY, ORANGE, PURPLE, add_bars, finish
from search.reporting.record import MissingData, StudyRecord
from search.study.attributes import FINGERPRINT

_PARTS = (
    ("draft", ORANGE, "/"),
    ("verify", BLUE, ""),
    ("target-only", PURPLE, "x"),
    ("loop", GREEN, "."),
    ("target step", GREY, ""),
)
"""Of a token's time, with their looks."""
_NAME_WIDTH = 18
_ROW = 22
"""Pixels of one prompt."""


def held_out_figure(record: StudyRecord) -> go.Figure:
    """Plain and speculative tokens/s, a row per held-out prompt, most gained at the top; bars span the passes.

    Raises: MissingData if the study keeps no rates per prompt.
    """
    held_out = record.held_out
    if held_out is None:
        raise MissingData(f"held_out: study {record.name!r} keeps no speeds per held-out prompt")
    fast, plain = (held_out.typical[name] for name in ("tokens_per_s", "plain_tokens_per_s"))
    ratios = [one / other for one, other in zip(fast, plain, strict=True)]
    order = sorted(range(len(ratios)), key=lambda i: ratios[i])
    rows = list(range(len(order)))
    figure = go.Figure()
    figure.add_scatter(
        x=[value for i in order for value in (plain[i], fast[i], None)],
        y=[row for row in rows for _ in range(3)],
        mode="lines",
        line={"color": "#bbbbbb", "width": 3},
        hoverinfo="skip",
        showlegend=False,
    )
    series = (
        ("plain decoding", held_out.plain_tokens_per_s, plain, ORANGE, "circle-open"),
        ("speculative", held_out.tokens_per_s, fast, BLUE, "diamond"),
    )
    for name, rates, middle, colour, symbol in series:
        figure.add_scatter(
            x=[middle[i] for i in order],
            y=rows,
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": symbol, "size": 10, "line": {"width": 2, "color": colour}},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [max(rates[i]) - middle[i] for i in order],
                "arrayminus": [middle[i] - min(rates[i]) for i in order],
                "thickness": 1,
                "width": 0,
            },
            customdata=[[escape(held_out.prompt_ids[i]), ratios[i]] for i in order],
            hovertemplate="%{customdata[0]}<br>"
            + name
            + " %{x:.1f} tokens/s, speedup %{customdata[1]:.2f}<extra></extra>",
        )
    slower = sum(ratio < 1.0 for ratio in ratios)
    facts = (
        f"{len(ratios)} prompts × {len(held_out.tokens_per_s[0])} passes; speedup of a prompt from "
        f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}; slower than plain decoding on {slower}"
    )
    names = [f"{_short(held_out.prompt_ids[i])}  {ratios[i]:.2f}×" for i in order]
    figure.update_xaxes(title=f"tokens/s, {held_out.average}", rangemode="tozero")
    figure.update_yaxes(tickvals=rows, ticktext=names, range=[-0.7, len(rows) - 0.3])
    figure.update_layout(height=150 + _ROW * len(rows))
    return finish(figure, "Plain against speculative, prompt by prompt", facts)


def position_figure(record: StudyRecord) -> go.Figure:
    """Speedup over position in the continuation: of the tokens there, and of all up to there.

    Raises: MissingData if the study keeps no seconds by position.
    """
    held_out = record.held_out
    if held_out is None or (kept := held_out.by_position) is None:
        raise MissingData(f"by_position: study {record.name!r} keeps no seconds by position in a text")
    spans, up_to = kept.spans, kept.speedups_up_to
    ends = [end for _, end in spans]
    figure = go.Figure()
    figure.add_bar(
        x=[(start + end) / 2 for start, end in spans],
        y=kept.speedups,
        width=[0.85 * (end - start + 1) for start, end in spans],
        name="these tokens",
        marker={"color": BLUE, "opacity": 0.6},
        customdata=[
            [f"tokens {start} to {end}" if end > start else f"token {start}", *counted]
            for (start, end), *counted in zip(spans, kept.num_tokens, kept.plain_s, kept.speculative_s, strict=True)
        ],
        hovertemplate="%{customdata[0]}: speedup %{y:.2f}<br>%{customdata[1]} tokens in all, plain "
        "%{customdata[2]:.3g} s, speculative %{customdata[3]:.3g} s<extra></extra>",
    )
    figure.add_scatter(
        x=ends,
        y=up_to,
        mode="lines+markers",
        name="all tokens up to there",
        line={"color": ORANGE, "width": 3},
        marker={"color": ORANGE, "symbol": "diamond", "size": 6},
        hovertemplate="texts cut after %{x} tokens: speedup %{y:.2f}<extra></extra>",
    )
    figure.add_hline(y=1.0, line=DOTTED)
    places = sorted({max(0, len(ends) // part - 1) for part in (4, 2, 1)})
    lengths = ", ".join(f"{up_to[place]:.2f} after {ends[place]}" for place in places)
    facts = (
        f"{len(held_out.prompt_ids)} held-out prompts × {len(held_out.tokens_per_s[0])} passes, all tokens together; "
        f"speedup of the same texts, had they been cut: {lengths} tokens; the first token of a text is not timed"
    )
    figure.update_xaxes(title="token of the continuation", range=[1, kept.longest + 1])
    figure.update_yaxes(title="speedup", rangemode="tozero")
    figure.update_layout(height=430)
    return finish(figure, "Speedup over position", facts)


def acceptance_figure(record: StudyRecord) -> go.Figure:
    """By position in a round's draft: the share of rounds that drafted a token there, accepted or rejected.

    Raises: MissingData if there are no counters, or nothing was drafted.
    """
    shown = counters_of(record)
    counters = shown.counters
    drafted, accepted = counters.drafted_by_position, counters.accepted_by_position
    if not counters.num_rounds or not sum(drafted):
        raise MissingData(f"drafted_by_position: study {record.name!r} keeps no drafts of this config")
    accepted = (*accepted, *(0,) * (len(drafted) - len(accepted)))
    positions = list(range(1, len(drafted) + 1))
    rounds = counters.num_rounds
    kept = [100 * one / rounds for one in accepted]
    lost = [100 * (one - other) / rounds for one, other in zip(drafted, accepted, strict=True)]
    counts = list(zip(accepted, drafted, strict=True))
    rates = [f"{one / total:.2f}" if total else "" for one, total in counts]
    figure = go.Figure()
    for name, values, colour, pattern, texts in (
        ("accepted", kept, BLUE, "", rates),
        ("rejected", lost, ORANGE, "/", None),
    ):
        add_bars(
            figure,
            name,
            colour,
            pattern,
            x=positions,
            y=values,
            text=texts,
            textposition="inside",
            insidetextanchor="end",
            textangle=0,
            textfont={"color": "white"},
            customdata=counts,
            hovertemplate=f"position %{{x}}: {name} in %{{y:.1f}} % of rounds<br>"
            "%{customdata[0]} of %{customdata[1]} accepted<extra></extra>",
        )
    facts = (
        f"{shown.source}: {sum(accepted)} of {sum(drafted)} draft tokens accepted "
        f"({sum(accepted) / sum(drafted):.2f}) in {rounds} rounds, mean accepted length "
        f"{(counters.num_accepted + rounds) / rounds:.2f}; the number in a bar is the acceptance rate at that position"
    )
    figure.update_xaxes(title="position in the draft", dtick=1 if len(positions) <= 16 else 4)
    figure.update_yaxes(title="share of rounds (%)", range=[0, 104])
    figure.update_layout(barmode="stack", height=430, bargap=0.25, legend={"traceorder": "normal"})
    return finish(figure, "Acceptance by draft position", facts)


def time_figure(record: StudyRecord) -> go.Figure:
    """Milliseconds per token of plain and speculative decoding in parts, and the least that these counts could cost.

    Raises: MissingData if there are no counters.
    """
    shown = counters_of(record)
    counters = shown.counters
    if not counters.num_drafted or not counters.num_tokens:
        raise MissingData(f"draft_s: study {record.name!r} keeps no drafts of this config")
    rows = times_of(counters)
    figure = go.Figure()
    for part, colour, pattern in _PARTS:
        values = [row.get(part, 0.0) for row in rows.values()]
        if any(values):
            hover = "%{x:.3f} ms a token<extra>" + part + "</extra>"
            add_bars(figure, part, colour, pattern, x=values, y=list(rows), orientation="h", hovertemplate=hover)
    totals = [sum(row.values()) for row in rows.values()]
    plain = totals[0]
    figure.add_scatter(
        x=totals,
        y=list(rows),
        mode="text",
        text=[f" {plain / total:.2f}×" for total in totals],
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    figure.add_vline(x=plain, line=DOTTED)
    figure.update_xaxes(title="milliseconds a token", range=[0, 1.18 * max(totals)])
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(barmode="stack", height=380, bargap=0.35, legend={"traceorder": "normal"})
    return finish(figure, "Where the time goes", _time_facts(record, shown, rows["speculative"]))


def _time_facts(record: StudyRecord, shown: Shown, spent: dict[str, float]) -> str:
    counters, total = shown.counters, sum(spent.values())
    cost = (counters.draft_s / counters.num_drafted) / (counters.plain_decode_s / counters.num_tokens)
    text = (
        f"{shown.source}: drafting takes {100 * spent['draft'] / total:.0f} % of the time, verifying "
        f"{100 * spent['verify'] / total:.0f} %, target-only steps {100 * spent['target-only'] / total:.0f} %, "
        f"the loop around them {100 * spent['loop'] / total:.0f} %; a draft token costs {cost:.2f} target steps"
    )
    if str(record.attrs.get(FINGERPRINT, {}).get("device", "cpu")) != "cpu":
        text += "; the device was not synchronised between draft and verification, so their border is blurred"
    return text


def _short(name: str) -> str:
    return escape(name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}")
