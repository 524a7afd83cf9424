"""Objective: one trial = config -> lossless gate -> paired measurement -> value and attributes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import TrialState

from layerskip.analysis.intervals import ratio_interval
from layerskip.config.decode_config import DecodeConfig
from search.measure.decoder import Decoder
from search.measure.pairs import LosslessViolation, Pair, add_up, measure_pair, speedup
from search.measure.reference import Reference
from search.outlook.outlook import Outlook
from search.predict.learnt_costs import step_times_of
from search.predict.replay import live_counts
from search.stop import StopSignal
from search.study import attributes as names
from search.study.leaderboard import Standings, make_standings
from search.study.space import SearchSpace
from search.study.trials import INTERRUPTED, WITHDRAWN, interactions_of
from search.trials.sampler import ProposalSampler
from search.workers.hang import watched
from search.workers.process import process_token
from search.workers.reaping import interrupt


class TrialFailed(RuntimeError):  # noqa: N818 (reads as the fact it states)
    """A trial broke; the reason is in its attribute `failure`."""


@dataclass(frozen=True)
class Outcome:
    """What a trial measured."""

    pairs: tuple[Pair, ...]
    steps: tuple[int, ...]
    """Places of the prompts in the reference."""
    speedup: float
    """As on the average prompt (see `Standings.standardised`), so that trials compare."""
    stopped_early: bool


@dataclass
class Objective:
    """Callable for `study.optimize`; maximises tokens/s, or the speedup.

    Never raises for a config that is merely bad. What is timed is what follows the prompt, and the forward over that is
    made once.
    """

    decoder: Decoder
    space: SearchSpace
    reference: Reference
    sampler: ProposalSampler
    stop: StopSignal
    clock: Callable[[], float] = time.perf_counter
    outlook: Outlook | None = None
    """Predictions to write beside each measurement."""
    queues_again: bool = False
    """Whether a trial that a signal ends is put into the study's queue."""
    is_speedup: bool = False
    """Whether the value is the speedup over plain decoding on this device, instead of tokens/s."""
    limit_s: float | None = None
    """Seconds that a trial may take; None = as long as it likes."""
    hang_grace_s: float = 30.0
    """Seconds after that in which it must have ended, or the process is ended."""

    def __post_init__(self) -> None:
        self.decoder = self.decoder.remembering()

    def __call__(self, trial: optuna.Trial) -> float:
        start = self.clock()
        if self.sampler.is_surplus:
            trial.set_user_attr(names.FAILURE, WITHDRAWN)
            raise TrialFailed(WITHDRAWN)
        reason = None
        try:
            config = self.space.suggest(trial)
            self._describe(trial, config)
            complete = trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            standings = standings_of(complete, self.space, self.reference)
            with watched(trial, self.limit_s, self.hang_grace_s), self.stop.limited(self.limit_s):
                outcome = self._measure(trial, config, standings)
        except KeyboardInterrupt:
            if self.queues_again:
                interrupt(trial.study, trial)
            else:
                trial.set_user_attr(names.FAILURE, INTERRUPTED)
            raise
        except LosslessViolation as violation:
            # Pruned: only complete trials can be the best one, here and in the dashboard.
            details = {
                names.LOSSLESS: False,
                names.VIOLATION: str(violation),
                names.VIOLATION_PROMPT: violation.prompt_id,
            }
            _set_all(trial, details)
            raise optuna.TrialPruned(str(violation)) from None
        except Exception as error:  # noqa: BLE001 (whatever a config does to the machinery fails this trial alone)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        if reason is not None:  # outside the except block: there the traceback would keep the tensors alive
            trial.set_user_attr(names.FAILURE, reason)
            self.decoder.free_memory()
            raise TrialFailed(reason)
        return self._record(trial, outcome, self.clock() - start)

    def _describe(self, trial: optuna.Trial, config: DecodeConfig) -> None:
        proposal = self.sampler.proposal_of(trial.number)
        mask = config.skip_mask
        attributes: dict[str, Any] = {
            names.PROCESS: process_token(),
            names.ORIGIN: proposal.origin,
            names.PROPOSING_S: round(self.sampler.proposing_s, 4),
            names.TRIAL_DRAFTER: config.way,
            names.SKIP_MASK: str(mask),
            names.NUM_SKIPPED_ATTENTION: mask.num_skipped_attention,
            names.NUM_SKIPPED_MLP: mask.num_skipped_mlp,
        }
        if config.lookup is not None:
            attributes[names.LOOKUP] = config.lookup.model_dump(exclude_none=True)
        if config.draft_weights is not None:
            attributes[names.DRAFT_WEIGHTS] = config.draft_weights.model_dump()
        if proposal.repeat_of is not None:
            attributes[names.REPEAT_OF] = proposal.repeat_of
        if proposal.considered:
            attributes[names.CONSIDERED] = proposal.considered
        if proposal.gain is not None:
            attributes[names.EXPECTED_GAIN] = round(proposal.gain, 5)
        _set_all(trial, attributes)

    def _measure(self, trial: optuna.Trial, config: DecodeConfig, standings: Standings) -> Outcome:
        """Pairs on this trial's prompts, in order, until all are done or the trial is hopeless."""
        pairs: list[Pair] = []
        steps = self.reference.steps(standings.num_full_trials(trial.params))
        interactions = self._predict(trial, config, steps, standings)
        estimate = 1.0
        for count, step in enumerate(steps, start=1):
            case = self.reference.cases[step]
            with self.stop.interruptible():
                pair = measure_pair(self.decoder, case, config, plain_first=(step + trial.number) % 2 == 0)
            pairs.append(pair)
            trial.report(pair.ratio, step)
            of_these = interactions[:count] if interactions else None
            estimate = standings.standardised(steps[:count], [one.ratio for one in pairs], of_these)
            if count < len(steps) and standings.is_hopeless(estimate, count):
                return Outcome(tuple(pairs), steps[:count], estimate, stopped_early=True)
        return Outcome(tuple(pairs), steps, estimate, stopped_early=False)

    def _predict(
        self, trial: optuna.Trial, config: DecodeConfig, steps: Sequence[int], standings: Standings
    ) -> list[float] | None:
        """Write down what is expected, before the clock starts. Returns the interactions, see `interactions_of`."""
        if self.outlook is None or not config.speculates:
            return None
        earlier = trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        forecast = self.outlook.describe_trial(config, steps, earlier)
        interactions = interactions_of(forecast)
        expected = standings.standardised(steps, forecast[names.PREDICTED_RATIOS], interactions)
        forecast |= {
            names.PREDICTED_SPEEDUP: expected,
            names.PREDICTED_TOKENS_PER_S: expected * self.reference.plain_tokens_per_s,
        }
        _set_all(trial, forecast)
        return interactions

    def _record(self, trial: optuna.Trial, outcome: Outcome, seconds: float) -> float:
        ratios = [pair.ratio for pair in outcome.pairs]
        stats = [pair.speculative.stats for pair in outcome.pairs]
        total = add_up(stats)
        interval = ratio_interval(ratios, seed=0)
        standardised = outcome.speedup / speedup(outcome.pairs)
        plain, tokens_per_s = self.reference.plain_tokens_per_s, outcome.speedup * self.reference.plain_tokens_per_s
        value = outcome.speedup if self.is_speedup else tokens_per_s
        attributes: dict[str, Any] = {
            names.SPEEDUP: outcome.speedup,
            names.SPEEDUP_MEASURED: speedup(outcome.pairs),
            names.STOPPED_EARLY: outcome.stopped_early,
            names.LOSSLESS: True,
            names.NUM_PROMPTS: len(ratios),
            names.NUM_TIES: sum(pair.speculative.is_tie for pair in outcome.pairs),
            names.IS_TIE_BY_PROMPT: [pair.speculative.is_tie for pair in outcome.pairs],
            names.PROMPT_STEPS: list(outcome.steps),
            names.RATIOS: ratios,
            names.TOKENS_PER_S_BY_PROMPT: [pair.speculative.tokens_per_s for pair in outcome.pairs],
            names.PLAIN_TOKENS_PER_S_BY_PROMPT: [pair.plain.tokens_per_s for pair in outcome.pairs],
            names.ACCEPTED_BY_POSITION: total.accepted_by_position,
            names.DRAFTED_BY_POSITION: total.drafted_by_position,
            names.NUM_TARGET_ONLY: total.num_target_only,
            names.FORWARDS: [live_counts([one]).tolist() for one in stats],
            names.DRAFT_S: total.draft_s,
            names.VERIFY_S: total.verify_s,
            names.SECONDS: seconds,
        }
        if self.is_speedup:  # which of the workers' devices it was matters
            attributes |= {names.TOKENS_PER_S: tokens_per_s, names.PLAIN_TOKENS_PER_S: plain}
        else:
            attributes |= step_times_of(add_up([pair.plain.stats for pair in outcome.pairs]), total)
        if interval is not None:
            attributes |= {
                names.SPEEDUP_CI_LOW: interval.low * standardised,
                names.SPEEDUP_CI_HIGH: interval.high * standardised,
            }
        if total.acceptance_rate is not None:
            attributes[names.ACCEPTANCE_RATE] = total.acceptance_rate
        if total.mean_accepted_length is not None:
            attributes[names.MEAN_ACCEPTED_LENGTH] = total.mean_accepted_length
        _set_all(trial, attributes)
        return self._below_best(trial, value) if outcome.stopped_early else value

    def _below_best(self, trial: optuna.Trial, value: float) -> float:
        """A trial that saw fewer prompts cannot hold the best value, whatever its estimate."""
        complete = trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        values = [one.value for one in complete if one.value is not None]
        return min(value, 0.999 * max(values)) if values else value


def standings_of(trials: Sequence[optuna.trial.FrozenTrial], space: SearchSpace, reference: Reference) -> Standings:
    """The standings of a study whose trials use this reference."""
    return make_standings(trials, space, reference.noise_sigma, reference.num_per_trial)


def _set_all(trial: optuna.Trial, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        trial.set_user_attr(name, value)


def violations_in(trials: Sequence[optuna.trial.FrozenTrial]) -> list[str]:
    """Lossless violations stored in a study, this run's and earlier ones."""
    return [
        f"trial {one.number}: {one.user_attrs.get(names.VIOLATION)} under mask {one.user_attrs.get(names.SKIP_MASK)}"
        for one in trials
        if one.user_attrs.get(names.LOSSLESS) is False
    ]
