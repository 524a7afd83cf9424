"""The study of Medusa's and Hydra's heads: what they learn, what acceptance and cost are worth, and the command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import LayerSkipModel
from layerskip import train as layerskip_train
from layerskip.drafters import make_drafter
from layerskip.drafters.eagle.head import load_eagle
from layerskip.rounds.sampling import Sampler, SamplingParams
from layerskip.training.data import Text
from studies.stock_weights import head_figures as figures
from studies.stock_weights import heads as study
from studies.stock_weights.draft_heads import KINDS, Ends, Heads, Kind, KnownTexts, LeanHeads, states_of, train
from tests.layerskip import zoo
from tests.layerskip.conftest import text_model, tokenizer
from tests.layerskip.drafters.test_eagle import eagle

__all__ = ["text_model", "tokenizer"]  # fixtures

COUNT = 3
GREEDY, WARM = study.REGIMES["greedy"], SamplingParams(do_sample=True, temperature=0.7, top_k=0)


def untrained(kind: Kind) -> Heads:
    torch.manual_seed(0)
    model = zoo.layerskip_of("llama fused")
    return Heads(kind, COUNT, model.model.config.hidden_size, Ends(model).norm.weight)


def noisy(kind: Kind) -> Heads:
    """Heads that say something each."""
    heads = untrained(kind)
    with torch.no_grad():
        for one in heads.leave:
            torch.nn.init.normal_(one.weight, std=0.5)  # type: ignore[arg-type]
    return heads.eval()


def own_texts(count: int = 24) -> list[list[int]]:
    return [[*one, *zoo.greedy_reference("llama", one, 40)] for one in (zoo.prompt_of(6, seed=i) for i in range(count))]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_begin_as_the_targets_own_and_learn_what_it_says(kind: Kind) -> None:
    model, heads, texts = zoo.layerskip_of("llama fused"), untrained(kind), own_texts()
    ends = Ends(model)
    states, ids = states_of(model, texts[0])[None], torch.tensor(texts[0])
    own = ends.target_logits(states)[:, :-COUNT]
    for hidden in heads.rollouts(states[:, :-COUNT], ends.embed(ids[1:])[None]):
        torch.testing.assert_close(ends.logits(hidden), own)
    held_out = [Text(tuple(one), 6) for one in texts[:4]]
    before = figures.acceptance(held_out, model, figures.head_rollouts(heads), GREEDY)
    ticks = itertools.count()
    steps, losses = train(heads, KnownTexts.of(model, texts[4:], COUNT), ends, 60.0, lambda: float(next(ticks)))
    assert steps == 59
    assert losses[-1] < losses[0]
    after = figures.acceptance(held_out, model, figures.head_rollouts(heads), GREEDY)
    assert sum(after.chained) > sum(before.chained)


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="texts: one must have at least 20 tokens, the longest has 9"):
        KnownTexts.of(zoo.layerskip_of("llama"), [[1] * 9], COUNT)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_live_draft_is_what_rollouts_say(kind: Kind) -> None:
    model, heads, text = zoo.layerskip_of("llama fused"), noisy(kind), own_texts(1)[0]
    engine: Any = model.engine
    with engine.session(64):
        engine.keep_states()
        engine.forward(torch.tensor(text[:-1]))
        state = engine.states[len(text) - 2 : len(text) - 1].clone()
        for gamma in range(1, COUNT + 1):
            lean = LeanHeads(heads, gamma, engine, Sampler(GREEDY))
            drafted = lean.draft(state, text[-1], text)
            embedded = engine.embed(torch.cat([torch.tensor(text[-1:]), drafted, torch.zeros(COUNT).long()]))
            steps = heads.rollouts(state[None], embedded[None, :COUNT])[:gamma]
            assert drafted.tolist() == [int(engine.unembed(one[0]).argmax()) for one in steps]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_acceptance_of_the_coupled_sampler_is_that_of_decoding(params: SamplingParams) -> None:
    """Of a first draft token, which does not depend on where rounds begin: counted over every place of a text."""
    model, weights = zoo.layerskip_of("qwen2 fused"), zoo.eagle_of("qwen2")
    config = eagle(weights, gamma=1)
    model.check_config(config)
    head = load_eagle(weights, model.model, model.weights_fingerprint())
    texts = figures.continuations(model, [zoo.prompt_of(5, seed=i) for i in range(8)], params, 24, 8)
    found = figures.acceptance(texts, model, figures.eagle_rollouts(head, 1), params)
    right = []
    engine: Any = model.engine
    for seed, text in enumerate(texts):
        sampler = Sampler(params, torch.Generator().manual_seed(seed // 8) if params.do_sample else None)
        sampler.begin(text.given)
        drafter: Any = make_drafter(config, engine, sampler)
        with torch.inference_mode(), engine.session(64):
            engine.keep_states()
            session = drafter.begin()
            for length in range(text.given, len(text.ids) - 1):
                engine.forward(torch.tensor(text.ids[engine.cache.length : length]))
                live = session.propose(text.ids[: length + 1], 1, None)
                right.append(live.ids.item() == text.ids[length + 1])
    share = sum(right) / len(right)
    assert len(right) > 150
    if params.do_sample:
        assert found.coupled[0] == pytest.approx(share, abs=3 * (share * (1 - share) / len(right)) ** 0.5)
        assert found.chained[0] > found.coupled[0]
    else:
        assert found.chained[0] == found.coupled[0] == pytest.approx(share)


def test_accepted_by_hand() -> None:
    target, draft = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    now, coupled, onward = figures._accepted(target, draft, torch.tensor([0]), 1.0)
    assert now.item() == pytest.approx(0.7)
    assert coupled.item() == pytest.approx(1 / (0.8 + 0.5 * 0.8 / 0.5))
    assert onward.item() == pytest.approx(0.5 / 0.8)
    agrees, _, _ = figures._accepted(target, draft.flip(0), torch.tensor([0]), 0.0)
    assert agrees.item() == 1.0


def test_what_acceptance_is_worth_at_given_costs() -> None:
    assert figures.best_speedup([0.0, 0.0], [0.2, 0.4], [1.0, 1.0, 1.0]) == (1.0, 0)
    assert figures.best_speedup([1.0, 1.0], [0.5, 1.0], [2.0, 2.0, 2.0]) == (pytest.approx(2.0), 2)
    assert figures.best_speedup([0.5, 0.2], [0.1, 0.2], [1.0, 1.2, 1.5]) == (pytest.approx(1.5 / 1.3), 1)


@pytest.mark.slow
def test_the_command_writes_figures_and_keeps_the_heads(
    text_model: LayerSkipModel, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    text_model.model.save_pretrained(tmp_path / "model")
    text_model.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("def read(self):\n    return self.text\n" * 40)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def read(self):\n    return self." * 4}) + "\n")
    common = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt")]
    trained = ["--steps", "2", "--window", "32", "--device", "cpu", "--out"]
    assert layerskip_train.main([*common, *trained, str(tmp_path / "deep")]) == 0
    given = [*common, "--eagle", str(tmp_path / "deep"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert study.main(given) == 2
    assert "--eagle: must read the last state alone, as the heads do" in capsys.readouterr().err
    assert layerskip_train.main([*common, *trained, str(tmp_path / "eagle"), "--aux-layers"]) == 0
    out = tmp_path / "heads.json"
    given = [*common, "--eagle", str(tmp_path / "eagle"), "--prompts", str(tmp_path / "prompts.jsonl")]
    given += ["--heads", "2", "--new-tokens", "12", "--repeats", "1", "--minutes", "0.005"]
    given += ["--keep", str(tmp_path / "heads"), "--out", str(out)]
    assert study.main(given) == 0
    first = json.loads(out.read_text())
    assert first["command"].startswith("python -m studies.stock_weights.heads --model")
    assert {"commit", "cpu"} <= first.keys()
    assert first["training"].keys() == set(KINDS)
    for regime in first["regimes"].values():
        assert regime["drafters"].keys() == {"eagle", *KINDS}
        assert len(regime["verify_s"]) == 3
        assert all(len(row["accepted"]) == len(row["draft_cost"]) == 2 for row in regime["drafters"].values())
    capsys.readouterr()
    monkeypatch.setattr(study, "train", None)
    assert study.main(given) == 0, "kept heads are not trained again"
    again = json.loads(out.read_text())
    assert again["training"] == first["training"]
    for name, regime in again["regimes"].items():
        for drafter, row in regime["drafters"].items():
            assert row["accepted"] == first["regimes"][name]["drafters"][drafter]["accepted"]
