"""Llama models of real shapes with random weights, made on the device: costs and texts like those of trained ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip import LayerSkipModel
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import RerunRecorder

_MAX_POSITIONS = 8192
_BOOST = 6.0
_LOGIT_SCALE = 3.0


@dataclass(frozen=True)
class Shape:
    """Of a model; the sizes of published ones, so that their speeds can be compared."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    mlp: int
    vocab: int
    head_dim: int = field(kw_only=True)


SHAPES = {
    "tiny": Shape(4, 64, 4, 2, 128, 512, head_dim=16),
    "small": Shape(8, 512, 8, 2, 1408, 4096, head_dim=64),
    "1b": Shape(16, 2048, 32, 8, 8192, 128_256, head_dim=64),
    "3b": Shape(28, 3072, 24, 8, 8192, 128_256, head_dim=128),
    "8b": Shape(32, 4096, 32, 8, 14_336, 128_256, head_dim=128),
}
"""`small` is for what is checked in float32. The others are shaped like Llama 3's models of these sizes."""


def random_llama(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, damping: float = 1.0, first_damped: int | None = None
) -> Any:
    """A model in evaluation mode, the same for the same arguments; its greedy texts are full length and varied.

    damping: factor on what each layer from `first_damped` on (a quarter of the depth) adds to the residual stream, so
    that a draft without those layers agrees with the target the more often, the smaller it is.

    Hidden states are made of the token's embedding and, over all layers at damping 1, twice as much added by them. The
    head favours one successor of each token, so that about every second token is a clear case, as in real text;
    without that, bfloat16 would round to ties every twentieth token. Head and embedding are apart where the
    published models of this size tie them, for a tied random model only repeats its last token: a step reads the same
    bytes.
    """
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=_MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    _randomise(model, shape, damping, shape.layers // 4 if first_damped is None else first_damped)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def _randomise(model: Any, shape: Shape, damping: float, first_damped: int) -> None:
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    generator = torch.Generator(embedding.device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            std = 1.0 if parameter is embedding else parameter.shape[1] ** -0.5
            parameter.normal_(0.0, std, generator=generator)
    successors = torch.randperm(shape.vocab, generator=generator, device=embedding.device)
    head.add_(embedding[successors], alpha=_BOOST / shape.hidden).mul_(_LOGIT_SCALE)
    for place, layer in enumerate(model.model.layers):
        share = (2 / shape.layers) ** 0.5 * (damping if place >= first_damped else 1.0)
        layer.self_attn.o_proj.weight.mul_(share)
        layer.mlp.down_proj.weight.mul_(share)


def random_prompt(shape: Shape, num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, shape.vocab) for _ in range(num_tokens))


def on_engine(model: Any, engine: str) -> LayerSkipModel:
    """The model on an engine. On a CPU the graph engine runs its work again instead of replaying a recording of it.

    So a rehearsal without a GPU runs everything but the capture itself.
    """
    if engine != "cuda_graph" or model.device.type == "cuda":
        return LayerSkipModel(model, engine=engine)
    wrapped = LayerSkipModel(model, engine="eager")
    executor = LeanExecutor(FusedEngine(wrapped.adapter))
    wrapped._engine = CudaGraphEngine(wrapped.adapter, executor, RerunRecorder())
    wrapped.engine_reason = "rehearsal: work is run again instead of replayed"
    return wrapped
