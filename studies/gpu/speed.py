"""Seconds: plain decoding on every engine and by Hugging Face, rounds by what they keep, and what speculation gives."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.benchmark.memory import step_bytes
from layerskip.benchmark.names import HF_COMPILED, HF_GENERATE, PLAIN
from layerskip.benchmark.run import Plan, run_benchmark
from layerskip.benchmark.ways import OwnWay, Sample
from studies.gpu.engine_part import ENGINES, Subject
from studies.gpu.runner import Job

GAMMAS = (1, 2, 4, 6, 8)
KEPT_SHARES = (0.125, 0.25, 0.5, 0.75)
DAMPINGS = (0.4, 0.1, 1.0)
"""Of the late layers, from accepted some five times in six to nearly always and then seldom."""
CONTEXTS = (128, 512, 2048, 4096, 8000)
_RESERVE_S = 5.0
"""Loops begin nothing new with less time than this left."""


def plain(subject: Subject, job: Job) -> None:
    """Plain decoding on each engine: milliseconds a token, and the bytes that a step must read."""
    for engine in ENGINES:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with subject.on(engine) as model:
            samples = decode(model, DecodeConfig.plain(model.num_layers), subject)
            job.add(**plain_row(model, samples, subject))


def plain_row(model: LayerSkipModel, samples: Sequence[Sample], subject: Subject) -> dict[str, Any]:
    """A row of numbers from samples of plain decoding."""
    context = len(subject.prompt()) + subject.num_new_tokens // 2
    ms = sorted(1000 / rate for one in samples if (rate := one.tokens_per_s))
    return {
        "engine": model.engine_name,
        "reason": model.engine_reason,
        "attention_backend": model.engine.attention_backend,
        "ms_per_token": statistics.median(ms),
        "ms_of_each_text": ms,
        "end_to_end_tokens_per_s": statistics.median(one.end_to_end_tokens_per_s or 0.0 for one in samples),
        "step_bytes": step_bytes(model).of(None, 1, context),
        "context": context,
        "memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def rounds(subject: Subject, job: Job) -> None:
    """Whole rounds, as decoding runs them, by the share of layers that a draft keeps and by gamma."""
    model = subject.graph()
    job.add(kept=1.0, gamma=0, ms=_plain_ms(model, subject))
    for kept in subject.some(KEPT_SHARES):
        for gamma in subject.some(GAMMAS):
            if job.left_s < _RESERVE_S:
                return
            config = draft_of(model.num_layers, kept, gamma)
            samples = decode(model, config, subject)
            ms = [one for sample in samples for one in _full_rounds_ms(sample, gamma)]
            job.add(kept=kept_share(config.skip_mask), gamma=gamma, ms=statistics.median(ms) if ms else None)


def speedup(subject: Subject, job: Job) -> None:
    """Speculative against plain decoding in lockstep, where a draft is accepted often, seldom and in between."""
    for damping in subject.some(DAMPINGS):
        for kept in subject.some((0.5, 0.25)):
            for gamma in subject.some((4, 2, 8)):
                if job.left_s < _RESERVE_S:
                    return
                model = subject.graph(damping)
                job.add(damping=damping, **speedup_row(model, draft_of(model.num_layers, kept, gamma), subject))


def speedup_row(model: LayerSkipModel, config: DecodeConfig, subject: Subject) -> dict[str, Any]:
    """Medians over texts of one setting against plain decoding, prompt apart and included."""
    plain_config, ratios, end_to_end = DecodeConfig.plain(model.num_layers), [], []
    drafted = accepted = num_rounds = 0
    for seed in range(subject.repeats):
        prompt = subject.prompt(seed=seed)
        pair = model.generate_in_lockstep(prompt, [plain_config, config], max_new_tokens=subject.num_new_tokens)
        before, after = (output.stats for output in pair)
        ratios.append((after.tokens_per_s or 0.0) / (before.tokens_per_s or 1.0))
        end_to_end.append(_total_rate(after) / _total_rate(before))
        drafted, accepted = drafted + after.num_drafted, accepted + after.num_accepted
        num_rounds += after.num_rounds
    return {
        "kept": kept_share(config.skip_mask),
        "gamma": config.gamma,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_accepted_length": (accepted + num_rounds) / num_rounds if num_rounds else None,
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "end_to_end_speedup": statistics.median(end_to_end),
    }


def generate(subject: Subject, job: Job) -> None:
    """Hugging Face's `generate`, with its growing cache, beside ours."""
    _benchmark(subject, job, (HF_GENERATE, PLAIN), compiled=False)


def compiled(subject: Subject, job: Job) -> None:
    """Hugging Face's compiled `generate` on one static cache, beside ours."""
    if subject.is_rehearsal:
        job.add(name=HF_COMPILED, reason="left out of a rehearsal: on a CPU it compiles for half a minute")
        return
    _benchmark(subject, job, (HF_COMPILED, PLAIN), compiled=True)


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


def draft_of(num_layers: int, kept: float, gamma: int) -> DecodeConfig:
    """A draft of the first layers, at least one."""
    first = max(round(kept * num_layers), 1)
    return DecodeConfig(skip_mask=SkipMask.early_exit(num_layers, first), gamma=gamma)


def kept_share(mask: SkipMask) -> float:
    return 1 - mask.num_skipped / (2 * mask.num_layers)


def decode(model: LayerSkipModel, config: DecodeConfig, subject: Subject) -> list[Sample]:
    """One sample a repeat, each of another text, after one that is not counted."""
    way = OwnWay(PLAIN, model, config)
    way.run(subject.prompt(), subject.num_new_tokens)
    return [way.run(subject.prompt(seed=seed), subject.num_new_tokens) for seed in range(subject.repeats)]


def _plain_ms(model: LayerSkipModel, subject: Subject) -> float:
    samples = decode(model, DecodeConfig.plain(model.num_layers), subject)
    return statistics.median(1000 / rate for one in samples if (rate := one.tokens_per_s))


def _full_rounds_ms(sample: Sample, gamma: int) -> Iterator[float]:
    """Milliseconds of a round that drafted gamma tokens; the last ones of a text draft fewer."""
    stats = sample.stats
    if stats is not None and (count := stats.drafted_by_position[gamma - 1]):
        yield 1000 * stats.round_s_by_drafted[gamma - 1] / count


def _total_rate(stats: Any) -> float:
    """Tokens/s, prompt included."""
    return float(stats.num_emitted / (stats.prefill_s + stats.decode_s))


def _benchmark(subject: Subject, job: Job, names: Sequence[str], *, compiled: bool) -> None:
    prompts = [(f"random-{seed}", subject.prompt(seed=seed)) for seed in range(subject.repeats)]
    plan = Plan(subject.num_new_tokens, 2, names, compiled)
    found = run_benchmark(subject.graph(), None, prompts, plan)
    for row in found.rows:
        job.add(**row)
    job.add(name="facts", **found.facts, steps=found.steps)
