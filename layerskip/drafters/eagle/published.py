"""Eagle3Head: draft weights as EAGLE-3's are published, in the layout of the paper's authors or of vLLM's speculators.

Ref: EAGLE-3 (2503.01840). Names of tensors and fields, and which states are read, as vLLM and SGLang read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from layerskip.config.hub import WEIGHTS_FILES
from layerskip.drafters.eagle.head import check_aux_layers, check_states
from layerskip.drafters.eagle.lean import LeanHead
from layerskip.engines.lean.layers import Layer, LayerMaker, Norm
from layerskip.engines.lean.linear import fused
from layerskip.engines.states import StatesEngine

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Of the authors', SGLang's and SpecForge's; that of vLLM's speculators says `speculators_model_type`."""
_NOT_READ = ("t2d", "embed_tokens.weight")
"""The inverse of `d2t`, and the target's own embedding."""
_OF_THE_FILE = ("architectures", "model_type", "layer_types")
"""Fields of config.json that say nothing of the layer, or are of all layers of the target."""
_LAYER_TYPES = ("llama", "qwen3")


def is_published(config: dict[str, Any]) -> bool:
    """Whether a folder with this config.json holds such weights."""
    return config.get("architectures") == [ARCHITECTURE] or config.get("speculators_model_type") == "eagle3"


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Whose states such weights read unless their config says: an early, a middle and a late layer of the target."""
    return (1, num_layers // 2 - 1, num_layers - 4)


@dataclass(frozen=True)
class Eagle3Shape:
    """What a config.json says of such weights beside their layer's own config."""

    aux_layers: tuple[int, ...]
    """Layers of the target, counted from 0, whose outputs are read."""
    num_draft_ids: int
    norm_before_residual: bool = False
    """What attention's output is added to is normed."""
    norm_before_fc: bool = False
    """The states of all depths are normed together before they are joined."""
    fc_norm: bool = False
    """Each depth's by itself."""
    norm_output: bool = False
    """What a drafted token goes on from is normed as what the output embedding reads is."""
    qk_norm: bool = False
    """Queries and keys are normed, as Qwen3's are."""


class Eagle3Layers(nn.Module):
    """The tensors by their published names."""

    def __init__(self, config: LlamaConfig, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden, depths = config.hidden_size, len(shape.aux_layers)

        def norm(width: int) -> LlamaRMSNorm:
            return LlamaRMSNorm(width, eps=config.rms_norm_eps)

        config._attn_implementation = "sdpa"
        self.fc = nn.Linear(depths * hidden, hidden, bias=False)
        self.input_norm = norm(depths * hidden) if shape.norm_before_fc else None
        self.fc_norm = nn.ModuleList(norm(hidden) for _ in range(depths if shape.fc_norm else 0))
        self.midlayer: Any = nn.Module()
        attention: Any = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):  # over the token's embedding and the state, side by side
            own = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * hidden, own.out_features, bias=own.bias is not None))
        for name in ("q_norm", "k_norm") if shape.qk_norm else ():
            setattr(attention, name, norm(attention.head_dim))
        self.midlayer.self_attn, self.midlayer.mlp = attention, LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, norm(hidden))
        self.norm = norm(hidden)
        self.lm_head = nn.Linear(hidden, shape.num_draft_ids, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)


class Eagle3Head(LeanHead):
    """Reads the target's states of several depths, joined, and on drafted tokens its own; has its own output embedding
    over some of the target's token ids."""

    def __init__(
        self,
        layers: Eagle3Layers,
        shape: Eagle3Shape,
        draft_ids: torch.Tensor | None,
        vocab_size: int,
        fingerprint: str,
        maker: LayerMaker,
    ) -> None:
        """draft_ids: (num_draft_ids,) token ids that it chooses among; None: all."""
        self.module, self.rotary, self.vocab_size = layers, layers.rotary, vocab_size
        self.fingerprint, self.aux_layers = fingerprint, shape.aux_layers
        self._shape, self._draft_ids = shape, draft_ids
        weight, middle = layers.fc.weight, layers.midlayer
        hidden, self._width = weight.shape
        self.like = weight[:1, :hidden]
        with torch.inference_mode(mode=False), torch.no_grad():
            attention = replace(maker.attention(middle, None), norm=nn.Identity())  # what it reads is normed
            self.layer = Layer(attention, maker.mlp(middle), num_read=2 * hidden)
            self._joined, self._head = fused(maker.linear, layers.fc), fused(maker.linear, layers.lm_head)
            self._embed_norm, self._state_norm = Norm(middle.input_layernorm), Norm(middle.hidden_norm)
            self._input_norm = None if layers.input_norm is None else Norm(layers.input_norm)
            self._depth_norms, self._norm = [Norm(one) for one in layers.fc_norm], Norm(layers.norm)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """See `StateHead`; the last layer's states, which are kept too, are not read."""
        states = states[..., : self._width]
        if self._input_norm is not None:
            states = self._input_norm(states)
        if self._depth_norms:
            depths = states.chunk(len(self._depth_norms), dim=-1)
            states = torch.cat([norm(one) for norm, one in zip(self._depth_norms, depths, strict=True)], dim=-1)
        return self._joined(states)

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """(T, 3 * hidden): what attention reads, and what its output is added to."""
        normed = self._state_norm(states)
        residual = normed if self._shape.norm_before_residual else states
        return torch.cat([self._embed_norm(embedded), normed, residual], dim=-1)

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """See `LeanHead`."""
        return self._norm(out) if self._shape.norm_output else out

    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        """See `StateHead`: nothing is."""

    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:  # noqa: ARG002
        found = self._head(state if self._shape.norm_output else self._norm(state))
        if self._draft_ids is not None:
            few, found = found, found.new_full((len(found), self.vocab_size), float("-inf"))
            found[:, self._draft_ids] = few
        if draft_vocab is not None:
            found[:, draft_vocab:] = float("-inf")
        return found


def load_published(folder: Path, config: dict[str, Any], fingerprint: str, model: Any, maker: LayerMaker) -> Eagle3Head:
    """For this model, in its number format and on its device. config: what lies in the folder's config.json.

    Raises: ValueError naming the rule for weights of a model of another size, and for tensors that are missing, too
    many or of another shape.
    """
    check_states(model)
    text = model.config.get_text_config(decoder=True)
    like = model.get_input_embeddings().weight
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    tensors = _tensors_in(folder)
    tensors = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items() if name not in _NOT_READ}
    offsets = tensors.pop("d2t", None)
    try:
        config = _of_speculators(config, folder) if "speculators_model_type" in config else config
        for name, expected in (("hidden_size", text.hidden_size), ("num_hidden_layers", 1)):
            if config.get(name) != expected:
                raise ValueError(f"draft_weights: {folder}: {name} must be {expected}, got {config.get(name)}")
        shape = _shape_in(config, text.num_hidden_layers, vocab_size)
        of_layer = {name: value for name, value in config.items() if name not in _OF_THE_FILE}
        layers = Eagle3Layers(LlamaConfig(**of_layer), shape)
        layers.load_state_dict(tensors)
    except (AttributeError, RuntimeError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"draft_weights: {folder}: is not of the shape that its config.json tells: {reason}") from None
    num_draft_ids = shape.num_draft_ids
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
    return Eagle3Head(layers, shape, draft_ids, vocab_size, fingerprint, maker)


def _shape_in(config: dict[str, Any], num_layers: int, vocab_size: int) -> Eagle3Shape:
    """Of the authors' layout. Raises: ValueError for layers that the model does not have."""
    known = config.get("eagle_config") or {}
    aux_layers = tuple(known.get("eagle_aux_hidden_state_layer_ids") or usual_layers(num_layers))
    check_aux_layers(aux_layers, num_layers, "draft_weights: eagle_aux_hidden_state_layer_ids")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    found = {name: bool(config.get(name, known.get(name))) for name in flags}
    return Eagle3Shape(aux_layers, config.get("draft_vocab_size") or vocab_size, **found)


def _of_speculators(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of vLLM's speculators under the names that the authors have, their layer's among them. Layers are
    counted by what goes into them there. Raises: ValueError for what is not read."""
    layer = config.get("transformer_layer_config") or {}
    if layer.get("model_type", "llama") not in _LAYER_TYPES:
        raise ValueError(
            f"draft_weights: {folder}: transformer_layer_config.model_type must be one of {', '.join(_LAYER_TYPES)}, "
            f"got {layer['model_type']}"
        )
    for name, given, usual in (
        ("target_hidden_size", config.get("target_hidden_size"), layer.get("hidden_size")),
        ("embed_requires_grad", config.get("embed_requires_grad"), False),
        ("layer_types", (layer.get("layer_types") or [None])[0], "full_attention"),
    ):
        if given is not None and given != usual:
            raise ValueError(f"draft_weights: {folder}: {name} must be {usual} or left out, got {given}")
    own = {
        name: config[name]
        for name in ("draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output")
        if name in config
    }
    layers = config.get("eagle_aux_hidden_state_layer_ids") or ()
    return {
        **layer,
        **own,
        "norm_before_residual": config.get("norm_before_residual", True),
        "qk_norm": layer.get("model_type") == "qwen3",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in layers]},
    }


def _tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Raises: ValueError naming a file that cannot be read."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(file for pattern in WEIGHTS_FILES for file in folder.glob(pattern)):
        try:
            found |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"draft_weights: {file}: cannot be read: {error}") from None
    return found
