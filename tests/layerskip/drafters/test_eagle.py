"""Drafting by trained weights: what it drafts is what it was trained to, whatever happens, and only for its model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters import make_drafter
from layerskip.drafters.draft_weights import loaded_weights
from layerskip.drafters.eagle.drafter import EagleSession
from layerskip.drafters.eagle.lean import LeanEagle, LeanText
from layerskip.rounds.sampling import Sampler, SamplingParams
from layerskip.training.data import Sequences, Text
from layerskip.training.eagle import TrainOptions, train_eagle
from tests.layerskip import zoo
from tests.layerskip.drafters.test_drafters import PROMPT, by_trees, by_weights
from tests.layerskip.engines.cuda_graph.test_cuda_graph import Frozen, Operations
from tests.layerskip.rounds.test_broken_rounds import check_survives
from tests.layerskip.tape import graph_model

NONE = SkipMask.none(zoo.NUM_LAYERS)


def eagle(weights: DraftWeights, gamma: int = 4, **fields: Any) -> DecodeConfig:
    return DecodeConfig(drafter="eagle", skip_mask=NONE, gamma=gamma, draft_weights=weights, **fields)


LIVE = ("llama", "llama fused", "llama graph", "gemma3", "opt")


@zoo.each(LIVE)
def test_a_live_chain_is_what_rollouts_say(name: str) -> None:
    check_live_chains(name, lambda head, states, embedded: head.rollouts(states, embedded, 4, 0))


@pytest.mark.usefixtures("with_whole_drafts")
@zoo.each(LIVE)
def test_a_live_chain_is_what_was_trained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.layerskip_of(name).engine, "draft_weights", {})  # others may be rounded already

    def trained(head: Any, states: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        return [one[0] for one in head.module.rollouts(states[None], embedded[None], 4)]

    check_live_chains(name, trained)


@torch.inference_mode()
def check_live_chains(name: str, rollouts: Callable[[Any, torch.Tensor, torch.Tensor], list[torch.Tensor]]) -> None:
    """They see the target's states up to the round and none after it, whatever was drafted and thrown away before."""
    model, weights = zoo.layerskip_of(name), zoo.eagle_of(zoo.architecture(name))
    config = eagle(weights, gamma=5)
    model.check_config(config)
    engine: Any = model.engine
    head = loaded_weights(engine, weights)
    assert isinstance(head, LeanEagle)
    text = [*PROMPT, *zoo.greedy_reference(name, PROMPT)]
    with engine.session(64):
        drafter = make_drafter(config, engine, Sampler(SamplingParams()))
        engine.keep_states(head.aux_layers)
        session = drafter.begin()
        for length in (9, 12, 13, 17):
            engine.forward(torch.tensor(text[engine.cache.length : length]))
            live: Any = session.propose(text[: length + 1], 5, None)
            drafted = live.ids.tolist()
            states = engine.states[:length].clone()
            later = torch.full((4, states.shape[1]), 7.0)  # of no use to a round that begins before them
            embedded = engine.embed(torch.tensor([*text[1 : length + 1], *drafted[:4]]))
            steps = rollouts(head, torch.cat([states, later]), embedded)
            rows = torch.stack([step[length - 1 + d] for d, step in enumerate(steps)])
            assert head.logits(engine, rows, None).argmax(-1).tolist() == drafted


@pytest.mark.parametrize("name", ["llama", "llama fused", pytest.param("llama graph", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "temperature", [pytest.param(0.5, marks=pytest.mark.slow), 1.0, pytest.param(1.7, marks=pytest.mark.slow)]
)
def test_sampled_text_is_the_targets_from_the_same_seed(name: str, temperature: float) -> None:
    model = zoo.layerskip_of(name)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "repetition_penalty": 1.1, "max_new_tokens": 24}
    accepted = 0
    for config in (by_weights("llama") | by_trees("llama")).values():
        for seed in range(4):
            plain = model.generate(PROMPT, seed=seed, config=DecodeConfig.plain(zoo.NUM_LAYERS), **drawn)
            out = model.generate(PROMPT, seed=seed, config=config, **drawn)
            assert out.ids == plain.ids
            accepted += out.stats.num_accepted - out.stats.num_looked_up_accepted
    assert accepted


def test_an_exception_anywhere_leaves_the_model_whole(monkeypatch: Any) -> None:
    model, config = zoo.layerskip_of("llama"), eagle(zoo.eagle_of("llama"))
    places = ((EagleSession, "propose"), (LeanText, "run"), (Sampler, "shape"))
    check_survives(model, PROMPT, config, places, monkeypatch, num_calls=3)
    with pytest.raises(RuntimeError, match="no hidden states"):
        _ = model.engine.states  # type: ignore[attr-defined]


def test_a_config_names_weights_from_its_own_folder(tmp_path: Path) -> None:
    at = tmp_path / "one" / "weights"
    shutil.copytree(zoo.eagle_of("llama").path, at)
    config = eagle(zoo.eagle_of("llama").model_copy(update={"path": str(at)}))
    config.save(tmp_path / "one" / "best.json")
    assert json.loads((tmp_path / "one" / "best.json").read_text())["draft_weights"]["path"] == "./weights"
    assert DecodeConfig.load(tmp_path / "one" / "best.json") == config
    (tmp_path / "one").rename(tmp_path / "two")
    moved = DecodeConfig.load(tmp_path / "two" / "best.json")
    out = zoo.layerskip_of("llama").generate(PROMPT, max_new_tokens=12, config=moved)
    assert out.stats.num_drafted
    (tmp_path / "beside" / "int8" / "t0.7" / "far").mkdir(parents=True)
    whole = str(tmp_path / "one" / "weights")
    near = (("", "./one/weights"), ("beside", "../one/weights"), ("beside/int8/t0.7", "../../../one/weights"))
    for folder, path in (*near, ("beside/int8/t0.7/far", whole)):
        config.save(tmp_path / folder / "elsewhere.json")
        assert json.loads((tmp_path / folder / "elsewhere.json").read_text())["draft_weights"]["path"] == path
        assert DecodeConfig.load(tmp_path / folder / "elsewhere.json") == config


def test_weights_from_before_there_were_aux_layers_are_read(tmp_path: Path) -> None:
    weights, model = zoo.eagle_of("gemma3"), zoo.layerskip_of("gemma3")
    folder = tmp_path / "weights"
    shutil.copytree(weights.path, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["shape"]["aux_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    here = weights.model_copy(update={"path": str(folder)})
    out = model.generate(PROMPT, max_new_tokens=12, config=eagle(here))
    assert out.ids == model.generate(PROMPT, max_new_tokens=12, config=eagle(weights)).ids
    assert out.stats.num_drafted


def test_a_path_of_this_machine_is_not_pushed_to_the_hub() -> None:
    with pytest.raises(ValueError, match="draft_weights: a config on the hub cannot name a folder of this machine"):
        eagle(zoo.eagle_of("llama")).push_to_hub("me/model")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"draft_weights": None}, "draft_weights: is required where the drafter is eagle"),
    ({"drafter": "layer_skip"}, "draft_weights: must be left out where the drafter is layer_skip"),
    ({"skip_mask": SkipMask.from_layers(4, [1])}, "skip_mask: must be left out where draft_weights are given"),
    ({"gamma": 0}, "gamma: must be at least 1 where the drafter is eagle, got 0"),
    (
        {"draft_weights": {"path": "", "fingerprint": "0"}},
        "draft_weights.path: string should have at least 1",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_bad_configs_name_field_and_rule(fields: dict[str, Any], message: str) -> None:
    weights = DraftWeights(path="weights", fingerprint="0")
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        DecodeConfig(**{"drafter": "eagle", "skip_mask": NONE, "gamma": 3, "draft_weights": weights} | fields)
    assert message in str(caught.value)


def refused(model: LayerSkipModel, weights: DraftWeights) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        model.generate(PROMPT, max_new_tokens=4, config=eagle(weights))
    assert model.generate(PROMPT, max_new_tokens=4).ids == list(zoo.greedy_reference("llama", PROMPT)[:4])
    return str(caught.value)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = zoo.eagle_of("llama")
    model = LayerSkipModel(zoo.model_of("llama"), engine="eager")
    assert "was trained for the model" in refused(model, zoo.eagle_of("qwen2"))
    assert "has no config.json" in refused(model, DraftWeights(path=str(tmp_path), fingerprint="0"))
    assert "draft_weights.fingerprint: must be that of" in refused(model, good.model_copy(update={"fingerprint": "0"}))
    folder = tmp_path / "weights"
    shutil.copytree(good.path, folder)
    here = good.model_copy(update={"path": str(folder)})
    payload = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(payload[:-1] + b"x")
    assert "its fingerprint differs" in refused(model, here)
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refused(model, here)
    shutil.copy(Path(good.path) / "model.safetensors", folder)
    config = json.loads((folder / "config.json").read_text())
    for aux, message in (
        ([3], "draft_weights: aux_layers: must be ascending layers of 0 to 2, got [3]"),
        ([1], "shape"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"shape": config["shape"] | {"aux_layers": aux}}))
        assert message in refused(model, here)
    for text in ("{", "[]", '{"drafter": "medusa"}', '{"drafter": "eagle", "shape": {"hidden_size": 1}}'):
        (folder / "config.json").write_text(text)
        assert f"{folder / 'config.json'}: not draft weights" in refused(model, here)


def test_where_the_models_own_modules_are_recorded_it_is_refused() -> None:
    model = zoo.layerskip_of("gemma2 graph")
    with pytest.raises(
        ValueError, match=r"draft_weights: eagle needs .* cuda_graph over lean layers, got cuda_graph over"
    ):
        model.generate(PROMPT, max_new_tokens=4, config=eagle(zoo.eagle_of("gemma2")))


def test_recordings_with_states_stay_right_beside_those_of_other_layers_and_without(tmp_path: Path) -> None:
    """And where a longer text makes all buffers anew."""
    text = Text((*PROMPT, *zoo.greedy_reference("llama", PROMPT)))
    options = TrainOptions(steps=20, depth=2, learning_rate=0.02)
    eager = LayerSkipModel(zoo.model_of("llama"), engine="eager")
    last_alone = train_eagle(eager, Sequences((text,), (text,)), tmp_path, options, tell=lambda _: None).weights
    recorded = graph_model("llama", granule=32)
    own = zoo.eagle_of("llama")
    trees = [eagle(own.branching(size), gamma) for size, gamma in ((5, 2), (20, 5))]
    configs = [eagle(own), eagle(last_alone), *trees, eagle(own, 7), DecodeConfig.plain(zoo.NUM_LAYERS)]
    accepted = 0
    for prompt in (PROMPT, PROMPT, zoo.prompt_of(40, seed=2), PROMPT):
        for config in configs:
            out, live = (
                one.generate(prompt, max_new_tokens=16, config=config)
                for one in (recorded, zoo.layerskip_of("llama fused"))
            )
            assert out.ids == live.ids
            assert out.stats.accepted_by_position == live.stats.accepted_by_position
            accepted += out.stats.num_accepted
    assert accepted


def test_a_drafted_token_is_one_recording_and_its_choice() -> None:
    """On lean layers as they are it is some forty operations."""
    model, weights, names = graph_model("llama", Frozen()), zoo.eagle_of("llama"), []
    engine: Any = model.engine
    for gamma in (2, 6):
        model.check_config(eagle(weights, gamma))
        with torch.inference_mode(), engine.session(64):
            drafter = make_drafter(eagle(weights, gamma), engine, Sampler(SamplingParams()))
            assert drafter is not None
            engine.keep_states((0, 2))
            engine.forward(torch.tensor(PROMPT))
            session: Any = drafter.begin()
            for _ in range(2):  # over the prompt, then what is recorded
                session.propose([*PROMPT, 1], 9, None)
                session.forget_from(len(PROMPT) - 2)
            with Operations() as seen:
                session.propose([*PROMPT, 1], 9, None)
        names.append(Counter(seen.names))
    each = {name: count / 4 for name, count in (names[1] - names[0]).items() if name not in ("slice", "squeeze")}
    # Its token and its place into their buffers, and the greedy choice.
    assert each == {"copy_": 1, "fill_": 1, "max": 1, "to": 1}
