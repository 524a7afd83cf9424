"""The search from an open model to best.json: reference, trials, confirm, export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from sqlalchemy.exc import SQLAlchemyError

from layerskip.cli import CommandError
from layerskip.config import DecodeConfig
from search.confirm import Confirmation, ConfirmOptions, confirm, describe
from search.export import SearchFacts, save_best, save_summary, with_provenance
from search.fingerprint import environment
from search.leaderboard import counted
from search.measurement import LosslessViolation
from search.objective import standings_of, violations_in
from search.outlook import Outlook, OutlookOptions, describe_outlook, open_outlook, outlook_facts
from search.prediction_check import check_predictions, describe_checks
from search.progress import duration
from search.reference import Reference, ReferenceOptions, make_cases, make_reference, plain_speed, warm_up
from search.samplers import quiet_optuna
from search.spec import StudyPaths, StudySpec
from search.storage import close_storage, near, open_storage, redact
from search.study import now_utc, open_study
from search.subject import Subject, Tools
from search.summary import SummaryInput, summarise_run
from search.trial_phase import TrialPhase

_REFERENCE = "reference"


@dataclass(frozen=True)
class RunOutcome:
    """What a run decided, for a caller that goes on from there."""

    config: DecodeConfig
    """As exported, with provenance."""
    confirmation: Confirmation
    reference: Reference
    summary: dict[str, Any]


class SearchRun:
    """One run of one study. `run` returns the exit code: 0, or 1 where the machinery or losslessness broke.

    `outcome` is there after a run that reached its end. With `exports=False` best.json and summary.json are the
    caller's to write.
    """

    outcome: RunOutcome | None = None

    def __init__(
        self,
        subject: Subject,
        spec: StudySpec,
        paths: StudyPaths,
        tools: Tools,
        *,
        load_s: float = 0.0,
        exports: bool = True,
    ) -> None:
        self._exports = exports
        self._subject, self._spec, self._paths, self._tools = subject, spec, paths, tools
        self._say = tools.reporter
        self._seconds: dict[str, float] = {"load": load_s}
        self._start = tools.clock() - load_s

    def run(self, *, searches: bool = True, confirms: bool = True) -> int:
        """Everything, in order; or the trials alone (`confirms=False`) and what follows them in a later call.

        Raises: ValueError or OSError in one line for bad input; KeyboardInterrupt if stopped.
        """
        quiet_optuna()
        storage = open_storage(self._paths.storage_url(self._spec))
        try:
            study = self._open(storage)
            with self._phase("reference"):
                reference = self._reference(study)
            if searches:
                with self._phase("outlook"):
                    outlook = self._look_ahead(study, reference)
                with self._phase("search"):
                    broken = self._search(study, reference, outlook)
                if broken is not None:
                    self._say.warn(broken)
                    return 1
            if not confirms:
                return 0
            with self._phase("confirm"):
                confirmation, dropped = self._confirm(study, reference)
            code = self._finish(study, reference, confirmation, dropped)
            self._show(study)
            return code
        except LosslessViolation as violation:
            self._say.warn(f"plain decoding does not repeat itself, nothing can be compared with it: {violation}")
            return 1
        finally:
            close_storage(storage)

    def _open(self, storage: optuna.storages.BaseStorage) -> optuna.Study:
        spec = self._spec
        facts = {
            "environment": environment(),
            "command": self._tools.command,
            "spec": spec.model_dump() | {"storage": redact(self._paths.storage_url(spec))},
        }
        study = open_study(storage, self._paths.study_name(spec), self._subject.fingerprint, facts)
        done = counted(study.get_trials(deepcopy=False))
        where = redact(self._paths.storage_url(spec))
        self._say.phase("study", f"{study.study_name} in {where}: {done} of {spec.trials} trials done")
        return study

    def _reference(self, study: optuna.Study) -> Reference:
        """The stored reference, or a new one. On a resume the plain speed is looked at again, and drift is told."""
        spec, subject = self._spec, self._subject
        stored, now = study.user_attrs.get(_REFERENCE), 0.0
        if stored is None:
            self._say.phase("reference", f"plain decoding of tuning prompts, {spec.max_new_tokens} tokens each")
            options = ReferenceOptions(subject.space.num_layers, spec.seed, spec.trial_seconds, spec.prompts_per_trial)
            reference = make_reference(subject.decoder, subject.tuning, options)
            study.set_user_attr("plain_tokens_per_s", reference.plain_tokens_per_s)
            study.set_user_attr("noise_sigma", reference.noise_sigma)
            study.set_user_attr(_REFERENCE, reference.to_json())
        else:
            reference = Reference.from_json(stored)
            warm_up(subject.decoder, reference.cases[0].prompt_ids, subject.space.num_layers)
            now = plain_speed(subject.decoder, reference, subject.space.num_layers)
        facts = [
            f"plain {reference.plain_tokens_per_s:.1f} tok/s",
            f"A/A noise {100 * reference.noise_sigma:.1f} % a pair",
            f"{reference.num_per_trial} of {len(reference.cases)} prompts a full trial",
        ]
        facts += [f"{len(reference.dropped)} prompts too short to time"] if reference.dropped else []
        facts += [f"stored; now {now / reference.plain_tokens_per_s:.2f} times as fast"] if stored else []
        self._say.phase("reference", ", ".join(facts))
        return reference

    def _look_ahead(self, study: optuna.Study, reference: Reference) -> Outlook:
        """What is predicted before the first trial; read from the study on a resume."""
        spec, subject = self._spec, self._subject
        self._say.phase("outlook", "costs of the steps, what each sublayer is worth, and a pool of predicted configs")
        options = OutlookOptions(spec.max_new_tokens, spec.gamma_max, spec.seed, spec.trials, spec.trial_seconds)
        outlook = open_outlook(
            study, subject.decoder, subject.space, reference, subject.fingerprint, options, clock=self._tools.clock
        )
        for line in describe_outlook(outlook):
            self._say.phase("outlook", line)
        return outlook

    def _search(self, study: optuna.Study, reference: Reference, outlook: Outlook) -> str | None:
        """Trials up to the total, or a handful where nothing can win. Returns why the run must end, else None."""
        phase = TrialPhase(study, reference, outlook, self._subject, self._spec, self._tools)
        return phase.run()

    def _confirm(self, study: optuna.Study, reference: Reference) -> tuple[Confirmation, tuple[str, ...]]:
        spec, subject = self._spec, self._subject
        trials = study.get_trials(deepcopy=False)
        entries = standings_of(trials, subject.space, reference).entries[: spec.num_confirm_candidates]
        prompts = subject.held_out[: spec.num_confirm_prompts]
        self._say.phase(
            "confirm", f"{len(entries)} candidates and plain decoding on {len(prompts)} held-out prompts, interleaved"
        )
        cases, dropped = make_cases(subject.decoder, prompts, subject.space.num_layers)
        options = ConfirmOptions(subject.space.num_layers, spec.confirm_repeats, reference.noise_sigma, spec.seed)
        tell = lambda line: self._say.phase("confirm", line)  # noqa: E731
        result = confirm(subject.decoder, cases, entries, options, tell)
        for candidate in result.candidates:
            speed = f"{candidate.speedup:.3f}x" if candidate.speedup else f"excluded: {candidate.excluded}"
            line = f"#{candidate.entry.trials[0]} {speed} (tuning {candidate.entry.speedup:.3f}x)"
            self._say.phase("confirm", f"{line}: {describe(candidate.entry.config)}")
        return result, dropped

    def _finish(
        self, study: optuna.Study, reference: Reference, confirmation: Confirmation, dropped: tuple[str, ...]
    ) -> int:
        """Export, tell the verdict, choose the exit code."""
        trials = study.get_trials(deepcopy=False)
        facts = SearchFacts(
            study=study.study_name,
            seed=self._spec.seed,
            num_trials=counted(trials),
            max_new_tokens=self._spec.max_new_tokens,
            command=self._tools.command,
            created_at=now_utc(),
            commit=environment().get("commit"),
            plain_tokens_per_s=reference.plain_tokens_per_s,
        )
        config = with_provenance(confirmation, self._subject.origin, facts)
        violations = violations_in(trials) + confirmation.violations
        self._seconds["total"] = self._tools.clock() - self._start
        checks = check_predictions(trials, reference.noise_sigma)
        for line in describe_checks(checks):
            self._say.phase("outlook", line)
        summary = summarise_run(
            SummaryInput(
                facts=facts,
                storage=redact(self._paths.storage_url(self._spec)),
                total=self._spec.trials,
                trials=trials,
                standings=standings_of(trials, self._subject.space, reference),
                reference=reference,
                confirmation=confirmation,
                held_out_dropped=dropped,
                seconds=self._seconds,
                violations=violations,
                fingerprint=asdict(self._subject.fingerprint),
                prediction=checks | outlook_facts(study),
            )
        )
        self.outcome = RunOutcome(config, confirmation, reference, summary)
        self._write(study, config, summary)
        self._tell_verdict(confirmation)
        for line in violations:
            self._say.warn(f"NOT LOSSLESS, a bug to report: {line}")
        return 1 if violations else 0

    def _write(self, study: optuna.Study, config: DecodeConfig, summary: dict[str, Any]) -> None:
        """best.json, summary.json, and the verdict in the study (finished trials take no attributes)."""
        if self._exports:
            kept = save_best(config, self._paths)
            save_summary(summary, self._paths)
            if kept is not None:
                self._say.warn(f"best.json could not be read and was kept as {kept.name}")
        for key in ("verdict", "reason", "confirmed", "config"):
            study.set_user_attr(key, summary[key])

    def _show(self, study: optuna.Study) -> None:
        """Figures and a note for the dashboard: extras, that cannot fail a run whose results are written."""
        try:
            from search.dashboard_figures import push_figures

            push_figures(study)
        except Exception as error:  # noqa: BLE001 (a locked storage, a changed dashboard, a figure's bug: all the same)
            cause = error.__cause__ or error  # Optuna wraps what the database said
            line = next(iter(str(cause).splitlines()), "")[:200]
            self._say.warn(f"no figures for the dashboard: {type(cause).__name__}: {line}")

    def _tell_verdict(self, confirmation: Confirmation) -> None:
        measured = confirmation.measured
        if measured is not None:
            self._say.phase(
                "result",
                f"{measured.tokens_per_s:.1f} tok/s against {measured.plain_tokens_per_s:.1f} plain: "
                f"{measured.speedup:.3f}x, "
                f"95 % interval {measured.speedup_ci_low:.3f}..{measured.speedup_ci_high:.3f}, "
                f"{measured.num_prompts} held-out prompts x {measured.num_repeats}, "
                f"{measured.num_identical} identical, {measured.num_ties} logit ties",
            )
        if confirmation.winner is not None:
            config = confirmation.config
            self._say.phase("result", f"speculate: {describe(config)}")
            for row in config.skip_mask.picture().splitlines():
                self._say.phase("", row)
        else:
            self._say.phase("result", confirmation.config.reason or "do not speculate")
        if self._exports:
            self._say.phase("written", f"{near(self._paths.best)} and {self._paths.summary.name} ({self._times()})")

    def _times(self) -> str:
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in self._seconds.items())

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = self._tools.clock()
        try:
            yield
        except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            raise CommandError(f"{name}: the storage failed: {str(error).splitlines()[0]}") from error
        except RuntimeError as error:
            if name == "search":
                raise  # trials keep their own errors; this one is ours
            # Plain decoding itself fails, out of memory say: there is nothing to search until it works.
            raise CommandError(f"{name}: {type(error).__name__}: {error}") from error
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._tools.clock() - start
