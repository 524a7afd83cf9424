"""Teacher forcing by ordinary masked forwards, for models where the target's past cannot stand in for the draft's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from layerskip.analysis.teacher_forcing.base import TeacherForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText, RowGeometry
from layerskip.config.skip_mask import SkipMask
from layerskip.engines.base import Engine
from layerskip.rounds.sampling import SamplingParams


class OwnKeysForcing(TeacherForcing):
    """See `TeacherForcing`; `keys="own"`: the draft goes on from the target's prompt, and then from what it made of the
    continuation itself.

    Cost: per text a target forward at construction and a draft forward a reading, which begins with a copy of what the
    target made of the prompt. Memory: that, of all texts.
    """

    keys = "own"

    def __init__(self, engine: Engine, texts: Sequence[ForcedText], sampling: SamplingParams | None = None) -> None:
        super().__init__(texts, engine.device, sampling)
        self._engine = engine
        self._prompts: list[list[tuple[torch.Tensor, ...]]] = []
        for i, text in enumerate(texts):
            with engine.session(len(text.ids)):
                first = engine.forward(torch.tensor(text.prompt_ids, device=engine.device))
                self._prompts.append(engine.cache.rows(len(text.prompt_ids)))
                self._note_target(i, torch.cat([first, self._continued(i, None)]))

    @property
    def nbytes(self) -> int:
        """See `TeacherForcing`."""
        kept = sum(one.nbytes for prompt in self._prompts for layer in prompt for one in layer)
        return kept + self._noise_bytes

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
            text = self.texts[i]
            with torch.inference_mode(), self._engine.session(len(text.ids)):
                self._engine.cache.fill(self._prompts[i], len(text.prompt_ids))
                logits = self._continued(i, mask).unsqueeze(0)
            yield logits

    def _continued(self, i: int, mask: SkipMask | None) -> torch.Tensor:
        ids = self._continuations[i]
        return self._engine.forward(ids, mask, num_logits=len(ids))
