"""Batch: several texts of one model decoded at once, what reads the same weights in one forward.

A step of one text waits for weights to come from memory, and a few more rows take hardly longer. So of texts that are
decoded side by side each goes on until it needs a forward, and those that need the same one share it. A text joins or
leaves between two forwards, which is known as continuous batching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet

from layerskip.config.skip_mask import SkipMask
from layerskip.engines.fused import Forward, FusedEngine
from layerskip.engines.tree import DraftTree

PROMPT_PIECE = 32
"""Tokens: with so many of prompts, for each that there is, the others go on by a token
(`python -m studies.engine.batches`)."""
_PIECE_ALONE = 256
"""The same where nothing but prompts is to be computed: as many as the kernels compute at once anyway. Somebody may
come, or whoever asked may leave."""


class Cancelled(Exception):  # noqa: N818 (nobody is to blame)
    """Raised in a run whose result nobody wants any more, where it waits."""


class _Shared(NamedTuple):
    """Forwards that are alike in these are computed in one."""

    drafts: bool
    weights: int
    mask: SkipMask | None
    kept_layers: tuple[int, ...]


class Batch:
    """Runs in turns, on one thread: functions that decode on its slots, and need not know of each other.

    Their tokens are those of each alone: to the bit where sublayers are compiled for this CPU, else up to rounding.
    Cost: a forward's rows share its weights but where layers keep a state; each text has a cache of its own.
    """

    def __init__(self, max_drafting: int | None = None, *, prompt_piece: int = PROMPT_PIECE) -> None:
        """max_drafting: while more run none of them drafts; None: as each one's config says. prompt_piece: most tokens
        for each prompt that go into a forward which others wait for."""
        self.max_drafting, self.prompt_piece = max_drafting, prompt_piece
        self._runs: dict[greenlet, None] = {}
        """In the order that they began in."""
        self._waiting: dict[greenlet, Forward] = {}
        self._computed: dict[greenlet, torch.Tensor | Exception] = {}
        """Whose forward is done, and what it gave or raised."""
        self._is_unwanted: dict[greenlet, Callable[[], bool]] = {}

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def start(self, run: Callable[[], object], is_unwanted: Callable[[], bool] | None = None) -> None:
        """Begin it, up to its first forward. Raises: what it raises until then.

        is_unwanted: asked before its forwards; once it says so, `Cancelled` is raised in the run.
        """
        begun = greenlet(run)
        self._runs[begun] = None
        if is_unwanted is not None:
            self._is_unwanted[begun] = is_unwanted
        self._go_on(begun)

    def step(self) -> None:
        """A forward for all that wait for the same one, and those go on until each needs another.

        Raises: what a run raises, a failed forward among that; such a run is over, the others go on with the next step.
        """
        if not self._computed:
            for run in [
                one for one, is_unwanted in self._is_unwanted.items() if one in self._waiting and is_unwanted()
            ]:
                del self._waiting[run]
                self._computed[run] = Cancelled()
            self._compute()  # perhaps nothing but pieces, for which nobody goes on
        while self._computed:
            run = next(iter(self._computed))
            self._go_on(run, self._computed.pop(run))

    def run_all(self, runs: Iterable[Callable[[], object]], size: int) -> None:
        """All of them, at most so many at once. Raises: what one of them raises; the others are then ended."""
        left = iter(runs)
        try:
            while True:
                while self.num_running < size and (run := next(left, None)) is not None:
                    self.start(run)
                if not self.num_running:
                    return
                self.step()
        finally:
            self.close()

    def close(self) -> None:
        """End all runs where they are."""
        runs = [*self._runs]
        for every in (self._runs, self._waiting, self._computed, self._is_unwanted):
            every.clear()
        with torch.inference_mode(), ExitStack() as all_of_them:  # see `_go_on`; whatever one of them raises
            for run in runs:
                all_of_them.callback(run.throw)

    def wait_for(self, forward: Forward) -> torch.Tensor:
        """In a run: the forward's logits, while others go on."""
        hub = getcurrent().parent
        assert hub is not None, "a slot decodes in a run of its batch"
        logits: torch.Tensor = hub.switch(forward)
        return logits

    def _compute(self) -> None:
        """What some wait for together. Drafts come first, so that verifications find each other."""
        groups: dict[Any, list[greenlet]] = {}
        for run, one in self._waiting.items():
            assert isinstance(one.engine, Slot)
            groups.setdefault(one.engine.shared_by(one.mask), []).append(run)
        if not groups:
            return
        drafts = (group for key, group in groups.items() if key.drafts and not self._are_prompts(group))
        now = self._pieces(next(drafts, next(iter(groups.values()))))
        forwards = [*now.values()]
        try:
            found: list[Any] = forwards[0].engine.compute(forwards)
        except Exception as error:  # noqa: BLE001 - raised where it was waited for
            found = [error] * len(now)
        for (run, piece), logits in zip(now.items(), found, strict=True):
            whole = self._waiting.pop(run)
            if piece is whole or isinstance(logits, Exception):
                self._computed[run] = logits
            else:
                rest = whole.ids[len(piece.ids) :]
                self._waiting[run] = replace(whole, ids=rest, in_pieces=len(rest) > whole.num_logits)

    def _are_prompts(self, runs: Iterable[greenlet]) -> bool:
        return all(self._waiting[run].in_pieces for run in runs)

    def _pieces(self, runs: Sequence[greenlet]) -> dict[greenlet, Forward]:
        """What of their forwards is computed now: of prompts half for the one that came first, which so is never left
        behind, the rest for those of which least is left, so that one after the other is answered instead of all late.
        """
        forwards = {run: self._waiting[run] for run in runs}
        prompts = [run for run in self._runs if run in forwards and forwards[run].in_pieces]
        if not prompts:
            return forwards
        room = _PIECE_ALONE if self._are_prompts(self._waiting) else self.prompt_piece * len(prompts)
        counts = dict.fromkeys(prompts, 0)
        for run, most in [(prompts[0], room // 2), *((one, room) for one in sorted(prompts, key=self._num_left))]:
            count = min(self._num_left(run) - counts[run], most, room)
            counts[run] += count
            room -= count
        for run, count in counts.items():
            whole = forwards[run]
            if not count:
                del forwards[run]
            elif count < len(whole.ids):
                ids = whole.ids[: min(count, len(whole.ids) - whole.num_logits)]
                forwards[run] = replace(whole, ids=ids, num_logits=1)
        return forwards

    def _num_left(self, run: greenlet) -> int:
        return len(self._waiting[run].ids)

    def _go_on(self, run: greenlet, found: torch.Tensor | Exception | None = None) -> None:
        try:
            # Around all of it: a run that waits inside this mode would else take it from the next one, or leave it on.
            with torch.inference_mode():
                arguments = () if found is None else (found,)
                forward = run.throw(found) if isinstance(found, Exception) else run.switch(*arguments)
        finally:
            if run.dead:
                self._runs.pop(run, None)
                self._is_unwanted.pop(run, None)
        if not run.dead:
            self._waiting[run] = forward


class Slot(FusedEngine):
    """An engine over another one's weights, with sessions of its own, whose forwards are computed with those of others
    in the batch. For one text at a time, in a run of that batch."""

    def __init__(self, engine: FusedEngine, batch: Batch, max_drafting: int, *, drafts: bool = False) -> None:
        """max_drafting: while more texts run this one does not draft. drafts: whether the engine is a draft model's."""
        vars(self).update(vars(engine))
        self._weights, self._batch, self._drafts = engine, batch, drafts
        self._max_drafting = max_drafting
        self._cache = self._states = None
        self._kept_layers, self._runs, self._held = (), {}, []
        self.draft_weights: dict[str, Any] = {}

    @property
    def may_draft(self) -> bool:
        """See `Engine`."""
        return self._batch.num_running <= self._max_drafting

    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        in_pieces = len(input_ids) > max(self._batch.prompt_piece, num_logits)
        return self._batch.wait_for(Forward(self, input_ids, num_logits, mask, in_pieces=in_pieces))

    def verify_tree(self, input_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """See `Engine`."""
        return self._batch.wait_for(Forward(self, input_ids, tree.num_rows, tree=tree))

    def shared_by(self, mask: SkipMask | None) -> _Shared:
        """What forwards under this mask have in common with those of other slots that they are computed with."""
        return _Shared(
            self._drafts or mask is not None, id(self._weights), mask, self.kept_layers if mask is None else ()
        )
