"""The demo's maker at its tiny size, and the files it shipped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from studies.demo import corpus, evaluate, export, make_model, training
from studies.demo.recipe import BALANCE, RECIPES, Recipe, run_layers, training_loss

DEMO = Path(make_model.__file__).parent
MODEL = DEMO / "model"
MAX_SHIPPED_BYTES = 25_000_000
MAX_HELD_OUT_PROMPT_LOSS = 3.0  # nats a token; measured 2.88


def tiny_settings(recipe: Recipe = RECIPES["layerskip"], num_steps: int = 12, seed: int = 0) -> training.Settings:
    recipe = dataclasses.replace(recipe, first_exit=1)  # the tiny model has four layers
    return training.Settings(training.SIZES["tiny"], recipe, seed, num_steps, 1.0, 0.5, "cpu", torch.bfloat16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model only waits for its second thread, for seconds when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_stream() -> torch.Tensor:
    """A predictable stream: a token is mostly the one before plus one."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.where(torch.rand(6_000, generator=generator) < 0.9, 1, 7)
    return steps.cumsum(0) % 300 + 2


def tiny_run(settings: training.Settings | None = None) -> training.Run:
    return training.Run(settings or tiny_settings(), tiny_stream(), "corpus", end_of_text=0)


def same_weights(a: LlamaForCausalLM, b: LlamaForCausalLM) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small library: modules of functions long enough to start prompts at, some of which repeat themselves; tests, a
    copy and a table."""
    root = tmp_path_factory.mktemp("stdlib")
    (root / "pkg" / "test").mkdir(parents=True)
    for index in range(12):
        lines = [f"import module_{index}, other_{index * 7}"]
        for number in range(14):
            draw = random.Random(f"{index} {number}")
            lines += ["", f"def function_{draw.randrange(10**6)}(argument, option={draw.randrange(10**6)}):"]
            lines += [
                f"    name_{draw.randrange(10**6)} = argument.{draw.choice(['add', 'pop', 'find'])}"
                f"({draw.randrange(10**6)}, {draw.randrange(10**6)})"
                for _ in range(14)
            ]
        receiver, method = ("".join(random.Random(f"{index} {i}").choices("abcdefghijklmnop", k=9)) for i in "ab")
        lines += ["", "def repeats_itself(argument):"]
        lines += [f"    {receiver}.{method}({letter}=argument)" for letter in "qrstuvwxyz" * 2]
        (root / f"module_{index}.py").write_text("\n".join(lines) + "\n")
    (root / "copy.py").write_text((root / "module_1.py").read_text())
    (root / "pkg" / "test" / "test_it.py").write_text("assert True\n")
    (root / "pkg" / "table.py").write_text("decoding_table = (\n    'x'\n)\n")
    return root


def test_corpus_leaves_out_tests_copies_and_tables(library: Path) -> None:
    paths = [module.path for module in corpus.read_modules(library)]
    assert len(paths) == 12
    assert len(set(paths)) == 12
    assert not any("test" in path or "table" in path for path in paths)


def test_no_module_is_in_two_parts(library: Path) -> None:
    split = corpus.split_modules(corpus.read_modules(library), num_tuning=3, num_held_out=3)
    parts = [{m.path for m in part} for part in (split.train, split.tuning, split.held_out)]
    assert [len(part) for part in parts] == [6, 3, 3]
    assert len(set.union(*parts)) == 12


@pytest.mark.parametrize("kind", [{}, {"linear_attention": True}, {"experts": 8}], ids=str)
def test_forward_without_skips_is_the_models_own(kind: dict[str, Any]) -> None:
    settings = tiny_settings()
    model = tiny_run(dataclasses.replace(settings, size=dataclasses.replace(settings.size, **kind))).model.eval()
    assert hasattr(model.model.layers[0], "linear_attn") == ("linear_attention" in kind)
    assert hasattr(model.model.layers[0].mlp, "experts") == ("experts" in kind)
    ids = torch.arange(2, 22).reshape(2, 10)
    hidden, at_exit = run_layers(model, ids, evaluate.no_skip(model), exit_layer=2)
    with torch.inference_mode():
        torch.testing.assert_close(model.lm_head(model.model.norm(hidden)), model(ids).logits)
    skipped, _ = run_layers(model, ids, [(False, False)] * 2 + [(True, True)] * 2)
    assert at_exit is not None
    assert torch.equal(at_exit, skipped)


def test_a_mixture_learns_to_use_its_experts_alike() -> None:
    """Its loss has, besides the target's own, a part that is least where they are."""
    settings = tiny_settings()
    run = tiny_run(dataclasses.replace(settings, size=dataclasses.replace(settings.size, experts=8)))
    ids, labels = training.batch_of(run.stream, run.settings, 0)
    found = []
    for size in (0.0, 10.0):  # no preferences, and strong ones
        with torch.no_grad():
            for layer in run.model.model.layers:
                layer.mlp.gate.weight.normal_(std=size, generator=torch.Generator().manual_seed(0))
        loss, target = training_loss(run.model, ids, labels, RECIPES["stock"], random.Random(0))
        found.append(loss.item() - target)
    assert found[0] == pytest.approx(BALANCE * training.EXPERTS_PER_TOKEN, rel=1e-2)
    assert found[1] > found[0]


def test_late_exit_learns_the_targets_distribution() -> None:
    run = tiny_run()
    ids, labels = training.batch_of(run.stream, run.settings, 0)
    recipe = Recipe("test", exit_scale=2.0, late_from=0.5, late_last_exit=1, late_distill=True)
    loss, target = training_loss(run.model, ids, labels, recipe, random.Random(0), progress=0.5)
    hidden, at_exit = run_layers(run.model, ids, evaluate.no_skip(run.model), exit_layer=1)
    assert at_exit is not None
    target_probs = run.model.lm_head(run.model.model.norm(hidden)).softmax(-1)
    exit_log_probs = run.model.lm_head(run.model.model.norm(at_exit)).log_softmax(-1)
    expected = -(target_probs * exit_log_probs).sum(-1).mean().item()
    assert loss.item() == pytest.approx(target + 2.0 * expected, rel=1e-4)
    loss.backward()
    assert run.model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_recipe_on_drops_deep_layers_more_and_never_exits_early() -> None:
    recipe = Recipe("layerskip", dropout_max=0.5, exit_scale=0.3, first_exit=3)
    rates = recipe.dropout_rates(12)
    assert rates[0] == 0
    assert rates[-1] == 0.5
    assert rates == sorted(rates)
    rng = random.Random(0)
    draws = [recipe.draw_skip(12, rng) for _ in range(2_000)]
    for sublayer in (0, 1):
        assert sum(draw[11][sublayer] for draw in draws) / 2_000 == pytest.approx(0.5, abs=0.05)
        assert not any(draw[0][sublayer] for draw in draws)
    assert any(draw[11][0] != draw[11][1] for draw in draws)  # attention and MLP are dropped apart
    exits = {recipe.draw_exit(12, rng, 0.5) for _ in range(500)}
    assert exits == {(layer, 0.3 * (layer / 12)) for layer in range(3, 12)}
    late = dataclasses.replace(recipe, late_from=0.6, late_last_exit=5)
    assert {late.draw_exit(12, rng, 0.6) for _ in range(500)} == {(layer, 0.3) for layer in (3, 4, 5)}
    assert {late.draw_exit(12, rng, 0.59) for _ in range(500)} == exits


@pytest.mark.slow
def test_training_learns_and_recipes_part_ways(tmp_path: Path) -> None:
    runs = [tiny_run(tiny_settings(recipe, 40)) for recipe in (RECIPES["layerskip"], RECIPES["stock"])]
    assert same_weights(runs[0].model, runs[1].model)
    untrained = evaluate.held_out_loss(runs[0].model, tiny_stream(), window=32)
    for run in runs:
        assert training.train(run, tmp_path / f"{run.settings.recipe.name}.pt")
        assert evaluate.held_out_loss(run.model, tiny_stream(), window=32) < untrained - 0.3
    assert not same_weights(runs[0].model, runs[1].model)


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    whole = tiny_run()
    assert training.train(whole, tmp_path / "whole.pt")
    first = tiny_run()
    assert not training.train(first, tmp_path / "parts.pt", stop_after=5)
    second = tiny_run()
    second.load(tmp_path / "parts.pt")
    assert second.step == 5
    assert training.train(second, tmp_path / "parts.pt")
    assert same_weights(whole.model, second.model)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run = tiny_run()
    run.save(tmp_path / "checkpoint.pt")
    for other in (tiny_settings(RECIPES["stock"]), tiny_settings(seed=1)):
        with pytest.raises(ValueError, match=r"recipe|seed"):
            tiny_run(other).load(tmp_path / "checkpoint.pt")


def test_a_budget_of_time_moves_rate_and_recipe_by_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks 6 s at each look: a step takes 6 s, so 0.5 minutes are 5 steps, whatever the machine."""
    seen: list[tuple[float, float]] = []
    loss_of = training.training_loss

    def watch(*args: Any) -> tuple[torch.Tensor, float]:
        seen.append((args[-1], run.optimizers[0][0].param_groups[0]["lr"]))
        return loss_of(*args)

    ticks = itertools.count(0, 6.0)
    monkeypatch.setattr(training, "training_loss", watch)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    settings = dataclasses.replace(tiny_settings(), num_steps=None, minutes=0.5)
    run = tiny_run(settings)
    assert not training.train(run, tmp_path / "checkpoint.pt", stop_after=2)
    run = tiny_run(settings)
    run.load(tmp_path / "checkpoint.pt")
    assert run.progress == pytest.approx(0.4)
    assert training.train(run, None)
    assert run.step == 5
    shares = [share for share, _ in seen[::2]]  # two parts a step
    assert shares == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    peak = settings.size.matrix_lr
    assert [rate / peak for _, rate in seen[::2]] == pytest.approx([1 / 100, 2 / 20, 3 / 20, 4 / 20, 5 / 20])
    assert training.lr_scale(50, 0.9, settings) == pytest.approx(0.2)  # the last half of the budget: linear to zero
    assert training.lr_scale(50, 1.0, settings) == 0


def test_the_maker_refuses_bad_flags_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["--size", "tiny", "--work-dir", str(tmp_path)]
    for flags, message in (
        (["--seconds", "0"], "--seconds: must be above 0, got 0.0"),
        (["--batch", "3"], "batch must be a positive multiple of 2 for this size, got 3"),
        (["--dropout-max", "2"], "dropout_max must lie in [0, 1), got 2.0"),
        (["--corpus", str(tmp_path)], "modules: at least 40 must be long enough, got 0"),
    ):
        assert make_model.main([*start, *flags]) == 2
        assert capsys.readouterr().err == f"studies.demo.make_model: error: {message}\n"


def test_padding_kept_by_a_tokenizer_is_no_text(library: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The shipped tokenizer's file asks for padding: its stream had 16 tokens for each one of the text."""
    modules = corpus.read_modules(library)[:3]
    tokenizer(["a", "a b c"], padding=True)
    stream = corpus.token_stream(tokenizer, modules)
    assert tokenizer.pad_token_id not in stream
    assert tokenizer.decode(stream) == "".join(m.text + corpus.END_OF_TEXT for m in modules)


def test_export_writes_a_loadable_model(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FEW_PROMPTS", {"tuning": 2, "held_out": 1})
    split = corpus.split_modules(corpus.read_modules(library), num_tuning=3, num_held_out=3)
    settings = tiny_settings(num_steps=2)
    settings = dataclasses.replace(settings, size=dataclasses.replace(settings.size, vocab=320, own_tokenizer=True))
    tokenizer = make_model.load_tokenizer(tmp_path, split, settings.size)
    stream = corpus.token_stream(tokenizer, split.train)
    run = training.Run(settings, stream, split.fingerprint(), int(tokenizer.eos_token_id))
    assert training.train(run, tmp_path / "checkpoint.pt")
    out = tmp_path / "model"
    out.mkdir()
    (out / "stale").touch()
    facts = export.training_facts(run, len(stream))
    export.export(run.model, tokenizer, split, facts, out)
    assert not (out / "stale").exists()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    expected = {name: value.to(torch.bfloat16) for name, value in run.model.state_dict().items()}
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert json.loads((out / "tokenizer.json").read_text())["padding"] is None
    assert len((tmp_path / "tuning.jsonl").read_text().splitlines()) == 4
    assert len((tmp_path / "held_out.jsonl").read_text().splitlines()) == 2


# The shipped files.


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


def prompts_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_shipped_folder_is_small_and_safe() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_SHIPPED_BYTES
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "naïve – “quotes” 日本語 🙂 \u0000\u0007\u200b",
        "\t\r\n  mixed \t white \r\n\n",
        "".join(map(chr, range(256))),
        "a , b . c ! don't 're",
        "",
    ],
)
def test_shipped_tokenizer_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < 4096 for token in ids)


@pytest.mark.slow
def test_shipped_model_loads_and_knows_python(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.bfloat16
    assert 12 <= model.config.num_hidden_layers <= 16
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    total, count = 0.0, 0
    with torch.inference_mode():
        for prompt in prompts_of("held_out"):
            ids = tokenizer(prompt["prompt"], return_tensors="pt")["input_ids"]
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    assert total / count < MAX_HELD_OUT_PROMPT_LOSS
