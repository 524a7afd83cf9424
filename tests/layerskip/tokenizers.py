"""Two kinds of tokenizers that split text differently, and tiny models that know one text by heart in either."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from layerskip import LayerSkipModel
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.draft_weights import describe_weights
from tests.layerskip import zoo

KINDS = ("byte_level", "byte_fallback")
TEXT = (
    "The reader opens the file, reads every line and closes the file again. A naïve café – “quotes” – costs 3 € or "
    "5 £; 日本語 and русский текст, 🙂 and 🚀🚀, are words like others.\n    def read(self):\n"
    "        return self.file.read()\n"
    "The writer opens the file, writes every line and closes the file again. Don't read what isn't written!\n"
)
MAX_POSITIONS = 256


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """`byte_level` as GPT-2's, with chat markers; `byte_fallback` as Llama's, with a blank before every text."""
    if kind == "byte_level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=440,
            special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator([TEXT] * 3, trainer)
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    learnt = Tokenizer(models.BPE(unk_token="<unk>"))
    learnt.normalizer = normalizers.Replace(" ", "▁")
    learnt.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    ascii_alone = "".join(one for one in TEXT if one.isascii())  # what else there is falls back to bytes
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    learnt.train_from_iterator([ascii_alone] * 3, trainer)
    model = json.loads(learnt.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(one) for one in model["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def folder_of(kind: str) -> Path:
    """A model of two layers that has learnt the text, and its tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    tokenizer = tokenizer_of(kind)
    with torch.inference_mode(mode=False), torch.random.fork_rng():
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=len(tokenizer) + 3,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        model = LlamaForCausalLM(config)
        ids = torch.tensor([tokenizer(TEXT * 2)["input_ids"]])
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        draw = random.Random(2)
        for _ in range(150):
            starts = [draw.randrange(ids.shape[1] - 64) for _ in range(4)]
            batch = torch.cat([ids[:, start : start + 64] for start in starts])
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def words_of(run: str) -> tuple[LayerSkipModel, DraftWeights]:
    """A model of the zoo under a tokenizer of words, and one that is often right and gives the words other ids."""
    words = [f"w{i}" for i in range(zoo.VOCAB)]
    order = list(range(zoo.VOCAB))
    random.Random(5).shuffle(order)
    folder = Path(tempfile.mkdtemp(prefix="words-"))
    with torch.inference_mode(mode=False), torch.no_grad():
        draft = type(zoo.model_of(run)).from_pretrained(zoo.draft_model_of(zoo.architecture(run)).path)
        for one in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            for parameter in one.parameters():
                parameter[order] = parameter.clone()
        draft.save_pretrained(folder)
    zoo.tokenizer_of([words[order.index(i)] for i in range(zoo.VOCAB)]).save_pretrained(folder)
    own = zoo.layerskip_of(run)
    model = LayerSkipModel(own.model, zoo.tokenizer_of(words), engine="fused" if run.endswith("fused") else "eager")
    return model, describe_weights(folder)


@functools.cache
def target_of(kind: str) -> LayerSkipModel:
    return LayerSkipModel.from_pretrained(folder_of(kind), device="cpu", engine="fused")


@functools.cache
def weights_of(kind: str) -> DraftWeights:
    return describe_weights(folder_of(kind))
