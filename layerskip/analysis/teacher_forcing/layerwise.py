"""Teacher forcing layer by layer on the fused engine: all texts at once, and no sublayer computed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from layerskip.analysis.teacher_forcing.base import TeacherForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText, RowGeometry
from layerskip.config.skip_mask import DraftBits, SkipMask
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean.layers import Attention
from layerskip.engines.lean.rotary import rotary_rows
from layerskip.huggingface.growing_keys import over_growing_keys
from layerskip.rounds.sampling import SamplingParams

_MAX_SCORES = 1 << 26
"""Attention scores (heads x queries x keys) computed at a time: 256 MiB in float32."""
CACHE_BYTES = 1 << 26
"""64 MiB: a draft that wins keeps few sublayers, so that a few dozen states serve most of what a search reads."""
_MOST_STATES = 256
"""However small they are: more would hardly ever be of use."""
_Sublayers = tuple[tuple[int, DraftBits | None], ...]
"""Those that were run, in order: 2 x layer, + 1 for the MLP; and of how many bits their weights were, None: as they
are."""


class LayerwiseForcing(TeacherForcing):
    """See `TeacherForcing`. With the target's keys and values in place, a row's hidden state depends on nothing but the
    sublayers that were run on it, so states are kept by the sequence of those and shared between masks: a mask that
    differs from a known one in its last sublayers costs these and the head.

    Cost at construction: one target forward over every text. Memory: the target's keys and values of all texts, and up
    to `cache_bytes` of hidden states.
    """

    keys = "target"

    def __init__(
        self,
        engine: FusedEngine,
        texts: Sequence[ForcedText],
        sampling: SamplingParams | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(texts, engine.device, sampling)
        self._engine = engine
        self.num_layers = len(engine.layers)
        self._no_skip = SkipMask.none(self.num_layers)
        self._capacity = max(len(text.ids) for text in texts)
        self._states: _KeptStates | None = None
        self._cache_bytes = cache_bytes
        self._layouts: dict[int, _Layout] = {}
        with torch.inference_mode():
            self._keep_target()

    @property
    def nbytes(self) -> int:
        """See `TeacherForcing`; the cache of hidden states counts as full."""
        return sum(one.nbytes for one in self._target_states) + self._cache_bytes + self._noise_bytes

    def embed(self) -> torch.Tensor:
        """Hidden states (rows, hidden) before layer 0; rows are the continuation tokens of all texts in order."""
        return self._layout(0).embedded

    def target(self, layer: int) -> torch.Tensor:
        """The target's hidden states after its first `layer` layers, 0..num_layers."""
        return self._state(_kept(self._no_skip)[: 2 * layer], 0).clone()

    def attention(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the attention sublayer of `layer`, residual included."""
        return self._run((2 * layer, None), hidden, self._layout(0))

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the MLP sublayer of `layer`, residual included."""
        return self._run((2 * layer + 1, None), hidden, self._layout(0))

    @torch.inference_mode()
    def _run(self, sublayer: tuple[int, DraftBits | None], hidden: torch.Tensor, layout: _Layout) -> torch.Tensor:
        """See `_Sublayers`."""
        number, bits = sublayer
        layer, is_mlp = divmod(number, 2)
        attention, mlp = self._engine.layers_of(self._no_skip.rounded(bits))[layer]
        return mlp.add_to(hidden) if is_mlp else self._attended(layer, attention, hidden, layout)

    def _attended(self, layer: int, part: Attention, hidden: torch.Tensor, layout: _Layout) -> torch.Tensor:
        queries, new = (one[0].transpose(0, 1) for one in part.project(hidden, *layout.rotary[part.rotation]))
        out = torch.empty_like(queries)
        for group in layout.groups(part.num_queries):
            rows, real, texts = layout.rows[group], layout.is_row[group], layout.places(group)
            own, others = queries[rows].transpose(1, 2), new[rows].transpose(1, 2)
            keys, values = torch.cat([self._target_states[layer][texts], others], dim=2).chunk(2, dim=1)
            with over_growing_keys((hidden.device,)):
                attended = part.attend(own, keys, values, layout.visible(part.window, group))
            out[rows[real]] = attended.transpose(1, 2)[real]
        return part.out.add_to(hidden, out.reshape(hidden.shape[0], -1))

    @torch.inference_mode()
    def logits(self, mask: SkipMask, rows: Sequence[RowGeometry]) -> Iterator[torch.Tensor]:
        layout = _Layout(self._engine, rows, self._capacity)
        hidden = layout.embedded
        for sublayer in _kept(mask):
            hidden = self._run(sublayer, hidden, layout)
        # Text by text: the logits of all at once would be gigabytes under a large vocabulary.
        for own in torch.split(self._engine.norm(hidden), [len(one.ids) for one in rows]):
            yield self._engine.unembed_under(own, mask)

    @torch.inference_mode()
    def draft_logits(
        self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None
    ) -> Iterator[torch.Tensor]:
        if texts is None:
            hidden = self._engine.norm(self._state(_kept(mask), depth))
            for rows in torch.split(hidden, ((depth + 1) * self.lengths).tolist()):
                yield self._engine.unembed_under(rows, mask).view(depth + 1, rows.shape[0] // (depth + 1), -1)
            return
        device = self._engine.device
        rows_of = [
            RowGeometry.of(text, depth, device) if i in texts else RowGeometry.from_lists([], [], [], [], device)
            for i, text in enumerate(self.texts)
        ]
        for i, logits in enumerate(self.logits(mask, rows_of)):
            if i in texts:
                yield logits.view(depth + 1, logits.shape[0] // (depth + 1), -1)

    @torch.inference_mode()
    def _state(self, kept: _Sublayers, depth: int) -> torch.Tensor:
        """Hidden states after these sublayers, from the longest known beginning; good until the next call.

        Only those of depth 0 are kept: deeper ones are read of a few texts at a time, and never again.
        """
        layout, known = self._layout(depth), 0
        hidden = layout.embedded
        if depth == 0:
            if self._states is None:
                self._states = _KeptStates(hidden, self._cache_bytes)
            known, found = self._states.longest(kept)
            hidden = hidden if found is None else found
        for n in range(known, len(kept)):
            hidden = self._run(kept[n], hidden, layout)
            if depth == 0 and self._states is not None:
                self._states.keep(kept[: n + 1], hidden)
        return hidden

    def _layout(self, depth: int) -> _Layout:
        if depth not in self._layouts:
            with torch.inference_mode():
                rows = [RowGeometry.of(text, depth, self._engine.device) for text in self.texts]
                self._layouts[depth] = _Layout(self._engine, rows, self._capacity)
        return self._layouts[depth]

    def _keep_target(self) -> None:
        """One target forward a text: its keys and values, padded to (P, 2 * heads, capacity, head_dim) per layer."""
        engine, count = self._engine, len(self.texts)
        self._target_states: list[torch.Tensor] = []
        for i, text in enumerate(self.texts):
            length, num_rows = len(text.ids), len(text.continuation_ids)
            with engine.session(length):
                ids = torch.tensor(text.ids, device=engine.device)
                logits = engine.forward(ids, num_logits=num_rows + 1)
                self._note_target(i, logits)
                for layer, buffers in enumerate(engine.cache.layers):
                    states = buffers.states[0]
                    if i == 0:
                        shape = (count, len(states), self._capacity, states.shape[2])
                        self._target_states.append(states.new_zeros(shape))
                    self._target_states[layer][i, :, :length] = states[:, :length]


class _KeptStates:
    """Hidden states by the sublayers that were run, so many bytes of them at most, one at least; the state longest
    unused makes room.

    They lie in one block that is taken up at once, so that memory is the same in the first hour and the last. Tensors
    of their own, kept for long among others that come and go, leave the heap full of holes: a search grew by a third
    in 200 trials.
    """

    def __init__(self, like: torch.Tensor, most_bytes: int) -> None:
        """All have the shape of `like`."""
        count = max(1, min(most_bytes // like.nbytes, _MOST_STATES))
        self._block = like.new_zeros((count, *like.shape))
        self._free = list(reversed(range(count)))
        self._places: OrderedDict[_Sublayers, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def longest(self, kept: _Sublayers) -> tuple[int, torch.Tensor | None]:
        """(How many of these sublayers the longest known beginning has, its states until the next `keep`)."""
        known = next((n for n in range(len(kept), 0, -1) if kept[:n] in self._places), 0)
        if not known:
            return 0, None
        self._places.move_to_end(kept[:known])
        return known, self._block[self._places[kept[:known]]]

    def keep(self, kept: _Sublayers, hidden: torch.Tensor) -> None:
        """A copy. Cost: one pass over it."""
        place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        self._block[place].copy_(hidden)
        self._places[kept] = place


class _Layout:
    """Where the rows of all texts stand: in one list (rows, hidden), text by text, for the products, and
    padded to (P, C) columns for attention."""

    def __init__(self, engine: FusedEngine, geometry: Sequence[RowGeometry], capacity: int) -> None:
        device = engine.device
        self._capacity = capacity
        some = [i for i, one in enumerate(geometry) if len(one.positions)]
        self._places = None if len(some) == len(geometry) else torch.tensor(some, device=device)
        self._geometry = [geometry[i] for i in some]
        lengths = torch.tensor([len(one.positions) for one in self._geometry], device=device)
        self._width = int(lengths.max())
        columns = torch.arange(self._width, device=device)
        self.is_row = columns < lengths.unsqueeze(1)
        starts = (lengths.cumsum(0) - lengths).unsqueeze(1)
        self.rows = starts + torch.minimum(columns, lengths.unsqueeze(1) - 1)
        positions = torch.cat([one.positions for one in geometry])
        self.rotary = rotary_rows(engine.rotations(int(positions.max()) + 1), positions)
        self.embedded = engine.embedded(torch.cat([one.ids for one in geometry]))
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def groups(self, num_heads: int) -> Iterator[slice]:
        """Texts with rows in groups whose attention scores fit the memory set aside for them."""
        num_texts = len(self._geometry)
        size = max(1, _MAX_SCORES // (num_heads * self._width * (self._capacity + self._width)))
        for start in range(0, num_texts, size):
            yield slice(start, min(start + size, num_texts))

    def places(self, group: slice) -> slice | torch.Tensor:
        """Which texts a group is of, among all texts."""
        return group if self._places is None else self._places[group]

    def visible(self, window: int | None, group: slice) -> torch.Tensor:
        """(P, 1, C, capacity + C) boolean, True = visible; padded columns see themselves, so that nothing is NaN."""
        key = (window, group.start)
        if key not in self._masks:
            padded = torch.eye(self._width, dtype=torch.bool, device=self.rows.device)
            mask = F.pad(padded, (self._capacity, 0)).repeat(group.stop - group.start, 1, 1)
            for out, one in zip(mask, self._geometry[group], strict=True):
                count = len(one.positions)
                out[:count, : self._capacity] = one.sees_target(self._capacity, window)
                out[:count, self._capacity : self._capacity + count] = one.sees_rows(window)
            self._masks[key] = mask.unsqueeze(1)
        return self._masks[key]


def _kept(mask: SkipMask) -> _Sublayers:
    """The sublayers that a draft runs."""
    pairs = enumerate(zip(mask.attention, mask.mlp, strict=True))
    return tuple((2 * i + part, mask.bits) for i, skips in pairs for part in (0, 1) if not skips[part])
