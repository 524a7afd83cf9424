"""The runs: every strategy and seed as a study of its own, in turns, each finished trial in a journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import ConfigDict, TypeAdapter, ValidationError

from layerskip.command_line.cli import CommandError
from layerskip.config.strict_json import printable
from layerskip.config.validated import describe_validation_error
from search.comparison.accounting import Account, Ledger, TimedProposer
from search.comparison.hints import ModelHints
from search.comparison.journal import Journal
from search.comparison.ours import OurWay
from search.comparison.plan import ComparisonPlan
from search.context import Tools
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.rivals import STRATEGIES, Setup
from search.study.attributes import FAILURE
from search.study.leaderboard import Entry, make_standings
from search.study.space import RETIRED, SearchSpace
from search.study.spec import StudySpec
from search.study.trials import counted
from search.terminal.comparison_events import ComparisonBegins, RunAdvanced
from search.trials.objective import Objective, TrialFailed
from search.trials.proposals import ProposeOptions
from search.trials.sampler import ProposalSampler

_State = Literal["COMPLETE", "PRUNED", "FAIL"]


@dataclass(frozen=True)
class TrialRecord:
    """One finished trial of one run: all that the study needs to be built again, and what the trial cost."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    strategy: str
    seed: int
    number: int
    state: _State
    value: float | None
    params: dict[str, Any]
    user_attrs: dict[str, Any]
    steps: list[tuple[int, float]]
    """What the trial reported: (place of the prompt, ratio)."""
    proposal_s: float
    """Of proposing, one-off preparation included."""
    measure_s: float
    seconds: float
    """Of the run so far, both together."""

    def to_trial(self, space: SearchSpace) -> FrozenTrial:
        """As Optuna knew it. Raises: ValueError if it does not fit the space."""
        return create_trial(
            state=TrialState[self.state],
            value=self.value,
            params=self.params,
            distributions={name: one for name, one in _known(space).items() if name in self.params},
            user_attrs=self.user_attrs,
            intermediate_values=dict(self.steps),
        )


_TRIAL_RECORD = TypeAdapter(TrialRecord)


@dataclass
class Run:
    """The trials of one strategy with one seed, at work or read from a record."""

    seed: int
    records: list[TrialRecord]
    space: SearchSpace
    noise_sigma: float
    num_per_trial: int

    def leader(self, num_trials: int) -> Entry | None:
        """The config with the best pooled lower bound after so many trials."""
        trials = [self._seen(record) for record in self.records[:num_trials]]
        return make_standings(trials, self.space, self.noise_sigma, self.num_per_trial).leader

    def _seen(self, record: TrialRecord) -> FrozenTrial:
        """As far as standings go. Made by hand: `create_trial` checks again what was checked when the record was read,
        which takes a quarter of a minute for a large one."""
        return FrozenTrial(
            number=record.number,
            trial_id=record.number,
            state=TrialState[record.state],
            value=record.value,
            params=record.params,
            distributions=_known(self.space),
            user_attrs=record.user_attrs,
            system_attrs={},
            intermediate_values={},
            datetime_start=None,
            datetime_complete=None,
        )


@dataclass(frozen=True)
class Shared:
    """What all runs share."""

    subject: Subject
    reference: Reference
    spec: StudySpec
    tools: Tools
    out: Path
    ledger: Ledger = field(default_factory=Ledger)

    def hints(self, account: Account) -> ModelHints:
        """What rivals may ask, paid by this account."""
        return ModelHints(self.subject, self.reference, account)


class StrategyRun(Run):
    """A run at work. Follows from its records: a resume goes on as if it had never stopped."""

    def __init__(self, name: str, seed: int, shared: Shared, records: Sequence[TrialRecord]) -> None:
        reference, space = shared.reference, shared.subject.space
        super().__init__(seed, list(records), space, reference.noise_sigma, reference.num_per_trial)
        self.name, self._shared = name, shared
        self._account = Account(shared.ledger, shared.tools.clock)
        # The objective stops hopeless trials itself; see `search.study.opening`.
        self._study = optuna.create_study(direction="maximize", pruner=NopPruner())
        self._study.add_trials([record.to_trial(space) for record in self.records])
        self._ours: OurWay | None = None
        self._proposer: TimedProposer | None = None

    def advance(self, num_trials: int, total: int, journal: Journal) -> None:
        """Trials up to this number, of `total` in the end, each kept in the journal.

        Raises: KeyboardInterrupt; CommandError if they keep failing; what setting up the strategy raises.
        """
        if len(self.records) >= num_trials:
            return
        self._shared.ledger.trim()  # of what the runs before this one have left
        if self._proposer is None:
            with self._shared.tools.stop.interruptible():
                self._proposer, self._objective = self._set_up(total)
        while len(self.records) < num_trials:
            self.records.append(self._trial(self._proposer))
            journal.append(asdict(self.records[-1]))
            if self._ours is not None:
                self._ours.paid()
            if self._shared.tools.stop.received is not None:
                raise KeyboardInterrupt
            self._refuse_a_row_of_failures()

    def _set_up(self, total: int) -> tuple[TimedProposer, Objective]:
        """Proposer, sampler and objective. The one place that knows how a proposer becomes an Optuna sampler."""
        shared, info = self._shared, STRATEGIES[self.name]
        subject, tools = shared.subject, shared.tools
        if info.factory is None:
            spec = shared.spec.model_copy(update={"seed": self.seed, "trials": total})
            file = shared.out / f"{self.name}-{self.seed}.json"
            self._ours = OurWay(self._study, subject, shared.reference, spec, self._account, file)
            inner = self._ours.proposer
        else:
            options = ProposeOptions.of(shared.spec, shared.reference)
            inner = info.proposer(Setup(subject.space, shared.hints(self._account), self.seed, options))
        proposer = TimedProposer(inner, self._account, tools.stop)
        if self.records:
            # The latest proposal once more, so that one-off work is not charged a second time.
            earlier = self._study.get_trials(deepcopy=False)[:-1]
            index = counted(earlier)
            proposer.propose(earlier, index, np.random.default_rng([self.seed, index, 0]))
        sampler = ProposalSampler(subject.space, proposer, self.seed)
        self._study.sampler = sampler
        outlook = self._ours.outlook if self._ours else None
        decoder, space = subject.decoder, subject.space
        return proposer, Objective(decoder, space, shared.reference, sampler, tools.stop, tools.clock, outlook)

    def _trial(self, proposer: TimedProposer) -> TrialRecord:
        unpaid_s = 0.0
        if self._ours is not None:
            self._ours.before_trial(len(self.records))
            unpaid_s = self._ours.unpaid_s
        start = self._account.now()
        self._study.optimize(self._objective, n_trials=1, catch=(TrialFailed,))
        trial = self._study.get_trials(deepcopy=False)[-1]
        measure_s = self._account.now() - start - proposer.seconds
        proposal_s = proposer.seconds + unpaid_s
        return TrialRecord(
            strategy=self.name,
            seed=self.seed,
            number=len(self.records),
            state=cast(_State, trial.state.name),
            value=trial.value,
            params=trial.params,
            user_attrs=trial.user_attrs,
            steps=list(trial.intermediate_values.items()),
            proposal_s=proposal_s,
            measure_s=measure_s,
            seconds=(self.records[-1].seconds if self.records else 0.0) + proposal_s + measure_s,
        )

    def _refuse_a_row_of_failures(self) -> None:
        latest = self.records[-self._shared.spec.max_failures :]
        if len(latest) == self._shared.spec.max_failures and all(one.state == "FAIL" for one in latest):
            reason = latest[-1].user_attrs.get(FAILURE, "unknown")
            raise CommandError(
                f"{self.name}, seed {self.seed}: {len(latest)} trials in a row failed, the last one with {reason}"
            )


def make_runs(plan: ComparisonPlan, shared: Shared, journal: Journal) -> dict[tuple[str, int], StrategyRun]:
    """All runs, with what the journal holds of them.

    Raises: ValueError naming the file if it holds what does not fit.
    """
    stored = read_trials(journal, shared.subject.space)
    return {key: StrategyRun(*key, shared, stored.get(key, ())) for key in plan.runs}


def read_trials(journal: Journal, space: SearchSpace) -> dict[tuple[str, int], list[TrialRecord]]:
    """The journal's trials by strategy and seed, each of them a trial of this space.

    Raises: ValueError naming file and line if it holds what is none.
    """
    return trials_of(enumerate(journal.read(), start=1), journal.path, space)


def trials_of(
    lines: Iterable[tuple[int, Mapping[str, Any]]], file: Path, space: SearchSpace
) -> dict[tuple[str, int], list[TrialRecord]]:
    """The trials on these numbered lines of a file. Raises: as `read_trials`."""
    stored: dict[tuple[str, int], list[TrialRecord]] = {}
    for number, fields in lines:
        where = f"{file}: line {number}"
        try:
            record = _TRIAL_RECORD.validate_json(json.dumps(fields), strict=True)
            _check_params(record, space)
            record.to_trial(space)
        except ValidationError as error:
            raise ValueError(f"{where} is not a trial: {describe_validation_error(error)}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} does not fit the search space: {error}") from None
        records = stored.setdefault((record.strategy, record.seed), [])
        if record.number != len(records):
            raise ValueError(f"{where}: number: expected trial {len(records)}, got {record.number}")
        records.append(record)
    return stored


def _known(space: SearchSpace) -> dict[str, BaseDistribution]:
    """What trials may have, those of earlier versions among them."""
    return RETIRED | space.distributions


def _check_params(record: TrialRecord, space: SearchSpace) -> None:
    for name, value in record.params.items():
        if name not in _known(space):
            raise ValueError(f"params.{printable(name)}: is no parameter of it")
        distribution = _known(space)[name]
        try:
            if isinstance(distribution, CategoricalDistribution):
                fits = any(type(value) is type(one) and value == one for one in distribution.choices)
            else:
                fits = not isinstance(value, bool) and distribution._contains(distribution.to_internal_repr(value))
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"params.{name}: must be in {distribution}, got {printable(value)}")


def run_all(
    plan: ComparisonPlan, runs: Mapping[tuple[str, int], StrategyRun], shared: Shared, journal: Journal
) -> None:
    """All trials, run by run in turns. Raises as `StrategyRun.advance`."""
    tools = shared.tools
    total = len(plan.runs) * plan.trials
    start, done_before = tools.clock(), sum(min(len(run.records), plan.trials) for run in runs.values())
    tools.reporter.tell(ComparisonBegins(plan.strategies, len(plan.seeds), done_before, total))
    with tools.stop.deferred():
        for name, seed, num_trials in plan.turns():
            run = runs[name, seed]
            if len(run.records) >= num_trials:
                continue
            run.advance(num_trials, plan.trials, journal)
            done = sum(min(len(one.records), plan.trials) for one in runs.values())
            eta = (tools.clock() - start) / max(done - done_before, 1) * (total - done)
            leader = run.leader(num_trials)
            tools.reporter.tell(RunAdvanced(name, seed, num_trials, done, total, leader, eta))
