"""A multi-token-prediction layer of a model's own checkpoint, gone on with token by token.

MtpHead is the layer in Transformers' own modules, MtpText one text's keys and values under it.

Ref: DeepSeek-V3 (2412.19437). The first such layer drafts every token of a round, from its own states after the first.
It reads states that the target has normed, and what it gives is normed too.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from layerskip.drafters.eagle.state_head import StateHead, StateText
from layerskip.engines.states import StatesEngine
from layerskip.huggingface.adapter import ForcedPositions
from layerskip.huggingface.growing_keys import over_growing_keys
from layerskip.huggingface.kv_cache import SharedLengthCache
from layerskip.huggingface.mtp import final_norm


class MtpHead(StateHead):
    """The first layer of an `MtpModel` as Transformers computes it."""

    def __init__(self, mtp: Any, model: Any, fingerprint: str) -> None:
        """model: the target, whose embeddings and positions it shares."""
        self.fingerprint = fingerprint
        self.layer: Any = mtp.layers[0]
        self.module, self.rotary, self.config = self.layer, mtp.rotary_emb, mtp.config
        self._final_norm = final_norm(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])

    def new_text(self, capacity: int) -> MtpText:
        return MtpText(self, capacity)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._final_norm(states)
        return out

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        parts = [self.layer.enorm(embedded), self.layer.hnorm(states)]
        if getattr(self.config, "mtp_hidden_states_first", False):
            parts.reverse()
        out: torch.Tensor = self.layer.eh_proj(torch.cat(parts, dim=-1))
        return out

    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        engine.prepare_unembed(draft_vocab)

    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        return engine.unembed(state, draft_vocab)


class MtpText(StateText):
    """See `StateText`. Positions are the tokens' own, one behind those of the states, as in training."""

    head: MtpHead

    def __init__(self, head: MtpHead, capacity: int) -> None:
        self.head = head
        self._cache = SharedLengthCache([None], capacity)

    @property
    def keys(self) -> torch.Tensor:
        return cast(torch.Tensor, self._cache.layers[0].keys)

    @property
    def values(self) -> torch.Tensor:
        return cast(torch.Tensor, self._cache.layers[0].values)

    def copied(self, length: int, room: int) -> MtpText:
        """See `StateText`."""
        copy = MtpText(self.head, length + room)
        copy._cache.layers[0].lazy_initialization(self.keys, self.values)
        copy.keys[:, :, :length], copy.values[:, :, :length] = self.keys[:, :, :length], self.values[:, :, :length]
        return copy

    @torch.inference_mode()
    def run_rows(
        self, x: torch.Tensor, positions: slice | torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `StateText`. The layer is told by a mask what each row sees."""
        num_rows, layer = len(x), self.head.layer
        self._cache.rollback_to(0)
        self._cache.advance(start)
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=x.device)
        ids, hidden = (positions + 1).unsqueeze(0), None  # of a single row that sees all before it
        if mask is None and num_rows > 1:
            places = torch.arange(num_rows, device=x.device)
            mask = places <= places.unsqueeze(1)
        if mask is not None:
            hidden = ForcedPositions.of(positions, {None: mask}, x.dtype).attention_mask
        with over_growing_keys((x.device,)):
            out = layer.mtp_block(
                x.unsqueeze(0),
                attention_mask=hidden,
                position_embeddings=self.head.rotary(x, position_ids=ids),
                position_ids=ids,
                past_key_values=self._cache,
            )
            normed: torch.Tensor = layer.post_norm(out)
        return normed[0]
