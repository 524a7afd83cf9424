"""Attention of a few queries, folded over key heads: the library's numbers, in its modules and out of them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from layerskip.huggingface.growing_keys import FEW_ROWS, attend_folded, over_growing_keys

CPU = torch.device("cpu")
NUM_KEYS, HEAD_DIM, NUM_SEEN = 2, 8, 21
SCALE = 0.3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""bfloat16 has eight bits, and results are about 1."""


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def samples(num_rows: int, group: int, dtype: torch.dtype, num_texts: int = 1) -> list[torch.Tensor]:
    """Queries laid out as products leave them, keys and values as a cache holds them, and a causal mask."""
    queries = numbers(num_texts, num_rows, group * NUM_KEYS, HEAD_DIM, seed=0).to(dtype).transpose(1, 2)
    keys, values = (numbers(num_texts, NUM_KEYS, 40, HEAD_DIM, seed=i).to(dtype)[:, :, :NUM_SEEN] for i in (1, 2))
    mask = torch.ones(num_rows, NUM_SEEN, dtype=torch.bool).tril(NUM_SEEN - num_rows)
    return [queries, keys, values, mask]


def exact(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention in float64, head by head."""
    group = queries.shape[1] // keys.shape[1]
    out = []
    for head in range(queries.shape[1]):
        scores = queries[:, head].double() @ keys[:, head // group].double().transpose(1, 2) * SCALE
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        out.append(weights @ values[:, head // group].double())
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("num_texts", [1, 2])
def test_folded_attention_is_attention(num_rows: int, group: int, dtype: torch.dtype, num_texts: int) -> None:
    queries, keys, values, mask = samples(num_rows, group, dtype, num_texts)
    additive = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
    forms = [mask, mask.expand(num_texts, 1, -1, -1), additive, additive.repeat(group, 1)]
    if num_rows == 1:
        forms.append(None)
    for form in forms:
        found = attend_folded(queries, keys, values, form, SCALE)
        assert found.shape == queries.shape
        assert found.dtype == dtype
        assert (found.double() - exact(queries, keys, values, mask)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("num_rows", [1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("is_masked", [False, True])
def test_modules_get_the_librarys_numbers(num_rows: int, is_masked: bool) -> None:
    queries, keys, values, mask = samples(num_rows, 3, torch.float32)
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    arguments = (module, queries, keys, values, mask[None, None] if is_masked else None)
    expected = sdpa_attention_forward(*arguments, scaling=SCALE)[0]
    with over_growing_keys([CPU]):
        found = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=SCALE)[0]
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)


def test_one_query_of_a_module_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    attend = F.scaled_dot_product_attention

    def noting(queries: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(queries.shape))
        return attend(queries, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    module: Any = torch.nn.Module()
    for group, dtype, rows in ((3, torch.float32, 3), (1, torch.float32, 1), (1, torch.bfloat16, 2)):
        queries, keys, values, _ = samples(1, group, dtype)
        module.num_key_value_groups, module.is_causal = group, True
        with over_growing_keys([CPU]):
            ALL_ATTENTION_FUNCTIONS["sdpa"](module, queries, keys, values, None)
        assert shapes.pop() == (1, NUM_KEYS, rows, HEAD_DIM)


def test_the_librarys_attention_is_back_afterwards_and_a_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []
    with suppress(RuntimeError), over_growing_keys([CPU]):
        inside.append(ALL_ATTENTION_FUNCTIONS["sdpa"])
        with over_growing_keys([CPU]):
            pass
        inside.append(ALL_ATTENTION_FUNCTIONS["sdpa"])
        raise RuntimeError("in a forward")
    assert inside[0] is inside[1] is not sdpa_attention_forward
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with over_growing_keys([torch.device("meta")]):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward

    def own(*_args: Any, **_kwargs: Any) -> None: ...

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    with over_growing_keys([CPU]):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
