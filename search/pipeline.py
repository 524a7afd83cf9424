"""The search from an open model to best.json: reference, trials, confirm, export."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import optuna
from sqlalchemy.exc import SQLAlchemyError

from layerskip.command_line.cli import CommandError
from layerskip.config.decode_config import DecodeConfig
from search.budget.plan import reference_options, spread
from search.confirm.files import make_provenance, save_best, save_summary, with_provenance
from search.confirm.lossy import LossyRung, measure_ladder, save_ladder
from search.confirm.passes import ConfirmOptions, HeldOutPrompts
from search.confirm.stage import Confirmation, confirm, shortlist
from search.confirm.summary import candidates_of, summarise_run
from search.context import Tools
from search.measure.batches import batch_speeds, most_drafting
from search.measure.pairs import LosslessViolation
from search.measure.reference import Reference, make_reference, plain_speed, warm_up
from search.measure.rounding_record import RoundingRecord
from search.measure.subject import Subject
from search.outlook.opening import OutlookOpening
from search.outlook.outlook import Outlook, OutlookOptions, outlook_facts
from search.predict.accuracy import check_predictions
from search.predict.surfaces import store_surfaces
from search.reporting.publish import Publisher
from search.run_plan import RunPlan
from search.storages.address import near, redact
from search.storages.opening import close_storage, open_storage, storage_at
from search.study.attributes import (
    BUDGET,
    CANDIDATES,
    COMMAND,
    CONFIG,
    CONFIRMED,
    CONFIRMED_ON,
    ENVIRONMENT,
    FIRST_PLAN,
    GAMMA_LOWERED,
    HELD_OUT,
    LOSSY,
    NOISE_SIGMA,
    PLAIN_TOKENS_PER_S,
    POOL,
    REASON,
    REFERENCE,
    ROUNDING,
    SPEC,
    VERDICT,
)
from search.study.draft_ids import sets_in, with_sets
from search.study.fingerprint import DEVICE_FIELDS, environment
from search.study.leaderboard import Entry
from search.study.opening import open_study, quiet_optuna, stored_study
from search.study.prompts import split_held_out
from search.study.spec import StudyPaths, StudySpec
from search.study.trials import counted
from search.terminal.event import Event, Stopped
from search.terminal.progress import Progress
from search.terminal.progress_events import ReferenceKnown, StudyOpened, foreseen
from search.terminal.reporter import Reporter
from search.terminal.result_events import (
    Result,
    candidate_seen,
    does_not_repeat,
    lossy_seen,
    predictions_checked,
    ties_among,
    written,
)
from search.terminal.text import duration
from search.trials.objective import standings_of, violations_in
from search.trials.phase import TrialPhase, TrialSetup
from search.workers.crew import Crew
from search.workers.device import as_seen_on, computing_on


@dataclass(frozen=True)
class RunOutcome:
    """What a run decided, for a caller that goes on from there."""

    config: DecodeConfig
    """As exported, with provenance."""
    confirmation: Confirmation
    reference: Reference
    summary: dict[str, Any]
    max_new_tokens: int
    """That were decoded: a budget may have cut those of the spec."""


class SearchRun:
    """One run of one study. `run` returns the exit code: 0, or 1 where the machinery or losslessness broke.

    `outcome` is there after a run that reached its end. With `exports=False` best.json and summary.json are the
    caller's to write. `goes_on`: after another regime, see `RunPlan`.
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
        goes_on: bool = False,
    ) -> None:
        self._exports, self._goes_on = exports, goes_on
        self._subject, self._spec, self._paths, self._tools = subject, spec, paths, tools
        self._asked = spec
        self._plan: RunPlan | None = None
        """None in a per-group search, which has no budget."""
        self._budget: dict[str, Any] = {}
        self._say = tools.reporter
        self._seconds: dict[str, float] = {"load": load_s}
        self._machine: dict[str, Any] = {}
        self._rounding = RoundingRecord(subject.rounding)
        self._start = tools.clock() - load_s
        self._publisher = Publisher(paths, tools, page=exports)

    def run(self, *, searches: bool = True, confirms: bool = True) -> int:
        """Everything, in order; or the trials alone (`confirms=False`) and what follows them in a later call.

        Raises: ValueError or OSError in one line for bad input; KeyboardInterrupt if stopped.
        """
        quiet_optuna()
        storage = open_storage(self._paths.storage_url(self._spec))
        self._crew = self._make_crew(storage)
        study = None
        try:
            with self._crew.setting_up():
                if not self._spec.per_group:
                    self._make_plan(stored_study(storage, self._paths.study_name(self._spec)))
                study = as_seen_on(self._open(storage), self._subject.fingerprint)
                self._crew.join(study, alone=not self._exports or self._spec.per_group)
                prepared = None if _is_set_up(study) else self._prepare(study, searches=searches)
            if (busy := self._crew.confirming()) is not None and self._has_all(study):
                self._say.phase("confirm", f"{busy.name} confirms; nothing to do here")
                return 0
            reference, outlook = prepared or self._prepare(study, searches=searches)
            if outlook is not None:
                with self._phase("search"):
                    broken = self._search(study, reference, outlook)
                if broken is not None:
                    self._say.tell(Stopped(broken))
                    return 1
            if not confirms:
                return 0
            if (others := self._crew.finish()) is not None:
                self._say.phase("confirm", f"{others}; nothing more to do here")
                return 0
            with self._phase("confirm"):
                confirmation = self._confirm(study, reference)
            self._rounding.keep(study)
            code = self._finish(study, reference, confirmation)
            self._measure_lossy(study, confirmation)
            self._crew.confirmed()  # first: the results are written, and what follows is extra
            self._publish(study)
            return code
        except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            raise CommandError(f"study: the storage failed: {str(error).splitlines()[0]}") from error
        except KeyboardInterrupt:
            if study is not None and counted(study.get_trials(deepcopy=False)) and self._crew.is_first():
                self._publish(study)  # what there is so far; a second signal ends that too
            raise
        except LosslessViolation as violation:
            self._say.tell(does_not_repeat(violation))
            return 1
        finally:
            self._crew.leave()
            close_storage(storage)

    def _make_crew(self, storage: optuna.storages.BaseStorage) -> Crew:
        return Crew(
            storage,
            self._paths.study_name(self._spec),
            tell=lambda text: self._say.phase("workers", text),
            warn=self._say.warn,
            facts={"device": self._subject.fingerprint.device} | computing_on(*self._subject.decoder.devices),
            patience=self._tools.patience,
        )

    def _prepare(self, study: optuna.Study, *, searches: bool) -> tuple[Reference, Outlook | None]:
        """What trials are measured with: made by the first worker, read by the others and on a resume."""
        with self._phase("reference"):
            reference = self._reference(study)
        self._subject, lowered = self._subject.with_room(reference, self._spec)
        if lowered is not None:
            self._say.phase("reference", lowered)
            study.set_user_attr(GAMMA_LOWERED, lowered)
        self._subject = self._subject.with_draft_ids(study, reference)
        if not searches:
            return reference, None
        with self._phase("outlook"):
            return reference, self._look_ahead(study, reference)

    def _make_plan(self, study: optuna.Study | None) -> None:
        """Decide on how much is measured, and say how long that takes."""
        with self._phase("reference"):
            self._plan = RunPlan(self._subject, self._spec, self._tools, self._start, study, goes_on=self._goes_on)
        self._say.tell(self._plan.told)
        self._subject, self._spec = self._plan.subject, self._plan.spec

    def _has_all(self, study: optuna.Study) -> bool:
        return counted(study.get_trials(deepcopy=False)) >= self._spec.trials

    def _open(self, storage: optuna.storages.BaseStorage) -> optuna.Study:
        spec = self._spec
        facts = {
            ENVIRONMENT: environment(),
            COMMAND: self._tools.command,
            SPEC: self._asked.model_dump() | {"storage": redact(self._paths.storage_url(spec))},
        }
        if self._plan is not None:
            facts[FIRST_PLAN] = self._plan.at_start.to_json()
        study = open_study(storage, self._paths.study_name(spec), self._subject.fingerprint, facts)
        done = counted(study.get_trials(deepcopy=False))
        where = redact(self._paths.storage_url(spec))
        self._say.tell(StudyOpened(study.study_name, where, done, spec.trials))
        return study

    def _reference(self, study: optuna.Study) -> Reference:
        """The stored reference, or a new one. On a resume the plain speed is looked at again, and drift is told."""
        spec, subject = self._spec, self._subject
        stored, now = study.user_attrs.get(REFERENCE), None
        if stored is None:
            way = "greedy" if not subject.sampling.do_sample else f"sampled ({subject.sampling.name})"
            self._say.phase("reference", f"plain decoding of tuning prompts, {way}, {spec.max_new_tokens} tokens each")
            options = reference_options(spec, subject, self._plan.at_start if self._plan else None)
            tell = self._progress("reference", "tuning texts")
            reference = make_reference(subject.decoder, subject.tuning, options, tell)
            study.set_user_attr(PLAIN_TOKENS_PER_S, reference.plain_tokens_per_s)
            study.set_user_attr(NOISE_SIGMA, reference.noise_sigma)
            study.set_user_attr(REFERENCE, reference.to_json())
        else:
            reference = Reference.from_json(stored)
            warm_up(subject.decoder, reference.cases[0].prompt_ids, subject.space.num_layers)
            now = plain_speed(subject.decoder, reference, subject.space.num_layers) / reference.plain_tokens_per_s
        self._say.tell(ReferenceKnown(reference, now))
        return reference

    def _progress(self, phase: str, what: str) -> Progress:
        return Progress(lambda text: self._say.phase(phase, text), what, self._tools.clock)

    def _look_ahead(self, study: optuna.Study, reference: Reference) -> Outlook:
        """What is predicted before the first trial; read from the study on a resume."""
        spec, subject = self._spec, self._subject
        self._say.phase("outlook", "costs of the steps, what each sublayer is worth, and a pool of predicted configs")
        plan = self._plan.after(study, reference, "reference") if self._plan else None
        options = OutlookOptions.of(spec, reference, plan)
        outlook = OutlookOpening(
            study,
            subject.decoder,
            subject.space,
            reference,
            subject.fingerprint,
            options,
            prompts=subject.tuning,
            clock=self._tools.clock,
            tell=self._progress("outlook", "sublayers, each left out and left in"),
        ).outlook()
        self._say.tell(foreseen(outlook))
        return outlook

    def _search(self, study: optuna.Study, reference: Reference, outlook: Outlook) -> str | None:
        """Trials up to the total, or a handful where nothing can win. Returns why the run must end, else None."""
        deadline = math.inf
        if self._plan is not None:
            deadline = self._plan.deadline(self._plan.after(study, reference, "reference", "outlook"))
        setup = TrialSetup(study, self._subject, self._spec, reference, outlook, self._tools, self._crew)
        broken = TrialPhase(setup, deadline=deadline).run([self._refresh])
        leading = self._candidates(study, reference)
        self._publisher.attempt("no surface to draw", lambda: store_surfaces(study, outlook.predictor, leading))
        return broken

    def _candidates(self, study: optuna.Study, reference: Reference) -> tuple[Entry, ...]:
        standings = standings_of(study.get_trials(deepcopy=False), self._subject.space, reference)
        return shortlist(standings, self._spec.num_confirm_candidates)

    def _confirm(self, study: optuna.Study, reference: Reference) -> Confirmation:
        spec, subject = self._spec, self._subject
        entries, repeats = self._candidates(study, reference), spec.confirm_repeats
        choosing, reporting = split_held_out(subject.held_out, spec.num_confirm_prompts)
        if self._plan is not None:
            over = ("reference", "outlook", "search")
            plan = self._plan.after(study, reference, *over, num_candidates=len(entries))
            self._budget = self._plan.facts(plan)
            if plan.cuts:
                self._say.phase("plan", f"{duration(plan.budget_s or 0.0)} left to confirm: {', '.join(plan.cuts)}")
                amounts = plan.amounts
                choosing, reporting = spread(choosing, amounts.num_choosing), spread(reporting, amounts.num_held_out)
                entries, repeats = entries[: amounts.num_candidates], amounts.confirm_repeats
        others = f"the chosen one on {len(reporting)} others" if choosing else "the chosen one again on the same"
        self._say.phase(
            "confirm",
            f"{len(entries)} candidates and plain decoding on {len(choosing or reporting)} held-out prompts, {others}",
        )
        options = ConfirmOptions(
            subject.space.num_layers,
            repeats,
            spec.seed,
            is_sampled=subject.sampling.do_sample,
            settled_at=None if spec.until_settled is None else spec.until_settled / 100,
        )
        tell = lambda line: self._say.phase("confirm", line)  # noqa: E731
        prompts = HeldOutPrompts(reporting, choosing)
        result = confirm(subject.decoder, prompts, entries, options, tell, lambda what: self._progress("confirm", what))
        for candidate in result.candidates:
            self._say.tell(candidate_seen(candidate))
        return self._with_batches(result)

    def _with_batches(self, result: Confirmation) -> Confirmation:
        """Where several texts can be decoded at once, among how many of them the winner still drafts: on prompts that
        do not report."""
        decoder, prompts = self._subject.decoder, [one.ids for one in self._subject.tuning]
        if result.winner is None or decoder.batch_refusal is not None:
            return result
        progress = self._progress("confirm", "numbers of texts decoded at once")
        try:
            speeds = batch_speeds(decoder, prompts, result.config, progress)
        except (RuntimeError, MemoryError) as error:  # no memory for so many texts, say; the verdict stands
            self._say.warn(f"several texts at once: {type(error).__name__}: {error}")
            return result
        if not speeds:
            return result
        most = most_drafting(speeds)
        told = "; ".join(str(one) for one in speeds)
        self._say.phase("confirm", f"the winner against plain decoding, {told}: drafts among up to {most} texts")
        return replace(result, config=result.config.model_copy(update={"max_drafting": most}), batches=speeds)

    def _finish(self, study: optuna.Study, reference: Reference, confirmation: Confirmation) -> int:
        """Export, tell the verdict, choose the exit code."""
        trials = study.get_trials(deepcopy=False)
        fingerprint, here, winner = asdict(self._subject.fingerprint), environment(), confirmation.winner
        provenance = make_provenance(
            study,
            fingerprint,
            here["optuna"],
            model=self._subject.model,
            num_layers=self._subject.space.num_layers,
            seed=self._spec.seed,
            attention_backend=fingerprint["attention_backend"],
            command=self._tools.command,
            commit=here.get("commit"),
            trial=winner.trials[0] if winner else None,
            searched_tokens_per_s=winner.speedup * reference.plain_tokens_per_s if winner else None,
        )
        sets = sets_in(study.user_attrs)
        config = with_sets(with_provenance(confirmation.config, self._subject.sampling, provenance), sets)
        violations = violations_in(trials) + confirmation.violations
        self._seconds["total"] = self._tools.clock() - self._start
        checks = check_predictions(trials, reference.noise_sigma)
        self._say.tell(predictions_checked(checks))
        summary = summarise_run(
            provenance,
            confirmation,
            reference,
            trials,
            storage=redact(self._paths.storage_url(self._spec)),
            total=self._spec.trials,
            standings=standings_of(trials, self._subject.space, reference),
            seconds=self._seconds,
            violations=violations,
            fingerprint=fingerprint,
            machine=self._machine,
            prediction=checks | outlook_facts(study),
            budget=self._budget,
            rounding=study.user_attrs.get(ROUNDING),
        )
        self.outcome = RunOutcome(config, confirmation, reference, summary, self._spec.max_new_tokens)
        self._write(study, config, summary, confirmation)
        self._say.tell(Result(study.study_name, confirmation))
        if (ties := ties_among(trials, confirmation.measured, summary["rounding"], self._spec)) is not None:
            self._say.tell(ties)
        if self._exports:
            self._say.tell(results_written(self._paths, self._seconds))
        for line in violations:
            self._say.warn(f"NOT LOSSLESS, a bug to report: {line}")
        return 1 if violations else 0

    def _measure_lossy(self, study: optuna.Study, confirmation: Confirmation) -> None:
        """Where it may be: the winner under lossy rules on the prompts that confirmed it, told and written apart. Last,
        so that the verdict is safe whatever happens here."""
        rungs: tuple[LossyRung, ...] = ()
        subject, outcome = self._subject, self.outcome
        if self._spec.allow_lossy and confirmation.winner and confirmation.held_out:
            prompts = [one for one in subject.held_out if one.prompt_id in confirmation.held_out.prompt_ids]
            with self._phase("lossy"):
                progress = self._progress("lossy", "prompts under every lossy rule")
                rungs = measure_ladder(subject.decoder, prompts, confirmation.config, self._spec.seed, progress)
        if rungs or LOSSY in study.user_attrs:  # of an earlier verdict
            study.set_user_attr(LOSSY, json.dumps([one.to_dict() for one in rungs]))
        if not rungs or outcome is None:
            return
        self._say.tell(lossy_seen(rungs))
        outcome.summary[LOSSY] = [one.to_dict() for one in rungs]
        if self._exports:
            save_summary(outcome.summary, self._paths)
            files = save_ladder(rungs, outcome.config, self._paths.folder)
            text = f"{near(files[0].parent)}: {len(files)} lossy configs"
            self._say.tell(written(text, [str(one) for one in files], {}))

    def _write(
        self, study: optuna.Study, config: DecodeConfig, summary: dict[str, Any], confirmation: Confirmation
    ) -> None:
        """best.json, summary.json, and the verdict in the study (finished trials take no attributes)."""
        if self._exports:
            save_results(config, summary, self._paths, self._say)
        for key in (VERDICT, REASON, CONFIRMED, CONFIG):
            study.set_user_attr(key, summary[key])
        fingerprint = asdict(self._subject.fingerprint)
        study.set_user_attr(CONFIRMED_ON, {name: fingerprint[name] for name in DEVICE_FIELDS})
        study.set_user_attr(BUDGET, summary["budget"])
        study.set_user_attr(CANDIDATES, candidates_of(confirmation))
        if confirmation.held_out is not None:
            study.set_user_attr(HELD_OUT, confirmation.held_out.to_json())

    def _refresh(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        """What a trial leaves besides; the dashboard's figures from one worker alone."""
        self._rounding.keep(study)
        if self._crew.is_first():
            self._publisher(study, trial)

    def _publish(self, study: optuna.Study) -> None:
        """The report, the dashboard's figures and files: extras, that cannot fail a run whose results are written."""
        if (page := self._publisher.publish(study)) is not None:
            self._say.phase("report", str(near(page)))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start, watch = self._tools.clock(), self._subject.decoder.watch_machine()
        try:
            yield
            self._machine[name] = watch.record()
        except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            raise CommandError(f"{name}: the storage failed: {str(error).splitlines()[0]}") from error
        except RuntimeError as error:
            if name == "search":
                raise  # trials keep their own errors; this one is ours
            # Plain decoding itself fails, out of memory say: there is nothing to search until it works.
            raise CommandError(f"{name}: {type(error).__name__}: {error}") from error
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._tools.clock() - start


def save_results(config: DecodeConfig, summary: dict[str, Any], paths: StudyPaths, say: Reporter) -> None:
    """Write best.json and summary.json."""
    kept = save_best(config, paths)
    save_summary(summary, paths)
    if kept is not None:
        say.warn(f"best.json could not be read and was kept as {kept.name}")


def results_written(paths: StudyPaths, seconds: Mapping[str, float]) -> Event:
    """Tells of both files."""
    text = f"{near(paths.best)} and {paths.summary.name}"
    return written(text, (str(paths.best), str(paths.summary)), seconds)


def publish_together(spec: StudySpec, paths: StudyPaths, tools: Tools, attribute: str, facts: str) -> None:
    """What several studies found into the folder's own study, and its report into the folder once more."""
    with storage_at(paths.storage_url(spec)) as storage:
        study = optuna.load_study(study_name=paths.study_name(spec), storage=storage)
        publisher = Publisher(paths, tools, page=True)
        what = f"nothing {attribute.replace('_', ' ')} to show"
        publisher.attempt(what, lambda: study.set_user_attr(attribute, facts))
        publisher.publish(study)


def _is_set_up(study: optuna.Study) -> bool:
    """Whether a worker has made all that workers share; the pool is the last of it."""
    return {REFERENCE, POOL} <= study.user_attrs.keys()
