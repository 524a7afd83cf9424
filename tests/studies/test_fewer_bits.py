"""Weights of fewer bits: what they round to, torch's product with them, and a model that computes what it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip.engines.recording.stopwatch import Work
from studies.fewer_bits import (
    GROUP,
    Int4Linear,
    agreements,
    four_bits,
    in_eight_bits,
    in_four_bits,
    main,
    products,
    rounded,
    shapes_of,
    shuffle_units,
)

SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def small_llama(*, tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()


def test_rounded_weights_are_within_half_a_step() -> None:
    weight = torch.randn(16, 4 * GROUP) * torch.logspace(-2, 1, 16)[:, None]
    _, scale, _ = four_bits(weight)
    off = (in_four_bits(weight) - weight).abs().view(16, 4, GROUP).amax(dim=-1)
    assert bool((off <= 0.55 * scale + 0.01 * weight.abs().amax(dim=1, keepdim=True)).all())
    assert len(in_four_bits(weight)[3, :GROUP].unique()) <= 16
    eight = (in_eight_bits(weight) - weight).abs().amax(dim=1)
    assert bool((eight <= 0.51 * weight.abs().amax(dim=1) / 127).all())
    with pytest.raises(ValueError, match="a multiple of 32 inputs, got 40"):
        four_bits(torch.randn(16, 40))


def test_the_product_is_that_of_the_rounded_weights() -> None:
    weight, bias, x = torch.randn(32, 128), torch.randn(32), torch.randn(5, 128).bfloat16()
    linear = Int4Linear(weight.bfloat16(), bias.bfloat16())
    expected = x.float() @ in_four_bits(weight.bfloat16().float()).t() + bias
    for rows in (x, x[:1]):
        torch.testing.assert_close(linear(rows).float(), expected[: len(rows)], rtol=0.02, atol=0.1)
    torch.testing.assert_close(linear.add_to(torch.ones(5, 32), x).float(), expected + 1, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_units_in_another_order_compute_the_same(tied: bool) -> None:
    model, ids = small_llama(tied=tied), torch.arange(12)[None]
    with torch.inference_mode():
        before = model(ids).logits.clone()
    down = model.model.layers[1].mlp.down_proj.weight.clone()
    shuffle_units(model)
    assert not torch.equal(down, model.model.layers[1].mlp.down_proj.weight)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_a_model_is_itself_again_and_its_embedding_was_it_all_along() -> None:
    model = small_llama(tied=True)
    own = model.get_input_embeddings().weight
    with rounded(model, "4"):
        assert model.get_input_embeddings().weight is own
        assert not torch.equal(model.get_output_embeddings().weight, own)
    assert model.get_output_embeddings().weight is own


def test_more_bits_agree_more_often() -> None:
    eight, four, mixed = agreements(small_llama(tied=False), [[1, 2, 3], [7, 5]], 24)
    assert (eight["bits"], four["bits"], mixed["bits"]) == ("8", "4", "4, output embedding 8")
    for share in ("greedy", "sampled"):
        assert 0.5 < four[share] < eight[share] <= 1.0


def test_a_model_that_it_cannot_measure_is_refused_before_anything_is_computed(capsys: Any) -> None:
    given = ["--model", "studies/demo/model", "--prompts", "studies/demo/tuning.jsonl"]
    assert main(given) == 2
    rule = "--model: its products must have a multiple of 16 outputs and of 32 inputs, got"
    assert rule in capsys.readouterr().err.splitlines()[-1]


def test_every_form_of_every_product_is_timed() -> None:
    seen: list[int] = []

    def seconds_of(works: Sequence[Work]) -> list[float]:
        for work in works:
            work()
        seen.append(len(works))
        return [2e-6, 8e-6]

    shapes = shapes_of(LlamaConfig(**SIZES, hidden_size=128, intermediate_size=256))
    assert shapes == [(256, 128), (128, 128), (512, 128), (128, 256), (64, 128)]
    rows = products(shapes[:2], torch.bfloat16, torch.device("cpu"), seconds_of)
    assert [(one["shape"], one["bits"]) for one in rows[:3]] == [("256x128", bits) for bits in ("as it is", "8", "4")]
    assert len(rows) == len(seen) == 6
    assert rows[0]["us_of_five"] == pytest.approx(4 * rows[0]["us"])
