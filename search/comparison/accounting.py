"""Who pays for what: an answer is worked out once for all runs, and every run that asks for it pays its first price."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from optuna.trial import FrozenTrial

from layerskip.skip_mask import SkipMask
from layerskip.teacher_forcing import DraftReadings, ForcedText
from search.proposals import Proposal, Proposer
from search.stop import StopSignal

if TYPE_CHECKING:
    from search.cost_model import Timer
    from search.decoder import Decoder, TextForcing

T = TypeVar("T")
Ledger = dict[Hashable, tuple[Any, float]]
"""Question -> (answer, seconds that it took whoever asked first)."""


class Account:
    """One run's share of a ledger that all runs write.

    A question that another run has asked before is answered at once, and its first seconds are charged; a question of
    this run's own costs nothing the second time. So `now` runs as if this run were alone on the machine. Questions that
    share work underneath, such as masks with the same first layers, are still cheaper for whoever asks later.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self._asked: set[Hashable] = set()
        self._charged_s = 0.0

    def now(self) -> float:
        """Seconds on the clock and what was charged."""
        return self._clock() + self._charged_s

    def price(self, question: Hashable) -> float | None:
        """Seconds that an answer took whoever asked first; None where nobody has asked."""
        return self._ledger[question][1] if question in self._ledger else None

    def remember(self, question: Hashable, answer: object, seconds: float) -> None:
        """An answer that was worked out before this process began."""
        self._ledger[question] = (answer, seconds)

    def ask(self, question: Hashable, work: Callable[[], T]) -> T:
        """The answer from the ledger, or from `work`, which must not ask in turn."""
        if question not in self._ledger:
            start = self._clock()
            answer = work()
            self._ledger[question] = (answer, self._clock() - start)
        elif question not in self._asked:
            self._charged_s += self._ledger[question][1]
        self._asked.add(question)
        return cast(T, self._ledger[question][0])


class SharedForcing:
    """A teacher forcing whose readings go through an account."""

    def __init__(self, forcing: Any, account: Account) -> None:
        self.forcing, self._account = forcing, account

    def read(self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        """See `TeacherForcing.read`."""
        question = ("read", id(self.forcing), mask, depth, None if texts is None else tuple(texts))
        reading: DraftReadings = self._account.ask(question, lambda: self.forcing.read(mask, depth, texts))
        return reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forcing, name)


class SharedDecoder:
    """The subject's decoder with one teacher forcing per set of texts for all runs; step times are each run's own."""

    def __init__(self, decoder: Decoder, account: Account) -> None:
        self._decoder, self._account = decoder, account

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> TextForcing:
        """See `Decoder.teacher_forcing`."""
        question = ("forcing", tuple(texts))
        forcing = self._account.ask(question, lambda: self._decoder.teacher_forcing(texts))
        return cast("TextForcing", SharedForcing(forcing, self._account))

    def timer(self, gamma_max: int) -> Timer:
        """See `Decoder.timer`."""
        return self._decoder.timer(gamma_max)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


class TimedProposer:
    """A proposer that keeps how long its latest proposal took, and that a signal may interrupt."""

    def __init__(self, proposer: Proposer, account: Account, stop: StopSignal) -> None:
        self._proposer, self._account, self._stop = proposer, account, stop
        self.seconds = 0.0

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        """What the proposer says. Raises: KeyboardInterrupt."""
        start = self._account.now()
        with self._stop.interruptible():
            proposal = self._proposer.propose(trials, index, rng)
        self.seconds = self._account.now() - start
        return proposal
