"""Several things to time on every prompt, in turns, repeatedly, so that a machine's moods hit all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from layerskip.analysis.identity import IdentityReport
from layerskip.analysis.repetition import repeated_ngram_share
from layerskip.benchmark.ways import CannotRun, Sample, Way
from layerskip.machine.host import no_garbage_collection

Check = Callable[[Sequence[int], Sequence[int], Sequence[int]], IdentityReport]
"""(prompt, output, reference) -> verdict."""


@dataclass(frozen=True)
class Case:
    """One prompt and Hugging Face's own greedy continuation of it."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]


class Turn(Protocol):
    """Something that is timed at every prompt and keeps what it found."""

    @property
    def name(self) -> str: ...

    def warm_up(self, case: Case) -> None:
        """Do it once and forget it."""
        ...

    def take(self, index: int, case: Case) -> None:
        """Do it once for prompt number `index`. Raises: CannotRun."""
        ...


class Row:
    """The turn of one way to decode: its samples, and how its outputs compare with the reference."""

    def __init__(self, way: Way, cases: Sequence[Case], max_new_tokens: int, check: Check) -> None:
        self.name = way.name
        self.settings = dict(way.settings)
        self.samples: list[list[Sample]] = [[] for _ in cases]
        """Per prompt, one a repeat."""
        self.num_identical = self.num_ties = 0
        self.differing: list[str] = []
        """Prompts of outputs that are neither the reference nor a tie in rounding; once an output."""
        self._way = way
        self._cases = cases
        self._max_new_tokens = max_new_tokens
        self._check = check

    @property
    def num_outputs(self) -> int:
        return sum(map(len, self.samples))

    @property
    def repeated_ngram_share(self) -> float | None:
        """See `layerskip.analysis.repetition`."""
        pairs = zip(self._cases, self.samples, strict=True)
        return repeated_ngram_share((case.prompt_ids, one.ids) for case, samples in pairs for one in samples)

    def warm_up(self, case: Case) -> None:
        self._way.run(case.prompt_ids, self._max_new_tokens)

    def take(self, index: int, case: Case) -> None:
        sample = self._way.run(case.prompt_ids, self._max_new_tokens)
        self.samples[index].append(sample)
        verdict = self._check(case.prompt_ids, sample.ids, case.reference_ids)
        self.num_identical += verdict.identical
        self.num_ties += verdict.is_tie
        if not verdict.lossless:
            self.differing.append(case.prompt_id)


def order_of(visit: int, count: int) -> list[int]:
    """Who goes when at one visit of a prompt.

    Over `count` visits everyone is in every place once; then the circle is reversed, so that nobody always follows the
    same neighbour.
    """
    order = [(place + visit) % count for place in range(count)]
    return order if (visit // count) % 2 == 0 else order[::-1]


def make_cases(reference: Way, prompts: Sequence[tuple[str, tuple[int, ...]]], max_new_tokens: int) -> list[Case]:
    """Prompts with the reference's continuation, not timed. Raises: CannotRun if there is nothing to compare with."""
    return [Case(name, ids, reference.run(ids, max_new_tokens).ids) for name, ids in prompts]


def alternate(
    turns: Sequence[Turn], cases: Sequence[Case], repeats: int, *, progress: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Give every turn every prompt `repeats` times, after a warm-up on each; returns who failed, and why.

    Who raises CannotRun gets no further turn and stops nobody else. `progress` is called after every visit of a prompt.
    Cost: prompts × (repeats + 1) of every turn.
    """
    failed: dict[str, str] = {}
    for turn in turns:
        # The longest prompt first: a static cache keeps its first size, and what was compiled for it with it. The
        # others because some of a GPU's libraries plan for every new length, which takes longer than a step.
        with _noting(turn.name, failed):
            for case in sorted(cases, key=lambda case: -len(case.prompt_ids)):
                turn.warm_up(case)
    visits = ((index, case) for _ in range(repeats) for index, case in enumerate(cases))
    for visit, (index, case) in enumerate(visits):
        for place in order_of(visit, len(turns)):
            turn = turns[place]
            if turn.name not in failed:
                with _noting(turn.name, failed), no_garbage_collection():
                    turn.take(index, case)
        progress()
    return failed


@contextmanager
def _noting(name: str, failed: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except CannotRun as error:
        failed[name] = str(error)
