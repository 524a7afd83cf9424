"""One Markdown page of what the parts of the GPU study left in a folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import DecodeConfig
from studies import regimes
from studies.engine import trees
from studies.gpu import tables
from studies.gpu.book import DONE, read
from studies.gpu.tables import Rows, percent

TITLES = {
    "plain": "Plain decoding",
    "rounds": "Rounds",
    "speedup": "Speedup over acceptance",
    "generate": "Beside Hugging Face's generate",
    "compiled": "Beside Hugging Face's compiled generate",
    "contexts": "Long texts",
    "attention": "Attention kernels: microseconds a call of one token / of several",
    "identity": "Identity in float32",
    "ties": "Ties in bfloat16",
    "recordings": "Recordings",
    "profile": "Profile",
    "auto": "The engine taken by measurement",
    "train": "Training",
    "search": "Search and confirm",
    "bench": "Bench",
    "weights": "Training draft weights",
    "regimes": "Ways to draft",
    "trees": "Trees of drafts",
}


def page(folder: Path) -> str:
    """All parts in the folder, by name.

    Raises: ValueError where there is none, or naming the file and the step whose rows are not what the step writes.
    """
    files = sorted(folder.glob("[abcd]-*.json"))
    if not files:
        raise ValueError(f"folder: holds no result of a part, got {folder}")
    parts = [_part(file) for file in files]
    return (
        "\n\n".join(
            ["# GPU study", "Written by `python -m studies.gpu summarise` from the files of its parts.", *parts]
        )
        + "\n"
    )


def _part(file: Path) -> str:
    record = read(file)
    lines = [f"## Part {record['part'].upper()}, {record['size']}", _machine(record)]
    if record["part"] == "b":
        return "\n\n".join([*lines, tests(record["steps"])])
    for name, step in record["steps"].items():
        lines.append(f"### {TITLES.get(name, name)}")
        if step["state"] != DONE:
            lines.append(f"**{step['state']}**: {_last_line(step['error'])}")
        if step["rows"]:
            try:
                lines.append(_body(name, step["rows"], record["workers"][-1]))
            except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"{file}: {name}: not what its step writes ({type(error).__name__}: {error})"
                ) from None
    return "\n\n".join(lines)


def _machine(record: Mapping[str, Any]) -> str:
    if not record["workers"]:
        return "Not run: no process got as far as its first step."
    facts = record["workers"][-1]
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    copy = f"; a large copy moves {facts['copy_bytes_per_s'] / 1e9:.0f} GB/s" if "copy_bytes_per_s" in facts else ""
    return f"{facts['device']}; {versions}; commit {facts['commit']}; {facts['started_at']}{copy}."


def _body(name: str, rows: Rows, facts: Mapping[str, Any]) -> str:
    if name in tables.TABLES:
        return tables.TABLES[name](rows, facts)
    found: dict[str, Any] = {key: value for row in rows for key, value in row.items()}
    if name == "train":
        return training(found["training"])
    if name == "weights":
        return draft_weights(found["weights"])
    if name == "regimes":
        return "\n".join([regimes.table(found["regimes"]), *map(regimes.details, found["regimes"]["regimes"])])
    if name == "trees":
        return trees.tables(found["trees"])
    return search(found["summary"]) if name == "search" else bench(found["bench"])


def tests(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """How many passed, and every other one by name."""
    outcomes = {name: _outcome(step) for name, step in steps.items()}
    lines = [
        ", ".join(f"{count} {word}" for word, count in Counter(word for word, _ in outcomes.values()).items()) + "."
    ]
    lines += [
        f"- {word}: `{name.split('::')[-1]}`: {why}" for name, (word, why) in outcomes.items() if word != "passed"
    ]
    for name, step in steps.items():
        measured = {key: value for row in step["rows"] for key, value in row["properties"].items()}
        lines += [f"- `{name.split('::')[-1]}`: {key} {value:.4g}" for key, value in measured.items()]
    return "\n".join(lines)


def _outcome(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["rows"]:
        row = step["rows"][-1]
        return row["outcome"], _last_line(row["reason"])
    return "not finished", _last_line(step["error"])


def training(facts: Mapping[str, Any]) -> str:
    """What was trained, how fast, and how well it reads text it has not seen."""
    return (
        f"{facts['layers']} layers of width {facts['hidden_size']}, {facts['num_parameters']} parameters: "
        f"{facts['steps']} steps, {facts['training_tokens']} tokens ({facts['epochs']} passes) in "
        f"{facts['training_minutes']} minutes, {facts['training_tokens_per_s']} tokens/s. Loss, nats a token: training "
        f"{facts['training_loss']}, held out {facts['held_out_loss']}, tuning modules {facts['tuning_loss']}."
    )


def draft_weights(facts: Mapping[str, Any]) -> str:
    """What was trained, and how often it drafts what the target says."""
    places = ", ".join(percent(one) for one in facts["held_out_agreement"])
    return (
        f"{facts['parameters']} parameters: {facts['steps']} steps in {facts['seconds']:.0f} s on {facts['tokens']} "
        f"tokens. Held out, the target says what is drafted first, second, ...: {places}."
    )


def search(facts: Mapping[str, Any]) -> str:
    """Verdict, confirmed number, and how good the predictions were."""
    noise = facts["noise"]["plain_against_plain_sigma"]
    lines = [f"**{facts['verdict']}**" if facts["reason"] is None else facts["reason"]]
    lines += [confirmed(facts["confirmed"], facts["config"])] if facts["confirmed"] else []
    lines += [
        f"- Tuning prompts: plain {facts['reference']['plain_tokens_per_s']:.1f} tok/s, "
        f"A/A noise {percent(noise)} a pair.",
        f"- {facts['trials']['counted']} trials; {facts['seconds']['total']:.0f} s in all "
        f"({', '.join(f'{name} {value:.0f}' for name, value in facts['seconds'].items() if name != 'total')}).",
    ]
    prediction, replay = facts.get("prediction"), facts.get("replay")
    if prediction:
        from search.predict.accuracy import describe_ranks  # late, as `describe` below

        lines.append(
            f"- Predictions of {prediction['num_trials']} trials: median error "
            f"{percent(prediction['median_abs_error'])}, {describe_ranks(prediction)}."
        )
    if replay:
        lines.append(
            f"- Replayed counts exact in {percent(replay['exact_share'])} of {replay['num_settings']} settings."
        )
    lines += [f"- NOT LOSSLESS: {one}" for one in facts["not_lossless"]]
    return "\n".join(lines)


def confirmed(numbers: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The number that may be quoted: held-out prompts, interval over prompts, prompt apart and included."""
    from search.study.config_words import describe

    found = DecodeConfig.model_validate_json(json.dumps(config))
    repeated = numbers["repeated_ngram_share"]
    return (
        f"- {describe(found) if found.speculates else 'The best candidate'}: on {numbers['num_prompts']} held-out "
        f"prompts x {numbers['num_repeats']} {_speedup(numbers, 'speedup')}, prompt included "
        f"{_speedup(numbers, 'end_to_end_speedup')}; {numbers['tokens_per_s']:.1f} against "
        f"{numbers['plain_tokens_per_s']:.1f} tok/s; identical outputs {numbers['num_identical']}, ties "
        f"{numbers['num_ties']}; repeated 4-grams {percent(repeated)}. Machine: {numbers['machine']}."
    )


def _speedup(numbers: Mapping[str, Any], name: str) -> str:
    return f"{numbers[name]:.3f}x ({numbers[f'{name}_ci_low']:.3f}..{numbers[f'{name}_ci_high']:.3f})"


def bench(record: Mapping[str, Any]) -> str:
    """Ways to decode, with intervals and identical outputs, and the step beside them."""
    facts, steps = record["facts"], record["steps"]
    lines = [tables.benchmark(record["rows"], {}), ""]
    target = steps["target"][0]
    lines.append(
        f"One target token: {1000 * target['seconds']:.3f} ms, {percent(target['bandwidth_share'])} of the measured "
        f"{steps['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s. Engine {facts['engine']} ({facts['engine_reason']})."
    )
    return "\n".join(lines)


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else ""
