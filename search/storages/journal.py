"""Journal file: one line per operation, and a last line torn by a crash or a full disk is cut off, never added to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.study import StudyDirection

from search.storages.address import JOURNAL
from search.storages.errors import StorageFull

_BLOCK = 1 << 16
_ATTEMPTS = 100
"""To create a study; one fails where another process deletes the study between two system calls of this one."""


def open_journal(url: str) -> JournalStorage:
    """The storage in a journal file, made if there is none."""
    return _JournalStorage(_Journal(url))


class _JournalStorage(JournalStorage):
    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        """Optuna writes the study down, then reads it back, and breaks an assertion where another has deleted it."""
        for _ in range(_ATTEMPTS):
            with suppress(AssertionError):
                return super().create_new_study(directions, study_name)
        return super().create_new_study(directions, study_name)


class _Journal(JournalFileBackend):
    def __init__(self, url: str) -> None:
        path = url.removeprefix(JOURNAL)
        super().__init__(path, _MendingLock(JournalFileSymlinkLock(path), Path(path)))
        self._url = url

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            super().append_logs(logs)
        except OSError as error:
            raise StorageFull(self._url, f"cannot be written: {error.strerror}") from error


class _MendingLock(BaseJournalFileLock):
    """Whoever gets the lock finds whole lines only.

    A writer that dies, or finds the disk full, leaves part of a line. Nobody was told that it is stored, and readers
    pass over it; but a line added to it would be one that nobody can read, nor anything after it.
    """

    def __init__(self, lock: BaseJournalFileLock, path: Path) -> None:
        self._lock, self._path = lock, path

    def acquire(self) -> bool:
        """See the class."""
        got = self._lock.acquire()
        try:
            self._mend()
        except BaseException:
            self._lock.release()
            raise
        return got

    def release(self) -> None:
        """See the class."""
        self._lock.release()

    def _mend(self) -> None:
        with self._path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            whole = end
            while whole:
                start = max(0, whole - _BLOCK)
                file.seek(start)
                newline = file.read(whole - start).rfind(b"\n")
                whole = start + newline + 1
                if newline >= 0:
                    break
            if whole < end:
                file.truncate(whole)
