"""Weights as EAGLE-3's are published: computed as the paper says, lossless, and refused where they do not fit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.decode_config import DraftWeights
from layerskip.config.hub import num_draft_ids
from layerskip.config.lookup_settings import SuffixLookup
from layerskip.drafters.draft_weights import describe_weights
from layerskip.drafters.eagle.published import usual_layers
from tests.layerskip import zoo
from tests.layerskip.tape import graph_model

Tensors = dict[str, torch.Tensor]
PROMPT = (3, 5, 8, 3, 5, 9, 3, 5)


def eagle(weights: DraftWeights, **more: Any) -> DecodeConfig:
    fields = {"drafter": "eagle", "gamma": 4, "skip_mask": SkipMask.none(zoo.NUM_LAYERS), "draft_weights": weights}
    return DecodeConfig(**fields | more)


class ByThePaper:
    """The same layer, one text, every row anew; written from the paper, over the file's own tensors. flags: what is
    normed beside what the paper norms."""

    def __init__(self, tensors: Tensors, model: Any, ids: list[int], flags: Sequence[str]) -> None:
        self.tensors, self.model, self.flags = tensors, model, flags
        depths = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[1:4]
        if "fc_norm" in flags:
            depths = [self.norm(f"fc_norm.{i}", one) for i, one in enumerate(depths)]
        joined = torch.cat(list(depths), dim=-1)[0, :-1]
        if "norm_before_fc" in flags:
            joined = self.norm("input_norm", joined)
        self.rows = list(joined @ self.tensors["fc.weight"].T)  # one for each token after the first
        self.tokens = ids[1:]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.tensors[f"{name}.weight"]

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads, width), by their places."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x)).unsqueeze(1) * 10_000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def heads(self, name: str, count: int, x: torch.Tensor) -> torch.Tensor:
        found = (x @ self.tensors[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(x), count, -1)
        if name != "v":
            found = self.norm(f"midlayer.self_attn.{name}_norm", found) if "qk_norm" in self.flags else found
            found = self.turned(found)
        return found.repeat_interleave(4 // count, dim=1)

    def next_logits(self) -> torch.Tensor:
        """Over all token ids, after the last token; its state then stands for one that the model has not computed."""
        states, get = torch.stack(self.rows), self.tensors
        normed = self.norm("midlayer.hidden_norm", states)
        embedded = self.model.get_input_embeddings()(torch.tensor(self.tokens))
        x = torch.cat([self.norm("midlayer.input_layernorm", embedded), normed], dim=-1)
        query, key, value = (self.heads(name, count, x) for name, count in (("q", 4), ("k", 2), ("v", 2)))
        scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        seen = torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1)
        out = normed if "norm_before_residual" in self.flags else states
        out = out + seen @ get["midlayer.self_attn.o_proj.weight"].T
        inner = self.norm("midlayer.post_attention_layernorm", out)
        gated = F.silu(inner @ get["midlayer.mlp.gate_proj.weight"].T) * (inner @ get["midlayer.mlp.up_proj.weight"].T)
        out = (out + gated @ get["midlayer.mlp.down_proj.weight"].T)[-1]
        normed = self.norm("norm", out)
        logits = torch.full((zoo.VOCAB,), -math.inf)
        ids = get["d2t"] + torch.arange(len(get["d2t"]))
        logits[ids] = normed @ get["lm_head.weight"].T
        self.rows.append(normed if "norm_output" in self.flags else out)
        return logits


def with_norms(tensors: Tensors, flags: Sequence[str]) -> Tensors:
    """With random ones of those that the flags ask for."""
    hidden, head_dim = 32, 8
    widths = {"norm_before_fc": {"input_norm": 3 * hidden}}
    widths["fc_norm"] = {f"fc_norm.{i}": hidden for i in range(3)}
    widths["qk_norm"] = {f"midlayer.self_attn.{name}_norm": head_dim for name in "qk"}
    generator = torch.Generator().manual_seed(1)
    norms = [one for flag in flags for one in widths.get(flag, {}).items()]
    return tensors | {f"{name}.weight": 0.5 + torch.rand(width, generator=generator) for name, width in norms}


def published(at: Path, layout: str, flags: Sequence[str]) -> tuple[DraftWeights, Tensors]:
    """The zoo's weights in this layout, and their tensors under the authors' names."""
    given = dict.fromkeys(flags, True)
    if layout == "authors":
        weights = changed(at, given, lambda own: with_norms(own, flags))
        return weights, load_file(at / "weights" / "model.safetensors")
    weights = changed(at, tensors=lambda own: with_norms(own, flags))
    tensors = load_file(at / "weights" / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    save_file(renamed | {"embed_tokens.weight": torch.zeros(zoo.VOCAB, 32)}, at / "weights" / "model.safetensors")
    layer = json.loads((at / "weights" / "config.json").read_text())
    for name in ("architectures", "eagle_config"):
        del layer[name]
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # by what goes into them
        "embed_requires_grad": False,
        "target_hidden_size": None,
        **{"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
        **{flag: True for flag in flags if flag != "qk_norm"},
        "transformer_layer_config": layer
        | {"model_type": "qwen3" if "qk_norm" in flags else "llama", "layer_types": ["full_attention"] * 3},
    }
    (at / "weights" / "config.json").write_text(json.dumps(config))
    return describe_weights(at / "weights"), tensors


FLAGS = [
    (),
    ("norm_before_residual",),
    ("norm_before_fc", "norm_output", "norm_before_residual"),
    ("fc_norm",),
    ("qk_norm",),
]


@pytest.mark.usefixtures("with_whole_drafts")
@pytest.mark.parametrize("layout", ["authors", "speculators"])
@pytest.mark.parametrize("flags", FLAGS, ids="+".join)
def test_drafts_in_a_row_have_the_logits_that_the_paper_says(flags: Sequence[str], layout: str, tmp_path: Path) -> None:
    weights, tensors = published(tmp_path, layout, flags)
    model, ids = zoo.layerskip_of("llama"), [*PROMPT, 4, 7]
    model.check_config(eagle(weights))
    engine: Any = model.engine
    head = engine.draft_weights[weights.path]
    assert head.aux_layers == (0, 1, 2)
    with torch.inference_mode(), engine.session(len(ids) + 4):
        paper = ByThePaper(tensors, model.model, ids, flags)
        engine.keep_states(head.aux_layers)
        engine.forward(torch.tensor(ids[:-1]))
        text = head.new_text(len(ids) + 4)
        text.follow(engine, torch.tensor(ids[1:4]), 0)
        state = text.follow(engine, torch.tensor(ids[4:]), 3)
        for place in range(len(ids) - 1, len(ids) + 3):
            found, expected = head.logits(engine, state, None)[0], paper.next_logits()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            token = int(expected.argmax())
            paper.tokens.append(token)
            state = text.go_on(engine, torch.tensor([token]), state, place)


@pytest.mark.parametrize("flags", FLAGS, ids="+".join)
def test_recorded_it_drafts_the_same(flags: Sequence[str], tmp_path: Path) -> None:
    weights, _ = published(tmp_path, "speculators", flags)
    for config in (eagle(weights), eagle(weights.branching(6), gamma=3)):
        live, recorded = (
            one.generate(PROMPT, max_new_tokens=zoo.LONGEST, config=config)
            for one in (zoo.layerskip_of("llama fused"), graph_model("llama"))
        )
        assert recorded.ids == live.ids == list(zoo.greedy_reference("llama", PROMPT))
        assert recorded.stats.drafted_by_position == live.stats.drafted_by_position
        assert recorded.stats.accepted_by_position == live.stats.accepted_by_position


@pytest.mark.parametrize("run", ["llama", "llama fused", "llama graph"])
def test_output_is_the_targets(run: str) -> None:
    model, weights, kept = zoo.layerskip_of(run), zoo.published_of("llama"), 0
    lookup = SuffixLookup(min_match=1, gamma=3)
    for config in (
        eagle(weights),
        eagle(weights, gamma=2, siblings=2, draft_threshold=0.2),
        eagle(weights.branching(6)),
        eagle(weights.narrowed(20)),
        eagle(weights, drafter="hybrid", lookup=lookup),
    ):
        out = model.generate(PROMPT, max_new_tokens=zoo.LONGEST, config=config)
        assert out.ids == list(zoo.greedy_reference("llama", PROMPT))
        plain, same = (
            model.generate(PROMPT, max_new_tokens=zoo.LONGEST, do_sample=True, seed=3, config=one).ids
            for one in (DecodeConfig.plain(zoo.NUM_LAYERS), config)
        )
        assert plain == same
        kept += out.stats.num_accepted - out.stats.num_looked_up_accepted
    assert kept > 10


def changed(
    tmp_path: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] | None = None,
) -> DraftWeights:
    """The zoo's weights with some of this otherwise, in `tmp_path/weights`."""
    at = tmp_path / "weights"
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(zoo.published_of("llama").path, at)
    kept = json.loads((at / "config.json").read_text()) | (config or {})
    (at / "config.json").write_text(json.dumps({name: one for name, one in kept.items() if one is not None}))
    if tensors is not None:
        save_file(tensors(load_file(at / "model.safetensors")), at / "model.safetensors")
    return describe_weights(at)


def refused(model: LayerSkipModel, weights: DraftWeights) -> str:
    with pytest.raises(ValueError, match="draft_weights") as error:
        model.check_config(eagle(weights))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = zoo.layerskip_of("llama")
    assert "hidden_size must be 32, got 64" in refused(model, changed(tmp_path, {"hidden_size": 64}))
    assert "num_hidden_layers must be 1, got 2" in refused(model, changed(tmp_path, {"num_hidden_layers": 2}))
    assert "eagle_aux_hidden_state_layer_ids: must be ascending" in refused(
        model, changed(tmp_path, {"eagle_config": None})
    )
    assert "is not of the shape" in refused(model, changed(tmp_path, {"intermediate_size": 40}))
    without = changed(tmp_path, tensors=lambda all_of: {name: all_of[name] for name in all_of if name != "fc.weight"})
    assert "fc.weight" in refused(model, without)
    no_ids = changed(tmp_path, tensors=lambda all_of: {name: all_of[name] for name in all_of if name != "d2t"})
    assert f"without d2t draft_vocab_size must be the model's {zoo.VOCAB}" in refused(model, no_ids)
    beyond = changed(tmp_path, tensors=lambda all_of: all_of | {"d2t": all_of["d2t"] + zoo.VOCAB})
    assert f"ids of 0 to {zoo.VOCAB - 1}" in refused(model, beyond)
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"no tensors")
    assert "model.safetensors: cannot be read" in refused(model, describe_weights(tmp_path / "weights"))
    for field, value, rule in (
        ("target_hidden_size", 64, "target_hidden_size must be 32 or left out, got 64"),
        ("embed_requires_grad", True, "embed_requires_grad must be False or left out, got True"),
        ("eagle_aux_hidden_state_layer_ids", [0, 2, 3], "must be ascending layers of 0 to 2, got [-1, 1, 2]"),
        ("transformer_layer_config", {"model_type": "gpt_oss"}, "model_type must be one of llama, qwen3, got gpt_oss"),
        (
            "transformer_layer_config",
            {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 5},
            "is not of the shape that its config.json tells",
        ),
        ("transformer_layer_config", "llama", "is not of the shape that its config.json tells"),
        ("eagle_aux_hidden_state_layer_ids", ["1", "2", "3"], "is not of the shape that its config.json tells"),
        ("transformer_layer_config", {"layer_types": ["sliding_attention"]}, "layer_types must be full_attention"),
    ):
        published(tmp_path, "speculators", ())
        at = tmp_path / "weights" / "config.json"
        at.write_text(json.dumps(json.loads(at.read_text()) | {field: value}))
        assert rule in refused(model, describe_weights(at.parent))
    with pytest.raises(ValueError, match="speculators_model_type must be eagle3, got dflash"):
        changed(tmp_path, {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"})
    other = zoo.published_of("llama").model_copy(update={"fingerprint": "0" * 16})
    assert "draft_weights.fingerprint: must be that of" in refused(model, other)
    by_modules = graph_model("gpt2")
    assert "needs the engine eager or fused, or cuda_graph" in refused(by_modules, zoo.published_of("llama"))


def test_its_ids_are_in_no_order_so_a_search_does_not_narrow_them() -> None:
    assert num_draft_ids(zoo.published_of("llama").path) == 0
    assert usual_layers(32) == (1, 15, 28)


@pytest.mark.parametrize("modules", [False, True])
def test_auto_gives_up_recordings_only_where_they_keep_no_states(modules: bool) -> None:
    model: Any = graph_model("llama", modules=modules)
    model._engine_asked = "auto"
    model.config = eagle(zoo.published_of("llama"))
    assert (model.engine_name == "cuda_graph") is not modules
    assert model.generate(PROMPT, max_new_tokens=8).ids == list(zoo.greedy_reference("llama", PROMPT))[:8]
