"""Digest: a study's verdict, numbers and tables as text, for whatever form they are then given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.analysis.repetition import NGRAM
from search.confirm.regime_settings import config_of, measured_on, read_regimes, sampling_of
from search.measure.rounding_record import describe_rounding
from search.reporting.record import StudyRecord
from search.reporting.verdict import Number, count_of, device_of, model_of, numbers_of, verdict_of
from search.storages.address import near, redact
from search.study import attributes as names
from search.study.config_words import describe
from search.study.trials import trials_by_state

_NUM_LEADING = 5


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
    headline, verdict = verdict_of(record)
    tables = (
        _per_group(attrs),
        regimes_table(attrs),
        _lossy(attrs),
        _candidates(attrs),
        _leading(record),
        _prompts(record),
        _states(record),
    )
    return Digest(
        name=record.name,
        headline=headline,
        verdict=verdict,
        picture=choice.config.skip_mask.picture() if choice else "",
        numbers=numbers_of(attrs),
        use=f'python -m layerskip.generate --config {near(folder)}/best.json --prompt "..." --compare'
        if folder is not None and attrs.get(names.VERDICT) == "speculate"
        else None,
        command=attrs.get(names.COMMAND),
        tables=tuple(table for table in tables if table is not None),
        made=tuple(_made(record)),
    )


def _candidates(attrs: Mapping[str, Any]) -> Table | None:
    stored = attrs.get(names.CANDIDATES)
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


def _lossy(attrs: Mapping[str, Any]) -> Table | None:
    rungs = json.loads(attrs.get(names.LOSSY, "[]"))
    if not rungs:
        return None
    rows = []
    for one in rungs:
        confirmed = one["confirmed"]
        distance = confirmed["distance"]
        rows.append(
            (
                one["rule"],
                _speedup(confirmed),
                f"{one['against_lossless']['speedup']:.2f}",
                f"{distance['unlike_share']:.1%}",
                f"{distance['log_prob']:.3f}, {distance['target_log_prob']:.3f}",
                f"{confirmed['num_identical']} of {confirmed['num_prompts']}",
            )
        )
    return Table(
        "lossy",
        "LOSSY: the winner with further draft tokens accepted",
        "Not the target's own output, and never what best.json holds: each is a file in the folder lossy. Tokens "
        "unlike are those that the target would not have chosen there; log-probabilities are under the target.",
        (
            "rule",
            "speedup (95 %)",
            "against lossless",
            "tokens unlike",
            "log-probability a token, of the target's own text",
            "outputs identical",
        ),
        tuple(rows),
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
    typical = held_out.typical
    fast, plain = typical["tokens_per_s"], typical["plain_tokens_per_s"]
    columns = [[f"{one:.1f}" for one in plain], [f"{one:.1f}" for one in fast], _ratios(fast, plain)]
    columns.append(_ratios(typical["end_to_end_tokens_per_s"], typical["plain_end_to_end_tokens_per_s"]))
    header = ("prompt", "plain", "speculative", "speedup", "end to end")
    note = (
        f"Tokens/s, {held_out.average}s of {count_of(len(held_out.tokens_per_s[0]), 'pass', 'passes')}; end to end is "
        "the speedup with the prompt's own forward in the seconds."
    )
    rows = tuple(zip(held_out.prompt_ids, *columns, strict=True))
    return Table("prompts", "Held-out prompts", note, header, rows)


def _ratios(fast: Sequence[float], plain: Sequence[float]) -> list[str]:
    return [f"{one / other:.2f}" for one, other in zip(fast, plain, strict=True)]


def _states(record: StudyRecord) -> Table:
    counts = {name.replace("_", " "): count for name, count in trials_by_state(list(record.trials)).items()}
    origins: dict[str, int] = {}
    for trial in record.finished:
        origin = str(trial.user_attrs.get(names.ORIGIN, "?")).partition(":")[0]
        origins[origin] = origins.get(origin, 0) + 1
    rows = [(name, str(count)) for name, count in counts.items() if count]
    rows += [
        (f"proposed as {origin}", str(count)) for origin, count in sorted(origins.items(), key=lambda one: -one[1])
    ]
    return Table("trials", "Trials", "", ("trials", "number"), tuple(rows))


def _per_group(attrs: Mapping[str, Any]) -> Table | None:
    """Settings in rows, groups in columns; what a group got is marked."""
    stored = attrs.get(names.PER_GROUP)
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


def regimes_table(attrs: Mapping[str, Any]) -> Table | None:
    """What each regime got, in the study of the first one; None where there is one regime alone."""
    rows = []
    for name, facts in read_regimes(attrs).items():
        confirmed = facts["confirmed"] or {}
        end_to_end, repeated = (confirmed.get(key) for key in ("end_to_end_speedup", "repeated_ngram_share"))
        rows.append(
            (
                name,
                facts["verdict"],
                _speedup(confirmed),
                "-" if end_to_end is None else f"{end_to_end:.2f}",
                "-" if repeated is None else f"{repeated:.0%}",
                describe(config_of(facts, name)),
            )
        )
    if not rows:
        return None
    return Table(
        "regimes",
        "Regimes",
        "Each way to choose tokens was searched apart and confirmed on held-out text chosen so. Where the verdict is "
        "not to speculate, the figures are the best candidate's.",
        ("regime", "verdict", "speedup (95 %)", "end to end", f"repeated {NGRAM}-grams", "setting"),
        tuple(rows),
    )


def _speedup(confirmed: Mapping[str, Any]) -> str:
    if not confirmed:
        return "-"
    if confirmed["num_prompts"] == 1:  # one prompt has no interval
        return f"{confirmed['speedup']:.2f}"
    return f"{confirmed['speedup']:.2f} ({confirmed['speedup_ci_low']:.2f}..{confirmed['speedup_ci_high']:.2f})"


def _made(record: StudyRecord) -> list[tuple[str, str]]:
    attrs = record.attrs
    print_, environment, spec = measured_on(attrs), attrs.get(names.ENVIRONMENT, {}), attrs.get(names.SPEC, {})
    rows = [("study", record.name), ("model", f"{model_of(attrs)} ({print_.get('model_class', '?')})")]
    rows.append(("weights", str(print_.get("weights", "?"))))
    rows.append(("device", device_of(attrs)))
    if backend := print_.get("attention_backend"):
        rows.append(("attention", str(backend)))
    if machine := (attrs.get(names.CONFIRMED) or {}).get("machine"):
        rows.append(("while confirming", machine))
    if rounding := attrs.get(names.ROUNDING):
        rows.append(("logit ties", f"a token may lie {describe_rounding(rounding)}"))
    prompts = [Path(str(spec[name])).name for name in ("prompts", "held_out") if spec.get(name)]
    hashes = f"{print_.get('tuning_prompts', '?')} and {print_.get('held_out_prompts', '?')}"
    rows.append(("prompts", f"{' and '.join(prompts) or '?'}, hashes {hashes}"))
    rows.append(("tokens a prompt", str(print_.get("max_new_tokens", "?"))))
    if (budget := attrs.get(names.BUDGET)) and budget["minutes"] is not None:
        less = f"with {', '.join(budget['cuts'])}" if budget["cuts"] else "nothing was cut for it"
        rows.append(("budget", f"{budget['minutes']:g} minutes for the whole run, {less}"))
    rows.append(("tokens chosen", sampling_of(attrs)))
    rows.append(("sampler, seed", f"{spec.get('sampler', '?')}, {spec.get('seed', '?')}"))
    versions = {"torch": print_.get("torch"), "transformers": print_.get("transformers")} | {
        name: environment.get(name) for name in ("optuna", "python", "platform")
    }
    rows.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)))
    if spec.get("storage"):
        rows.append(("storage", redact(str(spec["storage"]))))
    rows.append(("commit", str(environment.get("commit") or "?")))
    rows.append(("begun", str(attrs.get(names.CREATED_AT, "?"))))
    return rows
