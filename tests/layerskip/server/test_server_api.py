"""The server through OpenAI's own client: the same tokens as `LayerSkipModel.generate`, streaming and not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from layerskip import (
    DecodeConfig,
    GroupSetting,
    LayerSkipModel,
    ProbabilityAcceptance,
    RegimeSetting,
    Sampling,
    SkipMask,
)
from layerskip.config.lossy_acceptance import lossy_label
from tests.layerskip import zoo
from tests.layerskip.serving import MODEL_ID, Serving, serving, tiny_model

DEMO_CONFIG = Path(__file__).parents[3] / "studies" / "demo" / "best.json"
TEMPLATE = (
    "{% for message in messages %}{% if loop.index0 > 3 %}{{ raise_exception('at most four turns') }}{% endif %}"
    "{% if message['role'] != 'tool' or not deaf is defined %}"
    "{{ message['role'] }}{% if message['name'] %} {{ message['name'] }}{% endif %}: {{ message['content'] }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ voice }}assistant:{% endif %}"
)
RAW = {"return_token_ids": True}


@pytest.fixture(scope="module")
def demo_model() -> LayerSkipModel:
    return LayerSkipModel.from_config(DEMO_CONFIG, device="cpu")


@pytest.fixture(scope="module")
def demo(demo_model: LayerSkipModel) -> Iterator[Serving]:
    # Without a store of texts a prompt is drafted the second time as it was the first.
    with serving(demo_model, store_tokens=0, prefix_cache_bytes=0) as running:
        yield running


@pytest.fixture(scope="module")
def chat_model(tokenizer: Any) -> LayerSkipModel:
    """Splits characters over tokens, so its pieces of text are held back now and then."""
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = TEMPLATE
    mask = SkipMask.early_exit(zoo.NUM_LAYERS, 2)
    groups = {"prose": GroupSetting(skip_mask=mask, gamma=1)}
    config = DecodeConfig(skip_mask=mask, gamma=4, groups=groups)
    model = zoo.build("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    return LayerSkipModel(model, with_template, config, engine="eager")


@pytest.fixture(scope="module")
def chat(chat_model: LayerSkipModel) -> Iterator[Serving]:
    with serving(chat_model, queue_limit=64) as running:
        yield running


def streamed(events: Any) -> tuple[str, list[int], str, Any]:
    """(text, token ids, finish reason, usage) of a stream of completions."""
    text, ids, reason, usage = "", [], None, None
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            text += choice.text
            ids += choice.token_ids
            reason = choice.finish_reason or reason
    return text, ids, reason, usage


@pytest.mark.parametrize("prompt", ["def read(", "class Stack:\n"])
def test_a_completion_has_the_tokens_of_generate_streaming_and_not(demo: Serving, demo_model, prompt: str) -> None:
    expected = demo_model.generate(prompt, max_new_tokens=24, do_sample=False)
    client = demo.client()
    arguments = {"model": MODEL_ID, "prompt": prompt, "max_tokens": 24, "temperature": 0, "extra_body": RAW}
    whole = client.completions.create(**arguments)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].token_ids == expected.ids
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected.stats.num_prompt_tokens, 24)
    counts = ("num_rounds", "num_drafted", "num_accepted", "num_emitted")
    assert {name: whole.layerskip[name] for name in counts} == {n: getattr(expected.stats, n) for n in counts}
    events = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert streamed(events) == (expected.text, expected.ids, "length", whole.usage)
    # One event per round, the prompt's own forward before and finish reason and usage after them.
    assert len(events) == 1 + expected.stats.num_rounds + expected.stats.num_target_only + 2


def test_token_ids_as_a_prompt_and_the_default_length(demo: Serving, demo_model) -> None:
    ids = demo_model.encode("def read(")
    expected = demo_model.generate(ids, max_new_tokens=16)
    for prompt in (ids, [ids], ["def read("], "def read("):
        assert demo.client().completions.create(model=MODEL_ID, prompt=prompt).choices[0].text == expected.text


def test_a_seed_gives_the_tokens_of_generate_and_no_seed_draws_anew(demo: Serving, demo_model) -> None:
    shape = {"temperature": 0.9, "top_p": 0.95}
    expected = demo_model.generate("def ", max_new_tokens=24, do_sample=True, seed=3, top_k=0, min_p=0.02, **shape)
    client = demo.client()
    arguments = {"model": MODEL_ID, "prompt": "def ", "max_tokens": 24, **shape}
    extra = {"top_k": 0, "min_p": 0.02, **RAW}
    assert client.completions.create(**arguments, seed=3, extra_body=extra).choices[0].token_ids == expected.ids
    events = client.completions.create(**arguments, seed=3, extra_body=extra, stream=True)
    assert streamed(events)[1] == expected.ids
    drawn = {client.completions.create(**arguments).choices[0].text for _ in range(4)}
    assert len(drawn) > 1


def test_top_p_alone_samples_and_nothing_given_follows_the_generation_config(demo: Serving, demo_model) -> None:
    greedy = demo_model.generate("def ", max_new_tokens=16)
    assert greedy.sampled is False
    client = demo.client()
    assert client.completions.create(model=MODEL_ID, prompt="def ", top_p=1).choices[0].text == greedy.text
    drawn = {client.completions.create(model=MODEL_ID, prompt="def ", top_p=0.99).choices[0].text for _ in range(4)}
    assert len(drawn) > 1


@pytest.mark.parametrize("streams", [False, True])
def test_several_prompts_have_several_answers_each(demo: Serving, demo_model, streams: bool) -> None:
    prompts, client = ["def read(", "class Stack:\n"], demo.client()
    shape: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.9, "top_k": 0}
    expected = [demo_model.generate(one, seed=3 + i, **shape).ids for one in prompts for i in range(3)]
    answer = client.completions.create(
        model=MODEL_ID,
        prompt=prompts,
        n=3,
        seed=3,
        temperature=0.9,
        max_tokens=10,
        stream=streams,
        extra_body={"top_k": 0, **RAW} | ({"stream_options": {"include_usage": True}} if streams else {}),
    )
    found: list[list[int]] = [[] for _ in range(6)]
    ended, events = set[int](), list(answer) if streams else [answer]
    for choice in (one for event in events for one in event.choices):
        assert choice.index not in ended
        found[choice.index] += choice.token_ids
        ended |= {choice.index} if choice.finish_reason else set()
    assert found == expected
    assert ended == set(range(6))
    usage = events[-1].usage
    assert usage.completion_tokens == sum(map(len, expected))
    assert usage.prompt_tokens == sum(len(demo_model.encode(one)) for one in prompts)  # each once
    assert demo.service.worker.num_admitted in (0, 6)


def test_several_answers_of_a_chat(chat: Serving) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    one = chat.client().chat.completions.create(**asked).choices[0].message.content
    answer = chat.client().chat.completions.create(**asked, n=2)
    assert [choice.message.content for choice in answer.choices] == [one, one]
    assert [choice.index for choice in answer.choices] == [0, 1]
    events = list(chat.client().chat.completions.create(**asked, n=2, stream=True))
    roles = [choice.index for event in events for choice in event.choices if choice.delta.role]
    assert roles == [0, 1]


def test_a_temperature_next_to_nothing_is_greedy(demo: Serving, demo_model) -> None:
    expected = demo_model.generate("def ", max_new_tokens=16).text
    for temperature in (0, 1e-8, 0.00099):
        found = demo.client().completions.create(model=MODEL_ID, prompt="def ", temperature=temperature)
        assert found.choices[0].text == expected


def test_who_measures_speed_may_have_the_end_of_text_ignored(demo: Serving, demo_model) -> None:
    usual = demo_model.generate("def read(", max_new_tokens=12)
    own = demo_model.adapter.model.generation_config
    own.eos_token_id, before = usual.ids[5], own.eos_token_id
    try:
        ends = demo.client().completions.create(model=MODEL_ID, prompt="def read(", max_tokens=12)
        goes_on = demo.client().completions.create(
            model=MODEL_ID, prompt="def read(", max_tokens=12, extra_body={"ignore_eos": True, **RAW}
        )
    finally:
        own.eos_token_id = before
    assert ends.usage is not None
    assert ends.usage.completion_tokens == usual.ids.index(usual.ids[5]) + 1
    assert goes_on.choices[0].token_ids == usual.ids  # type: ignore[attr-defined]


def test_a_stop_text_ends_the_answer_and_is_not_in_it(demo: Serving, demo_model) -> None:
    full = demo_model.generate("def read(", max_new_tokens=24)
    stop = full.text[9:12]  # spans tokens, or lies within one
    where = full.text.index(stop)
    client = demo.client()
    arguments = {"model": MODEL_ID, "prompt": "def read(", "max_tokens": 24, "extra_body": RAW}
    for given in (stop, ["never so", stop]):
        whole = client.completions.create(**arguments, stop=given)
        assert whole.choices[0].text == full.text[:where]
        assert whole.choices[0].finish_reason == "stop"
        ids = whole.choices[0].token_ids
        # The ids go up to the token that completes the stop text, and no further.
        assert ids == full.ids[: len(ids)]
        assert stop in demo_model.tokenizer.decode(ids)
        assert stop not in demo_model.tokenizer.decode(ids[:-1])
        assert whole.usage.completion_tokens == len(ids)
        events = client.completions.create(**arguments, stop=given, stream=True)
        assert streamed(events)[:3] == (full.text[:where], ids, "stop")


def test_end_of_text_is_a_stop(chat: Serving, chat_model) -> None:
    plain = chat_model.generate("def", max_new_tokens=12, do_sample=False)
    chat_model.model.generation_config.eos_token_id = plain.ids[5]
    try:
        choice = chat.client().completions.create(model=MODEL_ID, prompt="def", extra_body=RAW).choices[0]
    finally:
        chat_model.model.generation_config.eos_token_id = None
    assert choice.finish_reason == "stop"
    assert choice.token_ids == plain.ids[: plain.ids.index(plain.ids[5]) + 1]


MESSAGES = [
    {"role": "system", "content": "Be naïve."},
    {"role": "user", "content": [{"type": "text", "text": "caf"}, {"type": "text", "text": "é?"}]},
]


def test_a_chat_answer_has_the_tokens_of_generate_streaming_and_not(chat: Serving, chat_model) -> None:
    expected = chat_model.generate("system: Be naïve.\nuser: café?\nassistant:", max_new_tokens=40)
    client = chat.client()
    arguments = {"model": MODEL_ID, "messages": MESSAGES, "max_completion_tokens": 40, "extra_body": RAW}
    whole = client.chat.completions.create(**arguments)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].token_ids == expected.ids
    first, *rest = client.chat.completions.create(**arguments, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in rest) == expected.text
    assert rest[-1].choices[0].finish_reason == "length"
    assert all(event.usage is None for event in rest)


def test_a_developer_message_is_a_system_message_and_an_answer_may_be_sent_back(chat: Serving) -> None:
    client = chat.client()
    first = client.chat.completions.create(model=MODEL_ID, messages=MESSAGES, max_tokens=4)
    again = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    assert client.chat.completions.create(model=MODEL_ID, messages=again, max_tokens=4).choices == first.choices
    history = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "x"}]
    assert client.chat.completions.create(model=MODEL_ID, messages=history, max_tokens=4).choices[0].message.content


def test_the_template_gets_names_silence_tools_and_variables(chat: Serving, chat_model) -> None:
    text = "user Ann: Hi\nassistant: \ntool: 7\nloud assistant:"
    expected = chat_model.generate(text, max_new_tokens=8, do_sample=False)
    messages: list[Any] = [
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "7", "tool_call_id": "call-1"},
    ]
    create, variables = chat.client().chat.completions.create, {"chat_template_kwargs": {"voice": "loud "}}
    arguments = {"model": MODEL_ID, "messages": messages, "max_tokens": 8}
    answer = create(**arguments, extra_body=RAW | variables | {"top_k": -1, "temperature": 0})
    assert answer.choices[0].token_ids == expected.ids
    assert answer.usage.prompt_tokens == expected.stats.num_prompt_tokens
    with pytest.raises(openai.BadRequestError, match="leaves out messages of the role 'tool'"):
        create(**arguments, extra_body={"chat_template_kwargs": {"deaf": True}})


def test_top_k_of_minus_one_is_off(demo: Serving, demo_model) -> None:
    create = demo.client().completions.create
    texts = {
        create(model=MODEL_ID, prompt="def ", temperature=2, seed=3, extra_body={"top_k": k}).choices[0].text
        for k in (-1, 0)
    }
    assert len(texts) == 1


def test_a_chat_answer_may_fill_the_context(chat: Serving, chat_model) -> None:
    answer = chat.client().chat.completions.create(model=MODEL_ID, messages=MESSAGES)
    assert answer.usage.total_tokens == chat_model.max_positions
    assert answer.choices[0].finish_reason == "length"


def test_a_template_that_refuses_is_the_clients_fault(chat: Serving) -> None:
    turns = [{"role": "user", "content": str(i)} for i in range(5)]
    with pytest.raises(openai.BadRequestError, match="at most four turns"):
        chat.client().chat.completions.create(model=MODEL_ID, messages=turns)


def test_a_model_without_a_template_says_so(demo: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template, use /v1/completions"):
        demo.client().chat.completions.create(model=MODEL_ID, messages=MESSAGES)


def test_a_group_has_its_own_setting_and_the_same_text(chat: Serving) -> None:
    client = chat.client()
    default = client.completions.create(model=MODEL_ID, prompt="def")
    prose = client.completions.create(model=MODEL_ID, prompt="def", extra_body={"group": "prose"})
    assert prose.choices == default.choices
    assert "lossy" not in default.model_extra
    assert len(default.layerskip["drafted_by_position"]) == 4
    assert len(prose.layerskip["drafted_by_position"]) == 1
    with pytest.raises(openai.BadRequestError, match="group: must be one of prose; got 'verse'"):
        client.completions.create(model=MODEL_ID, prompt="def", extra_body={"group": "verse"})


def test_each_request_is_decoded_with_the_setting_of_its_regime_and_counted(tokenizer: Any) -> None:
    mask = SkipMask.early_exit(zoo.NUM_LAYERS, 2)
    regimes = (
        RegimeSetting(skip_mask=mask, gamma=1, sampling=Sampling.parse("t0.7_k0")),
        RegimeSetting(skip_mask=mask, gamma=0, sampling=Sampling.parse("t1.5")),
    )
    model = tiny_model(tokenizer, DecodeConfig(skip_mask=mask, gamma=4, sampling=Sampling(), regimes=regimes))
    asked: list[tuple[dict[str, Any], int]] = [
        ({"temperature": 0}, 4),
        ({}, 4),  # the generation config is greedy
        ({"temperature": 0.7, "extra_body": {"top_k": 0}}, 1),
        ({"temperature": 0.6, "top_p": 0.9}, 1),
        ({"top_p": 0.9}, 1),  # at temperature 1
    ]
    with serving(model) as server:
        name = "layerskip_requests_by_regime_total"

        def counted() -> dict[str, float]:
            lines = [line for line in server.request("GET", "/metrics")[2].splitlines() if line.startswith(name)]
            return {label: float(value) for label, _, value in (line.rpartition(" ") for line in lines)}

        assert counted() == {f'{name}{{regime="{regime}"}}': 0.0 for regime in ("greedy", "t0.7_k0", "t1.5")}
        for fields, gamma in asked:
            answer = server.client().completions.create(model=MODEL_ID, prompt="def ", max_tokens=12, seed=3, **fields)
            assert len(answer.layerskip["drafted_by_position"]) == gamma, fields
        assert list(counted().values()) == [2.0, 3.0, 0.0]


def test_an_answer_of_a_lossy_setting_says_so(tokenizer: Any) -> None:
    rule = ProbabilityAcceptance(threshold=0.3)
    config = DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 2), gamma=4, lossy=rule)
    model = LayerSkipModel(tiny_model(tokenizer).model, tokenizer, config, engine="eager", allow_lossy=True)
    with serving(model) as server:
        create, asked = server.client().completions.create, {"model": MODEL_ID, "prompt": "def ", "max_tokens": 12}
        answers = [create(**asked), *create(**asked, stream=True)]
    assert [one.model_extra["lossy"] for one in answers] == [lossy_label(rule)] * len(answers)


def test_penalties_biases_and_a_least_length_are_those_of_generate(demo: Serving, demo_model) -> None:
    client, prompt = demo.client(), "def read("
    asked = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"11": 3.0, "20": -100}}
    own = asked | {"logit_bias": {11: 3.0, 20: -100.0}}
    for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 3}):
        settings = {"do_sample": False} if "seed" not in sampling else sampling | {"do_sample": True}
        expected = demo_model.generate(prompt, max_new_tokens=24, **own, **settings)
        assert expected.ids != demo_model.generate(prompt, max_new_tokens=24, **settings).ids
        answer = client.completions.create(
            model=MODEL_ID, prompt=prompt, max_tokens=24, extra_body=RAW, **asked, **sampling
        )
        assert answer.choices[0].token_ids == expected.ids
    end = expected.ids[0]
    demo_model.model.generation_config.eos_token_id = end
    try:
        arguments = {"model": MODEL_ID, "prompt": prompt, "max_tokens": 9, **asked, **sampling}
        ends = client.completions.create(**arguments, extra_body=RAW)
        goes_on = client.completions.create(**arguments, extra_body={"min_tokens": 4, **RAW})
    finally:
        demo_model.model.generation_config.eos_token_id = None
    assert ends.choices[0].token_ids == [end]
    assert len(goes_on.choices[0].token_ids) > 3
    assert end not in goes_on.choices[0].token_ids[:4]


def test_log_probabilities_of_completions_streaming_and_not(demo: Serving, demo_model) -> None:
    client, prompt = demo.client(), "def read("
    expected = demo_model.generate(prompt, max_new_tokens=24, do_sample=False, logprobs=2)
    arguments = {"model": MODEL_ID, "prompt": prompt, "max_tokens": 24, "temperature": 0, "extra_body": RAW}
    whole = client.completions.create(**arguments, logprobs=2).choices[0]
    assert whole.token_ids == expected.ids
    found = whole.logprobs
    assert "".join(found.tokens) == whole.text == expected.text
    assert found.token_logprobs == [one.logprob for one in expected.logprobs]
    assert all(whole.text[at:].startswith(one) for at, one in zip(found.text_offset, found.tokens, strict=True))
    for told, token, one in zip(found.top_logprobs, found.tokens, expected.logprobs, strict=True):
        assert told[token] == one.logprob
        assert sorted(told.values(), reverse=True)[:2] == [value for _, value in one.top]
    events = [one.choices[0].logprobs for one in client.completions.create(**arguments, logprobs=2, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed_too = [value for event in events if event is not None for value in getattr(event, name)]
        assert streamed_too == getattr(found, name)
    stop = found.tokens[5] + found.tokens[6]
    cut = client.completions.create(**arguments, logprobs=0, stop=stop).choices[0]
    assert len(cut.logprobs.tokens) == len(cut.token_ids) < 24
    assert client.completions.create(**arguments).choices[0].logprobs is None


def test_an_echo_is_the_prompt_with_its_log_probabilities(demo: Serving, demo_model) -> None:
    """What harnesses read that rank given answers."""
    client, prompt = demo.client(), "def read(path):\n    return open(path).read()\n\n\ndef write("
    ids = demo_model.encode(prompt)
    rows = demo_model.target_logits(ids, num_logits=len(ids)).log_softmax(-1)
    arguments = {"model": MODEL_ID, "max_tokens": 3, "temperature": 0, "echo": True, "extra_body": RAW}
    for given in (prompt, ids, [ids, prompt]):
        for choice in client.completions.create(prompt=given, logprobs=1, **arguments).choices:
            found = choice.logprobs
            assert choice.text == "".join(found.tokens) == prompt + "".join(found.tokens[len(ids) :])
            assert (len(found.tokens), found.token_logprobs[0], found.top_logprobs[0]) == (len(ids) + 3, None, None)
            assert [choice.text[at:].startswith(one) for at, one in zip(found.text_offset, found.tokens, strict=True)]
            for i, token in enumerate(ids[1:], start=1):
                assert found.token_logprobs[i] == pytest.approx(float(rows[i - 1, token]), abs=1e-4)
                assert max(found.top_logprobs[i].values()) == pytest.approx(float(rows[i - 1].max()), abs=1e-4)
            assert len(choice.token_ids) == 3
    events = list(client.completions.create(prompt=prompt, logprobs=1, stream=True, **arguments))
    told = [one.choices[0].logprobs for one in events]
    assert [value for one in told if one is not None for value in one.token_logprobs] == found.token_logprobs
    assert "".join(one.choices[0].text for one in events) == choice.text
    plain = client.completions.create(prompt=prompt, **arguments).choices[0]
    assert (plain.text, plain.logprobs) == (choice.text, None)
    alone = client.completions.create(prompt=ids[:1], logprobs=1, **arguments).choices[0]
    assert len(alone.logprobs.tokens) == 4
    assert alone.logprobs.token_logprobs[0] is None
    assert "".join(alone.logprobs.tokens) == alone.text


def test_log_probabilities_of_a_chat_streaming_and_not(chat: Serving, chat_model) -> None:
    client = chat.client()
    arguments = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": "naïve 日本"}],
        "max_tokens": 12,
        "seed": 4,
    }
    arguments |= {"temperature": 1.4, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**arguments).choices[0]
    content = whole.logprobs.content
    ids = chat_model.tokenizer.apply_chat_template(arguments["messages"], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    expected = chat_model.generate(ids, max_new_tokens=12, do_sample=True, temperature=1.4, seed=4, logprobs=3)
    assert [one.logprob for one in content] == [one.logprob for one in expected.logprobs]
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [
        [value for _, value in one.top] for one in expected.logprobs
    ]
    assert all(bytes(one.bytes).decode() == one.token for one in content)
    events = list(client.chat.completions.create(**arguments, stream=True))
    told = [one for event in events if (found := event.choices[0].logprobs) is not None for one in found.content]
    assert [one.logprob for one in told] == [one.logprob for one in content]
    plain = client.chat.completions.create(**arguments | {"logprobs": None, "top_logprobs": None})
    assert plain.choices[0].logprobs is None


def test_models_are_listed_and_found(chat: Serving) -> None:
    client = chat.client()
    assert [model.id for model in client.models.list()] == [MODEL_ID]
    assert client.models.retrieve(MODEL_ID).owned_by == "layerskip"
    for ask in (lambda: client.models.retrieve("gpt-9"), lambda: client.completions.create(model="g/9", prompt="x")):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        assert raised.value.code == "model_not_found"


def test_harmless_fields_are_dropped_and_meaningful_ones_refused(chat: Serving) -> None:
    client = chat.client()
    arguments = {"model": MODEL_ID, "prompt": "def"}
    plain = client.completions.create(**arguments)
    harmless = {"n": 1, "logit_bias": {}, "echo": False, "logprobs": None, "presence_penalty": 0.0, "user": "me"}
    extra = {"metadata": {"a": "b"}, "store": True, "logprobs": False}
    assert client.completions.create(**arguments, **harmless, extra_body=extra).choices == plain.choices
    for name, value in {"best_of": 3, "suffix": "x"}.items():
        with pytest.raises(openai.BadRequestError, match=f"{name}: not supported by this server"):
            client.completions.create(**arguments, **{name: value})
    with pytest.raises(openai.BadRequestError, match=r"turbo'?: unknown field"):
        client.completions.create(**arguments, extra_body={"turbo": True})


def test_metrics_add_up_with_the_answers(chat: Serving) -> None:
    before = chat.metrics()
    client = chat.client()
    answers = [client.completions.create(model=MODEL_ID, prompt="def " * n, max_tokens=8) for n in (1, 2, 3)]
    after = chat.metrics()

    def grown(name: str) -> float:
        return after[f"layerskip_{name}"] - before[f"layerskip_{name}"]

    columns = {
        "prompt_tokens": "num_prompt_tokens",
        "emitted_tokens": "num_emitted",
        "drafted_tokens": "num_drafted",
        "accepted_tokens": "num_accepted",
        "rounds": "num_rounds",
        "target_only_steps": "num_target_only",
    }
    for metric, column in columns.items():
        assert grown(f"{metric}_total") == sum(answer.layerskip[column] for answer in answers), metric
    assert grown("emitted_tokens_total") == 24
    assert grown("decode_seconds_total") == pytest.approx(sum(answer.layerskip["decode_s"] for answer in answers))
    assert grown("requests_total{200}") == 4  # and the first look at the metrics
    assert grown("time_to_first_token_seconds_count") == 3
    ratio = after["layerskip_accepted_tokens_total"] / after["layerskip_drafted_tokens_total"]
    assert after["layerskip_acceptance_rate"] == pytest.approx(ratio)
    assert after["layerskip_tokens_per_second"] > 0
    assert after["layerskip_queue_length"] == after["layerskip_running_requests"] == 0
