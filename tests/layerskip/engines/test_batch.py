"""Texts decoded together say what each says alone, and share their forwards."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, PrefixCache, SkipMask
from layerskip.engines.batch import Batch, Cancelled
from layerskip.engines.fused import Forward, FusedEngine
from layerskip.model import GenerationStream
from tests.layerskip import zoo
from tests.layerskip.drafters.test_drafters import DRAFTERS, PROMPT, TRAINED, TREES, by_trees, by_weights, config_of
from tests.layerskip.huggingface.test_adapter import PlantedError

MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [1])
PROMPTS = ((*PROMPT, 2), PROMPT, (5, 3, 5, 3), PROMPT[2:], (7,), PROMPT)
"""Of several lengths; one twice."""
FUSED_RUNS = tuple(f"{name} fused" for name in zoo.FUSED)


def check_alone(model: LayerSkipModel, max_batch_size: int = 3, **arguments: Any) -> None:
    """Tokens and counts of a batch, of which more texts wait than are decoded, against those of each alone."""
    together = model.generate_batch(
        PROMPTS, max_batch_size=max_batch_size, max_drafting=max_batch_size, max_new_tokens=12, **arguments
    )
    for i, (prompt, one) in enumerate(zip(PROMPTS, together, strict=True)):
        seeded = {"seed": arguments["seed"] + i} if "seed" in arguments else {}
        alone = model.generate(prompt, max_new_tokens=12, **arguments | seeded)
        assert (one.ids, one.origins, one.finish_reason) == (alone.ids, alone.origins, alone.finish_reason)
        assert one.stats.counters() == alone.stats.counters()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[Forward]]:
    """Every forward so far, each with the texts that share it."""
    found: list[list[Forward]] = []
    own = FusedEngine.compute

    def compute(self: FusedEngine, forwards: list[Forward]) -> list[torch.Tensor]:
        found.append(list(forwards))
        return own(self, forwards)

    monkeypatch.setattr(FusedEngine, "compute", compute)
    return found


@zoo.few(FUSED_RUNS, ("llama fused", "gemma3 fused"))
@pytest.mark.parametrize("sampled", [False, True])
def test_every_architecture(name: str, sampled: bool) -> None:
    config = DecodeConfig(skip_mask=zoo.masks_of(name)["interior"], gamma=3)
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 3} if sampled else {}
    check_alone(zoo.layerskip_of(name), config=config, **how)


@zoo.few(("llama fused", "gemma3 fused"), ("llama fused",))
@pytest.mark.parametrize("drafter", DRAFTERS + TRAINED + TREES)
def test_every_drafter(name: str, drafter: str) -> None:
    check_alone(zoo.layerskip_of(name), config=config_of(drafter, name, MASK))


@pytest.mark.parametrize("drafter", DRAFTERS + TRAINED + TREES)
def test_drafts_begin_once_few_texts_are_left(drafter: str) -> None:
    model, batch, config = zoo.layerskip_of("llama fused"), Batch(1), config_of(drafter, "llama", MASK)
    streams = [model.stream(PROMPT, max_new_tokens=most, config=config, batch=batch) for most in (4, 30)]
    batch.run_all([partial(deque, one, 0) for one in streams], 2)
    expected = model.generate(PROMPT, max_new_tokens=30).ids
    assert [one.output().ids for one in streams] == [expected[:4], expected]
    assert [one.stats.num_drafted > 0 for one in streams] == [False, True]
    assert streams[1].stats.num_target_only >= 3


@pytest.mark.skipif("glm4-moe" not in zoo.FUSED, reason="no kernels here")
@pytest.mark.parametrize("drafter", ["mtp", "hybrid mtp", "mtp tree"])
def test_a_layer_of_the_models_own(drafter: str) -> None:
    config = (by_weights("glm4-moe") | by_trees("glm4-moe"))[drafter]
    check_alone(zoo.layerskip_of("glm4-moe fused"), config=config)


def test_siblings_and_eight_bits() -> None:
    model = zoo.layerskip_of("llama fused")
    check_alone(model, config=DecodeConfig(skip_mask=MASK, gamma=3, siblings=2))
    if model.bits_refusal(8) is None:
        check_alone(model, config=DecodeConfig(skip_mask=MASK.rounded(8), gamma=3))


def test_long_and_short_texts_together() -> None:
    """Of a long text's keys parts are summed up by themselves, of the other's not; its prompt comes in pieces."""
    model = LayerSkipModel(zoo.build("llama", max_position_embeddings=2048), engine="fused")
    prompts = [zoo.prompt_of(count, seed=count) for count in (1100, 5, 270)]
    for one, prompt in zip(model.generate_batch(prompts, max_new_tokens=6), prompts, strict=True):
        assert one.ids == model.generate(prompt, max_new_tokens=6).ids


def test_each_forward_is_computed_once_for_all_and_a_text_that_ends_makes_room(computed: list[list[Forward]]) -> None:
    model = zoo.layerskip_of("llama fused")
    computed.clear()  # a new model's engine is tried first
    model.generate_batch([PROMPT] * 5, max_batch_size=4, max_new_tokens=3, config=DecodeConfig.plain(zoo.NUM_LAYERS))
    assert [len(one) for one in computed] == [4, 4, 4, 1, 1, 1]
    computed.clear()
    config = DecodeConfig(skip_mask=MASK, gamma=2)
    model.generate_batch([PROMPT, PROMPT[2:]], max_new_tokens=4, config=config)
    assert all(len(one) == 2 for one in computed[:4])
    assert [one[0].mask for one in computed[:4]] == [None, MASK, MASK, None]


def test_a_prompt_comes_in_pieces_beside_others_and_whole_alone(computed: list[list[Forward]]) -> None:
    model, batch, plain = zoo.layerskip_of("llama fused"), Batch(prompt_piece=8), DecodeConfig.plain(zoo.NUM_LAYERS)
    long, short = zoo.prompt_of(20, seed=1), zoo.prompt_of(3, seed=2)
    streams = [model.stream(one, max_new_tokens=9, config=plain, batch=batch) for one in (short, long, long)]
    batch.run_all([partial(deque, one, 0) for one in streams[:2]], 2)
    assert [[len(one.ids) for one in shared] for shared in computed[:4]] == [[3, 8], [8, 1], [4, 1], [1, 1]]
    computed.clear()
    batch.run_all([partial(deque, streams[2], 0)], 2)
    assert len(computed[0][0].ids) == 20
    assert [one.output().ids for one in streams] == [
        model.generate(one, max_new_tokens=9).ids for one in (short, long, long)
    ]


def test_alone_a_long_prompt_comes_in_larger_pieces(
    computed: list[list[Forward]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that who comes in between need not wait for all of it."""
    monkeypatch.setattr("layerskip.engines.batch._PIECE_ALONE", 8)
    model, batch = zoo.layerskip_of("llama fused"), Batch(prompt_piece=4)
    long, short = zoo.prompt_of(40, seed=1), zoo.prompt_of(3, seed=2)
    streams = [model.stream(one, max_new_tokens=9, batch=batch) for one in (long, short)]
    batch.start(partial(deque, streams[0], 0))
    batch.step()
    batch.start(partial(deque, streams[1], 0))
    while batch.num_running:
        batch.step()
    assert [[len(one.ids) for one in shared] for shared in computed[:4]] == [[8], [4, 3], [4, 1], [4, 1]]
    assert [one.output().ids for one in streams] == [model.generate(one, max_new_tokens=9).ids for one in (long, short)]


def test_prompts_are_answered_one_after_the_other_and_none_is_left_behind(
    computed: list[list[Forward]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what is computed is of the prompt that came first, the rest of the one that has least left."""
    monkeypatch.setattr("layerskip.engines.batch._PIECE_ALONE", 16)
    model, batch = zoo.layerskip_of("llama fused"), Batch(prompt_piece=4)
    prompts = [zoo.prompt_of(count, seed=count) for count in (40, 41, 24)]
    streams = [model.stream(one, max_new_tokens=20, batch=batch) for one in prompts]
    computed.clear()
    for one in streams:
        batch.start(partial(deque, one, 0))
    while batch.num_running:
        batch.step()
    assert [[len(one.ids) for one in shared] for shared in computed[:9]] == [
        *([8, 8],) * 3,  # of the first and the third, which then says its first token
        *([8, 1],) * 2,  # four for each of the two that are left, none of the second before the first is known
        [4, 1, 1],
        *([4, 1, 1],) * 3,
    ]
    assert [one.output().ids for one in streams] == [model.generate(one, max_new_tokens=20).ids for one in prompts]


@pytest.mark.parametrize("kind", ["draft_model", "hybrid draft_model"])
def test_nobody_waits_for_the_whole_prompt_of_a_draft_model(kind: str, computed: list[list[Forward]]) -> None:
    model, batch = zoo.layerskip_of("llama fused"), Batch(prompt_piece=4)
    config = config_of(kind, "llama fused", MASK)
    long = zoo.prompt_of(40, seed=1)
    computed.clear()
    streams = [model.stream(PROMPT, max_new_tokens=30, config=DecodeConfig.plain(zoo.NUM_LAYERS), batch=batch)]
    streams += [model.stream(long, max_new_tokens=6, config=config, batch=batch)]
    batch.run_all([partial(deque, one, 0) for one in streams], 2)
    pieces = [shared for shared in computed if any(one.engine._drafts and len(one.ids) == 4 for one in shared)]
    assert len(pieces) >= 9
    last = max(place for place, shared in enumerate(computed) if shared in pieces)
    first = min(place for place, shared in enumerate(computed) if shared in pieces)
    between = [shared for shared in computed[first:last] if shared not in pieces]
    assert len(between) >= len(pieces) - 1
    assert [one.output().ids for one in streams] == [
        model.generate(PROMPT, max_new_tokens=30).ids,
        model.generate(long, max_new_tokens=6).ids,
    ]


def test_a_run_that_nobody_wants_ends_amid_its_prompt_and_the_others_go_on() -> None:
    model, batch, ended = zoo.layerskip_of("llama fused"), Batch(prompt_piece=4), list[bool]()
    long, short, left = zoo.prompt_of(40, seed=1), zoo.prompt_of(3, seed=2), list[bool]()

    def decode() -> None:
        try:
            deque(model.stream(long, max_new_tokens=9, batch=batch), 0)
        except Cancelled:
            ended.append(True)

    stays = model.stream(short, max_new_tokens=9, batch=batch)
    batch.start(partial(deque, stays, 0))
    batch.start(decode, lambda: bool(left))
    for _ in range(3):
        batch.step()
    assert batch.num_running == 2
    left.append(True)
    batch.step()
    assert (ended, batch.num_running) == ([True], 1)
    while batch.num_running:
        batch.step()
    assert stays.output().ids == model.generate(short, max_new_tokens=9).ids


def test_the_end_of_a_batch_ends_all_runs_though_one_fails_at_it() -> None:
    model, batch, ended = zoo.layerskip_of("llama fused"), Batch(), list[int]()

    def decode(number: int) -> None:
        try:
            deque(model.stream(PROMPT, max_new_tokens=9, batch=batch), 0)
        finally:
            ended.append(number)
            if number == 1:
                raise PlantedError

    for number in range(3):
        batch.start(partial(decode, number))
    batch.step()
    with pytest.raises(PlantedError):
        batch.close()
    assert sorted(ended) == [0, 1, 2]
    assert not batch.num_running
    check_alone(model)


def test_a_conversation_goes_on_in_a_batch() -> None:
    model, cache = zoo.layerskip_of("llama fused"), PrefixCache(1 << 24)
    first = model.generate_batch([PROMPT, PROMPT[3:]], max_new_tokens=6, prefix_cache=cache)
    texts = [(*prompt, *one.ids, 7) for prompt, one in zip((PROMPT, PROMPT[3:]), first, strict=True)]
    for text, one in zip(texts, model.generate_batch(texts, max_new_tokens=6, prefix_cache=cache), strict=True):
        assert one.stats.num_cached == len(text) - 2
        assert one.ids == model.generate(text, max_new_tokens=6).ids


@pytest.mark.parametrize("drafter", ["layer_skip", "hybrid"])
def test_a_text_that_is_done_keeps_no_keys_while_others_wait(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches, alive = zoo.layerskip_of("llama fused"), list[Any](), list[int]()
    allocate, output = FusedEngine._allocate, GenerationStream.output

    def allocate_seen(self: FusedEngine) -> None:
        allocate(self)
        layer: Any = self.cache.layers[0]
        caches.append(weakref.ref(layer.states))

    def output_seen(self: GenerationStream) -> Any:
        gc.collect()
        alive.append(sum(one() is not None for one in caches))
        return output(self)

    monkeypatch.setattr(FusedEngine, "_allocate", allocate_seen)
    monkeypatch.setattr(GenerationStream, "output", output_seen)
    config = config_of(drafter, "llama fused", MASK)
    outputs = model.generate_batch([PROMPT] * 9, max_batch_size=2, max_new_tokens=6, config=config)
    assert len(outputs) == len(caches) == 9
    assert alive[0] == 0


def test_who_raises_is_over_and_the_others_go_on() -> None:
    model, batch, done = zoo.layerskip_of("llama fused"), Batch(), list[int]()

    def decode(prompt: tuple[int, ...], *, fails: bool) -> None:
        for count, _ in enumerate(model.stream(prompt, max_new_tokens=6, batch=batch)):
            if fails and count == 2:
                raise PlantedError
        done.append(len(prompt))

    for prompt, fails in ((PROMPT, True), (PROMPT[1:], False), (PROMPT[2:], False)):
        batch.start(partial(decode, prompt, fails=fails))
    for _ in range(2):
        batch.step()
    with pytest.raises(PlantedError):
        batch.step()
    while batch.num_running:
        batch.step()
    assert done == [len(PROMPT) - 1, len(PROMPT) - 2]


def test_a_forward_that_fails_does_so_for_all_who_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, raised = zoo.layerskip_of("llama fused"), Batch(), list[str]()

    def decode(prompt: tuple[int, ...]) -> None:
        try:
            list(model.stream(prompt, max_new_tokens=6, batch=batch))
        except PlantedError:
            raised.append("raised")

    def compute(self: FusedEngine, forwards: list[Forward]) -> list[torch.Tensor]:
        raise PlantedError

    for prompt in PROMPTS[:3]:
        batch.start(partial(decode, prompt))
    with monkeypatch.context() as patch:
        patch.setattr(FusedEngine, "compute", compute)
        batch.step()
    assert (raised, batch.num_running) == (["raised"] * 3, 0)
    check_alone(model)


def test_runs_are_ended_where_they_are_and_inference_mode_with_them() -> None:
    model, batch, ended = zoo.layerskip_of("llama fused"), Batch(), list[str]()

    def decode() -> None:
        try:
            list(model.stream(PROMPT, max_new_tokens=6, batch=batch))
        finally:
            ended.append("ended")

    batch.start(decode)
    batch.start(decode)
    batch.step()
    assert not torch.is_inference_mode_enabled()
    batch.close()
    assert (ended, batch.num_running, torch.is_inference_mode_enabled()) == (["ended"] * 2, 0, False)


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        (lambda: zoo.layerskip_of("llama"), "batch: needs the engine fused, it is eager"),
        (
            lambda: partial(zoo.layerskip_of("llama fused").generate_batch, max_batch_size=0),
            "max_batch_size: must be a whole number of at least 1, got 0",
        ),
        (
            lambda: lambda _: zoo.layerskip_of("llama fused").generate_batch("def read("),
            "prompts: must be several, got a text: 'def read\\('",
        ),
        (
            lambda: partial(zoo.layerskip_of("llama fused").generate_batch, generator=torch.Generator()),
            "generator: of a batch each text draws by itself; give a seed",
        ),
    ],
)
def test_refusals(asks: Callable[[], Any], message: str) -> None:
    found = asks()
    with pytest.raises(ValueError, match=f"^{message}$"):
        (found.generate_batch if isinstance(found, LayerSkipModel) else found)([PROMPT])
