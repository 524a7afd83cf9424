"""Step costs beside the runs, and the share of what they allow that the decode loop attains.

Three things are told apart. A *step*, as `StepTimer` times it: a draft of k tokens with the choice of each and the look
at its confidence, or a target forward over n tokens with its verdict and the rollback; where the engine runs rounds on
the device, a whole round. The *loop*: everything that decoding does besides, between those steps. And within a step the
engine's *forward* alone. `attained` holds the loop against the steps; `forward_share` holds both against the forwards,
and is the stricter one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from layerskip.analysis.step_times import StepTimer
from layerskip.benchmark.alternation import Case, Row
from layerskip.benchmark.summary import Estimate, estimate
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from layerskip.decoding.loop import DecodeLoop, DecodeRequest
from layerskip.decoding.stats import DecodeStats
from layerskip.engines import Engine
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import Sampler, SamplingParams

_SHOTS = 2
"""Of every step at one visit; their mean counts, as the decode loop's seconds are a sum too."""
_MOST_COUNTED = 17
"""Target forwards over 1..so many tokens are timed whether they occur or not."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of single steps at one prompt."""

    target_s: Mapping[int, float]
    """By tokens verified together, n = 1 being the target alone."""
    draft_s: Mapping[int, float]
    """By draft tokens: the whole draft. Of rounds on the device that of gamma tokens alone, by what a round takes
    beyond its verification."""
    round_s: Mapping[int, float]
    """By draft tokens: draft and verification, as decoding runs them."""
    lookup_s: Mapping[int, float]
    """By tokens looked up: their verification, as decoding runs it."""


class StepTurn:
    """A turn that times the steps of decoding a prompt, at the middle of its text.

    Cost of a turn: `_SHOTS` of every step, and a forward over the text for each length of a draft.
    """

    name = "steps"

    def __init__(self, model: LayerSkipModel, config: DecodeConfig, num_cases: int, max_new_tokens: int) -> None:
        self.samples: list[list[StepSeconds]] = [[] for _ in range(num_cases)]
        self._model = model
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._timer = StepTimer(model, config.max_gamma)
        self._stats: dict[str, DecodeStats] = {}

    def warm_up(self, case: Case) -> None:
        self._time(case)

    def take(self, index: int, case: Case) -> None:
        self.samples[index].append(self._time(case))

    def _time(self, case: Case) -> StepSeconds:
        text, config = middle_of(case), self._config
        lengths, looked_up = self._lengths(case)
        # On the device what was looked up is verified as if it were as long as it may be.
        most = config.lookup_gamma if self._timer.rounds_on_device else 0
        looked_up_rows = {k: max(k, most) + 1 for k in looked_up}
        longest = min(config.max_gamma + 1, _MOST_COUNTED)
        counts = sorted({*range(1, longest + 1), *(k + 1 for k in lengths), *looked_up_rows.values()})
        target_s = _means(self._timer.verify_s(text, counts * _SHOTS), counts)
        draft_s = self._drafts_s(text, lengths)
        rounds_s = self._timer.rounds_s(text, config, lengths * _SHOTS)
        parts_s = {k: s + target_s[k + 1] for k, s in draft_s.items()}
        round_s = parts_s if rounds_s is None else _means(rounds_s, lengths)
        return StepSeconds(target_s, draft_s, round_s, {k: target_s[rows] for k, rows in looked_up_rows.items()})

    def _drafts_s(self, text: list[int], lengths: Sequence[int]) -> dict[int, float]:
        config = self._config
        # On the device the drafts of a round are made whether they are wanted or not.
        told = lengths[-1:] if self._timer.rounds_on_device else lengths
        drafted_by = [config.drafted_by] * _SHOTS
        found = {}
        for length in told:
            per_token = self._timer.draft_s(text, drafted_by, gamma=length, threshold=config.draft_threshold > 0.0)
            found[length] = length * sum(per_token) / _SHOTS
        return found

    def _lengths(self, case: Case) -> tuple[list[int], list[int]]:
        """Of drafts that are computed and of those that are looked up, as decoding this prompt once has them; gamma."""
        if not self._config.speculates:
            return [], []
        if case.prompt_id not in self._stats:
            run = decode(self._model.engine, self._model, self._config, case, self._max_new_tokens)
            self._stats[case.prompt_id] = run
        computed, looked_up = rounds_by_length(self._stats[case.prompt_id])
        own = {*computed, self._config.gamma} if self._config.computes_drafts else set()
        return sorted(own), sorted(looked_up)


def _means(seconds: Sequence[float], lengths: Sequence[int]) -> dict[int, float]:
    """By length, where `seconds` holds the shots of all lengths one after the other."""
    return {length: sum(seconds[i :: len(lengths)]) / _SHOTS for i, length in enumerate(lengths)}


def middle_of(case: Case) -> list[int]:
    """Prompt and half of the reference: attention's cost at the run's mean length."""
    return [*case.prompt_ids, *case.reference_ids[: len(case.reference_ids) // 2]]


def rounds_by_length(stats: DecodeStats) -> tuple[dict[int, int], dict[int, int]]:
    """How many rounds drafted exactly k tokens: those with any that were computed, and those with none."""
    reached = [*stats.drafted_by_position, 0]
    looked_up = {k: count for k, count in enumerate(stats.lookup_rounds_by_drafted, start=1) if count}
    computed = {k: reached[k - 1] - reached[k] - looked_up.get(k, 0) for k in range(1, len(reached))}
    return {k: count for k, count in computed.items() if count}, looked_up


def allowed_s(stats: DecodeStats, steps: StepSeconds) -> float:
    """Seconds that this run's own steps take by themselves, with nothing between them, lookups included."""
    computed, looked_up = rounds_by_length(stats)
    seconds = sum(count * steps.round_s[k] for k, count in computed.items())
    seconds += sum(count * steps.lookup_s[k] for k, count in looked_up.items())
    return seconds + stats.num_target_only * steps.target_s[1]


def attained(row: Row, steps: StepTurn) -> Estimate | None:
    """Share of the decode seconds that the steps explain, paired: same prompt, same repeat. 1 minus it is the loop's.

    Above 1 where the steps, timed one by one, came out slower than within the run, by chance.
    """
    by_prompt = []
    for samples, step_samples in zip(row.samples, steps.samples, strict=True):
        pairs = ((one, step) for one, step in zip(samples, step_samples, strict=True) if one.num_timed)
        by_prompt.append([allowed_s(one.stats, step) / one.decode_s for one, step in pairs if one.stats is not None])
    return estimate(by_prompt)


def target_estimates(steps: StepTurn) -> dict[int, Estimate]:
    """Seconds of a target forward with its verdict, by tokens."""
    return _by_length([[one.target_s for one in samples] for samples in steps.samples])


def target_ratios(steps: StepTurn) -> dict[int, Estimate]:
    """The same over that of the target alone, paired."""
    relative = [[{n: s / one.target_s[1] for n, s in one.target_s.items()} for one in all_] for all_ in steps.samples]
    return _by_length(relative)


def draft_estimates(steps: StepTurn) -> dict[int, Estimate]:
    """Seconds of one draft token, by the length of the draft."""
    per_token = [[{k: s / k for k, s in one.draft_s.items()} for one in samples] for samples in steps.samples]
    return _by_length(per_token)


def draft_ratio(steps: StepTurn) -> Estimate | None:
    """A draft token, averaged over the longest draft, over the target alone; paired."""
    by_prompt = [
        [one.draft_s[k] / k / one.target_s[1] for one in samples for k in [max(one.draft_s, default=0)] if k]
        for samples in steps.samples
    ]
    return estimate(by_prompt)


def _by_length(samples: Sequence[Sequence[Mapping[int, float]]]) -> dict[int, Estimate]:
    lengths = sorted({length for of_prompt in samples for one in of_prompt for length in one})
    found = {n: estimate([[one[n] for one in of_prompt if n in one] for of_prompt in samples]) for n in lengths}
    return {n: one for n, one in found.items() if one is not None}


def decode(engine: Engine, model: LayerSkipModel, config: DecodeConfig, case: Case, max_new_tokens: int) -> DecodeStats:
    """One greedy run of our loop on this engine; its counters and seconds."""
    stats = DecodeStats()
    request = DecodeRequest(case.prompt_ids, max_new_tokens, model.eos_token_ids)
    for _ in DecodeLoop(engine, config, Sampler(SamplingParams(), None)).run(request, stats):
        pass
    return stats


def forward_share(
    model: LayerSkipModel, config: DecodeConfig, cases: Sequence[Case], max_new_tokens: int
) -> Estimate | None:
    """Share of the decode seconds spent inside the engine's `forward`, from one run of every prompt.

    Both clocks run in the same run, so a machine's moods cancel. On a GPU the device is synchronised around every
    forward, which a run does not do: there it is the share of a run made so. None where the engine takes more than a
    forward into its hands (whole rounds on the device, siblings): forwards cannot be told apart then.
    """
    by_prompt = []
    for case in cases:
        clock = _ForwardClock(model.engine)
        stats = decode(cast(Any, clock), model, config, case, max_new_tokens)
        if (
            len(clock.forwards_s)
            != 1 + stats.num_target_only + stats.num_rounds + stats.num_drafted - stats.num_looked_up
        ):
            return None
        if stats.decode_s > 0:
            by_prompt.append([sum(clock.forwards_s[1:]) / stats.decode_s])
    return estimate(by_prompt)


class _ForwardClock:
    """An engine that writes down the seconds of every forward; the first is the prompt's."""

    def __init__(self, engine: Engine) -> None:
        self.forwards_s: list[float] = []
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        self._engine.synchronize()
        start = time.perf_counter()
        logits = self._engine.forward(input_ids, mask, num_logits=num_logits)
        self._engine.synchronize()
        self.forwards_s.append(time.perf_counter() - start)
        return logits
