"""Launch: one process per post on this host, their words in one view, their signals and ends looked after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from search.stop import SIGNALS
from search.workers.posts import Post

_BROKEN_PIPE = 141
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


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
        with self._passing_signals():
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

    def _pass_on(self, number: int) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                child.send_signal(number)

    @contextmanager
    def _passing_signals(self) -> Iterator[None]:
        def pass_on(number: int, _frame: FrameType | None) -> None:
            self._pass_on(number)

        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, pass_on) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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
