"""Runs the steps of a part in a process of their own, each under a time limit, and writes down what they tell.

A step that raises, hangs or ends its process costs the study that step alone: the next ones run in a new process, for
after a failed operation a CUDA device may answer nothing in the old one. This process needs no torch and no device.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from studies.gpu.book import DONE, FAILED, STOPPED, WAITING, Book

START_S = 120.0
"""Most seconds that a process may take before its first step: imports, and the device's own start."""


@dataclass(frozen=True)
class Step:
    """One measurement, and the most seconds it may take."""

    name: str
    bound_s: float


class Job:
    """What a running step is given: where its rows go, and its clock."""

    def __init__(self, connection: Connection, bound_s: float) -> None:
        self._connection = connection
        self._end = time.monotonic() + bound_s

    @property
    def left_s(self) -> float:
        """Seconds until the step is stopped; loops end before that by themselves."""
        return self._end - time.monotonic()

    def add(self, **row: object) -> None:
        """A finding; it is on disk before the step goes on for long, and stays there whatever happens to the step."""
        self._connection.send(("row", row))


class Part(Protocol):
    """A list of steps; pickled into the process that runs them."""

    name: str
    size: str

    def steps(self) -> Sequence[Step]:
        """In order. Called in the process that supervises."""
        ...

    def facts(self) -> dict[str, Any]:
        """Of the machine. Called once in each process that runs steps, before the first."""
        ...

    def moment(self) -> dict[str, Any]:
        """The state of the machine, called before and after each step."""
        ...

    def run(self, step: str, job: Job) -> None:
        """One step. Raises: whatever goes wrong."""
        ...

    def is_sound(self) -> bool:
        """Whether further steps may run in a process in which one has failed."""
        ...


def run_part(part: Part, book: Book, seconds: float) -> bool:
    """Run what the book does not say is done, within `seconds` in all; whether every step is done now."""
    deadline = time.monotonic() + seconds
    steps = part.steps()
    waiting = [step for step in steps if not book.is_done(step.name)]
    for step in waiting:
        book.plan(step.name, step.bound_s)
    while waiting and time.monotonic() < deadline:
        waiting = waiting[_Turn(part, waiting, book, deadline).run() :]
    for step in waiting:
        book.end(step.name, WAITING, error=f"not begun: the part's {seconds:g} s were over")
    return all(book.is_done(step.name) for step in steps)


class _Turn:
    """One process, from its start to its end."""

    def __init__(self, part: Part, steps: Sequence[Step], book: Book, deadline: float) -> None:
        self._steps, self._book, self._deadline = steps, book, deadline
        context = multiprocessing.get_context("spawn")  # a fork would share what the device's driver has set up
        self._ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(part, list(steps), theirs))
        self._process.start()
        theirs.close()  # or its end in the other process would not be seen as the end
        self._num_over = 0
        self._is_running = False
        self._wait(START_S)

    def run(self) -> int:
        """How many of the steps are over: done, failed or stopped."""
        try:
            while self._num_over < len(self._steps):
                if self._ours.poll(max(0.0, min(self._until, self._deadline) - time.monotonic())):
                    self._take(*self._ours.recv())
                elif self._is_running or time.monotonic() < self._deadline:
                    self._end(STOPPED, f"stopped after {time.monotonic() - self._since:.0f} s")
                    break
                else:
                    break
        except EOFError:
            self._process.join(10)
            # Between two steps it has ended by its own will.
            if self._is_running or self._num_over == 0:
                self._end(FAILED, f"its process ended with exit code {self._process.exitcode}")
        finally:
            self._process.kill()
            self._process.join()
            self._ours.close()
        return self._num_over

    def _take(self, kind: str, value: Any) -> None:
        """One message of the process."""
        name = self._steps[self._num_over].name
        if kind == "facts":
            self._book.add_worker(value)
        elif kind == "begin":
            self._is_running = True
            self._wait(self._steps[self._num_over].bound_s)
            self._book.begin(name, value)
        elif kind == "row":
            self._book.add_row(name, value)
        elif kind == "end":
            error, after = value
            self._book.note(name, after=after)
            self._end(DONE if error is None else FAILED, error)
            self._wait(START_S)
        elif kind == "broken":
            while self._num_over < len(self._steps):
                self._end(FAILED, value)

    def _wait(self, seconds: float) -> None:
        self._since = time.monotonic()
        self._until = self._since + seconds

    def _end(self, state: str, error: str | None) -> None:
        self._book.end(self._steps[self._num_over].name, state, time.monotonic() - self._since, error)
        self._num_over += 1
        self._is_running = False


def _work(part: Part, steps: Sequence[Step], connection: Connection) -> None:
    """The process that runs steps; ends after one that has broken it, and with the one that supervises it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        connection.send(("facts", part.facts()))
    except Exception:  # noqa: BLE001 (an import that fails, a device that is not there: no step could run)
        connection.send(("broken", traceback.format_exc()))
        return
    for step in steps:
        connection.send(("begin", part.moment()))
        error = None
        try:
            part.run(step.name, Job(connection, step.bound_s))
        except Exception:  # noqa: BLE001 (whatever it is, it is written down, and the next step has its turn)
            error = traceback.format_exc()
        connection.send(("end", (error, {} if error else part.moment())))
        if error is not None and not part.is_sound():
            return


def _end_with_parent() -> None:
    """A step must not go on, and keep the device busy, for a command that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
