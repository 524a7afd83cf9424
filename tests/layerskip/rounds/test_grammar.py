"""Text with a grammar: what `generate` says under the same masks, whatever drafts; and what is refused."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from layerskip import DecodeConfig, Grammar, LayerSkipModel, PromptLookup, SkipMask, SuffixLookup, generate
from layerskip.rounds.grammar import GrammarTokens
from tests.layerskip.drafters.test_other_tokenizer import config_of
from tests.layerskip.tape import TapeRecorder, on_graphs
from tests.layerskip.tokenizers import KINDS, TEXT, folder_of, target_of, weights_of

SCHEMA = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "maxLength": 12},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99},
        "state": {"enum": ["opened", "read", "closed again"]},
        "readers": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["file", "lines", "state", "readers"],
    "additionalProperties": False,
}
PATTERN = r"The (reader|writer) (opens|closes) the file( again)?\. [a-z ]{3,9}!"
CHOICES = ["reads 日本語", "reads 🙂", 'says "no"\n']
NEW_TOKENS = 180


def follows_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


GRAMMARS: dict[str, tuple[Callable[[], Grammar], Callable[[str], Any]]] = {
    "schema": (lambda: Grammar.json(SCHEMA), follows_schema),
    "pattern": (lambda: Grammar.regex(PATTERN), lambda text: re.fullmatch(PATTERN, text)),
    "choice": (lambda: Grammar.choice(CHOICES), lambda text: text in CHOICES),
    "lark": (lambda: Grammar.lark('start: "(" start ")" | "x"'), lambda text: text.count("(") == text.count(")")),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"gamma": 0},
    "mask": {"skip_mask": SkipMask.early_exit(2, 1), "gamma": 3},
    "few ids": {"skip_mask": SkipMask.early_exit(2, 1).narrowed(120), "gamma": 3, "draft_threshold": 0.2},
    "siblings": {"skip_mask": SkipMask.early_exit(2, 1), "gamma": 2, "siblings": 2},
    "n-grams": {"drafter": "prompt_lookup", "gamma": 6, "lookup": PromptLookup(min_match=1, max_match=3)},
    "suffix, else mask": {
        "drafter": "hybrid",
        "skip_mask": SkipMask.early_exit(2, 1),
        "gamma": 2,
        "lookup": SuffixLookup(min_match=1, gamma=5),
    },
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "temperature": 1.2, "top_k": 0, "top_p": 1.0},
    "cut": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
}


class Masks(LogitsProcessor):
    """The same by llguidance's own means, from the start for every token."""

    def __init__(self, model: LayerSkipModel, grammar: Grammar, num_prompt: int) -> None:
        eos = sorted(model.eos_token_ids)
        self.tokens = llguidance.hf.from_tokenizer(model.tokenizer, n_vocab=model.vocab_size, eos_token=eos)
        self.grammar, self.num_prompt = grammar, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = llguidance.LLMatcher(self.tokens, self.grammar.source)
        assert matcher.consume_tokens(input_ids[0, self.num_prompt :].tolist())
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)[: scores.shape[1]] > 0
        return scores.masked_fill(~allowed, float("-inf"))


def expected(model: LayerSkipModel, ids: list[int], grammar: Grammar, seed: int, **sampling: Any) -> list[int]:
    prompt = torch.tensor([ids])
    torch.manual_seed(seed)
    out = model.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        logits_processor=LogitsProcessorList([Masks(model, grammar, len(ids))]),
        **sampling,
    )
    return out[0, len(ids) :].tolist()


def of(name: str, num_layers: int = 2) -> DecodeConfig:
    return DecodeConfig(**{"skip_mask": SkipMask.none(num_layers)} | CONFIGS[name])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_that_of_generate_under_the_same_masks(kind: str, sampling: str) -> None:
    model, settings = target_of(kind), SAMPLINGS[sampling]
    ids, num_finished = model.encode(TEXT[:40]), 0
    for name, (make, fits) in GRAMMARS.items():
        grammar = make()
        reference = expected(model, ids, grammar, 5, **settings)
        for config in CONFIGS:
            seed = {"seed": 5} if settings["do_sample"] else {}
            out = model.generate(ids, max_new_tokens=NEW_TOKENS, grammar=grammar, config=of(config), **settings, **seed)
            assert out.ids == reference, (name, config)
        if out.finish_reason == "eos":
            assert fits(out.text), (name, out.text)
            num_finished += 1
    assert num_finished >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_model_of_either_tokenizer_may_draft(kind: str) -> None:
    model, grammar = target_of(kind), Grammar.json(SCHEMA)
    ids = model.encode(TEXT[:40])
    reference = model.generate(ids, max_new_tokens=NEW_TOKENS, grammar=grammar, config=of("plain")).ids
    for other in KINDS:
        config = config_of(weights_of(other), gamma=3)
        assert model.generate(ids, max_new_tokens=NEW_TOKENS, grammar=grammar, config=config).ids == reference


def test_what_is_forced_is_drafted_by_nobody() -> None:
    model, grammar = target_of("byte_level"), Grammar.json(SCHEMA)
    out = model.generate("Say it: ", max_new_tokens=NEW_TOKENS, grammar=grammar, config=of("plain"))
    stats = out.stats
    assert out.finish_reason == "eos"
    assert stats.num_looked_up == stats.num_drafted > len(out.ids) / 6
    assert stats.num_accepted > 0.9 * stats.num_drafted
    (all_of_it,) = {one.ids[0] for one in [model.generate("Say: ", max_new_tokens=2, grammar=Grammar.choice(["x"]))]}
    assert all_of_it == model.encode("x")[0]


@pytest.mark.parametrize("text", [*CHOICES, 'back\\slash "quoted"\t', "é\u200b🚀🚀"])
def test_a_choice_of_one_text_is_that_text(text: str) -> None:
    for kind in KINDS:
        assert target_of(kind).generate("Say: ", max_new_tokens=60, grammar=Grammar.choice([text])).text == text


def test_drafts_that_the_grammar_forbids_are_not_verified() -> None:
    model = target_of("byte_level")
    grammar = Grammar.regex(r"The reader opens( the book){3}")
    config = of("n-grams")
    out = model.generate(TEXT + "So: ", max_new_tokens=60, grammar=grammar, config=config)
    assert out.text == "The reader opens" + " the book" * 3
    assert out.stats.num_accepted == out.stats.num_drafted


def test_a_batch_and_a_stream_say_the_same() -> None:
    model, grammar = target_of("byte_level"), Grammar.json(SCHEMA)
    prompts = [TEXT[:40], TEXT[40:90], "Say: "]
    settings = {"max_new_tokens": NEW_TOKENS, "grammar": grammar, "do_sample": True, "seed": 3}
    alone = [model.generate(one, **settings | {"seed": 3 + i}).text for i, one in enumerate(prompts)]
    assert [one.text for one in model.generate_batch(prompts, **settings)] == alone
    assert "".join(piece.text for piece in model.stream(prompts[0], **settings)) == alone[0]


def test_after_its_end_a_text_goes_on_with_ends_alone() -> None:
    model = target_of("byte_level")
    end = next(iter(model.eos_token_ids))
    for config in CONFIGS:
        out = model.generate(
            "Say: ", max_new_tokens=20, grammar=Grammar.choice(["yes"]), eos_token_id=[], config=of(config)
        )
        said = model.tokenizer.decode(out.ids, skip_special_tokens=True)
        assert said == "yes"
        assert out.ids[-10:] == [end] * 10


@pytest.mark.parametrize("config", ["plain", "mask", "suffix, else mask"])
def test_recorded_forwards_say_the_same(config: str) -> None:
    plain = target_of("byte_level")
    grammar, ids = Grammar.json(SCHEMA), plain.encode(TEXT[:50])
    reference = plain.generate(ids, max_new_tokens=60, grammar=grammar, config=of("plain"))
    model = LayerSkipModel.from_pretrained(folder_of("byte_level"), device="cpu", engine="eager")
    on_graphs(model, TapeRecorder(), lean=True)
    out = model.generate(ids, max_new_tokens=60, grammar=grammar, config=of(config))
    assert out.ids == reference.ids
    assert (out.stats.num_looked_up > 0) == (config != "plain")


def test_a_state_goes_back_and_forth_as_a_fresh_one_would() -> None:
    model = target_of("byte_level")
    tokens = GrammarTokens(model.tokenizer, model.vocab_size, sorted(model.eos_token_ids))
    grammar, draw = Grammar.json(SCHEMA), random.Random(4)
    state = tokens.state(grammar)
    said = model.generate("Say: ", max_new_tokens=NEW_TOKENS, grammar=grammar).ids
    prompt = [1, 2, 3]
    state.begin(len(prompt))
    for _ in range(200):
        length = draw.randrange(len(said))
        drafted = said[length : length + draw.randrange(5)]
        if drafted and draw.random() < 0.5:
            drafted[draw.randrange(len(drafted))] = draw.randrange(model.vocab_size)
        scores = torch.randn(len(drafted) + 1, model.vocab_size)
        found = state.allow(scores, prompt + said[:length], torch.tensor(drafted, dtype=torch.long))
        for i in range(len(drafted) + 1):
            fresh = tokens.state(grammar)
            fresh.begin(0)
            alone = fresh.allow(scores[i : i + 1], said[:length] + drafted[:i], None)
            assert torch.equal(found[i : i + 1], alone)
        fresh = tokens.state(grammar)
        fresh.begin(0)
        count = fresh.num_allowed(said[:length], drafted)
        assert state.num_allowed(prompt + said[:length], drafted) == count
        assert state.forced(prompt + said[:length], 7) == fresh.forced(said[:length], 7)


def test_a_row_in_which_nothing_else_is_possible_stays_as_it_was() -> None:
    model = target_of("byte_level")
    tokens = GrammarTokens(model.tokenizer, model.vocab_size, sorted(model.eos_token_ids))
    state = tokens.state(Grammar.choice(["yes"]))
    state.begin(0)
    scores = torch.full((1, model.vocab_size), float("-inf"))
    scores[0, model.encode("n")[0]] = 1.0
    assert torch.equal(state.allow(scores, [], None), scores)


def test_a_text_that_the_grammar_refuses_is_an_error_and_not_unmasked() -> None:
    model = target_of("byte_level")
    tokens = GrammarTokens(model.tokenizer, model.vocab_size, sorted(model.eos_token_ids))
    state = tokens.state(Grammar.choice(["yes"]))
    state.begin(0)
    scores = torch.zeros(1, model.vocab_size)
    assert torch.equal(state.allow(scores, [7], None), scores)  # as of a draft
    state.settle(1)
    broken = tokens.state(Grammar.choice(["yes"]))
    broken.begin(0)
    broken._matcher.consume_token(7)
    with pytest.raises(RuntimeError, match=r"grammar: .+"):
        broken.allow(scores, [], None)
    with pytest.raises(RuntimeError, match="grammar: refuses token 7, which it allowed before"):
        state.allow(scores, [7], None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json("[1]"), "grammar: a schema must be a JSON object, got list"),
        (lambda: Grammar.json("{"), "not valid JSON"),
        (lambda: Grammar.json({"type": {1}}), "grammar: a schema must be JSON"),
        (lambda: Grammar.choice([]), "grammar: a choice must be of texts"),
        (lambda: Grammar.choice("yes"), "grammar: a choice must be of texts"),
        (lambda: Grammar.choice(["yes", ""]), "grammar: a choice must be of texts"),
        (lambda: Grammar.json({"type": "no such type"}), "grammar: .*no such type"),
        (lambda: Grammar.regex("(("), "grammar: "),
        (lambda: Grammar.lark("start: nothing"), "grammar: "),
        (lambda: "yes", "grammar: must be a Grammar"),
    ],
)
def test_what_is_no_grammar_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        target_of("byte_level").generate("Say: ", max_new_tokens=4, grammar=make())


def test_without_a_tokenizer_or_the_extra_there_are_no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of("byte_level")
    grammar = Grammar.choice(["yes"])
    with pytest.raises(ValueError, match="grammar: needs a tokenizer"):
        LayerSkipModel(model.model).generate([1], max_new_tokens=2, grammar=grammar)
    with pytest.raises(ValueError, match="grammar: this tokenizer cannot be read"):
        GrammarTokens(object(), 10, [1])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"grammar: needs the structured extra, pip install 'layerskip\[structured\]'"):
        Grammar.json()


def test_the_command_takes_a_schema(tmp_path: Any, capsys: pytest.CaptureFixture[str], refused: Any) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    flags = [
        "--model",
        str(folder_of("byte_level")),
        "--device",
        "cpu",
        "--prompt",
        "Say: ",
        "--json-schema",
        str(file),
    ]
    assert generate.main([*flags, "--json", "--max-new-tokens", str(NEW_TOKENS)]) == 0
    assert follows_schema(json.loads(capsys.readouterr().out)["text"])
    file.write_text("[]", encoding="utf-8")
    assert "--json-schema: " in refused(generate.main, flags)
