"""Events of the end of a run: finalists, predictions looked back on, verdicts, files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

from layerskip.analysis.identity import float32_command
from layerskip.analysis.repetition import NGRAM
from layerskip.config.decode_config import Confirmed, DecodeConfig
from search.confirm.passes import Candidate
from search.confirm.stage import Confirmation
from search.measure.rounding_record import describe_rounding
from search.predict.accuracy import describe_checks
from search.study.attributes import NUM_TIES
from search.study.config_words import describe
from search.study.spec import StudySpec
from search.terminal.event import Event, Line, config_fields
from search.terminal.text import duration


@dataclass(frozen=True)
class CandidateSeen(Event):
    """A finalist in the pass on held-out prompts that chooses the winner."""

    name = "confirm"
    candidate: Candidate

    def lines(self) -> list[Line]:
        one = self.candidate
        speed = f"{one.speedup:.3f}x" if one.speedup else f"excluded: {one.excluded}"
        stopped = ", stopped early" if one.entry.stopped_early else ""
        tuning = f"(tuning {one.entry.speedup:.3f}x{stopped})"
        return [Line(f"#{one.entry.trials[0]} {speed} {tuning}: {describe(one.entry.config)}", "confirm")]

    def fields(self) -> dict[str, Any]:
        one = self.candidate
        numbers = {"trial": one.entry.trials[0], "speedup": one.speedup, "tuning_speedup": one.entry.speedup}
        verdict = {"stopped_early": one.entry.stopped_early, "excluded": one.excluded, "lossless": one.lossless}
        return numbers | verdict | config_fields(one.entry.config)


@dataclass(frozen=True)
class PredictionsChecked(Event):
    """How good the predictions were."""

    name = "prediction"
    checks: Mapping[str, Any]

    def lines(self) -> list[Line]:
        return [Line(text, "outlook") for text in describe_checks(dict(self.checks))]

    def fields(self) -> dict[str, Any]:
        return dict(self.checks)


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
            lines.append(Line(text, "result"))
            lines.append(Line(_end_to_end(one), "result"))
        if len(by_drafter := self.confirmation.by_drafter) > 1:
            speeds = ", ".join(f"{name} {candidate.speedup:.2f}x" for name, candidate in by_drafter.items())
            lines.append(Line(f"best of each drafter on the choosing pass: {speeds}", "result"))
        if self.confirmation.winner is None:
            return [*lines, Line(config.reason or "do not speculate", "result", style="bold yellow")]
        lines.append(Line(f"speculate: {describe(config)}", "result", style="bold green"))
        picture = config.skip_mask.picture().splitlines() if config.drafts_by_mask else []
        return [*lines, *(Line(row, "") for row in picture)]

    def fields(self) -> dict[str, Any]:
        one, config = self.confirmation, self.confirmation.config
        return {
            "study": self.study,
            "group": None,
            "verdict": "speculate" if one.winner else "do not speculate",
            "reason": config.reason,
            "confirmed": one.measured.model_dump() if one.measured else None,
            "by_drafter": {name: candidate.speedup for name, candidate in one.by_drafter.items()},
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


@dataclass(frozen=True)
class Ties(Event):
    """Outputs in reduced precision that differ from the target's by no more than rounding explains, and what would
    show that the code is right."""

    name = "ties"
    num_in_trials: int
    """Outputs."""
    num_held_out: int
    """Prompts."""
    rounding: Mapping[str, Any] | None
    """See `search.measure.rounding_record`; None in a study of an earlier version."""
    command: str

    @classmethod
    def among(
        cls,
        trials: Iterable[FrozenTrial],
        measured: Confirmed | None,
        rounding: Mapping[str, Any] | None,
        spec: StudySpec,
    ) -> Ties | None:
        """None where there is none."""
        num_in_trials = sum(trial.user_attrs.get(NUM_TIES, 0) for trial in trials)
        num_held_out = measured.num_ties if measured else 0
        if num_in_trials + num_held_out == 0:
            return None
        command = float32_command(spec.model, device=spec.device, trust_remote_code=spec.trust_remote_code)
        return cls(num_in_trials, num_held_out, rounding, command)

    def lines(self) -> list[Line]:
        text = f"logit ties: {self.num_in_trials} outputs of trials, {self.num_held_out} held-out prompts"
        if self.rounding is not None:
            text += f"; a token may lie {describe_rounding(self.rounding)}"
        proof = f"the proof of the code is identity in float32: {self.command}"
        return [Line(text, "result"), Line(proof, "result")]


@dataclass(frozen=True)
class GroupVerdict(Event):
    """What a group of prompts gets in a per-group search; its confirmed numbers are in its study's own result."""

    name = "result"
    study: str
    group: str
    setting: DecodeConfig

    def lines(self) -> list[Line]:
        words = describe(self.setting) + (f" ({self.setting.reason})" if self.setting.reason else "")
        return [Line(f"{self.group!a}: {words}", "result", style="bold" if self.setting.speculates else "bold yellow")]

    def fields(self) -> dict[str, Any]:
        verdict = "speculate" if self.setting.speculates else "do not speculate"
        facts = {"study": self.study, "group": self.group, "verdict": verdict, "reason": self.setting.reason}
        return facts | {"confirmed": None} | config_fields(self.setting)


@dataclass(frozen=True)
class RegimeVerdict(Event):
    """What a regime gets in a search of several, with its study's confirmed numbers."""

    name = "result"
    study: str
    regime: str
    confirmation: Confirmation

    def lines(self) -> list[Line]:
        config, one = self.confirmation.config, self.confirmation.measured
        words = f"{one.speedup:.3f}x ({one.speedup_ci_low:.3f}..{one.speedup_ci_high:.3f}), " if one else ""
        style = "bold green" if config.speculates else "bold yellow"
        return [Line(f"{self.regime}: {words}{describe(config)}", "result", style=style)]

    def fields(self) -> dict[str, Any]:
        one = self.confirmation
        return {
            "study": self.study,
            "regime": self.regime,
            "verdict": "speculate" if one.winner else "do not speculate",
            "reason": one.config.reason,
            "confirmed": one.measured.model_dump() if one.measured else None,
            **config_fields(one.config),
        }


@dataclass(frozen=True)
class Written(Event):
    """The results are on disk."""

    name = "written"
    text: str
    files: Sequence[str]
    seconds: Mapping[str, float]
    """Per phase; those not named were not measured."""

    def lines(self) -> list[Line]:
        times = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.seconds.items())
        return [Line(f"{self.text} ({times})" if times else self.text, "written")]

    def fields(self) -> dict[str, Any]:
        return {"files": list(self.files), "seconds": dict(self.seconds)}
