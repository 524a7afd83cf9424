"""A decode config next to a model: `from_pretrained`, `save_pretrained`, `push_to_hub`, and who picks it up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled

from layerskip import DecodeConfig, LayerSkipModel, Provenance, SkipMask, SuffixLookup
from layerskip.huggingface.loading import weights_fingerprint
from tests.layerskip import zoo

CONFIG = DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [1]), gamma=3, draft_threshold=0.25)


def made_for(model: str, fingerprint: str = "0" * 16) -> DecodeConfig:
    """CONFIG with where it comes from."""
    provenance = Provenance(
        model=model, weights_fingerprint=fingerprint, device="cpu", dtype="float32", num_layers=zoo.NUM_LAYERS
    )
    return CONFIG.model_copy(update={"provenance": provenance})


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    zoo.model_of("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def model_folder(saved_model: Path, tmp_path: Path) -> Path:
    """A folder of its own with the model's files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved_model.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    CONFIG.save_pretrained(folder)
    assert [file.name for file in folder.iterdir()] == ["decode_config.json"]
    assert DecodeConfig.from_pretrained(folder) == CONFIG == DecodeConfig.load(folder / "decode_config.json")
    CONFIG.save_pretrained(folder, "fast.json")
    assert DecodeConfig.from_pretrained(str(folder), config_file_name="fast.json") == CONFIG
    assert DecodeConfig.from_pretrained(tmp_path, subfolder="deep/model") == CONFIG


def test_a_drafter_is_saved_and_picked_up_with_its_model(model_folder: Path) -> None:
    lookup = SuffixLookup(min_match=2, gamma=8, factor=2.0, target_threshold=0.1)
    config = DecodeConfig(drafter="hybrid", skip_mask=CONFIG.skip_mask, gamma=3, lookup=lookup)
    config.save_pretrained(model_folder)
    assert DecodeConfig.from_pretrained(model_folder) == config
    model = LayerSkipModel.from_pretrained(model_folder, device="cpu", engine="eager")
    assert model.config == config
    prompt = zoo.prompt_of(3)
    output = model.generate([*prompt, *zoo.greedy_reference("llama", prompt, 8), *prompt], max_new_tokens=12)
    assert output.stats.num_looked_up > 0


@pytest.mark.parametrize(
    ("model", "saved"), [("./model", "./"), ("/somewhere/model", "./"), ("../up", "./"), ("org/name", "org/name")]
)
def test_a_path_becomes_the_folder_of_the_file(tmp_path: Path, model: str, saved: str) -> None:
    made_for(model).save_pretrained(tmp_path)
    read = DecodeConfig.from_pretrained(tmp_path)
    assert read.provenance.model == saved


@pytest.mark.parametrize(
    ("error", "call", "said"),
    [
        (FileNotFoundError, lambda folder: DecodeConfig.from_pretrained(folder), r"has no decode_config\.json"),
        (FileNotFoundError, lambda folder: DecodeConfig.from_pretrained(folder, subfolder="x"), r"has no x/decode"),
        (FileNotFoundError, lambda folder: DecodeConfig.from_pretrained(folder / "none"), "no such folder"),
        (ValueError, lambda folder: DecodeConfig.from_pretrained(folder, "../x.json"), "config_file_name: must be"),
        (ValueError, lambda folder: CONFIG.save_pretrained(folder, "a/x.json"), "config_file_name: must be"),
        (TypeError, lambda folder: DecodeConfig.from_pretrained(folder, gamma=3), "unknown arguments: gamma"),
        (TypeError, lambda folder: CONFIG.push_to_hub("org/name", gamma=3), "unknown arguments: gamma"),
    ],
)
def test_what_is_not_there_or_not_allowed_is_told(tmp_path: Path, error: Any, call: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder_and_a_broken_config_is_named(tmp_path: Path) -> None:
    file = tmp_path / "decode_config.json"
    file.write_text('{"schema_version": 1, "gamma": -1, "skip_mask": "4:1"}')
    with pytest.raises(ValueError, match=r"save_directory: must be a folder, got the file .*decode_config\.json"):
        CONFIG.save_pretrained(file)
    with pytest.raises(ValueError, match=r"decode_config\.json: gamma: .* got '-1'"):
        DecodeConfig.from_pretrained(tmp_path)


class FakeHub:
    """Stands in for huggingface_hub's client and its download; records calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.folder = folder
        self.error: Exception | None = None
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: self)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.download)

    def create_repo(self, repo_id: str, **arguments: Any) -> Any:
        self.calls.append(("create_repo", arguments))
        return SimpleNamespace(repo_id=f"me/{repo_id}" if "/" not in repo_id else repo_id)

    def create_branch(self, repo_id: str, **arguments: Any) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id} | arguments))

    def upload_file(self, **arguments: Any) -> str:
        self.calls.append(("upload_file", arguments))
        (self.folder / arguments["path_in_repo"]).write_bytes(arguments["path_or_fileobj"])
        return "commit"

    def download(self, repo_id: str, file_name: str, **arguments: Any) -> str:
        self.calls.append(("download", {"repo_id": repo_id} | arguments))
        if self.error is not None:
            raise self.error
        return str(self.folder / file_name)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    (tmp_path / "hub").mkdir()
    return FakeHub(monkeypatch, tmp_path / "hub")


def test_pushed_and_read_from_the_hub(hub: FakeHub) -> None:
    config = made_for("/home/me/model")
    commit: Any = config.push_to_hub("org/model", private=True, token="t", revision="fast", create_pr=True)
    assert commit == "commit"
    (made, repo), (branched, branch), (uploaded, upload) = hub.calls
    assert (made, branched, uploaded) == ("create_repo", "create_branch", "upload_file")
    assert repo == {"private": True, "token": "t", "exist_ok": True}
    assert branch == {"repo_id": "org/model", "branch": "fast", "token": "t", "exist_ok": True}
    assert upload.pop("path_or_fileobj").decode() == config.to_json().replace("/home/me/model", "./")
    assert upload == {
        "path_in_repo": "decode_config.json",
        "repo_id": "org/model",
        "repo_type": "model",
        "token": "t",
        "revision": "fast",
        "create_pr": True,
        "commit_message": "Upload decode config",
    }
    read = DecodeConfig.from_pretrained("org/model", revision="fast", subfolder="", token="t", local_files_only=True)
    assert read.gamma == 3
    assert hub.calls[-1][1] == {
        "repo_id": "org/model",
        "revision": "fast",
        "token": "t",
        "local_files_only": True,
    }


def test_save_and_push_names_the_repository_after_the_folder(hub: FakeHub, tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "my-model", "fast.json", push_to_hub=True, commit_message="Faster")
    assert hub.calls[-1][1]["repo_id"] == "me/my-model"
    assert hub.calls[-1][1]["path_in_repo"] == "fast.json"
    assert hub.calls[-1][1]["commit_message"] == "Faster"
    assert DecodeConfig.load(tmp_path / "my-model" / "fast.json") == CONFIG
    assert [name for name, _ in hub.calls] == ["create_repo", "upload_file"]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (EntryNotFoundError("404"), FileNotFoundError, "org/model: has no decode_config.json"),
        (LocalEntryNotFoundError("offline"), FileNotFoundError, "not in the cache"),
        (OfflineModeIsEnabled("offline\nmode"), OSError, "cannot get decode_config.json: offline mode"),
    ],
)
def test_what_the_hub_has_not_is_one_line(hub: FakeHub, error: Exception, kind: Any, said: str) -> None:
    hub.error = error
    with pytest.raises(kind, match=said):
        DecodeConfig.from_pretrained("org/model")


def test_a_model_takes_the_config_that_lies_next_to_it(model_folder: Path) -> None:
    assert LayerSkipModel.from_pretrained(model_folder, engine="eager").config.gamma == 0
    made_for("./somewhere", weights_fingerprint(zoo.model_of("llama"))).save_pretrained(model_folder)
    model = LayerSkipModel.from_pretrained(model_folder, engine="eager")
    assert model.config == DecodeConfig.from_pretrained(model_folder)
    assert model.config.speculates
    prompt = zoo.prompt_of(5)
    assert model.generate(prompt, max_new_tokens=8).ids == list(zoo.greedy_reference("llama", prompt, 8))
    by_config = LayerSkipModel.from_config(model_folder / "decode_config.json", engine="eager")
    assert by_config.config == model.config
    given = LayerSkipModel.from_pretrained(model_folder, config=CONFIG, engine="eager")
    assert given.config == CONFIG
    assert not LayerSkipModel.from_pretrained(model_folder, engine="eager", looks_for_config=False).config.speculates


def test_a_config_of_other_weights_next_to_a_model_is_refused(model_folder: Path) -> None:
    made_for("org/other").save_pretrained(model_folder)
    with pytest.raises(ValueError, match=r"provenance\.weights_fingerprint: the config was made for org/other"):
        LayerSkipModel.from_pretrained(model_folder, engine="eager")
    (model_folder / "decode_config.json").write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(ValueError, match=r"decode_config\.json: .*schema_version"):
        LayerSkipModel.from_pretrained(model_folder, engine="eager")
