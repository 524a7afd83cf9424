"""TrialSetup: what all trials of one run are proposed and measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial

from search.context import Tools
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.outlook.outlook import Outlook
from search.study.leaderboard import Entry
from search.study.spec import StudySpec
from search.trials.objective import standings_of
from search.workers.crew import Crew


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of one run are proposed and measured with."""

    study: optuna.Study
    subject: Subject
    spec: StudySpec
    reference: Reference
    outlook: Outlook
    tools: Tools
    crew: Crew | None = None
    """The workers that share the study; None for a run by itself."""

    @property
    def trials(self) -> list[FrozenTrial]:
        """The study's trials so far."""
        return self.study.get_trials(deepcopy=False)

    def leader_of(self, trials: Sequence[FrozenTrial]) -> Entry | None:
        """The config with the best pooled lower bound."""
        return standings_of(trials, self.subject.space, self.reference).leader
