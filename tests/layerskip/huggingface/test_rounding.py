"""What rounding does in reduced precision is measured on Hugging Face's own modules, and ties are judged by it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.identity import check_identity, first_difference
from layerskip.engines.fused import FusedEngine
from layerskip.huggingface.rounding import RoundingSpread, StockForward, measure_rounding
from tests.layerskip import zoo

NUM_TOKENS = 24


@zoo.few()
def test_all_ways_to_run_the_stock_model_agree(name: str) -> None:
    """In float32 to its rounding: so what is measured in bfloat16 is rounding, and no mistake of the measurement.

    Of Gemma 4 in float64: embeddings that each layer adds round further, and how far differs by CPU.
    """
    whole = zoo.layerskip_of(name) if name != "gemma4" else LayerSkipModel(zoo.build(name).double(), engine="eager")
    stock, prompt = StockForward(whole.adapter), zoo.prompt_of(5)
    tokens, one_by_one = stock.continued(prompt, NUM_TOKENS)
    assert tuple(tokens) == zoo.greedy_reference(name, prompt, NUM_TOKENS)
    text = [*prompt, *tokens[:-1]]
    for chunked in (stock.in_chunks(text, NUM_TOKENS, itertools.cycle([4, 2, 9])), stock.logits(text, NUM_TOKENS)):
        torch.testing.assert_close(chunked, one_by_one, atol=2e-5, rtol=1e-5)


def test_a_text_without_a_prompt_before_its_chunks() -> None:
    stock, text = StockForward(zoo.layerskip_of("llama").adapter), zoo.prompt_of(7)
    chunks = stock.in_chunks(text, 7, itertools.repeat(3))
    torch.testing.assert_close(chunks, stock.logits(text, 7), atol=2e-5, rtol=1e-5)


@zoo.each(("llama", "gemma3", "mixtral"))
def test_the_spread_follows_the_dtype(name: str) -> None:
    spreads = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = LayerSkipModel(zoo.build(name).to(dtype), engine="eager")
        spreads[dtype] = measure_rounding(model.adapter, [zoo.prompt_of(5, seed) for seed in range(2)], NUM_TOKENS)
        assert spreads[dtype].num_positions == 2 * NUM_TOKENS
        assert spreads[dtype].tolerance == 3 * spreads[dtype].largest
    assert spreads[torch.float32].largest < 1e-4
    assert 4 < spreads[torch.bfloat16].largest / spreads[torch.float16].largest < 16  # their rounding steps are 8 apart
    assert 0.02 < spreads[torch.bfloat16].largest < 0.4


def test_where_all_ways_round_alike_one_rounding_step_is_left() -> None:
    """Another engine's kernels may round differently all the same."""
    model = LayerSkipModel(zoo.build("bloom").to(torch.bfloat16), engine="eager")
    stock, prompt = StockForward(model.adapter), zoo.prompt_of(5)
    tokens, one_by_one = stock.continued(prompt, NUM_TOKENS)
    assert torch.equal(one_by_one, stock.logits([*prompt, *tokens[:-1]], NUM_TOKENS))
    spread = measure_rounding(model.adapter, [prompt], NUM_TOKENS)
    assert spread.largest == pytest.approx(float(one_by_one.amax(-1).abs().max()) / 128)


def test_near_the_models_last_position_fewer_are_measured() -> None:
    model = LayerSkipModel(zoo.build("llama").to(torch.bfloat16), engine="eager")
    prompt = zoo.prompt_of(zoo.MAX_POSITIONS - 6)
    assert measure_rounding(model.adapter, [prompt], NUM_TOKENS).num_positions == 6


def test_it_is_measured_once_and_only_where_two_texts_differ_in_reduced_precision() -> None:
    model, prompt = LayerSkipModel(zoo.build("llama").to(torch.bfloat16), engine="eager"), zoo.prompt_of(6)
    ids = model.generate(prompt, max_new_tokens=12).ids
    assert check_identity(model, prompt, ids, ids).identical
    assert model.rounding is None
    report = check_identity(model, prompt, [*ids[:4], (ids[4] + 1) % zoo.VOCAB, *ids[5:]], ids)
    assert model.rounding == measure_rounding(model.adapter, [prompt])
    assert report.tolerance == model.rounding.tolerance
    model.rounding = RoundingSpread(largest=100.0, num_positions=1)
    assert check_identity(model, prompt, [*ids[:4], (ids[4] + 1) % zoo.VOCAB, *ids[5:]], ids).is_tie
    exact = zoo.layerskip_of("llama")
    ids = exact.generate(prompt, max_new_tokens=12).ids
    report = check_identity(exact, prompt, [*ids[:4], (ids[4] + 1) % zoo.VOCAB, *ids[5:]], ids)
    assert (report.lossless, report.tolerance, exact.rounding) == (False, 0.0, None)


def test_both_texts_must_be_the_targets_where_they_part() -> None:
    """An engine that is wrong in the same way everywhere agrees with itself; Hugging Face's forward does not."""
    model, prompt = LayerSkipModel(zoo.build("llama").to(torch.bfloat16), engine="fused"), zoo.prompt_of(6)
    stock = StockForward(model.adapter).continued(prompt, NUM_TOKENS)[0]
    assert isinstance(model.engine, FusedEngine)
    attention, mlp = model.engine.layers[1]
    model.engine.layers[1] = (replace(attention, scaling=0.0), mlp)
    config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [2, 3]), gamma=4)
    wrong = model.generate(prompt, config=config, max_new_tokens=NUM_TOKENS).ids
    assert first_difference(wrong, stock) is not None
    assert not check_identity(model, prompt, wrong, stock).lossless
    # Nor may what it is compared with be wrong.
    assert not check_identity(model, prompt, stock, wrong).lossless
