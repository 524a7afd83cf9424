"""A decoder, a clock and a reporter that need no model: speeds follow from the config by a formula."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import optuna
from optuna.trial import FrozenTrial

from layerskip import DecodeConfig, DecodeStats
from layerskip.analysis.distance import Emitted
from layerskip.analysis.identity import IdentityReport
from layerskip.analysis.teacher_forcing import ForcedText
from layerskip.config.lossy_acceptance import Distance
from layerskip.config.sampling_regime import Sampling
from layerskip.huggingface.rounding import RoundingSpread
from search.context import Tools
from search.measure.decoder import Decoded
from search.measure.subject import Subject
from search.per_group.run import GroupRun
from search.pipeline import SearchRun
from search.regime_run import RegimeRun
from search.stop import StopSignal
from search.storages.opening import open_storage
from search.study.fingerprint import Fingerprint
from search.study.prompts import EncodedPrompt
from search.study.space import SearchSpace
from search.study.spec import StudyPaths, StudySpec
from search.terminal.event import Event
from search.terminal.reporter import Reporter
from search.workers.heartbeats import Patience
from tests.search.helpers.forcing import FakeForcing, FakeTimer

NUM_LAYERS = 6
PLAIN_TOKENS_PER_S = 100.0


@dataclass
class FakeClock:
    """Seconds that pass only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeWatch:
    """A machine of which little is known."""

    def record(self) -> dict[str, Any]:
        moment = {"load": 1.5, "gpus": [{"driver": "570.1", "sm_clock_mhz": 1755.0}]}
        facts = {"cpu": "fake", "num_threads": 1, "attention_backend": "math", "peak_resident_bytes": None}
        return facts | {"num_preparations": 2, "preparation_s": 0.25, "before": moment, "after": moment}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Recorder(Reporter):
    """Prints plain lines and keeps the events."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.events: list[Event] = []

    def tell(self, event: Event) -> None:
        self.events.append(event)
        super().tell(event)


@dataclass
class FakeDecoder:
    """Skipping is cheap in the middle, wrong at the ends; a few per cent of noise that depends on the call's inputs."""

    clock: FakeClock = field(default_factory=FakeClock)
    noise: float = 0.02
    gain: float = 1.0
    """Scales all advantages: 0 makes every config as fast as plain decoding."""
    gain_by_regime: Mapping[str, float] = field(default_factory=dict)
    break_on: Callable[[DecodeConfig], BaseException | None] = lambda _config: None
    wrong_on: Callable[[DecodeConfig], bool] = lambda _config: False
    tie_on: Callable[[DecodeConfig], bool] = lambda _config: False
    interaction: Callable[[Sequence[int], DecodeConfig], float] = lambda _prompt_ids, _config: 1.0
    """Factor on the speed of a config on a prompt: what makes one config suit some prompts better."""
    num_tokens: int = 17
    num_decoded: int = 0
    num_checked_ties: int = 0
    num_freed: int = 0
    devices: tuple[Any, ...] = (None,)
    is_sampled: bool = False
    pace: float = 1.0
    """Of the device: scales all speeds alike."""
    batch_refusal: str | None = "more than a fake"
    then: Callable[[Sequence[int], DecodeConfig, int, Decoded], Decoded] = lambda _ids, _config, _seed, out: out
    """Sees each call's prompt, config, seed and output, and says what is given out instead."""

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        self.num_decoded += 1
        error = self.break_on(config)
        if error is not None:
            raise error
        speed = PLAIN_TOKENS_PER_S * true_speedup(config, self.gain) * (1 + self.noise * wobble(prompt_ids, config))
        speed *= self.interaction(prompt_ids, config) * self.pace
        stats = DecodeStats(num_prompt_tokens=len(prompt_ids), num_emitted=self.num_tokens, prefill_s=0.01)
        num_timed = self.num_tokens - 1
        stats.decode_s = num_timed / speed
        stats.token_s = [1 / speed] * num_timed
        if config.speculates:
            stats.num_rounds, stats.num_drafted, stats.num_accepted = 8, 10, 8
            stats.drafted_by_position, stats.accepted_by_position = [8, 2], [6, 2]
            # The first token takes num_timed times as long as the last one: drafts get better as the text gets longer.
            stats.token_s = [2 * (num_timed - i) / (num_timed + 1) / speed for i in range(num_timed)]
        self.clock.now += stats.prefill_s + stats.decode_s
        start = sum(prompt_ids) + (seed if self.is_sampled else 0)
        ids = tuple((start + i) % 50 for i in range(self.num_tokens))
        if config.speculates and (self.wrong_on(config) or self.tie_on(config)):
            ids = (*ids[:5], 99, *ids[6:])
        return self.then(prompt_ids, config, seed, Decoded(ids, stats))

    def batch_rate(self, prompts: Sequence[Sequence[int]], config: DecodeConfig, size: int) -> float:
        """A draft is worth less the more texts share a step."""
        return PLAIN_TOKENS_PER_S * size * true_speedup(config, self.gain) ** (3 - size / 2)

    def check(
        self, prompt_ids: Sequence[int], ids: Sequence[int], reference_ids: Sequence[int], seed: int = 0
    ) -> IdentityReport:
        if tuple(ids) == tuple(reference_ids):
            return IdentityReport(identical=True, is_tie=False)
        tie = self.tie_on(DecodeConfig.plain(NUM_LAYERS))
        self.num_checked_ties += tie
        return IdentityReport(identical=False, is_tie=tie, first_difference=5, logit_gap=0.25)

    def distance(self, outputs: Sequence[Emitted]) -> Distance:
        pairs = [pair for one in outputs for pair in zip(one.ids, one.target_ids, strict=True)]
        share = sum(a != b for a, b in pairs) / len(pairs)
        return Distance(unlike_share=share, log_prob=-1.0 - share, target_log_prob=-1.0)

    def free_memory(self) -> None:
        self.num_freed += 1

    def watch_machine(self) -> FakeWatch:
        return FakeWatch()

    def with_sampling(self, sampling: Sampling) -> FakeDecoder:
        gain = self.gain_by_regime.get(sampling.name, self.gain)
        return dataclasses.replace(self, gain=gain, is_sampled=sampling.do_sample)

    def remembering(self) -> FakeDecoder:
        return self

    def with_new_tokens(self, most: int) -> FakeDecoder:
        return dataclasses.replace(self, num_tokens=min(most, self.num_tokens))

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> FakeForcing:
        return FakeForcing(texts, self.clock.advance)

    def timer(self, gamma_max: int) -> FakeTimer:
        return FakeTimer(1 / PLAIN_TOKENS_PER_S / self.pace)


def true_speedup(config: DecodeConfig, gain: float = 1.0) -> float:
    """Noise-free: the best skips the four middle layers whole at gamma 4; plain is 1."""
    if not config.speculates:
        return 1.0
    mask = config.skip_mask
    good = sum(mask.attention[1:5]) + sum(mask.mlp[1:5])
    bad = mask.attention[0] + mask.mlp[0] + mask.attention[5] + mask.mlp[5]
    advantage = 0.06 * good - 0.15 * bad - 0.02 * abs(config.gamma - 4) - 0.1 * config.target_threshold
    return max(0.2, 1 + gain * advantage)


CALM, WILD = (500, 1, 2), (512, 1, 3)
"""Prompts of two groups: the last token id tells them apart (see `group_prompts`)."""


def wild_needs_late_layers(prompt_ids: Sequence[int], config: DecodeConfig) -> float:
    """An interaction: each sublayer of layers 3 and 4 that is skipped costs 15 % on wild prompts, nothing on calm."""
    if not config.speculates or prompt_ids[2] == CALM[2]:
        return 1.0
    mask = config.skip_mask
    return 0.85 ** (sum(mask.attention[3:5]) + sum(mask.mlp[3:5]))


def truth(config: DecodeConfig, prompt_ids: Sequence[int]) -> float:
    """Noise-free speedup under that interaction."""
    return true_speedup(config) * wild_needs_late_layers(prompt_ids, config)


def wobble(prompt_ids: Sequence[int], config: DecodeConfig) -> float:
    """Between -1 and 1, from the inputs alone, so that a resumed study sees what an uninterrupted one would."""
    text = f"{list(prompt_ids)} {config.skip_mask} {config.gamma} {config.draft_threshold} {config.target_threshold}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**31 - 1


SPACE = SearchSpace(
    num_layers=NUM_LAYERS,
    gamma_max=6,
    attention_bits=tuple(range(NUM_LAYERS)),
    mlp_bits=tuple(range(NUM_LAYERS)),
    layer_bits=(),
)
FINGERPRINT = Fingerprint(
    weights="abc",
    model_class="Fake",
    device="cpu",
    dtype="float32",
    engine="eager",
    num_threads=1,
    cpu="fake",
    torch="2",
    transformers="5",
    layerskip="0",
    tuning_prompts="t",
    held_out_prompts="h",
    max_new_tokens=17,
    gamma_max=6,
    granularity="sublayer",
)
MODEL = "./model"
"""As best.json names it."""


def prompts(count: int, first: int = 0) -> tuple[EncodedPrompt, ...]:
    return tuple(EncodedPrompt(f"p{i}", None, (first + i, 1, 2)) for i in range(count))


def group_prompts(groups: Mapping[str, int], first: int = 0) -> tuple[EncodedPrompt, ...]:
    """So many prompts of each group, sorted by group; the last token id tells the group: 2, 3, ..."""
    names = [(place, name) for place, (name, count) in enumerate(groups.items()) for _ in range(count)]
    return tuple(EncodedPrompt(f"{name}{i}", name, (first + i, 1, 2 + place)) for i, (place, name) in enumerate(names))


def make_spec(**changes: object) -> StudySpec:
    """Of layer skipping alone: the texts of the fakes have nothing to look up."""
    fields: dict[str, object] = {"model": "fake", "prompts": "/p.jsonl", "trials": 30, "drafters": ("layer_skip",)}
    fields |= {"prompts_per_trial": 5, "max_new_tokens": 17}
    return StudySpec(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class Bench:
    """A search on fakes in a folder."""

    folder: Path
    decoder: FakeDecoder = field(default_factory=FakeDecoder)
    stop: StopSignal = field(default_factory=StopSignal)
    output: io.StringIO = field(default_factory=io.StringIO)
    reporter: Reporter | None = None
    """Tells plain lines to `output` if it is not given."""
    in_sqlite: bool = False
    """The storage that a search has if nobody says another; a journal file takes a third of the time."""
    patience: Patience = field(default_factory=lambda: Patience(poll_s=0.02))
    space: SearchSpace = SPACE
    rounding: Callable[[], RoundingSpread | None] = lambda: None

    @property
    def paths(self) -> StudyPaths:
        return StudyPaths(self.folder)

    @property
    def url(self) -> str:
        """Of the storage, where a run is not given another."""
        return f"sqlite:///{self.folder / 'study.db'}" if self.in_sqlite else f"journal:{self.folder / 'study.log'}"

    def study(self, part: str | None = None) -> optuna.Study:
        """That of the whole, or of a group or regime."""
        name = f"{self.folder.name}/{part}" if part else self.folder.name
        return optuna.load_study(study_name=name, storage=open_storage(self.url))

    def trials(self, part: str | None = None) -> list[FrozenTrial]:
        return self.study(part).get_trials()

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.paths.summary.read_text())
        return summary

    @property
    def tools(self) -> Tools:
        reporter = self.reporter or Reporter(self.output)
        return Tools(reporter, self.stop, "python -m search.run", self.decoder.clock, self.patience)

    def run(self, *, fingerprint: Fingerprint = FINGERPRINT, **spec: object) -> int:
        sets = prompts(12), prompts(12, first=500)
        subject = Subject(self.decoder, self.space, *sets, fingerprint, MODEL, rounding=self.rounding)
        return SearchRun(subject, make_spec(**({"storage": self.url} | spec)), self.paths, self.tools).run()

    def run_regimes(self, *regimes: str, **spec: object) -> int:
        """The sampler is one that needs no predictions: nothing here depends on who proposes."""
        subject = Subject(self.decoder, SPACE, prompts(12), prompts(12, first=500), FINGERPRINT, MODEL)
        fields = {"sampler": "tpe", "regimes": regimes, "storage": self.url} | spec
        return RegimeRun(subject, make_spec(**fields), self.paths, self.tools).run()

    def run_groups(self, groups: Mapping[str, int], held_out: Mapping[str, int] | None = None, **spec: object) -> int:
        """A per-group search with so many tuning prompts of each group, and as many held-out ones if not told.

        The sampler is one that needs no predictions: nothing here depends on who proposes.
        """
        sets = group_prompts(groups), group_prompts(held_out or groups, first=500)
        subject = Subject(self.decoder, SPACE, *sets, FINGERPRINT, MODEL)
        fields = {"sampler": "tpe", "per_group": True, "storage": self.url} | spec
        return GroupRun(subject, make_spec(**fields), self.paths, self.tools).run()
