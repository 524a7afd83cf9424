"""Write the demo's shipped files: weights, tokenizer, model card, training facts and prompts."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from layerskip.machine.host import device_name
from studies.demo import corpus, evaluate
from studies.demo.make_prompts import NUM_PROMPTS, make_prompts, write_prompts

if TYPE_CHECKING:
    from studies.demo.training import Run

log = logging.getLogger("demo")
FEW_PROMPTS = {"tuning": 12, "held_out": 12}  # of each category, for a size that is not shipped: they take seconds
SAMPLE = 19  # the tuning prompt that `opens` whose continuation the card shows: one that does not fall into repetition
HERE = Path(__file__).resolve().parent


def training_facts(run: Run, corpus_tokens: int) -> dict[str, Any]:
    """What the model card and training.json say about the run."""
    settings = run.settings
    recipe, size = settings.recipe, settings.size
    num_tokens = run.step * size.window * size.batch
    return {
        "size": size.name,
        "recipe": recipe.name,
        **{name: value for name, value in dataclasses.asdict(recipe).items() if name != "name"},
        "layers": size.layers,
        "last_exit": size.layers - 1,
        "hidden_size": size.hidden,
        "vocab": size.vocab,
        "window": size.window,
        "batch": size.batch,
        "seed": settings.seed,
        "steps": run.step,
        "planned_steps": settings.num_steps,
        "planned_minutes": settings.minutes if settings.num_steps is None else None,
        "training_tokens": num_tokens,
        "epochs": round(num_tokens / corpus_tokens, 1),
        "corpus_tokens": corpus_tokens,
        "training_minutes": round(run.seconds / 60, 1),
        "training_tokens_per_s": round(num_tokens / max(run.seconds, 1e-9)),
        "training_loss": round(run.recent_loss, 4) if run.step else None,
        "device": device_name(torch.device(settings.device)),
        "threads": torch.get_num_threads(),
        "autocast": str(settings.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def export(
    trained: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    split: corpus.Split,
    facts: dict[str, Any],
    out: Path,
) -> dict[str, Any]:
    """Measure the model as it will ship (bfloat16 weights), write folder `out` in one swap and the prompts beside it.

    Returns the facts with the measured ones added.
    """
    model = copy.deepcopy(trained).to(torch.bfloat16).eval()
    prompts = make_prompts(split, tokenizer, NUM_PROMPTS if facts["size"] == "demo" else FEW_PROMPTS)
    tuning = prompts["tuning"]
    facts = facts | measured_facts(model, tokenizer, split, int(facts["window"]))
    opens = [p for p in tuning if p["category"] == "opens"]
    shown = opens[SAMPLE % len(opens)]
    sample = greedy_sample(model, tokenizer, shown["prompt"])
    log.info("losses: tuning %s held out %s\n%s", facts["tuning_loss"], facts["held_out_loss"], sample)

    out.parent.mkdir(parents=True, exist_ok=True)
    for part, records in prompts.items():
        write_prompts(out.parent / f"{part}.jsonl", records)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(model, partial)
    save_tokenizer(tokenizer, partial)
    (partial / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    card = Template(card_of(facts).read_text(encoding="utf-8"))
    text = card.substitute(facts, sample=sample, sample_id=shown["id"])
    (partial / "README.md").write_text(text, encoding="utf-8")
    for path in partial.iterdir():
        path.chmod(0o644)
    swap(partial, out)
    log.info("exported to %s", out)
    return facts


def card_of(facts: Mapping[str, Any]) -> Path:
    """The model card's template: of the two shipped models, or of one made for a study and not shipped."""
    if facts["size"] != "demo":
        return HERE / "card_other.md"
    return HERE / ("card_stock.md" if facts["recipe"] == "stock" else "card.md")


def measured_facts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, split: corpus.Split, window: int
) -> dict[str, Any]:
    """Losses on the modules held out, and which they are."""
    facts: dict[str, Any] = {
        "num_parameters": f"{model.num_parameters() / 1e6:.1f} M",
        "num_held_out": len(split.tuning) + len(split.held_out),
    }
    for name, modules in (("tuning", split.tuning), ("held_out", split.held_out)):
        stream = corpus.token_stream(tokenizer, modules)
        facts[f"{name}_loss"] = round(evaluate.held_out_loss(model, stream, window=window), 4)
        facts[f"{name}_modules"] = [module.path for module in modules]
    return facts


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Save weights and config, with a generation config that stops at the end of text."""
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
        max_new_tokens=128,
    )
    model.save_pretrained(folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save it under the class name every transformers release knows, without notes about this machine's load."""
    # A batch padded earlier leaves its padding behind, and whoever reads the file anew would pad everything.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for note in ("backend", "is_local", "local_files_only"):
        config.pop(note, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def greedy_sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, new_tokens: int = 96
) -> str:
    """The prompt and its greedy continuation, as text, with a mark between."""
    encoded = tokenizer(prompt, return_tensors="pt").to(model.device)
    room = int(model.config.max_position_embeddings) - int(encoded["input_ids"].shape[1])
    out = model.generate(**encoded, do_sample=False, max_new_tokens=min(new_tokens, room))
    continuation = tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return f"{prompt}  # <- the prompt ends here{continuation}"


def swap(new: Path, old: Path) -> None:
    """Put folder `new` in the place of `old`; a reader finds one or the other, save for an instant."""
    old.parent.mkdir(parents=True, exist_ok=True)
    aside = old.with_name(old.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        old.replace(aside)
    new.replace(old)
    shutil.rmtree(aside, ignore_errors=True)
