"""Nothing is recorded while a clock runs: trials, the confirm stage, costs and benchmarks on an engine that records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optuna
import pytest

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.benchmark import memory
from layerskip.benchmark.names import PLAIN, SPECULATIVE
from layerskip.benchmark.run import Plan, run_benchmark
from layerskip.decoding.loop import DecodeLoop
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.recording.graph_pool import RerunRecorder
from layerskip.rounds.device_round import DeviceRound
from search.confirm.passes import ConfirmOptions, HeldOutPrompts
from search.confirm.stage import confirm
from search.measure.decoder import Decoded, ModelDecoder
from search.measure.pairs import PromptCase, measure_pair
from search.measure.reference import ReferenceOptions, make_reference
from search.stop import StopSignal
from search.study.leaderboard import Entry
from search.study.prompts import EncodedPrompt
from search.study.space import SearchSpace
from search.trials.objective import Objective
from search.trials.proposals import ProposeOptions
from search.trials.sampler import make_sampler
from tests.layerskip import zoo
from tests.layerskip.tape import engine_of, graph_model

NEW_TOKENS = 14
CONFIGS = [
    DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [2]), gamma=3),
    DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [1]), gamma=5, draft_threshold=0.4),
    DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 2), gamma=2, target_threshold=0.3),
]


def cases() -> list[PromptCase]:
    prompts = [zoo.prompt_of(length) for length in (5, 12, 9)]
    return [PromptCase(f"p{len(p)}", p, zoo.greedy_reference("llama", p)[:NEW_TOKENS]) for p in prompts]


def trial(model: LayerSkipModel) -> None:
    decoder = ModelDecoder(model, NEW_TOKENS)
    for config in CONFIGS:
        for turn, case in enumerate(cases()):
            measure_pair(decoder, case, config, plain_first=turn % 2 == 0)


def confirmed(model: LayerSkipModel) -> None:
    entries = [Entry(config, {}, (0,), 3, 1.1, 1.0) for config in CONFIGS]
    options = ConfirmOptions(zoo.NUM_LAYERS, repeats=2, seed=0)
    prompts = HeldOutPrompts([EncodedPrompt(case.prompt_id, None, case.prompt_ids) for case in cases()])
    found = confirm(ModelDecoder(model, NEW_TOKENS), prompts, entries, options)
    reasons = [one.excluded for one in found.candidates if one.excluded]
    if reasons:
        raise RuntimeError("; ".join(reasons))
    assert found.measured is not None


def costs(model: LayerSkipModel) -> None:
    timer = ModelDecoder(model, NEW_TOKENS).timer(4)
    for text in (zoo.prompt_of(9), zoo.prompt_of(20)):
        assert min(timer.verify_s(text, range(1, 6))) > 0.0
        for threshold in (False, True):
            assert min(timer.draft_s(text, [one.skip_mask for one in CONFIGS], gamma=4, threshold=threshold)) > 0.0


def benchmark(model: LayerSkipModel) -> None:
    prompts = [(case.prompt_id, case.prompt_ids) for case in cases()]
    found = run_benchmark(model, CONFIGS[1], prompts, Plan(NEW_TOKENS, 2, (PLAIN, SPECULATIVE)))
    assert not found.broken
    assert found.steps is not None


def test_a_decoder_that_remembers_goes_over_a_prompt_once() -> None:
    """Each config's continuation is the same, and the others know all of the prompt but its last token."""
    model, prompt = zoo.layerskip_of("llama fused"), zoo.prompt_of(12)
    decoder = ModelDecoder(model, NEW_TOKENS)
    remembering = decoder.remembering()
    found = [remembering.decode(prompt, config) for config in (DecodeConfig.plain(zoo.NUM_LAYERS), *CONFIGS)]
    assert {one.ids for one in found} == {decoder.decode(prompt, CONFIGS[0]).ids}
    assert [one.stats.num_cached for one in found] == [0, *[len(prompt) - 1] * len(CONFIGS)]
    assert decoder.decode(prompt, CONFIGS[0]).stats.num_cached == 0


def test_a_search_goes_over_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[tuple[int, int]] = []
    decode = ModelDecoder.decode

    def noted(self: ModelDecoder, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        out = decode(self, prompt_ids, config, seed)
        known.append((len(prompt_ids), out.stats.num_cached))
        return out

    monkeypatch.setattr(ModelDecoder, "decode", noted)
    decoder = ModelDecoder(zoo.layerskip_of("llama fused"), NEW_TOKENS)
    prompts = [EncodedPrompt(str(length), None, tuple(zoo.prompt_of(length))) for length in (9, 12)]
    reference = make_reference(decoder, prompts, ReferenceOptions(zoo.NUM_LAYERS, 0, 1.0, 2, num_noise_pairs=2))
    once_each = [(9, 0), (9, 8), (12, 0), (12, 11)]
    assert sorted(known[2:]) == once_each, "after warming up"
    known.clear()
    layers = tuple(range(zoo.NUM_LAYERS))
    space = SearchSpace(zoo.NUM_LAYERS, 2, layers, layers, ())
    sampler = make_sampler("random", space, ProposeOptions(4, reference.noise_sigma, 2), None)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(Objective(decoder, space, reference, sampler, StopSignal()), n_trials=2)
    assert sorted(known[:4]) == once_each
    assert len(known) > 4
    assert all(cached == length - 1 for length, cached in known[4:]), "by the second trial both are known"


FLOWS: list[Callable[[LayerSkipModel], None]] = [trial, confirmed, costs, benchmark]
each_flow = pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)


@pytest.fixture(autouse=True)
def _small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CPU_BYTES", 1 << 16)


@each_flow
def test_nothing_is_recorded_in_a_timed_region(flow: Callable[[LayerSkipModel], None]) -> None:
    """Every clock compares the engine's preparations at its two ends, and raises."""
    model = graph_model("llama", RerunRecorder(), granule=64, max_graphs=4)
    flow(model)
    assert engine_of(model).pool.stats.num_captures > 4


@each_flow
def test_the_same_without_preparing_raises(
    flow: Callable[[LayerSkipModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So every one of them has such clocks around what it times."""
    monkeypatch.setattr(DecodeLoop, "prepare", lambda *_: None)
    monkeypatch.setattr(CudaGraphEngine, "prepare", lambda *_: None)
    for name in ("prepare", "prepare_verify"):
        monkeypatch.setattr(DeviceRound, name, lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="inside a timed region"):
        flow(graph_model("llama", RerunRecorder(), granule=64))
