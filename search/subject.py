"""Subject and Tools: what is searched, and what a run needs of the world."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from layerskip.rounding import RoundingSpread
from layerskip.sampling_regime import GREEDY, Sampling
from search.decoder import Decoder
from search.fingerprint import Fingerprint
from search.prompts import EncodedPrompt
from search.results import Origin
from search.space import SearchSpace
from search.stop import StopSignal
from search.terminal.reporter import Reporter
from search.thread_choice import ThreadChoice
from search.workers.witness import Patience


@dataclass(frozen=True)
class Subject:
    """What is searched: a model ready to decode, its prompts and its identity."""

    decoder: Decoder
    space: SearchSpace
    tuning: tuple[EncodedPrompt, ...]
    held_out: tuple[EncodedPrompt, ...]
    fingerprint: Fingerprint
    origin: Origin
    sampling: Sampling = GREEDY
    """How tokens are chosen."""
    threads: ThreadChoice | None = None
    """How the number of CPU threads was measured; None where it was given."""
    rounding: Callable[[], RoundingSpread | None] = lambda: None
    """What this process has judged logit ties by so far; None where nothing had to be judged."""

    def in_regime(self, sampling: Sampling) -> Subject:
        """The same model and prompts, decoded with tokens chosen so."""
        return replace(
            self,
            decoder=self.decoder.with_sampling(sampling),
            fingerprint=replace(self.fingerprint, sampling=sampling.name),
            sampling=sampling,
        )


@dataclass(frozen=True)
class Tools:
    """What the run needs of the world."""

    reporter: Reporter
    stop: StopSignal
    command: str
    clock: Callable[[], float] = time.perf_counter
    patience: Patience = field(default_factory=Patience)
