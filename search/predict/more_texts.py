"""More texts: what configs are predicted on besides the texts that trials decode, from the same tuning prompts.

A search that looks at a few short texts finds configs that suit these texts. A reading of a further text costs a
fraction of a millisecond to some, no clock has to be watched, and nothing is measured on it, so there can be many:
tuning prompts that no trial uses, and beginnings of plain-text ones, each continued by the target. Held-out
prompts are never touched.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layerskip.analysis.teacher_forcing import ForcedText
from layerskip.config.decode_config import DecodeConfig
from search.measure.decoder import Decoder
from search.study.prompts import EncodedPrompt, continuation_seed

MAX_MORE = 96
CUT_SHARES = (0.55, 0.85, 0.4, 0.7)
"""Of a prompt's tokens that a cut keeps; all prompts are cut at the first share before any at the second."""
MIN_CUT = 8
_MIN_CONTINUATION = 2
MAX_POSITIONS = 1 << 14
"""Of all more texts together, each padded to the longest: their keys and values are held in the device's memory."""


@dataclass(frozen=True)
class MoreText:
    """The beginning of a tuning prompt, or all of it, and the target's continuation."""

    place: int
    """Of the prompt among the tuning prompts."""
    num_tokens: int
    """Of the prompt's."""
    continuation_ids: tuple[int, ...]
    seed: int = 0
    """What a sampled continuation was drawn from."""

    def text(self, prompts: Sequence[EncodedPrompt]) -> ForcedText:
        """Prompt and continuation."""
        return ForcedText(prompts[self.place].ids[: self.num_tokens], self.continuation_ids, self.seed)


@dataclass(frozen=True)
class MoreOptions:
    """How many there may be, and how long making them may take."""

    num_layers: int
    max_new_tokens: int
    seed: int
    limit: int
    seconds: float


def make_more_texts(
    decoder: Decoder,
    prompts: Sequence[EncodedPrompt],
    used: Iterable[tuple[int, ...]],
    options: MoreOptions,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[MoreText, ...]:
    """Continue beginnings that are not in `used` until there are `options.limit` or the time is up.

    Texts that end before their second token are left out. Cost: a plain decoding each.
    """
    start = clock()
    plain = DecodeConfig.plain(options.num_layers)
    found: list[MoreText] = []
    longest = 0
    for place, num_tokens in beginnings(prompts, used, options.seed):
        if len(found) >= options.limit or clock() - start >= options.seconds:
            break
        length = max(longest, num_tokens + options.max_new_tokens)
        if (len(found) + 1) * length > MAX_POSITIONS:
            continue
        ids = prompts[place].ids[:num_tokens]
        seed = continuation_seed(options.seed, ids)
        out = decoder.decode(ids, plain, seed)
        if len(out.ids) >= _MIN_CONTINUATION:
            found.append(MoreText(place, num_tokens, tuple(out.ids), seed))
            longest = length
    return tuple(found)


def beginnings(
    prompts: Sequence[EncodedPrompt], used: Iterable[tuple[int, ...]], seed: int
) -> Iterator[tuple[int, int]]:
    """(Place of a prompt, tokens of it): whole prompts first, then cuts of plain text; no text twice, none of `used`.

    Chats are never cut: what is left of a template is nothing that a model is asked.
    """
    seen = set(used)
    order = np.random.default_rng([seed, len(prompts)]).permutation(len(prompts)).tolist()
    lengths = [(place, len(prompts[place].ids)) for place in order]
    for share in CUT_SHARES:
        cuts = ((place, int(share * len(prompts[place].ids))) for place in order if prompts[place].is_text)
        lengths += [(place, num_tokens) for place, num_tokens in cuts if num_tokens >= MIN_CUT]
    for place, num_tokens in lengths:
        ids = prompts[place].ids[:num_tokens]
        if ids not in seen:
            seen.add(ids)
            yield place, num_tokens


@dataclass(frozen=True)
class MoreTexts:
    """The texts that a study predicts on after the first ones."""

    num_reference: int = 0
    """Of the reference's, those after the first ones."""
    made: tuple[MoreText, ...] = ()

    def to_json(self) -> str:
        """One line, for a study's attributes. Prompts by their places: a study's fingerprint holds them fast."""
        rows = [[one.place, one.num_tokens, list(one.continuation_ids), one.seed] for one in self.made]
        return json.dumps({"num_reference": self.num_reference, "made": rows}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> MoreTexts:
        """The inverse of `to_json`."""
        data = json.loads(text)
        made = tuple(MoreText(place, num_tokens, tuple(ids), *seed) for place, num_tokens, ids, *seed in data["made"])
        return cls(data["num_reference"], made)
