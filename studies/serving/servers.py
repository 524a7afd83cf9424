"""Servers on this machine, each in a process of its own for as long as they are wanted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layerskip.command_line.cli import CommandError
from studies.serving.requests import Endpoint

OURS, PLAIN, VLLM, VLLM_NGRAMS = "ours", "ours, plain", "vLLM", "vLLM, n-grams"
_START_S = 900.0
"""vLLM compiles for a minute or two."""
_NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
_COMPILED = {"mode": 3, "backend": "inductor"}
"""vLLM's own choice where Triton knows CPUs; elsewhere it would compile nothing."""
_KEYS_BYTES = 1 << 30
_MAX_CONTEXT = 2048


@dataclass(frozen=True)
class Subject:
    """What all of them serve."""

    config: Path
    model: str
    """Hub id or folder."""
    dtype: str
    num_threads: int
    vllm: Path | None
    """The Python that vLLM is installed for."""

    def command(self, name: str, port: int, at_once: int) -> list[str]:
        """That starts this server, for up to so many requests at once. Raises: ValueError without a Python for vLLM."""
        if name in (VLLM, VLLM_NGRAMS):
            if self.vllm is None:
                raise ValueError(f"--vllm: must be the Python that vLLM is installed for, to measure {name!r}")
            return [*_vllm(self, port), *(["--speculative-config", json.dumps(_NGRAMS)] if name == VLLM_NGRAMS else [])]
        own = ["--config", str(self.config)] if name == OURS else ["--model", self.model]
        # What was asked before would be known again, as every repeat asks the same.
        own += ["--prefix-cache", "0", "--store-tokens", "0", "--no-access-log"]
        own += ["--threads", str(self.num_threads), "--max-batch-size", str(at_once), "--port", str(port)]
        return [sys.executable, "-m", "layerskip.serve", *own, "--device", "cpu", "--dtype", self.dtype]

    def environment(self, name: str) -> dict[str, str]:
        """Of its process: vLLM's as its documentation has it for a CPU."""
        if name not in (VLLM, VLLM_NGRAMS):
            return dict(os.environ)
        assert self.vllm is not None
        openmp = self.vllm.parent.parent / "lib" / "libiomp5.so"
        more = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: self.num_threads]))
        more |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")} | more


def _vllm(subject: Subject, port: int) -> list[str]:
    return [
        *(str(subject.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", subject.model),
        *("--dtype", subject.dtype, "--max-model-len", str(_MAX_CONTEXT), "--port", str(port)),
        *("--kv-cache-memory-bytes", str(_KEYS_BYTES), "--no-enable-prefix-caching"),
        *("--compilation-config", json.dumps(_COMPILED)),
    ]


@contextmanager
def running(subject: Subject, names: Sequence[str], at_once: int, logs: Path) -> Iterator[list[Endpoint]]:
    """All of these, until the end of the context; what they print goes to files in `logs`.

    Raises: CommandError where one of them ends or does not answer in time, with the last it said.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        endpoints = []
        for name in names:
            port, log = _free_port(), logs / f"{len(processes)}.log"
            command, environment = subject.command(name, port, at_once), subject.environment(name)
            with log.open("wb") as said:
                processes[name] = subprocess.Popen(
                    command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
                )
            endpoints.append(_ready(name, port, processes[name], log))
        yield endpoints
    finally:
        for process in processes.values():
            _end(process)


def _ready(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> Endpoint:
    give_up = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            return Endpoint.at(name, f"http://127.0.0.1:{port}")
        except OSError:
            time.sleep(0.5)
    said = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
    raise CommandError(f"{name}: did not start: {said[:600]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
