"""python -m layerskip.serve --config best.json: an OpenAI-compatible server that decodes under a config."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.command_line.api_key import KEY_VARIABLE, read_api_key
from layerskip.command_line.cli import CommandError, OneLineParser, run_command
from layerskip.command_line.command_model import add_loading_arguments, confirmed_words, load_config, load_model
from layerskip.config.decode_config import DecodeConfig, GroupSetting
from layerskip.config.lossy_acceptance import lossy_label
from layerskip.config.validated import MAX_DRAFTING
from layerskip.server.settings import ServerSettings

if TYPE_CHECKING:
    import socket

    from layerskip.model import LayerSkipModel

PROG = "layerskip.serve"
_EXTRA = ("starlette", "uvicorn", "prometheus_client")
_DEFAULT_CONTEXT = 8192
_DEFAULT_NEW_TOKENS = 4096
_DEFAULT_BATCH = 16


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    add_loading_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="any other than this machine's own needs an API key")
    parser.add_argument("--port", type=int, default=8000, help="0 = any free one")
    parser.add_argument(
        "--api-key-file", type=Path, help=f"file with the key that requests must bring; or set {KEY_VARIABLE}"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the model's id, or its folder's name")
    parser.add_argument(
        "--max-context",
        type=int,
        help=f"most tokens of prompt and output together; default: the model's own limit, at most {_DEFAULT_CONTEXT}",
    )
    parser.add_argument(
        "--max-new-tokens-limit",
        type=int,
        default=_DEFAULT_NEW_TOKENS,
        help="most output tokens a request may ask for",
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        metavar="N",
        help="requests decoded at once, which then share the reading of the weights; default: "
        f"{_DEFAULT_BATCH} where layers are compiled for this CPU, else 1",
    )
    parser.add_argument(
        "--max-drafting",
        type=int,
        metavar="N",
        help="while more requests are decoded at once, none of them drafts, as a step of many texts is cheap without; "
        f"default: what the search measured, else {MAX_DRAFTING}",
    )
    parser.add_argument(
        "--queue", type=int, default=ServerSettings.queue_limit, help="requests that may wait; one more is answered 429"
    )
    parser.add_argument("--max-body-bytes", type=int, default=1 << 20, help="larger requests are answered 413")
    parser.add_argument(
        "--send-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="a client that takes nothing so long is dropped",
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="after SIGTERM or Ctrl-C, for answers under way"
    )
    parser.add_argument(
        "--store-tokens",
        type=int,
        default=ServerSettings.store_tokens,
        metavar="N",
        help="most tokens of earlier requests kept in memory, to draft from where the config's drafter does; 0 = none",
    )
    parser.add_argument(
        "--prefix-cache",
        type=int,
        default=ServerSettings.prefix_cache_bytes >> 20,
        metavar="MIB",
        help="most memory for keys and values of earlier requests, so that of a prompt which begins like one of them, "
        "as every turn of a chat does, only the rest is computed; 0 = none",
    )
    parser.add_argument(
        "--response-template",
        type=Path,
        metavar="FILE",
        help="JSON of a response template of Transformers: how the model writes calls of tools, where neither its "
        "tokenizer nor Transformers says so",
    )
    parser.add_argument("--no-access-log", action="store_true", help="no line per request (it never shows prompts)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code, 0 after SIGTERM or Ctrl-C too."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    _check_extra()
    _check_numbers(arguments)
    api_key = read_api_key(arguments.api_key_file, arguments.host)
    config, template = load_config(arguments), None
    if arguments.response_template is not None:
        from layerskip.huggingface.messages import read_template

        template = read_template(arguments.response_template)
    from layerskip.server.transport.running import GracefulServer, bind

    # Before the model is loaded, which may take minutes.
    with bind(arguments.host, arguments.port) as bound:
        model = load_model(arguments, config)
        settings = _settings(arguments, model, api_key, template)
        from layerskip.server.app import create_app

        app = create_app(model, settings)
        app.state.service.worker.start()
        server = GracefulServer(app, arguments.grace)
        _set_up_logging()
        set_startup_aside()
        bound.listen()  # so that who reads the address below can connect at once
        sys.stdout.write("\n".join(describe(model, settings, arguments.config, _url(bound))) + "\n")
        sys.stdout.flush()
        server.run(sockets=[bound])
    return 0


def set_startup_aside() -> None:
    """Take all objects that exist now out of the garbage collector's sight, for good.

    Requests leave cyclic garbage, which a full collection frees; Python starts one only when as much has piled up as a
    quarter of what is in sight. With torch and transformers loaded that is some hundred thousand objects.
    """
    gc.collect()
    gc.freeze()


def _check_extra() -> None:
    try:
        for name in _EXTRA:
            importlib.import_module(name)
    except ImportError as error:
        raise CommandError(f"needs the serve extra, pip install 'layerskip[serve]': {error}") from None


def _check_numbers(arguments: argparse.Namespace) -> None:
    ranges = {
        "port": (0, 65535),
        "queue": (0, 10000),
        "max_batch_size": (1, 1024),
        "max_drafting": (0, 1024),
        "grace": (0, 86400),
        "send_timeout": (0.1, 86400),
        "max_context": (2, 1 << 30),
        "max_new_tokens_limit": (1, 1 << 30),
        "max_body_bytes": (1024, 1 << 30),
        "store_tokens": (0, 1 << 30),
        "prefix_cache": (0, 1 << 24),
    }
    for name, (lowest, highest) in ranges.items():
        value = getattr(arguments, name)
        if value is not None and not lowest <= value <= highest:
            raise ValueError(f"--{name.replace('_', '-')}: must be in {lowest}..{highest}, got {value}")


def _settings(
    arguments: argparse.Namespace, model: LayerSkipModel, api_key: str | None, template: Mapping[str, Any] | None
) -> ServerSettings:
    positions = model.max_positions
    context = arguments.max_context or min(positions or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    if positions is not None and context > positions:
        raise ValueError(f"--max-context: must be at most the model's {positions} positions, got {context}")
    return ServerSettings(
        model_id=arguments.served_model_name or _model_id(arguments, model.config),
        max_context=context,
        max_new_tokens=min(arguments.max_new_tokens_limit, context),
        max_batch_size=_batch_size(arguments.max_batch_size, model),
        max_drafting=arguments.max_drafting,
        queue_limit=arguments.queue,
        max_body_bytes=arguments.max_body_bytes,
        send_timeout_s=arguments.send_timeout,
        api_key=api_key,
        hosts=frozenset({"localhost", "127.0.0.1", "::1", arguments.host.lower()}) if api_key is None else None,
        access_log=not arguments.no_access_log,
        store_tokens=arguments.store_tokens,
        prefix_cache_bytes=arguments.prefix_cache << 20,
        response_template=template,
    )


def _batch_size(asked: int | None, model: LayerSkipModel) -> int:
    needs = model.batch_refusal
    if asked is None:
        return _DEFAULT_BATCH if needs is None and model.engine.batch_invariant else 1
    if asked > 1 and needs is not None:
        raise ValueError(f"--max-batch-size: must be 1 without {needs}; got {asked}")
    return asked


def _model_id(arguments: argparse.Namespace, config: DecodeConfig) -> str:
    """A hub id as it is; of a folder the last part alone: its path is nobody's business."""
    name = arguments.model or (config.provenance.model if config.provenance is not None else "model")
    is_folder = name.startswith((".", "/", "~")) or Path(name).is_dir()
    return (Path(name).expanduser().resolve().name or "model") if is_folder else name


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def describe(model: LayerSkipModel, settings: ServerSettings, config_file: Path | None, url: str) -> list[str]:
    """What the command prints on start, line by line."""
    config = model.config
    threads = ""
    if model.device.type == "cpu":
        import torch

        threads = f", {torch.get_num_threads()} threads"
    body = f'{{"model": "{settings.model_id}", "prompt": "def read(", "max_tokens": 32}}'
    key = "" if settings.api_key is None else f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
    return [
        f"serving   {url}",
        f"model     {settings.model_id}: {model.model_class}, {model.num_layers} layers, "
        f"{model.number_format} on {model.placement}, engine {model.engine_name}{threads}",
        f"config    {config_file or ('none' if config.provenance is None else 'beside the model')}: {_setting(config)}",
        f"confirmed {_confirmed(config)}",
        *dict.fromkeys(lossy_label(rule) for rule in config.lossy_rules),
        *_regimes(config),
        f"limits    {settings.max_context} tokens a request, {settings.max_new_tokens} of them new, "
        f"{settings.queue_limit} requests waiting, {'no' if settings.api_key is None else 'an'} API key",
        *_batch(model, settings),
        *_kept(config, settings),
        f"try       curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]


def _batch(model: LayerSkipModel, settings: ServerSettings) -> list[str]:
    if settings.max_batch_size == 1:
        return []
    config = model.config
    most = [one.drafts_among for _, one in config.named_settings() if one.gamma > 0]
    if most and settings.max_drafting is not None:
        most = [settings.max_drafting]
    more = f"; while they are more than {' or '.join(map(str, dict.fromkeys(most)))} none drafts" if most else ""
    more += "" if model.engine.batch_invariant else "; how many they are may flip near-ties, of seeded ones too"
    return [f"batch     up to {settings.max_batch_size} requests decoded at once{more}"]


def _kept(config: DecodeConfig, settings: ServerSettings) -> list[str]:
    prefixes = "none: every prompt is computed whole"
    if settings.prefix_cache_bytes:
        prefixes = f"up to {settings.prefix_cache_bytes >> 20} MiB of earlier requests' keys and values in memory"
    told = [f"prefixes  {prefixes}"]
    if config.looks_into_stores:
        store = "none: drafts come from a request's own text alone"
        if settings.store_tokens:
            store = f"up to {settings.store_tokens} tokens of earlier requests in memory, to draft from"
        told.append(f"store     {store}")
    return told


def _regimes(config: DecodeConfig) -> list[str]:
    """What requests are decoded with that choose tokens in another way than the default's."""
    if config.regimes is None:
        return []
    others = [(one.sampling.name, config.for_sampling(one.sampling.params())) for one in config.regimes]
    return [
        f"regimes   {', '.join(config.regime_names)}; {config.regime_names[0]} is the default above, and a request of "
        "none of them takes the nearest",
        *(f"regime    {name}: {_setting(one)}; confirmed {_confirmed(one)}" for name, one in others),
    ]


def _setting(config: DecodeConfig) -> str:
    if not config.speculates:
        text = "gamma 0, plain decoding" + (f" ({' '.join(config.reason.split())})" if config.reason else "")
    else:
        text = "" if config.drafter == "layer_skip" else f"{config.drafter}: "
        text += (f"mask {config.skip_mask}, " if config.drafts_by_mask else "") + f"gamma {config.gamma}"
        said = ("max_drafting", "drafter", "skip_mask", "gamma", "lookup", "sampling", "reason", "confirmed")
        for name, field in GroupSetting.model_fields.items():
            value = getattr(config, name)
            if name not in said and value != field.default:
                text += f", {name} {value.name if name == 'lossy' else value}"
        text += "" if config.lookup is None else f", lookup ({config.lookup})"
    return text + (f"; groups {', '.join(config.groups)}" if config.groups else "")


def _confirmed(config: DecodeConfig) -> str:
    return confirmed_words(config) or "nothing: no speedup was measured for this setting"


def _set_up_logging() -> None:
    """The access log at its own level on stderr; everything else stays at warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access = logging.getLogger("layerskip.server.access")
    access.setLevel(logging.INFO)
    access.handlers[:] = [handler]
    access.propagate = False


if __name__ == "__main__":
    sys.exit(main())
