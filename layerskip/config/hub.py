"""What lies in a folder or in a repository of the Hugging Face hub: decode configs, and weights that draft."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

DECODE_CONFIG_NAME = "decode_config.json"
WEIGHTS_FILES = ("model*.safetensors",)
"""As Transformers names them; other copies that a repository may have are left there."""


class HubArguments(TypedDict, total=False):
    """Where and how to look on the hub; names and meanings as in `GenerationConfig.from_pretrained`."""

    revision: str | None
    """Branch, tag or commit."""
    subfolder: str
    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool
    force_download: bool


class PushArguments(TypedDict, total=False):
    """How to commit to the hub; names and meanings as in `GenerationConfig.push_to_hub`."""

    commit_message: str | None
    commit_description: str | None
    private: bool | None
    token: str | bool | None
    revision: str | None
    create_pr: bool


def locate_config(
    name: str | os.PathLike[str], config_file_name: str | os.PathLike[str] | None = None, **hub_arguments: Any
) -> Path:
    """The file in the folder `name`, or in the cache of the hub, downloaded into it if it is not there yet.

    Cost: for a hub id at most one request and one small download.
    Raises: FileNotFoundError if there is no such file; OSError in one line if the hub refuses or cannot be reached.
    """
    _check_names(hub_arguments, HubArguments)
    file_name = check_file_name(config_file_name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        file = folder / (hub_arguments.get("subfolder") or "") / file_name
        if not file.is_file():
            raise FileNotFoundError(f"{folder}: has no {file.relative_to(folder)}")
        return file
    text = os.fspath(name)
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"no such folder: {text}")
    return _download(text, file_name, hub_arguments)


def is_hub_id(name: str) -> bool:
    """Whether this is a repository's name, and no folder's: `Qwen/Qwen3-0.6B`, as long as there is no such folder."""
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1 and not Path(name).is_dir()


def locate_weights(name: str) -> Path:
    """The folder, or the cache of the hub with the repository's weights, config and tokenizer downloaded into it.

    Raises: OSError in one line if the hub refuses or cannot be reached and the cache has nothing.
    """
    if not is_hub_id(name):
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*WEIGHTS_FILES, "*.json", "*.txt", "*.model"]))
    except LocalEntryNotFoundError:
        raise OSError(
            f"{name}: no such folder; as a hub id it is not in the cache, and the hub cannot be asked"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise OSError(f"{name}: no such folder, nor on the hub: {' '.join(str(error).split())[:300]}") from None


@lru_cache
def num_draft_ids(name: str) -> int | None:
    """How many token ids the trained draft weights of this folder or repository choose among; None for all of them, and
    where there is nothing to read; 0 of such as choose among ids in no order, of which the first mean nothing."""
    try:
        config = json.loads((locate_weights(name) / "config.json").read_text(encoding="utf-8"))
        found = 0 if "draft_vocab_size" in config else config["shape"].get("num_draft_ids")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def check_file_name(name: str | os.PathLike[str] | None) -> str:
    """The file's name, `decode_config.json` if none is given. Raises: ValueError if it is a path."""
    text = DECODE_CONFIG_NAME if name is None else os.fspath(name)
    if not text or Path(text).name != text:
        raise ValueError(f"config_file_name: must be a file's name without folders, got {text[:80]!r}")
    return text


def upload_config(text: str, repo_id: str, config_file_name: str, **push_arguments: Any) -> CommitInfo:
    """Commit the file to a model repository, which is made if there is none yet.

    Raises: OSError (of huggingface_hub) if the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    _check_names(push_arguments, PushArguments)
    arguments = dict(push_arguments)
    private = arguments.pop("private", None)
    token, revision = arguments.get("token"), arguments.get("revision")
    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    arguments["commit_message"] = arguments.get("commit_message") or "Upload decode config"
    commit: CommitInfo = api.upload_file(
        path_or_fileobj=text.encode(), path_in_repo=config_file_name, repo_id=repo_id, repo_type="model", **arguments
    )
    return commit


def _check_names(given: dict[str, Any], known: type) -> None:
    if unknown := sorted(given.keys() - known.__annotations__.keys()):
        raise TypeError(f"unknown arguments: {', '.join(unknown)} (known: {', '.join(known.__annotations__)})")


def _download(repo_id: str, file_name: str, hub_arguments: dict[str, Any]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    arguments = {key: value for key, value in hub_arguments.items() if value is not None and value != ""}
    try:
        return Path(hf_hub_download(repo_id, file_name, **arguments))
    except LocalEntryNotFoundError:
        raise FileNotFoundError(f"{repo_id}: {file_name} is not in the cache, and the hub cannot be asked") from None
    except EntryNotFoundError:
        raise FileNotFoundError(f"{repo_id}: has no {file_name}") from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise OSError(f"{repo_id}: cannot get {file_name}: {' '.join(str(error).split())[:300]}") from None
