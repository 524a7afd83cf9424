"""Replay: counts of any setting equal a decoding written out step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText
from layerskip.config.usual_lookups import NGRAMS, lookup_else
from layerskip.decoding.stats import DecodeStats
from search.predict.lookup_readings import LookupReadings
from search.predict.replay import Settings, TextRows, check_replay, live_counts, replay, walk
from tests.search.helpers.forcing import FakeForcing, simulate

MASK = SkipMask.contiguous(12, 3, 6)


def forcing_of(lengths: list[int], seed: int = 0) -> FakeForcing:
    return FakeForcing([ForcedText((seed, i), tuple(range(length))) for i, length in enumerate(lengths)])


def rows_of(forcing: FakeForcing, max_new_tokens: int) -> TextRows:
    return TextRows(forcing.lengths, forcing.target_probs, max_new_tokens)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    spare=st.integers(0, 5),
    gamma=st.integers(1, 8),
    draft_threshold=st.floats(0, 0.95),
    target_threshold=st.floats(0, 0.95),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_replayed_counts_are_the_live_loops(
    lengths: list[int], spare: int, gamma: int, draft_threshold: float, target_threshold: float, seed: int
) -> None:
    """The simulated decoder's draft is as sure after a wrong token as along the text, so nothing is approximated."""
    forcing, limit = forcing_of(lengths, seed), max(lengths) + spare
    config = DecodeConfig(
        skip_mask=MASK, gamma=gamma, draft_threshold=draft_threshold, target_threshold=target_threshold
    )
    reading = forcing.read(MASK)
    counts = replay(reading, rows_of(forcing, limit), Settings.of(config))
    for i in range(len(lengths)):
        live = simulate(forcing, i, config, limit)
        got = [counts.drafted[0, i], counts.rounds[0, i], counts.target_only[0, i]]
        if lengths[i] == limit:  # past a text's own end nothing is known of the draft
            assert got == live_counts([live]).tolist()
        else:
            assert got[1:] == live_counts([live]).tolist()[1:]


@given(st.integers(0, 99), st.integers(1, 8), st.sampled_from([0, 1, 2, 3, 24]), st.floats(0, 0.9))
@settings(max_examples=60, deadline=None)
def test_depths_are_used_in_order_and_walk_agrees(seed: int, gamma: int, depth: int, threshold: float) -> None:
    """A reading whose depths differ: the vectorised replay and the walk take the same path. One that is deeper than its
    texts are long was once an error."""
    rng = np.random.default_rng(seed)
    accepted = (rng.random((depth + 1, 3, 20)) < 0.8).astype(np.float32)
    accepted[:, :, -1] = 0
    confidence = rng.random((depth + 1, 3, 20)).astype(np.float32)
    rows = TextRows(np.array([20, 20, 13]), rng.random((3, 20)).astype(np.float32), 20)
    accepted[:, 2, 12:] = 0
    config = DecodeConfig(skip_mask=MASK, gamma=gamma, draft_threshold=threshold, target_threshold=0.2)
    reading = DraftReadings(accepted, confidence, np.zeros(accepted.shape, dtype=np.int64))
    counts, rounds = replay(reading, rows, Settings.of(config)), walk(reading, rows, config)
    assert counts.rounds.sum() == sum(one.drafted > 0 for one in rounds)
    assert counts.target_only.sum() == sum(one.drafted == 0 for one in rounds)
    # walk stops at the first wrong token, replay goes on along the text's own confidences
    assert counts.drafted.sum() >= sum(one.drafted for one in rounds)
    assert all(one.accepted in (one.drafted, one.drafted - 1) or one.drafted == 0 for one in rounds)


def test_verification_seconds_come_from_the_table() -> None:
    forcing = forcing_of([12])
    reading = forcing.read(SkipMask.none(12))  # always right: rounds of 4, 4 and 1 drafts at gamma 4
    config = DecodeConfig(skip_mask=MASK, gamma=4)
    table = [0.0, 1.0, 10.0, 100.0, 1000.0]
    counts = replay(reading, rows_of(forcing, 12), Settings.of(config), table)
    assert counts.total()[0].tolist() == [8, 2, 1]
    assert counts.verify_s[0, 0] == 2000.0


def test_rounds_that_are_looked_up_have_seconds_from_the_table_too() -> None:
    """The first round looks 3 tokens up, then 4 and 1 are drafted."""
    forcing = forcing_of([12])
    reading = forcing.read(SkipMask.none(12))
    proposed = np.zeros((1, 12), dtype=np.int64)
    proposed[0, 0] = 3
    hybrid = lookup_else(DecodeConfig(skip_mask=MASK, gamma=4), NGRAMS)
    table = np.array([0.0, 1.0, 10.0, 100.0, 1000.0] + [9e9] * 20)
    counts = replay(
        reading,
        rows_of(forcing, 12),
        Settings.of(hybrid),
        table,
        lambda _settings: LookupReadings(proposed, proposed),
    )
    assert counts.total()[0].tolist() == [8, 3, 0]
    assert counts.verify_s[0, 0] == pytest.approx(1101.0)


def test_check_counts_forwards() -> None:
    """One of four is off by 3 in 60."""
    pairs = [([30, 20, 10], [30, 20, 10])] * 3 + [([32, 19, 10], [30, 20, 10])]
    check = check_replay(pairs)
    assert (check.num_settings, check.exact_share, check.median_error) == (4, 0.75, 0.0)
    assert check.p95_error == pytest.approx(0.0425)
    assert check_replay([]) is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Settings.grid([0], [0.0], [0.0]), "gamma: must be at least 1 to draft, got"),
        (lambda: TextRows(np.array([0]), np.ones((1, 3)), 3), r"lengths: .* got \[0\]"),
        (lambda: TextRows(np.array([5]), np.ones((1, 5)), 4), r"max_new_tokens: .* \(5\), got 4"),
        (
            lambda: replay(DraftReadings(*np.ones((3, 1, 2, 5))), TextRows(np.array([5]), np.ones((1, 5)), 5),
                           Settings.grid([1], [0.0], [0.0])),
            "reading: must have shape",
        ),
        (
            lambda: replay(DraftReadings(np.ones((1, 1, 5)), np.ones((2, 1, 5)), np.ones((1, 1, 5))),
                           TextRows(np.array([5]), np.ones((1, 5)), 5), Settings.grid([1], [0.0], [0.0])),
            "reading: must have shape",
        ),
        (
            lambda: replay(DraftReadings(*np.ones((3, 1, 1, 5))), TextRows(np.array([5]), np.ones((1, 5)), 5),
                           Settings.grid([4], [0.0], [0.0]), [0.0, 1.0]),
            "verify_s: must reach gamma 4, has 2",
        ),
    ],
)  # fmt: skip
def test_bad_input_names_field_rule_and_value(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_live_counts_add_up() -> None:
    stats = [DecodeStats(num_drafted=3, num_rounds=2, num_target_only=1), DecodeStats(num_drafted=1, num_rounds=1)]
    assert live_counts(stats).tolist() == [4, 3, 1]
