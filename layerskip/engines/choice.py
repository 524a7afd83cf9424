"""Which engine: the one asked for, or by measurement."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from layerskip.adapter import ModelAdapter, UnsupportedModelError
from layerskip.config import ENGINE_NAMES
from layerskip.engines.base import Engine
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.identity import logit_difference
from layerskip.skip_mask import SkipMask

_CONTEXT = 8
_NUM_TIMED = 5


@dataclass(frozen=True)
class EngineChoice:
    """An engine and why it is this one."""

    engine: Engine
    reason: str


def make_engine(name: str, adapter: ModelAdapter) -> EngineChoice:
    """The engine of this name; `auto` takes the faster one of those that serve this model.

    Cost of `auto`: about two dozen forwards over a few tokens.
    Raises: ValueError for an unknown name, UnsupportedModelError if the engine asked for cannot serve the model.
    """
    if name not in ENGINE_NAMES:
        raise ValueError(f"engine: must be one of {', '.join(ENGINE_NAMES)}, got {name!r}")
    eager = EagerEngine(adapter)
    if name == "eager":
        return EngineChoice(eager, "asked for")
    try:
        fused = FusedEngine(adapter)
        check_agreement(fused, eager, adapter)
    except UnsupportedModelError as error:
        if name == "fused":
            raise
        return EngineChoice(eager, str(error))
    if name == "fused":
        return EngineChoice(fused, "asked for")
    fused_ms, eager_ms = _decode_and_verify_ms(fused), _decode_and_verify_ms(eager)
    faster: Engine = fused if fused_ms <= eager_ms else eager
    return EngineChoice(faster, f"one token and then four take {fused_ms:.2f} ms fused, {eager_ms:.2f} ms eager")


def check_agreement(engine: Engine, reference: Engine, adapter: ModelAdapter) -> None:
    """Same logits on the same ids, whole and under a mask, in one forward and in steps.

    Raises: UnsupportedModelError with the largest difference where it exceeds rounding.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(adapter.text_config.vocab_size)
    ids = torch.randint(vocabulary, (_CONTEXT + 4,), generator=generator).to(adapter.device)
    num_layers = adapter.num_layers
    mask = SkipMask.from_sublayers(num_layers, attention=range(0, num_layers, 2), mlp=range(1, num_layers, 3))
    for skip in (None, mask):
        rows = []
        for each in (engine, reference):
            with each.session(len(ids)):
                start = each.forward(ids[:_CONTEXT], skip, num_logits=_CONTEXT)
                step = each.forward(ids[_CONTEXT : _CONTEXT + 1], skip)
                rows.append(torch.cat([start, step, each.forward(ids[_CONTEXT + 1 :], skip, num_logits=3)]).clone())
        difference, tolerance = logit_difference(rows[0], rows[1])
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"engine {engine.name}: its logits differ from the model's by {difference:.3g} of their norm (rounding "
                f"explains {tolerance:.3g})"
            )


def _decode_and_verify_ms(engine: Engine) -> float:
    """Median of a decode step and a verification of four tokens, added."""
    total = 0.0
    with engine.session(_CONTEXT + 8):
        ids = torch.ones(_CONTEXT, dtype=torch.long, device=engine.device)
        engine.forward(ids)
        for num_tokens in (1, 4):
            seconds = []
            for _ in range(_NUM_TIMED + 2):
                engine.synchronize()
                start = time.perf_counter()
                engine.forward(ids[:num_tokens], num_logits=num_tokens)
                engine.synchronize()
                seconds.append(time.perf_counter() - start)
                engine.cache.rollback_to(_CONTEXT)
            total += statistics.median(seconds[2:])
    return 1000 * total
