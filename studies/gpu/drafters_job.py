"""Part D of the GPU study: every way to draft on the models of part C, a layer trained on the device among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from studies.gpu.main_job import DEMO, MainJob, command, read_json
from studies.gpu.runner import Job, Step


@dataclass(frozen=True)
class _Size:
    """Arguments and time limits of the commands for one model."""

    weights: tuple[str, ...]
    search: tuple[str, ...]
    regimes: tuple[str, ...]
    trees: tuple[str, ...]
    bounds_s: dict[str, float]


SIZES = {
    "tiny": _Size(
        ("--steps", "3", "--batch", "2", "--depth", "2", "--window", "64", "--device", "cpu", "--threads", "1"),
        ("--trials", "12"),
        ("--prompts", "2", "--repeats", "1", "--tokens", "8"),
        ("--num-prompts", "2", "--new-tokens", "8", "--repeats", "1"),
        {"weights": 120, "search": 180, "regimes": 120, "trees": 120},
    ),
    "demo": _Size(
        ("--minutes", "1.5", "--device", "cuda", "--dtype", "bfloat16"),
        ("--trials", "60", "--timeout", "60"),
        ("--prompts", "8", "--repeats", "2"),
        ("--num-prompts", "12", "--device", "cuda", "--dtype", "bfloat16", "--repeats", "1"),
        {"weights": 140, "search": 180, "regimes": 150, "trees": 120},
    ),
    "1b": _Size(
        ("--minutes", "2", "--device", "cuda", "--dtype", "bfloat16", "--draft-vocab", "4096"),
        ("--trials", "60", "--timeout", "60"),
        ("--prompts", "8", "--repeats", "1"),
        ("--num-prompts", "8", "--device", "cuda", "--dtype", "bfloat16", "--repeats", "1"),
        {"weights": 190, "search": 190, "regimes": 150, "trees": 150},
    ),
}


@dataclass(frozen=True)
class DraftersJob(MainJob):
    """See `runner.Part`. Needs what part C left in `work`, but for the shipped demo model.

    The weights are trained on the sources that the model was trained on and on what it says to the tuning prompts, on
    which the search runs too: the table is of held-out prompts.
    """

    name: str = "d"

    def steps(self) -> Sequence[Step]:
        return [Step(name, bound_s) for name, bound_s in SIZES[self.size].bounds_s.items()]

    def run_step(self, step: str, job: Job) -> None:
        found = {"weights": self._weights, "search": self._search_all, "regimes": self._regimes, "trees": self._trees}
        found[step](job)

    @property
    def _weights_folder(self) -> Path:
        return self._folder / "weights"

    def _weights(self, job: Job) -> None:
        from layerskip import train
        from studies.demo import corpus

        if not (self._source / "model").is_dir():
            raise RuntimeError(f"{self._source / 'model'}: no model; run part c --size {self.size} first")
        text = self._folder / "corpus.txt"
        modules = corpus.split_modules(corpus.read_modules(*([] if self.corpus is None else [self.corpus]))).train
        text.write_text(corpus.END_OF_TEXT.join(one.text for one in modules), encoding="utf-8")
        given = ["--model", str(self._source / "model"), "--data", str(text), str(self._source / "tuning.jsonl")]
        command(train.main, [*given, "--out", str(self._weights_folder), *SIZES[self.size].weights])
        job.add(weights=read_json(self._weights_folder / "config.json")["training"])

    def _search_all(self, job: Job) -> None:
        given = ["--draft-weights", str(self._weights_folder), "--regimes", "greedy,t0.7"]
        self.search(job, (*given, *SIZES[self.size].search))

    def _regimes(self, job: Job) -> None:
        from studies import regimes

        out = self._folder / "regimes.json"
        command(regimes.main, ["--study", str(self._folder), "--out", str(out), *SIZES[self.size].regimes])
        job.add(regimes=read_json(out))

    def _trees(self, job: Job) -> None:
        """On recorded verifications where there are any."""
        from studies.engine import trees

        given = ["--model", str(self._source / "model"), "--draft-weights", str(self._weights_folder)]
        given += ["--prompts", str(self._source / "tuning.jsonl"), "--out", str(self._folder)]
        engine = "cuda_graph" if torch.cuda.is_available() else "fused"
        command(trees.main, [*given, "--engine", engine, *SIZES[self.size].trees])
        job.add(trees=read_json(self._folder / "trees.json"))

    @property
    def _folder(self) -> Path:
        return self.work / f"{self.size}-drafters"

    @property
    def _source(self) -> Path:
        return DEMO if self.size == "demo" else self.work / self.size
