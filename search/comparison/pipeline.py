"""A comparison from an open model to results.json, table.md, plot.html and the record that they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import DecodeConfig, write_atomically
from layerskip.config.usual_lookups import NGRAMS, lookup_alone
from search.budget.plan import reference_options
from search.comparison.accounting import Account
from search.comparison.confirm import Turns, confirm_picks, read_measurements
from search.comparison.journal import Journal
from search.comparison.plan import ComparisonPlan
from search.comparison.record import FILE as RECORD
from search.comparison.record import RESULTS, Record, write_record, write_results
from search.comparison.results import picks_of
from search.comparison.runs import Shared, StrategyRun, make_runs, run_all
from search.context import Tools
from search.measure.pairs import LosslessViolation, time_able
from search.measure.reference import Continuing, Reference, make_cases, make_reference, warm_up
from search.measure.subject import Subject
from search.rivals import STRATEGIES
from search.storages.address import near
from search.study.fingerprint import FingerprintMismatch, compare, environment
from search.study.opening import now_utc, quiet_optuna, with_choices
from search.study.spec import StudySpec
from search.terminal.comparison_events import PicksAdvanced
from search.terminal.progress_events import ReferenceKnown
from search.terminal.result_events import does_not_repeat, written

SCHEMA_VERSION = 1
_SETUP, _TRIALS, _CONFIRM = "setup.json", "trials.jsonl", "confirm.jsonl"


@dataclass(frozen=True)
class _Confirmation:
    """Which held-out prompts the picks were confirmed on; the measurements are in the journal."""

    prompt_ids: tuple[str, ...]
    dropped: tuple[str, ...]


class ComparisonRun:
    """One comparison in one folder. `run` returns the exit code: 0, or 1 where losslessness broke."""

    def __init__(
        self,
        plan: ComparisonPlan,
        subject: Subject,
        spec: StudySpec,
        out: Path,
        tools: Tools,
    ) -> None:
        self._plan, self._subject, self._spec, self._out, self._tools = plan, subject, spec, out, tools
        self._say = tools.reporter

    def run(self, *, named: bool) -> int:
        """Everything, in order; `named` says that the user asked for these strategies by name.

        Raises: ValueError, OSError or CommandError in one line; KeyboardInterrupt if stopped, with nothing lost.
        """
        quiet_optuna()
        _refuse_record_alone(self._out)
        self._out.mkdir(parents=True, exist_ok=True)
        try:
            shared = self._share()
            self._leave_out(shared, named=named)
            journal = Journal(self._out / _TRIALS)
            runs = make_runs(self._plan, shared, journal)
            run_all(self._plan, runs, shared, journal)
            confirmation = self._confirm(runs)
        except LosslessViolation as violation:
            self._say.tell(does_not_repeat(violation))
            return 1
        return self._finish(shared, runs, confirmation)

    def _environment(self) -> dict[str, str]:
        return environment() | {"attention_backend": self._subject.fingerprint.attention_backend}

    def _share(self) -> Shared:
        """The reference, stored or new, and what else all runs share."""
        subject, spec = self._subject, self._spec
        setup = read_setup(self._out)
        if setup is None:
            self._say.phase("reference", "plain decoding of tuning prompts")
            options = reference_options(spec, subject)
            reference = make_reference(subject.decoder, subject.tuning, options)
            fingerprint = asdict(subject.fingerprint)
            facts = {"created_at": now_utc(), "environment": self._environment(), "fingerprint": fingerprint}
            setup = facts | {"reference": reference.to_json()}
            write_atomically(self._out / _SETUP, json.dumps(setup, indent=2) + "\n")
        else:
            _check_fingerprint(setup, subject, self._out)
            reference = Reference.from_json(setup["reference"])
            warm_up(subject.decoder, reference.cases[0].prompt_ids, subject.space.num_layers)
        self._say.tell(ReferenceKnown(reference))
        self._subject, lowered = subject.with_room(reference, spec)
        if lowered is not None:
            self._say.phase("reference", lowered)
        return Shared(self._subject, reference, spec, self._tools, self._out)

    def _leave_out(self, shared: Shared, *, named: bool) -> None:
        """Strategies that need hidden states where there are none: refused if asked for, else left out, and said."""
        needing = [name for name in self._plan.strategies if STRATEGIES[name].uses_states]
        account = Account(shared.ledger, self._tools.clock)
        if not needing or shared.hints(account).states is not None:
            return
        reason = f"{', '.join(needing)}: hidden states layer by layer are needed, which this engine does not give"
        if named:
            raise ValueError(f"--strategies: {reason}")
        self._say.phase("left out", reason)
        self._plan = replace(self._plan, strategies=tuple(one for one in self._plan.strategies if one not in needing))

    def _confirm(self, runs: Mapping[tuple[str, int], StrategyRun]) -> _Confirmation:
        """Measure every run's leaders, and n-grams beside them, on held-out prompts."""
        subject, plan = self._subject, self._plan
        picks = picks_of(plan, runs, self._ngrams)
        prompts = subject.held_out[: self._spec.num_confirm_prompts]
        cases, dropped = make_cases(subject.decoder, prompts, Continuing(subject.space.num_layers, self._spec.seed))
        if not cases:
            raise ValueError("held_out: the model ends the text before a second token on every held-out prompt")
        passes = f"{len(cases)} held-out prompts x {plan.confirm_repeats}"
        self._say.phase("confirm", f"{len(picks)} picks, n-grams among them, on {passes}, interleaved")
        # A warm-up: the picks were decoded in trials, n-grams were not. A fault is told where they are measured.
        time_able(subject.decoder, cases[0], [self._ngrams])
        journal = Journal(self._out / _CONFIRM)
        turns, clock, start = Turns(picks, cases, plan.confirm_repeats), self._tools.clock, self._tools.clock()
        begun: list[int] = []

        def tell(done: int) -> None:
            begun.append(done)
            pace_s = (clock() - start) / len(begun)
            self._say.tell(PicksAdvanced(done, len(turns), pace_s * (len(turns) - done)))

        confirm_picks(subject.decoder, turns, journal, self._tools.stop, tell)
        return _Confirmation(tuple(case.prompt_id for case in cases), dropped)

    @property
    def _ngrams(self) -> DecodeConfig:
        """What needs no search, and what any mask has to be compared with."""
        return lookup_alone(self._subject.space.num_layers, NGRAMS)

    @property
    def _model_name(self) -> str:
        """The model without the folders that this machine keeps it in; `NAME/model` stays in two parts."""
        return "/".join(self._subject.model.split("/")[-2:])

    def _finish(self, shared: Shared, runs: Mapping[tuple[str, int], StrategyRun], confirmation: _Confirmation) -> int:
        """Write the results and the record of what they are made of, print the table, choose the exit code."""
        reference = shared.reference
        facts = {
            "schema_version": SCHEMA_VERSION,
            "command": self._tools.command,
            "commit": environment().get("commit"),
            "created_at": now_utc(),
            "fingerprint": asdict(self._subject.fingerprint),
            "environment": self._environment(),
            "plan": asdict(self._plan),
            "reference": {
                "plain_tokens_per_s": reference.plain_tokens_per_s,
                "noise_sigma": reference.noise_sigma,
                "num_per_trial": reference.num_per_trial,
            },
            "held_out_dropped": list(confirmation.dropped),
        }
        title = f"Ways to choose a skip mask: {self._model_name} on {self._subject.fingerprint.device}"
        measurements = read_measurements(Journal(self._out / _CONFIRM))
        record = Record(facts, title, self._subject.space, confirmation.prompt_ids, runs, measurements, self._ngrams)
        table = write_results(record, self._out)
        write_record(record, self._out / RECORD)
        self._say.phase(None, table.rstrip("\n"))
        names = (*RESULTS, RECORD)
        text = f"{near(self._out)}: {', '.join(names[:-1])} and {names[-1]}"
        self._say.tell(written(text, tuple(str(self._out / name) for name in names), {}))
        for line in record.violations:
            self._say.warn(f"NOT LOSSLESS, a bug to report: {line}")
        return 1 if record.violations else 0


def read_setup(out: Path) -> dict[str, Any] | None:
    """What an earlier run of the same folder fixed; None for a new one. Raises: ValueError naming the file."""
    file = out / _SETUP
    if not file.is_file():
        return None
    try:
        setup = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        setup = None
    if not isinstance(setup, dict) or not {"fingerprint", "reference"} <= setup.keys():
        raise ValueError(f"{file}: not the setup of a comparison; remove the folder or use another --out")
    return setup


def as_before(spec: StudySpec, out: Path) -> StudySpec:
    """The spec with what an earlier run was measured with in place of what is left to measurement."""
    setup = read_setup(out)
    return with_choices(spec, setup["fingerprint"] if setup else None)


def _refuse_record_alone(out: Path) -> None:
    """What strategies go on from is in the journals, which are not committed."""
    if (out / RECORD).is_file() and not (out / _TRIALS).is_file():
        raise ValueError(
            f"{out}: holds the record of a finished comparison without its journals, so nothing can be added to it; "
            "use another --out, or --tables to make its tables again"
        )


def _check_fingerprint(setup: Mapping[str, Any], subject: Subject, out: Path) -> None:
    try:
        compare(setup["fingerprint"], subject.fingerprint)
    except FingerprintMismatch as mismatch:
        what = str(mismatch).partition(". Use another")[0]
        raise FingerprintMismatch(f"{out}: {what}. Use another --out") from None
