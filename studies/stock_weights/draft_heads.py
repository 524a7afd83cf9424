"""Medusa's and Hydra's heads: what they say, their training on states computed once, and a draft by lean operations."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from layerskip.engines.lean_layers import Norm
from layerskip.engines.linear import Linear, fused
from layerskip.engines.states import StatesEngine
from layerskip.engines.weight_layout import WeightLayouts
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import Sampler

Kind = Literal["medusa", "medusa_token", "hydra"]
KINDS: tuple[Kind, ...] = ("medusa", "medusa_token", "hydra")
_BLOCK, _BLOCKS = 16, 32
"""Places of a text in a row that a step learns from, and how many such rows."""
_DEPTH_WEIGHT, _WARM_UP = 0.8, 0.05
"""As in the training of EAGLE weights."""
_EPS = 1e-6


class Heads(nn.Module):
    """States (..., hidden) of the target and embeddings of the tokens after them -> normed hidden states, a head each.

    A head is a residual block of two maps with SiLU between them; the second is zero at first, so that each head begins
    as the target's own. The output embedding is the target's.
    """

    def __init__(self, kind: Kind, count: int, hidden_size: int, final_norm: torch.Tensor) -> None:
        super().__init__()
        self.kind, self.count = kind, count
        self.state_norm, self.embed_norm, self.norm = (LlamaRMSNorm(hidden_size, eps=_EPS) for _ in range(3))
        self.enter = nn.ModuleList(nn.Linear(hidden_size * (1 + self.sees(i)), hidden_size) for i in range(count))
        self.leave = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(count))
        with torch.no_grad():
            self.norm.weight.copy_(final_norm)
            for one in self.leave:
                one.weight.zero_()  # type: ignore[operator]

    def sees(self, i: int) -> int:
        """Tokens that head i takes, from the last emitted one on."""
        return {"medusa": 0, "medusa_token": 1, "hydra": i + 1}[self.kind]

    def rollouts(self, states: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """(B, T, hidden) of each head, normed, had the heads before it said what the text says.

        Shapes: states (B, T, hidden); embedded (B, T + count - 1, hidden), the first row of the token after the first
        state.
        """
        num_places, found = states.shape[1], []
        state, tokens = self.state_norm(states), self.embed_norm(embedded)
        for i, (enter, leave) in enumerate(zip(self.enter, self.leave, strict=True)):
            seen = [tokens[:, j : j + num_places] for j in range(self.sees(i))]
            found.append(self.norm(states + leave(F.silu(enter(torch.cat([state, *seen], dim=-1))))))
        return found


class LeanHeads:
    """The first `gamma` heads for drafting, as decoding would run them: one text's last row, in the layout measured."""

    def __init__(self, heads: Heads, gamma: int, engine: StatesEngine, sampler: Sampler) -> None:
        self._engine, self._sampler, self._gamma, self._kind = engine, sampler, gamma, heads.kind
        make = WeightLayouts(engine.device).linear
        enter: Any = heads.enter[:gamma]
        leave: Any = heads.leave[:gamma]
        self._state_norm, self._embed_norm, self._norm = map(Norm, (heads.state_norm, heads.embed_norm, heads.norm))
        self._together = fused(make, *enter) if heads.kind != "hydra" else None
        self._leave_together = torch.stack([one.weight.detach().T.contiguous() for one in leave])
        self._enter: list[Linear] = [fused(make, one) for one in enter] if heads.kind == "hydra" else []
        self._leave: list[Linear] = [fused(make, one) for one in leave] if heads.kind == "hydra" else []

    def draft(self, state: torch.Tensor, last: int, context: Sequence[int]) -> torch.Tensor:
        """(gamma,) tokens after the context, which ends with `last`. state: (1, hidden) of the position before it."""
        token = torch.tensor([last], device=state.device)
        if self._together is not None:
            return self._parallel(state, token, context)
        drafted, seen = [], [self._state_norm(state)]
        for i, (enter, leave) in enumerate(zip(self._enter, self._leave, strict=True)):
            seen.append(self._embed_norm(self._engine.embed(token)))
            hidden = leave.add_to(state, F.silu(enter(torch.cat(seen, dim=-1))))
            logits = self._sampler.shape(self._engine.unembed(self._norm(hidden)), context)
            token = self._sampler.choose(logits, len(context) + i)
            drafted.append(token)
        return torch.cat(drafted)

    def _parallel(self, state: torch.Tensor, token: torch.Tensor, context: Sequence[int]) -> torch.Tensor:
        assert self._together is not None
        seen = [self._state_norm(state)]
        if self._kind == "medusa_token":
            seen.append(self._embed_norm(self._engine.embed(token)))
        inner = F.silu(self._together(torch.cat(seen, dim=-1))).view(self._gamma, 1, -1)
        hidden = state + torch.bmm(inner, self._leave_together)[:, 0]
        logits = self._sampler.shape(self._engine.unembed(self._norm(hidden)), context)
        return self._sampler.choose(logits, len(context))


@dataclass(frozen=True)
class KnownTexts:
    """Texts one after the other, with the target's last states, computed once."""

    ids: torch.Tensor
    """(M,)"""
    states: torch.Tensor
    """(M, hidden), in half precision."""
    starts: torch.Tensor
    """Places from which `_BLOCK` + count + 1 tokens are of one text."""

    @classmethod
    def of(cls, model: LayerSkipModel, texts: Sequence[Sequence[int]], count: int) -> KnownTexts:
        """For `count` heads. Cost: a target forward over all texts. Raises: ValueError if all are too short."""
        states: list[torch.Tensor] = []
        starts: list[int] = []
        begin, need = 0, _BLOCK + count + 1
        for one in texts:
            states.append(states_of(model, one).half())
            starts += range(begin, begin + len(one) - need + 1)
            begin += len(one)
        if not starts:
            raise ValueError(f"texts: one must have at least {need} tokens, the longest has {max(map(len, texts))}")
        ids = torch.tensor([token for one in texts for token in one])
        return cls(ids, torch.cat(states), torch.tensor(starts))


class Ends:
    """The target's frozen ends: embeddings of tokens, logits of states."""

    def __init__(self, model: LayerSkipModel) -> None:
        target: Any = model.model
        self._embeddings = target.get_input_embeddings().weight.detach()
        self._head = target.get_output_embeddings().weight.detach()
        self.norm = target.get_decoder().norm

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(..., hidden)."""
        return F.embedding(ids, self._embeddings)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """(..., V) of normed hidden states."""
        return F.linear(normed, self._head)

    @torch.no_grad()
    def target_logits(self, states: torch.Tensor) -> torch.Tensor:
        """(..., V) that the target says behind its own last states."""
        return self.logits(self.norm(states))


@torch.no_grad()
def states_of(model: LayerSkipModel, ids: Sequence[int], aux_layers: Sequence[int] = ()) -> torch.Tensor:
    """(T, depths * hidden) that these layers of the target and then its last one give, before the final norm."""
    target: Any = model.model
    with model.adapter.states_of((*aux_layers, model.num_layers - 1)) as found:
        target.get_decoder()(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return torch.cat([one[0] for one in found], dim=-1)


def train(
    heads: Heads, texts: KnownTexts, ends: Ends, seconds: float, clock: Callable[[], float] = time.thread_time
) -> tuple[int, list[float]]:
    """(Steps, mean loss of each tenth of them) of so many seconds of this thread, by the target's distributions."""
    rate = 0.02 / texts.states.shape[1] ** 0.5
    optimiser = torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng, begin, losses = np.random.default_rng(0), clock(), list[float]()
    span = torch.arange(_BLOCK + heads.count)
    while (share := (clock() - begin) / seconds) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, share / _WARM_UP + 0.01, 0.5 * (1.0 + np.cos(np.pi * share)))
        places = texts.starts[torch.from_numpy(rng.integers(len(texts.starts), size=_BLOCKS))].unsqueeze(1) + span
        loss = _loss(heads, ends, texts.states[places].float(), texts.ids[places + 1])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            sys.stderr.write(f"{heads.kind}: step {len(losses)}, {share:.0%}, loss {np.mean(losses[-50:]):.3f}\n")
    return len(losses), [float(part.mean()) for part in np.array_split(losses, 10) if len(part)]


def _loss(heads: Heads, ends: Ends, states: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the heads, weighted by depth. Shapes: states (B, _BLOCK + count, hidden); next_ids
    (B, _BLOCK + count), of the tokens after them."""
    target = ends.target_logits(states).softmax(-1)
    found = torch.zeros(())
    weights = [_DEPTH_WEIGHT**i for i in range(heads.count)]
    for i, hidden in enumerate(heads.rollouts(states[:, :_BLOCK], ends.embed(next_ids[:, :-1]))):
        labels = target[:, i + 1 : i + 1 + _BLOCK].flatten(0, 1)
        found = found + weights[i] * F.cross_entropy(ends.logits(hidden).flatten(0, 1), labels)
    return found / sum(weights)
