"""What every command line here shares: one-line errors with exit code 2, quiet libraries, clean interruption."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn


class CommandError(Exception):
    """Bad input; the message is the one line that the user sees."""


class OneLineParser(argparse.ArgumentParser):
    """argparse, with its errors in one line on stderr and exit code 2; an epilog keeps its line breaks."""

    def __init__(self, **arguments: Any) -> None:
        keeps_lines = "epilog" in arguments
        arguments.setdefault(
            "formatter_class", argparse.RawDescriptionHelpFormatter if keeps_lines else _DefaultsFormatter
        )
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class _DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something; "None" and "False" do not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command and turn what a user can cause into one line on stderr and an exit code.

    2 for bad input (ValueError, OSError, CommandError), 130 for Ctrl-C, 141 for a closed pipe.
    """
    quiet_torchao()
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output is gone; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, CommandError) as error:
        print_error(name, error)
        return 2
    except KeyboardInterrupt:
        print_error(name, "interrupted")
        return 130


def split_list(text: str) -> tuple[str, ...]:
    """The items of a flag's list, separated by commas; empty ones are left out."""
    return tuple(one.strip() for one in text.split(",") if one.strip())


def check_least(arguments: argparse.Namespace, **least: int) -> None:
    """Raises: ValueError naming the first of these flags whose value, or a value of its list, lies below its least.

    A flag that was not given has the value None and is in order.
    """
    for name, bound in least.items():
        given = getattr(arguments, name)
        values = given if isinstance(given, list) else [] if given is None else [given]
        if values and (value := min(values)) < bound:
            raise ValueError(f"--{name.replace('_', '-')}: must be at least {bound}, got {value}")


def check_folders(arguments: argparse.Namespace, *names: str) -> None:
    """Raises: ValueError naming the first of these flags whose value is no folder that exists."""
    for name in names:
        if not getattr(arguments, name).is_dir():
            raise ValueError(f"--{name}: no such folder: {getattr(arguments, name)}")


def print_error(name: str, error: object) -> None:
    """One line on stderr."""
    with suppress(OSError):  # of a terminal that was closed
        sys.stderr.write(f"{name}: error: {' '.join(str(error).split())}\n")


class _OnStderr(logging.Handler):
    """Writes to what `sys.stderr` is at each line: a live view takes its place for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 (what cannot be told must not end a run; the base class shows why)
            self.handleError(record)


def quiet_torchao() -> None:
    """No word of what torchao has for other devices, nor torch's advice to authors: Transformers loads it unasked."""
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)


def plain_warnings() -> None:
    """Our own warnings as plain lines."""
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s", handlers=[_OnStderr()])


def quiet_libraries() -> None:
    """No progress bars or advice from the libraries underneath; our own warnings as plain lines."""
    plain_warnings()
    from transformers.utils import logging as transformers_logging

    # The hub client repeats every failed attempt; the error that ends them says it once.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # what is offloaded we say ourselves
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
