"""Predictor: predicted speedups are those of decoding step by step, priced; the best setting is one by brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, WrongDraft
from search.predict import predictor as predictor_module
from search.predict.costs import CostModel, measure_costs
from search.predict.learnt_costs import CostLearner
from search.predict.predictor import Predictor, coarse_gammas, gammas_around, sharp_depth
from search.predict.replay import Settings, TextRows, live_counts, replay
from tests.search.helpers.fakes import FINGERPRINT
from tests.search.helpers.forcing import FakeForcing, FakeTimer, simulate
from tests.search.helpers.outlook import PlantedTimer, space_of
from tests.search.predict.test_learnt_costs import trials_of

NUM_LAYERS = 12
GAMMA_MAX = 8
LENGTH = 24
MASKS = [
    SkipMask.none(NUM_LAYERS),
    SkipMask.contiguous(NUM_LAYERS, 3, 6),
    SkipMask.from_sublayers(NUM_LAYERS, attention=range(2, 10), mlp=[3, 4, 11]),
    SkipMask.early_exit(NUM_LAYERS, 10),
    SkipMask.early_exit(NUM_LAYERS, 0),
]


def cost_of(timer: FakeTimer) -> CostModel:
    return measure_costs(timer, [(1, 2)], space_of(NUM_LAYERS, gamma_max=GAMMA_MAX), FINGERPRINT, repeats=1)


COST = cost_of(PlantedTimer())


def forcing_of(lengths: Sequence[int], seed: int = 0) -> FakeForcing:
    return FakeForcing([ForcedText((seed, i), tuple(range(length))) for i, length in enumerate(lengths)])


def predictor_of(forcing: FakeForcing, cost: CostModel = COST, max_new_tokens: int = LENGTH) -> Predictor:
    return Predictor(forcing, TextRows(forcing.lengths, forcing.target_probs, max_new_tokens), cost)


def live_ratio(forcing: FakeForcing, text: int, config: DecodeConfig, cost: CostModel = COST) -> float:
    """Plain over speculative seconds of a decoding step by step; the fake's verifications grow by a fixed share."""
    stats = simulate(forcing, text, config, LENGTH)
    alone, more = cost.verify_s[0], cost.verify_s[1] - cost.verify_s[0]
    draft_s = cost.draft_s(config.skip_mask, threshold=config.draft_threshold > 0)
    seconds = stats.num_drafted * (draft_s + more) + (stats.num_rounds + stats.num_target_only) * alone
    return (int(forcing.lengths[text]) - 1) * alone / seconds


configs = st.builds(
    DecodeConfig,
    skip_mask=st.sampled_from(MASKS),
    gamma=st.integers(1, GAMMA_MAX),
    draft_threshold=st.one_of(st.just(0.0), st.floats(0.01, 0.95)),
    target_threshold=st.one_of(st.just(0.0), st.floats(0.01, 0.95)),
)


@given(config=configs, seed=st.integers(0, 9), num_texts=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_predicted_speedup_is_that_of_decoding_step_by_step(config: DecodeConfig, seed: int, num_texts: int) -> None:
    forcing = forcing_of([LENGTH] * num_texts, seed)
    predictor = predictor_of(forcing)
    live = [live_ratio(forcing, i, config) for i in range(num_texts)]
    assert predictor.forecast(config, range(num_texts))[0] == pytest.approx(live)
    assert predictor.forecast(config, [])[1] == pytest.approx(math.exp(sum(map(math.log, live)) / num_texts))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("share", [0.03, 0.3])
def test_the_best_setting_is_as_good_as_any_of_a_fine_grid(mask: SkipMask, share: float) -> None:
    """2,400 settings by brute force; what the coarse grid misses is little."""
    forcing, cost = forcing_of([LENGTH] * 6), cost_of(PlantedTimer(verify_share=share))
    predictor = predictor_of(forcing, cost)
    best = predictor.best_setting(mask)
    steps = [0.05 * i for i in range(20)]
    grid = Settings.grid(range(1, GAMMA_MAX + 1), steps, steps[:15])
    reading = forcing.read(mask)
    rows = TextRows(forcing.lengths, forcing.target_probs, LENGTH)
    counts = replay(reading, rows, grid, cost.verify_s)
    draft_s = np.where(
        grid.draft_threshold > 0, cost.draft_s(mask, threshold=True), cost.draft_s(mask, threshold=False)
    )
    seconds = counts.drafted * draft_s[:, None] + counts.verify_s + counts.target_only * cost.verify_s[0]
    brute = np.exp(np.log((LENGTH - 1) * cost.verify_s[0] / seconds).mean(axis=1)).max()
    assert best.speedup == pytest.approx(predictor.forecast(best.config, [])[1])
    assert brute * 0.98 <= best.speedup <= brute * (1 + 1e-9)
    assert best.config.skip_mask == mask


def test_best_settings_come_best_first_and_are_told_apart() -> None:
    predictor = predictor_of(forcing_of([LENGTH] * 3))
    found = predictor.best_settings(MASKS[1], 12)
    assert len(found) == len({str(one.config) for one in found}) == 12
    assert [one.speedup for one in found] == sorted((one.speedup for one in found), reverse=True)
    assert [one.speedup for one in found] == pytest.approx([predictor.forecast(one.config, [])[1] for one in found])
    assert found[0].speedup <= predictor.best_setting(MASKS[1]).speedup * (1 + 1e-12)


def test_the_surface_holds_predicted_speedups() -> None:
    predictor = predictor_of(forcing_of([LENGTH] * 3))
    gammas, thresholds, speedups = predictor.surface(DecodeConfig(skip_mask=MASKS[1], gamma=1, target_threshold=0.3))
    assert (gammas[0], gammas[-1], thresholds[0], thresholds[-1]) == (1, GAMMA_MAX, 0.0, pytest.approx(0.95))
    for i, k in [(0, 0), (3, 5), (7, 19), (7, 0)]:
        config = DecodeConfig(
            skip_mask=MASKS[1], gamma=int(gammas[i]), draft_threshold=float(thresholds[k]), target_threshold=0.3
        )
        assert speedups[i, k] == pytest.approx(predictor.forecast(config, [])[1])


def test_a_mask_is_read_once_and_prices_may_change() -> None:
    forcing = forcing_of([LENGTH] * 2)
    predictor, config = predictor_of(forcing), DecodeConfig(skip_mask=MASKS[1], gamma=4)
    before = predictor.forecast(config, [])[1]
    predictor.best_setting(MASKS[1])
    dear = cost_of(PlantedTimer(fixed_s=5e-3))
    predictor.set_costs(dear)
    assert predictor.forecast(config, [])[1] < before
    assert predictor.forecast(config, [1])[0] == pytest.approx([live_ratio(forcing, 1, config, dear)])
    assert forcing.num_readings == 1 + 1  # and one by the simulation


def test_trials_teach_prices_until_new_ones_are_measured() -> None:
    predictor = predictor_of(forcing_of([LENGTH] * 2))
    predictor.learn(trials_of(30))
    learnt = predictor.cost
    assert learnt == CostLearner().learn(COST, trials_of(30)) != COST
    predictor.learn(())
    assert predictor.cost == COST
    predictor.set_costs(learnt)
    assert predictor.cost == learnt


def test_a_threshold_between_those_of_the_coarse_grid_is_found() -> None:
    """Runs of one and of six right tokens, at a confidence of 0.28, and a wrong one after each, at 0.1 or 0.22. So 0.2
    beats none, 0.3 stops everything, and 0.25 stops after each wrong token and after no right one."""
    length, wrong = 40, [1, 8, 10, 17, 19, 26, 28, 35]
    right = [int(k not in wrong and k < length - 1) for k in range(length)]
    forcing = ScriptedForcing([[right]], lengths=[length], sure=0.28)
    for i, k in enumerate(wrong):
        forcing.confidence[0, 0, k] = (0.1, 0.1, 0.22, 0.22)[i % 4]
    best = predictor_of(forcing, max_new_tokens=length).best_setting(MASKS[1])
    assert best.config.draft_threshold == 0.25
    assert best.config.gamma >= 6


def test_the_reading_longest_unused_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    forcing = forcing_of([LENGTH])
    monkeypatch.setattr(predictor_module, "_KEPT_BYTES", 2 * 17 * LENGTH)
    predictor = predictor_of(forcing)
    counts = []
    for i in (0, 1, 0, 2, 0, 2, 1):
        predictor.agreement(MASKS[i])
        counts.append(forcing.num_readings)
    assert counts == [1, 2, 2, 3, 3, 3, 4]


def test_agreement_is_the_share_of_right_tokens() -> None:
    """Of texts of 5 and 3 tokens, 4 + 2 places have a known next token; the draft is right on 3 of them."""
    scripted = ScriptedForcing([[[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]]], lengths=[5, 3])
    assert predictor_of(scripted, max_new_tokens=5).agreement(MASKS[1]) == pytest.approx(3 / 6)
    assert predictor_of(forcing_of([9, 4]), max_new_tokens=9).agreement(MASKS[0]) == 1.0
    assert predictor_of(forcing_of([1]), max_new_tokens=9).agreement(MASKS[0]) == 0.0


def test_a_text_of_one_token_saves_and_costs_nothing() -> None:
    forcing = forcing_of([LENGTH, 1])
    config = DecodeConfig(skip_mask=MASKS[1], gamma=3, draft_threshold=0.4)
    assert predictor_of(forcing).forecast(config, [0, 1])[0] == pytest.approx([live_ratio(forcing, 0, config), 1.0])


@pytest.mark.parametrize("draft_threshold", [0.0, 0.4])
def test_a_trial_is_predicted_by_what_its_steps_cost(draft_threshold: float) -> None:
    forcing = forcing_of([LENGTH] * 4)
    predictor = predictor_of(forcing)
    config = DecodeConfig(skip_mask=MASKS[1], gamma=5, draft_threshold=draft_threshold, target_threshold=0.2)
    told = predictor.trial(config, [2, 0])
    assert told.draft_s == COST.draft_s(MASKS[1], threshold=draft_threshold > 0)
    if draft_threshold == 0.0:  # a fake draft goes on for one token at most where a threshold is set
        for step, forwards, ratio in zip([2, 0], told.forwards, told.ratios, strict=True):
            assert forwards == tuple(live_counts([simulate(forcing, step, config, LENGTH)]).tolist())
            assert ratio == pytest.approx(live_ratio(forcing, step, config))
        assert told.ratios == pytest.approx(predictor.forecast(config, [2, 0])[0])


def test_texts_that_are_not_read_for_every_mask_are_read_for_their_trial() -> None:
    whole, asked = forcing_of([LENGTH, 9, 15, LENGTH, 12]), []
    few, every = predictor_of(FakeForcing(whole.texts[:3])), predictor_of(whole)
    config = DecodeConfig(skip_mask=MASKS[1], gamma=4, draft_threshold=0.3)

    def force(places: Sequence[int]) -> tuple[FakeForcing, TextRows]:
        asked.append(tuple(places))
        forcing = FakeForcing([whole.texts[place] for place in places])
        return forcing, TextRows(forcing.lengths, forcing.target_probs, LENGTH)

    dear = cost_of(PlantedTimer(verify_share=0.2))
    for one in (few, every):
        one.set_costs(dear)
    steps = [4, 1, 3, 4]
    unread = few.extra_texts(steps, force)
    assert unread.steps == (3, 4)
    assert few.trial(config, steps, unread) == every.trial(config, steps)
    ratios, mean = few.forecast(config, steps, unread)
    assert ratios == pytest.approx(every.forecast(config, steps)[0])
    assert mean == few.forecast(config, [])[1], "of the texts that are read for every mask"
    only = few.extra_texts([3], force)
    assert few.trial(config, [3], only) == every.trial(config, [3])
    assert few.extra_texts([2, 1], force) is None
    assert asked == [(3, 4), (3,)]


def split(num_first: int, lengths: Sequence[int]) -> tuple[Predictor, FakeForcing, FakeForcing]:
    """A predictor whose further texts come in a forcing of their own, and both forcings."""
    whole = forcing_of(lengths)
    first, more = FakeForcing(whole.texts[:num_first]), FakeForcing(whole.texts[num_first:])
    rows = TextRows(more.lengths, more.target_probs, LENGTH)
    return predictor_of(first).with_more(more, rows), first, more


LENGTHS = (LENGTH, 9, 15, LENGTH, 4)


@pytest.mark.parametrize("mask", MASKS[1:3], ids=str)
def test_full_fidelity_is_on_all_texts_and_else_on_the_first_ones(mask: SkipMask) -> None:
    tiers, first, _ = split(2, LENGTHS)
    alone, together = predictor_of(first), predictor_of(forcing_of(LENGTHS))
    assert (tiers.num_texts, tiers.num_first, tiers.has_more) == (5, 2, True)
    assert (alone.num_texts, alone.num_first, alone.has_more) == (2, 2, False)
    for full_fidelity, expected in ((False, alone), (True, together)):
        assert tiers.best_setting(mask, full_fidelity=full_fidelity) == expected.best_setting(mask)
        assert tiers.best_settings(mask, 5, full_fidelity=full_fidelity) == expected.best_settings(mask, 5)
        assert tiers.agreement(mask, full_fidelity=full_fidelity) == pytest.approx(expected.agreement(mask))
        assert alone.best_setting(mask, full_fidelity=full_fidelity) == alone.best_setting(mask)
    assert alone.agreement(mask) != together.agreement(mask)


def test_what_is_said_of_a_config_is_on_all_texts() -> None:
    """Whatever text a trial decodes, the first or a later one."""
    tiers, together = split(2, LENGTHS)[0], predictor_of(forcing_of(LENGTHS))
    config = DecodeConfig(skip_mask=MASKS[1], gamma=5, draft_threshold=0.4)
    assert tiers.forecast(config, [3, 1]) == together.forecast(config, [3, 1])
    for sharp in (False, True):
        for texts in (None, [1, 2, 4]):
            one, other = (each.counts(config, sharp=sharp, texts=texts) for each in (tiers, together))
            assert np.array_equal(one.drafted, other.drafted)
            assert np.array_equal(one.verify_s, other.verify_s)
    told = [each.trial(config, [4, 0, 2]) for each in (tiers, together)]
    assert told[0] == told[1]
    assert len(told[0].forwards) == 3
    shown = [
        each.surface(DecodeConfig(skip_mask=MASKS[1], gamma=1, target_threshold=0.2)) for each in (tiers, together)
    ]
    assert all(np.array_equal(one, other) for one, other in zip(*shown, strict=True))


def test_an_answer_does_not_depend_on_earlier_questions() -> None:
    fresh, asked = split(2, LENGTHS)[0], split(2, LENGTHS)[0]
    for mask in MASKS:
        asked.best_setting(mask, full_fidelity=True)
    for mask in MASKS:
        for full_fidelity in (False, True):
            one, other = (each.best_setting(mask, full_fidelity=full_fidelity) for each in (asked, fresh))
            assert one == other


def test_no_text_is_read_twice_for_a_mask() -> None:
    whole = forcing_of(LENGTHS)
    first, more = FakeForcing(whole.texts[:2]), FakeForcing(whole.texts[2:])
    narrow = predictor_of(first)
    narrow.best_setting(MASKS[1])
    tiers = narrow.with_more(more, TextRows(more.lengths, more.target_probs, LENGTH))
    for _ in range(2):
        tiers.best_setting(MASKS[1])
        tiers.best_setting(MASKS[1], full_fidelity=True)
        tiers.forecast(DecodeConfig(skip_mask=MASKS[1], gamma=4), [0])
    assert (first.num_readings, more.num_readings) == (1, 1)
    tiers.best_setting(MASKS[2])
    assert (first.num_readings, more.num_readings) == (2, 1), "more texts are read where it is asked for alone"


@dataclass
class Overrun:
    """Answers given, and what was asked."""

    answers: list[int] = field(default_factory=list)
    asked: list[tuple[SkipMask, list[WrongDraft], float]] = field(default_factory=list)


class ScriptedForcing(FakeForcing):
    """Readings as written down: depths x texts x places."""

    def __init__(self, accepted: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], sure: float = 0.9) -> None:
        super().__init__([ForcedText((i,), tuple(range(length))) for i, length in enumerate(lengths)])
        self.target_probs[:] = 1.0
        self._accepted = np.array(accepted, dtype=np.float32)
        self.confidence = np.full(self._accepted.shape, sure, dtype=np.float32)
        self.choices = np.arange(self._accepted.size).reshape(self._accepted.shape)
        self.overruns = Overrun()

    def read(self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        assert 0 <= depth < len(self._accepted)
        reading = DraftReadings(
            self._accepted[: depth + 1], self.confidence[: depth + 1], self.choices[: depth + 1].astype(np.int64)
        )
        return reading if texts is None else reading.select(texts)

    def overrun(self, mask: SkipMask, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        self.overruns.asked.append((mask, list(wrong), threshold))
        return self.overruns.answers[: len(wrong)]


def two_texts() -> ScriptedForcing:
    """All right when read one deep. Deeper, text 0 is wrong at place 2, two drafts into a round, and text 1 at place 1,
    one draft into it, where it is unsure as well."""
    accepted = np.ones((5, 2, 8), dtype=int)  # a gamma of 5 needs no more
    accepted[:, :, 7] = 0
    accepted[2, 0, 2] = accepted[1, 1, 1] = 0
    forcing = ScriptedForcing(accepted.tolist(), lengths=[8, 8])
    forcing.confidence[1, 1, 1] = 0.3
    forcing.overruns.answers = [2]
    return forcing


NONLINEAR = CostModel((1.0, 1.5, 2.5, 4.5, 8.5, 16.5), 0.25, (0.0,) * 12, (0.0,) * 12, 0.0, 0.0, 8, {})


def test_sharp_counts_hold_what_a_draft_adds_after_a_wrong_token() -> None:
    """Text 0: a round of 3, 2 of them right, and 2 more after the wrong one; then 3 right ones, all that there is room
    for (8 - 4 - 1). Text 1: 2 drafts, the second wrong and unsure, so nothing is added; then, from token 3 on, 4 right
    ones. The target alone is not needed."""
    forcing = two_texts()
    predictor = predictor_of(forcing, NONLINEAR, max_new_tokens=8)
    config = DecodeConfig(skip_mask=MASKS[1], gamma=5, draft_threshold=0.5)
    sharp = predictor.counts(config, sharp=True)
    assert sharp.drafted.tolist() == [[5 + 3, 2 + 4]]
    assert sharp.rounds.tolist() == [[2, 2]]
    assert sharp.target_only.tolist() == [[0, 0]]
    assert sharp.verify_s.tolist() == [[16.5 + 4.5, 2.5 + 8.5]]
    token = int(forcing.choices[2, 0, 2])
    assert forcing.overruns.asked == [(MASKS[1], [WrongDraft(text=0, row=2, drafted=2, token=token, room=2)], 0.5)]


@pytest.mark.parametrize(
    ("gamma", "longest", "expected"),
    [
        (1, 48, 0),
        (5, 48, 4),
        (8, 5000, 7),  # always
        (16, 48, 15),
        (16, 256, 15),
        (16, 273, 14),
        (16, 1024, 7),
        (64, 48, 63),
        (64, 128, 31),
    ],
)
def test_a_trial_is_read_as_deep_as_its_gamma_needs(gamma: int, longest: int, expected: int) -> None:
    """Beyond eight only while a text has no more than 4096 rows: 16 times 256 tokens."""
    assert sharp_depth(gamma, longest) == expected


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 16, 24, 64])
def test_every_gamma_can_be_predicted(most: int) -> None:
    coarse = coarse_gammas(most)
    assert coarse[: min(most, 8)] == list(range(1, min(most, 8) + 1))
    assert coarse[-1] == most
    assert {gamma for one in coarse for gamma in gammas_around(one, most)} == set(range(1, most + 1))
    assert all(one in gammas_around(one, most) for one in coarse)


def test_the_best_gamma_beyond_eight_is_found_between_the_coarse_ones() -> None:
    """Every draft is right but the one after 13: a round of 13 wastes none."""
    accepted = np.ones((1, 1, 400))
    accepted[0, 0, 13::14] = 0
    accepted[0, 0, 399] = 0
    forcing = ScriptedForcing(accepted.astype(int).tolist(), lengths=[400])
    drafts = CostModel((1.0,) * 17, 0.2, (0.0,) * 12, (0.0,) * 12, 0.0, 0.0, 8, {})
    best = predictor_of(forcing, drafts, max_new_tokens=400).best_setting(MASKS[1])
    assert best.config.gamma == 13
    assert 13 not in coarse_gammas(16)


def test_ranked_counts_read_one_deep_and_look_no_further() -> None:
    """All right: a round of 5 drafts and, two tokens being left, the target alone; overruns are not asked for."""
    forcing = two_texts()
    predictor = predictor_of(forcing, NONLINEAR, max_new_tokens=8)
    ranked = predictor.counts(DecodeConfig(skip_mask=MASKS[1], gamma=5, draft_threshold=0.5), sharp=False)
    assert ranked.total().tolist() == [[10, 2, 2]]
    assert ranked.verify_s.tolist() == [[16.5, 16.5]]
    assert forcing.overruns.asked == []


def test_a_trial_is_priced_by_its_sharp_counts() -> None:
    predictor = predictor_of(two_texts(), NONLINEAR, max_new_tokens=8)
    config = DecodeConfig(skip_mask=MASKS[1], gamma=5, draft_threshold=0.5)
    told = predictor.trial(config, [1, 0])
    assert told.forwards == ((6, 2, 0), (8, 2, 0))
    assert told.ratios == pytest.approx([7.0 / (6 * told.draft_s + 11.0), 7.0 / (8 * told.draft_s + 21.0)])
