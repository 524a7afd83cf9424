"""Shared by all tests: one thread, quiet libraries, reproducible examples, and the repository on the import path."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Of numpy's products, as of torch's below: read when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks as it defines a kernel, its own ones among them
import transformers
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).resolve().parents[1]))

# Tests end children by signals, which those would inherit as ignored: under nohup, or in a shell's background.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Tiny models lose more to thread barriers than they gain, and the machine has other work.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# No test cuts the power, which alone would lose what is written and not synced; thousands of syncs take minutes.
os.fsync = lambda _file: None

# Examples derived from the test alone: the same run everywhere. A busy machine must not fail a test by its clock.
settings.register_profile("reproducible", deadline=None, derandomize=True)
# Of every kind; so that of each parser's kinds together more than ten thousand are malformed (the tests say how many).
settings.register_profile("fuzz", deadline=None, max_examples=6_000, suppress_health_check=list(HealthCheck))
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-cases", action="store_true", help="of every parametrised test run the first case alone")


@pytest.hookimpl(trylast=True)  # after the markers have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, or one process waits minutes for the other's last file. With `--first-cases` each test runs
    once: enough to see whether a library has what is called of it."""
    items.sort(key=lambda item: not {"studies", "browser"} & set(item.path.parts[len(config.rootpath.parts) :]))
    if not config.getoption("--first-cases"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with exit code 2 and one line on stderr; returns that line."""

    def run(command: Callable[..., int], *arguments: object) -> str:
        try:
            code = command(*arguments)
        except SystemExit as ended:  # as argparse ends
            code = int(ended.code or 0)
        error = capsys.readouterr().err
        assert (code, error.count("\n")) == (2, 1), error
        return error

    return run


@pytest.fixture(scope="session", autouse=True)
def _temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What makes a temporary folder of its own and leaves it makes it where pytest cleans up."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture(autouse=True)
def _ordinary_mode() -> Iterator[None]:
    """Inference mode belongs to the thread: what one test leaves half-way inside it must not change the next."""
    with torch.inference_mode(mode=False):
        yield
