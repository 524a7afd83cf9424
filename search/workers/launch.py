"""Posts and Launch: which worker of this host computes where, and one process for each, looked after from here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

from layerskip.machine.host import num_cores
from search.stop import handled_by, heeded

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPU = "cpu"


@dataclass(frozen=True)
class Post:
    """The place of one worker."""

    number: int
    device: str
    cores: tuple[int, ...] | None = None
    """The processor cores it may use; None = any."""
    num_threads: int | None = None
    """Of torch; None = torch's own choice."""

    def __str__(self) -> str:
        if self.cores is None:
            return self.device
        return f"{self.device} cores {','.join(map(str, self.cores))}"


def parse_devices(text: str | None) -> tuple[str, ...]:
    """`cuda:0,cuda:1` as its parts. Raises: ValueError for an empty one."""
    if text is None:
        return ()
    devices = tuple(part.strip() for part in text.split(","))
    if not all(devices):
        raise ValueError(f"devices: must be names with commas between them, as in cuda:0,cuda:1, got {text!r}")
    return devices


def devices_for(num_workers: int | None, given: Sequence[str], device: str) -> tuple[str, ...]:
    """One device per worker: the given ones; or as many GPUs, or the one device as often, as there are workers.

    Raises: ValueError if the numbers do not agree, or there are fewer GPUs than workers.
    """
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"workers: must be at least 1, got {num_workers}")
    if given:
        if num_workers is not None and num_workers != len(given):
            raise ValueError(f"workers: must be the number of --devices, {len(given)}, got {num_workers}")
        return tuple(given)
    if num_workers is None or num_workers == 1:
        return (device,)
    from layerskip.huggingface.loading import resolve_device

    kind = resolve_device(device).type
    if kind != "cuda":
        return (kind,) * num_workers
    import torch

    num_gpus = torch.cuda.device_count()
    if num_workers > num_gpus:
        raise ValueError(f"workers: must be at most {num_gpus}, the number of GPUs here, got {num_workers}")
    return tuple(f"cuda:{i}" for i in range(num_workers))


def assign_posts(
    devices: Sequence[str], num_threads: int | None, cores: Sequence[int] | None
) -> tuple[list[Post], list[str]]:
    """A post per device, and warnings. CPU workers get disjoint cores, equally many, if there are enough.

    cores: those this process may use; None where the system does not tell.
    """
    warnings = [
        f"{count} workers on {device}: they disturb each other's timings"
        for device, count in Counter(devices).items()
        if count > 1 and device != _CPU
    ]
    num_cpu = sum(device == _CPU for device in devices)
    if num_cpu < 2:
        return [Post(i, device, None, num_threads) for i, device in enumerate(devices)], warnings
    available = sorted(cores) if cores is not None else list(range(num_cores()))
    each = num_threads or max(1, len(available) // num_cpu)
    is_enough = cores is not None and each * num_cpu <= len(available)
    if not is_enough:
        text = "their cores cannot be told apart here" if cores is None else f"there are {len(available)} cores"
        warnings.append(f"{num_cpu} CPU workers of {each} threads, but {text}: they disturb each other's timings")
    posts, place = [], 0
    for i, device in enumerate(devices):
        if device != _CPU:
            posts.append(Post(i, device, None, num_threads))
            continue
        own = tuple(available[place : place + each]) if is_enough else None
        posts.append(Post(i, device, own, each))
        place += each
    return posts, warnings


class Launch:
    """Starts a command once per post and shows what each says: `[1] ` before a line, `worker` in a JSON event."""

    def __init__(self, posts: Sequence[Post], command: Sequence[str], *, json_lines: bool, quiet: bool) -> None:
        self._posts, self._command = posts, list(command)
        self._json_lines, self._quiet = json_lines, quiet
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[str]] = []
        self._is_pipe_broken = False

    def run(self) -> int:
        """Wait for all; the worst exit code. Signals go to every worker, which end as each would alone.

        A worker that dies is told, and the others go on: what it left is queued again by them.
        """
        with handled_by(self._pass_on, heeded()):
            for post in self._posts:
                self._children.append(self._start(post))
            threads = [
                threading.Thread(target=target, args=(post, child), daemon=True)
                for post, child in zip(self._posts, self._children, strict=True)
                for target in (self._show_output, self._show_errors)
            ]
            for thread in threads:
                thread.start()
            codes = [_wait(child) for child in self._children]
            for thread in threads:
                thread.join()
        if self._is_pipe_broken:
            raise BrokenPipeError
        return max(codes)

    def _start(self, post: Post) -> subprocess.Popen[str]:
        """In a process group of its own, or a Ctrl-C would reach it twice: from the terminal and from here.

        Cores and threads have to be told before torch starts, so the child inherits both.
        """
        flags = ["--device", post.device]
        environment = dict(os.environ)
        if post.num_threads is not None:
            flags += ["--threads", str(post.num_threads)]
            environment |= dict.fromkeys(_THREADS, str(post.num_threads))
        with _on_cores(post.cores):
            return subprocess.Popen(
                [*self._command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
                process_group=0,
            )

    def _show_output(self, post: Post, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._write(sys.stdout, self._marked(post, line))
        code = _wait(child)
        if code:
            others = "; the others go on" if any(one.poll() is None for one in self._children) else ""
            self._write(sys.stderr, f"worker {post.number} ({post}) ended with exit code {code}{others}\n")

    def _show_errors(self, post: Post, child: subprocess.Popen[str]) -> None:
        assert child.stderr is not None
        for line in child.stderr:
            self._write(sys.stderr, f"[{post.number}] {line}")

    def _marked(self, post: Post, line: str) -> str:
        if self._quiet:
            return line
        if not self._json_lines:
            return f"[{post.number}] {line}"
        try:
            event = json.loads(line)
        except ValueError:
            event = {"event": "note", "phase": None, "text": line.rstrip("\n")}
        return json.dumps({"event": event.pop("event", None), "worker": post.number} | event) + "\n"

    def _write(self, stream: IO[str], text: str) -> None:
        with self._lock:
            try:
                stream.write(text)
                stream.flush()
            except OSError:  # whoever read it is gone, and nobody is left to search for
                if stream is sys.stdout and not self._is_pipe_broken:
                    self._is_pipe_broken = True
                    self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                child.send_signal(number)


@contextmanager
def _on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """Run on these cores in here: a child keeps what it was started with."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait(child: subprocess.Popen[str]) -> int:
    """Its exit code by the shell's convention."""
    code = child.wait()
    return 128 - code if code < 0 else code
