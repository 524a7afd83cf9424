"""A study's verdict in words, and the numbers that stand beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.analysis.repetition import NGRAM
from layerskip.config.decode_config import number_format
from layerskip.config.sampling_regime import GREEDY, Sampling
from search.confirm.regime_settings import measured_on, sampling_of
from search.reporting.record import StudyRecord
from search.study.attributes import CONFIRMED, FINGERPRINT, PLAIN_TOKENS_PER_S, REASON, SPEC, VERDICT
from search.study.config_words import describe
from search.study.trials import counted


@dataclass(frozen=True)
class Number:
    """One thing that people look for."""

    label: str
    parts: tuple[tuple[str, float, str], ...]
    """Field of best.json, its value, and the value as text; two for an interval."""

    @property
    def text(self) -> str:
        return " to ".join(text for _, _, text in self.parts)


def verdict_of(record: StudyRecord) -> tuple[str, str]:
    """(headline, one sentence with the numbers)."""
    attrs = record.attrs
    where = f"{model_of(attrs)} on {device_of(attrs)}"
    verdict, confirmed = attrs.get(VERDICT), attrs.get(CONFIRMED)
    file = _file_of(attrs)
    if verdict == "speculate" and confirmed is not None:
        interval = ""
        if confirmed["num_prompts"] > 1:
            interval = f" (95 % interval {confirmed['speedup_ci_low']:.2f} to {confirmed['speedup_ci_high']:.2f})"
        config = describe(record.choice.config) if record.choice else "?"
        chosen = " (and was chosen on, which flatters it)" if confirmed.get("num_choosing") == 0 else ""
        return f"Speculate: {confirmed['speedup']:.2f} times as fast", (
            f"{where}, decodes {text_of(attrs)} {confirmed['speedup']:.2f} times as fast as plain decoding{interval} "
            f"with {config}: {confirmed['tokens_per_s']:.1f} against {confirmed['plain_tokens_per_s']:.1f} tokens/s "
            f"over {count_of(confirmed['num_prompts'], 'prompt')}{file} that the search had not seen"
            f"{chosen}{_length_of(attrs)}. With each prompt's own forward in the seconds it is "
            f"{confirmed['end_to_end_speedup']:.2f} times as fast."
        )
    if verdict is not None:
        reason = str(attrs.get(REASON) or "no reason kept").removeprefix("do not speculate: ")
        return (
            "Do not speculate",
            f"For {where}, plain decoding is the answer for {text_of(attrs)}{file and f' like that{file}'}: {reason}.",
        )
    total = attrs.get(SPEC, {}).get("trials")
    done = f"{counted(list(record.trials))} of {total} trials are done" if total else "the search goes on"
    leader = record.leader
    leads = (
        f"; {describe(leader.config)} leads at {leader.speedup:.2f} times plain decoding on the tuning prompts "
        f"(pooled lower bound {leader.lower:.2f})"
        if leader
        else ""
    )
    return "No verdict yet", f"For {text_of(attrs)} of {where}, {done}{leads}; the confirm stage has not been reached."


def text_of(attrs: Mapping[str, Any]) -> str:
    """`greedy text`, or `sampled text (t0.7)`: how the study's tokens were chosen."""
    name = sampling_of(attrs)
    if name == GREEDY.name:
        return "greedy text"
    return f"{'sampled' if Sampling.parse(name).do_sample else 'greedy'} text ({name})"


def _length_of(attrs: Mapping[str, Any]) -> str:
    """`, up to 48 new tokens each`: for how long texts the confirmed numbers hold; empty where that is not known."""
    length = attrs.get(FINGERPRINT, {}).get("max_new_tokens")
    return "" if length is None else f", up to {length} new tokens each"


def _file_of(attrs: Mapping[str, Any]) -> str:
    """` of FILE`: the held-out prompts' file."""
    spec = attrs.get(SPEC, {})
    file = spec.get("held_out") or spec.get("prompts")
    return f" of {Path(str(file)).name}" if file else ""


def numbers_of(attrs: Mapping[str, Any]) -> tuple[Number, ...]:
    """What the confirm stage found; before it, plain speed alone."""
    confirmed = attrs.get(CONFIRMED)
    if confirmed is None:
        plain = attrs.get(PLAIN_TOKENS_PER_S)
        return (Number("plain tokens/s", (("plain_tokens_per_s", plain, f"{plain:.1f}"),)),) if plain else ()
    wanted = (
        ("speedup", ("speedup",), "{:.2f}×"),
        ("95 % interval", ("speedup_ci_low", "speedup_ci_high"), "{:.2f}"),
        ("end to end", ("end_to_end_speedup",), "{:.2f}×"),
        ("its 95 % interval", ("end_to_end_speedup_ci_low", "end_to_end_speedup_ci_high"), "{:.2f}"),
        ("tokens/s", ("tokens_per_s",), "{:.1f}"),
        ("plain tokens/s", ("plain_tokens_per_s",), "{:.1f}"),
        ("acceptance rate", ("acceptance_rate",), "{:.2f}"),
        ("mean accepted length", ("mean_accepted_length",), "{:.2f}"),
        (f"repeated {NGRAM}-grams", ("repeated_ngram_share",), "{:.0%}"),
        (f"identical of {confirmed['num_prompts']}", ("num_identical",), "{:d}"),
        *((("logit ties", ("num_ties",), "{:d}"),) if confirmed.get("num_ties") else ()),
    )
    alone = confirmed["num_prompts"] == 1  # one prompt has no interval
    return tuple(
        Number(label, tuple((key, confirmed[key], form.format(confirmed[key])) for key in keys))
        for label, keys, form in wanted
        if all(confirmed.get(key) is not None for key in keys) and not (alone and len(keys) > 1)
    )


def model_of(attrs: Mapping[str, Any]) -> str:
    """The model's name; of a folder the last two parts, since the rest is about this machine alone."""
    name = str(attrs.get(SPEC, {}).get("model", "?"))
    return "/".join(Path(name).parts[-2:]) if Path(name).is_absolute() else name


def device_of(attrs: Mapping[str, Any]) -> str:
    """Device, number format, engine and threads in words."""
    print_ = measured_on(attrs)
    device, cpu = str(print_.get("device", "?")), print_.get("cpu")
    words = [
        f"{cpu} CPU" if device == "cpu" and cpu else device,
        number_format(str(print_.get("dtype", "?")), print_.get("quantization")),
    ]
    if device == "cpu" and (threads := print_.get("num_threads")):
        words.append(f"{threads} thread{'s' * (threads != 1)}")
    return ", ".join([*words, f"engine {print_.get('engine', '?')}"])


def count_of(number: int, one: str, many: str | None = None) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
