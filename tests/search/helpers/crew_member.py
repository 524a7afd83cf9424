"""A worker of a search on fakes in a process of its own, quick to start and safe to kill."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from layerskip import DecodeConfig
from search.reporting.publish import Publisher
from search.study.config_words import describe
from search.workers.heartbeats import Patience
from tests.search.helpers.fakes import Bench

TIMELINE = "timeline"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.search.helpers.crew_member", "search.rivals", "optuna.storages"])


@dataclass(frozen=True)
class Order:
    """What a worker is to do."""

    folder: Path
    storage: str
    study_name: str = "s"
    trials: int = 12
    sampler: str = "tpe"
    log: str = "worker.log"
    pause_s: float = 0.0
    """Real seconds that a decoding takes."""
    patience: Patience = field(default_factory=lambda: Patience(poll_s=0.02))
    spec: dict[str, Any] = field(default_factory=dict)


def work(order: Order) -> None:
    """One run; its lines go to the log."""
    Publisher.__call__ = lambda *_arguments: None  # type: ignore[method-assign]
    Publisher.publish = lambda *_arguments: None  # type: ignore[method-assign,assign,return-value]
    with (order.folder / order.log).open("a", encoding="utf-8", buffering=1) as log, redirect_stderr(log):
        bench = Bench(order.folder, output=log, patience=order.patience)  # type: ignore[arg-type]
        bench.decoder.break_on = lambda config: take_part(order, config)
        with bench.stop.installed():
            try:
                code = bench.run(
                    storage=order.storage,
                    study_name=order.study_name,
                    trials=order.trials,
                    sampler=order.sampler,
                    **order.spec,
                )
            except KeyboardInterrupt:
                code = bench.stop.exit_code
            except Exception:
                traceback.print_exc()  # here: outside the log is closed
                raise
    sys.exit(code)


def take_part(order: Order, config: DecodeConfig) -> None:
    """Note down what is decoded and by whom, in the order of time, and take some time over it."""
    if config.skip_mask.num_skipped:  # not plain, and not the warming up of somebody who joins
        with (order.folder / TIMELINE).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {describe(config)}\n")
    time.sleep(order.pause_s)


def start(order: Order) -> ForkServerProcess:
    """A new worker."""
    process = CONTEXT.Process(target=work, args=(order,), daemon=True)
    process.start()
    return process
