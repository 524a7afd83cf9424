"""Digest: a study's verdict, numbers and tables as text, for whatever form they are then given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from search.confirm import describe
from search.leaderboard import counted
from search.per_group.export import PER_GROUP
from search.reporting.record import StudyRecord
from search.storage import redact
from search.study import trials_by_state
from search.summary import CANDIDATES

_NUM_LEADING = 5


@dataclass(frozen=True)
class Number:
    """One thing that people look for."""

    label: str
    parts: tuple[tuple[str, float, str], ...]
    """Field of best.json, its value, and the value as text; two for an interval."""

    @property
    def text(self) -> str:
        return " to ".join(text for _, _, text in self.parts)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    key: str
    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Digest:
    """All text of a report, unescaped."""

    name: str
    headline: str
    verdict: str
    """One sentence."""
    picture: str
    """The mask as two lines of text; empty without a config."""
    numbers: tuple[Number, ...]
    use: str | None
    """The command that decodes with the result."""
    command: str | None
    """The command that made it."""
    tables: tuple[Table, ...]
    made: tuple[tuple[str, str], ...]
    """What the numbers were measured on."""


def digest_of(record: StudyRecord, folder: Path | None = None) -> Digest:
    """Cost: the standings, once."""
    attrs, choice = record.attrs, record.choice
    headline, verdict = _verdict(record)
    tables = (_per_group(attrs), _candidates(attrs), _leading(record), _prompts(record), _states(record))
    return Digest(
        name=record.name,
        headline=headline,
        verdict=verdict,
        picture=choice.config.skip_mask.picture() if choice else "",
        numbers=_numbers(attrs),
        use=f'python -m layerskip.generate --config {_typed(folder)}/best.json --prompt "..." --compare'
        if folder is not None and attrs.get("verdict") == "speculate"
        else None,
        command=attrs.get("command"),
        tables=tuple(table for table in tables if table is not None),
        made=tuple(_made(record)),
    )


def model_of(attrs: Mapping[str, Any]) -> str:
    """The model's name; of a folder the last two parts, since the rest is about this machine alone."""
    name = str(attrs.get("spec", {}).get("model", "?"))
    return "/".join(Path(name).parts[-2:]) if Path(name).is_absolute() else name


def device_of(attrs: Mapping[str, Any]) -> str:
    """Device, number format, engine and threads in words."""
    print_ = attrs.get("fingerprint", {})
    device, cpu = str(print_.get("device", "?")), print_.get("cpu")
    words = [f"{cpu} CPU" if device == "cpu" and cpu else device, str(print_.get("dtype", "?"))]
    if device == "cpu" and (threads := print_.get("num_threads")):
        words.append(f"{threads} thread{'s' * (threads != 1)}")
    return ", ".join([*words, f"engine {print_.get('engine', '?')}"])


def _verdict(record: StudyRecord) -> tuple[str, str]:
    attrs = record.attrs
    where = f"{model_of(attrs)} on {device_of(attrs)}"
    verdict, confirmed = attrs.get("verdict"), attrs.get("confirmed")
    text = _text_of(attrs)
    if verdict == "speculate" and confirmed is not None:
        interval = ""
        if confirmed["num_prompts"] > 1:
            interval = f" (95 % interval {confirmed['speedup_ci_low']:.2f} to {confirmed['speedup_ci_high']:.2f})"
        config = describe(record.choice.config) if record.choice else "?"
        return f"Speculate: {confirmed['speedup']:.2f} times as fast", (
            f"{where}, decodes {confirmed['speedup']:.2f} times as fast as plain decoding{interval} with {config}: "
            f"{confirmed['tokens_per_s']:.1f} against {confirmed['plain_tokens_per_s']:.1f} tokens/s over "
            f"{_count(confirmed['num_prompts'], 'prompt')}{text} that the search had not seen."
        )
    if verdict is not None:
        reason = str(attrs.get("reason") or "no reason kept").removeprefix("do not speculate: ")
        return (
            "Do not speculate",
            f"For {where}, plain decoding is the answer{text and f' for text like that{text}'}: {reason}.",
        )
    total = attrs.get("spec", {}).get("trials")
    done = f"{counted(list(record.trials))} of {total} trials are done" if total else "the search goes on"
    leader = record.leader
    leads = (
        f"; {describe(leader.config)} leads at {leader.speedup:.2f} times plain decoding on the tuning prompts "
        f"(pooled lower bound {leader.lower:.2f})"
        if leader
        else ""
    )
    return "No verdict yet", f"For {where}, {done}{leads}; the confirm stage has not been reached."


def _text_of(attrs: Mapping[str, Any]) -> str:
    """` of FILE`: the held-out prompts' file."""
    spec = attrs.get("spec", {})
    file = spec.get("held_out") or spec.get("prompts")
    return f" of {Path(str(file)).name}" if file else ""


def _numbers(attrs: Mapping[str, Any]) -> tuple[Number, ...]:
    confirmed = attrs.get("confirmed")
    if confirmed is None:
        plain = attrs.get("plain_tokens_per_s")
        return (Number("plain tokens/s", (("plain_tokens_per_s", plain, f"{plain:.1f}"),)),) if plain else ()
    wanted = (
        ("speedup", ("speedup",), "{:.2f}×"),
        ("95 % interval", ("speedup_ci_low", "speedup_ci_high"), "{:.2f}"),
        ("tokens/s", ("tokens_per_s",), "{:.1f}"),
        ("plain tokens/s", ("plain_tokens_per_s",), "{:.1f}"),
        ("acceptance rate", ("acceptance_rate",), "{:.2f}"),
        ("mean accepted length", ("mean_accepted_length",), "{:.2f}"),
        (f"identical of {confirmed['num_prompts']}", ("num_identical",), "{:d}"),
    )
    alone = confirmed["num_prompts"] == 1  # one prompt has no interval
    return tuple(
        Number(label, tuple((key, confirmed[key], form.format(confirmed[key])) for key in keys))
        for label, keys, form in wanted
        if all(confirmed.get(key) is not None for key in keys) and not (alone and len(keys) > 1)
    )


def _candidates(attrs: Mapping[str, Any]) -> Table | None:
    stored = attrs.get(CANDIDATES)
    if not stored:
        return None
    rows = tuple(
        (
            one["config"],
            f"{one['tuning_speedup']:.3f}",
            f"{one['speedup']:.3f}" if one["speedup"] else str(one["excluded"]),
        )
        for one in json.loads(stored)
    )
    return Table(
        "candidates",
        "Candidates on the held-out prompts",
        "The pass that chose among them; the confirmed number was then measured afresh.",
        ("config", "tuning speedup", "held-out speedup"),
        rows,
    )


def _leading(record: StudyRecord) -> Table | None:
    standings = record.standings
    if standings is None or not standings.entries:
        return None
    rows = tuple(
        (describe(one.config), str(len(one.trials)), str(one.num_pairs), f"{one.speedup:.3f}", f"{one.lower:.3f}")
        for one in standings.entries[:_NUM_LEADING]
    )
    return Table(
        "leading",
        "Leading configs on the tuning prompts",
        "All trials of a config pooled; ranked by the lower bound, so that one lucky trial does not lead.",
        ("config", "trials", "pairs", "speedup", "lower bound"),
        rows,
    )


def _prompts(record: StudyRecord) -> Table | None:
    held_out = record.held_out
    if held_out is None:
        return None
    rows = []
    for name, fast, plain in zip(held_out.prompt_ids, held_out.tokens_per_s, held_out.plain_tokens_per_s, strict=True):
        one, other = median(fast), median(plain)
        rows.append((name, f"{other:.1f}", f"{one:.1f}", f"{one / other:.2f}"))
    return Table(
        "prompts",
        "Held-out prompts",
        f"Tokens/s, medians of {_count(len(held_out.tokens_per_s[0]), 'pass', 'passes')}.",
        ("prompt", "plain", "speculative", "speedup"),
        tuple(rows),
    )


def _states(record: StudyRecord) -> Table:
    counts = {name.replace("_", " "): count for name, count in trials_by_state(list(record.trials)).items()}
    origins: dict[str, int] = {}
    for trial in record.finished:
        origin = str(trial.user_attrs.get("origin", "?")).partition(":")[0]
        origins[origin] = origins.get(origin, 0) + 1
    rows = [(name, str(count)) for name, count in counts.items() if count]
    rows += [
        (f"proposed as {origin}", str(count)) for origin, count in sorted(origins.items(), key=lambda one: -one[1])
    ]
    return Table("trials", "Trials", "", ("trials", "number"), tuple(rows))


def _per_group(attrs: Mapping[str, Any]) -> Table | None:
    """Settings in rows, groups in columns; what a group got is marked."""
    stored = attrs.get(PER_GROUP)
    if not stored:
        return None
    data = json.loads(stored)
    groups = list(next(iter(data["matrix"].values())))
    chosen = {"own": None, "default": "default"}
    rows = []
    for setting, cells in data["matrix"].items():
        row = [setting]
        for group in groups:
            cell, source = cells[group], data["exported"][group]["source"]
            mark = "*" if source in chosen and (chosen[source] or group) == setting else ""
            if cell.get("speedup") is None:
                row.append(str(cell.get("excluded", "-")))
            elif cell.get("speedup_ci_low") is None:
                row.append(f"{cell['speedup']:.2f}{mark}")
            else:
                row.append(f"{cell['speedup']:.2f} ({cell['speedup_ci_low']:.2f}..{cell['speedup_ci_high']:.2f}){mark}")
        rows.append(tuple(row))
    return Table(
        "per-group",
        f"Settings by {data['group_field']}",
        "Speedup of each search's setting (rows) on each group's held-out prompts (columns); * = what the group gets.",
        ("setting of", *(f"on {group}" for group in groups)),
        tuple(rows),
    )


def _made(record: StudyRecord) -> list[tuple[str, str]]:
    attrs = record.attrs
    print_, environment, spec = (attrs.get(name, {}) for name in ("fingerprint", "environment", "spec"))
    rows = [("study", record.name), ("model", f"{model_of(attrs)} ({print_.get('model_class', '?')})")]
    rows.append(("weights", str(print_.get("weights", "?"))))
    rows.append(("device", device_of(attrs)))
    if backend := environment.get("attention_backend"):
        rows.append(("attention", str(backend)))
    prompts = [Path(str(spec[name])).name for name in ("prompts", "held_out") if spec.get(name)]
    hashes = f"{print_.get('tuning_prompts', '?')} and {print_.get('held_out_prompts', '?')}"
    rows.append(("prompts", f"{' and '.join(prompts) or '?'}, hashes {hashes}"))
    rows.append(("tokens a prompt", str(print_.get("max_new_tokens", "?"))))
    rows.append(("sampler, seed", f"{spec.get('sampler', '?')}, {spec.get('seed', '?')}"))
    versions = {"torch": print_.get("torch"), "transformers": print_.get("transformers")} | {
        name: environment.get(name) for name in ("optuna", "python", "platform")
    }
    rows.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)))
    if spec.get("storage"):
        rows.append(("storage", redact(str(spec["storage"]))))
    rows.append(("commit", str(environment.get("commit") or "?")))
    rows.append(("begun", str(attrs.get("created_at", "?"))))
    return rows


def _typed(folder: Path) -> str:
    from search.storage import near

    return str(near(folder))


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
