"""python -m search.export: a tuned config as other tools take it, best.json again, or a whole study in one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from layerskip.command_line.cli import OneLineParser, quiet_libraries, run_command
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.draft_model import DraftModel, export_draft_model
from search.storages.address import STORAGE_HELP, storage_argument

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from layerskip.model import LayerSkipModel
    from search.reporting.source import Source

PROG = "search.export"
_EPILOG = """\
--draft-model writes the kept layers as an ordinary checkpoint (config.json, safetensors, tokenizer) with settings for
Transformers, vLLM, SGLang and llama.cpp. A mask that skips attention or MLP alone has no such checkpoint: --nearest
keeps those layers whole instead, and that draft was not measured. Of a config with regimes it is the default's mask.
STUDY with --config-out writes a finished study's best.json again, from its storage, of a search of several regimes with
all their settings (a regime's own folder: with its own alone); with --archive the whole study,
into one small file that report and dashboard read where the study has no database (a run writes it as study.jsonl.xz in
the study folder). Nothing is measured."""


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__, epilog=_EPILOG)
    parser.add_argument("study", nargs="?", help="study folder, or its study.toml")
    parser.add_argument("--config-out", type=Path, metavar="FILE", help="where to write the study's config")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="where to write the whole study, compressed")
    parser.add_argument("--storage", help=STORAGE_HELP)
    parser.add_argument("--study-name", help="name inside the storage")
    parser.add_argument("--config", type=Path, help="decode config, as the search exports it, for --draft-model")
    parser.add_argument("--draft-model", type=Path, metavar="DIR", help="new folder for the draft model")
    parser.add_argument("--nearest", action="store_true", help="a mask with lone sublayers: export the nearest one")
    parser.add_argument("--group", metavar="NAME", help="the config's setting for this prompt group")
    parser.add_argument("--model", help="Hugging Face id or folder; default: the model that the config names")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's repository run its own code")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    names = ("study", "config_out", "archive", "config", "draft_model")
    asked = {name for name in names if getattr(arguments, name) is not None}
    if "draft_model" not in asked:
        for name in ("model", "group", "nearest"):
            if getattr(arguments, name):
                raise ValueError(f"--{name}: goes with --draft-model alone")
    if asked == {"study", "config_out"}:
        return _write_config(arguments)
    if asked == {"study", "archive"}:
        return _write_archive(arguments)
    if asked == {"config", "draft_model"}:
        return _write_draft_model(arguments)
    raise ValueError("give --config FILE and --draft-model DIR, or STUDY and --config-out FILE or --archive FILE")


def _write_config(arguments: argparse.Namespace) -> int:
    from search.confirm.stored_config import stored_config

    file = _new_file("--config-out", arguments.config_out)
    with _opened(arguments) as source:
        config = stored_config(source.load(), source.storage, file.parent)
    config.save(file)
    settings = [config.for_sampling(one.params()) for one in config.samplings]
    words = [f"{_verdict(one)} ({name})" for name, one in zip(config.regime_names, settings, strict=True)]
    sys.stdout.write(f"written {file}: {'; '.join(words)}\n")
    return 0


def _verdict(config: DecodeConfig) -> str:
    verdict = "speculate" if config.speculates else "do not speculate"
    return f"{verdict}, mask {config.skip_mask}, gamma {config.gamma}"


def _write_archive(arguments: argparse.Namespace) -> int:
    from search.reporting.archive import write_archive
    from search.study.opening import quiet_optuna

    quiet_optuna()
    file = _new_file("--archive", arguments.archive)
    with _opened(arguments) as source:
        write_archive(source.load(), file)
    sys.stdout.write(f"written {file}: {file.stat().st_size / 1000:.0f} kB\n")
    return 0


def _new_file(flag: str, given: Path) -> Path:
    file = given.expanduser().absolute()
    if not file.parent.is_dir():
        raise ValueError(f"{flag}: no such folder: {file.parent}")
    return file


def _opened(arguments: argparse.Namespace) -> AbstractContextManager[Source]:
    from search.command_line import demo_folder
    from search.reporting.source import Address, opened

    address = Address(arguments.study, storage_argument(arguments.storage), arguments.study_name)
    return opened(address, demo=demo_folder())


def _write_draft_model(arguments: argparse.Namespace) -> int:
    if not arguments.config.is_file():
        raise ValueError(f"--config: no such file: {arguments.config}")
    config = DecodeConfig.load(arguments.config).for_group(arguments.group)
    quiet_libraries()
    from layerskip.interop.draft_checkpoint import check_new_folder

    check_new_folder(arguments.draft_model)  # before the model is loaded
    draft = export_draft_model(
        _load(arguments, config), config, arguments.draft_model.absolute(), nearest=arguments.nearest
    )
    _tell(draft)
    return 0


def _load(arguments: argparse.Namespace, config: DecodeConfig) -> LayerSkipModel:
    """The model in the format it is stored in, on the CPU: it is only cut, and compared once."""
    from layerskip.interop.draft_checkpoint import checkpoint_dtype
    from layerskip.model import LayerSkipModel, resolve_model_path

    if arguments.model is None and config.provenance is None:
        raise ValueError("--model: is required, the config does not name a model")
    name = arguments.model or resolve_model_path(config.provenance.model, arguments.config)  # type: ignore[union-attr]
    return LayerSkipModel.from_pretrained(
        name,
        config=config.model_copy(update={"skip_mask": config.skip_mask.whole, "regimes": None}),
        device="cpu",
        dtype=checkpoint_dtype(name, trust_remote_code=arguments.trust_remote_code),
        engine="eager",
        trust_remote_code=arguments.trust_remote_code,
    )


def _tell(draft: DraftModel) -> None:
    kept = draft.kept_layers
    if draft.approximates is not None:
        sys.stderr.write(
            f"warning: {draft.approximates} has no draft model; exported the nearest mask of whole layers, "
            f"{draft.mask} (a layer is left out only if both of its sublayers are), with whole weights and all token "
            "ids. It was not measured\n"
        )
    sys.stdout.write(
        f"written {draft.folder}: layers {_ranges(draft.mask)} ({len(kept)} of {draft.mask.num_layers}), logits as the "
        f"masked model's (relative difference {draft.logit_difference:.1g})\n"
        f"settings for Transformers, vLLM, SGLang and llama.cpp: {draft.folder / 'README.md'}\n"
    )


def _ranges(mask: SkipMask) -> str:
    """The kept layers in a mask's own short form."""
    kept = SkipMask.from_layers(mask.num_layers, [i for i in range(mask.num_layers) if i not in mask.skipped_layers])
    return str(kept).partition(":")[2]


if __name__ == "__main__":
    raise SystemExit(main())
