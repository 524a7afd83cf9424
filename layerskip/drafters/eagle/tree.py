"""EagleTreeDrafter: of all that trained weights propose, whatever follows whatever, the likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerskip.drafters.base import Draft
from layerskip.drafters.eagle.drafter import EagleDrafter
from layerskip.drafters.eagle.state_head import StateText
from layerskip.engines.states import StatesEngine
from layerskip.rounds.sampling import Sampler
from layerskip.rounds.verifier import TreeDraft

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Roots:
    """B places of one text that trees start from."""

    states: torch.Tensor
    """(B, hidden): what the layer gave for the last token of each."""
    positions: Ints
    """(B,): of the first drafted token's row; the rows of the text before it are seen."""
    ids: Sequence[int]
    """The text, as far as the last of them; the first drafted token of each is the one after `positions`."""


@dataclass(frozen=True)
class TreeNodes:
    """Drafted tokens, level by level; arrays (N,)."""

    roots: Ints
    parents: Ints
    """Places among these, -1 behind a root."""
    tokens: Ints
    depths: Ints
    """From 1."""
    scores: Floats
    """Log-likelihood of the whole path."""

    @classmethod
    def none(cls) -> TreeNodes:
        """Without a node."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing, nothing, np.zeros(0))

    def __len__(self) -> int:
        return len(self.scores)

    def select(self, places: Any) -> TreeNodes:
        """Those at these places."""
        return TreeNodes(*(getattr(self, one.name)[places] for one in fields(self)))

    def join(self, other: TreeNodes) -> TreeNodes:
        """These, then the others."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return TreeNodes(*(np.concatenate(pair) for pair in pairs))

    def order(self) -> Ints:
        """Places by root and then by likelihood, the best first; of equals, what comes before its children."""
        return np.lexsort((np.arange(len(self)), -self.scores, self.roots))

    def ranks(self) -> Ints:
        """(N,): how many of its root's are likelier."""
        order = self.order()
        first = np.searchsorted(self.roots[order], self.roots[order])
        ranks = np.empty(len(self), dtype=np.int64)
        ranks[order] = np.arange(len(self)) - first
        return ranks

    def behind(self) -> Floats:
        """(N,): the score of the token that each goes on from, 0 where that is a root."""
        return np.where(self.parents < 0, 0.0, self.scores[self.parents])

    def ranks_at_any_least(self, first: int) -> Ints:
        """Of those from `first` on: how many of its root's would be likelier if nothing less likely than its own parent
        were gone on from. So it may be among the likeliest of a tree that stops there, and of no other if not of that.
        """
        behind = self.behind()
        likelier = self.scores > self.scores[first:, None]
        likelier &= (behind >= behind[first:, None]) & (self.roots == self.roots[first:, None])
        ranks: Ints = likelier.sum(axis=1)
        return ranks

    def draft(self, most: int) -> Draft:
        """Of one root: the likeliest of the deepest with what leads there as the draft, and to be verified of all the
        likeliest `most`."""
        ranks = self.ranks()
        verified = ranks < most
        at = int(np.argmax(np.where(self.depths == self.depths.max(), self.scores, -np.inf)))
        path = list[int]()
        while at >= 0:
            path.insert(0, at)
            at = int(self.parents[at])
        own = [at for at in path if verified[at]]
        rows = own + [at for at in np.argsort(ranks).tolist() if verified[at] and at not in own]
        row_of = {-1: 0} | {at: row for row, at in enumerate(rows, 1)}
        parents = tuple(row_of[int(self.parents[at])] for at in rows)
        tree = TreeDraft(torch.from_numpy(self.tokens[rows]), parents, len(own))
        return Draft(torch.from_numpy(self.tokens[path]), tree=tree)


def grow(
    text: StateText,
    engine: StatesEngine,
    sampler: Sampler,
    roots: Roots,
    *,
    depth: int,
    most: int,
    least: float | None = None,
    draft_vocab: int | None = None,
    slot: int | None = None,
) -> TreeNodes:
    """All tokens up to `depth` levels deep that may be among a root's likeliest `most`, and the likeliest of each level
    that was computed. Tokens less likely than `least` are not gone on from; None for what any `least` may give.

    So the likeliest of a root are exact, and nothing is gone on from that cannot have one of them behind it: a level
    costs what is left to be decided. Keys and values are written from `slot` on, or from the last root's position.
    Cost: a level takes the layer and the output embedding over the tokens gone on from, and a device sync. The first
    takes the output embedding over the roots alone.
    Ref: EAGLE-2 (2406.16858), which goes on from a fixed number of tokens at each level.
    """
    head, start = text.head, int(roots.positions.max()) if slot is None else slot
    vocabulary, log_least = head.vocab_size, math.log(least) if least else -math.inf
    nodes, states, slot = TreeNodes.none(), roots.states, start
    # What the rows of a level go on from: roots, and then nodes.
    row_roots, row_scores = np.arange(len(states)), np.zeros(len(states))
    row_nodes, seen = np.full(len(states), -1), np.zeros((len(states), 0), dtype=bool)
    paths: list[list[int]] = [[] for _ in row_roots]
    for level in range(1, depth + 1):
        places = (roots.positions[row_roots] + level).tolist()
        logits = text.logits(engine, states, draft_vocab)
        # A copy of the text for each row, which only a penalty needs.
        context = partial(_context, roots, row_roots, paths)
        best = sampler.likeliest(logits, places, context, min(most, vocabulary))
        found = torch.stack([one.double() for one in best]).cpu().numpy()  # ids are exact in float64
        width = found.shape[-1]
        new = TreeNodes(
            np.repeat(row_roots, width),
            np.repeat(row_nodes, width),
            found[1].ravel().astype(np.int64),
            np.full(found[1].size, level),
            (row_scores[:, None] + found[0]).ravel(),
        )
        possible = np.isfinite(new.scores)
        new, from_row = new.select(possible), np.repeat(np.arange(len(states)), width)[possible]
        both = nodes.join(new)
        ranks = both.ranks()[len(nodes) :]
        going = (ranks < most) & (new.scores >= log_least)
        wanted = ranks if least is not None else both.ranks_at_any_least(len(nodes))
        kept = (wanted < most) | (new.ranks() == 0)
        row_nodes = len(nodes) + np.flatnonzero(going[kept])
        nodes = nodes.join(new.select(kept))
        if level == depth or not len(row_nodes):
            break
        from_row, row_roots, row_scores = from_row[going], new.roots[going], new.scores[going]
        paths = [[*paths[row], int(token)] for row, token in zip(from_row, new.tokens[going], strict=True)]
        seen = np.concatenate([seen[from_row], np.eye(len(from_row), dtype=bool)], axis=1)
        before = np.arange(start) < roots.positions[row_roots][:, None]
        ids, positions = (_on(one, states) for one in (new.tokens[going], roots.positions[row_roots] + level - 1))
        mask = _on(np.concatenate([before, seen], axis=1), states)
        states = text.branch(engine, ids, states[_on(from_row, states)], positions, slot, mask)
        slot += len(from_row)
    return nodes


class EagleTreeDrafter(EagleDrafter):
    """A tree up to gamma tokens deep; see `grow` and `TreeNodes.draft`.

    Cost: what `EagleDrafter` goes over of what the target has emitted, and that of `grow`.
    """

    def draft(self, text: StateText, state: torch.Tensor, context: Sequence[int], count: int) -> Draft:
        """See `EagleDrafter`: up to `count` tokens deep."""
        own = self.settings
        roots = Roots(state, np.array([len(context) - 1]), context)
        most, least, vocab = own.tree_tokens, own.draft_threshold, own.draft_vocab
        nodes = grow(text, self._engine, self._sampler, roots, depth=count, most=most, least=least, draft_vocab=vocab)
        return nodes.draft(most)


def _on(values: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)


def _context(roots: Roots, row_roots: Ints, paths: Sequence[Sequence[int]], row: int) -> list[int]:
    """The text before what a row's logits say, its drafted tokens included."""
    return [*roots.ids[: roots.positions[row_roots[row]] + 1], *paths[row]]
