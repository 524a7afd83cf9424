"""What lies under the speeds: recordings' seconds and memory, the kernels of a step, and which engine is chosen."""

from __future__ import annotations

import random
from dataclasses import asdict

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.benchmark.alternation import Case
from layerskip.benchmark.profiling import profile_steps
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from studies.gpu.runner import Job
from studies.gpu.speed import draft_of
from studies.gpu.subject import ENGINES, Subject

_MASKS = 300
_RESERVE_S = 3.0


def recordings(subject: Subject, job: Job) -> None:
    """Seconds and memory of recording one mask after another, as a search does."""
    num_masks = 4 if subject.is_rehearsal else _MASKS
    model, draw = subject.graph(), random.Random("masks")
    engine = model.engine
    assert isinstance(engine, CudaGraphEngine)
    free_before, seen = _free_bytes(), set[SkipMask]()
    start = (engine.pool.stats.num_captures, engine.pool.stats.capture_s)
    for number in range(1, num_masks + 1):
        before = (engine.pool.stats.num_captures, engine.pool.stats.capture_s)
        while (mask := _random_mask(model.num_layers, draw)) in seen:
            pass
        seen.add(mask)
        config = DecodeConfig(skip_mask=mask, gamma=4)
        model.generate(subject.prompt(16), config=config, max_new_tokens=8)
        if number in (1, 2, 4, 10, 30, 100, 200, num_masks) or job.left_s < _RESERVE_S:
            stats = engine.pool.stats
            job.add(
                masks=number,
                captures=stats.num_captures - start[0],
                capture_s=stats.capture_s - start[1],
                last_captures=stats.num_captures - before[0],
                last_capture_ms=1000 * (stats.capture_s - before[1]),
                evictions=stats.num_evictions,
                kept=len(engine.pool),
                kept_bytes=engine.pool.num_bytes,
                device_bytes_taken=free_before - _free_bytes(),
            )
        if job.left_s < _RESERVE_S:
            return


def profiles(subject: Subject, job: Job) -> None:
    """The costliest operations of a plain step, a draft step and a verification, on each engine."""
    prompt = subject.prompt()
    case = Case("random", prompt, prompt[:2])
    for engine in subject.some(ENGINES):
        model = subject.on(engine)
        for one in profile_steps(model, draft_of(model.num_layers, 0.5, 4), case, top=12):
            job.add(engine=engine, **asdict(one))
        del model  # before the next engine asks how much memory is free


def attention(subject: Subject, job: Job) -> None:
    """Microseconds of every kernel that may compute attention in recorded steps, and which is taken where."""
    executor = subject.graph().engine.executor
    if isinstance(executor, LeanExecutor):
        for (kernel, num_tokens, num_visible), seconds in executor.attention.times.items():
            job.add(kernel=kernel, num_tokens=num_tokens, num_visible=num_visible, us=1e6 * seconds)
    job.add(taken=executor.attention_backend)


def automatic(subject: Subject, job: Job) -> None:
    """What `engine="auto"` takes for this model here, and why."""
    model = LayerSkipModel(subject.weights(), engine="auto")
    job.add(engine=model.engine_name, reason=model.engine_reason)


def _random_mask(num_layers: int, draw: random.Random) -> SkipMask:
    """About half of the sublayers."""
    attention = [layer for layer in range(num_layers) if draw.random() < 0.5]
    mlp = [layer for layer in range(num_layers) if draw.random() < 0.5]
    return SkipMask.from_sublayers(num_layers, attention=attention, mlp=mlp)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
