"""DeviceFreeSteps: greedy steps of the target alone whose tokens stay on the device until they are asked for."""

from __future__ import annotations

from functools import partial

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.rounds.round_work import Piece, RoundHost
from layerskip.rounds.sampling import Sampler, SamplingParams

_GREEDY = Sampler(SamplingParams())


class DeviceFreeSteps:
    """Inside a session, each step after the one before. They are recorded, and read and write the text by position, in
    the cache's own buffer of it."""

    def __init__(self, host: RoundHost, num_layers: int) -> None:
        self._host = host
        self._no_skip = SkipMask.none(num_layers)

    @torch.inference_mode()
    def prepare(self, starts: range) -> None:
        """Record what steps after so many cached tokens need; before the prompt's forward."""
        cache = self._host.cache
        cache.position_on_device()
        for num_visible in self._host.visible_sizes(starts, 1):
            self._host.prepare_piece(self._piece(num_visible))

    @torch.inference_mode()
    def begin(self, token: int) -> None:
        """The text goes on after this token, which is not in the cache yet."""
        cache = self._host.cache
        cache.text[cache.length] = token

    @torch.inference_mode()
    def run(self, count: int) -> None:
        """So many steps. No wait for the device."""
        host, cache = self._host, self._host.cache
        start = cache.length
        if start + count > cache.capacity:
            raise ValueError(f"cache: capacity is {cache.capacity} tokens, {count} steps need {start + count}")
        cache.position_on_device()
        # Until the last step is launched: an exception in between must not leave a wrong belief.
        cache.position.distrust()
        for place in range(start, start + count):
            host.play(self._piece(host.num_visible_for(place + 1)))
        cache.moved_to(start + count)

    def read(self, count: int) -> list[int]:
        """The last so many tokens. One wait for the device."""
        cache = self._host.cache
        ids: list[int] = cache.text[cache.length - count + 1 : cache.length + 1].tolist()
        return ids

    def _piece(self, num_visible: int) -> Piece:
        position, text = self._host.cache.position.tensor, self._host.cache.text
        return Piece(("free step", num_visible), partial(self._step, position, text, num_visible), (position,))

    def _step(self, position: torch.Tensor, text: torch.Tensor, num_visible: int) -> None:
        """Device work alone, on buffers that stay, the same at every position."""
        logits = self._host.step(text.index_select(0, position), position, self._no_skip, num_visible, 1)
        position.add_(1)
        text.index_copy_(0, position, greedy_token(logits))


def greedy_token(logits: torch.Tensor) -> torch.Tensor:
    """(1,) token of (1, V) logits, chosen as the decode loop does."""
    return _GREEDY.shape(logits, ()).max(dim=-1).indices
