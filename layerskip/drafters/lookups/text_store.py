"""TextStore: earlier texts that a suffix drafter may look into, bounded, first in first out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from layerskip.config.lookup_settings import MAX_MATCH
from layerskip.drafters.lookups.token_index import Match, TokenIndex


class TextStore:
    """Keeps the latest texts up to `max_tokens` tokens in all. May be shared by threads.

    What is in a store is drafted from in other texts: give every user, or API key, a store of its own.

    Cost: `add` a hash a token, and as much for every token dropped; memory 100 to 400 bytes a token for each
    `min_match` that is looked with.
    """

    def __init__(self, max_tokens: int) -> None:
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens: must be a whole number of at least 1, got {max_tokens!r}")
        self.max_tokens = max_tokens
        self._texts: deque[list[int]] = deque()
        self._num_tokens = 0
        self._largest_id = 0
        self._indices: dict[int, TokenIndex] = {}
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Of all texts kept."""
        return self._num_tokens

    @property
    def largest_id(self) -> int:
        """Of all token ids ever added: a model with a smaller vocabulary cannot use this store."""
        return self._largest_id

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, ids: Sequence[int]) -> None:
        """Keep a text, its last `max_tokens` tokens at most, and drop the oldest ones that there is no room for.

        Raises: ValueError if it is not made of token ids.
        """
        kept = list(ids)[-self.max_tokens :]
        wrong = next((one for one in kept if type(one) is not int or one < 0), None)
        if wrong is not None:
            raise ValueError(f"ids: must be whole numbers of at least 0, got {wrong!r:.80}")
        if not kept:
            return
        with self._lock:
            self._largest_id = max(self._largest_id, max(kept))
            while self._texts and self._num_tokens + len(kept) > self.max_tokens:
                oldest = self._texts.popleft()
                self._num_tokens -= len(oldest)
                for index in self._indices.values():
                    index.drop_oldest(oldest)
            self._texts.append(kept)
            self._num_tokens += len(kept)
            for index in self._indices.values():
                index.add(kept)

    def match(self, text: Sequence[int], min_match: int, longest: int = MAX_MATCH) -> Match | None:
        """See `TokenIndex.match`. The first call with a `min_match` indexes all texts for it."""
        with self._lock:
            if min_match not in self._indices:
                index = self._indices[min_match] = TokenIndex(min_match)
                for one in self._texts:
                    index.add(one)
            return self._indices[min_match].match(text, longest)
