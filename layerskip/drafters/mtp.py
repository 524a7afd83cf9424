"""Multi-token-prediction layers of a model's own checkpoint, gone on with token by token.

Ref: DeepSeek-V3 (2412.19437). The first such layer drafts every token of a round, from its own states after the first.
It reads states that the target has normed, and what it gives is normed too.
"""

from __future__ import annotations

from typing import Any

import torch

from layerskip.drafters.eagle.lean import LeanHead
from layerskip.drafters.eagle.module_head import ModuleHead
from layerskip.engines.lean_layers import Layer, LayerMaker, Norm
from layerskip.engines.linear import fused
from layerskip.engines.states import StatesEngine
from layerskip.huggingface.mtp import final_norm


class MtpHead(ModuleHead):
    """The first layer of an `MtpModel` as Transformers computes it."""

    def __init__(self, mtp: Any, model: Any, fingerprint: str) -> None:
        """model: the target, whose embeddings and positions it shares."""
        self.fingerprint = fingerprint
        self.layer: Any = mtp.layers[0]
        self.module, self.rotary, self.config = self.layer, mtp.rotary_emb, mtp.config
        self._final_norm = final_norm(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])

    def join(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._final_norm(states)
        return out

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        parts = [self.layer.enorm(embedded), self.layer.hnorm(states)]
        if getattr(self.config, "mtp_hidden_states_first", False):
            parts.reverse()
        out: torch.Tensor = self.layer.eh_proj(torch.cat(parts, dim=-1))
        return out

    def block(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        out: torch.Tensor = self.layer.post_norm(self.layer.mtp_block(x, **arguments))
        return out

    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        engine.prepare_unembed(draft_vocab)

    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        return engine.unembed(state, draft_vocab)


class LeanMtp(LeanHead):
    """The same of a model whose own layers are computed as lean ones. Its positions are those of the states, one before
    the tokens': attention by rotation knows distances alone."""

    def __init__(self, mtp: Any, model: Any, fingerprint: str, maker: LayerMaker) -> None:
        """model: the target, whose embeddings and positions it shares."""
        layer: Any = mtp.layers[0]
        self.module, self.rotary, self.fingerprint = layer, mtp.rotary_emb, fingerprint
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        weight = layer.eh_proj.weight
        self.like = weight[:1, : weight.shape[0]]
        self._states_first = getattr(mtp.config, "mtp_hidden_states_first", False)
        with torch.inference_mode(mode=False), torch.no_grad():
            self.layer = Layer(maker.attention(layer.mtp_block, None), maker.mlp(layer.mtp_block))
            self._project = fused(maker.linear, layer.eh_proj)
            norms = (final_norm(model), layer.enorm, layer.hnorm, layer.post_norm)
            self._final_norm, self._embed_norm, self._state_norm, self._post_norm = map(Norm, norms)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        return self._final_norm(states)

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        parts = [self._embed_norm(embedded), self._state_norm(states)]
        return self._project(torch.cat(parts[::-1] if self._states_first else parts, dim=-1))

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """See `LeanHead`."""
        return self._post_norm(out)

    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        engine.prepare_unembed(draft_vocab)

    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        return engine.unembed(state, draft_vocab)
