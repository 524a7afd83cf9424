"""The kept layers of a model as an ordinary, smaller checkpoint of the same architecture."""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from layerskip.config.skip_mask import SkipMask
from layerskip.huggingface.adapter import UnsupportedModelError
from layerskip.huggingface.quantization.weights import is_quantized
from layerskip.huggingface.rounding import logit_difference
from layerskip.model import LayerSkipModel

logger = logging.getLogger(__name__)

_CHECKED_TOKENS = 40
_DTYPES = ("float32", "bfloat16", "float16")


# Weights that are made in the caller's inference mode could not be loaded into.
@torch.inference_mode(mode=False)
def write_draft_checkpoint(
    model: LayerSkipModel, mask: SkipMask, folder: Path, generation: Mapping[str, Any]
) -> tuple[float, float]:
    """Write config, safetensors, tokenizer and generation config of the layers that `mask` keeps.

    `generation` goes on top of the model's generation config: Transformers reads an assistant's own. What was written
    is loaded again and compared with the masked model before the folder gets its name, so it is there whole or not at
    all. Returns how far the logits lie apart (relative norm) and what rounding allows.
    Cost: the kept layers once more in memory, three forwards over 40 tokens.
    Raises: ValueError for a mask with lone sublayers, one that keeps all or nothing, or a folder that is not empty;
    UnsupportedModelError if an architecture's checkpoint cannot be cut so.
    """
    check_whole_layers(model, mask)
    check_new_folder(folder)
    kept = [i for i in range(mask.num_layers) if i not in mask.skipped_layers]
    draft = _cut(model, kept)
    draft.generation_config = _generation_config(model.model, generation)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        draft.save_pretrained(unfinished)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(unfinished)
        difference = _difference(model, mask, unfinished)
        unfinished.chmod(0o755)  # temporary folders, and safetensors' files, are the owner's alone
        for file in unfinished.iterdir():
            file.chmod(0o644)
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return difference


def check_whole_layers(model: LayerSkipModel, mask: SkipMask) -> None:
    """Raises: ValueError if no ordinary checkpoint can hold this mask's draft."""
    model.adapter.check_mask(mask)
    if lone := lone_sublayers(mask):
        raise ValueError(
            f"skip_mask: a draft model holds whole layers, and this mask skips {', '.join(lone)} alone; got {mask}"
        )
    if not 0 < len(mask.skipped_layers) < mask.num_layers:
        raise ValueError(f"skip_mask: a draft model keeps some layers and leaves some out, got {mask}")


def check_new_folder(folder: Path) -> None:
    """Raises: ValueError if there is something in it already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"draft-model folder: must be new or empty, got {folder}")


def lone_sublayers(mask: SkipMask) -> list[str]:
    """Sublayers skipped without the other one of their layer, in words."""
    return [
        f"the {'attention' if attention else 'MLP'} of layer {i}"
        for i, (attention, mlp) in enumerate(zip(mask.attention, mask.mlp, strict=True))
        if attention != mlp
    ]


def checkpoint_dtype(name: str, *, trust_remote_code: bool = False) -> str:
    """The number format that a checkpoint is stored in; float32 if its config does not say.

    Raises: ValueError in one line if there is no such model.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: cannot load {name}: {' '.join(str(error).split())[:300]}") from None
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in _DTYPES else "float32"


def draft_config(config: Any, kept: Sequence[int]) -> Any:
    """The model's config for the kept layers alone: their number, and everything that goes by a layer's index.

    Raises: UnsupportedModelError for configs with more than a text model in them.
    """
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError(f"{config.model_type}: only a text model by itself can be cut to a draft model")
    if getattr(config, "auto_map", None):
        raise UnsupportedModelError(f"{config.model_type}: the code in the model's repository would not be copied")
    data: dict[str, Any] = copy.deepcopy(config.to_dict())
    num_layers = int(config.num_hidden_layers)
    _renumber_experts(data, num_layers, kept)
    for name, value in data.items():
        if isinstance(value, list) and len(value) == num_layers and "layer" in name and name != "mlp_only_layers":
            data[name] = [value[i] for i in kept]
    if data.get("attn_layer_indices") is not None:  # Bamba's
        data["attn_layer_indices"] = [new for new, old in enumerate(kept) if old in data["attn_layer_indices"]]
    for name in ("max_window_layers", "first_k_dense_replace"):  # so many layers from the first on are of one kind
        if isinstance(data.get(name), int):
            data[name] = sum(i < data[name] for i in kept)
    data[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    return type(config).from_dict(data)


def _renumber_experts(data: dict[str, Any], num_layers: int, kept: Sequence[int]) -> None:
    """Which layers hold experts follows from two rules by index; after the cut it is told layer by layer."""
    if "mlp_only_layers" not in data:
        return
    step, dense = data.get("decoder_sparse_step") or 1, set(data["mlp_only_layers"] or ())
    dense |= {i for i in range(num_layers) if (i + 1) % step}
    data["mlp_only_layers"] = [new for new, old in enumerate(kept) if old in dense]
    data["decoder_sparse_step"] = 1


def _cut(model: LayerSkipModel, kept: Sequence[int]) -> Any:
    """The smaller model; it shares the weights of the whole one."""
    whole = cast(Any, model.model)
    if is_quantized(whole):
        raise UnsupportedModelError("model: quantised weights cannot be cut, export from the unquantised model")
    if not model.placement.is_whole:
        raise UnsupportedModelError(f"model: must be whole on one device to be cut, this one is on {model.placement}")
    if model.adapter.num_keyed < model.num_layers:
        raise UnsupportedModelError(f"{whole.config.model_type}: layers that read others' keys cannot be cut")
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        draft = type(whole)(draft_config(whole.config, kept))
    draft.requires_grad_(requires_grad=False)  # weights that were made in inference mode can have no other
    weights = _kept_weights(whole.state_dict(), model.adapter.stack_path, kept)
    try:
        draft.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{whole.config.model_type}: weights do not fit the smaller model: {error}"
        ) from None
    draft.tie_weights()
    return draft.eval()


def _kept_weights(weights: Mapping[str, torch.Tensor], stack: str, kept: Iterable[int]) -> dict[str, torch.Tensor]:
    """State dict with the kept layers renumbered from 0 and the others left out."""
    new_index = {str(old): str(new) for new, old in enumerate(kept)}
    prefix = f"{stack}."
    chosen: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if not name.startswith(prefix):
            chosen[name] = value
            continue
        index, _, rest = name.removeprefix(prefix).partition(".")
        if index in new_index:
            chosen[f"{prefix}{new_index[index]}.{rest}"] = value
    return chosen


def _generation_config(model: Any, settings: Mapping[str, Any]) -> GenerationConfig:
    """The model's own with `settings` on top; a bare one where the model's own would not be saved."""
    config = copy.deepcopy(model.generation_config)
    config.update(**settings)
    try:
        config.validate(strict=True)
    except ValueError as error:
        logger.warning("the model's generation config is not copied: %s", " ".join(str(error).split())[:200])
        tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return GenerationConfig(**tokens, **settings)
    return config


@torch.inference_mode()
def _difference(model: LayerSkipModel, mask: SkipMask, folder: Path) -> tuple[float, float]:
    """The written checkpoint against a masked forward from scratch, on the same ids."""
    draft: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    draft = draft.to(model.device).eval()
    vocabulary = int(cast(Any, model.model).get_input_embeddings().weight.shape[0])
    length = min(_CHECKED_TOKENS, model.max_positions or _CHECKED_TOKENS)
    ids = (torch.arange(length, device=model.device) * 7919 + 11) % vocabulary
    adapter = model.adapter
    with adapter.attached():
        masked = adapter.forward(ids, adapter.new_cache(length), mask, num_logits=length)
    difference, tolerance = logit_difference(draft(input_ids=ids.unsqueeze(0)).logits[0], masked)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{model.model.config.model_type}: the smaller model's logits are not those of the masked one "
            f"(relative difference {difference:.2g}, rounding explains {tolerance:.2g}): its layers depend on their "
            "index"
        )
    return difference, tolerance
