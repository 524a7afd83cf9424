"""What a person sees of a benchmark: tables on a terminal, and the rows as a bar chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from layerskip.analysis.repetition import NGRAM
from layerskip.benchmark.names import BASELINES
from layerskip.benchmark.profiling import StepProfile
from layerskip.config.lossy_acceptance import Distance

_OURS, _OTHERS = "#0072b2", "#555555"


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Speed, ratios and losslessness of every row, prompt apart and included; why a row did not run."""
    title = "geometric mean over prompts (95 % interval)"
    bases = [row["name"] for row in rows if row["name"] in BASELINES and row["tokens_per_s"] is not None]
    against = [f"× {name}" for name in bases]
    decode = _table(f"tokens/s, prompt apart: {title}", ("row", "tokens/s", *against, "identical"))
    end_to_end = _table(f"tokens/s, prompt included: {title}", ("row", "tokens/s", *against, "repeats"))
    for row in rows:
        if row["tokens_per_s"] is None:
            decode.add_row(row["name"], "-")
            continue
        ties = f" +{row['ties']} ties" if row["ties"] else ""
        identical = f"{row['identical']}/{row['num_outputs']}{ties}"
        decode.add_row(row["name"], _interval(row, "tokens_per_s", ".1f"), *_ratios(row, "vs_", bases), identical)
        share = row["repeated_ngram_share"]
        repeats = "" if share is None else f"{share:.0%}"
        rate = _interval(row["end_to_end"], "tokens_per_s", ".1f")
        end_to_end.add_row(row["name"], rate, *_ratios(row, "end_to_end_vs_", bases), repeats)
    console.print(decode)
    console.print(end_to_end)
    if end_to_end.row_count:
        console.print(f"repeats: {NGRAM}-grams of the outputs that occurred before in prompt or output", soft_wrap=True)
    for row in rows:
        if row.get("distance"):
            console.print(f"{row['name']}: {Distance(**row['distance'])}", soft_wrap=True)
        if row.get("reason"):
            console.print(f"{row['name']}: not run: {row['reason']}", soft_wrap=True)


def _ratios(row: Mapping[str, Any], prefix: str, bases: Sequence[str]) -> list[str]:
    return [_interval(row.get(f"{prefix}{name}"), "ratio", ".2f") for name in bases]


def print_steps(console: Console, steps: Mapping[str, Any], forward_shares: Mapping[str, Any]) -> None:
    """Step costs, bandwidth, and how much of what the steps allow the loop attains."""
    limit = f"share of {steps['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s"
    table = _table(
        f"steps after {steps['context_tokens']} tokens of text", ("step", "ms", "× one token", "MB read", "GB/s", limit)
    )
    for step in steps["target"]:
        alone = step["num_tokens"] == 1
        ratio = "" if alone else _interval(step["ratio"], "ratio", ".2f")
        table.add_row("target" if alone else f"verify of {step['num_tokens']}", *_cells(step, ratio))
    for step in steps["draft"][-1:]:
        ratio = _interval(steps["draft_ratio"], "ratio", ".2f")
        table.add_row(f"draft, each of {step['draft_length']}", *_cells(step, ratio))
    console.print(table)
    for name, share in steps["attained"].items():
        if share is not None:
            console.print(
                f"{name}: {_interval(share, 'share', '.1%')} of the speed that its own steps allow "
                f"(loop overhead {steps['loop_overhead'][name]:.1%})",
                soft_wrap=True,
            )
    for name, share in forward_shares.items():
        words = "not told apart by this engine" if share is None else _interval(share, "share", ".1%")
        console.print(f"{name}: share of the decode seconds inside the engine's forward: {words}", soft_wrap=True)


def print_profiles(console: Console, profiles: Sequence[StepProfile]) -> None:
    """The costliest operations of every step."""
    for one in profiles:
        title = f"{one.step}: {one.ms:.2f} ms of {one.clock} time in operations"
        table = _table(title, ("operation", "share", "calls"))
        for operation in one.operations:
            table.add_row(operation.name, f"{operation.share:.1%}", f"{operation.calls:g}")
        console.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    """The first column on the left, numbers on the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=i == 0)
    return table


def _cells(step: Mapping[str, Any], ratio: str) -> tuple[str, ...]:
    in_ms = {name: None if step[name] is None else 1000 * step[name] for name in ("seconds", "ci_low", "ci_high")}
    traffic = (f"{step['bytes'] / 1e6:.2f}", f"{step['bytes_per_s'] / 1e9:.2f}", f"{step['bandwidth_share']:.0%}")
    return (_interval(in_ms, "seconds", ".2f"), ratio, *traffic)


def _interval(record: Mapping[str, Any] | None, name: str, form: str) -> str:
    """`1.42 (1.30..1.55)`."""
    if record is None:
        return ""
    text = format(record[name], form)
    if record["ci_low"] is None:
        return text
    return f"{text} ({format(record['ci_low'], form)}..{format(record['ci_high'], form)})"


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
