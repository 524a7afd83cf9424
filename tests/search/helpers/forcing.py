"""Teacher forcing and step times that need no model: agreement follows from the mask by a formula."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, WrongDraft
from layerskip.config.decode_config import DraftedBy, DraftWeights
from layerskip.decoding.stats import DecodeStats

READING_S = 0.2
"""Of six texts."""


class FakeForcing:
    """A draft is right where a hash of the text's place lies below the mask's agreement, and as sure as that."""

    keys = "target"

    def __init__(self, texts: Sequence[ForcedText], tick: Callable[[float], None] = lambda _seconds: None) -> None:
        self._tick = tick
        self.masks: list[DraftedBy] = []
        """Which were read, in turn."""
        self.texts = tuple(texts)
        self.lengths = np.array([len(text.continuation_ids) for text in texts])
        self._luck = np.zeros((len(texts), int(self.lengths.max())))
        for i, text in enumerate(texts):
            for k in range(len(text.continuation_ids)):
                self._luck[i, k] = chance(f"{text.prompt_ids} {k}")
        self._is_row = np.arange(self._luck.shape[1]) < self.lengths[:, None]
        self.target_probs = (self._is_row * (1.0 - 0.9 * self._luck**4)).astype(np.float32)

    @property
    def num_readings(self) -> int:
        return len(self.masks)

    def read(self, mask: DraftedBy, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        self.masks.append(mask)
        self._tick(READING_S * len(self.texts) / 6)
        agreement = true_agreement(mask)
        accepted = (self._luck < agreement).astype(np.float32)
        for i, length in enumerate(self.lengths):
            accepted[i, length - 1 :] = 0.0
        sure = np.clip(1.0 - self._luck * (1.2 - 0.4 * agreement), 0.0, 1.0)
        confidence = (self._is_row * sure).astype(np.float32)
        stacked = [np.repeat(one[None], depth + 1, axis=0) for one in (accepted, confidence)]
        # Where the draft is wrong, the text's token is its second choice every other time.
        ranks = np.where(stacked[0] > 0, 0, 1 + 9 * (np.arange(stacked[0].shape[2]) % 2)).astype(np.uint8)
        reading = DraftReadings(stacked[0], stacked[1], np.zeros(stacked[0].shape, dtype=np.int64), ranks)
        return reading if texts is None else reading.select(texts)

    def overrun(self, mask: SkipMask, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        return [one.room if threshold == 0.0 else 1 for one in wrong]


@dataclass
class FakeTimer:
    """A target step of 10 ms; a draft step costs 5 % of it and what it keeps; verifying n drafts 3 % more each."""

    step_s: float = 0.01
    verify_share: float = 0.03

    def verify_s(self, text_ids: Sequence[int], counts: Sequence[int]) -> list[float]:
        return [self.step_s * (1 + self.verify_share * (n - 1)) for n in counts]

    def draft_s(
        self, text_ids: Sequence[int], masks: Sequence[SkipMask], *, gamma: int, threshold: bool
    ) -> list[float]:
        return [self.step_s * (0.05 + 0.95 * kept_share(mask)) + (1e-5 if threshold else 0.0) for mask in masks]


def true_agreement(mask: DraftedBy) -> float:
    """The first and the last sixth of the layers are hard to do without, the others nearly free. Trained weights are
    right in two of three places."""
    if isinstance(mask, DraftWeights):
        return 2 / 3
    edge = max(1, mask.num_layers // 6)
    inner = range(edge, mask.num_layers - edge)
    outer = [i for i in range(mask.num_layers) if i not in inner]
    cheap = sum(mask.attention[i] + mask.mlp[i] for i in inner)
    dear = sum(mask.attention[i] + mask.mlp[i] for i in outer)
    return max(0.0, 1.0 - 0.05 * cheap / max(1, 2 * len(inner)) - 0.5 * dear)


def kept_share(mask: SkipMask) -> float:
    return 1.0 - mask.num_skipped / (2 * mask.num_layers)


def simulate(forcing: FakeForcing, text: int, config: DecodeConfig, max_new_tokens: int) -> DecodeStats:
    """Live decoding of one text, written out step by step: what replay must reproduce."""
    reading = forcing.read(config.skip_mask)
    stats = DecodeStats()
    emitted, length = 1, int(forcing.lengths[text])
    while emitted < length:
        alone = forcing.target_probs[text, emitted - 1] < config.target_threshold or max_new_tokens - emitted <= 1
        if alone or config.gamma == 0:
            stats.num_target_only += 1
            emitted += 1
            continue
        drafted = accepted = 0
        right = True
        for k in range(min(config.gamma, max_new_tokens - emitted - 1)):
            row = min(emitted - 1 + k, reading.accepted.shape[2] - 1)
            drafted += 1
            right = right and bool(reading.accepted[0, text, row])
            accepted += right
            if reading.confidence[0, text, row] < config.draft_threshold:
                break
        stats.num_rounds += 1
        stats.num_drafted += drafted
        stats.num_accepted += accepted
        emitted += accepted + 1
    return stats


def chance(text: str) -> float:
    """Between 0 and 1, from the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
