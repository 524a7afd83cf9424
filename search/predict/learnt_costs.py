"""What trials teach about the costs: their own steps, timed in turns with plain decoding's.

A burst of repeats tells what steps cost in that second; trials time thousands of steps, spread over the whole study, in
the very loop that is predicted. On a virtual machine bursts put the cost of a verification far apart from one to the
next, while that of the trials hardly moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from layerskip.config.decode_config import DraftWeights
from layerskip.config.skip_mask import DRAFT_BITS, SkipMask
from layerskip.decoding.stats import DecodeStats
from search.predict.costs import CostModel, kept_of, named, pool_costs
from search.study.attributes import (
    COUNTS,
    DRAFT_S,
    DRAFT_WEIGHTS,
    LOOKUP_COUNTS,
    LOOKUP_ROUNDS,
    NUM_SIBLINGS,
    PLAIN_STEP,
    ROUNDS,
    SKIP_MASK,
)
from search.study.space import DRAFT_THRESHOLD, SIBLING_THRESHOLD, SIBLINGS

Floats = NDArray[np.float64]

_MOMENT = 0.05
"""Standard deviation, relative, of what a step costs from one trial to the next, in plain steps."""
_SINGLE = 0.15
"""Of a single step."""
_COMMON, _OWN = 0.1, 0.05
"""How far the measured costs may be off, relative: all verifications together, and each number of drafts by itself."""
_TERM = 0.1
"""Each term of a draft step."""
_THRESHOLD = 0.02
"""What looking at the confidence costs may be off, in target steps: it is the difference of two bursts."""


@dataclass(frozen=True)
class _Steps:
    """One trial's steps, in plain steps of the same moments."""

    weights: str | None
    """Name of the trained weights that drafted, see `named`; None of a draft under a mask."""
    mask: SkipMask
    kept: tuple[float, float, float, float]
    """1, attention and MLP sublayers that the draft keeps, and whether it looks at its confidence."""
    draft: float | None
    """A draft token; None where the engine runs a round in one piece."""
    num_drafted: int
    rounds: tuple[tuple[int, int, float], ...]
    """(drafts, how many rounds had so many, one such round), all drafted under the mask."""
    siblings: float
    """Of each of these drafts on average, verified beside it."""
    lookups: tuple[tuple[int, int, float], ...]
    """The same of rounds that were looked up, which verify alone."""


def step_times_of(steps: DecodeStats, rounds: DecodeStats) -> dict[str, Any]:
    """The attributes by which a trial teaches, of all its prompts decoded plainly and by the config; none where plain
    decoding took no step."""
    if not steps.num_target_only or not rounds.round_s_by_drafted:
        return {}
    attributes: dict[str, Any] = {PLAIN_STEP: steps.decode_s / steps.num_target_only}
    attributes |= {ROUNDS: rounds.round_s_by_drafted, COUNTS: rounds.rounds_by_drafted}
    if rounds.num_siblings:
        attributes |= {NUM_SIBLINGS: rounds.num_siblings}
    if rounds.num_lookup_rounds:
        attributes |= {LOOKUP_ROUNDS: rounds.lookup_round_s_by_drafted, LOOKUP_COUNTS: rounds.lookup_rounds_by_drafted}
    return attributes


class CostLearner:
    """Corrects measured costs by trials. Keeps what it has read of finished trials, by number."""

    def __init__(self) -> None:
        self._read: dict[int, _Steps | None] = {}

    def learn(self, measured: CostModel, trials: Sequence[FrozenTrial]) -> CostModel:
        """`measured` as it stands after these trials; itself if none of them tells anything.

        Only ratios to the target's step are learnt, which keeps its measured seconds.
        Cost: some ten microseconds a trial.
        """
        informative = [steps for trial in trials if (steps := self._steps(trial)) is not None]
        if not informative:
            return measured
        return _learn_verifications(_learn_weights(_learn_drafts(measured, informative), informative), informative)

    def _steps(self, trial: FrozenTrial) -> _Steps | None:
        if trial.state != TrialState.COMPLETE:
            return None
        if trial.number not in self._read:
            self._read[trial.number] = _steps_of(trial)
        return self._read[trial.number]


def learnt_costs_of(study: optuna.Study, history: Sequence[str]) -> CostModel | None:
    """The costs as they stand at the end of a study, whose `history` of measurements is this; None if no trial taught.

    Raises: ValueError if a measurement cannot be read.
    """
    measured = pool_costs([CostModel.parse(one) for one in history])
    learnt = CostLearner().learn(measured, study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    return None if learnt is measured else learnt


def _steps_of(trial: FrozenTrial) -> _Steps | None:
    attrs = trial.user_attrs
    plain_s, round_s, positions = (attrs.get(name) for name in (PLAIN_STEP, ROUNDS, "drafted_by_position"))
    if not plain_s or not round_s or not positions or not sum(positions):
        return None
    mask = SkipMask.parse(attrs[SKIP_MASK])
    # Without counts of their own, all rounds drafted under the mask, and as many drafted exactly n as reached position
    # n - 1 and not n.
    counts = attrs.get(COUNTS) or [here - there for here, there in zip(positions, [*positions[1:], 0], strict=True)]
    num_drafted = sum(n * m for n, m in enumerate(counts, 1))
    draft = attrs[DRAFT_S] / num_drafted / plain_s if attrs.get(DRAFT_S) and num_drafted else None
    return _Steps(
        weights=named(DraftWeights(**weights)) if (weights := attrs.get(DRAFT_WEIGHTS)) else None,
        mask=mask,
        kept=(*kept_of(mask), float(_watches_confidence(trial.params))),
        draft=draft,
        num_drafted=num_drafted,
        rounds=_rounds(counts, round_s, plain_s),
        siblings=attrs.get(NUM_SIBLINGS, 0) / max(1, num_drafted),
        lookups=_rounds(attrs.get(LOOKUP_COUNTS, ()), attrs.get(LOOKUP_ROUNDS, ()), plain_s),
    )


def _watches_confidence(params: Mapping[str, Any]) -> bool:
    """Whether a draft under a mask looks at its confidence."""
    branches_there = params.get(SIBLINGS, 0) > 0 and params.get(SIBLING_THRESHOLD, 1.0) < 1.0
    return bool(branches_there or params.get(DRAFT_THRESHOLD, 0.0) > 0.0)


def _rounds(counts: Sequence[int], seconds: Sequence[float], plain_s: float) -> tuple[tuple[int, int, float], ...]:
    pairs = enumerate(zip(counts, seconds, strict=False), 1)
    return tuple((n, m, s / m / plain_s) for n, (m, s) in pairs if m > 0)


def _learn_drafts(cost: CostModel, trials: Sequence[_Steps]) -> CostModel:
    """Terms of a draft step, with weights as they are and of fewer bits."""
    measured = (cost.fixed_s, float(np.mean(cost.attention_s)), float(np.mean(cost.mlp_s)))
    if (learnt := _learn_terms(cost, measured, [one for one in trials if one.mask.bits is None])) is not None:
        fixed, attention, mlp, threshold = learnt
        cost = dataclasses.replace(
            cost,
            fixed_s=fixed,
            attention_s=(attention,) * len(cost.attention_s),
            mlp_s=(mlp,) * len(cost.mlp_s),
            threshold_s=threshold,
        )
    for bits in DRAFT_BITS:
        rounded, rounded_s = [one for one in trials if one.mask.bits == bits], cost.rounded_s(bits)
        if rounded_s is not None and (learnt := _learn_terms(cost, rounded_s, rounded)) is not None:
            cost = cost.with_rounded(bits, learnt[:3])
    return cost


def _terms(cost: CostModel, mask: SkipMask) -> tuple[float, float, float, float]:
    """What is fixed, an attention, an MLP, and a look at the confidence."""
    whole = (cost.fixed_s, cost.attention_s[0], cost.mlp_s[0])
    return (*(cost.rounded_s(mask.bits) or whole), cost.threshold_s)


def _learn_terms(
    cost: CostModel, measured: tuple[float, float, float], trials: Sequence[_Steps]
) -> tuple[float, float, float, float] | None:
    """(Fixed, attention, MLP, threshold): least squares over trials, the measured terms counted in as what they are.
    None where no trial tells."""
    alone = cost.verify_s[0]
    timed = [
        (one, one.draft + cost.saved_s(one.mask) / alone)
        for one in trials
        if one.draft is not None and one.weights is None
    ]
    if not timed:
        return None
    terms = np.array([*measured, cost.threshold_s]) / alone
    prior_sigma = np.append(np.maximum(_TERM * terms[:3], 1e-4), _THRESHOLD)
    kept, draft = np.array([one.kept for one, _ in timed]), np.array([share for _, share in timed])
    variances = [_MOMENT**2 + _SINGLE**2 / one.num_drafted for one, _ in timed]
    errors = draft * np.sqrt(variances)
    matrix = np.concatenate([kept / errors[:, None], np.diag(1 / prior_sigma)])
    learnt = np.linalg.lstsq(matrix, np.append(draft / errors, terms / prior_sigma), rcond=None)[0]
    fixed, attention, mlp, threshold = (np.maximum(learnt, 0.0) * alone).tolist()
    return fixed, attention, mlp, threshold


def _learn_weights(cost: CostModel, trials: Sequence[_Steps]) -> CostModel:
    """A draft token of trained weights: the trials' mean, the measured one counted in as what it is. What a round goes
    over again, and the prompt, are in the trials' alone."""
    alone = cost.verify_s[0]
    learnt = dict(cost.weights_s)
    for name in {one.weights for one in trials if one.weights is not None}:
        shares, certainties = [cost.by_weights_s(name) / alone], [1 / _TERM**2]
        for one in trials:
            if one.weights == name and one.draft is not None:
                shares.append(one.draft)
                certainties.append(1 / (_MOMENT**2 + _SINGLE**2 / one.num_drafted))
        learnt[name] = alone * float(np.average(shares, weights=certainties))
    return dataclasses.replace(cost, weights_s=learnt)


def _learn_verifications(cost: CostModel, trials: Sequence[_Steps]) -> CostModel:
    """Verifications by number of drafts: what the trials' rounds cost besides their drafts, and between them and
    the measured ones the most likely, where an error is partly that of all numbers and partly one's own."""
    alone, size = cost.verify_s[0], len(cost.verify_s)
    certainties, sums = np.zeros((2, size))
    for one in trials:
        by_terms = (
            (float(np.dot(_terms(cost, one.mask), one.kept)) - cost.saved_s(one.mask)) / alone
            if one.weights is None
            else cost.by_weights_s(one.weights) / alone
        )
        draft = one.draft if one.draft is not None else by_terms
        by_mask = [(round(n * (1 + one.siblings)), count, seconds - n * draft) for n, count, seconds in one.rounds]
        for n, count, seconds in (*by_mask, *one.lookups):
            if n < size:
                certainty = 1 / (_MOMENT**2 + _SINGLE**2 / count)
                certainties[n] += certainty
                sums[n] += certainty * (seconds * alone / cost.verify_s[n] - 1.0)
    seen = np.flatnonzero(certainties)
    if not len(seen):
        return cost
    prior = _COMMON**2 + _OWN**2 * np.eye(size)
    across = prior[:, seen]
    gain = across @ np.linalg.inv(across[seen] + np.diag(1 / certainties[seen]))
    factors = 1.0 + gain @ (sums[seen] / certainties[seen])
    factors[0] = 1.0  # the unit of all others
    learnt = np.maximum(np.array(cost.verify_s) * factors, alone * 1e-3)
    return dataclasses.replace(cost, verify_s=tuple(learnt.tolist()))
