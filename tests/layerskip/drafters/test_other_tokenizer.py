"""OtherTokenizerDrafter: the target's own tokens, drafts that are right, and how a text is kept in two tokenizers."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

import layerskip.decoding.loop
from layerskip import DecodeConfig, LayerSkipModel, SkipMask, generate
from layerskip.analysis.step_times import StepTimer
from layerskip.config.decode_config import DraftWeights
from layerskip.config.lookup_settings import PromptLookup
from layerskip.drafters.chain import Step, WeightsSettings
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.draft_weights import describe_weights, loaded_weights
from layerskip.drafters.other_tokenizer import OtherTokenizerDrafter, OtherTokenizerSession
from layerskip.drafters.translation import OwnContext, TokenText, Translation
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo
from tests.layerskip.decoding.counters import check_counters, check_ends
from tests.layerskip.drafters.test_drafters import PROMPT, again
from tests.layerskip.rounds.test_broken_rounds import check_survives
from tests.layerskip.tape import TapeRecorder, on_graphs
from tests.layerskip.tokenizers import (
    KINDS,
    MAX_POSITIONS,
    TEXT,
    folder_of,
    target_of,
    tokenizer_of,
    weights_of,
    words_of,
)

OTHER = {"byte_level": "byte_fallback", "byte_fallback": "byte_level"}
STATES: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "temperature": 1.2, "top_k": 0, "seed": 5})


def config_of(weights: DraftWeights, num_layers: int = 2, **fields: Any) -> DecodeConfig:
    common: dict[str, Any] = {"drafter": "draft_model", "skip_mask": SkipMask.none(num_layers), "gamma": 4}
    return DecodeConfig(**common | {"draft_weights": weights} | fields)


def configs_of(weights: DraftWeights, num_layers: int = 2) -> list[DecodeConfig]:
    lookup = PromptLookup(min_match=1, max_match=3, gamma=6)
    return [
        config_of(weights, num_layers),
        config_of(weights, num_layers, gamma=1),
        config_of(weights, num_layers, gamma=7, draft_threshold=0.4, target_threshold=0.2),
        config_of(weights, num_layers, drafter="hybrid", lookup=lookup),
    ]


# What every drafter promises.


@zoo.each(("llama", "llama fused", "gemma3", "falcon-alibi"))
def test_greedy_equals_generate(name: str) -> None:
    model, weights = words_of(name)
    total: Counter[str] = Counter()
    for config in configs_of(weights, zoo.NUM_LAYERS):
        for prompt, budget in ((PROMPT, zoo.LONGEST), (again(name), 16), (zoo.prompt_of(1), 5)):
            out = model.generate(prompt, max_new_tokens=budget, config=config)
            assert out.ids == list(zoo.greedy_reference(name, prompt)[:budget]), config
            check_counters(out, config)
            total.update(drafted=out.stats.num_drafted - out.stats.num_looked_up)
            total.update(kept=out.stats.num_accepted - out.stats.num_looked_up_accepted)
    assert 0.1 * total["drafted"] < total["kept"] < total["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("more", STATES, ids=["greedy", "sampled"])
def test_both_may_run_on_recorded_steps(more: dict[str, Any]) -> None:
    own = target_of("byte_level")
    model = on_graphs(LayerSkipModel(own.model, own.tokenizer, engine="eager"), TapeRecorder(), lean=True)
    draft = loaded(model, "byte_fallback")
    small = LayerSkipModel(target_of("byte_fallback").model, engine="eager")
    weights = weights_of("byte_fallback")
    on_tape = on_graphs(small, TapeRecorder(), lean=True).engine
    model.engine.draft_weights[weights.path] = replace(draft, engine=on_tape)
    for config in configs_of(weights):
        plain = own.generate("The reader", max_new_tokens=30, config=DecodeConfig.plain(2), **more)
        out = model.generate("The reader", max_new_tokens=30, config=config, **more)
        assert out.ids == plain.ids
        assert out.stats.num_accepted
        made = on_tape.num_preparations
        assert model.generate("The reader", max_new_tokens=30, config=config, **more).ids == plain.ids
        assert on_tape.num_preparations == made


@pytest.mark.parametrize("place", range(4))
def test_end_of_text_at_every_offset_of_a_round(place: int) -> None:
    model, weights = words_of("llama fused")
    config, prompt = configs_of(weights, zoo.NUM_LAYERS)[place], again("llama fused")
    check_ends(model, prompt, config, zoo.greedy_reference("llama fused", prompt))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", STATES, ids=["greedy", "sampled"])
def test_stop_strings_and_streaming(kind: str, more: dict[str, Any]) -> None:
    model, config = target_of(kind), config_of(weights_of(OTHER[kind]))
    arguments = {"max_new_tokens": 24, "eos_token_id": []} | more
    plain = model.generate("The reader opens", config=DecodeConfig.plain(2), **arguments)
    stop = plain.text[9:13]
    expected = model.generate("The reader opens", config=DecodeConfig.plain(2), stop_strings=stop, **arguments)
    out = model.generate("The reader opens", config=config, stop_strings=stop, **arguments)
    assert (out.ids, out.text, out.finish_reason) == (expected.ids, expected.text, "stop")
    pieces = list(model.stream("The reader opens", config=config, **arguments))
    assert [token for piece in pieces for token in piece.ids] == plain.ids
    assert "".join(piece.text for piece in pieces) == plain.text


def test_an_exception_anywhere_leaves_the_model_whole(monkeypatch: Any) -> None:
    model, config = target_of("byte_level"), config_of(weights_of("byte_fallback"))

    places = (
        (OtherTokenizerSession, "propose"),
        (OtherTokenizerSession, "_go_on"),
        (OwnContext, "follow"),
        (TokenText, "encode"),
        (layerskip.decoding.loop, "_settle"),
    )
    assert check_survives(model, "The writer opens", config, places, monkeypatch).stats.num_rounds > 2


# The same tokens, whatever the text.


def prompts_of(kind: str, count: int) -> list[list[int]]:
    """Known text, mixed scripts and emoji, cut between any two tokens and so within characters, with special tokens
    and bytes that are no text."""
    draw, tokenizer, found = random.Random(kind), tokenizer_of(kind), []
    scripts = [
        TEXT,
        "🙂🚀👩‍👩‍👧 né ",
        "ελληνικά 中文字 עברית ",
        "\n\n    \t",
        "<|user|></s>",
        "\ufffd",
        "a1.5e-3 don't",
    ]
    for i in range(count):
        words = [one[draw.randrange(len(one)) :][: draw.randint(1, 20)] for one in draw.choices(scripts, k=3)]
        ids = tokenizer("".join(words))["input_ids"][: draw.randint(1, 24)]
        if i % 3 == 0:  # none of them is text that the tokenizer would write so
            ids[draw.randrange(len(ids)) :] = [draw.randrange(len(tokenizer) + 3) for _ in range(draw.randint(1, 6))]
        found.append(ids)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", STATES, ids=["greedy", "sampled"])
def test_the_output_is_the_targets_for_any_prompt(kind: str, count: int, more: dict[str, Any]) -> None:
    if more:  # drawn
        count //= 3
    model, weights, total = target_of(kind), weights_of(OTHER[kind]), Counter[str]()
    configs = configs_of(weights)
    for i, prompt in enumerate(prompts_of(kind, count)):
        config, arguments = configs[i % len(configs)], {"max_new_tokens": 14, "eos_token_id": []} | more
        plain = model.generate(prompt, config=DecodeConfig.plain(2), **arguments)
        out = model.generate(prompt, config=config, **arguments)
        assert out.ids == plain.ids, (prompt, config)
        check_counters(out, config)
        total.update(drafted=out.stats.num_drafted - out.stats.num_looked_up, alone=out.stats.num_target_only)
        total.update(kept=out.stats.num_accepted - out.stats.num_looked_up_accepted)
    assert count < total["kept"] < total["drafted"]
    assert total["alone"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_both_know_is_mostly_drafted_right(kind: str) -> None:
    model, config = target_of(kind), config_of(weights_of(OTHER[kind]))
    for more in STATES[:1]:
        out = model.generate("The reader opens the file", max_new_tokens=60, config=config, eos_token_id=[], **more)
        assert out.stats.num_accepted > 0.5 * out.stats.num_drafted
        assert out.stats.num_rounds + out.stats.num_target_only < 35


def test_an_end_of_text_is_drafted_as_the_targets_own() -> None:
    """`</s>` is said, `<|end|>` proposed."""
    draft = loaded(target_of("byte_level"), "byte_fallback")
    own, target = tokenizer_of("byte_fallback"), tokenizer_of("byte_level")
    assert draft.translation.to_target == {own.eos_token_id: target.eos_token_id}
    assert draft.translation.to_own == {target.eos_token_id: own.eos_token_id}
    session = OtherTokenizerDrafter(draft, draft.translation, Sampler(SamplingParams()), WeightsSettings(4)).begin()
    said = [*own("words are", add_special_tokens=False)["input_ids"], own.eos_token_id]
    session._drafter.steps = lambda *_: (Step(torch.tensor([one]), None, None) for one in said)  # type: ignore[method-assign]
    with torch.inference_mode(), draft.engine.session(64):
        found = session.propose(target("The reader,")["input_ids"], 9, None)
    assert found.ids.tolist() == [*target(" words are")["input_ids"], target.eos_token_id][:4]


# The text in the draft model's tokens.


def loaded(model: LayerSkipModel, kind: str) -> Any:
    weights = weights_of(kind)
    model.check_config(config_of(weights))
    return loaded_weights(model.engine, weights)


def translation(target: str, own: str) -> Translation:
    return Translation(tokenizer_of(target), tokenizer_of(own), len(tokenizer_of(target)))


def fed(both: Translation, ids: Sequence[int], draw: random.Random) -> OwnContext:
    """The text read in pieces, with what `follow` says of the ids before checked."""
    context, at, grown = OwnContext(both), 0, list[int]()
    while at < len(ids):
        step = draw.randint(1, 5)
        grown += ids[at : at + step]
        at += step
        before = list(context.ids)
        same = context.follow(grown)
        assert context.ids[:same] == before[:same]
    return context


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_read_in_pieces_has_the_tokens_of_the_whole(kind: str) -> None:
    both = translation(kind, OTHER[kind])
    text = TEXT * 6
    context = fed(both, both.target.encode(text), random.Random(1))
    assert context.ids == tokenizer_of(OTHER[kind])(text)["input_ids"]
    assert not context.held


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_encoded_again_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the text, and even where it is one word without an end."""
    both = translation(kind, OTHER[kind])
    for text in (TEXT * 40, "x" * 6_000, "日本語" * 1_000, " " * 3_000):
        ids = both.target.encode(text)
        context = OwnContext(both)
        context.follow(ids[: len(ids) // 2])
        asked: list[int] = []
        monkeypatch.setattr(TokenText, "encode", _noting(asked))
        grown = ids[: len(ids) // 2]
        for at in range(len(grown), len(ids), 3):
            grown += ids[at : at + 3]
            context.follow(grown)
        monkeypatch.undo()
        assert max(asked) < 800, text[:9]
        assert both.own.decode(context.ids[len(both.own.start) :]).strip() == text.strip()


def _noting(asked: list[int]) -> Any:
    encode = TokenText.encode

    def noted(self: TokenText, text: str) -> list[int]:
        asked.append(len(text))
        return encode(self, text)

    return noted


@pytest.mark.parametrize("kind", KINDS)
def test_an_incomplete_character_is_waited_for_and_broken_bytes_are_not(kind: str) -> None:
    both = translation(kind, OTHER[kind])
    backend = tokenizer_of(kind)
    rocket = "🚀".encode()
    names = [f"<0x{one:02X}>" for one in rocket] if kind == "byte_fallback" else ["ð", "Ł", "ļ", "Ģ"]
    tokens = backend.convert_tokens_to_ids(names)
    start = both.target.encode("The file")
    context = OwnContext(both)
    told = []
    for count in range(1, 5):
        context.follow([*start, *tokens[:count]])
        told.append((len(context.held), both.own.decode(context.ids)))
    assert [held for held, _ in told] == [1, 2, 3, 0]
    assert told[0][1] == told[2][1]
    assert told[3][1] == told[0][1] + "🚀"
    context.follow([*start, *tokens, *[tokens[0]] * 9])
    assert len(context.held) <= 3
    context.follow([*start, *tokens, *[tokens[0]] * 9, *both.target.encode(" file")])
    assert not context.held
    assert both.own.decode(context.ids).endswith("file")


def test_special_tokens_are_neither_made_nor_merged() -> None:
    both = translation("byte_level", "byte_fallback")
    target, own = tokenizer_of("byte_level"), tokenizer_of("byte_fallback")
    user, end = target.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    context = OwnContext(both)
    context.follow([user, *both.target.encode("re"), end, *both.target.encode("ader")])
    expected = [own.bos_token_id, *both.own.encode("re"), own.eos_token_id, *both.own.encode("ader")]
    assert context.ids == expected  # the marker is left out; what is written as "reader" would be one token
    written = OwnContext(both)
    written.follow(both.target.encode("</s><|user|>"))
    assert own.eos_token_id not in written.ids
    assert both.own.decode(written.ids[1:]) == "</s><|user|>"
    assert set(both.target.encode("<|user|></s>")).isdisjoint(both.target.special)
    back = translation("byte_fallback", "byte_level")
    context = OwnContext(back)
    context.follow([own.bos_token_id, *back.target.encode("The")])
    assert back.own.decode(context.ids) == "The"
    nothing = OwnContext(back)
    nothing.follow([own.bos_token_id, len(own) + 1])  # neither has a meaning for the other
    assert nothing.ids == []


# The draft model's cache.


def test_it_computes_what_it_would_from_scratch() -> None:
    """Also after drafts that were right, wrong, partly right and left out, and after a text that was forgotten."""
    model = target_of("byte_level")
    draft = loaded(model, "byte_fallback")
    drafter = OtherTokenizerDrafter(draft, draft.translation, Sampler(SamplingParams()), WeightsSettings(5))
    alone = LlamaForCausalLM.from_pretrained(folder_of("byte_fallback"))
    target, draw, fewer = draft.translation.target, random.Random(3), 0
    ids = target.encode(TEXT)
    with torch.inference_mode(), drafter.session(200):
        session = drafter.begin()
        seen = 9
        while seen < len(ids) - 6:
            before = len(session._cached)
            found = session.propose(ids[:seen], 5, None)
            own, cached = session._context.ids, session._cached
            if found is not None:
                assert cached[: len(own)] == own
                assert draft.engine.cache.length == len(cached)
                said = list(own)
                while len(said) <= len(cached):
                    said.append(int(alone(torch.tensor([said])).logits[0, -1, : draft.vocabulary].argmax()))
                assert said[:-1] == cached
                fewer += before > len(own)  # drafts were kept
            if seen % 7 == 0:
                session.forget_from(seen - 2)
            seen += draw.randint(1, 6)
    assert fewer


def test_what_is_timed_is_drafted_wherever_the_text_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose end is encoded otherwise gets no proposal, and would seem to cost nothing."""
    model = target_of("byte_level")
    draft = loaded(model, "byte_fallback")
    drafter = OtherTokenizerDrafter(draft, draft.translation, Sampler(SamplingParams()), WeightsSettings(4))
    ids = [*model.encode(TEXT), *(token for letter in "The" for token in model.encode(letter))]
    forwards: list[int] = []
    monkeypatch.setattr(type(draft), "forward", lambda self, ids: forwards.append(len(ids)) or go_on(self, ids))
    with torch.inference_mode(), drafter.session(200):
        session = drafter.begin()
        assert session.propose(ids, 4, None) is None
        assert not forwards
        session.rehearse(ids, 1)
        session.forget_from(len(ids) - 3)
        del forwards[:]
        session.rehearse(ids, 4)
    assert session.own_for_one == pytest.approx(1.8, abs=0.4)
    assert len(forwards) == round(4 * session.own_for_one)
    assert forwards[0] <= 3
    assert set(forwards[1:]) == {1}


def test_drafts_are_timed_in_a_text_that_takes_more_of_its_own_tokens() -> None:
    model = target_of("byte_level")
    own = len(tokenizer_of("byte_fallback")(TEXT)["input_ids"])
    ids = model.encode(TEXT)
    assert own > len(ids) + 16
    (seconds,) = StepTimer(model, 8).draft_s(ids, [weights_of("byte_fallback")], gamma=4, threshold=False)
    assert seconds > 0.0


go_on = DraftModel.forward


def test_a_draft_ends_at_an_unsure_token_of_its_own() -> None:
    model = target_of("byte_level")
    counts = []
    for threshold in (0.0, 0.5, 0.99):
        config = config_of(weights_of("byte_fallback"), gamma=6, draft_threshold=threshold)
        stats = model.generate("The writer closes", max_new_tokens=40, config=config).stats
        counts.append((stats.num_drafted - stats.num_accepted, stats.num_rounds + stats.num_target_only))
    assert counts[0][0] > counts[2][0]
    assert counts[0][1] <= counts[2][1]


def test_a_text_beyond_its_positions_is_not_drafted(tmp_path: Path) -> None:
    shutil.copytree(folder_of("byte_fallback"), tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    file.write_text(
        file.read_text().replace(f'"max_position_embeddings": {MAX_POSITIONS}', '"max_position_embeddings": 24')
    )
    model, config = target_of("byte_level"), config_of(describe_weights(tmp_path / "draft"))
    plain = model.generate("The reader opens", max_new_tokens=40, config=DecodeConfig.plain(2))
    out = model.generate("The reader opens", max_new_tokens=40, config=config)
    assert out.ids == plain.ids
    assert 0 < out.stats.num_drafted < 40
    assert out.stats.num_target_only > 10


# What is given.


def test_the_command_takes_its_folder(capsys: Any) -> None:
    given = [
        "--model",
        str(folder_of("byte_level")),
        "--draft-weights",
        str(folder_of("byte_fallback")),
        "--gamma",
        "4",
    ]
    given += ["--device", "cpu", "--prompt", "The reader opens", "--max-new-tokens", "16", "--compare"]
    assert generate.main([*given, "--drafter", "draft_model"]) == 0
    said = capsys.readouterr()
    assert "tokens identical: yes" in said.out + said.err


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, weights = target_of("byte_level"), weights_of("byte_fallback")
    with pytest.raises(
        ValueError, match=r"draft_weights.draft_vocab: must be left out where .* another tokenizer, .* 64"
    ):
        model.check_config(config_of(weights.narrowed(64)))
    model.check_config(config_of(weights))
    with pytest.raises(ValueError, match=r"draft_weights.draft_vocab: must be left out where"):  # loaded or not
        model.check_config(config_of(weights.narrowed(64)))
    shutil.copytree(folder_of("byte_fallback"), tmp_path / "more")
    tokenizer = tokenizer_of("byte_fallback")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_tokens(["one", "two", "three", "four"])
    backend.save(str(tmp_path / "more" / "tokenizer.json"))
    size = len(tokenizer)
    with pytest.raises(ValueError, match=rf"must have at most the {size + 3} ids of its model, got {size + 4}"):
        model.check_config(config_of(describe_weights(tmp_path / "more")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "more" / name).unlink()
    with pytest.raises(ValueError, match=rf"without tokenizers to compare, .* got {size + 3}"):
        model.check_config(config_of(describe_weights(tmp_path / "more")))
    (tmp_path / "more" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"draft_weights: .* has a model's config.json, and no weights"):
        describe_weights(tmp_path / "more")
    with pytest.raises(ValueError, match=r"must be of Transformers' own classes, got object"):
        TokenText(object())


def test_a_draft_model_whose_layers_keep_a_state_is_refused(tmp_path: Path) -> None:
    """Of its own tokens those change that lie further back than a state is kept."""
    tokenizer = tokenizer_of("byte_fallback")
    zoo.build("lfm2", vocab_size=len(tokenizer) + 3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must have attention alone, layers of .* keep a state"):
        target_of("byte_level").check_config(config_of(describe_weights(tmp_path)))
