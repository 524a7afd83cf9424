"""Events of the end of a run: finalists, predictions looked back on, verdicts, files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

from layerskip.analysis.identity import float32_command
from layerskip.analysis.repetition import NGRAM
from layerskip.config.decode_config import Confirmed, DecodeConfig
from search.confirm.lossy import LossyRung
from search.confirm.passes import Candidate
from search.confirm.stage import Confirmation
from search.measure.pairs import LosslessViolation
from search.measure.rounding_record import describe_rounding
from search.predict.accuracy import describe_checks
from search.study.attributes import NUM_TIES
from search.study.config_words import describe
from search.study.spec import StudySpec
from search.terminal.event import Event, Line, Stopped, Told, config_fields
from search.terminal.text import duration


def candidate_seen(candidate: Candidate) -> Event:
    """A finalist in the pass on held-out prompts that chooses the winner."""
    entry = candidate.entry
    speed = f"{candidate.speedup:.3f}x" if candidate.speedup else f"excluded: {candidate.excluded}"
    tuning = f"(tuning {entry.speedup:.3f}x{', stopped early' if entry.stopped_early else ''})"
    facts = {
        "trial": entry.trials[0],
        "speedup": candidate.speedup,
        "tuning_speedup": entry.speedup,
        "stopped_early": entry.stopped_early,
        "excluded": candidate.excluded,
        "lossless": candidate.lossless,
        **config_fields(entry.config),
    }
    return Told("confirm", [Line(f"#{entry.trials[0]} {speed} {tuning}: {describe(entry.config)}", "confirm")], facts)


def predictions_checked(checks: Mapping[str, Any]) -> Event:
    """How good the predictions were."""
    return Told("prediction", [Line(text, "outlook") for text in describe_checks(dict(checks))], checks)


@dataclass(frozen=True)
class Result(Event):
    """A study's verdict with the confirmed numbers, where something was measured."""

    name = "result"
    study: str
    confirmation: Confirmation

    def lines(self) -> list[Line]:
        one, config, lines = self.confirmation.measured, self.confirmation.config, []
        if one is not None:
            text = (
                f"{one.tokens_per_s:.1f} tok/s against {one.plain_tokens_per_s:.1f} plain: {one.speedup:.3f}x, "
                f"95 % interval {one.speedup_ci_low:.3f}..{one.speedup_ci_high:.3f}, "
                f"{one.num_prompts} held-out prompts x {one.num_repeats}, "
                f"{one.num_identical} identical, {one.num_ties} logit ties"
            )
            lines += [Line(text, "result"), Line(_end_to_end(one), "result")]
        if len(by_drafter := self.confirmation.by_drafter) > 1:
            speeds = ", ".join(f"{name} {candidate.speedup:.2f}x" for name, candidate in by_drafter.items())
            lines.append(Line(f"best of each drafter on the choosing pass: {speeds}", "result"))
        if self.confirmation.winner is None:
            return [*lines, Line(config.reason or "do not speculate", "result", style="bold yellow")]
        lines.append(Line(f"speculate: {describe(config)}", "result", style="bold green"))
        picture = config.skip_mask.picture().splitlines() if config.drafts_by_mask else []
        return [*lines, *(Line(row, "") for row in picture)]

    def fields(self) -> dict[str, Any]:
        speeds = {name: candidate.speedup for name, candidate in self.confirmation.by_drafter.items()}
        one = self.confirmation
        return _verdict(self.study, one.config, one.measured, group=None) | {"by_drafter": speeds}


def lossy_seen(rungs: Sequence[LossyRung]) -> Event:
    """What lossy rules would make of the winner."""
    first = "LOSSY, not in best.json; the same config with further draft tokens accepted:"
    lines = [Line(text, "result", style="yellow") for text in (first, *map(str, rungs))]
    return Told("lossy", lines, {"rungs": [one.to_dict() for one in rungs]})


def group_verdict(study: str, group: str, setting: DecodeConfig) -> Event:
    """What a group of prompts gets in a per-group search; its confirmed numbers are in its study's own result."""
    words = describe(setting) + (f" ({setting.reason})" if setting.reason else "")
    line = Line(f"{group!a}: {words}", "result", style="bold" if setting.speculates else "bold yellow")
    return Told("result", [line], _verdict(study, setting, None, group=group))


def regime_verdict(study: str, regime: str, confirmation: Confirmation) -> Event:
    """What a regime gets in a search of several, with its study's confirmed numbers."""
    config, one = confirmation.config, confirmation.measured
    words = f"{one.speedup:.3f}x ({one.speedup_ci_low:.3f}..{one.speedup_ci_high:.3f}), " if one else ""
    style = "bold green" if config.speculates else "bold yellow"
    line = Line(f"{regime}: {words}{describe(config)}", "result", style=style)
    return Told("result", [line], _verdict(study, config, one, regime=regime))


def _verdict(study: str, config: DecodeConfig, measured: Confirmed | None, **whose: str | None) -> dict[str, Any]:
    """The fields that every verdict has."""
    return {
        "study": study,
        **whose,
        "verdict": "speculate" if config.speculates else "do not speculate",
        "reason": config.reason,
        "confirmed": measured.model_dump() if measured else None,
        **config_fields(config),
    }


def _end_to_end(measured: Confirmed) -> str:
    """The speedup as who waits for an answer sees it, and how much of the text is loops."""
    low, high = measured.end_to_end_speedup_ci_low, measured.end_to_end_speedup_ci_high
    text = f"end to end, prompts included: {measured.end_to_end_speedup:.3f}x"
    if measured.num_prompts > 1:  # one prompt has no interval
        text += f", 95 % interval {low:.3f}..{high:.3f}"
    if measured.repeated_ngram_share is not None:
        text += f"; {measured.repeated_ngram_share:.0%} of the outputs' {NGRAM}-grams repeat what came before"
    return text


def ties_among(
    trials: Iterable[FrozenTrial], measured: Confirmed | None, rounding: Mapping[str, Any] | None, spec: StudySpec
) -> Event | None:
    """Outputs of trials, and held-out prompts, that in reduced precision differ from the target's by no more than
    rounding explains, and what would show that the code is right; None where there is none.

    rounding: see `search.measure.rounding_record`; None in a study of an earlier version.
    """
    num_in_trials = sum(trial.user_attrs.get(NUM_TIES, 0) for trial in trials)
    num_held_out = measured.num_ties if measured else 0
    if num_in_trials + num_held_out == 0:
        return None
    command = float32_command(
        spec.model, device=spec.device, trust_remote_code=spec.trust_remote_code, quantization=spec.quantization
    )
    text = f"logit ties: {num_in_trials} outputs of trials, {num_held_out} held-out prompts"
    if rounding is not None:
        text += f"; a token may lie {describe_rounding(rounding)}"
    texts = (text, f"the proof of the code is identity in float32: {command}")
    facts = {"num_in_trials": num_in_trials, "num_held_out": num_held_out, "rounding": rounding, "command": command}
    return Told("ties", [Line(one, "result") for one in texts], facts)


def does_not_repeat(violation: LosslessViolation) -> Event:
    """The run ends, for plain decoding varies."""
    return Stopped(f"plain decoding does not repeat itself, nothing can be compared with it: {violation}")


def written(text: str, files: Sequence[str], seconds: Mapping[str, float]) -> Event:
    """The results are on disk; seconds per phase, where they were measured."""
    times = ", ".join(f"{name} {duration(one)}" for name, one in seconds.items())
    line = Line(f"{text} ({times})" if times else text, "written")
    return Told("written", [line], {"files": list(files), "seconds": dict(seconds)})
