"""What goes wrong with a storage, each as one line that holds no password."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import optuna

from search.storages.address import redact


class StorageError(ValueError):
    """The storage cannot be reached or read."""


class StorageLost(ConnectionError):  # noqa: N818 (reads as the fact it states)
    """The storage's server went away in the middle of a run and did not come back in time."""


class StorageFull(OSError):  # noqa: N818 (see StorageLost)
    """The storage cannot be written: no space is left, or the disk refuses. What was stored before is intact."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            errno.ENOSPC, f"storage {redact(url)}: {reason}; once there is space the same command continues the study"
        )

    def __str__(self) -> str:
        return str(self.strerror)


class ConnectionLost(Exception):  # noqa: N818 (see StorageLost)
    """One call failed because the server or the way to it is gone: it can be made again, and may have taken effect.

    Never leaves `PatientStorage`. No kind of StorageInternalError, which Optuna answers by creating trials again.
    """


_FAILURES = (StorageLost, StorageFull, optuna.exceptions.StorageInternalError)


@contextmanager
def storage_failures_shown() -> Iterator[None]:
    """Around `study.optimize`: where a trial's end cannot be stored, Optuna 5.0 fails with an assertion of its own."""
    try:
        yield
    except (AssertionError, UnboundLocalError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _FAILURES):
            cause = cause.__context__
        if cause is None:
            raise
        raise cause from None


def one_line(error: BaseException, url: str) -> str:
    """The first line of an error's text, or its type's name."""
    text = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return first.replace(url, redact(url))
