"""Lossy acceptance: what each rule accepts, never less than without it, only with consent, and how far it leads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerskip import (
    DecodeConfig,
    LayerSkipModel,
    Provenance,
    SkipMask,
    custom_generate,
)
from layerskip.analysis.distance import Emitted, measure_distance
from layerskip.config.lookup_settings import PromptLookup
from layerskip.config.lossy_acceptance import (
    LADDER,
    LossyAcceptance,
    ProbabilityAcceptance,
    TypicalAcceptance,
)
from layerskip.engines import choice
from layerskip.rounds.sampling import Sampler, SamplingParams, seeded_sampler
from layerskip.rounds.verifier import TreeDraft, accepts, verify, verify_tree
from tests.layerskip import zoo

MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [1, 2])
BOLD = ProbabilityAcceptance(threshold=0.02)
"""In a vocabulary of 61 with random weights it accepts much."""
GREEDY, WARM = SamplingParams(), SamplingParams(do_sample=True, temperature=0.7, top_k=20)
SAID = "lossy: must be left out unless it is allowed"


def config_of(lossy: LossyAcceptance | None = BOLD, **fields: Any) -> DecodeConfig:
    return DecodeConfig(**{"skip_mask": MASK, "gamma": 3, "lossy": lossy} | fields)


def consenting(name: str = "llama") -> LayerSkipModel:
    engine = zoo.layerskip_of(name).engine_name
    return LayerSkipModel(zoo.layerskip_of(name).model, engine=engine, allow_lossy=True)


# --- the rules

SURE, TORN = (0.90, 0.06, 0.03, 0.01), (0.25, 0.25, 0.25, 0.25)
FAR = TypicalAcceptance(epsilon=0.2, delta=0.5)


@pytest.mark.parametrize(
    ("rule", "probs", "accepted"),
    [
        (ProbabilityAcceptance(threshold=0.5), SURE, [True, False, False, False]),
        (ProbabilityAcceptance(threshold=0.05), SURE, [True, True, False, False]),
        (ProbabilityAcceptance(threshold=0.3), TORN, [False] * 4),
        (ProbabilityAcceptance(threshold=0.25), TORN, [True] * 4),
        # entropy 0.41: min(0.09, 0.3 * 0.66) = 0.09; of four alike log 4: min(0.09, 0.3 / 4) = 0.075
        (TypicalAcceptance(), SURE, [True, False, False, False]),
        (TypicalAcceptance(), TORN, [True] * 4),
        # min(0.2, 0.5 / 4) = 0.125, and a token that is cut off has no probability
        (FAR, (0.5, 0.3, 0.2, 0.0), [True, True, True, False]),
    ],
)
def test_what_a_rule_accepts(rule: LossyAcceptance, probs: tuple[float, ...], accepted: list[bool]) -> None:
    logits = torch.tensor([probs]).log().expand(4, -1)
    assert accepts(rule, logits, torch.arange(4)).tolist() == accepted


@given(st.integers(0, 10_000), st.integers(0, 5), st.sampled_from((*LADDER, FAR)), st.booleans())
def test_never_less_than_without_it(seed: int, gamma: int, rule: LossyAcceptance, sampled: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(gamma + 1, 6, generator=generator)
    drafts = torch.randint(6, (gamma,), generator=generator)
    params = SamplingParams(do_sample=True, top_k=0) if sampled else GREEDY

    def verdict(lossy: LossyAcceptance | None) -> Any:
        sampler = seeded_sampler(params, seed, logits.device)
        sampler.begin(0)
        return verify(drafts, logits, sampler, 0, lossy=lossy), sampler.choose(logits, 0)

    (exact, _), (lossy, own) = verdict(None), verdict(rule)
    near = (accepts(rule, logits[:gamma], drafts) | (drafts == own[:gamma])).tolist()
    assert lossy.num_accepted == next((i for i, one in enumerate(near) if not one), gamma) >= exact.num_accepted
    assert lossy.next_token == own[lossy.num_accepted]
    assert lossy.next_token_prob == pytest.approx(float(logits.softmax(-1)[lossy.num_accepted, lossy.next_token]))


def test_a_sibling_is_accepted_where_a_draft_token_is_not() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1]])
    tree = TreeDraft(torch.tensor([1, 2, 0]), (0, 1, 1), 2)  # instead of the second draft token
    rule, sampler = ProbabilityAcceptance(threshold=0.2), Sampler(GREEDY)
    assert verify_tree(tree, probs.log(), sampler, [0]).num_accepted == 0
    verdict = verify_tree(tree, probs.log(), sampler, [0], lossy=rule)
    assert (verdict.num_accepted, verdict.num_drafts_accepted, verdict.next_token) == (2, 1, 1)


# --- decoding


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "llama fused"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"siblings": 2},
        {"drafter": "hybrid", "lookup": PromptLookup(min_match=1, max_match=3), "target_threshold": 0.05},
    ],
    ids=["mask", "siblings", "hybrid"],
)
def test_every_token_is_the_targets_choice_or_near_it(name: str, params: SamplingParams, fields: Any) -> None:
    model, prompt, far = consenting(name), zoo.prompt_of(7), 0
    for seed in range(3):
        given = {"max_new_tokens": zoo.LONGEST, "seed": seed, "do_sample": params.do_sample}
        given |= {"temperature": params.temperature, "top_k": params.top_k} if params.do_sample else {}
        out = model.generate(prompt, config=config_of(**fields), **given)
        assert out.stats.num_emitted + out.stats.num_cut == (
            1 + out.stats.num_accepted + out.stats.num_rounds + out.stats.num_target_only
        )
        logits = model.target_logits([*prompt, *out.ids[:-1]], num_logits=len(out.ids))
        sampler, tokens = seeded_sampler(params, seed, logits.device), torch.tensor(out.ids)
        sampler.begin(len(prompt))
        shaped = sampler.shape(logits, prompt, tokens[:-1])
        unlike = sampler.choose(shaped, len(prompt)) != tokens
        assert accepts(BOLD, shaped, tokens)[unlike].all()
        assert all(out.origins[place] in ("accepted", "looked-up") for place in unlike.nonzero().flatten().tolist())
        far += int(unlike.sum())
        # A rule that accepts nothing leaves output and random numbers as they are.
        ends = []
        for lossy in (None, ProbabilityAcceptance(threshold=1.0)):
            generator = torch.Generator().manual_seed(seed)
            once = given | {"seed": None, "generator": generator}
            ends.append((model.generate(prompt, config=config_of(lossy, **fields), **once), generator.get_state()))
        assert ends[0][0].ids == ends[1][0].ids
        assert torch.equal(ends[0][1], ends[1][1])
    assert far > 0, "the rule never accepted anything"


# --- consent and refusals


def test_a_model_takes_a_lossy_config_with_consent_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, prompt = zoo.model_of("llama"), zoo.prompt_of(3)
    model = LayerSkipModel(hf, engine="eager")
    with pytest.raises(ValueError, match=f"{SAID}.*got probability_0.02: LOSSY, the output is not the target's own"):
        model.config = config_of()
    with pytest.raises(ValueError, match=SAID):
        model.generate(prompt, config=config_of(), max_new_tokens=3)
    with pytest.raises(ValueError, match=SAID):
        LayerSkipModel(hf, config=config_of(), engine="eager")
    with pytest.raises(ValueError, match=SAID):
        custom_generate(config_of())
    setting = {"skip_mask": MASK, "gamma": 2, "lossy": BOLD}
    with pytest.raises(ValueError, match=SAID):
        model.config = config_of(None, groups={"code": setting})
    callable_ = custom_generate(config_of(), engine="eager", allow_lossy=True)
    ids = hf.generate(torch.tensor([prompt]), max_new_tokens=9, custom_generate=callable_)
    assert ids[0, 3:].tolist() == consenting().generate(prompt, config=config_of(), max_new_tokens=9).ids
    made_for = Provenance(model="no/such", weights_fingerprint="0", device="cpu", dtype="float32", num_layers=4)
    config_of(provenance=made_for).save(tmp_path / "lossy.json")
    monkeypatch.setattr("layerskip.model.load_pretrained", lambda *_, **__: pytest.fail("loaded the model first"))
    with pytest.raises(ValueError, match=SAID):
        LayerSkipModel.from_config(tmp_path / "lossy.json")


def test_cuda_graph_is_refused_and_auto_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = LayerSkipModel(zoo.model_of("llama"), engine="eager", allow_lossy=True)
    graphs._engine = zoo.layerskip_of("llama graph").engine
    with pytest.raises(ValueError, match="lossy: needs the engine eager or fused, got cuda_graph"):
        graphs.generate(zoo.prompt_of(3), config=config_of(), max_new_tokens=3)
    monkeypatch.setattr(choice, "_has_graphs", lambda _device: True)
    monkeypatch.setattr(choice, "_cuda_graph", lambda *_: pytest.fail("made an engine that cannot"))
    assert LayerSkipModel(zoo.model_of("llama"), config=config_of(), allow_lossy=True).engine_name != "cuda_graph"


@pytest.mark.parametrize(
    ("lossy", "message"),
    [
        ({"rule": "probability"}, "threshold: is required"),
        ({"rule": "probability", "threshold": 0.0}, "threshold: input should be greater than 0, got '0.0'"),
        ({"rule": "probability", "threshold": 1.5}, "threshold: input should be less than or equal to 1, got '1.5'"),
        ({"rule": "probability", "threshold": 0.5, "epsilon": 0.1}, "epsilon: unknown field"),
        ({"rule": "typical", "epsilon": 0.0}, "epsilon: input should be greater than 0, got '0.0'"),
        ({"rule": "typical", "delta": "much"}, "delta: input should be a valid number, got 'much'"),
        ({"rule": "nice"}, "lossy: 'rule' must be one of 'probability', 'typical', got 'nice'"),
        ("typical", "lossy: input should be a valid dictionary or object to extract fields from, got 'typical'"),
    ],
)
def test_bad_values_name_field_rule_and_value(lossy: Any, message: str) -> None:
    text = json.dumps({"schema_version": 1, "skip_mask": "4:1", "gamma": 2, "lossy": lossy})
    with pytest.raises(ValueError, match="lossy") as error:
        DecodeConfig.from_json(text)
    assert message in str(error.value)


def test_plain_decoding_cannot_be_lossy() -> None:
    with pytest.raises(ValueError, match=r"lossy: must be left out where gamma is 0, got probability_0\.02"):
        config_of(gamma=0)


@pytest.mark.parametrize("rule", [*LADDER, FAR])
def test_configs_round_trip_and_lossless_ones_say_nothing_of_it(rule: LossyAcceptance) -> None:
    assert DecodeConfig.from_json(config_of(rule).to_json()) == config_of(rule)
    assert json.loads(config_of(rule).to_json())["lossy"] == rule.model_dump()
    assert config_of(rule).bare().lossy == rule
    assert "lossy" not in config_of(None).to_json()
    assert "lossy" not in config_of(None).model_dump()
    regimes = [{"skip_mask": MASK, "gamma": 2, "lossy": rule, "sampling": {"do_sample": True, "temperature": 0.7}}]
    both = config_of(None, sampling={"do_sample": False}, regimes=regimes)
    assert both.lossy_rules == (rule,)
    assert both.for_sampling(GREEDY).lossy_rules == ()
    assert both.for_sampling(WARM).lossy == rule


# --- how far it leads


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_the_distance_counts_what_the_target_would_not_have_chosen(params: SamplingParams) -> None:
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(5)
    asked = {"do_sample": params.do_sample, "seed": 3, "max_new_tokens": 12}
    asked |= {"temperature": params.temperature, "top_k": params.top_k} if params.do_sample else {}
    own = model.generate(prompt, **asked).ids
    none = measure_distance(model, [Emitted(prompt, own, own, 3)], params)
    assert none.unlike_share == 0.0
    assert none.log_prob == none.target_log_prob < 0.0
    other = (own[3] + 1) % zoo.VOCAB
    rest = model.generate([*prompt, *own[:3], other], **asked | {"max_new_tokens": 8, "do_sample": False, "seed": None})
    ids = [*own[:3], other, *rest.ids]
    found = measure_distance(model, [Emitted(prompt, own, own, 3), Emitted(prompt, ids, own, 3)], params)
    probs = model.target_logits([*prompt, *ids[:-1]], num_logits=12).log_softmax(-1)
    by_hand = sum(float(row[token]) for row, token in zip(probs, ids, strict=True)) / 12
    assert found.log_prob == pytest.approx((by_hand + none.log_prob) / 2, rel=1e-5)
    assert found.target_log_prob == pytest.approx(none.log_prob)
    if not params.do_sample:
        assert found.unlike_share == 1 / 24
    assert found.unlike_share >= 1 / 24
    with pytest.raises(ValueError, match="outputs: must be at least one, got none"):
        measure_distance(model, [], params)
