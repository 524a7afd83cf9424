"""Plain greedy decoding that does not wait for its tokens: the baseline that leaves a GPU no pause between two steps.

A step takes the token before it from where the step before has left it, on the device. The host reads tokens together,
now and then to see whether the text has ended, else at the end. The price: nothing can be streamed token by token, and
steps past the end of the text are computed for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerskip.decoding.loop import DecodeRequest
from layerskip.engines import Engine
from layerskip.rounds.device_free_steps import greedy_token
from layerskip.rounds.preparation import ForwardPlan

READ_EVERY = 16
"""Tokens that are read together where a token may end the text."""


class FreeRunning:
    """One request, decoded greedily and plainly: the tokens are those of the decode loop with gamma 0.

    `should_stop` of the request is not asked. Memory: one cache of prompt + max_new_tokens positions.
    """

    def __init__(self, engine: Engine, request: DecodeRequest, *, read_every: int = READ_EVERY) -> None:
        if read_every < 1:
            raise ValueError(f"read_every: must be at least 1, got {read_every}")
        self._engine = engine
        self._request = request
        self._read_every = read_every if request.eos_token_ids else request.max_new_tokens
        self._steps = engine.make_free_steps() or _EngineSteps(engine)
        self._capacity = len(request.prompt_ids) + request.max_new_tokens

    def prepare(self) -> None:
        """Have the engine record or compile what `run` may need; that outlives the session which this opens."""
        with self._engine.session(self._capacity):
            self._steps.prepare(self._starts)

    def run(self) -> Iterator[list[int]]:
        """Yields tokens as the host reads them: the prompt's own first one, then some at a time, to the end."""
        num_left = self._request.max_new_tokens - 1
        with self._engine.session(self._capacity):
            self._steps.prepare(self._starts)
            ids = [self._first_token()]
            yield ids
            self._steps.begin(ids[0])
            while num_left and not self._request.eos_token_ids.intersection(ids):
                count = min(self._read_every, num_left)
                self._steps.run(count)
                ids = self._up_to_its_end(self._steps.read(count))
                num_left -= count
                yield ids

    @property
    def _starts(self) -> range:
        """Tokens in the cache before a step, the prompt's forward apart."""
        return range(len(self._request.prompt_ids), self._capacity - 1)

    @torch.inference_mode()
    def _first_token(self) -> int:
        ids = torch.tensor(list(self._request.prompt_ids), device=self._engine.device)
        return int(greedy_token(self._engine.forward(ids)))

    def _up_to_its_end(self, ids: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(ids) if token in self._request.eos_token_ids), len(ids))
        return ids[: end + 1]


class _EngineSteps:
    """See `DeviceFreeSteps`: one forward a step, for engines that have nothing better."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: list[torch.Tensor] = []

    def prepare(self, starts: range) -> None:
        self._engine.prepare([ForwardPlan(None, 1, starts)] if starts else [])

    def begin(self, token: int) -> None:
        self._tokens = [torch.tensor([token], device=self._engine.device)]

    @torch.inference_mode()
    def run(self, count: int) -> None:
        for _ in range(count):
            self._tokens.append(greedy_token(self._engine.forward(self._tokens[-1])))

    def read(self, count: int) -> list[int]:
        ids: list[int] = torch.cat(self._tokens[-count:]).tolist()
        return ids
