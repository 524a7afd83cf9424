"""Multi-token-prediction layers that lie in a model's own checkpoint, as Transformers loads them.

`MtpModel` is Transformers' own and new: this is the one place that knows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from layerskip.huggingface.adapter import ModelAdapter

_WHOLE_MASKS = ("sdpa", "eager")
"""Kinds of attention that can be told what each row sees."""


def mtp_refusal(adapter: ModelAdapter) -> str | None:
    """Why the layers of this model's checkpoint cannot draft, or that it has none; None where they may be loaded.
    Nothing is read."""
    config = adapter.text_config
    kinds = getattr(config, "mtp_layer_types", None) or ["full_attention"]
    if not getattr(config, "num_mtp_layers", None):
        return "a model whose config tells of multi-token-prediction layers (num_mtp_layers), this one's does not"
    if not adapter.config.name_or_path:
        return "a model that was loaded from a checkpoint, where they lie"
    if not adapter.placement.is_whole:
        return f"a model that is whole on one device, got one on {adapter.placement}"
    if config._attn_implementation not in _WHOLE_MASKS:
        return f"attention by {' or '.join(_WHOLE_MASKS)}, got {config._attn_implementation}"
    if kinds[0] != "full_attention" or getattr(config, "mtp_per_layer_config", None):
        return f"a first layer with full attention, got {kinds[0]}"
    unlike = ("chain_hidden_post_norm", "logits_mup_width_multiplier", "unpadded_vocab_size")
    if others := [name for name in unlike if getattr(config, name, None) is not None]:
        return f"layers as DeepSeek-V3 has them, this config has {others[0]}"
    return None


def load_mtp(adapter: ModelAdapter) -> Any:
    """All of them, as Transformers' `MtpModel`, in the model's number format, on its device.

    Cost: their weights are read from the checkpoint. Raises: ValueError in one line if the checkpoint lacks them.
    """
    if (refusal := mtp_refusal(adapter)) is not None:
        raise ValueError(f"mtp: needs {refusal}")
    from transformers.modeling_layers import MtpModel

    try:
        with torch.inference_mode(mode=False), _as_published(adapter):
            found = MtpModel.from_pretrained(adapter.model, device_map={"": adapter.device})
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"mtp: no multi-token-prediction layer can be loaded from {adapter.config.name_or_path}: {reason}"
        ) from None
    found.layers.to(adapter.dtype).eval().requires_grad_(requires_grad=False)
    return found


def final_norm(model: Any) -> nn.Module:
    """What the model does to its last layer's states before they are unembedded, and before such a layer reads them."""
    norm: nn.Module = model.get_decoder().norm
    return norm


@contextmanager
def generates_with(mtp: Any) -> Iterator[None]:
    """Inside, `generate(use_mtp=True)` drafts by these, where it would read the checkpoint at every call."""
    from transformers.modeling_layers import MtpModel

    before = MtpModel.__dict__["from_pretrained"]
    MtpModel.from_pretrained = classmethod(lambda *_args, **_kwargs: mtp)
    try:
        yield
    finally:
        MtpModel.from_pretrained = before


@contextmanager
def _as_published(adapter: ModelAdapter) -> Iterator[None]:
    """Inside, the layer behind the model's last one is known to be such a layer, whatever the model's size, where
    Transformers goes by the sizes that were published; how a checkpoint's names are read is known of a model that was
    not loaded, too; and the config tells the number format as a dtype."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    model: Any = adapter.model
    own = f"model.layers.{adapter.num_layers}."
    known, dtype = list(model._keys_to_ignore_on_load_unexpected or ()), adapter.config.dtype
    names = ("_keys_to_ignore_on_load_unexpected", "_weight_conversions")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    try:
        if not any(re.search(one, own) or "mtp" in one for one in known):
            model._keys_to_ignore_on_load_unexpected = [*known, "^" + re.escape(own)]
        if not hasattr(model, "_weight_conversions"):
            model._weight_conversions = get_model_conversion_mapping(model)
        adapter.config.dtype = adapter.dtype
        yield
    finally:
        adapter.config.dtype = dtype
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(before)
