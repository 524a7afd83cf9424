"""Siblings of drafted tokens: the target's own tokens still, one more in a round where a sibling is right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerskip.decoding.loop
from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.lookup_settings import PromptLookup
from layerskip.decoding.loop import ACCEPTED
from layerskip.drafters.eagle.head import read_config
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.states import StatesEngine
from layerskip.engines.tree import DraftTree
from layerskip.rounds.sampling import Sampler, SamplingParams, choose, next_best, rank_of
from layerskip.rounds.verifier import TreeDraft, TreeToken, Verdict, verify_tree
from tests.layerskip import zoo
from tests.layerskip.decoding.counters import check_counters
from tests.layerskip.decoding.test_decode import SAMPLINGS
from tests.layerskip.drafters.test_drafters import by_weights
from tests.layerskip.rounds.test_broken_rounds import check_survives
from tests.layerskip.tape import graph_model

RUNS = tuple(name for name in zoo.RUNS + zoo.GRAPH_RUNS if zoo.architecture(name) not in zoo.WITHOUT_TREES)
FEW = ("llama", "mistral-sliding", "gemma3", "llama fused", "mistral-sliding fused", "mistral-sliding graph")
MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [1, 2])


def config_of(siblings: int = 2, gamma: int = 3, **fields: Any) -> DecodeConfig:
    return DecodeConfig(**{"skip_mask": MASK, "gamma": gamma, "siblings": siblings} | fields)


@zoo.few(RUNS)
def test_greedy_equals_generate(name: str) -> None:
    model, draw = zoo.layerskip_of(name), random.Random(name)
    thresholds = itertools.cycle(((0.0, 0.0), (0.4, 0.0), (0.0, 0.3)))
    hits = 0
    for siblings, gamma in ((1, 1), (2, 4), (4, 2), (1, 7)):
        drawn = zoo.random_mask(zoo.NUM_LAYERS, draw, sublayers=zoo.spec_of(name).sublayers)
        for length, mask in ((1, MASK), (11, drawn)):
            draft_threshold, target_threshold = next(thresholds)
            config = config_of(
                siblings, gamma, skip_mask=mask, draft_threshold=draft_threshold, target_threshold=target_threshold
            )
            prompt = zoo.prompt_of(length)
            plain = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config.model_copy(update={"siblings": 0}))
            out = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config)
            assert out.ids == list(zoo.greedy_reference(name, prompt)), config
            check_counters(out, config)
            assert out.stats.num_siblings == siblings * out.stats.num_drafted
            assert plain.stats.num_siblings == plain.stats.num_sibling_hits == 0
            hits += out.stats.num_sibling_hits
    assert hits > 0, "no sibling was ever right"


@zoo.each(("llama", "llama fused", "gemma3", "gpt2", "mistral-sliding fused", "llama graph"))
def test_sampled_equals_generate(name: str) -> None:
    """From one seed, with every way to shape; and torch's own generator is left where `generate` leaves it."""
    model, prompt = zoo.layerskip_of(name), [*zoo.prompt_of(4), *zoo.prompt_of(4)]
    hits = 0
    for seed, sampling in enumerate(SAMPLINGS * 2):
        torch.manual_seed(seed)
        out = model.model.generate(torch.tensor([prompt]), max_new_tokens=zoo.LONGEST, do_sample=True, **sampling)
        expected, state = out[0, len(prompt) :].tolist(), torch.random.get_rng_state()
        for config in (config_of(2, 4), config_of(4, 2, draft_threshold=0.3, target_threshold=0.1)):
            torch.manual_seed(seed)
            ours = model.generate(prompt, max_new_tokens=zoo.LONGEST, do_sample=True, config=config, **sampling)
            assert ours.ids == expected, (sampling, config)
            assert torch.equal(torch.random.get_rng_state(), state)
            check_counters(ours, config)
            hits += ours.stats.num_sibling_hits
    assert hits > 0


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_the_penalty_after_a_sibling_sees_the_sibling(penalty: float) -> None:
    model, hits = zoo.layerskip_of("llama"), 0
    for length in (1, 5, 9):
        prompt = zoo.prompt_of(length)
        given = {"max_new_tokens": zoo.LONGEST, "repetition_penalty": penalty}
        expected = model.model.generate(torch.tensor([prompt]), do_sample=False, **given)[0, length:].tolist()
        out = model.generate(prompt, config=config_of(3, 4), **given)
        assert out.ids == expected
        hits += out.stats.num_sibling_hits
    assert hits > 0


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "llama fused", "llama graph"])
def test_every_computing_drafter_has_them(name: str) -> None:
    """Trained weights too, which go on from the target's states at the sibling; a hybrid's lookups have none."""
    model, prompt = zoo.layerskip_of(name), [*zoo.prompt_of(5), *zoo.prompt_of(5)]
    lookup = PromptLookup(min_match=1, max_match=3)
    configs = by_weights("llama") | {"hybrid": DecodeConfig(drafter="hybrid", skip_mask=MASK, gamma=3, lookup=lookup)}
    for way, config in configs.items():
        hits = 0
        branched = config.model_copy(update={"siblings": 3})
        for seed in range(4):
            for more in ({"do_sample": False}, {"do_sample": True, "seed": seed, "temperature": 0.8, "top_k": 0}):
                text = [*prompt, seed + 1]
                plain = model.generate(text, max_new_tokens=24, config=DecodeConfig.plain(zoo.NUM_LAYERS), **more)
                out = model.generate(text, max_new_tokens=24, config=branched, **more)
                assert out.ids == plain.ids, way
                check_counters(out, branched)
                assert out.stats.num_siblings == 3 * (out.stats.num_drafted - out.stats.num_looked_up)
                hits += out.stats.num_sibling_hits
        assert hits > 0, way


@zoo.each(FEW)
def test_the_cache_after_each_step_is_that_of_plain_decoding(name: str) -> None:
    """Its length, and the keys and values of every position, those of accepted siblings among them; the target's
    states, where they are kept."""
    model, prompt = zoo.layerskip_of(name), zoo.prompt_of(4)
    engine: Any = model.engine
    weights, hits = zoo.eagle_of(zoo.architecture(name)), 0
    for siblings, gamma, tree_tokens in ((1, 1, None), (3, 4, None), (0, 4, 12)):
        config = DecodeConfig(
            drafter="eagle",
            skip_mask=SkipMask.none(zoo.NUM_LAYERS),
            gamma=gamma,
            draft_weights=weights.branching(tree_tokens),
            siblings=siblings,
        )
        text = torch.tensor([*prompt, *zoo.greedy_reference(name, prompt)])
        with engine.session(len(text)):
            engine.keep_states(read_config(Path(weights.path))["shape"]["aux_layers"])
            engine.forward(text)
            expected = [(layer.keys.clone(), layer.values.clone()) for layer in engine.cache.layers]
            states = engine.states.clone()
        stream, total = model.stream(prompt, max_new_tokens=20, config=config), len(prompt)
        for piece in stream:
            total += len(piece.ids)
            assert engine.cache.length == total - 1
            for layer, (keys, values) in zip(engine.cache.layers, expected, strict=True):
                torch.testing.assert_close(layer.keys[:, :, : total - 1], keys[:, :, : total - 1], rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(
                    layer.values[:, :, : total - 1], values[:, :, : total - 1], rtol=1e-3, atol=1e-4
                )
            torch.testing.assert_close(engine.states[: total - 1], states[: total - 1], rtol=1e-3, atol=1e-4)
        hits += stream.stats.num_sibling_hits
    assert hits > 0


@zoo.each(("llama", "mistral-sliding fused", "llama graph"))
def test_the_text_may_end_at_a_sibling(name: str) -> None:
    """At every offset of a round, a sibling and what follows it among them."""
    model, prompt, config = zoo.layerskip_of(name), zoo.prompt_of(5), config_of(3, 4)
    whole = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config)
    reference, hits = list(zoo.greedy_reference(name, prompt)), whole.stats.num_sibling_hits
    at_sibling = {place for place, one in whole.rejected.items() if one and whole.origins[place] == ACCEPTED}
    assert len(at_sibling) >= hits - 1 > 0
    ended = set()
    for place, token in enumerate(reference):
        if token in reference[:place]:
            continue
        for more in ({"eos_token_id": token}, {"eos_token_id": [], "max_new_tokens": place + 1}):
            out = model.generate(prompt, **{"max_new_tokens": zoo.LONGEST, "config": config} | more)
            assert out.ids == reference[: place + 1]
            check_counters(out, config)
        ended.add(place)
    assert ended & at_sibling, "no text ended at a sibling"


def test_stop_strings(text_model: LayerSkipModel, tokenizer: Any) -> None:
    prompt = tokenizer("def read(")["input_ids"]
    config = config_of(3, 4, skip_mask=SkipMask.from_layers(4, [1, 3]))
    whole = text_model.generate(prompt, max_new_tokens=30, config=config)
    assert whole.stats.num_sibling_hits > 0
    plain = DecodeConfig.plain(zoo.NUM_LAYERS)
    for i in range(0, 30, 2):
        stop = tokenizer.decode(whole.ids[i : i + 2])
        if stop and "\ufffd" not in stop:
            outs = [
                text_model.generate(prompt, max_new_tokens=30, config=one, stop_strings=stop) for one in (plain, config)
            ]
            assert outs[1].ids == outs[0].ids
            check_counters(outs[1], config)


@pytest.mark.parametrize("name", ["llama", "llama fused", "llama graph"])
def test_an_exception_anywhere_leaves_the_model_whole(name: str, monkeypatch: Any) -> None:
    model, config = zoo.layerskip_of(name), config_of(2, 3)
    places = (
        (type(model.engine), "verify_tree"),
        (type(model.engine), "keep_rows"),
        (layerskip.decoding.loop, "verify_tree"),
        (Sampler, "siblings"),
    )
    assert check_survives(model, zoo.prompt_of(5), config, places, monkeypatch).stats.num_sibling_hits > 0


Bug = Callable[[pytest.MonkeyPatch], None]


def not_kept(patch: pytest.MonkeyPatch) -> None:
    """The keys of an accepted sibling stay where its row was."""
    for engine in (StatesEngine, CudaGraphEngine):
        patch.setattr(engine, "keep_rows", lambda *_: None)


def sees_the_wrong_draft(patch: pytest.MonkeyPatch) -> None:
    """A row sees those before it that go on from the same one."""
    paths = DraftTree.paths.func

    def wrong(self: DraftTree) -> torch.Tensor:
        seen = paths(self)
        for row, parent in enumerate(self.parents, 1):
            seen[row, 1 + self.parents.index(parent)] = True
        return seen

    patch.setattr(DraftTree, "paths", property(wrong))


def sees_its_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Rows see all rows before them, as in a chain."""
    patch.setattr(DraftTree, "paths", property(lambda self: torch.ones(self.num_rows, self.num_rows).tril().bool()))


def one_late(patch: pytest.MonkeyPatch) -> None:
    """All but the first that go on from a row stand one position too far on."""
    depths = DraftTree.depths.func

    def wrong(self: DraftTree) -> list[int]:
        late = [False] + [parent in self.parents[:place] for place, parent in enumerate(self.parents)]
        return [one + is_late for one, is_late in zip(depths(self), late, strict=True)]

    patch.setattr(DraftTree, "depths", property(wrong))


def takes_any(patch: pytest.MonkeyPatch) -> None:
    """What goes on from the last accepted token is accepted, whatever the target chose."""

    def wrong(tree: TreeDraft, logits: Any, sampler: Any, context: Any, **more: Any) -> Verdict:
        verdict = verify_tree(tree, logits, sampler, context, **more)
        own = verdict.num_accepted
        others = [row for row, at in enumerate(tree.parents, 1) if at == own and row > tree.num_drafts]
        if verdict.off_draft or not others:
            return verdict
        row = others[0]
        token = int(sampler.choose(sampler.shape(logits[row : row + 1], context), len(context) + own + 1))
        return Verdict(own + 1, token, verdict.next_token_prob, (TreeToken(int(tree.ids[row - 1]), row),))

    patch.setattr(layerskip.decoding.loop, "verify_tree", wrong)


def reads_the_next_row(patch: pytest.MonkeyPatch) -> None:
    """The token after a sibling is read from its neighbour's row."""

    def wrong(tree: TreeDraft, logits: Any, *rest: Any, **more: Any) -> Verdict:
        rows = torch.cat([logits[: tree.num_drafts + 1], logits[tree.num_drafts + 1 :].roll(1, 0)])
        return verify_tree(tree, rows, *rest, **more)

    patch.setattr(layerskip.decoding.loop, "verify_tree", wrong)


def draws_anew(patch: pytest.MonkeyPatch) -> None:
    """The token after a sibling is drawn by the numbers of the place of the sibling."""

    def wrong(tree: TreeDraft, logits: Any, sampler: Any, context: Any, **more: Any) -> Verdict:
        verdict = verify_tree(tree, logits, sampler, context, **more)
        if not verdict.off_draft:
            return verdict
        row = verdict.off_draft[-1].row
        place = len(context) + verdict.num_accepted - 1
        token = int(sampler.choose(sampler.shape(logits[row : row + 1], context), place))
        return Verdict(verdict.num_accepted, token, verdict.next_token_prob, verdict.off_draft)

    patch.setattr(layerskip.decoding.loop, "verify_tree", wrong)


ANY_BUG: dict[str, Bug] = {
    one.__name__: one
    for one in (not_kept, sees_the_wrong_draft, sees_its_neighbour, one_late, takes_any, reads_the_next_row)
}


@pytest.mark.parametrize("bug", ANY_BUG)
@zoo.few(FEW, ("llama",))
def test_planted_bugs_change_greedy_text(name: str, bug: str) -> None:
    """So what the tests above compare can tell a broken mask, position, cache or verifier."""
    model, wrong = zoo.layerskip_of(name), 0
    assert model.siblings_refusal is None  # asked before the bug is there
    with pytest.MonkeyPatch.context() as patch:
        ANY_BUG[bug](patch)
        for length in (1, 5, 9, 11):
            prompt = zoo.prompt_of(length)
            out = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config_of(2, 4))
            wrong += out.ids != list(zoo.greedy_reference(name, prompt))
    assert wrong > 0


def test_a_wrong_place_changes_sampled_text() -> None:
    model, prompt, wrong = zoo.layerskip_of("llama"), zoo.prompt_of(5), 0
    drawn = {"max_new_tokens": zoo.LONGEST, "do_sample": True, "top_k": 0}
    with pytest.MonkeyPatch.context() as patch:
        draws_anew(patch)
        for seed in range(4):
            plain = model.generate(prompt, seed=seed, config=DecodeConfig.plain(zoo.NUM_LAYERS), **drawn)
            wrong += model.generate(prompt, seed=seed, config=config_of(4, 4), **drawn).ids != plain.ids
    assert wrong > 0


@pytest.mark.parametrize("bug", ["sees_the_wrong_draft", "sees_its_neighbour", "one_late", "not_kept"])
@pytest.mark.parametrize("on", ["fused", "graph"])
def test_the_check_of_a_model_would_refuse_a_broken_one(on: str, bug: str) -> None:
    model = graph_model("llama") if on == "graph" else LayerSkipModel(zoo.build("llama"), engine="fused")
    with pytest.MonkeyPatch.context() as patch:
        ANY_BUG[bug](patch)
        assert model.siblings_refusal == (
            "a model that can be told its tokens' positions and what each sees, this one then gives other logits"
        )


GREEDY = Sampler(SamplingParams())


def rows_for(*tokens: int, vocab: int = 9) -> torch.Tensor:
    """Logits whose greedy choices are these."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


SIBLINGS = TreeDraft(torch.tensor([1, 2, 3, 4, 5, 6]), (0, 1, 0, 0, 1, 1), 2)
"""Drafts 1 and 2; siblings 3 and 4 of the first, 5 and 6 of the second."""
ONE_BRANCH = TreeDraft(torch.tensor([1, 2, 6, 5, 6]), (0, 1, 2, 1, 1), 3)
"""Drafts 1, 2 and 6; siblings 5 and 6 of the second."""
TREE = TreeDraft(torch.tensor([1, 2, 3, 4, 4, 5]), (0, 1, 0, 3, 1, 4), 2)
"""Drafts 1 and 2; 3 in place of the first, then 4, then 5; 4 in place of the second."""


@pytest.mark.parametrize(
    ("tree", "target", "expected"),
    [
        (SIBLINGS, (1, 2, 8, 0, 0, 0, 0), (2, 8)),  # all right: what follows the siblings is not looked at
        (SIBLINGS, (7, 0, 0, 4, 5, 6, 8), (0, 7)),  # the first wrong, and no sibling of it right
        (SIBLINGS, (3, 0, 0, 4, 5, 6, 8), (1, 4, (3, 3))),  # its first sibling
        (SIBLINGS, (4, 0, 0, 4, 5, 6, 8), (1, 5, (4, 4))),  # its second
        (SIBLINGS, (1, 6, 0, 4, 5, 6, 8), (2, 8, (6, 6))),  # the second wrong, and its second sibling right
        (SIBLINGS, (1, 3, 0, 4, 5, 6, 8), (1, 3)),  # a sibling of the first is none of the second
        (ONE_BRANCH, (3, 0, 0, 0, 5, 6), (0, 3)),  # the first wrong, which has no siblings
        (ONE_BRANCH, (1, 6, 0, 0, 5, 8), (2, 8, (6, 5))),  # the second wrong, and its second sibling right
        (ONE_BRANCH, (1, 2, 6, 8, 0, 0), (3, 8)),  # all right
        (TREE, (3, 0, 0, 8, 0, 0, 0), (1, 8, (3, 3))),  # another branch, and what follows is not in it
        (TREE, (3, 0, 0, 4, 8, 0, 0), (2, 8, (3, 3), (4, 4))),  # two of another branch
        (TREE, (3, 0, 0, 4, 5, 0, 8), (3, 8, (3, 3), (4, 4), (5, 6))),  # longer than the draft
        (TREE, (1, 4, 0, 0, 5, 8, 0), (2, 8, (4, 5))),  # a 4 behind the draft's first is not the other one
    ],
)
def test_verdicts_by_hand(tree: TreeDraft, target: Sequence[int], expected: tuple[Any, ...]) -> None:
    num_accepted, next_token, *others = expected
    for with_prob in (False, True):
        verdict = verify_tree(tree, rows_for(*target), GREEDY, [0], with_prob=with_prob)
        assert (verdict.num_accepted, verdict.next_token) == (num_accepted, next_token)
        assert verdict.off_draft == tuple(TreeToken(*one) for one in others)
        assert (verdict.next_token_prob is None) != with_prob
        assert verdict.num_drafts_accepted == num_accepted - len(others)


@zoo.each(("llama", "llama fused"))
def test_only_unsure_drafts_have_them(name: str) -> None:
    """As many as the draft's own top probabilities say, and the target's tokens as ever."""
    model, hits, counts = zoo.layerskip_of(name), 0, []
    for below in (0.05, 0.2, 0.5, 1.0):
        config, count = config_of(3, 4, sibling_threshold=below), 0
        for length in (1, 5, 9, 11):
            prompt = zoo.prompt_of(length)
            out = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config)
            assert out.ids == list(zoo.greedy_reference(name, prompt))
            check_counters(out, config)
            hits += out.stats.num_sibling_hits
            count += out.stats.num_siblings
            assert out.stats.num_siblings <= 3 * out.stats.num_drafted
            assert below < 1.0 or out.stats.num_siblings == 3 * out.stats.num_drafted
        counts.append(count)
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert hits > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.booleans(), st.integers(1, 7))
def test_the_next_best_are_what_would_be_chosen_one_after_the_other(
    seed: int, count: int, drawn: bool, num_possible: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 7, generator=generator)
    logits[:, torch.randperm(7, generator=generator)[num_possible:]] = float("-inf")
    noise = torch.empty(3, 7).exponential_(generator=generator) if drawn else None
    chosen = choose(logits, noise)
    found = next_best(logits, noise, chosen, count)
    rest = logits.clone()
    for i in range(count):
        rest.scatter_(1, (chosen if i == 0 else found[:, i - 1]).unsqueeze(1), float("-inf"))
        if i + 1 < num_possible:
            assert torch.equal(found[:, i], choose(rest, noise))
            assert rank_of(logits, noise, found[:, i]).tolist() == [i + 1] * 3
        else:
            assert torch.equal(found[:, i], chosen)  # never right where the chosen one is wrong
    assert rank_of(logits, noise, chosen).tolist() == [0] * 3
    impossible = logits.isinf().nonzero()
    for row, token in impossible.tolist():
        assert int(rank_of(logits, noise, torch.full((3,), token))[row]) == 7


@pytest.mark.parametrize("window", [None, 1, 2, 3, 50])
@pytest.mark.parametrize("start", [0, 4])
def test_what_rows_see(start: int, window: int | None) -> None:
    """Against the path of each row, token by token: a chain of three, two beside its first, and two behind one beside
    its last."""
    tree = DraftTree((0, 1, 2, 0, 0, 2, 6, 6))
    paths = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 4], [0, 5], [0, 1, 2, 6], [0, 1, 2, 6, 7], [0, 1, 2, 6, 8]]
    positions = tree.positions(start, torch.device("cpu")).tolist()
    assert positions == [start + len(path) - 1 for path in paths]
    seen = tree.visible(start, window, torch.device("cpu"))
    first = 0 if window is None else max(start - window + 1, 0)
    assert seen.shape == (tree.num_rows, start + tree.num_rows - first) == (9, start + 9 - first)
    for row, path in enumerate(paths):
        places = [*range(start), *(start + one for one in path)]  # in the cache, by position
        visible = [place for at, place in enumerate(places) if window is None or at > positions[row] - window]
        assert (first + seen[row].nonzero().flatten()).tolist() == visible


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"siblings": 5}, "siblings: input should be less than or equal to 4, got '5'"),
        ({"siblings": -1}, "siblings: input should be greater than or equal to 0, got '-1'"),
        ({"gamma": 0}, "siblings: must be 0 where gamma is 0, got 2"),
        ({"sibling_threshold": 0.0}, "sibling_threshold: input should be greater than 0, got '0.0'"),
        ({"siblings": 0, "sibling_threshold": 0.5}, "sibling_threshold: must be 1 where siblings is 0, got 0.5"),
        (
            {
                "drafter": "prompt_lookup",
                "skip_mask": SkipMask.none(4),
                "lookup": PromptLookup(min_match=1, max_match=3),
            },
            "siblings: must be left out where the drafter is prompt_lookup, which drafts alone",
        ),
    ],
)
def test_configs_that_have_none(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_of(**fields)


def test_a_config_of_before_has_none() -> None:
    old = '{"schema_version": 1, "skip_mask": "4:1", "gamma": 2}'
    assert DecodeConfig.from_json(old).siblings == 0
    assert not DecodeConfig.from_json(old).has_branches
    assert DecodeConfig.from_json(config_of(3).to_json()) == config_of(3)


@pytest.mark.parametrize("name", zoo.WITHOUT_TREES)
def test_models_that_take_positions_from_their_keys_are_refused(name: str) -> None:
    model = zoo.layerskip_of(name)
    said = "siblings and trees: need a model that can be told its tokens' positions and what each sees"
    with pytest.raises(ValueError, match=said):
        model.config = config_of()
    with pytest.raises(ValueError, match=said):
        model.generate(zoo.prompt_of(3), config=config_of(), max_new_tokens=3)
    assert model.generate(zoo.prompt_of(3), config=config_of(0), max_new_tokens=3).ids


def test_auto_leaves_graphs_where_they_cannot_verify_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LayerSkipModel(zoo.model_of("llama"))
    model._engine = graph_model("llama").engine
    model.config = config_of()
    assert model.engine_name == "cuda_graph"
    model._engine = graph_model("llama").engine
    with monkeypatch.context() as patch:
        not_kept(patch)
        assert model.siblings_refusal is not None
    model.config = config_of()
    assert model.engine_name in ("eager", "fused")
    assert model.generate(zoo.prompt_of(5), max_new_tokens=8).ids == list(
        zoo.greedy_reference("llama", zoo.prompt_of(5))[:8]
    )


def test_groups_and_regimes_are_checked_too() -> None:
    plain = config_of(0)
    grouped = DecodeConfig(**dict(plain) | {"groups": {"code": {"skip_mask": "4:1", "gamma": 2, "siblings": 1}}})
    assert grouped.has_branches
    with pytest.raises(ValueError, match="siblings and trees: need a model"):
        zoo.layerskip_of("bloom").config = grouped
