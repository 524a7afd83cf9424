"""Markdown of what part A found, a function a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerskip.machine.watch import describe_machine
from studies.results import markdown_table

Rows = Sequence[Mapping[str, Any]]
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9, 0.95)


def markdown(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table of values of any kind, without the end of its last line."""
    return markdown_table(header, [list(map(str, line)) for line in lines]).rstrip("\n")


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}x"


def plain(rows: Rows, facts: Mapping[str, Any]) -> str:
    """Plain decoding on each engine, held against a large copy."""
    lines = []
    for row in rows:
        if "machine" in row:
            continue
        per_s = 1000 * row["step_bytes"] / row["ms_per_token"]
        line = [row["engine"], row["way"], f"{row['ms_per_token']:.3f}", f"{1000 / row['ms_per_token']:.1f}"]
        line += [f"{row['end_to_end_tokens_per_s']:.1f}", f"{row['step_bytes'] / 1e9:.3f}"]
        line += [percent(per_s / facts["copy_bytes_per_s"])]
        lines.append([*line, f"{row['load_s']:.1f}", f"{row['added_bytes'] / 2**30:.2f}"])
    header = ["engine", "way", "ms a token", "tokens/s", "prompt included", "GB a step", "of a copy's bandwidth"]
    header += ["s to load", "GiB beside the model"]
    said = {row["engine"]: row["reason"] for row in rows if "reason" in row}
    machines = {row["engine"]: describe_machine(row["machine"]) for row in rows if "machine" in row}
    notes = [f"- {engine}: {reason}. {machines.get(engine, '')}" for engine, reason in said.items()]
    return "\n".join([markdown(header, lines), "", *notes])


def benchmark(rows: Rows, _facts: Mapping[str, Any]) -> str:
    """Rows of `layerskip.bench`."""
    lines = []
    for row in rows:
        if row["name"] == "facts":
            continue
        if row.get("tokens_per_s") is None:
            lines.append([row["name"], f"not run: {row['reason']}", "", "", ""])
            continue
        ties = f", {row['ties']} ties" if row.get("ties") else ""
        line = [row["name"], _interval(row, "tokens_per_s", ".1f"), _interval(row["end_to_end"], "tokens_per_s", ".1f")]
        line += [_interval(row.get("vs_hf_generate"), "ratio", ".2f")]
        lines.append([*line, f"{row['identical']} of {row['num_outputs']}{ties}"])
    return markdown(["way to decode", "tokens/s (95 %)", "prompt included", "x hf_generate", "identical"], lines)


def rounds(rows: Rows, _facts: Mapping[str, Any]) -> str:
    """Milliseconds of a round, and the speedup that they allow where drafts are accepted independently."""
    plain_ms = rows[0]["ms"]
    cells = {((row["kept"], row["int8"]), row["gamma"]): row["ms"] for row in rows[1:] if row["ms"]}
    gammas = sorted({gamma for _, gamma in cells})
    drafts = {one: percent(one[0]) + (", 8 bits" if one[1] else "") for one in sorted({draft for draft, _ in cells})}
    lines = [[name, *(_ms(cells.get((draft, gamma))) for gamma in gammas)] for draft, name in drafts.items()]
    best = []
    for draft, name in drafts.items():
        line = [name]
        for acceptance in ACCEPTANCES:
            found = [
                (plain_ms * expected_tokens(acceptance, gamma) / cells[draft, gamma], gamma)
                for gamma in gammas
                if (draft, gamma) in cells
            ]
            line.append("{:.2f}x (gamma {})".format(*max(found)))
        best.append(line)
    return "\n\n".join(
        [
            f"A plain token takes {plain_ms:.3f} ms. Milliseconds of a round:",
            markdown(["kept", *(f"gamma {gamma}" for gamma in gammas)], lines),
            "Speedup that these rounds allow, by the chance that a draft token is accepted (arithmetic, not measured):",
            markdown(["kept", *map(str, ACCEPTANCES)], best),
        ]
    )


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens that a round emits where each draft token is accepted with the same chance, below 1."""
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def speedup(rows: Rows, _facts: Mapping[str, Any]) -> str:
    lines = []
    for row in rows:
        line = [row["damping"], percent(row["kept"]), row["gamma"], percent(row["acceptance_rate"])]
        line += [f"{row['mean_accepted_length'] or 1:.2f}", times(row["speedup"]), times(row["end_to_end_speedup"])]
        lines.append(line)
    header = ["damping", "kept", "gamma", "accepted", "tokens a round", "speedup", "prompt included"]
    return markdown(header, lines)


def contexts(rows: Rows, _facts: Mapping[str, Any]) -> str:
    return markdown(["tokens before", "ms a token"], [[row["context"], f"{row['ms_per_token']:.3f}"] for row in rows])


def identity(rows: Rows, _facts: Mapping[str, Any]) -> str:
    lines = [[row["engine"], row["dtype"], f"{row['identical']} of {row['outputs']}"] for row in rows]
    differing = [f"- DIFFERING on {row['engine']}: {one}" for row in rows for one in row["differing"]]
    return "\n".join([markdown(["engine", "dtype", "identical to generate"], lines), *differing])


def ties(rows: Rows, _facts: Mapping[str, Any]) -> str:
    several = [row for row in rows if "num_rows" in row]
    outputs = [row for row in rows if "is_tie" in row]
    lines = [
        [row["num_rows"], f"{row['other_token']} of {row['positions']}"]
        + [f"{row['logit_spread'][name]:.3f}" for name in ("median", "p99", "largest")]
        + [f"{row['largest_logit']:.1f}"]
        for row in several
    ]
    header = ["rows a forward", "other token than one row", "spread: median", "p99", "largest", "largest logit"]
    count = sum(row["identical"] for row in outputs), sum(row["is_tie"] for row in outputs)
    parted = [
        f"- {'tie' if row['is_tie'] else 'DIFFERING'}: {row['skip_mask']} gamma {row['gamma']} from token "
        f"{row['first_difference']}: {row['logit_gap']:.3f} below the best logit, {row['tolerance']:.3f} are rounding"
        for row in outputs
        if not row["identical"]
    ]
    said = f"{len(outputs)} speculative outputs: {count[0]} identical to plain decoding, {count[1]} part at a tie."
    return "\n".join([markdown(header, lines), "", said, *parted])


def recordings(rows: Rows, _facts: Mapping[str, Any]) -> str:
    lines = []
    for row in rows:
        line = [row["masks"], row["captures"]]
        line += [f"{1000 * row['capture_s'] / max(row['captures'], 1):.1f}", f"{1000 * row['capture_s']:.0f}"]
        line += [row["kept"], row["evictions"]]
        lines.append([*line, f"{row['kept_bytes'] / 2**20:.0f}", f"{row['device_bytes_taken'] / 2**20:.0f}"])
    header = ["masks", "recordings", "ms each", "ms in all", "kept", "evicted", "MiB kept", "MiB taken"]
    return markdown(header, lines)


def profile(rows: Rows, _facts: Mapping[str, Any]) -> str:
    parts = []
    for row in rows:
        lines = [[f"`{one['name'][:70]}`", percent(one["share"]), f"{one['calls']:.1f}"] for one in row["operations"]]
        title = f"{row['engine']}, {row['step']}, {row['ms']:.3f} ms in operations on the {row['clock']}"
        parts += [f"**{title}**", markdown(["operation", "share", "calls"], lines)]
    return "\n\n".join(parts)


def attention(rows: Rows, _facts: Mapping[str, Any]) -> str:
    """Microseconds of a call over one token and over several, by kernel and visible positions."""
    us: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows[:-1]:
        us.setdefault((row["kernel"], row["num_visible"]), {})[row["num_tokens"]] = row["us"]
    sizes = sorted({size for _, size in us})
    lines = [
        [kernel, *(_pair(us.get((kernel, size), {})) for size in sizes)] for kernel in dict.fromkeys(k for k, _ in us)
    ]
    table = [markdown(["kernel", *(f"{size} positions" for size in sizes)], lines)] if lines else []
    return "\n\n".join([*table, f"Taken: {rows[-1]['taken']}."])


def _pair(us: Mapping[int, float]) -> str:
    fewest, most = min(us, default=1), max(us, default=1)
    return f"{_us(us.get(1))} / {_us(us.get(most) if most > fewest else None)}"


def auto(rows: Rows, _facts: Mapping[str, Any]) -> str:
    return "\n".join(f"`{row['engine']}`: {row['reason']}." for row in rows)


TABLES: dict[str, Callable[[Rows, Mapping[str, Any]], str]] = {
    "plain": plain,
    "rounds": rounds,
    "speedup": speedup,
    "generate": benchmark,
    "compiled": benchmark,
    "profile": profile,
    "identity": identity,
    "ties": ties,
    "recordings": recordings,
    "contexts": contexts,
    "attention": attention,
    "auto": auto,
}


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _interval(row: Mapping[str, Any] | None, name: str, form: str) -> str:
    if row is None or row[name] is None:
        return "-"
    low, high = row.get("ci_low"), row.get("ci_high")
    return f"{row[name]:{form}}" + ("" if low is None or high is None else f" ({low:{form}}..{high:{form}})")
