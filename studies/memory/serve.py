"""python -m studies.memory.serve: resident memory of one server that is asked for an hour in every way there is.

The real `layerskip.serve` with the demo study's best.json, in a process of its own, asked by the openai client: whole
and streamed answers, greedy and sampled, clients that leave mid-stream, and requests that must be refused; every
outcome is checked. Writes serve.json and table.md; exit code 1 if memory is not flat.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from layerskip.command_line.cli import CommandError, OneLineParser, check_folders, run_command
from studies.memory.course import FOLDER, Course, check_proc, write_course
from studies.results import say
from studies.scaling.servers import ROOT, child_environment

PROG = "studies.memory.serve"
_DEMO = ROOT / "studies" / "demo"
_NUM_SAMPLES = 60
_PATIENCE_S = 120.0
_RUBBISH_BYTES = 1 << 16


class Asker:
    """Asks a server in all ways by turns, what it asks drawn from a seed. Raises: CommandError on a wrong outcome."""

    def __init__(self, url: str, prompts: Sequence[str], seed: int) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE_S)
        self._address = url.removeprefix("http://")
        self._model = self._client.models.list().data[0].id
        self._prompts, self._draw = prompts, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._ways: Mapping[str, Callable[[], None]] = {
            "whole": self._whole,
            "streamed": self._streamed,
            "sampled": lambda: self._whole(temperature=0.8, top_p=0.9, seed=self._draw.randrange(1 << 31)),
            "sampled, streamed": lambda: self._streamed(temperature=1.1, seed=self._draw.randrange(1 << 31)),
            "stopped by a string": lambda: self._whole(stop=["\n", "return"]),
            "left mid-stream": self._leaves,
            "chat refused": self._chat,
            "unknown model refused": lambda: self._refused(404, model="nosuch"),
            "negative temperature refused": lambda: self._refused(400, temperature=-1.0),
            "too long refused": lambda: self._refused(400, prompt="def " * 5000),
            "rubbish refused": self._rubbish,
        }

    def ask(self) -> None:
        """Once in every way."""
        for name, way in self._ways.items():
            way()
            self.counts[name] += 1

    def close(self) -> None:
        """Its connections."""
        self._client.close()

    def _fields(self, more: Mapping[str, Any]) -> dict[str, Any]:
        prompt = self._draw.choice(self._prompts)
        cut = prompt[: self._draw.randrange(20, len(prompt) + 1)]
        fields = {"model": self._model, "prompt": cut, "max_tokens": self._draw.randrange(1, 65), "temperature": 0.0}
        return fields | dict(more)

    def _whole(self, **more: Any) -> None:
        answer = self._client.completions.create(**self._fields(more))
        if answer.choices[0].finish_reason not in ("stop", "length"):
            raise CommandError(f"an answer has no end: {answer}")

    def _streamed(self, **more: Any) -> None:
        with self._client.completions.create(stream=True, **self._fields(more)) as stream:
            ends = [event.choices[0].finish_reason for event in stream if event.choices]
        if ends[-1] not in ("stop", "length"):
            raise CommandError(f"a stream has no end: {ends}")

    def _leaves(self) -> None:
        with self._client.completions.create(stream=True, **self._fields({"max_tokens": 400})) as stream:
            next(iter(stream))

    def _chat(self) -> None:
        """The demo model has no chat template."""
        message = {"role": "user", "content": "hello"}
        self._refuses(400, lambda: self._client.chat.completions.create(model=self._model, messages=[message]))  # type: ignore[list-item]

    def _refused(self, status: int, **more: Any) -> None:
        self._refuses(status, lambda: self._client.completions.create(**self._fields(more)))

    def _rubbish(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=_PATIENCE_S)
        try:
            body = self._draw.randbytes(_RUBBISH_BYTES)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            _check_status(400, answer.status)
        finally:
            connection.close()

    @staticmethod
    def _refuses(status: int, ask: Callable[[], Any]) -> None:
        try:
            ask()
        except openai.APIStatusError as error:
            _check_status(status, error.status_code)
        else:
            raise CommandError(f"a request that must be refused with {status} was answered")


def _check_status(expected: int, got: int) -> None:
    if got != expected:
        raise CommandError(f"a request must be refused with {expected}, got {got}")


@contextmanager
def serving(config: Path) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a server. Raises: CommandError if it does not begin, or does not end as it should."""
    command = [sys.executable, "-m", "layerskip.serve", "--config", str(config), "--device", "cpu", "--port", "0"]
    command += ["--prefix-cache", "16"]  # full before the first sample that counts
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, "--no-access-log"],
            cwd=ROOT,
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                greeting = process.stdout.readline().split()
                if greeting:
                    yield greeting[-1], process.pid
            finally:
                process.terminate()
                process.communicate(timeout=_PATIENCE_S)
        errors.seek(0)
        said = errors.read().splitlines()
    if not greeting or process.returncode or said:
        raise CommandError(f"the server ended with code {process.returncode}: {(said or [''])[-1]}")


def watch(config: Path, prompts: Sequence[str], minutes: float, seed: int) -> tuple[Course, Counter[str]]:
    """The server's resident memory a minute after the other, at most sixty samples, and what it was asked."""
    course = Course("minutes", minutes)
    with serving(config) as (url, pid):
        asker = Asker(url, prompts, seed)
        start, passed = time.monotonic(), 0.0
        while passed < minutes:
            asker.ask()
            passed = (time.monotonic() - start) / 60
            if passed >= minutes * (len(course.at) + 1) / _NUM_SAMPLES:
                mib = course.sample(passed, pid)
                say(f"{passed:.2f} of {minutes:g} minutes, {asker.counts.total()} requests: {mib:.0f} MiB")
        asker.close()
    return course, asker.counts


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--config", type=Path, default=_DEMO / "best.json", help="of a model without a chat template")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for serve.json and table.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_proc()
    if not 0 < arguments.minutes < float("inf"):
        raise ValueError(f"--minutes: must be above 0, got {arguments.minutes}")
    if not arguments.config.is_file():
        raise ValueError(f"--config: no such file: {arguments.config}")
    check_folders(arguments, "out")
    lines = (_DEMO / "tuning.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    course, counts = watch(arguments.config.resolve(), prompts, arguments.minutes, arguments.seed)
    more = {"requests": counts.total(), "requests_by_kind": dict(counts)}
    say(write_course(arguments.out, "serve", f"python -m {PROG} --minutes {arguments.minutes:g}", course, more))
    return 0 if course.is_flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
