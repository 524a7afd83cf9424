"""Publisher: puts what a study shows where people look, during a run and at its end, and never fails a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import optuna

from layerskip.config.decode_config import write_atomically
from search.context import Tools
from search.study.attributes import VERDICT
from search.study.spec import StudyPaths

_REFRESH_S = 60.0
_REFRESH_SHARE = 0.02
"""Of a run's time, at most so much goes into refreshing: with hundreds of trials a refresh takes seconds."""


class Publisher:
    """An Optuna callback that refreshes the dashboard now and then, and the one who writes all of it at the end.

    With `page=False` there are no files: of several studies in one folder, only one is the folder's.
    """

    def __init__(self, paths: StudyPaths, tools: Tools, *, page: bool) -> None:
        self._paths, self._say, self._clock, self._page = paths, tools.reporter, tools.clock, page
        self._due: float | None = None

    def __call__(self, study: optuna.Study, _trial: optuna.trial.FrozenTrial) -> None:
        """After a trial: refresh the dashboard if a minute or more has passed. Nothing is timed meanwhile."""
        now = self._clock()
        if self._due is None:
            self._due = now + _REFRESH_S
        if now < self._due:
            return
        self.attempt("no figures for the dashboard", lambda: self._push(study))
        spent = self._clock() - now
        self._due = self._clock() + max(_REFRESH_S, spent / _REFRESH_SHARE)

    def publish(self, study: optuna.Study) -> Path | None:
        """Figures and note, report.html, the files beside the study, and once it has a verdict its archive; returns the
        report's path if it was written.

        Cost: a few seconds at 200 trials. A failure of either is one line.
        """
        self.attempt("no figures for the dashboard", lambda: self._push(study))
        if not self._page:
            return None
        self.attempt(f"no {self._paths.archive.name}", lambda: self._archive(study))
        if not self.attempt("no report.html", lambda: self._write(study)):
            return None
        self.attempt("no files for the dashboard", lambda: self._attach(study))
        return self._paths.report

    def _push(self, study: optuna.Study) -> None:
        from search.reporting.dashboard_page import push_figures

        push_figures(study)

    def _write(self, study: optuna.Study) -> None:
        from search.reporting.record import read_record
        from search.reporting.render import to_html

        record = read_record(study)
        write_atomically(self._paths.report, to_html(record, self._paths.folder))

    def _archive(self, study: optuna.Study) -> None:
        from search.reporting.archive import write_archive

        if VERDICT in study.user_attrs:
            write_archive(study, self._paths.archive)

    def _attach(self, study: optuna.Study) -> None:
        from search.reporting.artifacts import attach

        attach(study, self._paths.artifacts, [self._paths.best, self._paths.report])

    def attempt(self, what: str, action: Callable[[], None]) -> bool:
        """Do something that a run can go without; True if it worked, else one line that begins with `what`."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 (a locked storage, a changed dashboard, a figure's bug: all the same)
            cause = error.__cause__ or error  # Optuna wraps what the database said
            line = next(iter(str(cause).splitlines()), "")[:200]
            self._say.warn(f"{what}: {type(cause).__name__}: {line}")
            return False
        return True
