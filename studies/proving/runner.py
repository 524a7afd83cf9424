"""One run of one strategy on one table at one machine's prices, by the search's own code, and what came of it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import NopPruner
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.confirm.passes import ConfirmOptions, HeldOutPrompts
from search.confirm.stage import confirm, shortlist
from search.context import Tools
from search.measure.reference import Reference, ReferenceOptions, make_reference
from search.measure.subject import Subject
from search.outlook.forecast import Candidates
from search.outlook.opening import OutlookOpening
from search.outlook.outlook import OutlookOptions
from search.predict.costs import CostModel
from search.predict.predictor import Predictor
from search.rivals import STRATEGIES, Setup
from search.rivals.common import Plan, mean_confidences
from search.rivals.hidden_states import PLANS, StoredPlans
from search.rivals.registry import OURS
from search.stop import StopSignal
from search.study.attributes import CANNOT_WIN
from search.study.fingerprint import Fingerprint
from search.study.leaderboard import Standings
from search.study.opening import quiet_optuna
from search.study.prompts import EncodedPrompt, encoded_fingerprint
from search.study.spec import StudySpec
from search.terminal.reporter import Reporter
from search.trials.objective import Objective, TrialFailed, standings_of
from search.trials.phase import TrialPhase, TrialSetup
from search.trials.proposals import ProposeOptions
from search.trials.sampler import ProposalSampler
from studies.proving.ablations import left_out
from studies.proving.costs import COSTS, CostTable, Prices
from studies.proving.table import Table
from studies.proving.tabular import Noise, SimulatedMachine, TabularDecoder, TabularForcing

Note = Callable[[], None]
PROMPTS_PER_TRIAL = 5
"""As the demo's search has it."""


@dataclass(frozen=True)
class Case:
    """What one run is of."""

    model: str
    table: Table
    costs: CostTable
    strategy: str
    """`ours`, a part of it left out as in `ours:no_shapes` (see `ablations`), or a rival."""
    seed: int
    trials: int
    noise: Noise

    @property
    def prices(self) -> Prices:
        """The machine's true ones for this model."""
        return self.costs.prices(self.model, self.table.space.num_layers)


@dataclass(frozen=True)
class RunResult:
    """What a run would have its user decode with."""

    leaders: Mapping[int, DecodeConfig]
    """After so many trials: the leader if it is faster than plain decoding as measured, else plain decoding."""
    exported: DecodeConfig
    """After all trials and the confirm stage."""
    cannot_win: bool
    """Whether the search ended early, because nothing was predicted or seen to win."""
    num_trials: int


def run_case(case: Case, checkpoints: Iterable[int]) -> RunResult:
    """Reference, trials, confirm stage: everything but the decoder and the clock is the search's own.

    Deterministic. Cost: see the README; what does not depend on the seed is worked out once for all runs of a process.
    """
    quiet_optuna()
    run = _Run.begin(case)
    leaders: dict[int, DecodeConfig] = {}
    wanted = sorted(checkpoints)

    def note() -> None:
        if (count := len(run.study.get_trials(deepcopy=False))) in wanted:
            leaders[count] = run.leader()

    name, _, part = case.strategy.partition(":")
    with left_out(part):
        if name == OURS:
            run.by_ours(note)
        else:
            run.by_rival(sorted({*wanted, case.trials}), note)
        for count in wanted:
            leaders.setdefault(count, run.leader())
        exported = run.exported()
    trials = run.study.get_trials(deepcopy=False)
    return RunResult(leaders, exported, run.study.user_attrs.get(CANNOT_WIN) is not None, len(trials))


class _InPlace(InMemoryStorage):
    """Sets what a running trial is given, of which Optuna's own copies all at each of some fifty times a trial. One
    thread has it, a running trial is kept by nobody, and a finished one is changed by nobody."""

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,  # noqa: ARG002 (as Optuna has it)
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        return super().get_all_trials(study_id, deepcopy=False, states=states)

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        trial = self.get_trial(trial_id)
        trial.params[param_name] = distribution.to_external_repr(param_value_internal)
        trial.distributions[param_name] = distribution

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.get_trial(trial_id).user_attrs[key] = value

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self.get_trial(trial_id).intermediate_values[step] = intermediate_value


@dataclass(frozen=True)
class _Run:
    """A run with what it is measured with."""

    case: Case
    study: optuna.Study
    subject: Subject
    spec: StudySpec
    reference: Reference
    tools: Tools

    @classmethod
    def begin(cls, case: Case) -> _Run:
        label = zlib.crc32(f"{case.model} {case.costs.name}".encode())  # strategies share their luck: they are compared
        machine = SimulatedMachine(case.prices, case.noise, np.random.default_rng([case.seed, label]))
        subject, spec = _subject(case, TabularDecoder(case.table, machine)), _spec(case)
        options = ReferenceOptions(subject.space.num_layers, case.seed, spec.trial_seconds, spec.prompts_per_trial)
        reference = make_reference(subject.decoder, subject.tuning, options)
        study = optuna.create_study(storage=_InPlace(), direction="maximize", pruner=NopPruner())
        tools = Tools(Reporter(io.StringIO()), StopSignal(), "python -m studies.proving", machine)
        return cls(case, study, subject, spec, reference, tools)

    def by_ours(self, note: Note) -> None:
        """All trials."""
        outlook = OutlookOpening(
            self.study,
            self.subject.decoder,
            self.subject.space,
            self.reference,
            self.subject.fingerprint,
            OutlookOptions.of(self.spec, self.reference),
            prompts=self.subject.tuning,
            clock=self.tools.clock,
        ).outlook()
        setup = TrialSetup(self.study, self.subject, self.spec, self.reference, outlook, self.tools)
        broken = TrialPhase(setup).run([lambda *_: note()])
        if broken is not None:
            raise RuntimeError(f"{self.case.model}: the search broke off: {broken}")

    def by_rival(self, stops: Sequence[int], note: Note) -> None:
        """All trials, as `search.comparison.runs` sets a rival up; `note` is called after so many."""
        subject, case, tools = self.subject, self.case, self.tools
        options = ProposeOptions.of(self.spec, self.reference)
        hints = TabularHints.of(case.table, case.costs, case.model)
        rival = STRATEGIES[case.strategy].proposer(Setup(subject.space, hints, case.seed, options))
        sampler = ProposalSampler(subject.space, rival, case.seed)
        self.study.sampler = sampler
        objective = Objective(subject.decoder, subject.space, self.reference, sampler, tools.stop, tools.clock)
        for before, stop in pairwise((0, *stops)):  # not as a callback, for which Optuna copies every trial
            self.study.optimize(objective, n_trials=stop - before, catch=(TrialFailed,))
            note()

    def leader(self) -> DecodeConfig:
        leader = self._standings().leader
        if leader is None or leader.speedup <= 1.0:
            return DecodeConfig.plain(self.subject.space.num_layers)
        return leader.config

    def exported(self) -> DecodeConfig:
        subject, spec, num_layers = self.subject, self.spec, self.subject.space.num_layers
        options = ConfirmOptions(num_layers, spec.confirm_repeats, spec.seed)
        entries = shortlist(self._standings(), spec.num_confirm_candidates)
        return confirm(subject.decoder, HeldOutPrompts(subject.held_out), entries, options).config.bare()

    def _standings(self) -> Standings:
        return standings_of(self.study.get_trials(deepcopy=False), self.subject.space, self.reference)


@dataclass(frozen=True)
class TabularHints:
    """See `search.rivals.common.Hints`: true prices, readings of the tuning texts, and stored plans.

    None of it depends on a seed, so all runs of a process share it, see `of`.
    """

    table: Table
    cost: CostModel
    """Without noise, which flatters a rival that asks."""
    _agreements: dict[SkipMask, float] = field(init=False, repr=False, default_factory=dict)
    _settings: dict[SkipMask, DecodeConfig] = field(init=False, repr=False, default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=len(COSTS))
    def of(table: Table, costs: CostTable, model: str) -> TabularHints:
        """A model's on this machine."""
        return TabularHints(table, costs.prices(model, table.space.num_layers).terms)

    def agreement(self, mask: SkipMask) -> float:
        """Share of positions with the target's token."""
        if mask not in self._agreements:
            accepted = self.table.reading(mask, range(self.table.num_tuning)).accepted[0]
            self._agreements[mask] = float(accepted[:, :-1].mean())
        return self._agreements[mask]

    def confidences(self, mask: SkipMask) -> tuple[float, float]:
        """Where the draft is right, and where it is wrong."""
        return mean_confidences(self._forcing.read(mask), self._forcing.lengths)

    def best_setting(self, mask: SkipMask) -> DecodeConfig:
        """By the search's own predictor."""
        if mask not in self._settings:
            self._settings[mask] = self.table.space.to_config(self._candidates.of(mask).params)
        return self._settings[mask]

    def layer_plan(self) -> Plan:
        """Raises: ValueError where the table keeps none."""
        return self._plans.layer_plan()

    def sublayer_plan(self, attention: int, mlp: int) -> Plan:
        """Raises: ValueError where the table keeps none."""
        return self._plans.sublayer_plan(attention, mlp)

    @property
    def _plans(self) -> StoredPlans:
        return StoredPlans(self.table.facts.get(PLANS))

    @cached_property
    def _forcing(self) -> TabularForcing:
        return TabularForcing(self.table, range(self.table.num_tuning))

    @cached_property
    def _candidates(self) -> Candidates:
        rows, space = self.table.rows(range(self.table.num_tuning)), self.table.space
        return Candidates(Predictor(self._forcing, rows, self.cost, space.gamma_max), space)


def _spec(case: Case) -> StudySpec:
    space = case.table.space
    return StudySpec(
        model=case.model,
        prompts="table",
        trials=case.trials,
        seed=case.seed,
        drafters=("layer_skip",),
        granularity="layer" if space.layer_bits else "sublayer",
        gamma_max=space.gamma_max,
        max_new_tokens=case.table.target_levels.shape[1],
        prompts_per_trial=PROMPTS_PER_TRIAL,
    )


def _subject(case: Case, decoder: TabularDecoder) -> Subject:
    table, unknown = case.table, "-"
    parts = [range(table.num_tuning), range(table.num_tuning, table.reporting.start)]
    tuning, confirming = (tuple(_prompt(table, place) for place in part) for part in parts)
    prints = encoded_fingerprint(tuning), encoded_fingerprint(confirming)
    fingerprint = Fingerprint(
        weights=case.model,
        model_class="Table",
        device=case.costs.name,
        dtype="float32",
        engine="table",
        num_threads=1,
        cpu=unknown,
        torch=unknown,
        transformers=unknown,
        layerskip=unknown,
        tuning_prompts=prints[0],
        held_out_prompts=prints[1],
        max_new_tokens=table.target_levels.shape[1],
        gamma_max=table.space.gamma_max,
        granularity=_spec(case).granularity,
    )
    return Subject(decoder, table.space, tuning, confirming, fingerprint, case.model)


def _prompt(table: Table, place: int) -> EncodedPrompt:
    """Not as plain text: a beginning of it is no text of the table."""
    return EncodedPrompt(f"text{place}", None, tuple(table.prompts[place].tolist()))
