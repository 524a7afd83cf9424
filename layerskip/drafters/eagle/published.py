"""Eagle3Head: draft weights as the authors of EAGLE-3, SGLang and SpecForge publish them (`LlamaForCausalLMEagle3`).

Ref: EAGLE-3 (2503.01840). Names of tensors and fields, and which states are read, as vLLM and SGLang read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from layerskip.config.hub import WEIGHTS_FILES
from layerskip.drafters.eagle.head import check_aux_layers
from layerskip.drafters.eagle.module_head import ModuleHead
from layerskip.engines.states import StatesEngine

ARCHITECTURE = "LlamaForCausalLMEagle3"
_NOT_READ = ("t2d", "embed_tokens.weight")
"""The inverse of `d2t`, and the target's own embedding."""
_OF_THE_FILE = ("architectures", "model_type")
"""Fields of config.json that say nothing of the layer."""


def is_published(config: dict[str, Any]) -> bool:
    """Whether a folder with this config.json holds such weights."""
    return config.get("architectures") == [ARCHITECTURE]


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Whose states such weights read unless their config says: an early, a middle and a late layer of the target."""
    return (1, num_layers // 2 - 1, num_layers - 4)


class Eagle3Layers(nn.Module):
    """The tensors by their published names."""

    def __init__(self, config: LlamaConfig, *, num_draft_ids: int, depths: int, norms_residual: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        config._attn_implementation = "sdpa"
        self.norms_residual = norms_residual
        self.fc = nn.Linear(depths * hidden, hidden, bias=False)
        self.midlayer = nn.Module()
        attention: Any = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):  # over the token's embedding and the state, side by side
            own = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * hidden, own.out_features, bias=own.bias is not None))
        self.midlayer.self_attn, self.midlayer.mlp = attention, LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, LlamaRMSNorm(hidden, eps=eps))
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, num_draft_ids, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)


class Eagle3Head(ModuleHead):
    """Reads the target's states of several depths, joined, and on drafted tokens its own; has its own output embedding
    over some of the target's token ids."""

    module: Eagle3Layers

    def __init__(
        self,
        layers: Eagle3Layers,
        draft_ids: torch.Tensor | None,
        vocab_size: int,
        aux_layers: Sequence[int],
        fingerprint: str,
    ) -> None:
        """draft_ids: (num_draft_ids,) token ids that it chooses among; None: all."""
        self.module, self.rotary, self.vocab_size = layers, layers.rotary, vocab_size
        self.fingerprint, self.aux_layers = fingerprint, tuple(aux_layers)
        self._draft_ids = draft_ids
        self._width = layers.fc.in_features

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """See `StateHead`; the last layer's states, which are kept too, are not read."""
        out: torch.Tensor = self.module.fc(states[..., : self._width])
        return out

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """(T, 3 * hidden): what attention reads, and what its output is added to."""
        layer: Any = self.module.midlayer
        normed = layer.hidden_norm(states)
        residual = normed if self.module.norms_residual else states
        return torch.cat([layer.input_layernorm(embedded), normed, residual], dim=-1)

    def block(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        layer: Any = self.module.midlayer
        hidden = x.shape[-1] // 3
        out: torch.Tensor = x[..., 2 * hidden :] + layer.self_attn(x[..., : 2 * hidden], **arguments)[0]
        return torch.add(out, layer.mlp(layer.post_attention_layernorm(out)))

    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        """See `StateHead`: nothing is."""

    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:  # noqa: ARG002
        found: torch.Tensor = self.module.lm_head(self.module.norm(state))
        if self._draft_ids is not None:
            few, found = found, found.new_full((len(found), self.vocab_size), float("-inf"))
            found[:, self._draft_ids] = few
        if draft_vocab is not None:
            found[:, draft_vocab:] = float("-inf")
        return found


def load_published(folder: Path, config: dict[str, Any], fingerprint: str, model: Any) -> Eagle3Head:
    """For this model, in its number format and on its device. config: what lies in the folder's config.json.

    Raises: ValueError naming the rule for weights of a model of another size, and for tensors that are missing, too
    many or of another shape.
    """
    text = model.config.get_text_config(decoder=True)
    like, num_layers = model.get_input_embeddings().weight, text.num_hidden_layers
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    for name, expected in (("hidden_size", text.hidden_size), ("num_hidden_layers", 1)):
        if config.get(name) != expected:
            raise ValueError(f"draft_weights: {folder}: {name} must be {expected}, got {config.get(name)}")
    known = config.get("eagle_config") or {}
    aux_layers = tuple(known.get("eagle_aux_hidden_state_layer_ids") or usual_layers(num_layers))
    check_aux_layers(aux_layers, num_layers, "draft_weights: eagle_aux_hidden_state_layer_ids")
    num_draft_ids = config.get("draft_vocab_size") or vocab_size
    tensors = _tensors_in(folder)
    tensors = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items() if name not in _NOT_READ}
    offsets = tensors.pop("d2t", None)
    layers = Eagle3Layers(
        LlamaConfig(**{name: value for name, value in config.items() if name not in _OF_THE_FILE}),
        num_draft_ids=num_draft_ids,
        depths=len(aux_layers),
        norms_residual=bool(config.get("norm_before_residual")),
    )
    try:
        layers.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"draft_weights: {folder}: is not of the shape that its config.json tells: {reason}") from None
    draft_ids = None
    if offsets is not None:
        draft_ids = offsets.long() + torch.arange(len(offsets))
        if len(draft_ids) != num_draft_ids or not 0 <= int(draft_ids.min()) <= int(draft_ids.max()) < vocab_size:
            raise ValueError(f"draft_weights: {folder}: d2t must lead to {num_draft_ids} ids of 0 to {vocab_size - 1}")
        draft_ids = draft_ids.to(like.device)
    elif num_draft_ids != vocab_size:
        raise ValueError(
            f"draft_weights: {folder}: without d2t draft_vocab_size must be the model's {vocab_size}, got "
            f"{num_draft_ids}"
        )
    layers.to(device=like.device, dtype=like.dtype).eval().requires_grad_(requires_grad=False)
    return Eagle3Head(layers, draft_ids, vocab_size, aux_layers, fingerprint)


def _tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Raises: ValueError naming a file that cannot be read."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(file for pattern in WEIGHTS_FILES for file in folder.glob(pattern)):
        try:
            found |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"draft_weights: {file}: cannot be read: {error}") from None
    return found
