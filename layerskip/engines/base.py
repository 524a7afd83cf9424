"""The interface that every engine serves, and what the engines share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from layerskip.config.skip_mask import DraftBits, SkipMask
from layerskip.engines.tree import DraftTree
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.growing_keys import growing_keys_backend
from layerskip.huggingface.kv_cache import SharedLengthCache
from layerskip.huggingface.quantization.weights import stored_bytes
from layerskip.rounds.device_free_steps import DeviceFreeSteps
from layerskip.rounds.device_round import DeviceRound
from layerskip.rounds.preparation import ForwardPlan
from layerskip.rounds.round_work import RoundPlan
from layerskip.rounds.sampling import Sampler


class Engine(ABC):
    """One model and, inside `session`, one cache.

    One thing is not prepared: on a CPU the library generates code for a matrix and a number of rows when it first meets
    them, which takes a millisecond a matrix once in a process. Running every size beforehand would cost a user of a
    large model more than that.
    """

    name: str

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._cache: SharedLengthCache | None = None
        self.draft_weights: dict[str, Any] = {}
        """What drafts for this model, by its folder, as `DecodeConfig.draft_weights` names it; loaded once and kept."""
        self._num_made, self._making_s = 0, 0.0

    @property
    def device(self) -> torch.device:
        return self._adapter.device

    @property
    def attention_backend(self) -> str:
        """What computes attention in the steps of decoding; to be recorded with every number."""
        return growing_keys_backend(self._adapter.placement.devices)

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits are the same to the bit however many tokens its forward computes, drafts or a
        prompt's pieces."""
        return False

    def bytes_read(self, weight: torch.Tensor) -> int:
        """That a step reads of one of the model's parameters."""
        return stored_bytes(weight)

    def bits_refusal(self, bits: DraftBits) -> str | None:
        """What drafts with weights of so many bits need that there is not; None where they can be."""
        lack = self._adapter.int8_refusal
        return lack if lack is not None or bits == 8 else "sublayers compiled for the CPU"

    def draft_rows(self, mask: SkipMask) -> torch.Tensor | slice:
        """The token ids that a draft under this mask chooses among."""
        return self._adapter.draft_rows(mask)

    @property
    def may_draft(self) -> bool:
        """Whether drafts may pay now: not where many texts share a step, see `Batch`."""
        return True

    @property
    def cache(self) -> SharedLengthCache:
        """The running session's cache."""
        if self._cache is None:
            raise RuntimeError("no cache: use the engine inside `with engine.session(capacity)`")
        return self._cache

    @abstractmethod
    def session(self, capacity: int) -> AbstractContextManager[None]:
        """A fresh cache of `capacity` tokens; on exit it is freed and the model is as it was."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        """Logits (num_logits, V) of the last positions; the cache advances by len(input_ids)."""

    @property
    @abstractmethod
    def kept_layers(self) -> tuple[int, ...]:
        """Whose hidden states are kept in the running session; none unless a drafter reads them."""

    @property
    @abstractmethod
    def states(self) -> torch.Tensor:
        """Those, see `StatesEngine`."""

    @property
    def num_preparations(self) -> int:
        """How often it has recorded, compiled or planned something so far. See `StepClock`, which watches it."""
        return self._num_made

    @property
    def preparation_s(self) -> float:
        """Seconds that this took so far."""
        return self._making_s

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Count its seconds as those of a preparation."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._making_s += time.perf_counter() - start

    @abstractmethod
    def prepare(self, plans: Iterable[ForwardPlan]) -> None:
        """Record, compile and plan all that these forwards need, so that they only run.

        In a session, before the prompt's forward. Nothing where an engine does none of that.
        """

    @abstractmethod
    def verify_tree(self, input_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """Logits (R, V) of the whole model for the tree's rows; the cache advances by R, in the order of the rows.

        Not of every model, see `tree_refusal`.
        """

    @abstractmethod
    def prepare_trees(self, starts: range, most: int) -> None:
        """As `prepare`: for trees of up to `most` tokens besides the last emitted one, with so many in the cache."""

    @abstractmethod
    def keep_rows(self, sources: Sequence[int], place: int) -> None:
        """What rows left at these positions of the cache, ascending, stands at `place` and after it from now on."""

    def make_round(self, plan: RoundPlan, sampler: Sampler) -> DeviceRound | None:  # noqa: ARG002
        """Rounds under this plan on the device; None where they are the host's work."""
        return None

    def make_free_steps(self) -> DeviceFreeSteps | None:
        """Plain greedy steps that leave their tokens on the device; None where each is a forward of its own."""
        return None

    def synchronize(self) -> None:
        """Wait for the device; before every clock read."""
        for device in self._adapter.placement.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()
