"""Seconds: plain decoding on every engine and by Hugging Face, rounds by what they keep, and what speculation gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.benchmark.memory import step_bytes
from layerskip.benchmark.names import FREE_RUNNING, HF_COMPILED, HF_GENERATE, PLAIN, SPECULATIVE
from layerskip.benchmark.run import Plan, run_benchmark
from layerskip.benchmark.ways import FreeRunningWay, OwnWay, Sample, Way
from layerskip.decoding.loop import DecodeLoop, DecodeRequest
from layerskip.decoding.stats import DecodeStats
from layerskip.machine.watch import MachineWatch
from layerskip.rounds.sampling import Sampler, SamplingParams
from studies.gpu.runner import Job
from studies.gpu.subject import ENGINES, Subject

GAMMAS = (1, 2, 4, 6, 8)
KEPT_SHARES = (0.125, 0.25, 0.5, 0.75)
DAMPINGS = (0.4, 0.1, 1.0)
"""Of the late layers: accepted some five times in six, nearly always, and seldom. The largest size has the first alone,
for each takes a model of its own."""
CONTEXTS = (128, 512, 2048, 4096, 8000)
_RESERVE_S = 5.0
"""Loops begin nothing new with less time than this left."""


def plain(subject: Subject, job: Job) -> None:
    """Plain decoding on each engine, token by token and free-running: milliseconds a token, bytes that a step reads."""
    subject.weights()
    for engine in ENGINES:
        before, start = _allocated_bytes(), time.perf_counter()
        model = subject.on(engine)
        load_s, watch = time.perf_counter() - start, MachineWatch(model)
        for way in (OwnWay(PLAIN, model, DecodeConfig.plain(model.num_layers)), FreeRunningWay(model)):
            row = plain_row(model, decode(way, subject), subject)
            job.add(way=way.name, **row, load_s=load_s, added_bytes=_allocated_bytes() - before)
        job.add(engine=engine, machine=watch.record())
        del model, way, watch  # before the next engine asks how much memory is free


def plain_row(model: LayerSkipModel, samples: Sequence[Sample], subject: Subject) -> dict[str, Any]:
    """A row of numbers from samples of plain decoding."""
    context = len(subject.prompt()) + subject.num_new_tokens // 2
    ms = sorted(1000 / rate for one in samples if (rate := one.tokens_per_s))
    return {
        "engine": model.engine_name,
        "reason": model.engine_reason,
        "ms_per_token": statistics.median(ms),
        "ms_of_each_text": ms,
        "end_to_end_tokens_per_s": statistics.median(one.end_to_end_tokens_per_s or 0.0 for one in samples),
        "step_bytes": step_bytes(model).of(None, 1, context),
        "context": context,
    }


def rounds(subject: Subject, job: Job) -> None:
    """Rounds by layers kept and gamma, and with all layers in 8 bits."""
    model = subject.graph()
    job.add(kept=1.0, int8=False, gamma=0, ms=_plain_ms(model, subject))
    in_int8 = [(1.0, True)] if model.bits_refusal(8) is None and not model.bits_lack(8) else []
    for kept, int8 in [*in_int8, *((kept, False) for kept in subject.some(KEPT_SHARES))]:
        for gamma in subject.some(GAMMAS):
            if job.left_s < _RESERVE_S:
                return
            config = draft_of(model.num_layers, kept, gamma, int8=int8)
            job.add(kept=kept_share(config.skip_mask), int8=int8, gamma=gamma, ms=round_ms(model, config, subject))


def round_ms(model: LayerSkipModel, config: DecodeConfig, subject: Subject) -> float | None:
    """Milliseconds of a round that drafts gamma tokens, the median over texts; None if there was none."""
    found = []
    for seed in range(-1, subject.repeats):  # the first is not counted
        stats = DecodeStats()
        request = DecodeRequest(subject.prompt(seed=max(seed, 0)), subject.num_new_tokens, model.eos_token_ids)
        for _ in DecodeLoop(model.engine, config, Sampler(SamplingParams())).run(request, stats):
            pass
        # The last rounds of a text draft fewer.
        if seed >= 0 and (count := stats.drafted_by_position[config.gamma - 1]):
            found.append(1000 * stats.round_s_by_drafted[config.gamma - 1] / count)
    return statistics.median(found) if found else None


def speedup(subject: Subject, job: Job) -> None:
    """Speculative against plain decoding, where a draft is accepted often, seldom and in between."""
    for damping in DAMPINGS[:1] if subject.size == "8b" else subject.some(DAMPINGS):
        subject.damp(damping)
        for kept in subject.some((0.5, 0.25)):
            for gamma in subject.some((4, 2, 8)):
                if job.left_s < _RESERVE_S:
                    return
                model = subject.graph()
                job.add(damping=damping, **speedup_row(model, draft_of(model.num_layers, kept, gamma), subject))
                del model  # before the next one asks how much memory is free


def speedup_row(model: LayerSkipModel, config: DecodeConfig, subject: Subject) -> dict[str, Any]:
    """Medians over texts of one setting over plain decoding, one after the other, prompt apart and included."""
    ways = [OwnWay(PLAIN, model, DecodeConfig.plain(model.num_layers)), OwnWay(SPECULATIVE, model, config)]
    found, end_to_end, drafted = [], [], DecodeStats()
    for seed in range(subject.repeats):
        prompt = subject.prompt(seed=seed)
        before, after = (way.run(prompt, subject.num_new_tokens) for way in ways)
        found.append(_ratio(after.tokens_per_s, before.tokens_per_s))
        end_to_end.append(_ratio(after.end_to_end_tokens_per_s, before.end_to_end_tokens_per_s))
        for name in ("num_drafted", "num_accepted", "num_rounds"):
            setattr(drafted, name, getattr(drafted, name) + getattr(after.stats, name))
    return {
        "kept": kept_share(config.skip_mask),
        "gamma": config.gamma,
        "acceptance_rate": drafted.acceptance_rate,
        "mean_accepted_length": drafted.mean_accepted_length,
        "speedup": statistics.median(found),
        "end_to_end_speedup": statistics.median(end_to_end),
        "speedups": found,
    }


def generate(subject: Subject, job: Job) -> None:
    """Hugging Face's `generate`, with its growing cache, beside ours."""
    _benchmark(subject, job, (HF_GENERATE, PLAIN, FREE_RUNNING), compiled=False)


def compiled(subject: Subject, job: Job) -> None:
    """Hugging Face's compiled `generate` on one static cache, beside ours."""
    if subject.is_rehearsal:
        job.add(name=HF_COMPILED, reason="left out of a rehearsal: on a CPU it compiles for half a minute")
        return
    _benchmark(subject, job, (HF_COMPILED, PLAIN, FREE_RUNNING), compiled=True)


def contexts(subject: Subject, job: Job) -> None:
    """Plain decoding after ever longer texts."""
    model = subject.graph()
    for length in subject.some(CONTEXTS):
        if job.left_s < _RESERVE_S:
            return
        way = OwnWay(PLAIN, model, DecodeConfig.plain(model.num_layers))
        samples = [way.run(subject.prompt(length, seed=1), subject.num_new_tokens) for _ in range(1 + subject.repeats)]
        ms = [1000 / rate for one in samples[1:] if (rate := one.tokens_per_s)]
        job.add(context=length, ms_per_token=statistics.median(ms))


def draft_of(num_layers: int, kept: float, gamma: int, *, int8: bool = False) -> DecodeConfig:
    """A draft of the first layers, at least one."""
    first = max(round(kept * num_layers), 1)
    return DecodeConfig(skip_mask=SkipMask.early_exit(num_layers, first).rounded(8 if int8 else None), gamma=gamma)


def kept_share(mask: SkipMask) -> float:
    return 1 - mask.num_skipped / (2 * mask.num_layers)


def decode(way: Way, subject: Subject) -> list[Sample]:
    """One sample a repeat, each of another text, after one that is not counted."""
    way.run(subject.prompt(), subject.num_new_tokens)
    return [way.run(subject.prompt(seed=seed), subject.num_new_tokens) for seed in range(subject.repeats)]


def _allocated_bytes() -> int:
    """On the CUDA device; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _plain_ms(model: LayerSkipModel, subject: Subject) -> float:
    samples = decode(OwnWay(PLAIN, model, DecodeConfig.plain(model.num_layers)), subject)
    return statistics.median(1000 / rate for one in samples if (rate := one.tokens_per_s))


def _ratio(rate: float | None, other: float | None) -> float:
    if rate is None or other is None:
        raise ValueError("a text of one token has no speed")
    return rate / other


def _benchmark(subject: Subject, job: Job, names: Sequence[str], *, compiled: bool) -> None:
    prompts = [(f"random-{seed}", subject.prompt(seed=seed)) for seed in range(subject.repeats)]
    plan = Plan(subject.num_new_tokens, 2, names, compiled)
    found = run_benchmark(subject.graph(), None, prompts, plan)
    for row in found.rows:
        job.add(**row)
    job.add(name="facts", **found.facts, steps=found.steps, machine=found.machine)
