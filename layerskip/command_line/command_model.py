"""What the commands that decode share: flags that name config, model and machine, and what follows from them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from layerskip.command_line.cli import quiet_libraries
from layerskip.config.decode_config import ABOUT_QUANTIZATION, ENGINE_NAMES, DecodeConfig, QuantizationName
from layerskip.huggingface.device_map import ABOUT_DEVICE_MAP, DeviceMap, parse_device_map, refuse_torchrun
from layerskip.machine.host import keep_to_cpu_limit

if TYPE_CHECKING:
    from layerskip.model import LayerSkipModel

_DEFAULT_NEW_TOKENS = 128


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `read_config`, `load_model` and `max_new_tokens` read."""
    add_loading_arguments(parser)
    parser.add_argument("--group", metavar="NAME", help="use the config's setting for this prompt group")
    parser.add_argument(
        "--max-new-tokens", type=int, help=f"default: what the config was tuned for, else {_DEFAULT_NEW_TOKENS}"
    )


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `load_config` and `load_model` read."""
    parser.add_argument("--config", type=Path, help="decode config, as the search exports it (best.json)")
    parser.add_argument("--model", help="Hugging Face id or folder; default: the model that the config names")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_device_map_argument(parser)
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16; default: what the config was tuned for")
    add_quantization_argument(parser)
    parser.add_argument("--engine", choices=ENGINE_NAMES, help="default: what the config was tuned with, else auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: what the config was tuned for")
    parser.add_argument(
        "--allow-lossy", action="store_true", help="take a config with a lossy rule; its output is not the model's own"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's repository run its own code")


def add_quantization_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantization", choices=get_args(QuantizationName), help=ABOUT_QUANTIZATION)


def add_device_map_argument(parser: argparse.ArgumentParser) -> None:
    """The flag that `device_map_of` reads."""
    parser.add_argument("--device-map", metavar="MAP", help=ABOUT_DEVICE_MAP)


def device_map_of(arguments: argparse.Namespace) -> DeviceMap | None:
    """What --device-map says. Raises: ValueError, also in a torchrun job: these commands are one process."""
    refuse_torchrun("for a model that is larger than one device use --device-map auto in one process")
    return parse_device_map(arguments.device_map)


def read_config(arguments: argparse.Namespace) -> DecodeConfig | None:
    """The setting that --config and --group name; None with --model alone. Raises: ValueError naming the flag."""
    config = load_config(arguments)
    if config is None and arguments.group is not None:
        raise ValueError(f"--group: needs --config, got {arguments.group[:80]!a} without one")
    return None if config is None else config.for_group(arguments.group)


def load_config(arguments: argparse.Namespace) -> DecodeConfig | None:
    """The file that --config names, groups and all; None with --model alone. Raises: ValueError naming the flag."""
    if arguments.config is None:
        if arguments.model is None:
            raise ValueError("give --config FILE, or --model NAME to decode plainly")
        return None
    if not arguments.config.is_file():
        raise ValueError(f"--config: no such file: {arguments.config}")
    config = DecodeConfig.load(arguments.config)
    config.check_consent(allow_lossy=arguments.allow_lossy)
    return config


def load_model(
    arguments: argparse.Namespace, config: DecodeConfig | None, *, looks_for_config: bool = True
) -> LayerSkipModel:
    """The model under `config`, on the device, dtype, engine and threads asked for or tuned for.

    looks_for_config: without a config, take the one next to the model.
    Sets torch's number of threads; says on stderr where the config was tuned on another device. Raises: ValueError.
    """
    device_map = device_map_of(arguments)
    quiet_libraries()
    import torch

    from layerskip.model import LayerSkipModel, config_next_to, resolve_model_path

    if config is None and looks_for_config and arguments.model is not None:
        config = config_next_to(arguments.model, {})
    tuned = config.provenance if config is not None else None
    if arguments.model is None and (config is None or tuned is None):
        raise ValueError("--model: is required, the config does not name a model")
    name = arguments.model or resolve_model_path(tuned.model, arguments.config)  # type: ignore[union-attr]
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads: must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    else:
        if tuned is not None and tuned.num_threads is not None:
            torch.set_num_threads(tuned.num_threads)
        keep_to_cpu_limit()
    model = LayerSkipModel.from_pretrained(
        name,
        config=config,
        device=arguments.device,
        dtype=arguments.dtype or "auto",
        quantization=arguments.quantization,
        engine=arguments.engine or (tuned.engine if tuned is not None and tuned.engine is not None else "auto"),
        device_map=device_map,
        trust_remote_code=arguments.trust_remote_code,
        looks_for_config=False,  # done above
        allow_lossy=arguments.allow_lossy,
    )
    if tuned is not None and not tuned.device.startswith(model.device.type):
        sys.stderr.write(f"warning: the config was tuned on {tuned.device}, this is {model.device.type}\n")
    return model


def confirmed_words(config: DecodeConfig) -> str:
    """What the search confirmed of a setting and for how long texts; empty where it confirmed nothing."""
    confirmed, tuned = config.confirmed, config.provenance
    if confirmed is None:
        return ""
    text = f"{confirmed.speedup:.2f}x on average over {confirmed.num_prompts} prompts"
    text += " that it was chosen on" if confirmed.num_choosing == 0 else ""
    if tuned is not None and tuned.max_new_tokens is not None:
        text += f", up to {tuned.max_new_tokens} new tokens each"
    text += f" ({100 * confirmed.ci_level:g} % {confirmed.speedup_ci_low:.2f}..{confirmed.speedup_ci_high:.2f})"
    if confirmed.speedup_prompt_low is not None and confirmed.speedup_prompt_high is not None:
        text += f", a single one {confirmed.speedup_prompt_low:.2f}..{confirmed.speedup_prompt_high:.2f}"
    if confirmed.end_to_end_speedup is not None:
        text += f"; prompt included {confirmed.end_to_end_speedup:.2f}x"
    if confirmed.distance is not None:
        text += f"; {confirmed.num_identical} outputs identical, {confirmed.distance}"
    return text


def max_new_tokens(arguments: argparse.Namespace, config: DecodeConfig | None) -> int:
    """The length asked for, else what the config was tuned for, else a default.

    Like for like: longer texts of a small model loop, and loops are easy to draft.
    """
    if arguments.max_new_tokens is not None:
        return int(arguments.max_new_tokens)
    tuned = config.provenance if config is not None else None
    return (tuned.max_new_tokens if tuned is not None else None) or _DEFAULT_NEW_TOKENS
