"""CudaGraphEngine: forwards and whole rounds recorded as CUDA graphs on static buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.engines.base import Engine
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.cuda_graph.static_step import MIN_VISIBLE, Branches, StaticExecutor, num_visible_for
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import MAX_BYTES, MAX_GRAPHS, GraphPool, Recorder
from layerskip.engines.tree import DraftTree
from layerskip.huggingface.adapter import ALREADY_DECODING, ModelAdapter
from layerskip.huggingface.kv_cache import DeviceNumber, StaticCache
from layerskip.rounds.device_free_steps import DeviceFreeSteps
from layerskip.rounds.device_round import DeviceRound
from layerskip.rounds.preparation import ForwardPlan
from layerskip.rounds.round_work import Piece, RoundBuffers, RoundPlan
from layerskip.rounds.sampling import Sampler

_TREE_ROWS = 8
"""Trees are recorded in multiples of so many rows, the last one repeated: fewer recordings, and rows are cheap where
graphs are."""
_ROWS_MOVED = 16
"""By one recording, likewise."""


@dataclass(frozen=True)
class GraphOptions:
    """Bounds and sizes."""

    max_graphs: int = MAX_GRAPHS
    max_bytes: int = MAX_BYTES
    """Device memory that recordings may take."""
    granule: int = 1024
    """The cache's buffers have a multiple of this many positions: a new size voids every recording."""
    min_visible: int = MIN_VISIBLE
    max_tokens: int = 16
    """Longest forward that is recorded; longer ones are prompts, or so rare that a recording would not pay."""


class CudaGraphEngine(Engine):
    """See `Engine`. A forward, or a whole round, is one launch instead of a thousand.

    Recorded per (mask, number of tokens, visible positions), by `prepare` or else at the first use, and kept between
    texts as long as the cache's buffers last: those are kept too and grow only when a longer text comes. The logits
    that `forward` returns are the caller's own; inside, recordings write to buffers that the next one overwrites.

    Cost: the executor's weights; a cache of the longest text so far; recordings within the bounds of `options`.
    `close` frees the latter two.
    """

    name = "cuda_graph"

    def __init__(
        self, adapter: ModelAdapter, executor: StaticExecutor, recorder: Recorder, options: GraphOptions | None = None
    ) -> None:
        super().__init__(adapter)
        self.options = options or GraphOptions()
        self.pool = GraphPool(recorder, max_graphs=self.options.max_graphs, max_bytes=self.options.max_bytes)
        self.executor = executor
        self.num_layers = adapter.num_layers
        self._no_skip = SkipMask.none(adapter.num_layers)
        self._static: StaticCache | None = None
        self._running = False
        self._kept_layers: tuple[int, ...] = ()
        self._buffers: dict[tuple[int, bool], RoundBuffers] = {}
        self._trees: dict[int, _TreeBuffers] = {}
        """By rows."""
        self.beside_cache: dict[str, Any] = {}
        """What drafters keep, as long as the cache's buffers stay."""
        with torch.inference_mode():
            self.token, self.limit = DeviceNumber(self.device), DeviceNumber(self.device)
            self._ids = torch.zeros(self.options.max_tokens, dtype=torch.long, device=self.device)
            self._offsets = torch.arange(self.options.max_tokens, device=self.device)
            self._moves = torch.zeros((2, _ROWS_MOVED), dtype=torch.long, device=self.device)
            """Where rows stand, and where they are to."""
            self._logits = torch.zeros(
                (self.options.max_tokens, executor.vocab_size), dtype=executor.logits_dtype, device=self.device
            )

    @property
    def cache(self) -> StaticCache:
        if self._static is None or not self._running:
            raise RuntimeError("no cache: use the engine inside `with engine.session(capacity)`")
        return self._static

    @property
    def attention_backend(self) -> str:
        return self.executor.attention_backend

    @property
    def lean(self) -> FusedEngine | None:
        """The engine whose layers are recorded; None where it is the model's own modules."""
        return self.executor.fused if isinstance(self.executor, LeanExecutor) else None

    @contextmanager
    def session(self, capacity: int) -> Iterator[None]:
        if self._running:
            raise RuntimeError(ALREADY_DECODING)
        with torch.inference_mode():
            self._open_cache(capacity)
        with self.executor.session():
            self._running = True
            try:
                yield
            finally:
                self._running = False
                self._kept_layers = ()
                self.pool.let_go()

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        cache, num_tokens = self.cache, input_ids.shape[0]
        mask = self._no_skip if mask is None else mask
        stop = cache.length + num_tokens
        if stop > cache.capacity:
            raise ValueError(f"cache: capacity is {cache.capacity} tokens, a forward needs {stop}")
        if cache.length <= cache.num_filled or num_tokens > self.options.max_tokens:  # a prompt, or the rest of one
            return self.executor.forward(input_ids, mask, num_logits)
        self._ids[:num_tokens].copy_(input_ids)
        cache.position_on_device()
        self.play(self._recorded_forward(mask, num_tokens, self.num_visible_for(stop), num_logits))
        cache.advance(num_tokens)
        return self._logits[:num_logits].clone()

    @property
    def num_preparations(self) -> int:
        """Recordings so far, and what the executor compiled, which it does while one of them is warmed up."""
        return self.pool.stats.num_captures + self.executor.num_compilations

    @property
    def preparation_s(self) -> float:
        """Of all recordings; compilations are within the one that needed them."""
        return self.pool.stats.capture_s

    @torch.inference_mode()
    def prepare(self, plans: Iterable[ForwardPlan]) -> None:
        """See `Engine`. What is prepared stays recorded until the session ends, whatever the bounds say."""
        self.cache.position_on_device()
        for plan in plans:
            if plan.num_tokens <= self.options.max_tokens:
                mask = self._no_skip if plan.mask is None else plan.mask
                self.executor.prepare_draft(mask)
                for num_visible in self.visible_sizes(plan.starts, plan.num_tokens):
                    self.prepare_piece(self._recorded_forward(mask, plan.num_tokens, num_visible, plan.num_logits))

    def _recorded_forward(self, mask: SkipMask, num_tokens: int, num_visible: int, num_logits: int) -> Piece:
        """From the ids' buffer to that of the logits, at the cache's position."""
        ids, logits, offsets = self._ids[:num_tokens], self._logits[:num_logits], self._offsets[:num_tokens]
        position = self.cache.position.tensor

        def work() -> None:
            logits.copy_(self.step(ids, position + offsets, mask, num_visible, num_logits))

        return Piece(("forward", mask, num_tokens, num_visible, num_logits), work, ())

    @torch.inference_mode()
    def verify_tree(self, input_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """See `Engine`."""
        cache, num_rows = self.cache, tree.num_rows
        stop, size = cache.length + num_rows, rounded_up(num_rows)
        if stop > cache.capacity:
            raise ValueError(f"cache: capacity is {cache.capacity} tokens, a forward needs {stop}")
        buffers = self._tree_buffers(size)
        buffers.ids[:num_rows].copy_(input_ids)
        buffers.ids[num_rows:] = input_ids[-1]
        buffers.table.copy_(tree.table(size))
        cache.position_on_device()
        self.play(self._recorded_tree(size, self.num_visible_for(cache.length + size)))
        cache.advance(num_rows)
        return buffers.logits[:num_rows].clone()

    @torch.inference_mode()
    def keep_rows(self, sources: Sequence[int], place: int) -> None:
        """See `Engine`. Cost: a launch for every 16 rows."""
        piece = self._prepared_moves()
        for first in range(0, len(sources), _ROWS_MOVED):
            some = sources[first : first + _ROWS_MOVED]
            moves = torch.tensor([list(some), list(range(place + first, place + first + len(some)))])
            self._moves.copy_(moves[:, torch.arange(_ROWS_MOVED).clamp(max=len(some) - 1)])
            self.play(piece)

    @torch.inference_mode()
    def prepare_trees(self, starts: range, most: int) -> None:
        """See `Engine`."""
        self.cache.position_on_device()
        self._prepared_moves()
        for size in recorded_sizes(most + 1):
            for num_visible in self.visible_sizes(starts, size):
                self.prepare_piece(self._recorded_tree(size, num_visible))

    def _prepared_moves(self) -> Piece:
        piece = self._recorded_moves()
        if self._key(piece) not in self.pool:
            self._moves.zero_()  # to where they stand: recorded moves are made, and moving twice is not moving once
        self.prepare_piece(piece)
        return piece

    def _recorded_tree(self, num_rows: int, num_visible: int) -> Piece:
        """From the tree's buffers to its logits, at the cache's position."""
        buffers, position = self._tree_buffers(num_rows), self.cache.position.tensor

        def work() -> None:
            depths, places, seen = buffers.table[:, 0], buffers.table[:, 1], buffers.table[:, 2:].bool()
            branches = Branches(position + places, seen)
            buffers.logits.copy_(
                self.step(buffers.ids, position + depths, self._no_skip, num_visible, num_rows, branches)
            )

        return Piece(("tree", num_rows, num_visible), work, ())

    def _recorded_moves(self) -> Piece:
        """What stands at some places of the cache, and the states where they are kept, to others."""
        layers, states = self.cache.layers, [self.states] if self._kept_layers else []

        def work() -> None:
            sources, places = self._moves[0], self._moves[1]
            for layer in layers:
                for buffer in (layer.keys, layer.values):
                    buffer.index_copy_(2, places, buffer.index_select(2, sources))
            for rows in states:
                rows.index_copy_(0, places, rows.index_select(0, sources))

        return Piece("moves", work, ())

    def _tree_buffers(self, num_rows: int) -> _TreeBuffers:
        if num_rows not in self._trees:
            logits = self._logits.new_zeros((num_rows, self.executor.vocab_size))
            table = torch.zeros((num_rows, 2 + num_rows), dtype=torch.long, device=self.device)
            self._trees[num_rows] = _TreeBuffers(torch.zeros_like(table[:, 0]), table, logits)
        return self._trees[num_rows]

    def make_round(self, plan: RoundPlan, sampler: Sampler) -> DeviceRound | None:
        """See `Engine`. None where the sampler looks at the text on the host, or is asked for log-probabilities."""
        if sampler.needs_host:
            return None
        self.executor.prepare_draft(plan.skip_mask)
        return DeviceRound(self, plan, sampler)

    def make_free_steps(self) -> DeviceFreeSteps:
        """See `Engine`."""
        return DeviceFreeSteps(self, self._no_skip.num_layers)

    # What drafting from hidden states needs, see `StatesEngine`; over lean layers alone. Steps and verifications of the
    # target are recorded with their states, drafts are not.

    @property
    def states(self) -> torch.Tensor:
        """See `StatesEngine`."""
        return self._lean_executor.fused.states

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """See `Engine`."""
        return self._kept_layers

    def keep_states(self, aux_layers: Sequence[int] = ()) -> None:
        """See `StatesEngine`; before anything is prepared, as what is recorded differs."""
        self._lean_executor.keep_states(aux_layers)
        self._kept_layers = self._lean_executor.fused.kept_layers

    def prepare_unembed(self, draft_vocab: int | None) -> None:
        """See `StatesEngine`."""
        self._lean_executor.fused.prepare_unembed(draft_vocab)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See `StatesEngine`."""
        return self._lean_executor.fused.embed(ids)

    def unembed(self, hidden: torch.Tensor, draft_vocab: int | None = None) -> torch.Tensor:
        """See `StatesEngine`."""
        return self._lean_executor.fused.unembed(hidden, draft_vocab)

    @property
    def _lean_executor(self) -> LeanExecutor:
        if not isinstance(self.executor, LeanExecutor):
            raise RuntimeError("hidden states: only lean layers hand them out here, not the model's own modules")
        return self.executor

    def close(self) -> None:
        """Free the recordings and the cache's buffers; the next session makes new ones."""
        if self._running:
            raise RuntimeError("this model is decoding; close its engine afterwards")
        self.pool.invalidate()
        self._static = None
        for kept in (self._buffers, self._trees, self.beside_cache):
            kept.clear()

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: SkipMask,
        num_visible: int,
        num_logits: int,
        branches: Branches | None = None,
    ) -> torch.Tensor:
        """See `StaticExecutor.step`."""
        with self.cache.static_step(positions if branches is None else branches.slots, num_visible):
            return self.executor.step(ids, positions, mask, num_visible, num_logits, branches)

    def play(self, piece: Piece) -> None:
        """See `RoundHost`."""
        self.pool.play(self._key(piece), piece.work, piece.preserve)

    def prepare_piece(self, piece: Piece) -> None:
        """See `RoundHost`."""
        self.pool.prepare(self._key(piece), piece.work, piece.preserve)

    def _key(self, piece: Piece) -> Hashable:
        """The same work is another recording where it keeps states."""
        return (piece.key, self._kept_layers) if self._kept_layers else piece.key

    def num_visible_for(self, num_positions: int, limit: int | None = None) -> int:
        """Positions a recorded step attends to when it must see `num_positions`, of as many as the cache has."""
        return num_visible_for(num_positions, limit or self.cache.num_positions, self.options.min_visible)

    def visible_sizes(self, starts: range, num_tokens: int, limit: int | None = None) -> list[int]:
        """All that `num_visible_for` may say of so many tokens after any of these numbers of cached ones."""
        sizes: list[int] = []
        while starts:
            sizes.append(self.num_visible_for(starts[0] + num_tokens, limit))
            starts = starts[max(0, sizes[-1] - num_tokens - starts[0]) + 1 :]
        return sizes

    def round_buffers(self, room: int, *, sampled: bool) -> RoundBuffers:
        """Always the same ones for the same arguments."""
        key = (room, sampled)
        if key not in self._buffers:
            self._buffers[key] = RoundBuffers(room, self.executor.vocab_size, self.device, sampled=sampled)
        return self._buffers[key]

    def _open_cache(self, capacity: int) -> None:
        """The static cache, empty, with room for `capacity` tokens; a new one if the present one is too small."""
        if capacity < 1:
            raise ValueError(f"capacity: must be at least 1, got {capacity}")
        if self._static is None or self._static.num_positions < capacity:
            self.pool.invalidate()
            self._static = None  # free the old buffers before the new ones are made
            self.beside_cache.clear()
            granule = self.options.granule
            static = StaticCache(self._adapter.windows, -(-capacity // granule) * granule, self.device)
            self.executor.use(static)
            self._static = static
        self._static.restart(capacity)


@dataclass(frozen=True)
class _TreeBuffers:
    """What trees of so many rows are verified from and leave."""

    ids: torch.Tensor
    table: torch.Tensor
    """See `DraftTree.table`."""
    logits: torch.Tensor


def rounded_up(num_rows: int) -> int:
    """As many as are recorded."""
    return -(-num_rows // _TREE_ROWS) * _TREE_ROWS


def recorded_sizes(most: int) -> range:
    """All that `rounded_up` may say of up to so many rows."""
    return range(_TREE_ROWS, rounded_up(most) + 1, _TREE_ROWS)
