"""Greedy speculative decoding gives the target's own tokens, and its counters add up."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip import DecodeConfig, DecodeStats, LayerSkipModel, SkipMask
from layerskip.analysis.identity import check_identity
from layerskip.config.lookup_settings import SuffixLookup
from layerskip.decoding.loop import TARGET_ONLY
from layerskip.rounds.sampling import SamplingParams, seeded_sampler
from tests.layerskip import zoo
from tests.layerskip.decoding.counters import check_counters, check_ends

GAMMAS = (1, 2, 4, 7)
PROMPT_LENGTHS = (1, 2, 5, 11)
BUDGETS = (24, 1, 13, 2, 18, 3)
DRAFT_THRESHOLDS = (0.0, 0.3, 0.0, 0.6, 0.9)
TARGET_THRESHOLDS = (0.0, 0.0, 0.35, 0.0, 0.6, 0.0, 0.25)


def masks_for_decoding(name: str, draw: random.Random) -> list[SkipMask]:
    kinds = zoo.masks_of(name)
    drawn = zoo.random_mask(zoo.NUM_LAYERS, draw, sublayers=zoo.spec_of(name).sublayers)
    return [kinds["none"], kinds["interior"], kinds["alternating"], kinds["early exit"], drawn]


@zoo.each(zoo.RUNS + zoo.GRAPH_RUNS)
def test_greedy_equals_generate(name: str) -> None:
    model, draw = zoo.layerskip_of(name), random.Random(name)
    cycles = [itertools.cycle(values) for values in (PROMPT_LENGTHS, BUDGETS, DRAFT_THRESHOLDS, TARGET_THRESHOLDS)]
    drafted = accepted = target_only = stopped_early = 0
    for gamma in GAMMAS:
        for mask in masks_for_decoding(name, draw):
            length, budget, draft_threshold, target_threshold = map(next, cycles)
            config = DecodeConfig(
                skip_mask=mask, gamma=gamma, draft_threshold=draft_threshold, target_threshold=target_threshold
            )
            prompt = zoo.prompt_of(length)
            out = model.generate(prompt, max_new_tokens=budget, config=config)
            assert out.ids == list(zoo.greedy_reference(name, prompt)[:budget]), config
            assert out.finish_reason == "length"
            check_counters(out, config)
            assert out.stats.num_prompt_tokens == length
            if not mask.num_skipped:
                assert out.stats.num_accepted == out.stats.num_drafted  # the draft is the target
            else:
                drafted += out.stats.num_drafted
                accepted += out.stats.num_accepted
            if target_threshold == 0.0:
                assert out.stats.num_target_only <= 1  # the last token alone
            target_only += max(0, out.stats.num_target_only - 1)
            stopped_early += draft_threshold > 0 and out.stats.num_drafted < out.stats.num_rounds * gamma
    assert 0.03 < accepted / drafted < 0.97, "drafts always or never right show nothing"
    assert target_only > 0, "the target threshold never fired"
    assert stopped_early > 0, "the draft threshold never fired"


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 0},
    {"repetition_penalty": 1.3, "min_p": 0.02},
]


@zoo.few(zoo.RUNS + zoo.GRAPH_RUNS)
def test_sampled_equals_generate(name: str) -> None:
    """Token by token from one seed, whatever drafts; and torch's own generator is left where `generate` leaves it."""
    model, prompt = zoo.layerskip_of(name), [*zoo.prompt_of(4), *zoo.prompt_of(4)]
    suffix, mask = SuffixLookup(min_match=1), zoo.masks_of(name)["interior"]
    configs = [
        DecodeConfig(skip_mask=mask, gamma=4, draft_threshold=0.1, target_threshold=0.05),
        DecodeConfig(drafter="suffix", skip_mask=SkipMask.none(zoo.NUM_LAYERS), gamma=6, lookup=suffix),
        DecodeConfig(drafter="hybrid", skip_mask=mask, gamma=3, lookup=suffix),
    ]
    drafted = accepted = 0
    for seed, sampling in enumerate(SAMPLINGS):
        torch.manual_seed(seed)
        out = model.model.generate(torch.tensor([prompt]), max_new_tokens=zoo.LONGEST, do_sample=True, **sampling)
        expected, state = out[0, len(prompt) :].tolist(), torch.random.get_rng_state()
        for config in (DecodeConfig.plain(zoo.NUM_LAYERS), *configs):
            torch.manual_seed(seed)
            ours = model.generate(prompt, max_new_tokens=zoo.LONGEST, do_sample=True, config=config, **sampling)
            assert (ours.ids, ours.sampled) == (expected, True), (sampling, config)
            assert torch.equal(torch.random.get_rng_state(), state)
            drafted += ours.stats.num_drafted
            accepted += ours.stats.num_accepted
    assert 0 < accepted < drafted


@zoo.each(("llama", "llama fused", "gemma3", "gpt2", "falcon-alibi", "llama graph"))
def test_the_cache_after_each_step_holds_all_but_the_last_token(name: str) -> None:
    model, prompt = zoo.layerskip_of(name), zoo.prompt_of(4)
    for gamma, draft_threshold, target_threshold in ((1, 0.0, 0.0), (4, 0.4, 0.3), (7, 0.0, 0.0), (0, 0.0, 0.0)):
        config = DecodeConfig(
            skip_mask=SkipMask.from_layers(4, [0, 2]),
            gamma=gamma,
            draft_threshold=draft_threshold,
            target_threshold=target_threshold,
        )
        stream = model.stream(prompt, max_new_tokens=20, config=config)
        total = len(prompt)
        for piece in stream:
            total += len(piece.ids)
            assert model._engine.cache.length == total - 1
            assert piece.ids
        assert total == len(prompt) + 20
        with pytest.raises(RuntimeError, match="no cache"):
            _ = model._engine.cache


@zoo.each(("llama", "mistral-sliding fused", "gpt2", "mistral-sliding graph"))
@pytest.mark.parametrize("gamma", [1, 7])
def test_end_of_text_at_every_offset_of_a_round(name: str, gamma: int) -> None:
    model, prompt = zoo.layerskip_of(name), zoo.prompt_of(5)
    reference = zoo.greedy_reference(name, prompt)
    config = DecodeConfig(skip_mask=SkipMask.from_sublayers(4, mlp=[3]), gamma=gamma)
    check_ends(model, prompt, config, reference, most_cut=int(gamma > 1))
    absent = next(token for token in range(zoo.VOCAB) if token not in reference)
    out = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config, eos_token_id=absent)
    assert out.ids == list(reference)


def test_several_end_of_text_ids_as_generate_does() -> None:
    model, prompt = zoo.layerskip_of("qwen3"), zoo.prompt_of(5)
    reference = zoo.greedy_reference("qwen3", prompt)
    config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [2]), gamma=4)
    for ids in ([reference[9], reference[4]], [reference[0], 60], [reference[17], reference[3], reference[11]]):
        expected = model.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=ids)
        out = model.generate(prompt, max_new_tokens=24, config=config, eos_token_id=ids)
        assert out.ids == expected[0, 5:].tolist()
        assert out.finish_reason == "eos"


def test_end_of_text_comes_from_the_models_generation_config() -> None:
    hf, prompt = zoo.build("llama"), zoo.prompt_of(5)
    reference = list(zoo.greedy_reference("llama", prompt))
    hf.generation_config.eos_token_id = [reference[6], 60]
    model = LayerSkipModel(hf, engine="eager", config=DecodeConfig(skip_mask=SkipMask.from_layers(4, [2]), gamma=4))
    expected = hf.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, 5:].tolist()
    assert model.eos_token_ids == {reference[6], 60}
    assert model.generate(prompt, max_new_tokens=24).ids == expected == reference[: reference.index(reference[6]) + 1]
    assert model.generate(prompt, max_new_tokens=24, eos_token_id=[]).ids == reference


@pytest.mark.parametrize("penalty", [1.3, 0.6])
@zoo.each(("llama", "gemma2", "gpt2"))
def test_repetition_penalty_equals_generate(name: str, penalty: float) -> None:
    model = zoo.layerskip_of(name)
    for length, gamma in ((1, 1), (5, 4), (9, 7)):
        prompt = zoo.prompt_of(length)
        expected = model.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=penalty
        )[0, length:].tolist()
        if penalty > 1:
            assert expected != list(zoo.greedy_reference(name, prompt)), "the penalty changes nothing"
        for mask in (SkipMask.none(4), SkipMask.from_layers(4, [2, 3])):
            config = DecodeConfig(skip_mask=mask, gamma=gamma)
            out = model.generate(prompt, max_new_tokens=24, config=config, repetition_penalty=penalty)
            assert out.ids == expected
            if not mask.num_skipped:
                # The draft is the target only if its penalty, too, sees the tokens drafted before.
                assert out.stats.num_accepted == out.stats.num_drafted


def test_stop_strings_equal_generate(text_model: LayerSkipModel, tokenizer: Any) -> None:
    prompt = tokenizer("def read(")["input_ids"]
    ids = torch.tensor([prompt])
    whole = text_model.model.generate(ids, max_new_tokens=30, do_sample=False)[0, len(prompt) :].tolist()
    config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [3]), gamma=4)
    lengths = set()
    for i in range(1, 30, 2):
        piece = tokenizer.decode(whole[i : i + 2])
        if "\ufffd" in piece or not piece:
            continue
        for stop in (piece, [piece[1:] or piece, "no such text"]):
            expected = text_model.model.generate(
                ids, max_new_tokens=30, do_sample=False, stop_strings=stop, tokenizer=tokenizer
            )[0, len(prompt) :].tolist()
            out = text_model.generate(prompt, max_new_tokens=30, config=config, stop_strings=stop)
            assert out.ids == expected
            stops = any(one in tokenizer.decode(expected) for one in ([stop] if isinstance(stop, str) else stop))
            assert out.finish_reason == ("stop" if stops else "length")
            check_counters(out, config)
            lengths.add(len(expected))
    assert len(lengths) > 3


def test_stop_strings_of_the_generation_config_count(tokenizer: Any) -> None:
    # They were ignored, so the output went on where `generate` stops.
    hf = zoo.build("llama", vocab_size=len(tokenizer))
    prompt = tokenizer("def read(")["input_ids"]
    ids = torch.tensor([prompt])
    whole = hf.generate(ids, max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    at = next(i for i in range(3, 20) if "\ufffd" not in tokenizer.decode(whole[i : i + 1]))
    hf.generation_config.stop_strings = [tokenizer.decode(whole[at : at + 1])]
    expected = hf.generate(ids, max_new_tokens=20, do_sample=False, tokenizer=tokenizer)[0, len(prompt) :].tolist()
    assert len(expected) < 20
    assert LayerSkipModel(hf, tokenizer, engine="eager").generate(prompt, max_new_tokens=20).ids == expected


@settings(max_examples=60)
@given(
    attention=st.sets(st.integers(0, 3)),
    mlp=st.sets(st.integers(0, 3)),
    gamma=st.integers(0, 9),
    draft_threshold=st.sampled_from([0.0, 0.2, 0.4, 0.7, 1.0]),
    target_threshold=st.sampled_from([0.0, 0.2, 0.4, 0.7, 1.0]),
    length=st.integers(1, 9),
    budget=st.integers(1, 16),
    end=st.none() | st.integers(0, 15),
)
def test_any_config_gives_the_targets_tokens(
    attention: set[int],
    mlp: set[int],
    gamma: int,
    draft_threshold: float,
    target_threshold: float,
    length: int,
    budget: int,
    end: int | None,
) -> None:
    config = DecodeConfig(
        skip_mask=SkipMask.from_sublayers(4, attention=attention, mlp=mlp),
        gamma=gamma,
        draft_threshold=draft_threshold,
        target_threshold=target_threshold,
    )
    prompt = zoo.prompt_of(length)
    expected = list(zoo.greedy_reference("gemma3", prompt)[:budget])
    eos = [] if end is None or end >= budget else [expected[end]]
    if eos:
        expected = expected[: expected.index(eos[0]) + 1]
    out = zoo.layerskip_of("gemma3").generate(prompt, max_new_tokens=budget, config=config, eos_token_id=eos)
    assert out.ids == expected
    check_counters(out, config)
    if gamma == 0 or target_threshold == 1.0:
        assert out.stats.num_rounds == 0
    if draft_threshold == 1.0:
        assert out.stats.num_drafted == out.stats.num_rounds


def test_thresholds_act_on_the_probabilities_they_say() -> None:
    """Recompute, from full forwards, where drafting must stop and which steps the target must take alone."""
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(5)
    mask = SkipMask.from_layers(4, [2, 3])
    edited = zoo.zeroed_copy("llama", mask)
    reference = list(zoo.greedy_reference("llama", prompt))
    text = [*prompt, *reference]
    with torch.inference_mode():
        target = model.model(torch.tensor([text])).logits[0].softmax(-1).max(-1).values.tolist()
    for draft_threshold, target_threshold in ((0.4, 0.0), (0.0, 0.35), (0.5, 0.3)):
        config = DecodeConfig(
            skip_mask=mask, gamma=4, draft_threshold=draft_threshold, target_threshold=target_threshold
        )
        stream = model.stream(prompt, max_new_tokens=zoo.LONGEST, config=config)
        done, drafted_before, alone, rounds = 0, 0, 0, 0
        for piece in stream:
            remaining = zoo.LONGEST - done
            if done:
                # The probability of the last emitted token, which followed `len(prompt) + done - 1` tokens.
                unsure = target[len(prompt) + done - 2] < target_threshold or remaining == 1
                assert (piece.origins == [TARGET_ONLY]) == unsure
                alone += unsure
                if not unsure:
                    rounds += 1
                    drafted = stream.stats.num_drafted - drafted_before
                    tops = draft_tops(model, edited, text[: len(prompt) + done], min(4, remaining - 1))
                    low = next((i for i, top in enumerate(tops) if top < draft_threshold), len(tops) - 1)
                    assert drafted == low + 1  # the unsure token stays in the draft
            drafted_before = stream.stats.num_drafted
            done += len(piece.ids)
        assert rounds > 2
        assert alone > 2 or target_threshold == 0.0


@torch.inference_mode()
def draft_tops(model: LayerSkipModel, edited: Any, text: list[int], gamma: int) -> list[float]:
    """Top probabilities of the greedy draft after `text`, whose keys and values but the last are the target's."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.model.config)
    if len(text) > 1:
        model.model(torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
    tops, token = [], text[-1]
    for _ in range(gamma):
        row = edited(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        tops.append(float(row.softmax(-1).max()))
        token = int(row.argmax())
    return tops


@zoo.each(("llama", "llama fused", "gemma3", "gpt2"))
def test_bfloat16_differs_by_ties_alone(name: str) -> None:
    """Each difference from plain greedy must be a tie between logits; a planted one that is none must be seen."""
    model = LayerSkipModel(zoo.build(name).to(torch.bfloat16), engine=zoo.layerskip_of(name).engine_name)
    config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [2, 3]), gamma=4)
    for seed in range(6):
        prompt = zoo.prompt_of(6, seed)
        reference = model.generate(prompt, max_new_tokens=20, config=DecodeConfig.plain(4)).ids
        out = model.generate(prompt, max_new_tokens=20, config=config).ids
        report = check_identity(model, prompt, out, reference)
        assert report.lossless, report
        assert report.identical == (out == reference)
        planted = [*out[:7], (out[7] + 1) % zoo.VOCAB, *out[8:]]
        report = check_identity(model, prompt, planted, out)
        assert not report.lossless
        assert report.first_difference == 7
        assert report.logit_gap > report.tolerance
        # A text that stops too early is no tie either.
        assert not check_identity(model, prompt, out[:9], out).lossless
        assert not check_identity(model, prompt, [], out).lossless


@pytest.mark.slow
def test_drawn_texts_that_part_in_bfloat16_are_ties_and_wrong_tokens_are_not() -> None:
    ways = [SamplingParams(True, 0.7), SamplingParams(True, top_k=8, top_p=0.8), SamplingParams(True, top_k=20)]
    config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [2, 3]), gamma=4)
    parted = passed = 0
    for name, params in itertools.product(("qwen3", "gemma3", "gpt2"), ways):
        model = LayerSkipModel(zoo.build(name).to(torch.bfloat16), engine="eager")
        for seed in range(10):
            prompt, drawn = zoo.prompt_of(6, seed), seeded_sampler(params, seed, model.device)
            arguments: dict[str, Any] = {"max_new_tokens": 40, "seed": seed, **asdict(params)}
            plain, draft = (model.generate(prompt, config=one, **arguments).ids for one in (None, config))
            report = check_identity(model, prompt, draft, plain, drawn)
            assert report.lossless, report
            parted += not report.identical
            wrong = [*plain[:7], (plain[7] + 5) % zoo.VOCAB, *plain[8:]]
            drawn = seeded_sampler(params, seed, model.device)
            passed += check_identity(model, prompt, wrong, plain, drawn).lossless
    assert parted > 1
    assert passed == 0


def test_a_tie_is_told_from_a_difference() -> None:
    # Two head rows made equal: either token is right in bfloat16; in float32 a difference is a difference.
    reports = []
    for dtype in (torch.bfloat16, torch.float32):
        hf, prompt = zoo.build("llama"), zoo.prompt_of(6)
        first = int(hf(torch.tensor([prompt])).logits[0, -1].argmax())
        other = (first + 1) % zoo.VOCAB
        with torch.no_grad():
            hf.lm_head.weight[other] = hf.lm_head.weight[first]
        model = LayerSkipModel(hf.to(dtype), engine="eager")
        reports.append(check_identity(model, prompt, [other], [first]))
    assert reports[0].is_tie
    assert reports[0].logit_gap == 0.0
    assert not reports[1].lossless


def test_stats_ratios() -> None:
    stats = DecodeStats(num_emitted=11, num_rounds=4, num_drafted=12, num_accepted=6, prefill_s=0.5, decode_s=2.0)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_accepted_length == 2.5
    assert stats.tokens_per_s == 5.0
    assert stats.tpot_ms == 200.0
    assert stats.ttft_s == 0.5
    assert stats.end_to_end_tokens_per_s == pytest.approx(11 / 2.5)
    assert stats.to_dict()["mean_accepted_length"] == 2.5
    nothing = DecodeStats(num_emitted=1)
    assert (nothing.acceptance_rate, nothing.mean_accepted_length, nothing.tokens_per_s, nothing.tpot_ms) == (None,) * 4
    assert nothing.end_to_end_tokens_per_s is None


def test_times_are_parts_of_a_whole() -> None:
    config = DecodeConfig(skip_mask=SkipMask.alternating(4), gamma=3)
    stats = zoo.layerskip_of("llama").generate((1, 2), max_new_tokens=12, config=config).stats
    assert min(stats.prefill_s, stats.draft_s, stats.verify_s) > 0
    assert stats.draft_s + stats.verify_s + stats.target_only_s <= stats.decode_s
    assert sum(stats.round_s_by_drafted) + stats.target_only_s == pytest.approx(stats.decode_s)
    assert len(stats.token_s) == 11
    assert sum(stats.token_s) == pytest.approx(stats.decode_s)
    assert "token_s" not in stats.to_dict()
    lengths = [here - there for here, there in itertools.pairwise([*stats.drafted_by_position, 0])]
    assert [seconds > 0 for seconds in stats.round_s_by_drafted] == [count > 0 for count in lengths]
