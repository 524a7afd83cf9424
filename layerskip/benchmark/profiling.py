"""The operations that a plain step, a draft step and a verification spend their time in, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from layerskip.benchmark.alternation import Case
from layerskip.benchmark.steps import middle_of
from layerskip.config.decode_config import DecodeConfig
from layerskip.drafters import LayerSkipDrafter, LayerSkipSettings
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import Sampler, SamplingParams
from layerskip.rounds.verifier import verify

_TIMES = 8


@dataclass(frozen=True)
class Operation:
    """One kind of operation within a step."""

    name: str
    share: float
    """Of the step's time in operations, those called within it not counted."""
    calls: float
    """A step."""


@dataclass(frozen=True)
class StepProfile:
    """One kind of step; `operations` are the costliest, in order."""

    step: str
    clock: str
    """`cpu`, or `cuda` for the time on the device."""
    ms: float
    """Time in operations a step, under the profiler, which slows small ones down: read the shares, not this."""
    operations: tuple[Operation, ...]


def profile_steps(model: LayerSkipModel, config: DecodeConfig, case: Case, *, top: int = 8) -> list[StepProfile]:
    """Profiles in the middle of a prompt's text: a plain step; where the config speculates, a verify, and a draft step
    if it drafts by its mask: a lookup has no operations.

    Cost: some tens of steps, and a forward over the text.
    """
    engine, sampler = model.engine, Sampler(SamplingParams(), None)
    text = middle_of(case)
    gamma = config.max_gamma
    settings = LayerSkipSettings(gamma, config.draft_threshold, skip_mask=config.skip_mask)
    drafter = LayerSkipDrafter(engine, sampler, settings)
    ids = torch.tensor(text[:1] * (gamma + 1), device=engine.device)

    def verification(count: int) -> None:
        logits = engine.forward(ids[:count], num_logits=count)
        verify(ids[1:count], sampler.shape(logits, text, ids[1:count]), sampler, len(text), with_prob=False)
        engine.cache.rollback_to(len(text))

    def draft() -> None:
        drafter.draft(text, 1)
        engine.synchronize()

    steps: list[tuple[str, Callable[[], None]]] = [("plain step", lambda: verification(1))]
    if config.drafts_by_mask:
        steps.append(("draft step", draft))
    if config.speculates:
        steps.append((f"verify of {gamma + 1} tokens", lambda: verification(gamma + 1)))
    profiles = []
    with torch.inference_mode(), engine.session(len(text) + gamma + 1):
        engine.forward(torch.tensor(text, device=engine.device))
        for name, step in steps:
            profiles += _profile(name, step, top, cuda=engine.device.type == "cuda")
    return profiles


def _profile(name: str, step: Callable[[], None], top: int, *, cuda: bool) -> list[StepProfile]:
    step()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities, acc_events=True) as found:
        for _ in range(_TIMES):
            step()
    clocks = ["cpu", "cuda"] if cuda else ["cpu"]
    return [_read(name, clock, found.key_averages(), top) for clock in clocks]


def _read(name: str, clock: str, events: Iterable[Any], top: int) -> StepProfile:
    """The events of a clock, as seconds of a step.

    On the device's clock only what runs there: operations of the host bear the time of the kernels that they launch
    as well, and all would count twice.
    """
    field = "self_cpu_time_total"
    if clock == "cuda":
        field, events = "self_device_time_total", [one for one in events if one.device_type.name == "CUDA"]
    found = [(event.key, float(getattr(event, field)), event.count) for event in events]
    total = sum(us for _, us, _ in found)
    costliest = sorted(found, key=lambda event: -event[1])[:top]
    operations = tuple(Operation(key, us / total, count / _TIMES) for key, us, count in costliest if us > 0)
    return StepProfile(name, clock, total / _TIMES / 1000, operations)
