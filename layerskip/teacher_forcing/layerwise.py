"""Teacher forcing layer by layer on the fused engine: all texts at once, and no sublayer computed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean_layers import rotary_table
from layerskip.skip_mask import SkipMask
from layerskip.teacher_forcing.base import ForcedText, TeacherForcing

_MAX_SCORES = 1 << 26
"""Attention scores (heads x queries x keys) computed at a time: 256 MiB in float32."""
CACHE_BYTES = 1 << 28


class LayerwiseForcing(TeacherForcing):
    """See `TeacherForcing`. With the target's keys and values in place, a row's hidden state depends on nothing but the
    sublayers that were run on it, so states are kept by the sequence of those and shared between masks: a mask that
    differs from a known one in its last sublayers costs these and the head.

    Cost at construction: one target forward over every text. Memory: the target's keys and values of all texts, and up
    to `cache_bytes` of hidden states.
    """

    keys = "target"

    def __init__(self, engine: FusedEngine, texts: Sequence[ForcedText], *, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(texts, engine.device)
        self._engine = engine
        self.num_layers = len(engine.layers)
        self._capacity = max(len(text.ids) for text in texts)
        self._states: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._max_states = 0
        with torch.inference_mode():
            self._keep_target()
            self._make_rows()
            first = F.embedding(torch.cat(self._continuations), engine.embedding)
        self._max_states = max(2, cache_bytes // first.nbytes)
        self._states[()] = first

    def embed(self) -> torch.Tensor:
        """Hidden states (rows, hidden) before layer 0; rows are the continuation tokens of all texts in order."""
        return self._states[()]

    def target(self, layer: int) -> torch.Tensor:
        """The target's hidden states after its first `layer` layers, 0..num_layers."""
        return self._state(tuple(range(2 * layer)))

    @torch.inference_mode()
    def attention(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the attention sublayer of `layer`, residual included."""
        part = self._engine.layers[layer][0]
        queries, keys, values = part.project(hidden, self._cos, self._sin)
        out = torch.empty_like(queries)
        for group in self._groups(part.num_queries):
            rows, target_keys = self._rows[group], self._keys[layer][group]
            padded = [one[rows].transpose(1, 2) for one in (queries, keys, values)]
            attended = part.attend(
                padded[0],
                torch.cat([target_keys, padded[1]], dim=2),
                torch.cat([self._values[layer][group], padded[2]], dim=2),
                self._visible(part.window, group),
            )
            real = self._is_row[group]
            out[rows[real]] = attended.transpose(1, 2)[real]
        return part.out.add_to(hidden, out.reshape(hidden.shape[0], -1))

    @torch.inference_mode()
    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the MLP sublayer of `layer`, residual included."""
        return self._engine.layers[layer][1].add_to(hidden)

    @torch.inference_mode()
    def draft_logits(self, mask: SkipMask) -> Iterator[torch.Tensor]:
        pairs = enumerate(zip(mask.attention, mask.mlp, strict=True))
        kept = tuple(2 * i + part for i, skips in pairs for part in (0, 1) if not skips[part])
        hidden = self._engine.norm(self._state(kept))
        for rows in torch.split(hidden, self.lengths.tolist()):
            yield self._engine.head(rows)

    @torch.inference_mode()
    def target_logits(self) -> Iterator[torch.Tensor]:
        hidden = self._engine.norm(self.target(self.num_layers))
        for rows, first in zip(torch.split(hidden, self.lengths.tolist()), self._prompt_logits, strict=True):
            yield torch.cat([first, self._engine.head(rows)])

    @torch.inference_mode()
    def _state(self, kept: tuple[int, ...]) -> torch.Tensor:
        """Hidden states after these sublayers (2 x layer, + 1 for the MLP), from the longest known beginning."""
        known = next(n for n in range(len(kept), -1, -1) if kept[:n] in self._states)
        self._states.move_to_end(kept[:known])
        hidden = self._states[kept[:known]]
        for n in range(known, len(kept)):
            layer, is_mlp = divmod(kept[n], 2)
            hidden = self.mlp(layer, hidden) if is_mlp else self.attention(layer, hidden)
            self._remember(kept[: n + 1], hidden)
        return hidden

    def _remember(self, kept: tuple[int, ...], hidden: torch.Tensor) -> None:
        self._states[kept] = hidden
        if len(self._states) > self._max_states:
            self._states.move_to_end(())  # where every mask begins
            self._states.popitem(last=False)

    def _keep_target(self) -> None:
        """One target forward a text: its keys and values, padded to (P, heads, capacity, head_dim) per layer."""
        engine, count = self._engine, len(self.texts)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._prompt_logits: list[torch.Tensor] = []
        for i, text in enumerate(self.texts):
            length, num_rows = len(text.ids), len(text.continuation_ids)
            with engine.session(length):
                ids = torch.tensor(text.ids, device=engine.device)
                logits = engine.forward(ids, num_logits=num_rows + 1)
                self._note_target(i, logits)
                self._prompt_logits.append(logits[:1].clone())
                for layer, buffers in enumerate(engine.cache.layers):
                    if i == 0:
                        shape = (count, buffers.keys.shape[1], self._capacity, buffers.keys.shape[3])
                        self._keys.append(buffers.keys.new_zeros(shape))
                        self._values.append(buffers.values.new_zeros(shape))
                    self._keys[layer][i, :, :length] = buffers.keys[0, :, :length]
                    self._values[layer][i, :, :length] = buffers.values[0, :, :length]

    def _make_rows(self) -> None:
        """Which row stands where in the padded (P, T) layout, at which position; and the rotations of all rows."""
        device = self._engine.device
        lengths = torch.tensor(self.lengths, device=device)
        columns = torch.arange(self.shape[1], device=device)
        self._is_row = columns < lengths.unsqueeze(1)
        starts = lengths.cumsum(0) - lengths
        self._rows = starts.unsqueeze(1) + torch.minimum(columns, lengths.unsqueeze(1) - 1)
        prompts = torch.tensor([len(text.prompt_ids) for text in self.texts], device=device)
        self._positions = prompts.unsqueeze(1) + torch.minimum(columns, lengths.unsqueeze(1) - 1)
        cos, sin = rotary_table(self._engine.rotary, self._engine.embedding[:1], self._capacity)
        positions = self._positions[self._is_row]
        self._cos, self._sin = cos[positions], sin[positions]

    def _groups(self, num_heads: int) -> Iterator[slice]:
        """Texts in groups whose attention scores fit the memory set aside for them."""
        num_texts, width = self.shape
        size = max(1, _MAX_SCORES // (num_heads * width * (self._capacity + width)))
        for start in range(0, num_texts, size):
            yield slice(start, min(start + size, num_texts))

    def _visible(self, window: int | None, group: slice) -> torch.Tensor:
        """(P, 1, T, capacity + T) boolean: the target's keys before the row's position, and the row's own key."""
        keys = torch.arange(self._capacity, device=self._engine.device)
        positions = self._positions[group].unsqueeze(-1)
        seen = keys < positions
        if window is not None:
            seen = seen & (keys > positions - window)
        width = self.shape[1]
        own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(len(seen), width, width)
        return torch.cat([seen, own], dim=-1).unsqueeze(1)
