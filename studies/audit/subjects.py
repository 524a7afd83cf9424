"""Models under audit: one tiny random model for each architecture and dtype, on each engine, with its references."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from layerskip import DecodeStats, LayerSkipModel, TextStore
from layerskip.analysis.identity import IdentityReport, check_identity
from layerskip.engines.recording.graph_pool import RerunRecorder
from studies.audit.cases import LEAN, LONGEST, MODULES, Case
from tests.layerskip import zoo
from tests.layerskip.tape import on_graphs

_MAX_GRAPHS = 16
"""A recording is of one mask, and masks hardly ever come twice here: keeping more would take memory for nothing."""


@dataclass(frozen=True)
class Outcome:
    """What one case gave."""

    ids: list[int]
    expected: list[int]
    report: IdentityReport | None = None
    stats: DecodeStats | None = None
    error: str | None = None
    """The exception, where there was one."""

    @property
    def verdict(self) -> str:
        """`identical`, `tie` or `failure`."""
        if self.report is None or not self.report.lossless:
            return "failure"
        return "identical" if self.report.identical else "tie"


class Subjects:
    """Every model and reference is made once, when a case first asks for it."""

    def run(self, case: Case) -> Outcome:
        """Decode the case and compare. Cost: a generation; one more for the first case of a prompt."""
        expected = self.reference(case)
        try:
            model = self.model(case.architecture, case.engine, case.dtype)
            out = model.generate(
                case.prompt,
                max_new_tokens=case.budget,
                eos_token_id=case.eos,
                config=case.config,
                text_store=self._store(case) if case.has_store else None,
            )
        except Exception as error:  # noqa: BLE001 (a campaign goes on; each is a failure of its case)
            return Outcome([], expected, error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return Outcome(out.ids, expected, check_identity(model, case.prompt, out.ids, expected), out.stats)

    def _store(self, case: Case) -> TextStore:
        """One earlier text: the one to come, with every fifth token another one."""
        text = list(self._continuation(case.architecture, case.dtype, case.prompt))
        text[4::5] = [(token + 1) % zoo.VOCAB for token in text[4::5]]
        store = TextStore(len(case.prompt) + len(text))
        store.add([*case.prompt, *text])
        return store

    def reference(self, case: Case) -> list[int]:
        """Hugging Face's own greedy output: the longest one, cut where budget or end of text would end it."""
        ids = list(self._continuation(case.architecture, case.dtype, case.prompt)[: case.budget])
        ends = [i for i, token in enumerate(ids) if token in case.eos]
        return ids[: ends[0] + 1] if ends else ids

    @functools.cache  # noqa: B019 (lives as long as the campaign)
    def model(self, architecture: str, engine: str, dtype: str) -> LayerSkipModel:
        """On an engine of its own."""
        hf = self._hugging_face(architecture, dtype)
        if engine in (LEAN, MODULES):
            model = LayerSkipModel(hf, engine="eager")
            return on_graphs(model, RerunRecorder(), lean=engine == LEAN, max_graphs=_MAX_GRAPHS, granule=64)
        return LayerSkipModel(hf, engine=engine)

    @functools.cache  # noqa: B019
    def _hugging_face(self, architecture: str, dtype: str) -> Any:
        return zoo.build(architecture).to(getattr(torch, dtype))

    @functools.cache  # noqa: B019
    def _continuation(self, architecture: str, dtype: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
        hf = self._hugging_face(architecture, dtype)
        out = hf.generate(torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False)
        return tuple(out[0, len(prompt) :].tolist())
