"""What a benchmark compares: a way to decode one prompt, and what one run of it gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from layerskip.analysis.free_running import READ_EVERY, FreeRunning
from layerskip.benchmark.names import (
    DRAFT_MODEL,
    EAGLE,
    FREE_RUNNING,
    HYBRID,
    LOSSY,
    MTP,
    OWN_ROWS,
    PLAIN,
    PROMPT_LOOKUP,
    SPECULATIVE,
    SUFFIX,
)
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.usual_lookups import NGRAMS, SUFFIXES, computed_alone, lookup_alone, lookup_else
from layerskip.decoding.loop import DecodeLoop, DecodeRequest
from layerskip.decoding.stats import DecodeStats
from layerskip.decoding.step_clock import StepClock
from layerskip.engines import Engine
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import Sampler, SamplingParams


class CannotRun(Exception):  # noqa: N818 (reads as the fact it states)
    """This way does not serve this model or config; the message says why in one line."""


@dataclass(frozen=True)
class Sample:
    """One output and its seconds."""

    ids: tuple[int, ...]
    """Emitted tokens, prompt excluded."""
    num_timed: int
    """Tokens emitted within `decode_s`: all but those that came out first, which are the prompt's."""
    decode_s: float
    """From the first tokens' arrival to the end."""
    total_s: float
    """From the call to the end, the prompt's own forward included."""
    stats: DecodeStats | None = None
    """The counters of our own loop."""

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt apart; None if no token followed the first ones."""
        return self.num_timed / self.decode_s if self.num_timed > 0 and self.decode_s > 0 else None

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        """Prompt included."""
        return len(self.ids) / self.total_s if self.total_s > 0 else None


class Stopwatch:
    """Times one output, ours and Hugging Face's by the same three readings of the wall clock.

    At the call, when the first tokens are on the host, and at the end; the device is waited for before each. Whatever
    lies between is in the span: making a cache, the loop's own work, handing every step's tokens to the host. Text is
    made of them in no row. Raises: RuntimeError where our engine recorded or compiled something in between.
    """

    def __init__(self, engine: Engine) -> None:
        self._num_first = 0
        self._first_s = 0.0
        self._clock = StepClock(engine)

    def tokens_came(self, count: int) -> None:
        """So many tokens are on the host. Looks at the clock the first time alone."""
        if not self._num_first:
            self._num_first, self._first_s = count, self._clock.lap()

    def stop(self, ids: Sequence[int], stats: DecodeStats | None = None) -> Sample:
        """The output is complete."""
        rest_s = self._clock.lap()
        return Sample(tuple(ids), len(ids) - self._num_first, rest_s, self._first_s + rest_s, stats)


class Way(Protocol):
    """One row of the table."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> dict[str, object]:
        """What a reader needs to know to run it again."""
        ...

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        """Decode one prompt greedily, timed by a `Stopwatch`. Raises: CannotRun."""
        ...


class OwnWay:
    """Our own loop under a config; gamma = 0 is plain decoding."""

    def __init__(self, name: str, model: LayerSkipModel, config: DecodeConfig) -> None:
        self.name = name
        self.settings: dict[str, object] = config.bare().model_dump(
            mode="json", exclude_none=True, exclude={"schema_version"}
        )
        self._model = model
        self._config = config

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        engine, stats, ids = self._model.engine, DecodeStats(), list[int]()
        loop = DecodeLoop(engine, self._config, Sampler(SamplingParams()))
        run = loop.begin(DecodeRequest(prompt_ids, max_new_tokens, self._model.eos_token_ids), stats)
        with loop.session(run):
            loop.prepare(run)  # recordings outlive the session
        watch = Stopwatch(engine)
        for emitted in loop.complete(run):
            watch.tokens_came(len(emitted.ids))
            ids += emitted.ids
        return watch.stop(ids, stats)


class FreeRunningWay:
    """Our plain decoding without a wait for every token: the harder baseline; see `layerskip.analysis.free_running`."""

    def __init__(self, model: LayerSkipModel) -> None:
        self.name = FREE_RUNNING
        self.settings: dict[str, object] = {"read_every": READ_EVERY}
        self._model = model

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        engine, ids = self._model.engine, list[int]()
        decoding = FreeRunning(engine, DecodeRequest(prompt_ids, max_new_tokens, self._model.eos_token_ids))
        decoding.prepare()
        watch = Stopwatch(engine)
        for tokens in decoding.run():
            watch.tokens_came(len(tokens))
            ids += tokens
        return watch.stop(ids)


@dataclass(frozen=True)
class Refused:
    """A row that was not even started."""

    name: str
    reason: str


def own_settings(num_layers: int, config: DecodeConfig | None) -> dict[str, DecodeConfig]:
    """What the rows of our own loop decode under, by name: as far as there are settings for them.

    A further way to draft is a line here and a name in `OWN_ROWS`. Of a lossy config one row alone is lossy.
    """
    settings = {
        PLAIN: DecodeConfig.plain(num_layers),
        PROMPT_LOOKUP: lookup_alone(num_layers, NGRAMS),
        SUFFIX: lookup_alone(num_layers, SUFFIXES),
    }
    if config is not None and config.lossy is not None:
        settings[LOSSY], config = config, config.model_copy(update={"lossy": None})
    if config is not None and config.speculates:
        settings[SPECULATIVE] = config
    if config is not None and config.computes_drafts:
        settings[HYBRID] = lookup_else(config, NGRAMS)
        if config.drafter == "hybrid":
            alone = computed_alone(config)
            settings[alone.drafter] = alone
    return settings


def own_ways(
    model: LayerSkipModel, settings: Mapping[str, DecodeConfig], names: Sequence[str], *, has_config: bool
) -> tuple[list[Way], list[Refused]]:
    """Our own rows, as far as asked for and possible; has_config: whether there is a config, if only a plain one."""
    ways: list[Way] = []
    refused: list[Refused] = []
    for name in [one for one in (*OWN_ROWS, LOSSY) if one in names]:
        if name == FREE_RUNNING:
            ways.append(FreeRunningWay(model))
        elif name in settings:
            ways.append(OwnWay(name, model, settings[name]))
        else:
            refused.append(Refused(name, _why_not(name, settings, has_config=has_config)))
    return ways, refused


def _why_not(name: str, settings: Mapping[str, DecodeConfig], *, has_config: bool) -> str:
    """The reason of a row of ours that is not among these."""
    if not has_config:
        return "needs --config, or --drafter or --mask"
    if name == LOSSY:
        return "the config is lossless"
    if SPECULATIVE not in settings:
        return "the config says gamma 0"
    if settings[SPECULATIVE].drafter == name:
        return f"the config is that, see {SPECULATIVE}"
    return (
        f"the config has no draft weights of {name}" if name in (EAGLE, MTP, DRAFT_MODEL) else "the config has no mask"
    )
