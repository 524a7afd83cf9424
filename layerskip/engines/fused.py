"""FusedEngine: lean decoder layers over the model's own weights, for Llama-like models.

Hugging Face's modules spend most of a small model's step between the matrix products. Here a layer is a dozen tensor
operations: one product for queries, keys and values, one for gate and up, residual additions inside the products,
cosines from a table, keys and values written straight into the shared cache, a few tokens' attention over each key head
once. How they are computed is a `LayerMaker`'s: by torch, or by kernels compiled for this CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from layerskip.config.skip_mask import DraftBits, SkipMask
from layerskip.engines.lean.layers import Attention, LayerMaker, Mlp, Norm, first_of
from layerskip.engines.lean.linear import DenseLinear, Linear, fused
from layerskip.engines.lean.models import (
    COMPILED_DECODERS,
    check_supported,
    embedding_scale,
    rotary_of,
    weight_bytes,
)
from layerskip.engines.lean.rotary import RotaryRows, num_rotated, rotary_rows, rotary_tables, rotation_of
from layerskip.engines.lean.weight_layout import TorchLayers
from layerskip.engines.native.experts import NativeExperts
from layerskip.engines.native.layers import NativeAttention, NativeLayers, NativeMlp, NativeRun, TextRows
from layerskip.engines.native.linear import NativeLinear, packed_bytes
from layerskip.engines.native.recurrent import NativeRecurrent, NativeState
from layerskip.engines.states import StatesEngine
from layerskip.engines.tree import DraftTree
from layerskip.huggingface.adapter import ALREADY_DECODING, ModelAdapter, UnsupportedModelError, widened
from layerskip.huggingface.growing_keys import over_growing_keys
from layerskip.huggingface.kv_cache import SharedLengthCache, first_visible
from layerskip.huggingface.memory import lack_of_room
from layerskip.huggingface.quantization.products import check_room
from layerskip.openmp import computing
from layerskip.rounds.preparation import ForwardPlan

LOG = logging.getLogger(__name__)


class FusedEngine(StatesEngine):
    """See `Engine`. The same numbers as `EagerEngine` up to rounding.

    Cost: a second copy of the linear layers' weights; compiled for this CPU, none where it would take more than half of
    the free memory. By torch of most of them (a single matrix stored by outputs is the model's own), on a CPU a third
    one of those of which that makes products of one row faster, and about half a second a shape to choose. The model
    itself is not touched.
    Raises: UnsupportedModelError for models of other classes and those with parts that these do not have, for one on
    several devices or offloaded, and by torch where the copy would take more than half of the free memory.
    """

    name = "fused"

    def __init__(self, adapter: ModelAdapter, *, compiled: bool = False, in_place: bool | None = None) -> None:
        """compiled: sublayers compiled for this CPU, where that can be, in place of torch's operations. in_place:
        whether those read the model's own weights; None: where memory has no room for the copy."""
        super().__init__(adapter)
        model: Any = adapter.model
        self.refusal = NativeLayers.refusal(adapter.device, adapter.dtype) if compiled else ""
        """Why they are not compiled, if that was asked for; None where they are."""
        check_supported(adapter, self.refusal)
        if self.refusal is None:
            if in_place is None and (lack := lack_of_room(weight_bytes(adapter, packed_bytes), adapter.device)):
                LOG.info("weights are read in place: a second copy needs %s", lack)
                in_place = True
            self.maker: LayerMaker = NativeLayers(in_place=bool(in_place))
        else:
            self.maker = TorchLayers(adapter.device, model_bytes=weight_bytes(adapter))
        decoder = adapter.decoder
        self.rotary = rotary_of(decoder)
        self.embedding: torch.Tensor = decoder.embed_tokens.weight.detach()
        self._embedding_scale = embedding_scale(decoder)
        self._rounded_layers: dict[DraftBits, list[tuple[Attention, Mlp]]] = {}
        self._heads: dict[tuple[int | None, str | None, bool], Linear] = {}
        """By `draft_vocab` and `draft_ids`, and whether of 8 bits."""
        try:
            self._make_layers()
        except ValueError as error:
            raise UnsupportedModelError(f"engine fused: {type(model).__name__}: {error}") from error
        if type(decoder).__name__ in COMPILED_DECODERS and not self.batch_invariant:
            raise UnsupportedModelError(
                f"engine fused: {type(decoder).__name__} with parts that are not compiled for a CPU"
            )
        attentions = [one for one, _ in self.layers if isinstance(one, Attention)]
        self._rotated = {one.rotation: one.head_dim for one in attentions}
        projects = any(isinstance(mlp, Mlp) and mlp.token_gate is not None for _, mlp in self.layers)
        self._token_projection = fused(self.maker.linear, decoder.per_layer_model_projection) if projects else None
        self._softcap: float | None = getattr(adapter.text_config, "final_logit_softcapping", None)
        scale = 1.0 / getattr(adapter.text_config, "logits_scaling", 1.0)
        self.norm = Norm(first_of(decoder, "norm", "embedding_norm", "final_layernorm"), scale=scale)
        self._no_skip = SkipMask.none(adapter.num_layers)
        own = [i for i in range(adapter.num_layers) if i not in adapter.sources]
        self._first_reader = own[-1] + 1
        """From this layer on all read others' keys, and leave nothing of a row for those after it."""
        self._runs: dict[tuple[SkipMask, range], NativeRun] = {}
        self._held: list[Any] = []
        """Of every layer keys and values (1, 2 * key heads, positions, head_dim), or a `NativeState`; as the former of
        the running session."""
        self._rotations: RotaryRows = {}

    @property
    def attention_backend(self) -> str:
        return super().attention_backend if self.refusal is not None else self.maker.description

    @cached_property
    def batch_invariant(self) -> bool:
        mixers = (NativeAttention, NativeRecurrent)
        return all(isinstance(one, mixers) and isinstance(two, NativeMlp | NativeExperts) for one, two in self.layers)

    def bytes_read(self, weight: torch.Tensor) -> int:
        packs = isinstance(self.maker, NativeLayers) and not self.maker.in_place
        return packed_bytes(weight) if packs else super().bytes_read(weight)

    def bits_refusal(self, bits: DraftBits) -> str | None:
        if self.refusal is None:  # compiled for this CPU
            return self._adapter.int8_refusal
        return super().bits_refusal(bits)

    @contextmanager
    def session(self, capacity: int) -> Iterator[None]:
        with self.session_over(self._adapter.new_cache(capacity)):
            yield

    @contextmanager
    def session_over(self, cache: SharedLengthCache) -> Iterator[None]:
        """A session on a cache of the caller's; buffers that it has already stay."""
        if self._cache is not None:
            raise RuntimeError(ALREADY_DECODING)
        with computing(self.device):
            self._cache, self._runs = cache, {}
            try:
                # Not around the yield: inference mode belongs to the thread, and the caller runs its own code in here.
                with torch.inference_mode():
                    self._make_position_table(cache.capacity)
                    self._allocate()
                yield
            finally:
                self._end_session()
                self._held, self._runs = [], {}

    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        return self.compute([Forward(self, input_ids, num_logits, mask)])[0]

    def verify_tree(self, input_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """See `Engine`."""
        return self.compute([Forward(self, input_ids, tree.num_rows, tree=tree)])[0]

    @torch.inference_mode()
    def compute(self, forwards: Sequence[Forward]) -> list[torch.Tensor]:
        """Logits (num_logits, V) of each; the weights are read once for all. Their caches advance.

        All under one mask, by engines over these weights that keep the states of the same layers.
        """
        mask, steps = forwards[0].mask, [one.engine._step(one) for one in forwards]
        x, gates = self._entered(_joined([one.ids for one in forwards]))
        if mask is None and self._keeps_states:
            kept = []
            for first, last in pairwise((-1, *self._kept_layers)):
                kept.append(x := self._run(x, gates, steps, self._no_skip, range(first + 1, last + 1)))
            for one, step, *rows in zip(forwards, steps, *(_split(every, steps) for every in kept), strict=True):
                one.engine._keep(step.start, rows)
        else:
            num_last, own = forwards[0].num_logits, len(self.layers)
            if len(steps) == 1 and num_last < steps[0].num_tokens:
                own = self._first_reader
            x = self._run(x, gates, steps, mask or self._no_skip, range(own))
            if own < len(self.layers):
                steps, x = [steps[0].last(num_last)], x[-num_last:]
                rest = None if gates is None else gates[-num_last:]
                x = self._run(x, rest, steps, mask or self._no_skip, range(own, len(self.layers)))
        for one in forwards:
            one.engine.cache.advance(one.ids.shape[0])
        if len(forwards) == 1:
            return [self.logits(x[-forwards[0].num_logits :], mask)]
        counts = [min(one.num_logits, one.ids.shape[0]) for one in forwards]
        ends = [rows[-count:] for rows, count in zip(_split(x, steps), counts, strict=True)]
        logits: Any = torch.split(self.logits(torch.cat(ends), mask), counts)
        return list(logits)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """(T, hidden): what comes to the first layer."""
        rows = F.embedding(ids, self.embedding)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def _entered(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(T, hidden): what comes to the first layer, and what the ids say to each, (T, numbers of all layers), see
        `TokenGate`."""
        x = self.embedded(ids)
        if self._token_projection is None:
            return x, None
        decoder = self._adapter.decoder
        of_ids = decoder.embed_tokens_per_layer(ids).view(len(ids), len(self.layers), -1)
        projected = self._token_projection(x) * decoder.per_layer_model_projection_scale
        normed = decoder.per_layer_projection_norm(projected.view(of_ids.shape))
        return x, ((normed + of_ids) * decoder.per_layer_input_scale).view(len(ids), -1)

    def logits(self, x: torch.Tensor, mask: SkipMask | None) -> torch.Tensor:
        """(T, V) of the last layer's states (T, hidden)."""
        return self.unembed_under(self.norm(x), mask or self._no_skip)

    def prepare_unembed(self, draft_vocab: int | None) -> None:
        self._head_of(self._as_drafts(draft_vocab))

    def unembed(self, hidden: torch.Tensor, draft_vocab: int | None = None) -> torch.Tensor:
        return self._widened(self._head_of(self._as_drafts(draft_vocab))(hidden), None)

    def _as_drafts(self, draft_vocab: int | None) -> SkipMask:
        """In 8 bits where sublayers are compiled for this CPU."""
        return self._no_skip.narrowed(draft_vocab).rounded(8 if self.refusal is None else None)

    def unembed_under(self, hidden: torch.Tensor, mask: SkipMask) -> torch.Tensor:
        """(T, V) of normed states, as a draft under this mask computes them."""
        logits = self._head_of(mask)(hidden)
        logits = logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap
        return self._widened(logits, self._adapter.ids_of(mask))

    def _widened(self, logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        count = self.head.num_outputs
        return logits if logits.shape[1] == count else widened(logits, count, ids)

    def layers_of(self, mask: SkipMask) -> list[tuple[Attention, Mlp]]:
        """Those that a draft under this mask computes with, skipped ones among them."""
        if (bits := mask.bits) is None:
            return self.layers
        if bits not in self._rounded_layers:
            check_room(self._adapter.matrices, bits)
            with self._preparing(), torch.inference_mode(mode=False), torch.no_grad():
                self._rounded_layers[bits] = self._made(self.maker.rounded(bits))
            self._num_made += 1
        return self._rounded_layers[bits]

    def _make_layers(self) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self.layers = self._made(self.maker)
            self.head = fused(self.maker.linear, self._adapter.head)
        self._rounded_layers, self._heads = {}, {(None, None, False): self.head}

    def round_weights(self) -> None:
        """Where sublayers are compiled for this CPU, compute everything with 8-bit copies from now on, in place of the
        ones that are kept: for a model that only drafts."""
        if self.refusal is None:
            self.maker = self.maker.rounded(8)
            self._make_layers()

    def _made(self, maker: LayerMaker) -> list[tuple[Attention, Mlp]]:
        adapter, made = self._adapter, []
        for i, (layer, window) in enumerate(zip(adapter.layers, adapter.windows, strict=True)):
            if i in adapter.recurrent_layers:
                mixer = maker.recurrent(layer)
            else:
                rotation = rotation_of(self.rotary, layer, window)
                mixer = maker.attention(layer, window, rotation, num_rotated(self.rotary, rotation))
            made.append((mixer, maker.mlp(layer)))
        return made

    def _head_of(self, mask: SkipMask) -> Linear:
        is_rounded = mask.bits is not None
        key = (mask.draft_vocab, mask.draft_ids, is_rounded)
        if key not in self._heads:
            own, rows = self._adapter.head, self._adapter.draft_rows(mask)
            in_place = isinstance(rows, slice) and not is_rounded
            if in_place and mask.draft_vocab is not None and isinstance(self.head, DenseLinear | NativeLinear):
                return self.head.first(mask.draft_vocab)
            bias = None if own.bias is None else own.bias.detach()[rows]
            maker = self.maker.rounded(8) if is_rounded else self.maker
            with self._preparing(), torch.inference_mode(mode=False), torch.no_grad():
                self._heads[key] = maker.linear([own.weight.detach()[rows]], bias)
            self._num_made += 1
        return self._heads[key]

    def prepare(self, plans: Iterable[ForwardPlan]) -> None:
        """See `Engine`: copies of weights that only some drafts compute with."""
        for mask in {plan.mask for plan in plans if plan.mask is not None}:
            self.prepare_draft(mask)

    def prepare_draft(self, mask: SkipMask) -> None:
        """Make what it needs that is not there yet."""
        self.layers_of(mask)
        self._head_of(mask)

    def _step(self, forward: Forward) -> _Step:
        start, tree = self.cache.length, forward.tree
        stop = start + forward.ids.shape[0]  # which `len` takes longer to tell
        if stop > self.cache.capacity:
            raise ValueError(f"cache: capacity is {self.cache.capacity} tokens, a forward needs {stop}")
        positions = slice(start, stop) if tree is None else tree.positions(start, self.device)
        return _Step(self._held, start, stop - start, rotary_rows(self._rotations, positions), tree)

    def _run(
        self, x: torch.Tensor, gates: torch.Tensor | None, steps: Sequence[_Step], mask: SkipMask, layers: range
    ) -> torch.Tensor:
        """(T, hidden) of all steps after these layers under the mask; keys and values of the new positions go into each
        one's cache."""
        parts = self.layers_of(mask)
        if self.batch_invariant:
            if (run := self._runs.get((mask, layers))) is None:
                run = self._runs[mask, layers] = self._native_run(mask, layers, parts)
            return run(x, [step.rows(layers, run.looking, x) for step in steps], gates)
        with over_growing_keys(self._adapter.placement.devices):
            for i in layers:
                attention, mlp = parts[i]
                if not mask.attention[i]:
                    by_step = zip(steps, _split(x, steps), strict=True)
                    x = _joined([step.through(attention, i, rows) for step, rows in by_step])
                if not mask.mlp[i]:
                    x = mlp.add_to(x)
        return x

    def _native_run(self, mask: SkipMask, layers: range, parts: Sequence[tuple[Attention, Mlp]]) -> NativeRun:
        """What is skipped is left out, but for keys and values that later layers read."""
        read = {i for i in self._adapter.sources.values() if i in layers and mask.attention[i]}
        return NativeRun(
            [
                (None if mask.attention[i] and i not in read else parts[i][0], None if mask.mlp[i] else parts[i][1])
                for i in layers
            ],
            [i - layers.start for i in read],
        )

    def _make_position_table(self, capacity: int) -> None:
        """Kept between runs."""
        if all(len(cos) < capacity for cos, _ in self._rotations.values()):
            self._rotations = self.rotations(capacity)

    def rotations(self, num_positions: int) -> RotaryRows:
        """Of all layers, at the first so many positions."""
        return rotary_tables(self.rotary, self.embedding[:1], num_positions, self._rotated)

    def _allocate(self) -> None:
        layers, self._held = self.cache.layers, []
        for i, (attention, _) in enumerate(self.layers):
            if i in self._adapter.sources:
                self._held.append(self._held[self._adapter.sources[i]])
                continue
            layer = layers[i]
            if isinstance(attention, NativeRecurrent):
                layers[i] = NativeState(attention, self.embedding.dtype)
                self._held.append(layers[i])
                continue
            if not layer.is_initialized:
                like = self.embedding.new_empty((1, attention.num_keys, 0, attention.head_dim))
                layer.lazy_initialization(like, like)
            self._held.append(layer.states)


@dataclass(eq=False, slots=True)
class Forward:
    """What one session of an engine computes next."""

    engine: FusedEngine
    ids: torch.Tensor
    """(T,)"""
    num_logits: int
    mask: SkipMask | None = None
    tree: DraftTree | None = None
    """Without one the tokens simply follow each other."""
    in_pieces: bool = False
    """Whether a batch may compute its first tokens before the others, as of a prompt."""


def _split(x: torch.Tensor, steps: Sequence[_Step]) -> tuple[torch.Tensor, ...]:
    """Each one's rows."""
    if len(steps) == 1:
        return (x,)
    rows: Any = torch.split(x, [step.num_tokens for step in steps])
    return tuple(rows)


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


class _Step:
    """What all layers of one forward share."""

    def __init__(
        self, held: Sequence[Any], start: int, num_tokens: int, rotary: RotaryRows, tree: DraftTree | None = None
    ) -> None:
        """held: see `FusedEngine`. rotary: of its rows."""
        self.held, self.start, self.stop, self.num_tokens = held, start, start + num_tokens, num_tokens
        self.rotary, self.tree = rotary, tree
        self._masks: dict[int | None, torch.Tensor] = {}

    def last(self, count: int) -> _Step:
        """Of its last rows alone."""
        rotary = {name: (cos[-count:], sin[-count:]) for name, (cos, sin) in self.rotary.items()}
        return _Step(self.held, self.stop - count, count, rotary)

    def through(self, attention: Attention, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Its rows (T, hidden) after this layer's attention."""
        rotary, look = self.rotary[attention.rotation], self.look(attention, x)
        return attention.add_to(x, x, rotary, self.held[layer], self.start, look)

    def rows(self, layers: range, looking: Sequence[Attention], x: torch.Tensor) -> TextRows:
        """For compiled layers, and those of them that differ in what they see."""
        looks = [(self.rotary[one.rotation], self.look(one, x)) for one in looking]
        return TextRows(self.num_tokens, self.start, [self.held[i] for i in layers], looks)

    def look(self, layer: Attention, x: torch.Tensor) -> tuple[int, torch.Tensor | None, bool]:
        """First key that any query sees, a mask over the keys from there (None = all), and `is_causal`."""
        window = layer.window
        first = first_visible(self.start, window)
        if self.tree is None and self.num_tokens == 1:
            return first, None, False
        may_be_causal = self.start == 0 or layer.causal_after_context
        if self.tree is None and may_be_causal and (window is None or self.stop <= window):
            return first, None, True
        if window not in self._masks:
            self._masks[window] = layer.look(self._visible(first, window, x.device), x.dtype)
        return first, self._masks[window], False

    def _visible(self, first: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(T, keys) boolean."""
        if self.tree is not None:
            return self.tree.visible(self.start, window, device)
        queries = torch.arange(self.start, self.stop, device=device).unsqueeze(1)
        keys = torch.arange(first, self.stop, device=device)
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)
