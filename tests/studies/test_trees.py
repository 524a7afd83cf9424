"""Trees of drafted tokens: what they are counted to hold is what chains hold, and more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import LayerSkipModel
from layerskip import train as layerskip_train
from layerskip.config.sampling_params import SamplingParams
from layerskip.drafters.eagle_head import load_eagle
from layerskip.rounds.sampling import seeded_sampler
from studies.stock_weights import head_figures, trees
from tests.layerskip import zoo
from tests.layerskip.conftest import text_model, tokenizer

__all__ = ["text_model", "tokenizer"]  # fixtures


@pytest.mark.parametrize("params", trees.REGIMES.values(), ids=trees.REGIMES)
@torch.no_grad()
def test_the_best_of_each_depth_are_a_chain_of_rollouts(params: SamplingParams) -> None:
    """The chain within the tree has the tokens that `EagleHead.rollouts` drafts behind the text's own."""
    model, weights = LayerSkipModel(zoo.model_of("llama"), engine="eager"), zoo.eagle_of("llama")
    head = load_eagle(weights, model.model, model.weights_fingerprint())
    target: Any = model.model
    [text] = head_figures.continuations(model, [zoo.prompt_of(6, seed=3)], params, 40, 1)
    sampler = seeded_sampler(params, 0, model.device)
    sampler.begin(text.num_prompt)
    found = list(trees.TreeDrafts(model, head).rounds(text.ids, text.num_prompt, sampler))
    ids = torch.tensor(text.ids)
    with model.adapter.states_of((*head.shape.aux_layers, zoo.NUM_LAYERS - 1)) as states:
        target(input_ids=ids[None], use_cache=False)
    embedded = target.get_input_embeddings().weight[ids[1:]]
    steps = head.rollouts(torch.cat(states, -1)[:, :-1], embedded[None], trees.DEPTH - 1)
    logits = torch.stack([target.get_output_embeddings()(head.norm(one[0])) for one in steps])
    assert len(found) == len(text.ids) - 1 - trees.DEPTH - (text.num_prompt - 1)
    counts = []
    for last, one in enumerate(found, start=text.num_prompt - 1):
        right = 0
        for depth in range(trees.DEPTH):
            place = last + 2 + depth
            row = sampler.shape(logits[depth, last + depth : last + depth + 1], [0])
            if int(sampler.choose(row, place)) != text.ids[place]:
                break
            right += 1
        counts.append(right)
        assert next((i for i, rank in enumerate(one.ranks) if rank), len(one.ranks)) == right
        assert all(len(places) <= depth for depth, places in one.places.items())
    assert max(counts) > 0
    by_rows = trees.tokens_a_round(found)
    assert by_rows["chain"][60] == round(1.0 + sum(counts) / len(counts), 3)
    assert all(by_rows["siblings"][rows] >= by_rows["chain"][rows] for rows in trees.ROWS)
    assert list(by_rows["tree"].values()) == sorted(by_rows["tree"].values())


@pytest.mark.slow
def test_the_command_writes_what_it_counts(text_model: LayerSkipModel, tmp_path: Path) -> None:
    text_model.model.save_pretrained(tmp_path / "model")
    text_model.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("def read(self):\n    return self.text\n" * 40)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def read(self):\n    return self."}) + "\n")
    trained = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "eagle"), "--steps", "2", "--window", "32"]
    model = ["--model", str(tmp_path / "model")]
    assert layerskip_train.main([*model, *trained, "--device", "cpu"]) == 0
    given = [*model, "--eagle", str(tmp_path / "eagle"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert trees.main([*given, "--new-tokens", "12", "--out", str(tmp_path / "trees.json")]) == 0
    written = json.loads((tmp_path / "trees.json").read_text())
    assert written["regimes"].keys() == trees.REGIMES.keys()
    assert written["regimes"]["t1"]["num_rounds"] > 0
