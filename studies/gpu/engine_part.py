"""Part A of the GPU study: the engines on random weights of real shapes, so that nothing has to be trained first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from studies.gpu.runner import Job, Step
from studies.gpu.subject import Subject

_BOUNDS_S = {
    "plain": 100.0,
    "rounds": 60.0,
    "speedup": 90.0,
    "generate": 60.0,
    "compiled": 150.0,
    "profile": 40.0,
    "identity": 60.0,
    "ties": 60.0,
    "recordings": 60.0,
    "contexts": 60.0,
    "attention": 30.0,
    "auto": 60.0,
}
"""The steps in the order of what convinces most, and the most seconds of each."""
_LEFT_OUT = {"3b": ("identity", "auto"), "8b": ("identity", "ties", "recordings", "auto")}
"""What another size has shown already, or what takes long to load once more."""


class EnginePart:
    """See `runner.Part`."""

    name = "a"

    def __init__(self, size: str) -> None:
        self.size = size
        self._subject: Subject | None = None

    def steps(self) -> Sequence[Step]:
        left_out = _LEFT_OUT.get(self.size, ())
        return [Step(name, bound_s) for name, bound_s in _BOUNDS_S.items() if name not in left_out]

    def facts(self) -> dict[str, Any]:
        import torch

        from layerskip.command_line.cli import quiet_libraries
        from studies.gpu.machine import copy_bandwidth, free_memory, machine_facts, study_device

        quiet_libraries()
        device = study_device()
        if device.type == "cpu" and self.size != "tiny":
            raise RuntimeError(f"part a at size {self.size} needs a CUDA device, torch {torch.__version__} sees none")
        if device.type == "cpu":
            torch.set_num_threads(1)  # more would wait for each other longer than a tiny model computes
        new_tokens, repeats = (8, 1) if self.size == "tiny" else (64, 3)
        self._subject = Subject(self.size, device, torch.bfloat16, new_tokens, repeats)
        facts = machine_facts() | {"copy_bytes_per_s": copy_bandwidth(device)}
        free_memory()
        return facts

    def moment(self) -> dict[str, Any]:
        from studies.gpu.machine import moment

        return moment()

    def is_sound(self) -> bool:
        from studies.gpu.machine import device_is_sound

        if self._subject is not None:
            self._subject.forget()  # what a failed step has left half done
        return device_is_sound()

    def run(self, step: str, job: Job) -> None:
        from studies.gpu import inside, sameness, speed

        assert self._subject is not None, "facts() comes first"
        functions: dict[str, Callable[[Subject, Job], None]] = {
            "plain": speed.plain,
            "rounds": speed.rounds,
            "speedup": speed.speedup,
            "generate": speed.generate,
            "compiled": speed.compiled,
            "contexts": speed.contexts,
            "auto": inside.automatic,
            "attention": inside.attention,
            "profile": inside.profiles,
            "recordings": inside.recordings,
            "identity": sameness.identity,
            "ties": sameness.ties,
        }
        functions[step](self._subject, job)
