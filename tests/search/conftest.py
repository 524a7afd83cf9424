"""Fixtures of the search tests: a search on fakes, and a tiny random model on disk for the command line."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from layerskip.machine.host import git_commit
from search.reporting.publish import Publisher
from tests.search.helpers.fakes import Bench
from tests.search.helpers.servers import grpc_url, postgres_server, postgres_url

__all__ = ["grpc_url", "postgres_server", "postgres_url"]  # fixtures
WORDS = ["<unk>", "<end>", *(f"w{i}" for i in range(62))]


@pytest.fixture(autouse=True, scope="session")
def _one_commit() -> Iterator[None]:
    """The checkout is asked for its commit once, not four times a search."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("search.study.fingerprint.git_commit", functools.cache(git_commit))
        yield


@pytest.fixture(autouse=True)
def _quiet_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a dozen figures takes longer than a search on fakes: only tests marked `publishes` do it."""
    if request.node.get_closest_marker("publishes") is None:
        quiet(monkeypatch)


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report and no figures from here on; fixtures that tests share say it themselves."""
    monkeypatch.setattr(Publisher, "__call__", lambda *_arguments: None)
    monkeypatch.setattr(Publisher, "publish", lambda *_arguments: None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, 64 words, 64 positions, random weights whose later layers matter little."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def save_tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def tiny_study(tiny_model: Path, tmp_path: Path) -> list[str]:
    """Flags of a search on the tiny model in `tmp_path/study`, of few trials."""
    return tiny_flags(tiny_model, tmp_path)


def tiny_flags(tiny_model: Path, tmp_path: Path) -> list[str]:
    tuning = write_jsonl(tmp_path / "tuning.jsonl", [{"prompt": f"w{i} w{i + 1} w3"} for i in range(6)])
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": f"w{i} w{i + 2} w9"} for i in range(20, 25)])
    flags = ["--study", str(tmp_path / "study"), "--model", str(tiny_model), "--prompts", str(tuning)]
    flags += [
        "--held-out",
        str(held_out),
        "--trials",
        "4",
        "--max-new-tokens",
        "8",
        "--gamma-max",
        "4",
        "--trial-seconds",
        "0.1",
    ]
    return [*flags, "--device", "cpu", "--threads", "1"]
