"""How far apart rounding alone puts two forwards of one model over the same text, measured in its own dtype."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.growing_keys import over_growing_keys

NUM_TOKENS = 64
"""Of each text's continuation."""
_CHUNKS = range(2, 10)
"""Rows of the forwards that are compared with one-row ones: what verifications of 1 to 8 drafts have."""
_NUM_CANDIDATES = 4
_FACTOR = 3.0
"""Over the largest change found: some hundred positions are measured, and texts in question have thousands.

Of 2,210 honest bfloat16 outputs of the tests' tiny models (28 architectures, three engines) the worst token came to
1.5 times it.
"""


@dataclass(frozen=True)
class RoundingSpread:
    """What rounding does to the gap between the likeliest tokens of a position, in logits."""

    largest: float
    """Largest change of the gap between the best token and one of the next three, from one way of running the model to
    another: token by token, in chunks of several, all at once. At least one rounding step of the best logit."""
    num_positions: int
    """It was measured at."""

    @property
    def tolerance(self) -> float:
        """A token whose logit lies at most this far below the best may be the best one after other rounding."""
        return _FACTOR * self.largest


def is_reduced(dtype: torch.dtype) -> bool:
    """Whether the number of rows in a forward may change which token comes out."""
    return dtype in (torch.bfloat16, torch.float16)


class StockForward:
    """The model as Hugging Face runs it: its own modules over its own cache, and nothing of an engine's.

    So that what an engine emits is judged by something that shares no bug with it.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._keep_argument = "logits_to_keep" in inspect.signature(adapter.model.forward).parameters

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], num_logits: int) -> torch.Tensor:
        """(num_logits, V) float32 at the last positions of a text. One forward from scratch."""
        return self._run(ids, num_logits, {"use_cache": False})

    @torch.inference_mode()
    def continued(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """(The next `num_tokens` greedy tokens, the logits (num_tokens, V) that they come from). As many forwards."""
        cache = self._new_cache()
        rows = [self._run(ids, 1, cache)]
        while len(rows) < num_tokens:
            rows.append(self._run([int(rows[-1].argmax())], 1, cache))
        logits = torch.cat(rows)
        return logits.argmax(dim=-1).tolist(), logits

    @torch.inference_mode()
    def in_chunks(self, ids: Sequence[int], num_last: int, sizes: Iterator[int]) -> torch.Tensor:
        """Logits (num_last, V) at the last positions of a text, computed as many at a time as `sizes` says."""
        cache, rows = self._new_cache(), []
        start = len(ids) - num_last
        if start:
            self._run(ids[:start], 1, cache)
        while start < len(ids):
            chunk = ids[start : start + next(sizes)]
            rows.append(self._run(chunk, len(chunk), cache))
            start += len(chunk)
        return torch.cat(rows)

    def _new_cache(self) -> dict[str, Any]:
        return {"past_key_values": DynamicCache(config=self._adapter.config), "use_cache": True}

    def _run(self, ids: Sequence[int], num_logits: int, cache: dict[str, Any]) -> torch.Tensor:
        adapter = self._adapter
        arguments = {**cache, "logits_to_keep": num_logits} if self._keep_argument else cache
        if adapter.takes_positions:
            # Left out, Bamba takes those of a text that begins here.
            start = cache["past_key_values"].get_seq_length() if "past_key_values" in cache else 0
            positions = torch.arange(start, start + len(ids), device=adapter.device)
            arguments = {**arguments, "position_ids": positions.unsqueeze(0)}
        with over_growing_keys(adapter.placement.devices):
            out: Any = adapter.model(input_ids=torch.tensor([list(ids)], device=adapter.device), **arguments)
        logits: torch.Tensor = out.logits[0, -num_logits:].float()
        return logits


def measure_rounding(
    adapter: ModelAdapter, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS
) -> RoundingSpread:
    """The spread on the model's own greedy continuations of these prompts.

    Hugging Face's own modules are measured, not an engine: a bug would widen what it is judged by.
    Cost a prompt: about `num_tokens` one-row forwards, a fifth as many of several rows, and one over the whole text.
    """
    stock, step = StockForward(adapter), torch.finfo(adapter.dtype).eps
    found = [_changes(stock, prompt, _room(adapter, prompt, num_tokens), step) for prompt in prompts]
    changes = torch.cat(found)
    return RoundingSpread(float(changes.max()), len(changes))


def _changes(stock: StockForward, prompt: Sequence[int], num_tokens: int, step: float) -> torch.Tensor:
    """(num_tokens,): the largest change of a gap at each position over all ways to run it, or a rounding step."""
    tokens, one_by_one = stock.continued(prompt, num_tokens)
    text = [*prompt, *tokens[:-1]]
    in_chunks = stock.in_chunks(text, num_tokens, itertools.cycle(_CHUNKS))
    at_once = stock.logits(text, num_tokens)
    best, top = one_by_one.topk(min(_NUM_CANDIDATES, one_by_one.shape[-1]), dim=-1)
    gaps = [logits.gather(-1, top[:, :1]) - logits.gather(-1, top) for logits in (one_by_one, in_chunks, at_once)]
    changes = [(one - other).abs().amax(dim=-1) for one, other in itertools.combinations(gaps, 2)]
    return torch.stack([*changes, step * best[:, 0].abs()]).amax(dim=0)


def _room(adapter: ModelAdapter, prompt: Sequence[int], num_tokens: int) -> int:
    """So many tokens, or what the model's positions leave of them."""
    limit = adapter.max_positions
    return num_tokens if limit is None else max(1, min(num_tokens, limit - len(prompt)))


def logit_difference(logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(relative difference in norm, the most that rounding explains) of the same rows computed in two ways.

    The limit is sqrt(eps) of the dtype: 3e-4 in float32, .03 in float16, .09 in bfloat16. A wrong position, sign or
    window gives tenths; rounding through some dozen layers stays an order of magnitude below the limit.
    """
    tolerance = float(torch.finfo(reference.dtype).eps ** 0.5)
    logits, reference = logits.float(), reference.float()
    return float((logits - reference).norm() / reference.norm().clamp_min(1e-30)), tolerance
