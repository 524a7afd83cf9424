"""Per-group search: one study over all prompts and one per prompt group, the matrix, and one config for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import optuna

from layerskip.command_line.cli import CommandError
from layerskip.config.decode_config import DEFAULT_GROUP, DecodeConfig
from search.context import Tools
from search.measure.pairs import LosslessViolation, PromptCase
from search.measure.reference import Continuing, make_cases
from search.measure.subject import Subject
from search.per_group.choice import Decision, decide
from search.per_group.export import GroupResult, combined_config, group_summary, matrix_facts
from search.per_group.matrix import Matrix, measure_matrix, table, violations_of
from search.pipeline import RunOutcome, SearchRun, publish_together, results_written, save_results
from search.storages.opening import storage_at
from search.study.attributes import FINGERPRINT, PER_GROUP
from search.study.fingerprint import FingerprintMismatch, compare
from search.study.grouping import count_groups, interleaved, of_group
from search.study.opening import quiet_optuna
from search.study.spec import StudyPaths, StudySpec
from search.study.trials import counted
from search.terminal.result_events import does_not_repeat, group_verdict


def group_subjects(subject: Subject) -> dict[str, Subject]:
    """What each search is about, by name: `default` with all prompts, then every group.

    Raises: ValueError if there are too few groups, or a group has too few prompts.
    """
    # Only so many held-out prompts are used, and files tend to be sorted by group.
    subjects = {DEFAULT_GROUP: replace(subject, held_out=interleaved(subject.held_out))}
    for name in count_groups(subject.tuning, subject.held_out):
        subjects[name] = subject.on_prompts(of_group(subject.tuning, name), of_group(subject.held_out, name))
    return subjects


class GroupRun:
    """One run of all the studies of a per-group search; `run` returns the exit code, as SearchRun's does.

    First the trials of every study, then the confirm stages, then the matrix: each study goes on where it was stopped,
    and an interruption during the trials costs only the one in flight. A stopped confirm stage or matrix starts anew.
    """

    def __init__(
        self, subject: Subject, spec: StudySpec, paths: StudyPaths, tools: Tools, *, load_s: float = 0.0
    ) -> None:
        self._subjects = group_subjects(subject)
        self._spec, self._paths, self._tools = spec, paths, tools
        self._say = tools.reporter
        self._load_s = load_s
        self._start = tools.clock() - load_s

    def run(self) -> int:
        """Everything, in order.

        Raises: ValueError or OSError in one line for bad input; KeyboardInterrupt if stopped.
        """
        unfinished = self._check_studies()
        runs: dict[str, SearchRun] = {}
        for name in self._subjects:
            self._tell_group("search", name)
            runs[name] = self._search_run(name, unfinished)
            if code := runs[name].run(confirms=False):
                return code
        outcomes: dict[str, RunOutcome] = {}
        codes = []
        for name, run in runs.items():
            self._tell_group("confirm", name)
            codes.append(run.run(searches=False))
            if run.outcome is None:
                return 1
            outcomes[name] = run.outcome
        try:
            codes.append(self._finish(outcomes))
        except LosslessViolation as violation:
            self._say.tell(does_not_repeat(violation))
            return 1
        return max(codes)

    def _study_name(self, name: str) -> str:
        whole = self._paths.study_name(self._spec)
        return whole if name == DEFAULT_GROUP else f"{whole}/{name}"

    def _search_run(self, name: str, unfinished: int) -> SearchRun:
        """The search of one group; the time limit is shared equally among the studies that have trials to do."""
        timeout = self._spec.timeout_s
        changes = {
            "study_name": self._study_name(name),
            "storage": self._paths.storage_url(self._spec),
            "timeout_s": timeout / max(1, unfinished) if timeout is not None else None,
        }
        spec = self._spec.model_copy(update=changes)
        return SearchRun(self._subjects[name], spec, self._paths, self._tools, exports=False)

    def _check_studies(self) -> int:
        """How many studies have trials to do.

        Raises: FingerprintMismatch before anything is measured, if a study that exists was about something else.
        """
        quiet_optuna()
        unfinished = 0
        with storage_at(self._paths.storage_url(self._spec)) as storage:
            there = set(optuna.get_all_study_names(storage))
            for name, subject in self._subjects.items():
                study_name, done = self._study_name(name), 0
                if study_name in there:
                    study = optuna.load_study(study_name=study_name, storage=storage)
                    _compare(study, subject)
                    done = counted(study.get_trials(deepcopy=False))
                unfinished += done < self._spec.trials
        return unfinished

    def _finish(self, outcomes: Mapping[str, RunOutcome]) -> int:
        """Matrix, decisions, export. Returns 1 if the matrix found an output that differed."""
        start = self._tools.clock()
        matrix = self._measure({name: outcome.config for name, outcome in outcomes.items()})
        matrix_s = self._tools.clock() - start
        decisions = {
            name: decide(
                matrix[name][name],
                matrix[DEFAULT_GROUP][name],
                noise_sigma=outcome.reference.noise_sigma,
                search_said=outcome.config.reason,
            )
            for name, outcome in outcomes.items()
            if name != DEFAULT_GROUP
        }
        result = GroupResult(self._subjects, outcomes, matrix, decisions)
        config = combined_config(result)
        self._tell(matrix, decisions, config)
        summary = group_summary(result, config, group_field=self._spec.group_field)
        total_s = self._tools.clock() - self._start
        summary["seconds"] |= {"load": self._load_s, "matrix": matrix_s, "total": total_s}
        save_results(config, summary, self._paths, self._say)
        for line in violations_of(matrix):
            self._say.warn(f"NOT LOSSLESS, a bug to report: {line}")
        publish_together(self._spec, self._paths, self._tools, PER_GROUP, matrix_facts(summary))
        self._say.tell(results_written(self._paths, {"matrix": matrix_s, "total": total_s}))
        return 1 if violations_of(matrix) else 0

    def _measure(self, settings: Mapping[str, DecodeConfig]) -> Matrix:
        """Raises: CommandError if plain decoding itself fails, out of memory say; LosslessViolation if it varies."""
        spec, default = self._spec, self._subjects[DEFAULT_GROUP]
        num_layers, decoder = default.space.num_layers, default.decoder
        cases: dict[str, tuple[PromptCase, ...]] = {}
        try:
            for name, subject in self._subjects.items():
                if name != DEFAULT_GROUP:
                    prompts = subject.held_out[: spec.num_confirm_prompts]
                    cases[name], _ = make_cases(decoder, prompts, Continuing(num_layers, spec.seed))
            self._say.phase(
                "matrix",
                f"every setting on {sum(map(len, cases.values()))} held-out prompts of {len(cases)} groups, "
                f"interleaved with plain decoding, {spec.confirm_repeats} times",
            )
            return measure_matrix(decoder, settings, cases, repeats=spec.confirm_repeats, seed=spec.seed)
        except RuntimeError as error:
            raise CommandError(f"matrix: {type(error).__name__}: {error}") from error

    def _tell_group(self, stage: str, name: str) -> None:
        subject, place = self._subjects[name], list(self._subjects).index(name)
        whose = "all prompts" if name == DEFAULT_GROUP else f"group {name!a}"
        self._say.phase(
            "group",
            f"{stage} {place + 1} of {len(self._subjects)}, {whose}: {len(subject.tuning)} tuning and "
            f"{len(subject.held_out)} held-out prompts",
        )

    def _tell(self, matrix: Matrix, decisions: Mapping[str, Decision], config: DecodeConfig) -> None:
        rows = {"own": "", "default": DEFAULT_GROUP}
        chosen = {(rows[one.source] or name, name) for name, one in decisions.items() if one.source in rows}
        head = "speedup over plain decoding, 95 % interval; * = what the group gets"
        self._say.phase("matrix", "\n".join([head, *table(matrix, chosen)]))
        for name in decisions:
            self._say.tell(group_verdict(self._study_name(name), name, config.for_group(name)))


def _compare(study: optuna.Study, subject: Subject) -> None:
    stored = study.user_attrs.get(FINGERPRINT)
    if stored is None:
        return  # the search itself says what is wrong with it
    try:
        compare(stored, subject.fingerprint)
    except FingerprintMismatch as error:
        raise FingerprintMismatch(f"study {study.study_name!a}: {error}") from None
