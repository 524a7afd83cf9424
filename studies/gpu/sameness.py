"""Tokens: identical in float32, ties in reduced precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.identity import check_identity
from studies.gpu.machine import free_memory
from studies.gpu.models import SHAPES, on_engine, random_llama, random_prompt
from studies.gpu.runner import Job
from studies.gpu.subject import ENGINES, Subject

_RESERVE_S = 3.0
_VERIFIED = (2, 5, 9)


def identity(subject: Subject, job: Job) -> None:
    """Greedy outputs of every engine in float32, plain and speculative, against Hugging Face's `generate`.

    A smaller model: in float32 a difference is a bug in the code, and the code is the same for all sizes.
    """
    shape = SHAPES["tiny" if subject.is_rehearsal else "small"]
    num_prompts, num_tokens = (1, 8) if subject.is_rehearsal else (4, 64)
    weights = random_llama(shape, subject.device, torch.float32, damping=0.4)
    prompts = [random_prompt(shape, 1 + 24 * seed, seed) for seed in range(num_prompts)]
    references = [huggingface_greedy(weights, prompt, num_tokens) for prompt in prompts]
    for engine in ENGINES:
        model, identical, differing = on_engine(weights, engine), 0, list[str]()
        for prompt, expected in zip(prompts, references, strict=True):
            for config in _configs(shape.layers):
                ids = model.generate(prompt, config=config, max_new_tokens=num_tokens).ids
                identical += ids == expected
                differing += [] if ids == expected else [f"{config.skip_mask} gamma {config.gamma}"]
        outputs = identical + len(differing)
        job.add(engine=engine, dtype="float32", outputs=outputs, identical=identical, differing=differing)
        del model
        free_memory()


def ties(subject: Subject, job: Job) -> None:
    """How often rounding decides: the same text read one token at a time and several at once; and whole outputs."""
    model = subject.graph()
    prompt, plain = subject.prompt(), DecodeConfig.plain(model.num_layers)
    text = model.generate(prompt, config=plain, max_new_tokens=subject.num_new_tokens).ids
    single = read_text(model, prompt, text, 1)
    for num_rows in subject.some(_VERIFIED):
        rows = read_text(model, prompt, text, num_rows)
        spread = (rows - single).abs().amax(-1)
        quantiles = torch.quantile(spread, torch.tensor([0.5, 0.99, 1.0], device=spread.device)).tolist()
        job.add(
            damping=subject.damping,
            num_rows=num_rows,
            positions=len(text),
            other_token=int((rows.argmax(-1) != single.argmax(-1)).sum()),
            logit_spread=dict(zip(("median", "p99", "largest"), quantiles, strict=True)),
            largest_logit=float(single.abs().max()),
        )
    for config in _configs(model.num_layers)[1:]:
        if job.left_s < _RESERVE_S:
            return
        ids = model.generate(prompt, config=config, max_new_tokens=subject.num_new_tokens).ids
        report = check_identity(model, prompt, ids, text)
        job.add(
            skip_mask=str(config.skip_mask),
            gamma=config.gamma,
            tokens=len(ids),
            identical=report.identical,
            is_tie=report.is_tie,
            first_difference=report.first_difference,
            logit_gap=report.logit_gap,
            tolerance=report.tolerance,
        )


def huggingface_greedy(weights: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    generate: Callable[..., torch.Tensor] = weights.generate  # type: ignore[assignment]
    ids = torch.tensor([list(prompt)], device=next(weights.parameters()).device)
    output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


def read_text(model: LayerSkipModel, prompt: Sequence[int], text: Sequence[int], num_rows: int) -> torch.Tensor:
    """Float32 logits (len(text), V) after each token of the text but the last, `num_rows` a forward."""
    ids = torch.tensor([*prompt, *text[:-1]], device=model.device)
    first = model.engine
    with torch.inference_mode(), first.session(len(ids)):
        logits = [first.forward(ids[: len(prompt)]).float()]
        for chunk in ids[len(prompt) :].split(num_rows):
            logits.append(first.forward(chunk, num_logits=len(chunk)).float())
    return torch.cat(logits)


def _configs(num_layers: int) -> list[DecodeConfig]:
    """Plain; whole layers and sublayers, thresholds on and off."""
    half, quarter = num_layers // 2, max(num_layers // 4, 1)
    sublayers = SkipMask.from_sublayers(num_layers, attention=range(1, num_layers, 2), mlp=range(2, num_layers, 3))
    return [
        DecodeConfig.plain(num_layers),
        DecodeConfig(skip_mask=SkipMask.early_exit(num_layers, half), gamma=4),
        DecodeConfig(skip_mask=SkipMask.early_exit(num_layers, quarter), gamma=8, draft_threshold=0.3),
        DecodeConfig(skip_mask=sublayers, gamma=2, target_threshold=0.3),
    ]
