"""In bfloat16 the identity check passes honest outputs, ties among them, and fails those of planted bugs.

Tiny models whose logits are far enough apart that a wrong forward changes tokens that do not tie; each is judged on
several prompts, as a study does, where one output that is not lossless stops it.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.identity import IdentityReport, check_identity
from layerskip.engines.native.library import load_kernels
from layerskip.huggingface.rounding import measure_rounding
from tests.layerskip import zoo
from tests.layerskip.planted_bugs import EAGER, EAGER_SLIDING, FUSED, FUSED_SLIDING, LOOP, Bug, planted

NUM_PROMPTS = 8
NUM_TOKENS = 36
DEMO = Path(__file__).resolve().parents[2] / "studies" / "demo"
_ON: dict[str, dict[str, Bug]] = {
    "llama fused": LOOP | FUSED,
    "mistral-sliding fused": LOOP | FUSED | FUSED_SLIDING,
    "qwen3": LOOP | EAGER,
    "gemma3": EAGER_SLIDING,
    "gpt2": EAGER,
}


@functools.cache
def model_of(name: str) -> LayerSkipModel:
    engine = "fused" if name.endswith("fused") else "eager"
    model = LayerSkipModel(zoo.build(name).to(torch.bfloat16), engine=engine)
    model.rounding = measure_rounding(model.adapter, [zoo.prompt_of(6, seed) for seed in range(3)])
    return model


def draw_config(num_layers: int, draw: random.Random) -> DecodeConfig:
    mask = (
        zoo.random_mask(num_layers, draw) if draw.random() < 0.5 else SkipMask.early_exit(num_layers, num_layers // 2)
    )
    return DecodeConfig(skip_mask=mask, gamma=draw.randrange(1, 9))


@functools.cache
def plain_ids(name: str, prompt: tuple[int, ...]) -> list[int]:
    return model_of(name).generate(prompt, max_new_tokens=NUM_TOKENS).ids


def judged(name: str) -> Iterator[IdentityReport]:
    """Speculative outputs under random configs against plain decoding without the bug, prompt by prompt."""
    model, draw = model_of(name), random.Random(1)
    for seed in range(NUM_PROMPTS):
        prompt = zoo.prompt_of(6, seed)
        ids = model.generate(prompt, config=draw_config(zoo.NUM_LAYERS, draw), max_new_tokens=NUM_TOKENS).ids
        yield check_identity(model, prompt, ids, plain_ids(name, prompt))


@zoo.few((*_ON, "qwen2 fused", "olmo2", "qwen3-moe"), ("llama", "qwen3"))
def test_honest_outputs_pass(name: str) -> None:
    reports = list(judged(name))
    assert all(report.lossless for report in reports), reports
    assert sum(report.identical for report in reports) >= NUM_PROMPTS / 2


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name, bugs in _ON.items() for bug in bugs])
def test_planted_bugs_fail(name: str, bug: str) -> None:
    for seed in range(NUM_PROMPTS):
        plain_ids(name, zoo.prompt_of(6, seed))  # before the bug is there
    with planted(_ON[name][bug]):
        assert any((one.logit_gap or 0.0) > 2 * (one.tolerance or 0.0) for one in judged(name) if not one.lossless)


@functools.cache
def demo_cases() -> tuple[LayerSkipModel, list[tuple[list[int], list[int]]]]:
    """The trained model in bfloat16, its rounding measured, and held-out prompts with its plain output."""
    model = LayerSkipModel.from_pretrained(DEMO / "model", device="cpu", dtype="bfloat16", engine="fused")
    lines = (DEMO / "held_out.jsonl").read_text().splitlines()[:12]
    prompts = [model.encode(json.loads(line)["prompt"]) for line in lines]
    model.rounding = measure_rounding(model.adapter, prompts[:4])
    return model, [(ids, model.generate(ids, max_new_tokens=48, do_sample=False).ids) for ids in prompts]


def judged_demo() -> Iterator[IdentityReport]:
    (model, cases), draw = demo_cases(), random.Random(1)
    for prompt, plain in cases:
        config = draw_config(model.num_layers, draw)
        ids = model.generate(prompt, config=config, max_new_tokens=48, do_sample=False).ids
        yield check_identity(model, prompt, ids, plain)


@pytest.mark.slow
def test_honest_outputs_of_a_trained_model_pass() -> None:
    reports = list(judged_demo())
    assert all(report.lossless for report in reports), reports
    # Kernels compute a token the same however many it is verified with; torch's products do not.
    compiled = not isinstance(load_kernels(), str)
    assert all(report.identical for report in reports) if compiled else any(report.is_tie for report in reports)
    assert demo_cases()[0].rounding_spread([]).tolerance < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("bug", [*LOOP, *FUSED])
def test_planted_bugs_fail_on_a_trained_model(bug: str) -> None:
    demo_cases()  # before the bug is there
    with planted((LOOP | FUSED)[bug]):
        assert any(not report.lossless for report in judged_demo())
