"""Fixtures with a tokenizer: a byte-level BPE whose tokens split multi-byte characters, and a model for it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from layerskip import LayerSkipModel
from layerskip.engines.native import library
from layerskip.engines.native.layers import NativeLayers
from tests.layerskip import zoo

CORPUS = [
    "def read(path):\n    with open(path) as file:\n        return file.read()\n",
    "naïve café – “quotes” 日本語 🙂 don't, isn't . a , b !",
    "class Reader(Base):\n    '''A reader.'''\n    def __init__(self, path):\n        self.path = path\n",
]


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that cannot compile them: torch computes what `fused` does."""
    monkeypatch.setattr(library, "load_kernels", lambda: "no C++ compiler")


@pytest.fixture
def with_whole_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if layers that only draft were not rounded to 8 bits."""
    monkeypatch.setattr(NativeLayers, "rounded", lambda self, _bits: self)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.fixture(scope="session")
def text_model(tokenizer: Any) -> LayerSkipModel:
    return LayerSkipModel(zoo.build("llama", vocab_size=len(tokenizer)), tokenizer, engine="eager")
