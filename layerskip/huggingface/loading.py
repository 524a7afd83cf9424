"""Load a causal LM and its tokenizer with one-line errors; fingerprint its weights."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from layerskip.config.decode_config import QuantizationName
from layerskip.huggingface.device_map import DeviceMap, check_device_map, refuse_tensor_parallel
from layerskip.huggingface.placement import stored_weight
from layerskip.huggingface.quantization.weights import is_plain, quantize

logger = logging.getLogger(__name__)

_SAMPLES_PER_TENSOR = 64


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. Raises ValueError for a device that is not there."""
    device = str(device)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}") from None
    if resolved.type == "cuda" and (
        not torch.cuda.is_available() or (resolved.index or 0) >= torch.cuda.device_count()
    ):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ValueError(f"device: CUDA device asked for, and this machine has {count} of them, got {device!r}")
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device: MPS asked for, and this machine has none, got {device!r}")
    return resolved


def named_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """None for `auto`. Raises ValueError for an unknown one."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    name = str(dtype).removeprefix("torch.")
    if name != "auto" and name not in names:
        raise ValueError(f"dtype: must be 'auto' or one of {', '.join(names)}, got {dtype!r}")
    return names.get(name)


def load_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    quantization: QuantizationName | None = None,
    device_map: DeviceMap | None = None,
    cpu_bfloat16: bool = False,
    **hub_arguments: Any,
) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer or None). See `LayerSkipModel.from_pretrained`; cpu_bfloat16: whether `auto`
    keeps bfloat16 on a CPU."""
    refuse_tensor_parallel(hub_arguments)
    if quantization is not None:
        if quantization not in get_args(QuantizationName):
            names = ", ".join(get_args(QuantizationName))
            raise ValueError(f"quantization: must be one of {names}, got {quantization!r}")
        if device_map is not None:
            raise ValueError(f"quantization: {quantization} needs a model on one device, got a device_map")
    if device_map is not None:
        device_map = check_device_map(device_map, str(device))
        _check_accelerate()
    target_device = resolve_device(device) if device_map is None else main_device(device_map)
    asked_dtype = named_dtype(dtype)
    name = os.fspath(name_or_path)
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"model: {name} is a folder without a config.json")
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"model: no such folder: {name}")
    if hub_arguments.get("trust_remote_code"):
        logger.warning("trust_remote_code is on: %s may run its own code on this machine", name)
    placed = {} if device_map is None else {"device_map": device_map}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The following device_map keys", category=UserWarning)  # below
            config = AutoConfig.from_pretrained(name, **_for_any_part(hub_arguments))
            published = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
            keeps = target_device.type != "cpu" or (cpu_bfloat16 and published == torch.bfloat16)
            own_dtype = "auto" if keeps else torch.float32
            model, found = _auto_class(config).from_pretrained(
                name,
                dtype=asked_dtype or own_dtype,
                use_safetensors=True,
                output_loading_info=True,
                **placed,
                **hub_arguments,
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model: cannot load {name}: {_one_line(error)}") from None
    if missing := sorted(found["missing_keys"]):  # Transformers would draw them at random
        more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise ValueError(f"model: {name} lacks weights: {', '.join(missing[:3])}{more}")
    model.eval()
    if device_map is None:
        model = model.to(target_device)
        if quantization is not None:
            quantize(model, quantization)
    else:
        _look_at_placed(model, name, device_map)
    return model, _load_tokenizer(name, hub_arguments)


def _auto_class(config: Any) -> Any:
    """What loads it: some models that see pictures too, such as Mistral 3 and Qwen3-VL, are no causal LM's by name."""
    own = getattr(config, "auto_map", None) or {}
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own
    sees_pictures = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees_pictures and not is_causal else AutoModelForCausalLM


def _for_any_part(hub_arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that go with a config and a tokenizer too."""
    names = ("revision", "trust_remote_code", "local_files_only")
    return {name: hub_arguments[name] for name in names if name in hub_arguments}


def main_device(device_map: DeviceMap) -> torch.device:
    """The device that computes first: an accelerator where the map has one, else the CPU.

    Raises: ValueError for a device that is not there.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if isinstance(device_map, str):
        return accelerator or torch.device("cpu")
    main = None
    for module, place in device_map.items():
        if place in ("cpu", "disk"):
            continue
        kind = "cuda" if accelerator is None else accelerator.type
        try:
            device = resolve_device(f"{kind}:{place}" if isinstance(place, int) else place)
        except ValueError as error:
            raise ValueError(f"device_map.{module}: {error}") from None
        main = main or device
    return main or torch.device("cpu")


def _check_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("device_map: needs the accelerate library: pip install 'layerskip[large]'")


def _look_at_placed(model: nn.Module, name: str, device_map: DeviceMap) -> None:
    """Warns of weights that are kept elsewhere. Raises: ValueError for a key of the map that names no module."""
    if isinstance(device_map, Mapping):
        tensors = {tensor for tensor, _ in (*model.named_parameters(), *model.named_buffers())}
        modules = {module for module, _ in model.named_modules()}
        if unknown := next((key for key in device_map if key not in modules | tensors), None):
            raise ValueError(f"device_map: keys must be modules of {name}, got {unknown!r}")
    sizes = [(parameter.device.type == "meta", parameter.nbytes) for parameter in model.parameters()]
    kept = sum(size for is_elsewhere, size in sizes if is_elsewhere)
    if kept:
        share = 100 * kept / sum(size for _, size in sizes)
        logger.warning(
            "%s: %.0f %% of its weights (%d MiB) are kept in main memory or on disk and copied for every forward, "
            "which takes most of the time",
            name,
            share,
            kept >> 20,
        )


def _load_tokenizer(name: str, hub_arguments: dict[str, Any]) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **_for_any_part(hub_arguments))
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        logger.warning("no tokenizer for %s (%s): prompts must be token ids", name, _one_line(error))
        return None
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        # For a folder without tokenizer files some model types come back with an empty vocabulary.
        logger.warning("no tokenizer for %s (its vocabulary is empty): prompts must be token ids", name)
        return None
    return tokenizer


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] + ("…" if len(text) > 300 else "")


def _distinct_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Tied ones once, under their first name; that some are tied, offloaded ones do not show."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    groups: set[str] = set()
    for name, parameter in model.named_parameters():
        group = tied.get(name, name)
        if parameter.device.type != "meta" or group not in groups:
            yield name, parameter
        groups.add(group)


def weights_fingerprint(model: nn.Module) -> str:
    """16 hex digits over names, shapes and evenly spaced values of every floating-point parameter.

    Values are compared as bfloat16, so that the same checkpoint loaded in another dtype has the same fingerprint; but
    for one with float32 numbers that is loaded in float16, which has rounded them otherwise.
    Cost: a gather of 64 values a tensor and one copy to the host each; weights offloaded to disk are read once.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(_distinct_parameters(model)):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.is_floating_point() and parameter.numel():
            values = stored_weight(model, name) if parameter.device.type == "meta" else parameter.detach()
            if not is_plain(parameter):
                values = values.dequantize()
            flat = values.reshape(-1)
            index = torch.linspace(0, flat.numel() - 1, _SAMPLES_PER_TENSOR, dtype=torch.float64).long()
            sample = flat[index.to(flat.device)].to(torch.bfloat16).view(torch.int16).cpu()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]
