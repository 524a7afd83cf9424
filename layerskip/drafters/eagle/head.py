"""EagleHead: one decoder layer that goes on from the target's hidden states, with the target's own ends, frozen.

Ref: EAGLE (2401.15077), with the inputs normed as in DeepSeek-V3's multi-token prediction (2412.19437), and trained on
its own hidden states some tokens deep, as EAGLE-3 (2503.01840) is. As there it may read states of several depths, and
choose among the commonest token ids alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from layerskip.config.decode_config import DraftWeights, write_atomically
from layerskip.config.hub import locate_weights
from layerskip.config.strict_json import parse_json

WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
_EPS = 1e-6


def check_states(model: Any) -> None:
    """Raises: ValueError for a model whose layers give more than one state a token."""
    num_states = getattr(model.config.get_text_config(decoder=True), "altup_num_inputs", 1)
    if num_states > 1:
        kind = model.config.model_type
        raise ValueError(f"draft_weights: eagle goes on from one state a token, layers of {kind} give {num_states}")


@dataclass(frozen=True)
class EagleShape:
    """Sizes, most of them the target's."""

    hidden_size: int
    embedding_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the target's output embedding."""
    rope_theta: float = 10_000.0
    aux_layers: tuple[int, ...] = ()
    """Layers of the target, ascending and counted from 0, whose states are read before the last one's."""
    num_draft_ids: int | None = None
    """Token ids that it chooses among; None: all."""

    @classmethod
    def of(cls, model: Any, aux_layers: Sequence[int] = (), num_draft_ids: int | None = None) -> EagleShape:
        """A layer as wide as this model's own. Raises: ValueError for a model with other states."""
        check_states(model)
        text = model.config.get_text_config(decoder=True)
        hidden, num_heads = text.hidden_size, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or hidden // num_heads
        wide = getattr(text, "intermediate_size", None) or 4 * hidden  # a list where layers differ
        return cls(
            hidden_size=hidden,
            embedding_size=model.get_input_embeddings().weight.shape[1],
            intermediate_size=max(wide) if isinstance(wide, list) else wide,
            num_attention_heads=num_heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            aux_layers=tuple(aux_layers),
            num_draft_ids=num_draft_ids,
        )

    def layer_config(self) -> LlamaConfig:
        """Of the layer and its positions."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=_EPS,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            num_hidden_layers=1,
            attn_implementation="eager",
        )


class EagleHead(nn.Module):
    """Hidden state of a position and the token after it -> hidden state whose logits are of the token after that.

    On a position that the target has computed it takes the target's states, joined, on a drafted one its own.
    """

    draft_ids: torch.Tensor | None
    """(num_draft_ids,): what it chooses among, the commonest first; a `draft_vocab` takes so many of them."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("draft_ids", torch.arange(shape.num_draft_ids) if shape.num_draft_ids else None)
        config = shape.layer_config()
        depths = 1 + len(shape.aux_layers)
        self.joined = nn.Linear(depths * shape.hidden_size, shape.hidden_size, bias=False) if depths > 1 else None
        self.embed_norm = LlamaRMSNorm(shape.embedding_size, eps=_EPS)
        self.state_norm = LlamaRMSNorm(shape.hidden_size, eps=_EPS)
        self.project = nn.Linear(shape.embedding_size + shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.norm = LlamaRMSNorm(shape.hidden_size, eps=_EPS)
        self.rotary = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def initialize(self, final_norm: torch.Tensor | None) -> None:
        """Begin as the identity on the last state: nothing is joined to it and the layer adds nothing yet. final_norm:
        weights of the target's last norm, where they are known."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.ones_(parameter)
            if name.endswith(("o_proj.weight", "down_proj.weight", "joined.weight")):
                nn.init.zeros_(parameter)
        if self.joined is not None:
            self.joined.weight[:, -self.shape.hidden_size :] += torch.eye(self.shape.hidden_size)
        self.project.weight[:, self.shape.embedding_size :] += torch.eye(self.shape.hidden_size)
        if final_norm is not None:
            self.norm.weight.copy_(final_norm)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """(..., T, hidden) of the target's states (..., T, depths * hidden) as `StatesEngine` keeps them."""
        return states if self.joined is None else self.joined(states)

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """(..., T, hidden): what the layer goes on from, of next tokens' embeddings and hidden states."""
        joined = torch.cat([self.embed_norm(embedded), self.state_norm(states)], dim=-1)
        out: torch.Tensor = self.project(joined)
        return out

    def rollouts(self, states: torch.Tensor, embedded: torch.Tensor, depth: int, first: int = 0) -> list[torch.Tensor]:
        """What the positions of known texts from `first` on give as draft step 0, 1, ... `depth` of a round:
        (B, T - first, hidden) each, not normed yet.

        Position t of step d is drafted behind the target's states up to t - d and the head's own after it; of no use
        are those below first + d. Shapes: states (B, T, depths * hidden), of positions 0..T-1; embedded (B, T,
        embedding), of the tokens at 1..T. Cost: depth + 1 layers over these rows, attention (T - first) x T.
        """
        attention: Any = self.layer.self_attn
        count = states.shape[1]
        positions = torch.arange(count, device=states.device)
        cos, sin = (one.unsqueeze(1) for one in self.rotary(states, positions.unsqueeze(0)))
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        x = self.enter(embedded, self.join(states))
        embedded, groups = embedded[:, first:], self.shape.num_attention_heads // self.shape.num_key_value_heads
        for d in range(depth + 1):
            if d:
                x = self.enter(embedded, F.pad(x, (0, 0, 1, 0))[:, :-1])
            normed = self.layer.input_layernorm(x)
            query, key, value = (
                part(normed).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            own = slice(count - x.shape[1], count)
            keys.append(rotated(key, cos[:, :, own], sin[:, :, own]).repeat_interleave(groups, dim=1))
            values.append(value.repeat_interleave(groups, dim=1))
            if not d:  # the target's states give keys and values everywhere, and drafts from `first` on alone
                query, x, own = query[:, :, first:], x[:, first:], slice(first, count)
            seen = _attend(rotated(query, cos[:, :, own], sin[:, :, own]) * attention.scaling, keys, values)
            x = x + attention.o_proj(seen.transpose(1, 2).flatten(-2))
            x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
            found.append(x)
        return found

    def save(self, folder: Path, target: str, facts: dict[str, Any]) -> DraftWeights:
        """Write weights and config. target: the model's `weights_fingerprint`; facts: how they were trained."""
        folder.mkdir(parents=True, exist_ok=True)
        payload = save({name: one.detach().cpu().contiguous() for name, one in self.state_dict().items()})
        fingerprint = hashlib.sha256(payload).hexdigest()[:16]
        config = {
            "drafter": "eagle",
            "target_fingerprint": target,
            "fingerprint": fingerprint,
            "shape": asdict(self.shape),
            "training": facts,
        }
        write_atomically(folder / WEIGHTS_NAME, payload)
        write_atomically(folder / CONFIG_NAME, json.dumps(config, indent=2) + "\n")
        return DraftWeights(path=str(folder), fingerprint=fingerprint)


def _attend(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """(B, heads, R, head_dim): of queries of step d = len(keys) - 1 at the last R positions, over step 0's keys up to d
    positions before and one key of each step since."""
    steps, count = len(keys) - 1, keys[0].shape[2]
    places = torch.arange(count, device=query.device)
    hidden = places.unsqueeze(0) > places[count - query.shape[2] :].unsqueeze(1) - steps
    scores = (query @ keys[0].transpose(-1, -2)).masked_fill(hidden, float("-inf"))
    own_keys, own_values = ([_moved(one[i], steps - i) for i in range(1, steps + 1)] for one in (keys, values))
    own = [(query * key).sum(-1, keepdim=True) for key in own_keys]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
    out = weights[..., :count] @ values[0]
    for i, value in enumerate(own_values):
        out = out + weights[..., count + i, None] * value
    return out


def _moved(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Row t is what row t - count was."""
    return rows if count == 0 else F.pad(rows, (0, 0, count, 0))[:, :, :-count]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys (..., head_dim) at their positions, whose cosines and sines broadcast."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder of draft weights, or of a model that drafts. Raises: ValueError or OSError naming it."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(
            f"draft_weights: {folder} has no {CONFIG_NAME}; it must be what `python -m layerskip.train` wrote, or a "
            "smaller model, whatever its tokenizer"
        )
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not draft weights: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not draft weights: must be an object, got {type(config).__name__}")
    return config


def describe_eagle(folder: Path) -> tuple[DraftWeights, dict[str, Any]]:
    """Trained weights in a folder, and their config. Raises: ValueError or OSError naming the file."""
    config = read_config(folder)
    try:
        if config.get("drafter") != "eagle":
            raise ValueError("must have the drafter eagle")
        _shape_in(config)
        return DraftWeights(path=str(folder), fingerprint=config["fingerprint"]), config
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG_NAME}: not draft weights: {error}") from None


def check_aux_layers(layers: Sequence[int], num_layers: int, name: str) -> None:
    """Raises: ValueError, naming what they are called, unless a model of so many layers has them before its last."""
    if list(layers) != sorted(set(layers)) or any(not 0 <= one < num_layers - 1 for one in layers):
        rule = f"ascending layers of 0 to {num_layers - 2}" if num_layers > 1 else "left empty for a model of one layer"
        raise ValueError(f"{name}: must be {rule}, got {list(layers)}")


def _shape_in(config: dict[str, Any]) -> EagleShape:
    shape = dict(config["shape"])
    return EagleShape(**shape | {"aux_layers": tuple(shape.get("aux_layers", ()))})


def load_eagle(weights: DraftWeights, model: Any, target: str) -> EagleHead:
    """The head of a folder, for this model, in its number format and on its device.

    target: the model's `weights_fingerprint`. Raises: ValueError naming the rule for weights of another model, changed
    ones, and files that are missing or broken.
    """
    folder = locate_weights(weights.path)
    found, config = describe_eagle(folder)
    if found.fingerprint != weights.fingerprint:
        raise ValueError(
            f"draft_weights.fingerprint: must be that of {folder}, {found.fingerprint}, got {weights.fingerprint}"
        )
    if config.get("target_fingerprint") != target:
        raise ValueError(
            f"draft_weights: {folder} was trained for the model {config.get('target_fingerprint')}, this is {target}"
        )
    shape, expected = _shape_in(config), EagleShape.of(model)
    for name in ("hidden_size", "embedding_size", "vocab_size"):
        if getattr(shape, name) != getattr(expected, name):
            raise ValueError(
                f"draft_weights: {name} must be the model's {getattr(expected, name)}, got {getattr(shape, name)}"
            )
    check_aux_layers(
        shape.aux_layers, model.config.get_text_config(decoder=True).num_hidden_layers, "draft_weights: aux_layers"
    )
    file = folder / WEIGHTS_NAME
    if not file.is_file():
        raise ValueError(f"draft_weights: {folder} has no {WEIGHTS_NAME}")
    if hashlib.sha256(file.read_bytes()).hexdigest()[:16] != weights.fingerprint:
        raise ValueError(f"{file}: is not the file that {CONFIG_NAME} was written with, its fingerprint differs")
    head = EagleHead(shape)
    try:
        head.load_state_dict(load_file(file))
    except RuntimeError:
        raise ValueError(f"{file}: is not of the shape that {CONFIG_NAME} beside it tells") from None
    if (
        head.draft_ids is not None
        and not 0 <= int(head.draft_ids.min()) <= int(head.draft_ids.max()) < shape.vocab_size
    ):
        raise ValueError(f"{file}: draft_ids must be token ids of 0 to {shape.vocab_size - 1}")
    like = model.get_input_embeddings().weight
    return head.to(device=like.device, dtype=like.dtype).eval().requires_grad_(requires_grad=False)
