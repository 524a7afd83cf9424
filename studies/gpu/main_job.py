"""Part C of the GPU study: the main job (search, confirm, bench) on the demo model, or on one that is trained here."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from studies.gpu.machine import device_is_sound, free_memory, machine_facts, moment
from studies.gpu.runner import Job, Step

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "demo"
_LAST = 2_000
"""Characters of a failed command's messages that are kept."""


@dataclass(frozen=True)
class _Size:
    """Arguments and time limits of the commands for one model."""

    search: tuple[str, ...]
    bench: tuple[str, ...]
    bounds_s: dict[str, float]
    train: tuple[str, ...] = ()
    """None: the shipped demo model."""


_CUDA = ("--device", "cuda", "--dtype", "bfloat16")
SIZES = {
    "tiny": _Size(
        ("--trials", "3"),
        ("--num-prompts", "2", "--repeats", "1", "--no-compile"),
        {"train": 120, "search": 120, "bench": 120},
        ("--steps", "10", "--threads", "1", "--device", "cpu", "--dtype", "float32"),
    ),
    "demo": _Size(
        ("--trials", "200", "--timeout", "60"),
        ("--num-prompts", "8", "--repeats", "3", "--compile"),
        {"search": 130, "bench": 90},
    ),
    "1b": _Size(
        ("--trials", "200", "--timeout", "60"),
        ("--num-prompts", "6", "--repeats", "2", "--compile"),
        {"train": 310, "search": 150, "bench": 110},
        ("--seconds", "200", *_CUDA),
    ),
}


@dataclass(frozen=True)
class MainJob:
    """See `runner.Part`. The study itself stays in `work`; the book gets the records that the commands write.

    corpus: folder of Python sources to train on; None is the running interpreter's library.
    """

    size: str
    work: Path
    corpus: Path | None = None
    name: str = "c"

    def steps(self) -> Sequence[Step]:
        return [Step(name, bound_s) for name, bound_s in SIZES[self.size].bounds_s.items()]

    def facts(self) -> dict[str, Any]:
        return machine_facts()

    def moment(self) -> dict[str, Any]:
        return moment()

    def is_sound(self) -> bool:
        return device_is_sound()

    def run(self, step: str, job: Job) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self.run_step(step, job)
        finally:
            free_memory()  # what training holds would be missing in the search

    def run_step(self, step: str, job: Job) -> None:
        """In its folder, which is there."""
        {"train": self._train, "search": self._search, "bench": self._bench}[step](job)

    @property
    def _folder(self) -> Path:
        return self.work / self.size

    @property
    def _source(self) -> Path:
        """Of model and prompts."""
        return self._folder if SIZES[self.size].train else DEMO

    def _train(self, job: Job) -> None:
        from studies.demo import make_model

        given = ["--size", self.size, "--recipe", "layerskip", "--no-checkpoints", *SIZES[self.size].train]
        given += ["--work-dir", str(self._folder / "maker"), "--out", str(self._folder / "model")]
        given += [] if self.corpus is None else ["--corpus", str(self.corpus)]
        command(make_model.main, given)
        job.add(training=read_json(self._folder / "model" / "training.json"))

    def _search(self, job: Job) -> None:
        self.search(job, SIZES[self.size].search)

    def search(self, job: Job, arguments: Sequence[str]) -> None:
        """A search with these arguments besides the size's settings; its summary and config."""
        from search import run

        settings = (HERE / "settings" / f"{self.size}.toml").read_text(encoding="utf-8")
        for name, file in (("model", "model"), ("prompts", "tuning.jsonl"), ("held_out", "held_out.jsonl")):
            settings += f"{name} = {json.dumps(str(self._source / file))}\n"
        (self._folder / "study.toml").write_text(settings, encoding="utf-8")
        try:
            command(run.main, ["--study", str(self._folder), *arguments])
        finally:
            for name in ("summary", "best"):
                if (file := self._folder / f"{name}.json").is_file():
                    job.add(**{name: read_json(file)})

    def _bench(self, job: Job) -> None:
        from layerskip import bench
        from layerskip.config.decode_config import DecodeConfig
        from studies.gpu.candidate import bench_config

        config, record = self._folder / "bench-config.json", self._folder / "bench.json"
        best, summary = DecodeConfig.load(self._folder / "best.json"), read_json(self._folder / "summary.json")
        bench_config(best, summary).save(config)
        held_out = self._source / "held_out.jsonl"
        given = ["--config", str(config), "--prompts", str(held_out), "--json", str(record)]
        try:
            command(bench.main, [*given, *SIZES[self.size].bench])
        finally:
            if record.is_file():
                job.add(bench=read_json(record))


def command(main: Callable[[list[str]], int], arguments: list[str]) -> None:
    """Run one of the project's commands in this process. Raises: RuntimeError with its last messages if it fails."""
    with _kept_messages() as messages:
        code = main(arguments)
    if code:
        raise RuntimeError(f"exit code {code}: {messages.getvalue()[-_LAST:].strip()}")


class _Both(io.StringIO):
    """Keeps what it passes on."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        self._stream.flush()
        return super().write(text)


@contextmanager
def _kept_messages() -> Iterator[io.StringIO]:
    with redirect_stderr(_Both(sys.stderr)) as messages:
        yield messages


def read_json(file: Path) -> Any:
    """Of a file that a command wrote."""
    return json.loads(file.read_text(encoding="utf-8"))
