"""MtpHead: a multi-token-prediction layer of the model's own checkpoint, gone on with token by token.

Ref: DeepSeek-V3 (2412.19437). The first such layer drafts every token of a round, from its own states after the first.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from layerskip.drafters.eagle.state_head import StateHead, StateText
from layerskip.engines.states import StatesEngine
from layerskip.huggingface.growing_keys import over_growing_keys
from layerskip.huggingface.kv_cache import SharedLengthCache
from layerskip.huggingface.mtp import final_norm


class MtpHead(StateHead):
    """The first layer of an `MtpModel`, in Transformers' own modules. It reads states that the target has normed, and
    what it gives is normed too."""

    def __init__(self, mtp: Any, model: Any, fingerprint: str) -> None:
        """model: the target, whose embeddings and positions it shares."""
        self.fingerprint = fingerprint
        self.layer, self.rotary, self.config = mtp.layers[0], mtp.rotary_emb, mtp.config
        self._final_norm = final_norm(model)
        self._vocab_size = int(model.get_output_embeddings().weight.shape[0])

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.layer.parameters())

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

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

    def rollouts(self, states: torch.Tensor, embedded: torch.Tensor, depth: int, first: int) -> list[torch.Tensor]:
        """See `StateHead`. Keys of step d are kept behind those of the steps before, as a tree's are."""
        count, num_rows = len(states), len(states) - first
        text = self.new_text(count + depth * num_rows)
        found = [text.run(self.enter(embedded, self.join(states)), 0)[first:]]
        rows = torch.arange(first, count, device=states.device).unsqueeze(1)
        places, own = torch.arange(count, device=states.device), torch.arange(num_rows, device=states.device)
        for d in range(1, depth + 1):
            # Position t has seen the target's states up to t - d, and behind those one drafted row of each step since.
            seen = [places <= rows - d, *(own == rows - first - (d - step) for step in range(1, d + 1))]
            x = self.enter(embedded[first:], F.pad(found[-1], (0, 0, 1, 0))[:-1])
            found.append(text.run_rows(x, slice(first, count), count + (d - 1) * num_rows, torch.cat(seen, dim=1)))
        return found


class MtpText(StateText):
    """See `StateText`. Positions are the tokens' own, one behind those of the states, as in training."""

    def __init__(self, head: MtpHead, capacity: int) -> None:
        self.head = head
        self._cache = SharedLengthCache([None], capacity)

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return cast(torch.Tensor, self._cache.layers[0].keys)

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
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
        """See `StateText`."""
        layer, num_rows = self.head.layer, len(x)
        self._cache.rollback_to(0)
        self._cache.advance(start)
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=x.device)
        ids, hidden = (positions + 1).unsqueeze(0), None
        if mask is None and num_rows > 1:
            places = torch.arange(num_rows, device=x.device)
            mask = places <= places.unsqueeze(1)
        if mask is not None:
            hidden = torch.full(mask.shape, torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
            hidden = hidden.masked_fill(mask, 0.0)[None, None]
        with over_growing_keys((x.device,)):
            out = layer.mtp_block(
                x.unsqueeze(0),
                attention_mask=hidden,
                position_embeddings=self.head.rotary(x, position_ids=ids),
                position_ids=ids,
                past_key_values=self._cache,
            )
        normed: torch.Tensor = layer.post_norm(out)[0]
        return normed
