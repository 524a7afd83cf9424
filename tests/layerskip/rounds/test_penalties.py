"""Penalties, biases, least lengths and log-probabilities: what `generate` has, whatever drafts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from layerskip import DecodeConfig, LayerSkipModel, PrefixCache, PromptLookup, SkipMask, SuffixLookup
from layerskip.rounds.penalties import LogitEdits
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo
from tests.layerskip.drafters.test_other_tokenizer import config_of
from tests.layerskip.rounds.test_grammar import CONFIGS as CONFIGS_OF_TWO_LAYERS
from tests.layerskip.tape import TapeRecorder, on_graphs
from tests.layerskip.tokenizers import KINDS, TEXT, folder_of, target_of, weights_of

NEW_TOKENS = 60
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
}


PROMPT = list(zoo.prompt_of(9))
MASK = SkipMask.from_layers(4, [2])
CONFIGS = {
    "plain": DecodeConfig.plain(4),
    "mask": DecodeConfig(skip_mask=MASK, gamma=3),
    "few ids": DecodeConfig(skip_mask=MASK.narrowed(40), gamma=3, draft_threshold=0.01),
    "siblings": DecodeConfig(skip_mask=MASK, gamma=2, siblings=2),
    "n-grams": DecodeConfig(
        drafter="prompt_lookup", skip_mask=SkipMask.none(4), gamma=6, lookup=PromptLookup(min_match=1, max_match=3)
    ),
    "suffix, else mask": DecodeConfig(
        drafter="hybrid", skip_mask=MASK, gamma=2, lookup=SuffixLookup(min_match=1, gamma=5)
    ),
}


class Said(LogitsProcessor):
    """OpenAI's two penalties as its documents have them."""

    def __init__(self, num_prompt: int, presence: float = 0.0, frequency: float = 0.0) -> None:
        self.num_prompt, self.presence, self.frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.num_prompt :].tolist()).items():
            scores[0, token] -= self.presence + self.frequency * count
        return scores


def seed_of(sampling: str) -> dict[str, int]:
    return {"seed": 5} if sampling == "sampled" else {}


def expected(model: LayerSkipModel, ids: list[int], processors: list[LogitsProcessor], **arguments: Any) -> Any:
    prompt = torch.tensor([ids])
    torch.manual_seed(5)
    return model.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        logits_processor=LogitsProcessorList(processors),
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )


# What is asked of ours, and of `generate`.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "presence": ({"presence_penalty": 1.5}, {}),
    "frequency": ({"frequency_penalty": 0.7}, {}),
    "rewards": ({"presence_penalty": -0.4, "frequency_penalty": -0.3}, {}),
    "all three": ({"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}, {}),
    "bias": (
        {"logit_bias": {41: 0.4, 22: -3.5}, "presence_penalty": 1.0},
        {"sequence_bias": {(41,): 0.4, (22,): -3.5}},
    ),
    "least length": ({"min_new_tokens": 25}, {"min_new_tokens": 25}),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_that_of_generate(case: str, sampling: str) -> None:
    model, settings = zoo.layerskip_of("llama"), SAMPLINGS[sampling]
    own, theirs = CASES[case]
    shared = {name: value for name, value in own.items() if name == "repetition_penalty"}
    said = Said(len(PROMPT), own.get("presence_penalty", 0.0), own.get("frequency_penalty", 0.0))
    plain = expected(model, PROMPT, [], **settings).sequences[0, len(PROMPT) :].tolist()
    if case == "least length":  # so that it has something to forbid
        ends = sorted({plain[3], plain[9]})
        theirs, own = theirs | {"eos_token_id": ends}, own | {"eos_token_id": ends}
        plain = plain[: 1 + min(map(plain.index, ends))]
    reference = expected(model, PROMPT, [said], **settings, **shared, **theirs).sequences[0, len(PROMPT) :].tolist()
    assert reference != plain, "it changes nothing"
    for name, config in CONFIGS.items():
        out = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, config=config, **own, **settings, **seed_of(sampling))
        assert out.ids == reference, name
        if name == "mask":
            assert out.stats.num_accepted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_model_of_either_tokenizer_may_draft(kind: str) -> None:
    model, ids = target_of("byte_level"), target_of("byte_level").encode(TEXT[:40])
    settings = {"do_sample": True, "temperature": 1.8, "top_k": 0}
    said = Said(len(ids), 1.0, 0.5)
    reference = expected(model, ids, [said], **settings, sequence_bias={(280,): 3.0})
    assert not torch.equal(reference.sequences, expected(model, ids, [], **settings).sequences)
    out = model.generate(
        ids,
        max_new_tokens=NEW_TOKENS,
        config=config_of(weights_of(kind), gamma=3),
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={280: 3.0},
        seed=5,
        **settings,
    )
    assert out.ids == reference.sequences[0, len(ids) :].tolist()
    assert out.stats.num_accepted > 0


def test_a_draft_sees_the_penalties_of_the_tokens_drafted_before() -> None:
    """The draft is the target only if it does."""
    model = zoo.layerskip_of("llama")
    config = DecodeConfig(skip_mask=SkipMask.none(4), gamma=5)
    arguments = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}, "eos_token_id": []}
    out = model.generate(zoo.prompt_of(5), max_new_tokens=24, config=config, **arguments)
    assert out.stats.num_accepted == out.stats.num_drafted > 0


def test_rows_of_drafts_have_the_numbers_of_each_alone() -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3)
    edits = LogitEdits({4: 1.7}, min_new_tokens=4, ends=frozenset({2, 6}))
    at_once, alone = Sampler(params, edits=edits), Sampler(params, edits=edits)
    text, drafted = [1, 2, 3, 3, 9, 9, 5], [9, 4, 4, 4, 9]
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    for sampler in (at_once, alone):
        sampler.begin(4)
    at_once.settle(6)
    found = at_once.shape(logits, text, torch.tensor(drafted))
    for i, row in enumerate(logits):
        assert torch.equal(found[i : i + 1], alone.shape(row.unsqueeze(0), [*text, *drafted[:i]]))
    assert found[0, 2] == found[0, 6] == -torch.inf  # the fourth new token
    assert found[1:, [2, 6]].isfinite().all()


@pytest.mark.parametrize("way", ["plain", "mask", "siblings", "suffix, else mask"])
def test_on_recorded_forwards_and_in_batches_the_same(way: str) -> None:
    plain, config = target_of("byte_level"), {"skip_mask": SkipMask.none(2)} | CONFIGS_OF_TWO_LAYERS[way]
    prompts = [TEXT[:50], TEXT[50:90]]
    arguments = {
        "presence_penalty": 1.0,
        "logit_bias": {70: 2.0},
        "logprobs": 2,
        "max_new_tokens": 40,
        "do_sample": True,
        "temperature": 1.5,
        "seed": 5,
    }
    alone = [plain.generate(one, **arguments | {"seed": 5 + i}) for i, one in enumerate(prompts)]
    recorded = LayerSkipModel.from_pretrained(folder_of("byte_level"), device="cpu", engine="eager")
    on_graphs(recorded, TapeRecorder(), lean=True)
    fused = LayerSkipModel.from_pretrained(folder_of("byte_level"), device="cpu", engine="fused")
    outputs = [
        recorded.generate(prompts[0], config=DecodeConfig(**config), **arguments),
        *fused.generate_batch(prompts, config=DecodeConfig(**config), max_drafting=2, **arguments),
    ]
    for out, reference in zip(outputs, [alone[0], *alone], strict=True):
        assert out.ids == reference.ids
        for one, other in zip(out.logprobs, reference.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_log_probabilities_are_the_models_own(sampling: str, config: str) -> None:
    """Whatever drafts, and before whatever else acts on logits."""
    model, settings = zoo.layerskip_of("llama"), SAMPLINGS[sampling]
    reference = expected(model, PROMPT, [Said(len(PROMPT), 0.8)], **settings)
    rows = torch.cat(reference.logits).log_softmax(-1)
    arguments = {"max_new_tokens": NEW_TOKENS, "presence_penalty": 0.8, "config": CONFIGS[config]}
    arguments |= settings | seed_of(sampling)
    out = model.generate(PROMPT, logprobs=3, **arguments)
    assert out.ids == reference.sequences[0, len(PROMPT) :].tolist()
    assert len(out.logprobs) == len(out.ids)
    for row, token, one in zip(rows, out.ids, out.logprobs, strict=True):
        best = row.topk(3)
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in one.top] == best.indices.tolist()
    pieces = list(model.stream(PROMPT, logprobs=0, **arguments))
    assert [one.logprob for piece in pieces for one in piece.logprobs] == [one.logprob for one in out.logprobs]
    assert all(len(piece.logprobs) == len(piece.ids) and not one.top for piece in pieces for one in piece.logprobs)
    assert model.generate(PROMPT, **arguments).logprobs == []


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_log_probabilities_of_a_prompt_are_the_models_own(engine: str) -> None:
    model = LayerSkipModel(zoo.model_of("llama"), engine=engine)
    cache = PrefixCache(1 << 20)
    for length in (1, 2, 32, 33, 70):
        prompt = list(zoo.prompt_of(length))
        rows = model.target_logits(prompt, num_logits=length).log_softmax(-1)
        reference = model.generate(prompt, max_new_tokens=8, logprobs=2)
        for config in (CONFIGS["plain"], CONFIGS["mask"]):
            out = model.generate(
                prompt, max_new_tokens=8, logprobs=2, prompt_logprobs=True, config=config, prefix_cache=cache
            )
            assert out.ids == reference.ids
            assert len(out.prompt_logprobs) == length - 1
            for row, token, one in zip(rows[:-1], prompt[1:], out.prompt_logprobs, strict=True):
                assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
                assert [value for _, value in one.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_of_a_text_that_is_cut_short_no_more_log_probabilities_than_tokens() -> None:
    model = zoo.layerskip_of("llama")
    config = DecodeConfig(skip_mask=SkipMask.none(4), gamma=5)
    reference = list(zoo.greedy_reference("llama", zoo.prompt_of(5)))
    out = model.generate(zoo.prompt_of(5), max_new_tokens=24, config=config, eos_token_id=reference[3], logprobs=1)
    assert len(out.logprobs) == len(out.ids) <= 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty: must be in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty: must be in \[-2, 2\]"),
        ({"logit_bias": [3]}, r"logit_bias: must map token ids to numbers, got \[3\]"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias: must map token ids to finite numbers, got '3': 1.0"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias: must map token ids to finite numbers, got 3: inf"),
        ({"logit_bias": {10**6: 1.0}}, r"logit_bias: token ids must be in 0\.\.\d+, got 1000000"),
        ({"min_new_tokens": -1}, "min_new_tokens: must be a whole number of at least 0, got -1"),
        ({"logprobs": 21}, r"logprobs: must be a whole number in 0\.\.20, got 21"),
        ({"prompt_logprobs": True}, "prompt_logprobs: needs logprobs"),
        ({"logprobs": True}, r"logprobs: must be a whole number in 0\.\.20, got True"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        zoo.layerskip_of("llama").generate([1], max_new_tokens=1, **arguments)
