"""Llama models of any size with random weights: their costs are a trained model's, their words are not."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip import LayerSkipModel

VOCABULARY = 4096
MAX_POSITIONS = 8192


def random_llama(
    num_layers: int, hidden_size: int, *, dtype: torch.dtype = torch.float32, engine: str = "auto"
) -> LayerSkipModel:
    """Heads of 64, an MLP of 2.75 times the hidden size, 4,096 tokens; no end-of-text, so every output is full."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=max(hidden_size // 64, 1),
        num_key_value_heads=max(hidden_size // 64, 1),
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return LayerSkipModel(model, engine=engine)


def random_text(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, VOCABULARY) for _ in range(num_tokens))
