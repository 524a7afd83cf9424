"""`model.generate(..., custom_generate=...)`: the output is the same as without it, and nothing given is ignored."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import layerskip
from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.drafters import TextStore
from layerskip.interop.generate import CustomGenerate, read_processors
from layerskip.rounds.sampling import SamplingParams
from tests.layerskip import tokenizers, zoo
from tests.layerskip.drafters.test_drafters import again, by_weights, drafters

NAMES = ("llama", "qwen2-sliding", "gemma3", "gpt2", "opt", "bloom", "falcon-alibi", "mixtral", "gpt-oss")
MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [1, 2])
CONFIG = DecodeConfig(skip_mask=MASK, gamma=3)
PROMPT = zoo.prompt_of(7)


def ids(prompt: tuple[int, ...] = PROMPT) -> torch.Tensor:
    return torch.tensor([prompt])


def callable_for(config: DecodeConfig = CONFIG, engine: str = "eager") -> CustomGenerate:
    return layerskip.custom_generate(config, engine=engine)


@pytest.fixture
def generate() -> Any:
    """`generate` of the shared Llama under the config; keyword arguments go on to it."""
    model, ours = zoo.model_of("llama"), callable_for()
    return lambda **arguments: model.generate(ids(), **{"max_new_tokens": 8, "custom_generate": ours} | arguments)


class Recorder(BaseStreamer):
    """Keeps what it is given; breaks at a certain put."""

    def __init__(self, break_at: int | None = None) -> None:
        self.puts: list[torch.Tensor] = []
        self.ended = False
        self._break_at = break_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.puts) == self._break_at:
            raise RuntimeError("the reader is gone")
        self.puts.append(value)

    def end(self) -> None:
        self.ended = True


@zoo.each(NAMES)
def test_greedy_output_is_that_of_plain_generate(name: str) -> None:
    model, ours = zoo.model_of(name), callable_for()
    for prompt in (zoo.prompt_of(1), PROMPT):
        out = model.generate(ids(prompt), max_new_tokens=16, do_sample=False, custom_generate=ours)
        assert out.tolist() == [[*prompt, *zoo.greedy_reference(name, prompt, 16)]]
        assert out.dtype == torch.int64
        assert ours.stats.num_emitted == 16
        assert ours.stats.num_drafted > 0


def test_the_fused_engine_gives_it_too() -> None:
    out = zoo.model_of("llama").generate(ids(), max_new_tokens=12, custom_generate=callable_for(engine="fused"))
    assert out[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference("llama", PROMPT, 12))


def test_a_repetition_penalty_acts_as_in_plain_generate(generate: Any) -> None:
    plain = zoo.model_of("llama").generate(ids(), max_new_tokens=8, repetition_penalty=1.6)
    assert plain[0, len(PROMPT) :].tolist() != list(zoo.greedy_reference("llama", PROMPT, 8)), "no penalty to see"
    assert torch.equal(generate(repetition_penalty=1.6), plain)


@pytest.mark.parametrize("least", [{"min_new_tokens": 5}, {"min_length": len(PROMPT) + 5}])
def test_biases_and_a_least_length_act_as_in_plain_generate(generate: Any, least: dict[str, int]) -> None:
    plain = zoo.model_of("llama").generate(ids(), max_new_tokens=8)[0, len(PROMPT) :].tolist()
    asked = {"sequence_bias": {(int(plain[1]),): -9.0}, "repetition_penalty": 1.2, "eos_token_id": plain[0], **least}
    expected = zoo.model_of("llama").generate(ids(), max_new_tokens=8, **asked)
    found = generate(**asked)
    assert torch.equal(found, expected)
    assert len(expected[0]) > len(PROMPT) + 1
    assert plain[1] not in found[0, len(PROMPT) :]


def test_text_and_chat_through_the_tokenizer(text_model: LayerSkipModel, tokenizer: Any) -> None:
    ours = callable_for()
    encoded = tokenizer("def read(path):", return_tensors="pt", return_token_type_ids=False)
    plain = text_model.model.generate(**encoded, max_new_tokens=12)
    assert torch.equal(text_model.model.generate(**encoded, max_new_tokens=12, custom_generate=ours), plain)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "naïve café"}],
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        return_tensors="pt",
        return_dict=True,
        tokenizer_kwargs={"return_token_type_ids": False},
    )
    plain = text_model.model.generate(**chat, max_new_tokens=12)
    assert torch.equal(text_model.model.generate(**chat, max_new_tokens=12, custom_generate=ours), plain)


@pytest.mark.parametrize("offset", range(6))
def test_stops_at_end_of_text_wherever_it_lies_in_a_round(generate: Any, offset: int) -> None:
    eos = zoo.greedy_reference("llama", PROMPT, 8)[offset]
    plain = zoo.model_of("llama").generate(ids(), max_new_tokens=8, eos_token_id=[eos, 60], pad_token_id=0)
    assert torch.equal(generate(eos_token_id=[eos, 60], pad_token_id=0), plain)


def test_a_generation_config_and_max_length_are_followed(generate: Any) -> None:
    settings = GenerationConfig(max_length=len(PROMPT) + 5, do_sample=False)
    out = generate(max_new_tokens=None, generation_config=settings)
    assert out[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference("llama", PROMPT, 5))


def test_a_dictionary_is_returned_where_it_is_asked_for(generate: Any) -> None:
    out = generate(return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference("llama", PROMPT, 8))


def test_every_criterion_sees_every_token_and_can_stop(generate: Any) -> None:
    seen: list[list[int]] = []

    def after_five(input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        assert scores is None
        seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= len(PROMPT) + 5])

    def never(input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.tensor([False])

    out = generate(stopping_criteria=StoppingCriteriaList([after_five, never]))[0].tolist()
    assert out[len(PROMPT) :] == list(zoo.greedy_reference("llama", PROMPT, 5))
    assert seen == [out[: len(PROMPT) + n] for n in range(1, 6)]


def test_hugging_faces_own_criteria_work(text_model: LayerSkipModel, tokenizer: Any, generate: Any) -> None:
    encoded = tokenizer("def read(path):", return_tensors="pt", return_token_type_ids=False)
    model = text_model.model
    whole = model.generate(**encoded, max_new_tokens=12)
    stop = tokenizer.decode(whole[0, encoded["input_ids"].shape[1] + 4])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    plain = model.generate(**encoded, max_new_tokens=12, stopping_criteria=criteria)
    assert plain.shape[1] < whole.shape[1]
    out = model.generate(**encoded, max_new_tokens=12, stopping_criteria=criteria, custom_generate=callable_for())
    assert torch.equal(out, plain)
    shorter = StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + 3)])
    assert generate(stopping_criteria=shorter).shape[1] == len(PROMPT) + 3
    assert generate(max_time=600.0).shape[1] == len(PROMPT) + 8
    assert generate(max_time=0.0).shape[1] == len(PROMPT) + 1


def test_a_streamer_gets_the_prompt_and_then_every_token_apart(generate: Any) -> None:
    plain, ours = Recorder(), Recorder()
    zoo.model_of("llama").generate(ids(), max_new_tokens=8, streamer=plain)
    generate(streamer=ours)
    assert [value.tolist() for value in ours.puts] == [value.tolist() for value in plain.puts]
    assert ours.ended


def test_a_text_streamer_in_a_thread(text_model: LayerSkipModel, tokenizer: Any) -> None:
    encoded = tokenizer("class Reader", return_tensors="pt", return_token_type_ids=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"max_new_tokens": 12, "streamer": streamer, "custom_generate": callable_for()}
    thread = threading.Thread(target=text_model.model.generate, kwargs=dict(encoded) | arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    plain = text_model.model.generate(**encoded, max_new_tokens=12)
    assert text == tokenizer.decode(plain[0, encoded["input_ids"].shape[1] :])


def test_a_streamer_is_found_behind_a_wrapper_of_the_users(generate: Any) -> None:
    ours, recorder = callable_for(), Recorder()
    generate(custom_generate=lambda model, *given, **named: ours(model, *given, **named), streamer=recorder)
    assert len(recorder.puts) == 1 + 8


@pytest.mark.parametrize("break_at", [1, 2, 5])
def test_an_exception_in_a_streamer_leaves_the_model_whole(generate: Any, break_at: int) -> None:
    model = zoo.model_of("llama")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="reader is gone"):
        generate(streamer=Recorder(break_at))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert generate()[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference("llama", PROMPT, 8))


def test_an_exception_in_a_criterion_leaves_the_model_whole(generate: Any) -> None:
    def broken(input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPT) + 2:
            raise RuntimeError("out of patience")
        return torch.tensor([False])

    with pytest.raises(RuntimeError, match="out of patience"):
        generate(stopping_criteria=StoppingCriteriaList([broken]))
    assert generate()[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference("llama", PROMPT, 8))


def test_sampling_draws_what_the_same_settings_draw_through_layerskip(generate: Any) -> None:
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
    model = LayerSkipModel(zoo.model_of("llama"), config=CONFIG, engine="eager")
    torch.manual_seed(5)
    expected = model.generate(PROMPT, max_new_tokens=8, **settings).ids
    torch.manual_seed(5)
    assert generate(**settings)[0, len(PROMPT) :].tolist() == expected
    torch.manual_seed(6)
    assert any(generate(**settings)[0, len(PROMPT) :].tolist() != expected for _ in range(3))


def test_processors_are_read_as_sampling_parameters() -> None:
    chain = [TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.8)]
    read = partial(read_processors, do_sample=True, num_prompt=7)
    assert read(chain) == (SamplingParams(True, temperature=0.5, top_k=0, top_p=0.8), None)
    assert read_processors([], do_sample=False, num_prompt=7) == (SamplingParams(top_k=0), None)
    with pytest.raises(ValueError, match=r"logits_processor: .* in generate's order"):
        read(chain[::-1])
    with pytest.raises(ValueError, match="logits_processor: each kind can be applied once"):
        read([chain[0], chain[0]])
    with pytest.raises(ValueError, match=r"with default options, got TopPLogitsWarper"):
        read([TopPLogitsWarper(0.8, min_tokens_to_keep=2)])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"inputs": ids().repeat(2, 1)}, r"input_ids: must be one row .* got shape \(2, 7\)"),
    "several sequences": ({"num_return_sequences": 3, "do_sample": True}, "num_return_sequences 1"),
    "padding": ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])}, "attention_mask: must be all ones"),
    "positions": ({"position_ids": torch.arange(7).unsqueeze(0) + 2}, "position_ids: must count from 0"),
    "processor": (
        {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])},
        "logits_processor: .* got NoRepeatNGramLogitsProcessor",
    ),
    "setting": ({"no_repeat_ngram_size": 2}, "got NoRepeatNGramLogitsProcessor"),
    "bad words": ({"bad_words_ids": [[5]]}, "got NoBadWordsLogitsProcessor"),
    "prefix": ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "got PrefixConstrainedLogitsProcessor"),
    "bias of no token": ({"sequence_bias": {(10**6,): 2.0}}, r"logit_bias: token ids must be in 0\.\.\d+, got 1000000"),
    "bias of several tokens": ({"sequence_bias": {(5, 6): 2.0}}, "got SequenceBiasLogitsProcessor"),
    "second temperature": (
        {
            "do_sample": True,
            "temperature": 0.5,
            "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.9)]),
        },
        "each kind can be applied once",
    ),
    "beams": ({"num_beams": 2}, "custom_generate: .* got beam_search"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "custom_generate: .* got assisted_generation"),
    "early exit": ({"assistant_early_exit": 2}, "custom_generate: .* got assisted_generation"),
    "assistant": ({"assistant_model": zoo.model_of("llama")}, "custom_generate: .* got assisted_generation"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: must be off"),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits: must be off"),
    "lockstep of GPUs": ({"synced_gpus": True}, "synced_gpus: must be off"),
    "too long": ({"max_new_tokens": zoo.MAX_POSITIONS}, "max_new_tokens: .* 96 positions, got 7 "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(case: str) -> None:
    arguments, said = REFUSED[case]
    model = zoo.model_of("llama")
    with pytest.raises(ValueError, match=said):
        model.generate(**{"inputs": ids(), "max_new_tokens": 8, "custom_generate": callable_for()} | arguments)


def test_a_cache_of_the_users_is_refused_and_not_left_empty(generate: Any) -> None:
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="past_key_values: must not be given"):
        generate(past_key_values=DynamicCache(config=zoo.model_of("llama").config))


def test_a_model_in_training_mode_and_one_of_other_weights_are_refused(tmp_path: Path) -> None:
    model = zoo.build("llama")
    ours = callable_for()
    model.generate(ids(), max_new_tokens=2, custom_generate=ours)
    model.train()
    with pytest.raises(ValueError, match="model: must be in evaluation mode"):
        model.generate(ids(), max_new_tokens=2, custom_generate=ours)
    provenance = {"model": "x", "weights_fingerprint": "0" * 16, "device": "cpu", "dtype": "float32", "num_layers": 4}
    file = tmp_path / "best.json"
    file.write_text(json.dumps(json.loads(CONFIG.to_json()) | {"provenance": provenance}))
    with pytest.raises(ValueError, match=r"provenance\.weights_fingerprint: the config was made for x"):
        zoo.model_of("llama").generate(ids(), custom_generate=layerskip.custom_generate(file, engine="eager"))


def test_a_model_is_wrapped_once_and_another_one_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(LayerSkipModel):
        def __init__(self, model: Any, *given: Any, **arguments: Any) -> None:
            made.append(model)
            super().__init__(model, *given, **arguments)

    monkeypatch.setattr("layerskip.interop.generate.LayerSkipModel", Counted)
    ours, first, second = callable_for(), zoo.model_of("llama"), zoo.model_of("qwen2")
    for model in (first, first, second, second, first):
        out = model.generate(ids(), max_new_tokens=4, custom_generate=ours)
        name = "llama" if model is first else "qwen2"
        assert out[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference(name, PROMPT, 4))
    assert made == [first, second, first]


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_model_whose_weights_change_is_decoded_as_it_is_now(engine: str) -> None:
    model, ours = zoo.build("llama"), callable_for(engine=engine)
    before = model.generate(ids(), max_new_tokens=8, custom_generate=ours)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1.0)
    after = model.generate(ids(), max_new_tokens=8, do_sample=False)
    assert not torch.equal(before, after)
    assert torch.equal(model.generate(ids(), max_new_tokens=8, custom_generate=ours), after)


@pytest.mark.parametrize("given", ["to the callable", "to generate", "where the model lies"])
def test_a_draft_model_of_another_tokenizer_drafts_here_too(given: str) -> None:
    model, tokenizer = tokenizers.target_of("byte_level").model, tokenizers.tokenizer_of("byte_level")
    weights, mask = tokenizers.weights_of("byte_fallback"), SkipMask.none(2)
    config = DecodeConfig(drafter="draft_model", skip_mask=mask, gamma=4, draft_weights=weights)
    ours = layerskip.custom_generate(
        config, engine="eager", tokenizer=tokenizer if given == "to the callable" else None
    )
    prompt = tokenizer("The reader", return_tensors="pt")["input_ids"]
    arguments = {"tokenizer": tokenizer} if given == "to generate" else {}
    out = model.generate(prompt, max_new_tokens=20, do_sample=False, custom_generate=ours, **arguments)
    assert torch.equal(out, model.generate(prompt, max_new_tokens=20, do_sample=False))
    assert ours.stats.num_accepted > 0


def test_the_setting_of_a_group_and_the_engine_it_was_tuned_with() -> None:
    grouped = DecodeConfig(
        skip_mask=MASK,
        gamma=3,
        groups={"code": {"skip_mask": "4:1", "gamma": 5}},
        provenance={
            "model": "x",
            "weights_fingerprint": "0" * 16,
            "device": "cpu",
            "dtype": "float32",
            "num_layers": 4,
            "engine": "eager",
        },
    )
    ours = layerskip.custom_generate(grouped, group="code")
    assert (ours.config.gamma, ours.engine) == (5, "eager")
    assert layerskip.custom_generate(CONFIG).engine == "auto"
    with pytest.raises(ValueError, match="group: must be one of code"):
        layerskip.custom_generate(grouped, group="prose")


def test_each_call_follows_the_setting_of_its_regime() -> None:
    config = DecodeConfig(
        skip_mask=MASK,
        gamma=3,
        sampling={"do_sample": False},
        regimes=[{"skip_mask": "4:none", "gamma": 5, "sampling": {"do_sample": True, "temperature": 0.7}}],
    )
    model, ours = zoo.model_of("llama"), callable_for(config)
    gammas = []
    for settings in ({"do_sample": True, "temperature": 0.7}, {"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(5)
        out = model.generate(ids(), max_new_tokens=12, custom_generate=ours, **settings)
        torch.manual_seed(5)
        wrapped = LayerSkipModel(model, config=config, engine="eager")
        assert out[0, len(PROMPT) :].tolist() == wrapped.generate(PROMPT, max_new_tokens=12, **settings).ids
        gammas.append(len(ours.stats.drafted_by_position))
    assert gammas == [5, 3, 5]
    assert ours.config == config


@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix", "hybrid", "eagle", "siblings"])
def test_every_drafter_drafts_here_too(drafter: str) -> None:
    configs = drafters(MASK) | {"siblings": CONFIG.model_copy(update={"siblings": 2})} | by_weights("llama")
    ours = callable_for(configs[drafter], engine="fused" if drafter in ("eagle", "siblings") else "eager")
    prompt = again("llama")
    out = zoo.model_of("llama").generate(ids(prompt), max_new_tokens=16, custom_generate=ours)
    assert out[0, len(prompt) :].tolist() == list(zoo.greedy_reference("llama", prompt, 16))
    assert ours.stats.num_accepted > 0
    assert (ours.stats.num_looked_up_accepted > 0) == (configs[drafter].lookup is not None)


def test_earlier_texts_can_be_given() -> None:
    store, config = TextStore(100), drafters(MASK, gamma=8)["suffix"]
    ours = layerskip.custom_generate(config, engine="eager", text_store=store)
    counts = []
    for _ in range(2):
        out = zoo.model_of("llama").generate(ids(), max_new_tokens=16, custom_generate=ours)
        assert out[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference("llama", PROMPT, 16))
        counts.append(ours.stats.num_accepted)
        store.add(out[0].tolist())
    assert counts[1] > counts[0]


def test_it_can_be_called_without_generate() -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + 4)])
    out = callable_for()(zoo.model_of("llama"), ids(), stopping_criteria=criteria)
    assert out[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference("llama", PROMPT, 4))
    with pytest.raises(ValueError, match="max_length: must be above the prompt's 7 tokens, got None"):
        callable_for()(zoo.model_of("llama"), ids())
