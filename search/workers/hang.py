"""The end of a process whose trial hangs where no exception reaches it: in a kernel, a driver, a lock."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import optuna
from optuna.trial import TrialState

from search.study.attributes import FAILURE

HUNG_EXIT_CODE = 124
"""As of `timeout`, the command."""


@contextmanager
def watched(trial: optuna.Trial, limit_s: float | None, grace_s: float) -> Iterator[None]:
    """If what runs in here has not ended `grace_s` after its limit, fail the trial and end the process; None = never.

    A thread marks the trial, says so on stderr and exits with code 124. Where a hanging call keeps all of Python from
    running, not even that works; then a watchdog below Python ends the process after the same grace once more, with
    exit code 1, and the trial is found and failed by the next worker.
    """
    if limit_s is None:
        yield
        return
    timer = threading.Timer(limit_s + grace_s, _end, args=(trial, limit_s))
    timer.daemon = True
    timer.start()
    # It writes where each thread is, which is what a report of a hang needs.
    faulthandler.dump_traceback_later(limit_s + 2 * grace_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end(trial: optuna.Trial, limit_s: float) -> None:
    failure = f"hung: did not end after {limit_s:g} s (--trial-timeout)"
    with suppress(Exception):  # the storage may be what hangs
        trial.set_user_attr(FAILURE, failure)
        trial.study.tell(trial.number, state=TrialState.FAIL)
    with suppress(Exception):
        sys.stderr.write(f"search.run: error: trial {trial.number} {failure}; the same command continues the study\n")
        sys.stderr.flush()
    os._exit(HUNG_EXIT_CODE)
