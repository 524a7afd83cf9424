"""Several ways to decode one prompt in turns on one cache, so that a machine's moods hit all of them alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.decoding.kv_cache import KeptPositions
from layerskip.decoding.loop import DecodeLoop, DecodeRequest, Run
from layerskip.decoding.stats import DecodeStats
from layerskip.engines import Engine

TURN_TOKENS = 8
"""How far ahead of the shortest text a run goes before it hands over the cache, once the texts differ.

Handing over copies keys and values, which a turn for every step would pay for too often on long texts. Turns of 8 to 16
tokens last some hundredths of a second on a small model and some tenths on a large one.
"""


def decode_in_lockstep(engine: Engine, loops: Sequence[DecodeLoop], request: DecodeRequest) -> list[Run]:
    """The finished runs of one request under several loops of this engine, each step timed by itself.

    The prompt's own forward is the same for all and is computed once, with the token after it, its seconds written into
    each run's `prefill_s`. No other step of any run is left out or shared.

    While the texts are the same, whichever run is furthest behind takes the next step, on a cache rolled back to its
    own place: what a run ahead of it wrote up to there is what it would have written itself, up to rounding. Between
    runs that are level, who goes first alternates. Texts part in reduced precision, where two tokens tie. From there on
    each run goes on with its own text and its own keys and values (`KeptPositions`), in turns of `TURN_TOKENS`.

    A clock that wanders within a tenth of a second spoils the ratio of two runs one after the other, and hardly
    touches this one. Cost: that of the runs one by one, less the prompt's forwards; where texts part, untimed, one
    forward over a few tokens a run and copies. Memory: one cache, and for texts that part the new tokens' share of it
    for each run.
    Raises: whatever a forward raises.
    """
    runs = [loop.begin(request, DecodeStats()) for loop in loops]
    order = list(range(len(runs)))
    with engine.session(max(run.capacity for run in runs)):
        for loop, run in zip(loops, runs, strict=True):
            loop.prepare(run)
        first = max(order, key=lambda place: loops[place].needs_target_prob)
        loops[first].step(runs[first])
        for place in order:
            if place != first:
                runs[place].begin_as(runs[first])
        turns = _Turns(engine, runs)
        while open_places := [place for place in order if not runs[place].finished]:
            place = turns.next(open_places)
            order.remove(place)
            order.append(place)
            turns.give_cache_to(place)
            loops[place].step(runs[place])
            turns.compare(place)
    return runs


class _Turns:
    """Whose turn it is, and whose keys and values the cache holds."""

    def __init__(self, engine: Engine, runs: Sequence[Run]) -> None:
        self._engine = engine
        self._runs = runs
        self._longest = list(runs[0].context)
        """The text of all runs, until they part."""
        self._parted = False
        self._num_shared = 0
        """Positions before this one hold the same tokens in all texts."""
        self._holder = 0
        self._kept: dict[int, KeptPositions] = {}

    def next(self, places: Sequence[int]) -> int:
        """The run to take the next step, of those at these places; the first of equals."""
        behind = min(places, key=lambda place: len(self._runs[place].context))
        if not self._parted or self._holder not in places:
            return behind
        ahead = len(self._runs[self._holder].context) - len(self._runs[behind].context)
        return self._holder if ahead < TURN_TOKENS else behind

    def give_cache_to(self, place: int) -> None:
        """Afterwards the cache holds the `cached` tokens of this run."""
        run, cache = self._runs[place], self._engine.cache
        if not self._parted:
            self._num_shared = run.cached
            cache.rollback_to(run.cached)
        elif place != self._holder:
            self._keep_holder()
            if place in self._kept:
                self._kept[place].restore()
            else:
                # What it had written beyond the shared positions may have been overwritten when the texts parted.
                cache.rollback_to(self._num_shared)
                if missing := run.context[self._num_shared : run.cached]:
                    self._engine.extend(torch.tensor(missing, device=self._engine.device))
        self._holder = place

    def compare(self, place: int) -> None:
        """Note whether the text of this run, which has just taken a step, still is that of the others."""
        if self._parted:
            return
        context, longest, first = self._runs[place].context, self._longest, self._num_shared
        shared = min(len(context), len(longest))
        self._parted = context[first:shared] != longest[first:shared]
        longest += context[len(longest) :]

    def _keep_holder(self) -> None:
        holder = self._runs[self._holder]
        if holder.finished:
            return
        if self._holder not in self._kept:
            end = len(holder.request.prompt_ids) + holder.request.max_new_tokens
            self._kept[self._holder] = KeptPositions(self._engine.cache, self._num_shared, end)
        self._kept[self._holder].save()
