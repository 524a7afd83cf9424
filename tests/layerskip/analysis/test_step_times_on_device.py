"""Step times where rounds are recorded: what is timed is what decoding replays, and recording is not timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis import step_times
from layerskip.analysis.step_times import StepTimer
from layerskip.benchmark.alternation import Case
from layerskip.benchmark.steps import StepTurn, allowed_s, decode
from layerskip.config.skip_mask import SkipMask as Mask
from layerskip.decoding import step_clock
from layerskip.engines.recording.graph_pool import RerunRecorder
from tests.layerskip import zoo
from tests.layerskip.tape import engine_of, graph_model

TEXT = zoo.prompt_of(9)
MASKS = (SkipMask.none(zoo.NUM_LAYERS), SkipMask.early_exit(zoo.NUM_LAYERS, 0), SkipMask.from_layers(4, [1, 2]))


def draft_s(mask: Mask) -> float:
    return 20.0 + 100.0 * (2 * mask.num_layers - mask.num_skipped)


def verify_s(num_drafts: int) -> float:
    return 5_000.0 + 10.0 * num_drafts


def whole_s(mask: Mask, gamma: int) -> float:
    """Less than its parts, as on a device."""
    return 0.75 * gamma * draft_s(mask) + verify_s(gamma) if gamma else 4_000.0


def seconds_of(key: Any) -> float:
    if key[0] == "draft":
        return draft_s(key[1])
    return whole_s(key[1], key[2]) if key[0] == "round" else verify_s(key[1])


class Replayed:
    """A clock that stands still but for replays, and what was replayed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.keys: list[Any] = []

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _nothing_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_NUM_WARM", 0)


@pytest.fixture
def model() -> LayerSkipModel:
    return graph_model("llama", RerunRecorder(), granule=64)


@pytest.fixture
def replayed(model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch) -> Replayed:
    seen, play = Replayed(), engine_of(model).pool.play

    def watched(key: Any, *work: Any) -> None:
        seen.keys.append(key)
        seen.now += seconds_of(key)
        play(key, *work)

    monkeypatch.setattr(engine_of(model).pool, "play", watched)
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=seen.perf_counter))
    return seen


def test_drafts_are_what_rounds_take_beyond_their_verification(model: LayerSkipModel, replayed: Replayed) -> None:
    timer = StepTimer(model, 5)
    assert timer.verify_s(TEXT, [1, 6, 3]) == [whole_s(MASKS[0], 0), verify_s(5), verify_s(2)]
    whole = [(whole_s(mask, 4) - verify_s(4)) / 4 for mask in MASKS]
    assert timer.draft_s(TEXT, MASKS, gamma=4, threshold=False) == pytest.approx(whole)
    with_looks = [draft_s(mask) for mask in MASKS]
    assert timer.draft_s(TEXT, MASKS, gamma=4, threshold=True) == pytest.approx(with_looks)
    assert timer.draft_s(TEXT, [], gamma=4, threshold=True) == []


def test_a_draft_takes_some_time_whatever_a_disturbed_clock_says(
    model: LayerSkipModel, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.draft_s", lambda _mask: -1_000.0)
    (found,) = StepTimer(model, 4).draft_s(TEXT, MASKS[:1], gamma=2, threshold=False)
    assert 0.0 < found < 100.0


@pytest.mark.parametrize("draft_threshold", [0.0, 0.4])
def test_what_is_timed_for_a_search_is_what_its_trials_replay(
    model: LayerSkipModel, replayed: Replayed, draft_threshold: float
) -> None:
    config = DecodeConfig(skip_mask=MASKS[2], gamma=4, draft_threshold=draft_threshold)
    arguments: dict[str, Any] = {"config": config, "max_new_tokens": 16, "do_sample": False}
    stats = model.generate(TEXT, **arguments).stats
    model.generate(TEXT, **(arguments | {"config": DecodeConfig.plain(zoo.NUM_LAYERS)}))
    decoded = set(replayed.keys)
    replayed.keys.clear()
    timer = StepTimer(model, 4)
    timer.draft_s(TEXT, [MASKS[2]], gamma=4, threshold=draft_threshold > 0.0)
    timer.verify_s(TEXT, [1])
    kinds = {"draft", "verify", "round"} if draft_threshold else {"round"}
    assert {key[0] for key in replayed.keys} - {"verify_host"} == kinds
    assert {key for key in replayed.keys if key[0] in ("round", "draft")} <= decoded
    for n, seconds in enumerate(stats.round_s_by_drafted, start=1):
        # Near the end of a text a whole round drafts as many as ever; one that looks stops.
        a_round = n * draft_s(MASKS[2]) + verify_s(n) if draft_threshold else whole_s(MASKS[2], 4)
        assert seconds == pytest.approx(stats.rounds_by_drafted[n - 1] * a_round)


@pytest.mark.parametrize("draft_threshold", [0.0, 0.4])
def test_a_benchmarks_steps_explain_all_seconds_of_its_rounds(
    model: LayerSkipModel, replayed: Replayed, draft_threshold: float
) -> None:
    """Whole rounds cost less than their drafts and verifications apart; timed as such, nothing is left for the loop."""
    config = DecodeConfig(skip_mask=MASKS[2], gamma=4, draft_threshold=draft_threshold)
    case = Case("a", TEXT, zoo.greedy_reference("llama", TEXT, 20))
    turn = StepTurn(model, config, 1, 20)
    turn.take(0, case)
    steps = turn.samples[0][0]
    stats = decode(model.engine, model, config, case, 20)
    assert allowed_s(stats, steps) == pytest.approx(stats.decode_s)
    assert list(steps.draft_s) == [4]
    if not draft_threshold:
        assert set(steps.round_s.values()) == {whole_s(MASKS[2], 4)}
        assert allowed_s(stats, steps) < sum(
            count * (n * draft_s(MASKS[2]) + verify_s(n)) for n, count in enumerate(stats.rounds_by_drafted, start=1)
        ) + stats.num_target_only * whole_s(MASKS[0], 0)


def test_lookups_are_verified_as_if_they_were_as_long_as_they_may_be(model: LayerSkipModel, replayed: Replayed) -> None:
    lookup = {"method": "prompt_lookup", "max_match": 1, "min_match": 1}
    config = DecodeConfig(drafter="prompt_lookup", skip_mask=MASKS[0], gamma=3, lookup=lookup)
    prompt = tuple(range(zoo.VOCAB))  # every token has been there before
    case = Case("a", prompt, zoo.greedy_reference("llama", prompt, 16))
    turn = StepTurn(model, config, 1, 16)
    turn.take(0, case)
    steps = turn.samples[0][0]
    stats = decode(model.engine, model, config, case, 16)
    assert stats.num_lookup_rounds > 5
    assert set(steps.lookup_s.values()) == {verify_s(3)}
    assert allowed_s(stats, steps) == pytest.approx(stats.decode_s)


@pytest.mark.parametrize("fail_at", [1, 3])
def test_a_failure_in_the_middle_leaves_the_model_whole(
    model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    config = DecodeConfig(skip_mask=MASKS[2], gamma=3)
    before = model.generate(TEXT, config=config, max_new_tokens=12, do_sample=False).ids
    pool, left = engine_of(model).pool, [fail_at]
    play = pool.play

    def fails(*piece: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("device lost")
        play(*piece)

    monkeypatch.setattr(pool, "play", fails)
    with pytest.raises(RuntimeError, match="device lost"):
        StepTimer(model, 5).draft_s(TEXT, MASKS, gamma=3, threshold=False)
    assert model.generate(TEXT, config=config, max_new_tokens=12, do_sample=False).ids == before
