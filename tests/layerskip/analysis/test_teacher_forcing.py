"""Teacher forcing: its readings are those of live draft steps, on every architecture; where not, it says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest
import torch

from layerskip import LayerSkipModel, SkipMask
from layerskip.analysis.teacher_forcing import (
    ForcedText,
    LayerwiseForcing,
    TeacherForcing,
    WrongDraft,
    make_teacher_forcing,
)
from layerskip.analysis.teacher_forcing.choice import matches_live
from layerskip.analysis.teacher_forcing.own_keys import OwnKeysForcing
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo

OWN_KEYS = {"bloom", "mpt", "falcon-alibi", *zoo.RECURRENT}
"""Positions enter through the distance between keys, which substituted keys do not have."""


def texts_of(model: LayerSkipModel) -> list[ForcedText]:
    """Two texts of different lengths, the second longer than any window."""
    texts = []
    for length, count in ((3, 6), (11, 9)):
        prompt = zoo.prompt_of(length)
        out = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=[])
        texts.append(ForcedText(tuple(prompt), tuple(out.ids)))
    return texts


@torch.inference_mode()
def live_row(model: LayerSkipModel, text: ForcedText, k: int, mask: SkipMask, depth: int = 0) -> torch.Tensor:
    """Logits of the draft step after continuation token k, in a round that has drafted `depth` tokens before it."""
    ids = torch.tensor(text.ids[: len(text.prompt_ids) + k + 1])
    start = len(ids) - depth - 1
    with model.engine.session(len(ids)):
        model.engine.forward(ids[:start])
        for token in ids[start:]:
            row = model.engine.forward(token.view(1), mask)[0].clone()
    return row


def closeness(mask: SkipMask) -> float:
    """Activations that differ by float32's rounding may be rounded to different ones of 256 steps."""
    return 0.1 if mask.bits else 1e-3


def check_rows(model: LayerSkipModel, forcing: TeacherForcing, texts: list[ForcedText]) -> None:
    for kind, mask in zoo.masks_of("llama").items():
        try:
            model.adapter.check_mask(mask)
        except ValueError:
            continue
        for text, rows in zip(texts, forcing.draft_logits(mask, depth=2), strict=True):
            for depth, k in itertools.product(range(3), range(len(text.continuation_ids))):
                if depth <= k:
                    live = live_row(model, text, k, mask, depth)
                    message = f"{kind}, row {k} at depth {depth}"
                    torch.testing.assert_close(rows[depth, k], live, rtol=1e-3, atol=closeness(mask), msg=message)


@zoo.few(fast=("llama", "gemma3"))
def test_readings_equal_live_draft_steps(name: str) -> None:
    model = LayerSkipModel(zoo.build(name), engine="eager")
    texts = texts_of(model)
    forcing = make_teacher_forcing(model, texts)
    if name in OWN_KEYS:
        assert forcing.keys == "own"
        return
    assert forcing.keys == "target"
    check_rows(model, forcing, texts)


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3", "mistral-sliding", "gemma3", "smollm3"])
def test_layerwise_readings_equal_live_draft_steps(name: str) -> None:
    model = LayerSkipModel(zoo.build(name), engine="fused")
    texts = texts_of(model)
    forcing = make_teacher_forcing(model, texts)
    assert isinstance(forcing, LayerwiseForcing)
    check_rows(model, forcing, texts)


def test_layerwise_states_do_not_depend_on_what_was_read_before() -> None:
    """Shared beginnings, a cache of two states, texts one by one: the same readings."""
    model = LayerSkipModel(zoo.build("llama"), engine="fused")
    texts = texts_of(model)
    roomy, tight = (LayerwiseForcing(model.engine, texts, cache_bytes=size) for size in (1 << 20, 1))
    masks = list(zoo.masks_of("llama").values())
    for i, mask in enumerate(masks + masks[::-1]):
        fresh = LayerwiseForcing(model.engine, texts).read(mask, depth=i % 3)
        for forcing in (roomy, tight):
            reading = forcing.read(mask, depth=i % 3)
            np.testing.assert_array_equal(reading.accepted, fresh.accepted)
            np.testing.assert_allclose(reading.confidence, fresh.confidence, rtol=1e-6)
    assert tight._states is not None
    assert len(tight._states) == 1


def test_layerwise_states_are_the_targets_own() -> None:
    """`target(L)` leads to the target's logits, and its parts compose to it."""
    model = LayerSkipModel(zoo.build("llama"), engine="fused")
    texts = texts_of(model)
    forcing = LayerwiseForcing(model.engine, texts)
    hidden = forcing.embed()
    for layer in range(forcing.num_layers):
        hidden = forcing.mlp(layer, forcing.attention(layer, hidden))
        torch.testing.assert_close(hidden, forcing.target(layer + 1), rtol=1e-5, atol=1e-5)
    normed = model.engine.norm(forcing.target(forcing.num_layers))
    for text, rows in zip(texts, torch.split(normed, forcing.lengths.tolist()), strict=True):
        expected = model.target_logits(text.ids, num_logits=len(text.continuation_ids))
        torch.testing.assert_close(model.engine.head(rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_readings_of_the_whole_model(engine: str) -> None:
    """Without a skip the draft is the target: always right, and as sure of the next token as the target is."""
    model = LayerSkipModel(zoo.build("llama"), engine=engine)
    texts = texts_of(model)
    forcing = make_teacher_forcing(model, texts)
    reading = forcing.read(SkipMask.none(zoo.NUM_LAYERS))
    for i, text in enumerate(texts):
        count = len(text.continuation_ids)
        assert reading.accepted[0, i].tolist() == [1.0] * (count - 1) + [0.0] * (reading.accepted.shape[2] - count + 1)
        np.testing.assert_allclose(reading.confidence[0, i, : count - 1], forcing.target_probs[i, 1:count], rtol=1e-4)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@zoo.each(("llama", "llama fused"))
def test_a_sampled_text_is_read_by_the_numbers_that_it_was_drawn_by(name: str, penalty: float) -> None:
    model, mask = zoo.layerskip_of(name), SkipMask.from_layers(zoo.NUM_LAYERS, [2])
    params = SamplingParams(do_sample=True, temperature=0.7, top_k=0, top_p=0.9, repetition_penalty=penalty)
    texts = []
    for seed in range(3):
        prompt = zoo.prompt_of(4 + seed, seed)
        out = model.generate(prompt, max_new_tokens=12, seed=seed, **asdict(params))
        texts.append(ForcedText(tuple(prompt), tuple(out.ids), seed))
    forcing = make_teacher_forcing(model, texts, params)
    assert forcing.read(SkipMask.none(zoo.NUM_LAYERS)).accepted[0, :, :-1].all()
    reading, num_right = forcing.read(mask), 0
    for i, text in enumerate(texts):
        sampler = Sampler(params, torch.Generator().manual_seed(text.seed))
        sampler.begin(len(text.prompt_ids))
        for k in range(len(text.continuation_ids) - 1):
            so_far = [*text.prompt_ids, *text.continuation_ids[: k + 1]]
            shaped = sampler.shape(live_row(model, text, k, mask).unsqueeze(0), so_far)
            drafted = int(sampler.choose(shaped, len(so_far)))
            right = drafted == text.continuation_ids[k + 1]
            assert (reading.choices[0, i, k], reading.accepted[0, i, k]) == (drafted, right)
            assert reading.confidence[0, i, k] == pytest.approx(float(shaped.softmax(-1).max()), abs=1e-4)
            num_right += right
    assert 0 < num_right < 33
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(make_teacher_forcing(model, texts).read(mask).choices, reading.choices)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", *(f"{one} fused" for one in zoo.COMPILED)])
def test_own_keys_are_told_apart_from_the_targets(name: str) -> None:
    """`own` reads another draft than a live round's first step, and the next reading nothing of the one before."""
    model = LayerSkipModel(zoo.build(name), engine="fused" if name.endswith("fused") else "eager")
    texts = texts_of(model)
    own = (
        make_teacher_forcing(model, texts)
        if zoo.architecture(name) in OWN_KEYS
        else OwnKeysForcing(model.engine, texts)
    )
    assert isinstance(own, OwnKeysForcing)
    mask = SkipMask.from_sublayers(zoo.NUM_LAYERS, mlp=[0, 1])
    rows = list(own.draft_logits(mask))[1][0]
    list(own.draft_logits(SkipMask.early_exit(zoo.NUM_LAYERS, 1)))
    assert torch.equal(list(own.draft_logits(mask))[1][0], rows)
    torch.testing.assert_close(rows[0], live_row(model, texts[1], 0, mask), rtol=1e-3, atol=1e-3)
    last = len(rows) - 1
    assert (rows[last] - live_row(model, texts[1], last, mask)).abs().max() > 1e-3


@pytest.mark.parametrize(("off_by", "matches"), [(0.0, True), (0.13, True), (0.5, False)])
def test_rounding_of_half_of_the_layers_is_no_other_draft(
    off_by: float, matches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a published model's rows were off by up to 0.14 of their norm, by wrong keys 0.6."""
    model = LayerSkipModel(zoo.build("llama").bfloat16(), engine="fused")
    forcing = LayerwiseForcing(model.engine, texts_of(model))
    read = forcing.draft_logits

    def noisy(mask: SkipMask, depth: int = 0) -> Iterator[torch.Tensor]:
        for rows in read(mask, depth):
            noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
            norms = rows.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
            yield rows + off_by * norms * noise

    monkeypatch.setattr(forcing, "draft_logits", noisy)
    assert matches_live(forcing, model.engine, zoo.NUM_LAYERS) is matches


def test_bad_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token each, got 0 and 1"):
        ForcedText((), (1,))
    model = LayerSkipModel(zoo.build("llama"), engine="fused")
    with pytest.raises(ValueError, match="at least one text"):
        make_teacher_forcing(model, [])


@pytest.mark.parametrize(("name", "engine"), [("llama", "fused"), ("llama", "eager"), ("gemma2", "eager")])
def test_overrun_is_what_a_live_draft_adds_after_a_wrong_token(name: str, engine: str) -> None:
    """Whatever its round has drafted before: the two are the same step by step."""
    model = LayerSkipModel(zoo.build(name), engine=engine)
    texts = texts_of(model)
    forcing = make_teacher_forcing(model, texts)
    mask = SkipMask.from_layers(zoo.NUM_LAYERS, [1])
    sureness = np.sort(forcing.read(mask).confidence[0, 0])[2:-2]
    wrong = [WrongDraft(1, 3, 0, 7, 4), WrongDraft(0, 2, 2, 9, 3), WrongDraft(1, 8, 0, 5, 1), WrongDraft(1, 8, 5, 5, 6)]
    for threshold in (0.0, float(np.median(sureness)), 1.0):
        expected = [live_overrun(model, texts[one.text], one, mask, threshold) for one in wrong]
        assert forcing.overrun(mask, wrong, threshold) == expected
    assert forcing.overrun(mask, wrong, 0.0) == [4, 3, 1, 6]
    assert forcing.overrun(mask, wrong, 1.0) == [1, 1, 1, 1]
    assert forcing.overrun(mask, [], 0.5) == []


@pytest.mark.parametrize(
    ("drafted", "room", "said"),
    [
        (4, 1, "drafted: must be from 0 to the row, 3, got 4"),
        (-1, 1, "drafted: must be from 0 to the row, 3, got -1"),
        (3, 0, "room: must be at least 1, got 0"),
    ],
)
def test_a_wrong_draft_that_cannot_be_is_refused(drafted: int, room: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WrongDraft(text=0, row=3, drafted=drafted, token=7, room=room)


@torch.inference_mode()
def live_overrun(model: LayerSkipModel, text: ForcedText, wrong: WrongDraft, mask: SkipMask, threshold: float) -> int:
    end = len(text.prompt_ids) + wrong.row + 1
    start = end - 1 - wrong.drafted
    token, count = torch.tensor([wrong.token]), 0
    with model.engine.session(end + wrong.room + 1):
        model.engine.forward(torch.tensor(text.ids[:start]))
        for right in text.ids[start:end]:
            model.engine.forward(torch.tensor([right]), mask)
        while count < wrong.room:
            best = model.engine.forward(token, mask)[0].softmax(-1).max(dim=-1)
            token, count = best.indices.view(1), count + 1
            if float(best.values) < threshold:
                break
    return count
