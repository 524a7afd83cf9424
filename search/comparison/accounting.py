"""Who pays for what: an answer is worked out once for all runs, and every run that asks pays what it first cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from optuna.trial import FrozenTrial

from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, TreeReadings, WrongDraft
from layerskip.config.decode_config import DraftedBy, DraftWeights
from search.measure.decoder import Decoder, TextForcing, Timer
from search.stop import StopSignal
from search.trials.proposals import Proposal, Proposer

T = TypeVar("T")
MOST_BYTES = 1 << 29
"""512 MiB: the readings and teacher forcings of the runs that are not at work, together."""


@dataclass
class _Entry:
    seconds: float
    """That the answer took whoever asked first."""
    answer: Any
    num_bytes: int
    is_kept: bool = True


class Ledger:
    """Answers and what they first cost, for all runs.

    Answers that take memory (those that tell their `nbytes`: readings, and teacher forcings with the keys and values of
    their texts) are dropped by `trim`, the one longest unused first, until `most_bytes` are left of all of them; what
    the run at work asks for meanwhile comes on top of that, and a run holds none by itself. Prices stay.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def first_cost_s(self, question: Hashable) -> float | None:
        """Seconds that an answer took whoever asked first; None where nobody has asked."""
        entry = self._entries.get(question)
        return None if entry is None else entry.seconds

    def has(self, question: Hashable) -> bool:
        """Whether there is an answer, and it has not been dropped."""
        return question in self._entries and self._entries[question].is_kept

    def answer(self, question: Hashable) -> Any:
        """The answer that is there."""
        self._entries.move_to_end(question)
        return self._entries[question].answer

    def put(self, question: Hashable, answer: object, seconds: float) -> None:
        """Keep an answer; an earlier cost stands."""
        first = self.first_cost_s(question)
        self._entries[question] = _Entry(seconds if first is None else first, answer, getattr(answer, "nbytes", 0))

    @property
    def num_bytes(self) -> int:
        """Of all answers that are kept."""
        return sum(entry.num_bytes for entry in self._entries.values() if entry.is_kept)

    def trim(self) -> None:
        """Drop answers until the rest is within the bound. For the moment between two runs' turns."""
        left = self.num_bytes
        for entry in self._entries.values():
            if left <= self._most_bytes:
                return
            if entry.is_kept and entry.num_bytes:
                left -= entry.num_bytes
                entry.answer, entry.is_kept = None, False


class Account:
    """One run's share of a ledger that all runs write.

    A question that another run has asked before is answered at once, and its first seconds are charged; a question of
    this run's own costs nothing the second time, also where the answer was dropped and is worked out again. So `now`
    runs as if this run were alone on the machine and had all memory. Questions that share work underneath, such as
    masks with the same first layers, are still cheaper for whoever asks later.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.ledger, self._clock = ledger, clock
        self._asked: set[Hashable] = set()
        self._charged_s = 0.0

    def now(self) -> float:
        """Seconds on the clock and what was charged."""
        return self._clock() + self._charged_s

    def ask(self, question: Hashable, work: Callable[[], T]) -> T:
        """The answer from the ledger, or from `work`, which may ask in turn only what this run has asked before."""
        cost_s = self.ledger.first_cost_s(question)
        if not self.ledger.has(question):
            start = self.now()
            answer = work()
            seconds = self.now() - start
            self.ledger.put(question, answer, seconds)
            if cost_s is not None:
                self._charged_s -= seconds
        if cost_s is not None and question not in self._asked:
            self._charged_s += cost_s
        self._asked.add(question)
        return cast(T, self.ledger.answer(question))


class SharedForcing:
    """The one teacher forcing on these texts for all runs; its readings go through an account.

    It is asked for anew each time it is needed, and held by nobody: see `Ledger.trim`.
    """

    def __init__(self, decoder: Decoder, texts: Sequence[ForcedText], account: Account) -> None:
        """Cost: making the forcing, if no run has made it."""
        self._decoder, self._account = decoder, account
        self._texts = tuple(texts)
        made = self.forcing
        self.texts = self._texts
        self.keys: str = made.keys
        self.lengths = made.lengths
        self.target_probs = made.target_probs

    @property
    def forcing(self) -> Any:
        """To be used and let go."""
        return self._account.ask(("forcing", self._texts), lambda: self._decoder.teacher_forcing(self._texts))

    def read(self, drafted_by: DraftedBy, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        """See `TeacherForcing.read`."""
        question = ("read", self._texts, drafted_by, depth, None if texts is None else tuple(texts))
        return self._account.ask(question, lambda: cast(DraftReadings, self.forcing.read(drafted_by, depth, texts)))

    def read_trees(self, weights: DraftWeights, depth: int, texts: Sequence[int] | None = None) -> TreeReadings:
        """See `TeacherForcing.read_trees`."""
        question = ("trees", self._texts, weights, depth, None if texts is None else tuple(texts))
        return self._account.ask(question, lambda: cast(TreeReadings, self.forcing.read_trees(weights, depth, texts)))

    def overrun(self, drafted_by: DraftedBy, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        """See `TeacherForcing.overrun`; each run's own."""
        added: list[int] = self.forcing.overrun(drafted_by, wrong, threshold)
        return added


class SharedDecoder:
    """The subject's decoder with one teacher forcing per set of texts for all runs; step times are each run's own."""

    def __init__(self, decoder: Decoder, account: Account) -> None:
        self._decoder, self._account = decoder, account

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> TextForcing:
        """See `Decoder.teacher_forcing`."""
        return SharedForcing(self._decoder, texts, self._account)

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
