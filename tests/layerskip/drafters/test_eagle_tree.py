"""Trees of drafts: the likeliest of all that trained weights propose, and nothing else of the output changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from layerskip import DecodeConfig, SkipMask
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters import Draft, make_drafter
from layerskip.drafters.draft_weights import loaded_weights
from layerskip.drafters.eagle.drafter import EagleSession
from layerskip.drafters.eagle.lean import LeanText
from layerskip.drafters.eagle.recorded import StaticText
from layerskip.drafters.eagle.tree import Roots, TreeNodes, grow
from layerskip.rounds.sampling import Sampler, SamplingParams, seeded_sampler
from tests.layerskip import zoo
from tests.layerskip.drafters.test_drafters import PROMPT, by_trees
from tests.layerskip.rounds.test_broken_rounds import check_survives

NONE = SkipMask.none(zoo.NUM_LAYERS)
GREEDY = SamplingParams()
WARM = SamplingParams(do_sample=True, temperature=0.8, top_k=12, repetition_penalty=1.2)


def tree(weights: DraftWeights, tree_tokens: int = 8, gamma: int = 4, **fields: Any) -> DecodeConfig:
    own = weights.branching(tree_tokens)
    return DecodeConfig(drafter="eagle", skip_mask=NONE, gamma=gamma, draft_weights=own, **fields)


class _Round:
    """A round after PROMPT and some of what follows it, with everything that its weights may propose there."""

    def __init__(self, run: str, params: SamplingParams) -> None:
        self.model, self.params = zoo.layerskip_of(run), params
        self.weights = zoo.eagle_of(zoo.architecture(run))
        self.model.check_config(tree(self.weights))
        self.context = [*PROMPT, *zoo.greedy_reference(run, PROMPT)[:3]]

    def draft(self, config: DecodeConfig, limit: int = 9) -> Draft:
        engine: Any = self.model.engine
        head: Any = loaded_weights(engine, self.weights)
        with engine.session(64), torch.inference_mode():
            drafter = make_drafter(config, engine, self._sampler())
            assert drafter is not None
            engine.keep_states(head.aux_layers)
            engine.forward(torch.tensor(self.context[:-1]))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TreeNodes, "draft", self._noted(TreeNodes.draft))
                found = drafter.begin().propose(self.context, limit, None)
            assert isinstance(found, Draft)
            return found

    def _noted(self, draft: Any) -> Any:
        def noting(nodes: TreeNodes, most: int) -> Draft:
            self.nodes = nodes
            return draft(nodes, most)  # type: ignore[no-any-return]

        return noting

    def likelihoods(self, path: Sequence[int]) -> torch.Tensor:
        """(V,): of what goes on from a path, each token alone, by a chain of drafts along it."""
        engine: Any = self.model.engine
        head: Any = loaded_weights(engine, self.weights)
        with engine.session(64), torch.inference_mode():
            engine.keep_states(head.aux_layers)
            engine.forward(torch.tensor(self.context[:-1]))
            text, count = head.new_text(64), len(self.context) - 1
            embedded = engine.embed(torch.tensor(self.context[1:]))
            state = text.run(head.enter(embedded, head.join(engine.states[:count])), 0)[-1:]
            for place, token in enumerate(path, count):
                state = text.run(head.enter(engine.embed(torch.tensor([token])), state), place)
            logits = head.logits(engine, state, None)
            so_far = [*self.context, *path]
            values, ids = self._sampler().likeliest(logits, [len(so_far)], lambda _: so_far, zoo.VOCAB)
            return torch.empty(zoo.VOCAB).scatter(0, ids[0], values[0])

    def _sampler(self) -> Sampler:
        sampler = seeded_sampler(self.params, 5, torch.device("cpu"))
        sampler.begin(len(PROMPT))
        return sampler


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("run", ["llama", "llama fused", "llama graph", "gemma3"])
def test_what_is_verified_are_the_likeliest_paths_of_all(run: str, params: SamplingParams) -> None:
    """Two tokens deep, of every token behind every token, each computed alone as a chain."""
    at = _Round(run, params)
    first = at.likelihoods([])
    scores = {(one,): float(first[one]) for one in range(zoo.VOCAB)}
    for one in range(zoo.VOCAB):
        if np.isfinite(scores[one,]):
            behind = at.likelihoods([one])
            scores |= {(one, two): scores[one,] + float(behind[two]) for two in range(zoo.VOCAB)}
    for size in (1, 2, 7, 16):
        draft = at.draft(tree(at.weights, size, gamma=2))
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(draft.tree.parents, draft.tree.ids.tolist(), strict=True):
            paths.append((*paths[parent], token))
        assert len(set(paths)) == size + 1
        best = sorted(scores.values(), reverse=True)[:size]
        assert sorted((scores[one] for one in paths[1:]), reverse=True) == pytest.approx(best, abs=1e-4)
        assert paths[draft.tree.num_drafts] == tuple(draft.ids.tolist())[: draft.tree.num_drafts]
        nodes = at.nodes
        for token, parent, score in zip(nodes.tokens, nodes.parents, nodes.scores, strict=True):
            path = (int(token),) if parent < 0 else (int(nodes.tokens[parent]), int(token))
            assert score == pytest.approx(scores[path], abs=1e-4)


def test_no_deeper_than_there_is_room_and_than_it_can_matter() -> None:
    at = _Round("llama", GREEDY)
    for limit in (1, 2, 3):
        assert len(at.draft(tree(at.weights, 30, gamma=4), limit).ids) == limit
    alone = at.draft(tree(at.weights, 1, gamma=4))
    # The likeliest token is gone on from, and what follows it is likely enough never.
    assert (len(alone.ids), alone.tree.ids.tolist(), alone.tree.parents) == (2, alone.ids.tolist()[:1], (0,))


def test_what_is_less_likely_than_the_threshold_is_not_gone_on_from() -> None:
    at = _Round("llama fused", GREEDY)
    levels = []
    for threshold in (0.0, 0.01, 0.05, 0.2, 0.95):
        draft = at.draft(tree(at.weights, 30, draft_threshold=threshold))
        assert len(draft.tree.parents) == 30
        behind = at.nodes.scores[at.nodes.parents[at.nodes.parents >= 0]]
        assert (np.exp(behind) >= threshold).all()
        levels.append(len(draft.ids))
    assert levels == sorted(levels, reverse=True)
    assert levels[0] > levels[-1] == 1


@pytest.mark.parametrize("bug", ["neighbours", "positions", "parents"])
def test_planted_bugs_are_seen_in_what_is_verified(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the test above: rows that see other branches, stand elsewhere or go on from another state."""
    run_rows = LeanText.run_rows

    def wrong(self: LeanText, x: torch.Tensor, positions: Any, start: int, mask: Any) -> torch.Tensor:
        if mask is not None and not isinstance(positions, slice):
            if bug == "neighbours":
                mask = torch.ones_like(mask)
            elif bug == "positions":
                positions = positions + 1
            else:
                x = x.roll(1, 0)
        return run_rows(self, x, positions, start, mask)

    monkeypatch.setattr(LeanText, "run_rows", wrong)
    with pytest.raises(AssertionError):
        test_what_is_verified_are_the_likeliest_paths_of_all("llama", GREEDY)


@zoo.each(("llama fused", "llama graph"))
def test_it_accepts_more_than_a_chain_and_draws_the_same(name: str) -> None:
    model, totals = zoo.layerskip_of(name), []
    weights = zoo.eagle_of("llama")
    for config in (tree(weights, 4), tree(weights, 20)):
        hits = accepted = rounds = 0
        for seed in range(6):
            drawn = {"max_new_tokens": 24, "do_sample": True, "seed": seed, "top_k": 0}
            out = model.generate(PROMPT, config=config, **drawn)
            assert out.ids == model.generate(PROMPT, config=DecodeConfig.plain(zoo.NUM_LAYERS), **drawn).ids
            hits += out.stats.num_sibling_hits
            accepted, rounds = accepted + out.stats.num_accepted, rounds + out.stats.num_rounds
        assert hits > 0
        totals.append(accepted / rounds)
    assert totals[0] < totals[1]


@pytest.mark.parametrize("name", ["llama", "llama fused", "llama graph"])
def test_an_exception_anywhere_leaves_the_model_whole(name: str, monkeypatch: Any) -> None:
    model, config = zoo.layerskip_of(name), by_trees("llama")["eagle tree"]
    step = (StaticText, "branch") if name == "llama graph" else (LeanText, "run_rows")
    places = ((EagleSession, "propose"), step, (TreeNodes, "draft"), (Sampler, "likeliest"))
    check_survives(model, PROMPT, config, places, monkeypatch)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tree_tokens": 0}, r"draft_weights\.tree_tokens: input should be greater than or equal to 1, got '0'"),
        ({"tree_tokens": 65}, r"draft_weights\.tree_tokens: input should be less than or equal to 64, got '65'"),
        (
            {"tree_tokens": 4, "drafter": "draft_model"},
            "tree_tokens: must be left out where the drafter is draft_model",
        ),
    ],
)
def test_bad_weights_name_field_and_rule(given: dict[str, Any], message: str) -> None:
    weights = {"path": "weights", "fingerprint": "0", **given}
    with pytest.raises(ValueError, match=message):
        DecodeConfig(drafter=given.get("drafter", "eagle"), skip_mask=NONE, gamma=2, draft_weights=weights)


def test_a_tree_has_no_siblings() -> None:
    weights = zoo.eagle_of("llama")
    with pytest.raises(ValueError, match=r"siblings: must be 0 where draft_weights\.tree_tokens are given, got 2"):
        tree(weights, siblings=2)
    config = tree(weights, 8)
    assert DecodeConfig.from_json(config.to_json()) == config
    assert config.max_verified == 8
    assert DecodeConfig.from_json(tree(weights, 1).to_json()).draft_weights == weights.branching(1)


@contextmanager
def _rooted(run: str) -> Iterator[tuple[Roots, Any]]:
    """Inside, several places of a text, and `grow` from such."""
    at = _Round(run, GREEDY)
    engine: Any = at.model.engine
    head: Any = loaded_weights(engine, at.weights)
    ids = [*at.context, 0]
    with engine.session(64), torch.inference_mode():
        engine.keep_states(head.aux_layers)
        engine.forward(torch.tensor(ids[:-1]))
        text, count = head.new_text(1024), len(ids) - 1
        hidden = text.run(head.enter(engine.embed(torch.tensor(ids[1:])), head.join(engine.states[:count])), 0)
        roots = Roots(hidden[-4:-1], np.array([count - 3, count - 2, count - 1]), ids)
        yield roots, partial(grow, text, engine, Sampler(GREEDY), slot=count)


def _one(roots: Roots, i: int) -> Roots:
    return Roots(roots.states[i : i + 1], roots.positions[i : i + 1], roots.ids)


@pytest.mark.parametrize("run", ["llama", "gemma3"])
def test_grown_once_it_tells_the_likeliest_of_every_threshold(run: str) -> None:
    """Where unlikely tokens are not gone on from, others are among the likeliest that were not without it."""
    num_other = 0
    with _rooted(run) as (roots, grown):
        both = grown(roots, depth=5, most=12, least=None)
        for i, least in itertools.product(range(3), (0.0, 0.02, 0.1, 0.3)):
            alone = grown(_one(roots, i), depth=5, most=12, least=least)
            alone = alone.select(alone.order()[:12])
            told = both.select((both.roots == i) & (both.behind() >= (math.log(least) if least else -math.inf)))
            told = told.select(told.order()[:12])
            assert told.tokens.tolist() == alone.tokens.tolist()
            assert told.depths.tolist() == alone.depths.tolist()
            np.testing.assert_allclose(told.scores, alone.scores, atol=1e-4)
            plain = grown(_one(roots, i), depth=5, most=12, least=0.0)
            num_other += len(set(told.scores.round(3)) - set(plain.scores.round(3)))
    assert num_other


def test_grow_takes_each_level_from_the_one_before() -> None:
    """Depths, parents and scores of all that is kept, of several roots side by side."""
    with _rooted("llama") as (roots, grown):
        both = grown(roots, depth=3, most=6)
        for i in range(3):
            alone = grown(_one(roots, i), depth=3, most=6)
            mine = both.select(both.roots == i)
            assert mine.tokens.tolist() == alone.tokens.tolist()
            assert mine.depths.tolist() == alone.depths.tolist()
            np.testing.assert_allclose(mine.scores, alone.scores, atol=1e-4)
    behind = both.parents >= 0
    assert (both.depths[behind] == both.depths[both.parents[behind]] + 1).all()
    assert (both.roots[behind] == both.roots[both.parents[behind]]).all()
    assert (both.scores[behind] <= both.scores[both.parents[behind]] + 1e-9).all()
