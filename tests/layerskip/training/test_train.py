"""`python -m layerskip.train`: learns, goes on where it was stopped, and says what is wrong with its input."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, train
from layerskip.analysis.teacher_forcing.by_weights import WeightsForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText
from layerskip.training.continuations import FILE_NAME, Continuations, own_prompts
from layerskip.training.data import DataOptions, Sequences, Text, make_sequences
from layerskip.training.eagle import CHECKPOINT_NAME, TrainOptions, train_eagle, usual_aux_layers
from layerskip.training.teacher import Teacher
from tests.layerskip import zoo


def quiet(_line: str) -> None:
    pass


def sequences() -> Sequences:
    prompts = [zoo.prompt_of(6, seed=i) for i in range(6)]
    own = [Text((*one, *zoo.greedy_reference("llama", one)), len(one)) for one in prompts]
    return Sequences(tuple(own[1:]), (own[0], Text(own[1].ids[:11])))


def model() -> LayerSkipModel:
    return LayerSkipModel(zoo.model_of("llama"), engine="eager")


def test_it_learns_and_leaves_the_model_alone(tmp_path: Path) -> None:
    one = model()
    before = one.weights_fingerprint()
    untrained = train_eagle(one, sequences(), tmp_path / "0", TrainOptions(steps=1, depth=3), tell=quiet)
    trained = train_eagle(
        one, sequences(), tmp_path / "1", TrainOptions(steps=60, depth=3, learning_rate=0.02), tell=quiet
    )
    agreement = [one.facts["held_out_agreement"] for one in (untrained, trained)]
    assert len(agreement[1]) == 3
    assert agreement[1][0] > agreement[0][0] + 0.1
    assert LayerSkipModel(zoo.model_of("llama"), engine="eager").weights_fingerprint() == before
    assert not any(parameter.grad is not None for parameter in zoo.model_of("llama").parameters())
    assert not (tmp_path / "1" / CHECKPOINT_NAME).exists()


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    options = TrainOptions(steps=12, batch=3, depth=2)
    whole = train_eagle(model(), sequences(), tmp_path / "whole", options, tell=quiet)

    now = 0.0

    def hourly() -> float:  # so that every step writes a checkpoint
        nonlocal now
        now += 3600.0
        return now

    def stop_at_step_7(line: str) -> None:
        if line.startswith("step 7:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_eagle(model(), sequences(), tmp_path / "cut", options, tell=stop_at_step_7, clock=hourly)
    told: list[str] = []
    cut = train_eagle(model(), sequences(), tmp_path / "cut", options, tell=told.append)
    assert told[0].startswith("going on from step 6")
    assert cut.weights.fingerprint == whole.weights.fingerprint


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    def stop_at_step_2(line: str) -> None:
        if line.startswith("step 2:"):
            raise KeyboardInterrupt

    hourly = iter(range(0, 10**9, 3600)).__next__
    options = TrainOptions(steps=9, depth=2)
    with pytest.raises(KeyboardInterrupt):
        train_eagle(model(), sequences(), tmp_path, options, tell=stop_at_step_2, clock=hourly)
    with pytest.raises(ValueError, match=r"checkpoint.pt: is of a training with other depth, seed; remove it or"):
        train_eagle(model(), sequences(), tmp_path, TrainOptions(steps=9, depth=3, seed=1), tell=quiet)
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"checkpoint.pt: cannot be read"):
        train_eagle(model(), sequences(), tmp_path, TrainOptions(steps=9, depth=2), tell=quiet)


def test_prompts_are_continued_by_the_model_itself(text_model: LayerSkipModel, tmp_path: Path) -> None:
    prompts = ["def read(path):", "import os, sys", "class A:"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    options = DataOptions(window=40, new_tokens=20, temperatures=(0.0,), batch=2)
    found = make_sequences(text_model, [file], tmp_path / "out", options, quiet)
    every = {*found.training, *found.held_out}
    for prompt in prompts:
        ids = text_model.encode(prompt)
        own = text_model.generate(prompt, max_new_tokens=20, do_sample=False).ids
        assert Text((*ids, *own), len(ids)) in every


def test_continuations_are_made_once(text_model: LayerSkipModel, tmp_path: Path, monkeypatch: Any) -> None:
    prompts = [tuple(text_model.encode(one)) for one in ("def read(path):", "import os, sys", "class A:")]

    def made(count: int, temperature: float = 1.0, seed: int = 0) -> list[tuple[int, ...]]:
        own = Continuations(text_model, tmp_path, batch=2, seed=seed)
        return list(own.of(prompts[:count], temperature, 8, lambda done: None))

    first = made(3)
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text() + '["half a li')  # killed while it wrote
    greedy = made(3, temperature=0.0)
    monkeypatch.setattr(text_model.model, "generate", None)
    assert (made(3), made(3, temperature=0.0)) == (first, greedy)
    assert made(2) == first[:2]
    for changed in ({"count": 1}, {"count": 3, "seed": 1}):
        with pytest.raises(TypeError, match="not callable"):
            made(**changed)


def test_continuations_of_a_prompt_are_held_out_together(text_model: LayerSkipModel, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"def read_{i}(path):"}) + "\n" for i in range(8)))
    options = DataOptions(window=40, new_tokens=12, temperatures=(0.0, 1.0), held_out_share=0.5)
    found = make_sequences(text_model, [file], tmp_path / "out", options, quiet)
    prompts = [{one.ids[: one.given] for one in part} for part in (found.training, found.held_out)]
    assert [len(one) for one in prompts] == [4, 4]
    assert not prompts[0] & prompts[1]


def test_drafts_are_learnt_and_judged_behind_prompts() -> None:
    texts = [Text((1, 2, 3, 4, 5, 6), given=3), Text((1, 2, 3, 4))]
    lesson = Teacher(model(), (1,), None).lesson(texts)
    # Row 2 has the state of token 2 and token 3, the first that the target said itself; of it come drafts of token 4.
    assert [lesson.drafts(d).nonzero().tolist() for d in range(3)] == [
        [[0, 2], [0, 3], [0, 4], [1, 0], [1, 1], [1, 2]],
        [[0, 3], [0, 4], [1, 1], [1, 2]],
        [[0, 4], [1, 2]],
    ]


@pytest.mark.parametrize("few", [None, 20])
def test_what_the_target_says_is_kept_and_is_what_it_says(few: int | None, monkeypatch: Any) -> None:
    one, text = model(), Text(zoo.prompt_of(12))
    ids = None if few is None else torch.arange(few)
    teacher = Teacher(one, (0, 2), ids)
    lesson = teacher.lesson([Text(zoo.prompt_of(9, seed=1)), text])
    logits: Any = one.model(torch.tensor([text.ids]), output_hidden_states=True)
    probs = logits.logits[0, 1:].softmax(dim=-1)
    torch.testing.assert_close(lesson.probs[1], probs.gather(-1, lesson.ids[1]))
    best = (probs if few is None else probs[:, :few]).sort(dim=-1, descending=True).values
    torch.testing.assert_close(lesson.probs[1], best[:, : lesson.probs.shape[-1]])
    assert lesson.top[1].tolist() == probs.argmax(dim=-1).tolist()
    states = torch.cat([logits.hidden_states[1], logits.hidden_states[3]], dim=-1)[0, :-1]
    torch.testing.assert_close(lesson.states[1], states)
    for i, (_, said) in enumerate(Teacher(one, (0, 2), ids)._ask([Text(zoo.prompt_of(9, seed=1)), text])):
        for of_both, alone in zip(said, (lesson.states, lesson.ids, lesson.probs, lesson.top), strict=True):
            torch.testing.assert_close(of_both, alone[i, : len(of_both)], check_dtype=False)
    monkeypatch.setattr(one, "model", copy.deepcopy(one.model))
    monkeypatch.setattr(one.model, "forward", None)
    again = teacher.lesson([text])
    assert torch.equal(again.states[0], lesson.states[1])
    with pytest.raises(TypeError, match="not callable"):
        teacher.lesson([Text(zoo.prompt_of(8))])


def test_where_no_memory_is_left_the_target_is_asked_again(monkeypatch: Any) -> None:
    one, text = model(), Text(zoo.prompt_of(12))
    monkeypatch.setattr("layerskip.training.teacher._MOST_BYTES", 0)
    teacher = Teacher(one, (0, 2), None)
    lesson = teacher.lesson([text, text])
    assert torch.equal(lesson.states[0], lesson.states[1])
    assert torch.equal(teacher.lesson([text]).states[0], lesson.states[0])
    monkeypatch.setattr(one, "model", copy.deepcopy(one.model))
    monkeypatch.setattr(one.model, "forward", None)
    with pytest.raises(TypeError, match="not callable"):
        teacher.lesson([text])


class _Said:
    """In place of `Continuations`: what a model would have said."""

    def __init__(self, *texts: tuple[int, ...]) -> None:
        self.texts = texts
        self.asked: tuple[int, ...] = ()

    def of(self, prompts: Any, temperature: float, longest: int, tell: Any) -> Any:
        assert (len(prompts), temperature, longest) == (len(self.texts), 1.0, 9)
        self.asked = prompts[0]
        return iter(self.texts)


def test_own_prompts_are_what_a_user_says_in_the_template(tokenizer: Any) -> None:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = (
        "Hello.{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    model = LayerSkipModel(zoo.build("llama", vocab_size=len(tokenizer)), chatty, engine="eager")
    end = tokenizer.eos_token_id
    model.model.generation_config.eos_token_id = end

    def encoded(text: str) -> tuple[int, ...]:
        return tuple(chatty(text, add_special_tokens=False)["input_ids"])

    said = _Said((*encoded("import os"), end), encoded("no end"), (*encoded("import os"), end), (end,))
    found = own_prompts(said, model, 4, 9, lambda done: None)
    assert said.asked == encoded("Hello.[user]")
    assert found == [encoded("Hello.[user]import os[assistant]")]


def test_a_narrow_head_chooses_among_the_commonest_ids(tmp_path: Path) -> None:
    size = zoo.model_of("llama").config.vocab_size
    every, all_of_them, few = (
        train_eagle(
            model(), sequences(), tmp_path / str(i), TrainOptions(steps=5, depth=2, draft_vocab=one), tell=quiet
        )
        for i, one in enumerate((None, size, 5))
    )
    assert all_of_them.facts["held_out_agreement"] == pytest.approx(every.facts["held_out_agreement"], abs=0.05)
    counts = Counter(token for one in sequences().training for token in one.ids)
    found = load_file(tmp_path / "2" / "model.safetensors")["draft_ids"].tolist()
    assert len(found) == 5
    assert [counts[one] for one in found] == sorted(counts.values(), reverse=True)[:5]

    target = LayerSkipModel(zoo.model_of("llama"), engine="fused")
    for weights, most in ((few.weights, 5), (few.weights.narrowed(2), 2), (few.weights.narrowed(9), 5)):
        none = SkipMask.none(target.num_layers)
        target.check_config(DecodeConfig(skip_mask=none, gamma=3, drafter="eagle", draft_weights=weights))
        forcing = WeightsForcing(target.engine, [ForcedText(zoo.prompt_of(6), zoo.prompt_of(9, seed=1))])
        logits = forcing.logits(weights, 0, 1)
        assert set(logits.isfinite().any(0).any(0).nonzero().flatten().tolist()) == set(found[:most])


def test_a_bfloat16_model_trains_weights_in_float32(tmp_path: Path) -> None:
    one = LayerSkipModel(copy.deepcopy(zoo.model_of("llama")).to(torch.bfloat16), engine="eager")
    trained = train_eagle(one, sequences(), tmp_path, TrainOptions(steps=60, depth=2, learning_rate=0.02), tell=quiet)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    untrained = train_eagle(one, sequences(), tmp_path / "0", TrainOptions(steps=1, depth=2), tell=quiet)
    agreement = [one.facts["held_out_agreement"][0] for one in (untrained, trained)]
    assert agreement[1] > agreement[0] + 0.1


def test_the_usual_depths_lie_before_the_last_layer() -> None:
    found = {count: usual_aux_layers(count) for count in (1, 2, 3, 4, 12, 32)}
    assert found == {1: (), 2: (0,), 3: (0, 1), 4: (1,), 12: (1, 5), 32: (1, 15)}


@pytest.fixture
def folder(text_model: LayerSkipModel, tmp_path: Path) -> Path:
    text_model.model.save_pretrained(tmp_path / "model")
    text_model.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("def read(self):\n    return self.text\n" * 40)
    return tmp_path


def test_the_command_writes_weights_that_generate_takes(folder: Path, capsys: Any, refused: Any) -> None:
    from layerskip import generate

    out = folder / "weights"
    common = ["--model", str(folder / "model"), "--device", "cpu"]
    given = ["--data", str(folder / "text.txt"), "--out", str(out), "--steps", "3", "--window", "32"]
    assert train.main([*common, *given]) == 0
    said = capsys.readouterr().out
    assert "held out, the target says what is drafted" in said
    assert json.loads((out / "config.json").read_text())["shape"]["aux_layers"] == [1]
    assert torch.is_inference_mode_enabled() is False
    drafting = ["--drafter", "eagle", "--draft-weights", str(out), "--gamma", "3", "--engine", "fused"]
    assert generate.main([*common, *drafting, "--prompt", "def read(", "--max-new-tokens", "8", "--compare"]) == 0
    assert "tokens identical: yes" in capsys.readouterr().err
    drafting[1] = "draft_model"
    error = refused(generate.main, [*common, *drafting, "--prompt", "def read("])
    assert f"--drafter: {out} has weights of eagle, got draft_model" in error
    before = (out / "config.json").read_bytes()
    assert "holds trained draft weights, which configs may name" in refused(train.main, [*common, *given])
    assert (out / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--data", "nowhere.txt"], "--data: no such file: nowhere.txt"),
        (["--minutes", "0"], "--minutes: must be above 0, got 0"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--temperatures", "-1"], "--temperatures: must be at least 0"),
        (["--aux-layers", "2", "0"], "--aux-layers: must be ascending layers of 0 to 2, got [2, 0]"),
        (["--own-prompts", "4"], "--own-prompts: needs a tokenizer with a chat template; give texts or prompts"),
        (["--draft-vocab", "9999999"], "--draft-vocab: draft_vocab must be at most the model's"),
        (["--aux-layers", "3"], "--aux-layers: must be ascending layers of 0 to 2, got [3]"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(changed: list[str], message: str, folder: Path, refused: Any) -> None:
    given = [
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "text.txt"),
        "--out",
        str(folder / "out"),
        *changed,
    ]
    error = refused(train.main, given)
    assert message in error
    assert not (folder / "out").exists()


def test_what_lies_where_weights_are_to_go_is_not_overwritten(folder: Path, refused: Any) -> None:
    given = ["--model", str(folder / "model"), "--data", str(folder / "text.txt"), "--steps", "1"]
    before = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    error = refused(train.main, [*given, "--out", str(folder / "model")])
    assert "holds other files of these names, a model's perhaps; use another" in error
    assert {path.name: path.read_bytes() for path in (folder / "model").iterdir()} == before
    assert "--out: must be a folder, got the file" in refused(train.main, [*given, "--out", str(folder / "text.txt")])


def test_data_without_text_is_refused(folder: Path, refused: Any) -> None:
    for content, message in ((b" \n", "must hold at least 2 texts"), (b"\xff\xfe\x00", "is not UTF-8 text")):
        (folder / "empty.txt").write_bytes(content)
        given = ["--model", str(folder / "model"), "--data", str(folder / "empty.txt"), "--out", str(folder / "out")]
        assert message in refused(train.main, given)
        assert not (folder / "out").exists()
