"""Counts what the fuzz tests refused and accepted, and says it at the end."""

from __future__ import annotations

from collections import Counter

import pytest

TALLY = pytest.StashKey[Counter[tuple[str, str]]]()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Counter[tuple[str, str]]:
    """Inputs by (parser, refused or accepted)."""
    return pytestconfig.stash.setdefault(TALLY, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Without this a run that refused next to nothing would look like a thorough one."""
    counts = config.stash.get(TALLY, Counter())
    for parser in sorted({name for name, _ in counts}):
        refused, accepted = counts[parser, "refused"], counts[parser, "accepted"]
        terminalreporter.write_line(f"fuzz: {parser}: {refused} inputs refused, {accepted} accepted and read back")
