"""Tiny random models of every supported architecture, made so that their drafts are sometimes right."""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig

from layerskip import LayerSkipModel, Provenance, SkipMask
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.draft_weights import describe_weights
from layerskip.drafters.eagle.published import Eagle3Layers, Eagle3Shape
from layerskip.engines.native.library import load_kernels
from layerskip.training.data import Sequences, Text
from layerskip.training.eagle import TrainOptions, train_eagle
from studies.mtp.checkpoint import layer_loss, new_layer, save_layer

VOCAB = 61
NUM_LAYERS = 4
MAX_POSITIONS = 96
WINDOW = 6
LONGEST = 24
"""Budget of the cached reference continuations."""
SPREAD: dict[str, int | str] = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.layers.3": "disk",
    "model.norm": "cpu",
    "lm_head": "disk",
}
"""A device map of a Llama: parts in main memory, parts on disk."""

_SPECIALS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_HEADS = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB, **_SPECIALS}
_PLAIN = {**_HEADS, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": MAX_POSITIONS}
_PLAIN |= {"tie_word_embeddings": False}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_FALCON = {**_HEADS, "hidden_size": 32, "tie_word_embeddings": False}
_OPT = {
    **_HEADS,
    "hidden_size": 32,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
_ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_ROUTED |= {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
_DELTA = {**_GROUPED, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2}
_DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_DELTA |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FEW_EXPERTS |= {"shared_expert_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Spec:
    """One architecture: its config class, arguments, and the modules that write into the residual stream."""

    config_class: str
    arguments: dict[str, Any]
    attention_out: str = "self_attn.o_proj"
    """Where layers differ, several with a bar between."""
    mlp_out: str = "mlp.down_proj"
    post_norms: tuple[str, ...] = ()
    """Norms between a sublayer and the residual stream; they set how much the sublayer counts."""
    scale: float = 1.0
    """Of what sublayers add."""
    sublayers: bool = True
    """May attention and MLP be skipped apart?"""
    seed: int = 0
    """One whose greedy texts are varied."""


_POST = ("post_attention_layernorm", "post_feedforward_layernorm")
SPECS: dict[str, Spec] = {
    "llama": Spec("LlamaConfig", _GROUPED),
    "qwen2": Spec("Qwen2Config", _GROUPED),
    "qwen2-sliding": Spec(
        "Qwen2Config", {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen3": Spec("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "mistral": Spec("MistralConfig", {**_GROUPED, "sliding_window": None}),
    "mistral-sliding": Spec("MistralConfig", {**_GROUPED, "sliding_window": WINDOW}),
    "gemma2": Spec("Gemma2Config", {**_GROUPED, "head_dim": 8, "sliding_window": WINDOW}, post_norms=_POST),
    "gemma3": Spec(
        "Gemma3TextConfig",
        {**_GROUPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED},
        post_norms=_POST,
        seed=1,
    ),
    "phi": Spec("PhiConfig", _GROUPED, "self_attn.dense", "mlp.fc2"),
    "phi3": Spec("Phi3Config", _GROUPED),
    "gpt_neox": Spec("GPTNeoXConfig", _PLAIN, "attention.dense", "mlp.dense_4h_to_h"),
    "gpt2": Spec(
        "GPT2Config",
        {**_SPECIALS, "vocab_size": VOCAB, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4}
        | {"n_positions": MAX_POSITIONS, "tie_word_embeddings": False},
        "attn.c_proj",
        "mlp.c_proj",
    ),
    "opt": Spec("OPTConfig", _OPT, "self_attn.out_proj", "fc2"),
    "opt-post-norm": Spec(
        "OPTConfig", {**_OPT, "do_layer_norm_before": False}, "self_attn.out_proj", "fc2", sublayers=False, seed=3
    ),
    "falcon-old": Spec(
        "FalconConfig", {**_FALCON, "multi_query": True}, "self_attention.dense", "mlp.dense_4h_to_h", seed=5
    ),
    "falcon-new": Spec(
        "FalconConfig",
        {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
        "self_attention.dense",
        "mlp.dense_4h_to_h",
    ),
    "falcon-alibi": Spec(
        "FalconConfig",
        {**_FALCON, "alibi": True, "new_decoder_architecture": False, "parallel_attn": False, "bias": True},
        "self_attention.dense",
        "mlp.dense_4h_to_h",
    ),
    "bloom": Spec(
        "BloomConfig",
        {**_SPECIALS, "vocab_size": VOCAB, "hidden_size": 32, "n_layer": NUM_LAYERS, "n_head": 4}
        | {"tie_word_embeddings": False},
        "self_attention.dense",
        "mlp.dense_4h_to_h",
        seed=3,
    ),
    "mpt": Spec(
        "MptConfig",
        {**_SPECIALS, "vocab_size": VOCAB, "d_model": 32, "n_layers": NUM_LAYERS, "n_heads": 4}
        | {"max_seq_len": MAX_POSITIONS, "tie_word_embeddings": False},
        "attn.out_proj",
        "ffn.down_proj",
    ),
    "olmo2": Spec("Olmo2Config", _GROUPED, post_norms=_POST),
    "smollm3": Spec("SmolLM3Config", _GROUPED),
    "granite": Spec("GraniteConfig", _GROUPED),
    "stablelm": Spec("StableLmConfig", _GROUPED),
    "cohere2": Spec("Cohere2Config", {**_GROUPED, "sliding_window": WINDOW, "logit_scale": 1.0, "layer_types": _MIXED}),
    "starcoder2": Spec("Starcoder2Config", _GROUPED, mlp_out="mlp.c_proj"),
    "mixtral": Spec("MixtralConfig", {**_GROUPED, "num_local_experts": 4}, mlp_out="mlp.experts"),
    "qwen3-moe": Spec(
        "Qwen3MoeConfig",
        {**_GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        mlp_out="mlp.experts",
    ),
    "qwen2-moe": Spec(
        "Qwen2MoeConfig",
        {**_GROUPED, **_FEW_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False},
        mlp_out="mlp",
    ),
    "gpt-oss": Spec(
        "GptOssConfig",
        {**_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
        | {"layer_types": _MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        mlp_out="mlp.experts",
        seed=2,
    ),
    "glm4-moe": Spec("Glm4MoeConfig", {**_GROUPED, "head_dim": 8, **_ROUTED}, mlp_out="mlp"),
    "deepseek-v3": Spec(
        "DeepseekV3Config",
        {**_PLAIN, "num_key_value_heads": 4, **_ROUTED, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 12},
        mlp_out="mlp",
    ),
    "gemma3n": Spec(
        "Gemma3nTextConfig",
        {**_GROUPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED, "num_kv_shared_layers": 2}
        | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCAB},
        sublayers=False,
        post_norms=_POST,
    ),
    "gemma4": Spec(
        "Gemma4TextConfig",
        {**_GROUPED, "head_dim": 8, "global_head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED}
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
        sublayers=False,
        post_norms=_POST,
    ),
    "qwen3_5": Spec("Qwen3_5TextConfig", _DELTA, "linear_attn.out_proj|self_attn.o_proj"),
    "qwen3-next": Spec("Qwen3NextConfig", {**_DELTA, **_FEW_EXPERTS}, "linear_attn.out_proj|self_attn.o_proj", "mlp"),
    "olmo-hybrid": Spec("OlmoHybridConfig", _DELTA, "linear_attn.o_proj|self_attn.o_proj"),
    "lfm2": Spec(
        "Lfm2Config",
        {**_GROUPED, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
        "conv.out_proj|self_attn.out_proj",
        "feed_forward.w2",
    ),
    "qwen3_5-moe": Spec(
        "Qwen3_5MoeTextConfig", {**_DELTA, **_FEW_EXPERTS}, "linear_attn.out_proj|self_attn.o_proj", "mlp"
    ),
    "lfm2-moe": Spec(
        "Lfm2MoeConfig",
        {**_GROUPED, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_dense_layers": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "conv.out_proj|self_attn.out_proj",
        "feed_forward",
    ),
    "bamba": Spec(
        "BambaConfig",
        {**_GROUPED, "attn_layer_indices": [1, 3], **_MAMBA},
        "mamba.out_proj|self_attn.o_proj",
        "feed_forward.down_proj",
    ),
    "granite-hybrid": Spec(
        "GraniteMoeHybridConfig",
        {**_GROUPED, "layer_types": ["mamba", "attention"] * 2, **_MAMBA, "shared_intermediate_size": 16}
        | {"num_local_experts": 0},
        "mamba.out_proj|self_attn.o_proj",
        "shared_mlp.output_linear",
    ),
    "granite-moe": Spec(
        "GraniteMoeHybridConfig",
        {**_GROUPED, "layer_types": ["mamba", "attention"] * 2, **_MAMBA, "shared_intermediate_size": 16}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "mamba.out_proj|self_attn.o_proj",
        "shared_mlp|block_sparse_moe",
    ),
}
SAME_PARTS = ("qwen2-moe", "qwen3_5-moe", "lfm2-moe", "granite-moe")
"""What they are made of others have too: left to the tests of what is compiled for a CPU."""
NAMES = tuple(name for name in SPECS if name not in SAME_PARTS)
WITH_MTP = ("glm4-moe", "deepseek-v3")
"""Have multi-token-prediction layers in their checkpoints."""
COMPILED = (
    ()
    if isinstance(load_kernels(), str)
    else ("qwen3_5", "lfm2", "gemma4", "granite-hybrid", "bamba", "mixtral", "qwen3-moe", "glm4-moe")
)
"""Served by the fused engine where there are kernels for this CPU, alone."""
FUSED = (
    "llama",
    "qwen2",
    "qwen2-sliding",
    "qwen3",
    "mistral",
    "mistral-sliding",
    "smollm3",
    "gemma3",
    "granite",
    *COMPILED,
)
SHARING = ("gemma3n", "gemma4")
"""The last two layers read the keys and values of the first two."""
RECURRENT = ("qwen3_5", "qwen3-next", "olmo-hybrid", "lfm2", "bamba", "granite-hybrid")
"""Every other layer keeps a state in place of keys and values."""
NOT_RECORDED = ("opt", "opt-post-norm", "falcon-old", "falcon-new", "falcon-alibi", "bloom", "mpt")
"""Ask for the text's length in the middle of a forward, or cannot be told positions."""
RECORDED = tuple(name for name in NAMES if name not in NOT_RECORDED + RECURRENT + SHARING)
FEW = ("llama", "gemma3", "gpt2", "falcon-new", "qwen3_5")
"""Rotary, two kinds of windows, learned positions, sublayers side by side, layers that keep a state: enough where
identity is shown of all."""
_SUFFIX = " fused"
_GRAPH_SUFFIX = " graph"
RUNS = NAMES + tuple(name + _SUFFIX for name in FUSED)
GRAPH_RUNS = tuple(name + _GRAPH_SUFFIX for name in ("llama", "mistral-sliding", "gemma3", "gemma2"))
"""The CUDA-graph engine with its graphs played from a tape: modules for the last, lean layers for the others."""
"""Architectures on the eager engine, and once more those that the fused one serves. Every function here takes both."""


WITHOUT_TREES = ("bloom", "mpt", "falcon-alibi", *RECURRENT)
"""Their positions follow from the order of keys, or their states from that of tokens."""


def architecture(run: str) -> str:
    return run.removesuffix(_SUFFIX).removesuffix(_GRAPH_SUFFIX)


def spec_of(run: str) -> Spec:
    return SPECS[architecture(run)]


def build(name: str, *, seed: int | None = None, **overrides: Any) -> Any:
    """A fresh model; weights depend on the seed alone."""
    spec = spec_of(name)
    config = getattr(transformers, spec.config_class)(**{**spec.arguments, **overrides})
    seed = spec.seed if seed is None else seed
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some parameters keep the mean that Transformers drew
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    _randomise(model, spec, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def written_by(layer: nn.Module, paths: str) -> nn.Module:
    """Of `Spec.attention_out` or `mlp_out` this layer's."""
    names = dict(layer.named_modules())
    return next(names[path] for path in paths.split("|") if path in names)


def model_of(name: str) -> Any:
    """The shared model of this architecture; do not change it."""
    return _model_of(architecture(name))


@functools.cache
def _model_of(name: str) -> Any:
    # Kept for all tests, so it must not depend on the mode of the one that asks first.
    with torch.inference_mode(mode=False):
        return build(name)


@functools.cache
def layerskip_of(name: str) -> LayerSkipModel:
    # Never "auto": it goes by time, and a test must run the same code every time.
    if name.endswith(_GRAPH_SUFFIX):
        from tests.layerskip.tape import graph_model  # which imports this module

        return graph_model(architecture(name))
    return LayerSkipModel(model_of(name), engine="fused" if name.endswith(_SUFFIX) else "eager")


def _own_texts(model: Any) -> torch.Tensor:
    """24 prompts of six tokens, each with the 40 that the model says next: (24, 46)."""
    prompts = torch.tensor([prompt_of(6, seed=i) for i in range(24)])
    return model.generate(prompts, max_new_tokens=40, pad_token_id=0)


@functools.cache
def eagle_of(run: str) -> DraftWeights:
    """Draft weights trained for a moment on the model's own texts, so that their drafts are sometimes right; of Llama
    such as read the states of several layers."""
    with torch.inference_mode(mode=False):
        model = LayerSkipModel(model_of(run), engine="eager")
        own = [Text(tuple(one)) for one in _own_texts(model_of(run)).tolist()]
        aux_layers = (0, 2) if run == "llama" else ()
        few = VOCAB // 2 if run == "gemma3" else None
        options = TrainOptions(steps=30, depth=3, learning_rate=0.02, aux_layers=aux_layers, draft_vocab=few)
        folder = Path(tempfile.mkdtemp(prefix="eagle-"))
        return train_eagle(
            model, Sequences(tuple(own[2:]), tuple(own[:2])), folder, options, tell=lambda _: None
        ).weights


@functools.cache
def published_of(run: str) -> DraftWeights:
    """Weights as EAGLE-3's are published, over half of the token ids, trained for a moment on the model's texts."""
    folder = Path(tempfile.mkdtemp(prefix="eagle3-"))
    with torch.inference_mode(mode=False):
        model, generator = model_of(run), torch.Generator().manual_seed(5)
        ids = _own_texts(model)
        draft_ids = ids.flatten().bincount(minlength=VOCAB).argsort(descending=True)[: VOCAB // 2].sort().values
        hidden, heads = model.config.hidden_size, model.config.num_attention_heads
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{name: getattr(model.config, name) for name in ("vocab_size", "intermediate_size", "rms_norm_eps")},
            **{"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 2, "num_hidden_layers": 1},
            "max_position_embeddings": MAX_POSITIONS,
            "draft_vocab_size": len(draft_ids),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
        layers = Eagle3Layers(LlamaConfig(**config), Eagle3Shape((0, 1, 2), len(draft_ids)))
        with torch.no_grad():
            for one in layers.parameters():
                if one.ndim == 2:
                    one.copy_(torch.randn(one.shape, generator=generator) * 0.1)
            output = model(ids, output_hidden_states=True)
            states, embedded = (
                torch.cat(output.hidden_states[1:4], dim=-1)[:, :-1],
                model.get_input_embeddings()(ids[:, 1:]),
            )
            wanted = output.logits[:, 1:, draft_ids].softmax(-1)
        layer, positions = layers.midlayer, torch.arange(1, ids.shape[1]).unsqueeze(0)
        unseen = torch.full((positions.shape[1],) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = layers.rotary(embedded, position_ids=positions)
        optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
        for _ in range(80):
            optimizer.zero_grad()
            out = layers.fc(states)
            read = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(out)], dim=-1)
            out = out + layer.self_attn(read, attention_mask=unseen, position_embeddings=rotary)[0]
            out = out + layer.mlp(layer.post_attention_layernorm(out))
            logits = layers.lm_head(layers.norm(out))
            (-(wanted * logits.log_softmax(-1)).sum(-1).mean()).backward()
            optimizer.step()
        tensors = {name: one.detach().contiguous() for name, one in layers.state_dict().items()}
    tensors |= {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": torch.zeros(VOCAB).bool()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return describe_weights(folder)


@functools.cache
def mtp_of(run: str) -> DraftWeights:
    """The multi-token-prediction layer of `mtp_folder`, which the shared model is told of here."""
    model = model_of(run)
    model.config.name_or_path = str(mtp_folder(run))
    return LayerSkipModel(model, engine="eager").mtp_weights()


@functools.cache
def mtp_folder(run: str) -> Path:
    """The model's checkpoint and a tokenizer of words, w0 and so on, with a multi-token-prediction layer in it that was
    trained for a moment on its texts."""
    return with_mtp_layer(model_of(run))


def with_mtp_layer(model: Any) -> Path:
    """The same of any model whose config tells of such a layer."""
    folder = Path(tempfile.mkdtemp(prefix="mtp-"))
    with torch.inference_mode(mode=False), torch.random.fork_rng():
        torch.manual_seed(5)
        ids = _own_texts(model)
        mtp = new_layer(model)
        optimizer = torch.optim.Adam(mtp.layers.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            layer_loss(model, mtp, ids, depth=2).backward()
            optimizer.step()
        model.save_pretrained(folder)
        save_layer(mtp, model.config.num_hidden_layers, folder)
    tokenizer_of([f"w{i}" for i in range(VOCAB)]).save_pretrained(folder)
    return folder


def tokenizer_of(words: Sequence[str]) -> Any:
    """Each word is a token; any other is taken for the first one."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@functools.cache
def draft_model_of(run: str) -> DraftWeights:
    """A model that is often right: the target with noise in its weights, as a folder."""
    folder = Path(tempfile.mkdtemp(prefix="draft-model-"))
    with torch.inference_mode(mode=False), torch.no_grad():
        model = copy.deepcopy(model_of(run))
        noise = torch.Generator().manual_seed(3)
        for one in model.parameters():
            one += 0.1 * one.std() * torch.randn(one.shape, generator=noise) if one.numel() > 1 else 0.0
        model.save_pretrained(folder)
    return describe_weights(folder)


@functools.cache
def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(f"{length} {seed}")
    return tuple(draw.randrange(1, VOCAB) for _ in range(length))


def greedy_reference(name: str, prompt: tuple[int, ...], num_tokens: int = LONGEST) -> tuple[int, ...]:
    """Hugging Face's own greedy continuation; prefixes of it answer for smaller budgets."""
    return _greedy_reference(architecture(name), prompt, num_tokens)


@functools.cache
def _greedy_reference(name: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    out = model_of(name).generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def stack_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, found without the adapter: the only list of that many modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == NUM_LAYERS]
    return next(m for m in lists if any("att" in child for layer in m for child, _ in layer.named_children()))


def zeroed_copy(name: str, mask: SkipMask) -> Any:
    """The model with the skipped sublayers' last weights and biases set to zero: a draft without any gate."""
    spec, model = spec_of(name), copy.deepcopy(model_of(name))
    with torch.no_grad():
        for i, layer in enumerate(stack_of(model)):
            for flag, out in ((mask.attention[i], spec.attention_out), (mask.mlp[i], spec.mlp_out)):
                for parameter in written_by(layer, out).parameters() if flag else ():
                    parameter.zero_()
    return model


def shortened_copy(name: str, mask: SkipMask) -> Any:
    """The model without the wholly skipped layers."""
    model = copy.deepcopy(model_of(name))
    stack = stack_of(model)
    for i in reversed(mask.skipped_layers):
        del stack[i]
    model.config.num_hidden_layers = len(stack)
    return model


class _Bypass(nn.Module):
    """A layer that adds nothing, and leaves for others what it would."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.layer(hidden, *args, **kwargs)
        return hidden


def bypassed_copy(name: str, mask: SkipMask) -> Any:
    """The model with the wholly skipped layers computed and not listened to, where later layers read their keys."""
    model = copy.deepcopy(model_of(name))
    stack = stack_of(model)
    for i in mask.skipped_layers:
        stack[i] = _Bypass(stack[i])
    return model


def masks_of(name: str) -> dict[str, SkipMask]:
    """One of every kind that this architecture allows."""
    kinds = {
        "none": SkipMask.none(NUM_LAYERS),
        "early exit": SkipMask.early_exit(NUM_LAYERS, 2),
        "interior": SkipMask.contiguous(NUM_LAYERS, 1, NUM_LAYERS - 2),
        "alternating": SkipMask.alternating(NUM_LAYERS, offset=1),
        "layer 0": SkipMask.from_layers(NUM_LAYERS, [0, 2]),
        "few tokens": SkipMask.early_exit(NUM_LAYERS, 3).narrowed(VOCAB // 2),
        "eight bits": SkipMask.contiguous(NUM_LAYERS, 2, 1).rounded(8),
        "eight bits, few tokens": SkipMask.none(NUM_LAYERS).rounded(8).narrowed(VOCAB // 2),
    }
    if spec_of(name).sublayers:
        kinds |= {
            "attention": SkipMask.from_sublayers(NUM_LAYERS, attention=[0, 1, 3]),
            "mlp": SkipMask.from_sublayers(NUM_LAYERS, mlp=[0, 2]),
            "mixture": SkipMask.from_sublayers(NUM_LAYERS, attention=[0, 1], mlp=[1, 3]),
        }
    return kinds


def random_mask(num_layers: int, draw: random.Random, *, sublayers: bool = True) -> SkipMask:
    attention = [i for i in range(num_layers) if draw.random() < 0.4]
    mlp = [i for i in range(num_layers) if draw.random() < 0.4] if sublayers else attention
    return SkipMask.from_sublayers(num_layers, attention=attention, mlp=mlp)


def _randomise(model: nn.Module, spec: Spec, generator: torch.Generator) -> None:
    """Untied, confident and context-dependent: early layers matter more than late ones, so drafts hit about half."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    config = model.config  # type: ignore[union-attr]
    scales_embedding = config.model_type.startswith("gemma")

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is embedding:
                normal(parameter, 32**-0.5 if scales_embedding else 1.0)
            elif parameter is head:
                normal(parameter, 0.6)
            elif parameter.ndim >= 2:
                normal(parameter, 32**-0.5)
            elif name.endswith("bias"):
                normal(parameter, 0.1)
            else:
                normal(parameter, 0.1, float(parameter.mean()))
        for i, layer in enumerate(stack_of(model)):
            share = spec.scale * (0.8 if i == 0 else 0.35)
            for out in (spec.attention_out, spec.mlp_out):
                for parameter in written_by(layer, out).parameters():
                    parameter.mul_(share)
            for norm in spec.post_norms:
                weight = layer.get_submodule(norm).weight
                normal(weight, 0.05, 0.5 * share - (1.0 if scales_embedding else 0.0))


def each(names: Sequence[str] = NAMES) -> Callable[[Any], Any]:
    """Parametrise a test over architectures."""
    import pytest

    return pytest.mark.parametrize("name", names)


def few(names: Sequence[str] = NAMES, fast: Sequence[str] = FEW) -> Callable[[Any], Any]:
    """The same, but only these architectures are among the fast tests, and of those recorded one with one window."""
    import pytest

    slow = {name for name in names if architecture(name) not in fast or name == "gemma3 graph"}
    marks = {name: pytest.mark.slow if name in slow else () for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def saved_beside(folder: Path, model: LayerSkipModel, max_new_tokens: int) -> Provenance:
    """Writes the model, which has a tokenizer, into `model` in this folder; what a config tuned on it there says."""
    for part in (model.model, model.tokenizer):
        part.save_pretrained(folder / "model")
    return Provenance(
        model="./model",
        weights_fingerprint=model.weights_fingerprint(),
        device="cpu",
        dtype="float32",
        num_layers=NUM_LAYERS,
        num_threads=1,
        engine="eager",
        max_new_tokens=max_new_tokens,
    )
