"""Ours: the study's own way to propose, set up for one run as `search.run` sets it up, and kept for a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna

from layerskip.config.decode_config import write_atomically
from search.comparison.accounting import Account, SharedDecoder
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.outlook.opening import OutlookOpening
from search.outlook.outlook import RECHECK_EVERY, Outlook, OutlookOptions
from search.study.spec import StudySpec
from search.trials.proposals import ProposeOptions, Proposer
from search.trials.replay_proposer import ReplayProposer


class OurWay:
    """Predictions of one run: made before its first trial, stored in a file, their costs measured again on the way."""

    def __init__(
        self, study: optuna.Study, subject: Subject, reference: Reference, spec: StudySpec, account: Account, file: Path
    ) -> None:
        """`spec` holds the run's seed and number of trials. Cost: see `OutlookOpening.outlook`. Raises: as that;
        ValueError naming the file if it cannot be read."""
        self._study, self._account, self._file = study, account, file
        self.unpaid_s = 0.0
        """Seconds of preparation that no trial's record holds yet."""
        stored = _read(file)
        for name, value in stored.get("attributes", {}).items():
            study.set_user_attr(name, value)
        start = account.now()
        self.outlook: Outlook = OutlookOpening(
            study,
            SharedDecoder(subject.decoder, account),
            subject.space,
            reference,
            subject.fingerprint,
            OutlookOptions.of(spec, reference),
            prompts=subject.tuning,
            clock=account.now,
        ).outlook()
        self.unpaid_s = stored.get("unpaid_s", account.now() - start)
        self._save()
        self.proposer: Proposer = ReplayProposer.of(self.outlook, ProposeOptions.of(spec, reference))

    def before_trial(self, num_done: int) -> None:
        """Measure the costs again wherever `search.run` does."""
        while len(self.outlook.costs) < 1 + num_done // RECHECK_EVERY:
            start = self._account.now()
            self.outlook.recheck(self._study)
            self.unpaid_s += self._account.now() - start
            self._save()

    def paid(self) -> None:
        """What was unpaid is in a trial's record now."""
        if self.unpaid_s:
            self.unpaid_s = 0.0
            self._save()

    def _save(self) -> None:
        data = {"unpaid_s": self.unpaid_s, "attributes": self._study.user_attrs}
        write_atomically(self._file, json.dumps(data) + "\n")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(data, dict) and isinstance(data.get("attributes"), dict):
            return data
    except ValueError:
        pass
    raise ValueError(f"{file}: not what a comparison stored; remove it to have it made again")
