"""Teacher forcing by ordinary masked forwards, for models where the target's past cannot stand in for the draft's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from layerskip.analysis.teacher_forcing.base import TeacherForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText, RowGeometry
from layerskip.config.skip_mask import SkipMask
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.huggingface.kv_cache import SharedLengthCache
from layerskip.rounds.sampling import SamplingParams


class OwnKeysForcing(TeacherForcing):
    """See `TeacherForcing`; `keys="own"`: the draft goes on from the target's prompt, and then from what it made of the
    continuation itself.

    Cost: per text a target forward at construction and a draft forward a reading. Memory: the target's keys and values.
    """

    keys = "own"

    def __init__(
        self,
        engine: EagerEngine | FusedEngine,
        texts: Sequence[ForcedText],
        sampling: SamplingParams | None = None,
    ) -> None:
        super().__init__(texts, engine.device, sampling)
        self._engine = engine
        self._caches: list[SharedLengthCache] = []
        for i, text in enumerate(texts):
            with engine.session(len(text.ids)):
                # In two pieces: a state can be taken back to where a forward began.
                first = engine.forward(torch.tensor(text.prompt_ids, device=engine.device))
                self._note_target(i, torch.cat([first, self._continued(i, None)]))
                self._caches.append(engine.cache)

    @property
    def nbytes(self) -> int:
        """See `TeacherForcing`."""
        caches = self._caches
        held = sum(one.bytes_per_position * one.num_positions + one.state_bytes for one in caches)
        return held + self._noise_bytes

    def logits(self, mask: SkipMask, rows: Sequence[RowGeometry]) -> Iterator[torch.Tensor]:  # noqa: ARG002
        """Raises: TypeError, as rows of a draft's own are not had."""
        raise TypeError("the draft's own keys tell nothing of other rows")

    def draft_logits(
        self,
        mask: SkipMask,
        depth: int = 0,  # noqa: ARG002
        texts: Sequence[int] | None = None,
    ) -> Iterator[torch.Tensor]:
        for i in range(len(self.texts)) if texts is None else texts:
            cache = self._caches[i]
            with self._engine.session_over(cache):
                cache.rollback_to(len(self.texts[i].prompt_ids))
                logits = self._continued(i, mask).unsqueeze(0)
            yield logits

    def _continued(self, i: int, mask: SkipMask | None) -> torch.Tensor:
        ids = self._continuations[i]
        return self._engine.forward(ids, mask, num_logits=len(ids))
