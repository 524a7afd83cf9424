"""ReplayProposer: measures the best corrected prediction, nothing twice by accident; what its correction learns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.teacher_forcing import ForcedText
from search.outlook.forecast import Candidate, Candidates, Pool, make_pool
from search.outlook.refinement import refine_pool
from search.predict.costs import CostModel, measure_costs
from search.predict.predictor import Predictor
from search.predict.replay import TextRows
from search.predict.sensitivity import measure_sensitivity
from search.study.space import SearchSpace
from search.study.trials import Key, counted, key_of
from search.trials.proposals import Proposal, ProposeOptions
from search.trials.replay_proposer import ReplayProposer
from tests.search.helpers.fakes import FINGERPRINT, SPACE, true_speedup
from tests.search.helpers.forcing import FakeForcing
from tests.search.helpers.outlook import PlantedTimer, record, record_failure, space_of

LENGTH = 13
NUM_PROMPTS = 3
SIGMA = 0.01
SHAPES = ("no-skip", "early-exit", "alternating", "middle-half", "later-attention", "later-mlp")
Measure = Callable[[DecodeConfig, Sequence[float]], list[float]]
"""Ratios that a config shows, given those that were forecast."""


def as_forecast(_config: DecodeConfig, forecast: Sequence[float]) -> list[float]:
    return list(forecast)


def as_the_fake_decoder(config: DecodeConfig, _forecast: Sequence[float]) -> list[float]:
    return [true_speedup(config)] * NUM_PROMPTS


def proposed(proposal: Proposal) -> Key:
    assert proposal.params is not None
    return key_of(proposal.params)


def cost_of(space: SearchSpace, **changes: Any) -> CostModel:
    return measure_costs(PlantedTimer(**changes), [(1,)], space, FINGERPRINT, repeats=1)


@dataclass
class Lab:
    """A study whose trials are measured by a formula; proposers for it are made as a run and as a resume would."""

    space: SearchSpace = SPACE
    measure: Measure = as_forecast
    repeat_every: int = 4
    num_readings: int = 5
    max_pool: int = 40
    seed: int = 0
    num_more: int = 0
    """Texts that no trial decodes."""
    study: optuna.Study = field(default_factory=lambda: optuna.create_study(direction="maximize"))
    proposals: list[Proposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.candidates, self.forcing = self._candidates()
        sensitivity = measure_sensitivity(self.candidates.predictor.agreement, self.space)
        pool = make_pool(self.candidates, self.space, sensitivity, seed=0, seconds=1e9, max_readings=self.max_pool)
        if self.num_more:
            pool = refine_pool(pool, self.candidates, seconds=1e9)
        # As it is stored: unrounded predictions order near-equals in another way than those a resume reads.
        self.pool = Pool.from_json(pool.to_json(self.candidates), self.candidates)
        self.proposer = self._proposer(self.candidates, self.pool)

    def resumed(self) -> ReplayProposer:
        """Of a new process that has nothing but what is stored."""
        candidates, self.forcing = self._candidates()
        return self._proposer(candidates, Pool.from_json(self.pool.to_json(self.candidates), candidates))

    def propose(self, proposer: ReplayProposer | None = None, trials: Sequence[FrozenTrial] | None = None) -> Proposal:
        trials = self.trials if trials is None else trials
        index = counted(trials)
        return (proposer or self.proposer).propose(trials, index, np.random.default_rng([self.seed, index, 0]))

    def run(self, count: int) -> None:
        for _ in range(count):
            self.proposals.append(self.propose())
            self.add(self.proposals[-1])

    def add(self, proposal: Proposal) -> FrozenTrial:
        assert proposal.params is not None
        config = self.space.to_config(proposal.params)
        forecast = self.candidates.predictor.forecast(config, range(NUM_PROMPTS))[0]
        ratios = self.measure(config, forecast)
        attrs = {"considered": json.loads(json.dumps(proposal.considered))} if proposal.considered else {}
        return record(self.study, self.space, proposal.params, ratios, forecast_ratios=forecast, **attrs)

    @property
    def trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _candidates(self) -> tuple[Candidates, FakeForcing]:
        forcing = FakeForcing([ForcedText((i,), tuple(range(LENGTH))) for i in range(NUM_PROMPTS)])
        rows = TextRows(forcing.lengths, forcing.target_probs, LENGTH)
        predictor = Predictor(forcing, rows, cost_of(self.space))
        if self.num_more:
            texts = [ForcedText((NUM_PROMPTS + i,), tuple(range(LENGTH))) for i in range(self.num_more)]
            self.more = FakeForcing(texts)
            predictor = predictor.with_more(self.more, TextRows(self.more.lengths, self.more.target_probs, LENGTH))
        return Candidates(predictor, self.space), forcing

    def _proposer(self, candidates: Candidates, pool: Pool) -> ReplayProposer:
        options = ProposeOptions(self.repeat_every, SIGMA, NUM_PROMPTS)
        return ReplayProposer(self.space, options, candidates, pool, num_readings=self.num_readings)


@pytest.mark.parametrize("measure", [as_forecast, as_the_fake_decoder])
def test_nothing_is_measured_twice_but_by_turns(measure: Measure) -> None:
    lab = Lab(measure=measure)
    lab.run(40)
    repeats = [i for i, one in enumerate(lab.proposals) if one.origin == "repeat"]
    assert repeats == list(range(3, 40, 4))
    others = [proposed(one) for i, one in enumerate(lab.proposals) if i not in repeats]
    assert len(set(others)) == len(others)
    for i in repeats:
        again = lab.proposals[i]
        assert again.repeat_of is not None
        first = next(n for n, one in enumerate(lab.proposals) if one.params == again.params)
        assert again.repeat_of == first < i
        assert again.considered is None
    assert all(one.repeat_of is None for i, one in enumerate(lab.proposals) if i not in repeats)


def test_of_the_four_best_the_least_measured_is_repeated() -> None:
    lab = Lab(repeat_every=3, measure=as_the_fake_decoder)
    lab.run(24)
    speeds = {proposed(one): true_speedup(SPACE.to_config(dict(one.params or {}))) for one in lab.proposals}
    for i in range(2, 24, 3):
        seen = [proposed(one) for one in lab.proposals[:i]]
        leaders = sorted(set(seen), key=lambda key: -speeds[key])[:4]
        again = proposed(lab.proposals[i])
        assert speeds[again] >= speeds[leaders[-1]] - 1e-9
        # Among equals any four may be the best; of those that are better for sure, none was measured less often.
        sure = [key for key in leaders if speeds[key] > speeds[leaders[-1]]]
        assert all(seen.count(again) <= seen.count(key) for key in sure)


@pytest.mark.parametrize("every", [0, 1, 7])
def test_repeats_come_as_often_as_asked_for(every: int) -> None:
    """Not before something was measured in full."""
    lab = Lab(repeat_every=every)
    lab.run(15)
    repeats = [i for i, one in enumerate(lab.proposals) if one.origin == "repeat"]
    assert repeats == ([] if every == 0 else [i for i in range(every - 1, 15, every) if i > 0])


def test_the_first_proposal_is_the_best_prediction_of_all() -> None:
    lab = Lab()
    first = lab.propose()
    assert first.considered is not None
    fresh = lab.candidates.read(first.considered)
    best = max([*lab.pool.candidates, *fresh], key=lambda one: one.log_speedup)
    assert first.params == best.params
    assert first.origin == ("replay" if best in fresh else "pool")


def test_confirmed_predictions_are_taken_in_order() -> None:
    """Each proposal is the best prediction that is left, of the pool and of all ever considered."""
    lab = Lab(repeat_every=0, max_pool=30)
    lab.run(16)
    for i in range(12, 16, 2):  # the shapes have had their turns
        before, proposal = lab.proposals[:i], lab.proposals[i]
        known = list(lab.pool.candidates)
        for one in [*before, proposal]:
            known += lab.candidates.read(one.considered or [])
        measured = {proposed(one) for one in before}
        left = max(one.log_speedup for one in known if one.key not in measured)
        predicted = math.log(lab.candidates.predictor.forecast(lab.space.to_config(dict(proposal.params or {})), [])[1])
        # Less of what is like the measured ones is hoped for.
        assert predicted >= left - 0.02


def test_what_was_considered_and_not_chosen_is_chosen_later() -> None:
    """Of measured and broken trials; what an interrupted one considered will be considered again."""
    lab = Lab(repeat_every=0, num_readings=0)
    chosen, second, third, never = (Candidate(key_of(plain(mask)), 9.0 + i) for i, mask in enumerate((*NEAR, FAR[0])))
    write = lab.candidates.write
    record(lab.study, SPACE, chosen.params, [1.2], forecast_ratios=[1.2], considered=write([chosen, second]))
    record_failure(lab.study, SPACE, plain(FAR[1]), "out of memory", considered=write([third]))
    record_failure(lab.study, SPACE, never.params, "interrupted", considered=write([never]))
    proposal = lab.propose(lab.resumed())
    assert (proposal.params, proposal.origin, proposal.considered) == (third.params, "pool", [])
    for params in (third.params, plain(FAR[2])):
        record_failure(lab.study, SPACE, params, "out of memory")
    proposal = lab.propose(lab.resumed())
    assert (proposal.params, proposal.origin) == (second.params, "replay")


def test_other_settings_of_the_leading_mask_are_tried_too() -> None:
    lab = Lab(repeat_every=0, num_readings=0)
    leader, mask = lab.candidates.of(NEAR[0]), NEAR[0]
    lab.pool = Pool((leader,))
    for params in (dict(leader.params), plain(FAR[1])):
        record_failure(lab.study, SPACE, params, "out of memory")
    proposal = lab.propose(lab.resumed())
    best = [one.params for one in lab.candidates.variants(mask, 6) if one.params != leader.params]
    assert (proposal.params, proposal.origin) == (best[0], "pool")


def test_what_is_known_is_not_predicted_again() -> None:
    """The pool holds a single mask: what proposals come to must have been predicted for them or earlier ones."""
    lab = Lab(repeat_every=0)
    start = lab.candidates.of(SkipMask.none(6))
    lab.pool = Pool((start,))
    lab.proposer = lab.resumed()
    lab.run(30)
    origins = [one.origin for one in lab.proposals]
    assert set(origins) <= {"replay", "pool"}
    assert "replay" in origins
    earlier: set[Any] = {start.key}
    masks: set[SkipMask] = set()
    for one in lab.proposals:
        fresh = {candidate.key for candidate in lab.candidates.read(one.considered or [])}
        assert not fresh & earlier, "what is known is not predicted again"
        assert len(fresh) <= lab.num_readings
        masks |= {SPACE.to_mask(dict(key)) for key in fresh}
        if one.origin == "replay":
            assert SPACE.to_mask(dict(one.params or {})) in masks
        earlier |= fresh
    speedups = [
        lab.candidates.predictor.forecast(SPACE.to_config(dict(one.params or {})), [])[1] for one in lab.proposals
    ]
    assert max(speedups) > 1.3 * math.exp(start.log_speedup)


@pytest.mark.parametrize("measure", [as_forecast, as_the_fake_decoder])
def test_a_resume_proposes_the_same(measure: Measure) -> None:
    """At every trial, by a process that has only the stored pool and the `considered` of the trials."""
    lab = Lab(measure=measure)
    lab.run(30)
    trials = lab.trials
    for number in range(0, 30, 3):
        assert lab.propose(lab.resumed(), trials[:number]) == lab.proposals[number]
    late = lab.resumed()
    assert [lab.propose(late, trials[:number]) for number in range(22, 30)] == lab.proposals[22:]
    assert lab.propose(trials=trials[:8]) == lab.proposals[8], "one that has seen more is not misled by it"


def test_another_seed_considers_others() -> None:
    lab = Lab()
    one, other = (lab.proposer.propose([], 0, np.random.default_rng(seed)) for seed in (0, 1))
    assert one.considered != other.considered
    assert lab.proposer.propose([], 0, np.random.default_rng(0)) == one


def test_a_resume_after_a_recheck_proposes_the_same() -> None:
    """The costs moved after trial 8; the one shape that is left has another best setting by the new ones."""
    lab = Lab(repeat_every=0)
    lab.run(8)
    dear = cost_of(lab.space, verify_share=0.5)
    lab.candidates.predictor.set_costs(dear)
    lab.run(6)
    late = lab.resumed()
    late._candidates.predictor.set_costs(dear)
    assert lab.propose(late, lab.trials[:9]) == lab.proposals[9]


def test_an_interrupted_trial_is_proposed_again_and_a_failed_one_is_not() -> None:
    lab = Lab(repeat_every=0)
    lab.run(4)
    proposal = lab.propose()
    record_failure(lab.study, lab.space, proposal.params or {}, "interrupted", considered=proposal.considered)
    assert lab.propose() == proposal
    record_failure(lab.study, lab.space, proposal.params or {}, "out of memory", considered=proposal.considered)
    for _ in range(6):
        later = lab.propose()
        assert later.params != proposal.params
        lab.add(later)


def test_nothing_but_failures_is_no_reason_to_crash() -> None:
    lab, seen = Lab(), set()
    for _ in range(20):
        proposal = lab.propose()
        assert proposal.origin != "repeat"
        seen.add(proposed(proposal))
        record_failure(lab.study, lab.space, proposal.params or {}, "out of memory", considered=proposal.considered)
    assert len(seen) == 20


@pytest.mark.parametrize("space", [space_of(1, gamma_max=1), space_of(1, whole=True, gamma_max=1), space_of(2)])
def test_a_used_up_space_is_left_to_chance(space: SearchSpace) -> None:
    """Until then nothing is measured twice, and most masks are; then the sampler draws."""
    lab = Lab(space=space, repeat_every=0)
    seen = set()
    for _ in range(120):
        proposal = lab.propose()
        if proposal.origin == "random":
            break
        assert proposed(proposal) not in seen
        seen.add(proposed(proposal))
        lab.add(proposal)
    masks = {space.to_mask(dict(key)) for key in seen}
    assert len(masks) >= 0.75 * 2 ** len(space.bit_names)
    assert proposal == Proposal("random")


def test_eighty_layers_cost_no_more_readings_than_agreed() -> None:
    """160 bits. A resumed run reads its known shapes once more, and the leading mask."""
    lab = Lab(space=space_of(80), num_readings=6, repeat_every=0, max_pool=40)
    for _ in range(14):
        before = lab.forcing.num_readings
        proposal = lab.propose()
        assert lab.forcing.num_readings - before <= 6
        assert len(proposal.considered or []) <= 6
        lab.add(proposal)
    resumed = lab.resumed()
    for extra in (1, 0):
        before = lab.forcing.num_readings
        lab.propose(resumed)
        assert lab.forcing.num_readings - before <= 6 + extra
    lab.propose(resumed, lab.trials[:13])
    assert lab.forcing.num_readings <= 3 * 6 + 1 + len(SHAPES) + 1


# More texts than the trials decode.


def test_only_what_is_predicted_on_all_texts_is_proposed() -> None:
    """By its prediction there; one mask at most is read for it, and none that was read for an earlier one."""
    lab, turns = Lab(num_more=9, repeat_every=0), set()
    for _ in range(24):
        before, before_near = len(lab.more.masks), lab.forcing.num_readings
        proposal = lab.propose()
        read = lab.more.masks[before:]
        assert len(read) <= 1
        turns.add((len(read), lab.forcing.num_readings > before_near))
        assert not set(read) & set(lab.more.masks[:before])
        lab.add(proposal)
        lab.proposals.append(proposal)
        config = SPACE.to_config(dict(proposal.params or {}))
        known = [*lab.pool.candidates]
        for one in lab.proposals:
            known += lab.candidates.read(one.considered or [])
        same = [one for one in known if SPACE.to_mask(one.params) == config.skip_mask]
        assert any(one.full_fidelity for one in same), "its mask was predicted on all texts, and that is written down"
        for mask in read:
            assert any(one.full_fidelity and SPACE.to_mask(one.params) == mask for one in known)
    assert {(1, False), (0, True)} <= turns <= {(1, False), (0, True), (0, False)}, "a mask on all texts, or neighbours"


def test_what_leads_on_a_few_texts_is_looked_at_before_it_is_believed() -> None:
    """A mask that promises 30 % more on the first texts than it holds, and one that was predicted on all."""
    lab = Lab(num_more=9, repeat_every=0, num_readings=0)
    honest = lab.candidates.of(NEAR[0], full_fidelity=True)
    boaster = Candidate(key_of(plain(FAR[1])), honest.log_speedup + 0.3, full_fidelity=False)
    lab.pool = Pool((boaster, honest))
    proposal = lab.propose(lab.resumed())
    truth = lab.candidates.of(FAR[1], full_fidelity=True)
    assert truth.log_speedup < honest.log_speedup
    assert SPACE.to_mask(proposal.params or {}) == NEAR[0]
    (row,) = proposal.considered or []
    assert row == lab.candidates.write([truth])[0]
    lab.add(proposal)
    before = len(lab.more.masks)
    later = lab.propose(lab.resumed())
    assert FAR[1] not in lab.more.masks[before:]
    assert SPACE.to_mask(later.params or {}) == NEAR[0]  # another setting of the honest one


def test_neighbours_are_looked_for_once_all_that_is_known_is_measured() -> None:
    """Though a mask was predicted on all texts for this proposal: its settings have all been measured."""
    lab = Lab(num_more=9, repeat_every=0)
    settings = lab.candidates.variants(NEAR[0], 6, full_fidelity=True)
    lab.pool = Pool((Candidate(key_of(plain(NEAR[0], gamma=1)), 9.0, full_fidelity=False),))
    for params in [*(one.params for one in settings), *(plain(FAR[0], gamma) for gamma in range(len(settings) % 2))]:
        record_failure(lab.study, SPACE, params, "out of memory")
    proposal = lab.propose(lab.resumed())
    assert lab.more.masks == [NEAR[0]]
    assert proposal.origin == "replay"
    assert len(proposal.considered or []) == 1 + lab.num_readings


def test_a_resume_with_more_texts_proposes_the_same() -> None:
    lab = Lab(num_more=9, measure=as_the_fake_decoder)
    lab.run(30)
    considered = [one for proposal in lab.proposals for one in lab.candidates.read(proposal.considered or [])]
    assert any(one.full_fidelity for one in considered)
    trials = lab.trials
    for number in range(0, 30, 3):
        assert lab.propose(lab.resumed(), trials[:number]) == lab.proposals[number]
    late = lab.resumed()
    assert [lab.propose(late, trials[:number]) for number in range(22, 30)] == lab.proposals[22:]


# What measured trials change.


def plain(mask: SkipMask, gamma: int = 4, draft_threshold: float = 0.0, space: SearchSpace = SPACE) -> dict[str, Any]:
    return space.to_params(DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=draft_threshold))


NEAR = [SkipMask.from_layers(6, layers) for layers in ([3, 4], [2, 3, 4], [3, 4, 5])]
FAR = [SkipMask.from_layers(6, layers) for layers in ([0, 1], [0, 1, 2], [0])]


def trials_of(*rows: tuple[dict[str, Any], list[float], list[float]]) -> list[FrozenTrial]:
    """(params, ratios, forecast)."""
    study = optuna.create_study(direction="maximize")
    for params, ratios, forecast in rows:
        record(study, SPACE, params, ratios, forecast_ratios=forecast)
    return study.get_trials(deepcopy=False)
