"""The choosing pass is a race: the surely slower drop out, who may win or tie stays, figures stay comparable."""

from __future__ import annotations

import math

import numpy as np
import pytest

from layerskip import DecodeConfig, SkipMask
from search.confirm.passes import RACE_FROM, TIE, ConfirmOptions, HeldOutPrompts, expected_loss, is_surely_slower
from search.confirm.stage import Confirmation, confirm
from search.study.leaderboard import Entry
from search.study.prompts import EncodedPrompt
from tests.search.helpers.fakes import FakeDecoder, true_speedup

BEST, FAR = (DecodeConfig(skip_mask=SkipMask.parse(text), gamma=4) for text in ("6:1-4", "6:1"))
NUM_PROMPTS = 24


def run(decoder: FakeDecoder, *configs: DecodeConfig, settled_at: float | None = None) -> Confirmation:
    prompts = [EncodedPrompt(str(i), None, (i,)) for i in range(NUM_PROMPTS)]
    entries = [Entry(config, {}, (0,), 5, 1.2, 1.1) for config in configs]
    return confirm(decoder, HeldOutPrompts(prompts), entries, ConfirmOptions(6, 1, 0, settled_at=settled_at))


def test_who_is_surely_slower_drops_out_and_the_last_one_ends_the_race() -> None:
    decoder = FakeDecoder()
    result = run(decoder, FAR, BEST)
    assert result.config.bare() == BEST
    assert [len(one.ratios) for one in result.candidates] == [RACE_FROM, RACE_FROM]
    assert decoder.num_decoded == RACE_FROM * 3 + NUM_PROMPTS * 2


def test_who_ties_stays_to_the_end() -> None:
    almost = DecodeConfig(skip_mask=BEST.skip_mask, gamma=4, target_threshold=TIE / 2)
    assert 1 < true_speedup(BEST) / true_speedup(almost) < 1 + TIE
    result = run(FakeDecoder(), BEST, almost, FAR)
    assert [len(one.ratios) for one in result.candidates] == [NUM_PROMPTS, NUM_PROMPTS, RACE_FROM]


def test_the_figure_of_who_dropped_out_is_as_on_all_prompts() -> None:
    """Later prompts suit every draft better; who did not see them is not told slower for that."""
    decoder = FakeDecoder(
        noise=0.0, interaction=lambda ids, config: 1.5 if config.speculates and ids[0] >= RACE_FROM else 1.0
    )
    almost = DecodeConfig(skip_mask=BEST.skip_mask, gamma=4, target_threshold=TIE / 2)
    result = run(decoder, BEST, almost, FAR)
    best, _, far = (one.speedup for one in result.candidates)
    assert best is not None
    assert far is not None
    assert far / best == pytest.approx(true_speedup(FAR) / true_speedup(BEST))


def test_whoever_leads_and_then_breaks_leaves_the_race_to_those_who_dropped_out() -> None:
    decoder = FakeDecoder()
    calls = iter(range(10_000))
    decoder.break_on = lambda config: ValueError("gone") if config == BEST and next(calls) > RACE_FROM + 1 else None
    result = run(decoder, BEST, FAR)
    assert result.config.bare() == FAR
    assert result.candidates[0].excluded is not None


def test_a_choice_that_may_miss_a_little_is_settled_before_all_prompts_were_seen() -> None:
    almost = DecodeConfig(skip_mask=BEST.skip_mask, gamma=4, target_threshold=TIE / 2)
    seen = {at: len(run(FakeDecoder(), BEST, almost, settled_at=at).candidates[0].ratios) for at in (None, 1e-9, 0.05)}
    assert seen == {None: NUM_PROMPTS, 1e-9: NUM_PROMPTS, 0.05: RACE_FROM}


def test_the_expected_loss_is_what_choosing_the_leading_one_loses_on_average() -> None:
    """On thirty prompts of thousands, many times: what the leading one of three loses to the best of them, and what
    it was expected to."""
    rng = np.random.default_rng(1)
    lost, expected = [], []
    for _ in range(300):
        means = rng.normal(0.0, 0.02, 3)
        logs = means[:, None] + rng.normal(0.0, 0.1, (3, 30)) + rng.normal(0.0, 0.5, 30)
        lost.append(means.max() - means[logs.mean(axis=1).argmax()])
        expected.append(expected_loss(np.exp(logs).tolist()))
    # Of ways that lie so near to each other the leading one is better than it looks: never told less than it loses.
    assert 0.9 < np.mean(expected) / np.mean(lost) < 2.0


def test_what_never_differs_loses_nothing() -> None:
    rates = np.exp(np.random.default_rng(0).normal(0.0, 0.5, 12)).tolist()
    assert expected_loss([rates, rates]) == 0.0
    assert expected_loss([rates, [0.5 * one for one in rates]]) == 0.0


def test_a_false_drop_is_rare_and_a_slower_one_is_seen() -> None:
    """Two ways of one speed, 7 % of noise a prompt: at most some one in a hundred is dropped at a look."""
    rng = np.random.default_rng(0)
    drops = sum(is_surely_slower(*np.exp(rng.normal(0.0, 0.05, (2, RACE_FROM))).tolist()) for _ in range(2000))
    assert drops < 0.01 * 2000
    slower = np.exp(rng.normal(math.log(0.8), 0.05, RACE_FROM)).tolist()
    assert is_surely_slower(slower, np.exp(rng.normal(0.0, 0.05, RACE_FROM)).tolist())
