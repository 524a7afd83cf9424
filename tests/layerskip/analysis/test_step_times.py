"""Step times: the right steps are timed, one by one, and the model decodes afterwards as it did before."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis import step_times
from layerskip.analysis.step_times import StepTimer
from layerskip.decoding import step_clock
from tests.layerskip import zoo

GAMMA_MAX = 5
COUNTS = tuple(range(1, GAMMA_MAX + 2))
TEXT = zoo.prompt_of(9)
NONE = SkipMask.none(zoo.NUM_LAYERS)
ALL = SkipMask.early_exit(zoo.NUM_LAYERS, 0)
EXIT = SkipMask.early_exit(zoo.NUM_LAYERS, 1)
"""What a verification is timed after."""
MASKS = (NONE, ALL, SkipMask.early_exit(zoo.NUM_LAYERS, 2), SkipMask.from_sublayers(zoo.NUM_LAYERS, mlp=[1, 2, 3]))
each_engine = pytest.mark.parametrize("name", ["llama", "llama fused", "llama graph"])
on_the_host = pytest.mark.parametrize("name", ["llama", "llama fused"])


@dataclass
class Watch:
    """A clock that stands still but for forwards, and a diary of them."""

    now: float = 0.0
    forwards: list[tuple[int, list[int], SkipMask]] = field(default_factory=list)
    """Cache length before, token ids and mask of every forward."""
    events: list[str] = field(default_factory=list)
    fail_at: int | None = None
    """Index of a forward that raises."""

    def perf_counter(self) -> float:
        self.events.append("clock")
        return self.now


@pytest.fixture(autouse=True)
def num_warm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Forwards before what counts: none, but where a test asks for some."""
    number = getattr(request, "param", 0)
    monkeypatch.setattr(step_times, "_NUM_WARM", number)
    return number


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, name: str) -> Watch:
    """On the engine of the shared model: a forward takes 1 s, and 100 s a token and kept sublayer."""
    engine, seen = zoo.layerskip_of(name).engine, Watch()
    forward, synchronize = engine.forward, engine.synchronize

    def watched(input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        if len(seen.forwards) == seen.fail_at:
            raise RuntimeError("driver gone")
        mask = mask or NONE
        seen.forwards.append((engine.cache.length, input_ids.tolist(), mask))
        seen.events.append("forward")
        seen.now += 1.0 + 100.0 * len(input_ids) * kept(mask)
        return forward(input_ids, mask, num_logits=num_logits)

    def waited() -> None:
        seen.events.append("wait")
        synchronize()

    # In the engine's own dict, where undoing leaves nothing: other tests share this engine and patch its class.
    monkeypatch.setitem(vars(engine), "forward", watched)
    monkeypatch.setitem(vars(engine), "synchronize", waited)
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=seen.perf_counter))
    return seen


def kept(mask: SkipMask) -> int:
    return 2 * mask.num_layers - mask.num_skipped


def generated(model: LayerSkipModel) -> list[int]:
    config = DecodeConfig(skip_mask=MASKS[2], gamma=3)
    return model.generate(TEXT, config=config, max_new_tokens=12, do_sample=False).ids


@each_engine
def test_real_times_are_as_many_as_asked_for_and_positive(name: str) -> None:
    timer = StepTimer(zoo.layerskip_of(name), GAMMA_MAX)
    for seconds, expected in (
        (timer.verify_s(TEXT, COUNTS), len(COUNTS)),
        (timer.verify_s(TEXT, [3]), 1),
        (timer.draft_s(TEXT, MASKS, gamma=4, threshold=False), len(MASKS)),
        (timer.draft_s(TEXT[:1], MASKS * 2, gamma=GAMMA_MAX, threshold=True), 2 * len(MASKS)),
        (timer.draft_s(TEXT, [], gamma=4, threshold=True), 0),
    ):
        assert len(seconds) == expected
        assert all(0.0 < one < float("inf") for one in seconds)


@on_the_host
@pytest.mark.parametrize("num_warm", [3], indirect=True)
def test_steps_after_a_text_are_run_and_not_counted(name: str, watch: Watch) -> None:
    """A step right after a text's forward finds caches cold. Of a text that comes again its last token is computed."""
    timer = StepTimer(zoo.layerskip_of(name), GAMMA_MAX)
    seconds = timer.verify_s(TEXT, [1, 2])
    assert [len(ids) for _, ids, _ in watch.forwards] == [len(TEXT), *[1] * 4, 1, 2]
    assert seconds == pytest.approx([1 + 100 * kept(NONE), 1 + 200 * kept(NONE)])
    watch.forwards.clear()
    timer.draft_s(TEXT, [NONE], gamma=2, threshold=False)
    assert [len(ids) for _, ids, _ in watch.forwards] == [1, *[1] * 4, 1, *[1] * 2]
    assert watch.forwards[0][0] == len(TEXT) - 1


@on_the_host
def test_verification_is_a_target_forward_over_the_last_token_and_its_drafts(name: str, watch: Watch) -> None:
    """The text's own forward is not timed; each verification starts at the text's end, rolled back, and comes after
    a draft, which is not timed either; the target alone after its like."""
    seconds = StepTimer(zoo.layerskip_of(name), GAMMA_MAX).verify_s(TEXT, [1, 6, 2])
    assert seconds == [1.0 + 100.0 * n * kept(NONE) for n in (1, 6, 2)]
    first, *steps = watch.forwards
    assert first == (0, list(TEXT), NONE)
    (greedy,) = zoo.layerskip_of(name).generate(TEXT, max_new_tokens=1, do_sample=False).ids
    after = (len(TEXT), [greedy], EXIT)
    assert steps == [
        (len(TEXT), [greedy], NONE),
        *(one for n in (6, 2) for one in (after, (len(TEXT), [greedy] * n, NONE))),
    ]


@on_the_host
@pytest.mark.parametrize("threshold", [False, True])
def test_a_draft_time_is_that_of_one_token_of_a_whole_round(name: str, watch: Watch, threshold: bool) -> None:
    """A threshold is looked at, never reached: always gamma drafts, each after the one before, then rolled back. Each
    round comes after a step of the target, which is not timed."""
    seconds = StepTimer(zoo.layerskip_of(name), GAMMA_MAX).draft_s(TEXT, MASKS, gamma=4, threshold=threshold)
    assert seconds == [1.0 + 100.0 * kept(mask) for mask in MASKS]
    first, *steps = watch.forwards
    assert first == (0, list(TEXT), NONE)
    assert [(length, mask) for length, _, mask in steps] == [
        one for mask in MASKS for one in ((len(TEXT), NONE), *((len(TEXT) + k, mask) for k in range(4)))
    ]
    (greedy,) = zoo.layerskip_of(name).generate(TEXT, max_new_tokens=1, do_sample=False).ids
    assert all(ids == [greedy] for _, ids, _ in (*steps[::5], *steps[1::5]))


@on_the_host
def test_the_device_is_waited_for_before_both_looks_at_the_clock(name: str, watch: Watch) -> None:
    timer = StepTimer(zoo.layerskip_of(name), GAMMA_MAX)
    timer.verify_s(TEXT, [1, 2])
    alone, after_a_draft = ["wait", "clock", "forward", "wait", "clock"], ["wait", "clock", "forward"]
    assert watch.events == ["forward", *alone, *after_a_draft, *alone]
    watch.events.clear()
    timer.draft_s(TEXT, MASKS[:2], gamma=3, threshold=True)
    own = ["wait", "clock", "forward", "wait", "clock", *["forward"] * 3, "wait", "clock"]
    assert watch.events == ["forward", *own * 2]


@contextlib.contextmanager
def counting(model: Any) -> Iterator[Counter[str]]:
    """How often the last matrix of attentions and MLPs is multiplied, on the model's own modules."""
    seen: Counter[str] = Counter()
    spec, hooks = zoo.spec_of("llama"), []
    for layer in zoo.stack_of(model):
        for kind, path in (("attention", spec.attention_out), ("mlp", spec.mlp_out)):
            module = layer.get_submodule(path)
            hooks.append(module.register_forward_hook(lambda *_, kind=kind: seen.update([kind])))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("mask", "attention", "mlp"),
    [
        (NONE, 4, 4),
        (ALL, 0, 0),
        (SkipMask.early_exit(4, 1), 1, 1),
        (SkipMask.from_sublayers(4, mlp=[1, 2, 3]), 4, 1),
        (SkipMask.from_sublayers(4, attention=[0, 2], mlp=[3]), 2, 3),
    ],
    ids=str,
)
def test_a_skipped_sublayer_is_not_run(mask: SkipMask, attention: int, mlp: int) -> None:
    """Beside the text's own forward and the target's step before, each of three drafts runs what its mask keeps."""
    model = zoo.layerskip_of("llama")
    with counting(model.model) as seen:
        StepTimer(model, GAMMA_MAX).draft_s(TEXT, [mask], gamma=3, threshold=False)
    assert (seen["attention"], seen["mlp"]) == (8 + 3 * attention, 8 + 3 * mlp)


@each_engine
def test_the_model_decodes_afterwards_as_before(name: str) -> None:
    model = zoo.layerskip_of(name)
    before, timer = generated(model), StepTimer(model, GAMMA_MAX)
    timer.verify_s(TEXT, COUNTS)
    assert generated(model) == before
    timer.draft_s(TEXT, MASKS, gamma=GAMMA_MAX, threshold=True)
    assert generated(model) == before
    with pytest.raises(RuntimeError, match="no cache"):
        _ = model.engine.cache


@on_the_host
@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_failure_in_the_middle_leaves_the_model_whole(name: str, watch: Watch, fail_at: int) -> None:
    model = zoo.layerskip_of(name)
    before, timer = generated(model), StepTimer(model, GAMMA_MAX)
    calls: list[Callable[[], list[float]]] = [
        lambda: timer.verify_s(TEXT, COUNTS),
        lambda: timer.draft_s(TEXT, MASKS, gamma=3, threshold=False),
    ]
    for call in calls:
        watch.forwards.clear()
        watch.fail_at = fail_at
        with pytest.raises(RuntimeError, match="driver gone"):
            call()
        watch.fail_at = None
        assert generated(model) == before
