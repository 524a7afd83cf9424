"""A tuned draft as a model folder that other engines take, with settings for each of them."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import DecodeConfig, write_atomically
from layerskip.config.skip_mask import SkipMask

SETTINGS_FILE = "settings.json"
README_FILE = "README.md"


@dataclass(frozen=True)
class DraftModel:
    """What was exported."""

    folder: Path
    mask: SkipMask
    """Of whole layers."""
    approximates: SkipMask | None
    """The tuned mask, if that had lone sublayers, fewer bits or fewer token ids; its draft was measured, this one's was
    not."""
    logit_difference: float
    """Relative, to the masked model's."""

    @property
    def kept_layers(self) -> list[int]:
        """Layers of the model that the draft consists of, in order."""
        return [i for i in range(self.mask.num_layers) if i not in self.mask.skipped_layers]


def nearest_whole_layers(mask: SkipMask) -> SkipMask:
    """The nearest mask of whole layers: a layer is left out only if both of its sublayers are.

    A layer of which one sublayer is skipped is one flag away from being skipped and from being kept. It is kept: the
    draft then does all that the tuned one does and more, at the price of a slower draft step.
    """
    return SkipMask.from_layers(mask.num_layers, mask.skipped_layers)


def export_draft_model(model: Any, config: DecodeConfig, folder: Path, *, nearest: bool = False) -> DraftModel:
    """Write the kept layers and settings.json and README.md beside them.

    `model` is the LayerSkipModel that the config was made for; its `name_or_path` goes into the settings.
    Raises: ValueError if the config does not speculate or only looks tokens up, if its mask has lone sublayers (unless
    `nearest`), or if the nearest mask leaves nothing out; UnsupportedModelError if the architecture cannot be cut.
    """
    from layerskip.interop.draft_checkpoint import lone_sublayers, write_draft_checkpoint

    if not config.speculates:
        reason = f" ({config.reason})" if config.reason else ""
        raise ValueError(f"gamma: must be above 0, this config says not to speculate{reason}; got 0")
    if not config.drafts_by_mask:
        raise ValueError(f"drafter: must draft under a mask to have a draft model, got {config.drafter}")
    mask = config.skip_mask
    if lone := lone_sublayers(mask):
        if not nearest:
            raise ValueError(
                f"skip_mask: a draft model holds whole layers, and this mask skips {', '.join(lone)} alone; "
                "--nearest exports the nearest mask of whole layers instead"
            )
        mask = nearest_whole_layers(mask)
    mask = mask.whole  # as a checkpoint is
    difference, _ = write_draft_checkpoint(model, mask, folder, transformers_generation(config))
    draft = DraftModel(folder, mask, config.skip_mask if mask != config.skip_mask else None, difference)
    settings = engine_settings(config, model.model.name_or_path, draft)
    write_atomically(folder / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
    write_atomically(folder / README_FILE, readme(settings))
    return draft


def transformers_generation(config: DecodeConfig) -> dict[str, Any]:
    """What goes into the draft's generation config, where Transformers looks for an assistant's settings."""
    return {
        "num_assistant_tokens": config.gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": config.draft_threshold,
    }


def engine_settings(config: DecodeConfig, target: str, draft: DraftModel) -> dict[str, Any]:
    """settings.json: where the draft comes from, and how each engine is told to use it."""
    name = str(draft.folder)
    return {
        "target": target,
        "draft_model": name,
        "kept_layers": draft.kept_layers,
        "skip_mask": str(draft.mask),
        "tuned_skip_mask": str(draft.approximates or draft.mask),
        "mask_was_measured": draft.approximates is None,
        "gamma": config.gamma,
        "draft_threshold": config.draft_threshold,
        "target_threshold": config.target_threshold,
        "transformers": {"assistant_model": name, "generation_config": transformers_generation(config)},
        "vllm": {
            "speculative_config": {"method": "draft_model", "model": name, "num_speculative_tokens": config.gamma}
        },
        "sglang": {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": name,
            "speculative_num_steps": config.gamma,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": config.gamma + 1,
        },
        "llama_cpp": {
            "spec_type": "draft-simple",
            "spec_draft_model": f"{draft.folder.name}.gguf",
            "spec_draft_n_max": config.gamma,
            "spec_draft_n_min": 0,
            "spec_draft_p_min": config.draft_threshold,
        },
    }


def readme(settings: dict[str, Any]) -> str:
    """README.md of the folder: what this is, what it was not measured as, and a command for each engine."""
    return _README.format(
        target=settings["target"],
        origin=_origin(settings),
        quoted_target=shlex.quote(settings["target"]),
        target_text=json.dumps(settings["target"]),
        folder=shlex.quote(settings["draft_model"]),
        folder_text=json.dumps(settings["draft_model"]),
        folder_name=Path(settings["draft_model"]).name,
        vllm=shlex.quote(json.dumps(settings["vllm"]["speculative_config"])),
        gguf=shlex.quote(settings["llama_cpp"]["spec_draft_model"]),
        gamma=settings["gamma"],
        num_verified=settings["gamma"] + 1,
        threshold=settings["draft_threshold"],
        target_note=_target_note(settings["target_threshold"]),
    )


def _origin(settings: dict[str, Any]) -> str:
    layers = ", ".join(map(str, settings["kept_layers"]))
    text = f"It consists of the layers {layers} of that model (skip mask `{settings['skip_mask']}`)."
    if settings["mask_was_measured"]:
        return text
    return (
        f"{text}\n\n**Not measured.** The tuned mask `{settings['tuned_skip_mask']}` leaves out single attention or\n"
        "MLP sublayers, which no ordinary checkpoint can. This is the nearest mask of whole layers: a layer of which\n"
        "only one sublayer was skipped is kept. Its drafts are slower than the tuned ones: measure before you rely on\n"
        "it."
    )


def _target_note(threshold: float) -> str:
    if not threshold:
        return ""
    return (
        f"The tuned `target_threshold` of {threshold:g} (decode with the target alone where it is unsure) has no "
        "counterpart in these engines and is left out.\n"
    )


_README = """\
# Draft model for {target}

{origin}

Tokenizer and embeddings are the target's own; any engine that verifies drafts with the target keeps its output.

The confirmed speedup in the decode config was measured with the `layerskip` decoder, whose draft shares the target's
weights and key-value cache. Here the draft is a second model with a cache and a prefill of its own: measure it in your
engine. Drafts also attend to their own keys and values instead of the target's, so acceptance can differ.
{target_note}
Settings as data: `settings.json`. At most {gamma} draft tokens a round; drafting stops once the draft's own probability
of its token is below {threshold:g} (0 = never).

## Transformers

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target_text})
target = AutoModelForCausalLM.from_pretrained({target_text})
draft = AutoModelForCausalLM.from_pretrained({folder_text})  # its generation_config holds the settings
inputs = tokenizer("Hello", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=64)
```

Checked with Transformers 5.23. `assistant_confidence_threshold` is adapted while it runs if scikit-learn is installed.

## vLLM

```console
$ vllm serve {quoted_target} --speculative-config {vllm}
```

Flags as in vLLM's documentation of draft models (docs/features/speculative_decoding/draft_model.md); not run here. That
page names no setting for a confidence threshold; vLLM 0.10 had no draft-model method.

## SGLang

```console
$ python3 -m sglang.launch_server --model {quoted_target} --speculative-algorithm STANDALONE \\
    --speculative-draft-model-path {folder} --speculative-num-steps {gamma} \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens {num_verified}
```

Flags as in SGLang's documentation (docs/advanced_features/speculative_decoding.md, "Standalone"); not run here. With
topk 1 the draft tokens count one more than the steps. That page names no confidence threshold for this method.

## llama.cpp

```console
$ python convert_hf_to_gguf.py {quoted_target} --outfile target.gguf
$ python convert_hf_to_gguf.py {folder} --outfile {gguf}
$ llama-server -m target.gguf --spec-type draft-simple --spec-draft-model {gguf} \\
    --spec-draft-n-max {gamma} --spec-draft-n-min 0 --spec-draft-p-min {threshold:g}
```

Not run here, and the flags were renamed in 2026: `llama-server --help` of your build decides. Older builds say
`-md {gguf} --draft-max {gamma} --draft-min 0 --draft-p-min {threshold:g}`
and know no `--spec-type` for draft models. A model that mixes sliding and full attention needs a converter that reads
`layer_types`: llama.cpp assumes a fixed pattern for some, which the cut may break.
"""
