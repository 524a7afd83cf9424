"""Verification behind the layers that drafting computed exactly: same tokens, fewer rows in the first layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.engines.prefix import PrefixStates
from layerskip.engines.states import StatesEngine
from tests.layerskip import zoo

MASKS = {1: SkipMask.parse("4:1,3"), 2: SkipMask.early_exit(4, 2), 3: SkipMask.early_exit(4, 3)}


def outputs(model: LayerSkipModel, config: DecodeConfig, **arguments: Any) -> tuple[Any, Any]:
    """Without and with sharing."""
    prompt = zoo.prompt_of(arguments.pop("length", 5))
    both = (config, config.model_copy(update={"share_prefix": True}))
    return tuple(model.generate(list(prompt), config=one, max_new_tokens=zoo.LONGEST, **arguments) for one in both)


@zoo.few(zoo.RUNS)
def test_shared_verification_is_the_whole_one(name: str) -> None:
    """Tokens are generate's, and every counter is the one without sharing: the verdicts are the same."""
    model = zoo.layerskip_of(name)
    accepted = 0
    for depth, mask in MASKS.items():
        assert mask.num_kept_first == depth
        for gamma, threshold in ((1, 0.0), (4, 0.0), (3, 0.6)):
            config = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=threshold)
            plain, shared = outputs(model, config)
            assert shared.ids == plain.ids == list(zoo.greedy_reference(name, zoo.prompt_of(5), len(plain.ids)))
            assert shared.stats.counters() == plain.stats.counters()
            accepted += shared.stats.num_accepted
    assert accepted > 0


@zoo.each(("llama", "llama fused", "qwen2-sliding fused", "gemma3", "bloom", "opt-post-norm"))
def test_logits_of_a_shared_verification(name: str) -> None:
    """To rounding those of a whole forward, and the cache is left as a whole forward leaves it."""
    model = zoo.layerskip_of(name)
    engine = model.engine
    assert isinstance(engine, StatesEngine)
    ids = torch.tensor(zoo.prompt_of(14))
    for mask in MASKS.values():
        with engine.session(20), torch.inference_mode():
            engine.forward(ids[:9])
            expected = engine.forward(ids[9:], num_logits=5).clone()
            after = engine.forward(ids[:1]).clone()
        for held in (0, 1, 4, 5):
            prefix = PrefixStates.of(mask)
            assert prefix is not None
            with engine.session(20), torch.inference_mode():
                engine.forward(ids[:9])
                for i in range(9, 9 + held):
                    engine.draft_shared(ids[i : i + 1], mask, prefix)
                engine.cache.rollback_to(9)
                assert prefix.num_tokens == held
                torch.testing.assert_close(engine.verify_shared(ids[9:], prefix), expected, rtol=1e-3, atol=1e-4)
                assert engine.cache.length == 14
                torch.testing.assert_close(engine.forward(ids[:1]), after, rtol=1e-3, atol=1e-4)


def test_sampled_output_draws_the_same_tokens() -> None:
    for name in ("llama", "llama fused"):
        config = DecodeConfig(skip_mask=MASKS[2], gamma=3)
        plain, shared = outputs(zoo.layerskip_of(name), config, do_sample=True, seed=3)
        assert shared.ids == plain.ids


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_the_first_layers_see_the_last_draft_token_alone(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that each layer's MLP is given in a verification of gamma = 4: one below the depth, five above."""
    model = LayerSkipModel(zoo.build("llama"), engine=engine)
    rows: list[list[int]] = [[] for _ in range(4)]
    if engine == "eager":
        for i, layer in enumerate(model.model.model.layers):
            layer.mlp.register_forward_pre_hook(lambda _module, args, i=i: rows[i].append(args[0].shape[-2]))
    else:
        run = FusedEngine._run

        def noting(self: FusedEngine, x: torch.Tensor, step: Any, mask: SkipMask, layers: range) -> torch.Tensor:
            for i in layers:
                rows[i] += [] if mask.mlp[i] else [len(x)]
            return run(self, x, step, mask, layers)

        monkeypatch.setattr(FusedEngine, "_run", noting)
    config = DecodeConfig(skip_mask=MASKS[2], gamma=4, share_prefix=True)
    out = model.generate(list(zoo.prompt_of(5)), config=config, max_new_tokens=zoo.LONGEST, eos_token_id=[])
    full = sum(drafted == 5 for drafted in rows[2][1:])
    assert full == out.stats.num_rounds - short_rounds(rows[2]) > 0
    assert set(rows[0][1:]) == set(rows[1][1:]) == {1}
    assert max(rows[2][1:]) == max(rows[3][1:]) == 5


def short_rounds(rows: list[int]) -> int:
    """Rounds near the end of the budget, which draft less."""
    return sum(1 < one < 5 for one in rows[1:])


@pytest.mark.parametrize(("mask", "depth"), [("4:none", None), ("4:0", None), ("4:a0", None), ("4:m1", 1), ("4:3", 3)])
def test_depth_of_a_mask(mask: str, depth: int | None) -> None:
    prefix = PrefixStates.of(SkipMask.parse(mask))
    assert (prefix.depth if prefix else None) == depth


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth: must be at least 1, got 0"):
        PrefixStates(0)


def test_an_exception_leaves_no_entrance() -> None:
    """The entrance of a layer outlives neither the round nor what went wrong in it."""
    model = LayerSkipModel(zoo.build("llama"), engine="eager")
    config = DecodeConfig(skip_mask=MASKS[2], gamma=3, share_prefix=True)
    expected = model.generate(list(zoo.prompt_of(5)), config=config, max_new_tokens=12).ids
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("broken")

    handle = model.model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        model.generate(list(zoo.prompt_of(5)), config=config, max_new_tokens=12)
    handle.remove()
    assert model.generate(list(zoo.prompt_of(5)), config=config, max_new_tokens=12).ids == expected


def test_an_engine_that_cannot_share_verifies_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LayerSkipModel(zoo.build("llama"), engine="eager")
    monkeypatch.setattr(EagerEngine, "shares_prefix", False)
    for method in ("draft_shared", "verify_shared"):
        monkeypatch.delattr(EagerEngine, method)
    plain, shared = outputs(model, DecodeConfig(skip_mask=MASKS[2], gamma=3))
    assert shared.ids == plain.ids
