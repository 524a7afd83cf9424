"""Several ways to decode one prompt in turns on one cache, so that a machine's moods hit all of them alike."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.decode import DecodeLoop, DecodeRequest, Run
from layerskip.engines import Engine
from layerskip.stats import DecodeStats


class Diverged(RuntimeError):  # noqa: N818 (reads as the fact it states)
    """Two ways emitted different tokens, so their cache is no longer shared: a logit tie, or a bug."""


def decode_in_lockstep(engine: Engine, loops: Sequence[DecodeLoop], request: DecodeRequest) -> list[Run]:
    """The finished runs of one request under several loops of this engine, greedy, each step timed by itself.

    Greedy loops emit the same tokens. So whichever run is furthest behind takes the next step, on a cache rolled back
    to its own place: what a run ahead of it wrote up to there is what it would have written itself, up to rounding.
    Between runs that are level, who goes first alternates. The prompt's own forward is the same for all and is computed
    once, its seconds written into each run's `prefill_s`; no other step of any run is left out or shared.

    A clock that wanders within a tenth of a second spoils the ratio of two runs one after the other, and hardly
    touches this one. Cost: that of the runs one by one, less the prompt's forwards; memory: one cache.
    Raises: Diverged; whatever a forward raises.
    """
    runs = [loop.begin(request, DecodeStats()) for loop in loops]
    order = list(range(len(runs)))
    with engine.session(max(run.capacity for run in runs)):
        for loop, run in zip(loops, runs, strict=True):
            loop.prepare(run)
        first = max(order, key=lambda place: loops[place].config.target_threshold)
        loops[first].step(runs[first])
        for place in order:
            if place != first:
                runs[place].begin_as(runs[first])
        emitted = list(runs[first].context)
        while open_places := [place for place in order if not runs[place].finished]:
            place = min(open_places, key=lambda one: len(runs[one].context))
            order.remove(place)
            order.append(place)
            run = runs[place]
            engine.cache.rollback_to(run.cached)
            before = len(run.context)
            loops[place].step(run)
            shared = min(len(run.context), len(emitted))
            if run.context[before:shared] != emitted[before:shared]:
                raise Diverged(f"tokens {before}..{shared - 1} of the text differ between two ways to decode it")
            emitted += run.context[len(emitted) :]
    return runs
