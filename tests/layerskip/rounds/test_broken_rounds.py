"""Something raises in the middle of a round: model, engine and cache are sound, and the next run is as any other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.decoding import loop as decode_module
from layerskip.drafters import layer_skip as drafter_module
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import RerunRecorder
from layerskip.huggingface.kv_cache import SharedLengthCache, StaticCache
from layerskip.model import GenerateOutput
from layerskip.rounds import device_round as device_round_module
from layerskip.rounds import round_work as round_work_module
from layerskip.rounds import sampling as sampling_module
from layerskip.rounds.sampling import Sampler
from tests.layerskip import zoo
from tests.layerskip.huggingface.test_adapter import PlantedError, gates_on
from tests.layerskip.tape import engine_of, graph_model

GAMMA = 3
BUDGET = 10
MASK = SkipMask.from_sublayers(zoo.NUM_LAYERS, attention=[1, 2], mlp=[3])
ENGINES = ("eager", "fused", "graph", "graph modules")


@pytest.fixture(scope="module")
def models() -> dict[str, LayerSkipModel]:
    return {
        "eager": zoo.layerskip_of("llama"),
        "fused": zoo.layerskip_of("llama fused"),
        "graph": graph_model("llama", RerunRecorder()),
        "graph modules": graph_model("llama", RerunRecorder(), modules=True),
    }


def prompt() -> tuple[int, ...]:
    return zoo.prompt_of(5)


def run(model: LayerSkipModel, **arguments: Any) -> tuple[list[int], dict[str, Any]]:
    """Tokens and every counter. A wrong draft changes no token, so tokens alone would hide a damaged cache."""
    threshold = arguments.pop("draft_threshold", 0.0)
    config = DecodeConfig(skip_mask=MASK, gamma=GAMMA, draft_threshold=threshold, target_threshold=0.2)
    out = model.generate(prompt(), max_new_tokens=BUDGET, config=config, **arguments)
    return out.ids, out.stats.counters()


def assert_sound(model: LayerSkipModel, expected: tuple[list[int], dict[str, Any]], **arguments: Any) -> None:
    assert gates_on(model.model) == []
    assert not torch.is_inference_mode_enabled()
    with pytest.raises(RuntimeError, match="no cache"):
        _ = model.engine.cache
    assert run(model, **arguments) == expected


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool) -> Iterator[None]:
    """`owner.name` raises at its `call`-th call from 0, before or after its work."""
    own, seen = getattr(owner, name), [0]

    def planted(*arguments: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] != call + 1:
            return own(*arguments, **named)
        if after:
            own(*arguments, **named)
        raise PlantedError

    with monkeypatch.context() as patch:
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        patch.setattr(owner, name, staticmethod(planted) if is_static else planted)
        yield


def check_survives(
    model: LayerSkipModel,
    prompt: Any,
    config: DecodeConfig,
    places: Iterable[tuple[Any, str]],
    monkeypatch: Any,
    num_calls: int = 2,
) -> GenerateOutput:
    """Each of these functions raises at its first calls, before and after its work: the next run is as any other."""

    def generate() -> GenerateOutput:
        return model.generate(prompt, max_new_tokens=16, config=config)

    expected = generate()
    for (owner, name), call, after in product(places, range(num_calls), (False, True)):
        with failing(monkeypatch, owner, name, call, after=after), pytest.raises(PlantedError):
            generate()
        assert gates_on(model.model) == []
        assert not torch.is_inference_mode_enabled()
        out = generate()
        assert (out.ids, out.stats.counters()) == (expected.ids, expected.stats.counters())
    return expected


Owner = Callable[[LayerSkipModel], tuple[Any, str]]
_FORWARDS: dict[str, Owner] = {
    "forward": lambda model: (model.engine, "forward"),
    "shaping": lambda _: (Sampler, "shape"),
}
_STEPS: dict[str, Owner] = {
    "step": lambda model: (engine_of(model).executor, "step"),
    "shaping": lambda _: (Sampler, "shape"),
}
"""Called for the prompt, every draft and the verification."""
_ONCE_A_ROUND: dict[str, Owner] = {
    "draft": lambda _: (drafter_module.LayerSkipDrafter, "draft"),
    "verdict": lambda _: (decode_module, "verify"),
    "rollback": lambda _: (SharedLengthCache, "rollback_to"),
    "settling": lambda _: (decode_module, "_settle"),
}
_ONCE_A_DEVICE_ROUND: dict[str, Owner] = {
    "verdict": lambda _: (round_work_module, "choose"),
    "read": lambda _: (device_round_module.DeviceRound, "_read"),
    "move": lambda _: (StaticCache, "moved_to"),
    "settling": lambda _: (decode_module, "_settle"),
}


def places_of(engine: str) -> Iterator[tuple[str, Owner, int]]:
    """(stage, whose function it is, number of the call) in the first two rounds."""
    on_device = engine.startswith("graph")
    every_step = _STEPS if on_device else _FORWARDS
    if engine == "fused":
        every_step = every_step | {"run": lambda _: (FusedEngine, "_run")}
    for stage, owner in every_step.items():
        yield from ((stage, owner, call) for call in range(GAMMA + 2))
    for stage, owner in (_ONCE_A_DEVICE_ROUND if on_device else _ONCE_A_ROUND).items():
        yield from ((stage, owner, call) for call in range(2))


# A draft threshold makes a round several pieces on the device, and a read after each draft.
@pytest.mark.parametrize(("after", "draft_threshold"), [(False, 0.0), (True, 0.3)], ids=["before", "after"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_stage_of_a_round(
    engine: str, after: bool, draft_threshold: float, models: dict[str, LayerSkipModel], monkeypatch: Any
) -> None:
    model = models[engine]
    expected = run(model, draft_threshold=draft_threshold)
    assert tuple(expected[0]) == zoo.greedy_reference("llama", prompt())[:BUDGET]
    for _stage, owner_of, call in places_of(engine):
        if engine.startswith("graph"):
            engine_of(model).close()  # what is recorded already would not call the patched function
        with failing(monkeypatch, *owner_of(model), call, after=after), pytest.raises(PlantedError):
            run(model, draft_threshold=draft_threshold)
        assert_sound(model, expected, draft_threshold=draft_threshold)
    plain = model.model.generate(torch.tensor([prompt()]), max_new_tokens=8, do_sample=False)
    assert tuple(plain[0, 5:].tolist()) == zoo.greedy_reference("llama", prompt())[:8]


@pytest.mark.parametrize("engine", ENGINES)
def test_drawing(engine: str, models: dict[str, LayerSkipModel], monkeypatch: Any) -> None:
    """Of draft tokens and of the target's, and on the device the noise of a whole round."""
    model = models[engine]
    on_device = engine.startswith("graph")
    found = [(Sampler, "noise", 2)] if on_device else [(one, "choose", GAMMA + 2) for one in (Sampler, sampling_module)]
    sampling: dict[str, Any] = {"do_sample": True, "seed": 3}
    expected = run(model, **sampling)
    for owner, name, num_calls in found:
        for call in range(num_calls):
            with failing(monkeypatch, owner, name, call, after=True), pytest.raises(PlantedError):
                run(model, **sampling)
            assert_sound(model, expected, **sampling)


@pytest.mark.parametrize("engine", ENGINES)
def test_consumers(engine: str, models: dict[str, LayerSkipModel], monkeypatch: Any) -> None:
    """Whoever reads the pieces, and whoever is asked whether to stop."""
    model = models[engine]
    expected = run(model)
    config = DecodeConfig(skip_mask=MASK, gamma=GAMMA, target_threshold=0.2)
    for place in range(3):
        with pytest.raises(PlantedError):
            raise_at(model.stream(prompt(), max_new_tokens=BUDGET, config=config), place)
        assert_sound(model, expected)
        asked = Asked(place)
        with monkeypatch.context() as patch:
            patch.setattr(model, "_stop_check", lambda _strings, asked=asked: asked)
            with pytest.raises(PlantedError):
                run(model)
        assert_sound(model, expected)


def raise_at(stream: Any, place: int) -> None:
    for number, _ in enumerate(stream):
        if number == place:
            raise PlantedError


class Asked:
    """Whether to stop, asked after each token; raises at the one of this number."""

    def __init__(self, place: int) -> None:
        self.left = place

    def __call__(self, _ids: Any) -> bool:
        self.left -= 1
        if self.left < 0:
            raise PlantedError
        return False
