"""The trees that trained weights draft at all positions of fixed texts, and where the texts' own tokens are in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from layerskip.analysis.teacher_forcing.rows import ForcedText
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.eagle.state_head import StateText
from layerskip.drafters.eagle.tree import Floats, Roots, TreeNodes, grow
from layerskip.engines.states import StatesEngine
from layerskip.rounds.sampling import Sampler

_BATCH = 8
"""Places whose trees grow side by side; their rows see each other's in one mask, so memory grows with the square."""


@dataclass(frozen=True)
class TreeReadings:
    """Trees of rounds that start after each of up to T continuation tokens of P texts, as deep as D.

    Of each the tokens that may be among its likeliest `most`, however deep it may be and whatever the draft threshold,
    best first, M at most. What starts after a text's last token is not read: a round drafted there is of no use.
    """

    most: int
    scores: NDArray[np.float32]
    """(P, T, M): log-likelihoods of their paths, -inf behind the last."""
    depths: NDArray[np.uint8]
    """(P, T, M): from 1 on, 255 behind the last."""
    behind: NDArray[np.float32]
    """(P, T, M): the score of the token that each goes on from, 0 where that is the text's."""
    own: NDArray[np.int16]
    """(P, T, D): places of the text's own next tokens among them, -1 where they are not there."""

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        return self.scores.nbytes + self.depths.nbytes + self.behind.nbytes + self.own.nbytes

    @property
    def depth(self) -> int:
        """Of the deepest tree that it tells of."""
        return int(self.own.shape[-1])

    def select(self, texts: Sequence[int]) -> TreeReadings:
        """The readings of the texts at these places."""
        chosen = list(texts)
        return TreeReadings(self.most, self.scores[chosen], self.depths[chosen], self.behind[chosen], self.own[chosen])

    @classmethod
    def join(cls, parts: Sequence[TreeReadings], width: int) -> TreeReadings:
        """Of several sets of texts one after the other, `width` tokens wide."""
        size = max(one.scores.shape[-1] for one in parts)

        def padded(array: NDArray[np.generic], filler: float, last: int) -> NDArray[np.generic]:
            missing = (0, 0), (0, width - array.shape[1]), (0, last - array.shape[2])
            return np.pad(array, missing, constant_values=filler)

        return cls(
            parts[0].most,
            np.concatenate([padded(one.scores, -np.inf, size) for one in parts]),
            np.concatenate([padded(one.depths, 255, size) for one in parts]),
            np.concatenate([padded(one.behind, 0.0, size) for one in parts]),
            np.concatenate([padded(one.own, -1, one.depth) for one in parts]),
        )


def read_trees(
    engine: StatesEngine,
    text: StateText,
    hidden: torch.Tensor,
    one: ForcedText,
    sampler: Sampler,
    weights: DraftWeights,
    depth: int,
) -> TreeReadings:
    """Of one text, as far as the most of `weights` and this depth.

    text: with keys and values of every position but the last, from the target's states; hidden: (T - 1, hidden), what
    the layer gave there. Cost: see `grow`, of `_BATCH` places at a time.
    """
    most, start = weights.tree_tokens, len(one.prompt_ids)
    assert most is not None
    count, known = len(one.continuation_ids) - 1, len(one.ids) - 1
    # Behind what is known there must be no gap: what nobody wrote may be no number, and then the mask does not help.
    text = text.copied(known, _BATCH * most * depth)
    trees: list[tuple[TreeNodes, list[int], Floats]] = []
    for first in range(0, count, _BATCH):
        positions = start + np.arange(first, min(first + _BATCH, count))
        roots = Roots(hidden[positions[0] - 1 : positions[-1]], positions, one.ids)
        nodes = grow(text, engine, sampler, roots, depth=depth, most=most, draft_vocab=weights.draft_vocab, slot=known)
        for i, position in enumerate(positions):
            trees.append(_of_root(nodes, i, one.ids[position + 1 :][:depth]))
    size = max([1, *(len(nodes) for nodes, *_ in trees)])
    scores = np.full((1, count + 1, size), -np.inf, dtype=np.float32)
    depths, behind = np.full(scores.shape, 255, dtype=np.uint8), np.zeros_like(scores)
    own = np.full((1, count + 1, depth), -1, dtype=np.int16)
    for row, (nodes, path, parents) in enumerate(trees):
        scores[0, row, : len(nodes)], depths[0, row, : len(nodes)] = nodes.scores, nodes.depths
        behind[0, row, : len(nodes)], own[0, row, : len(path)] = parents, path
    return TreeReadings(most, scores, depths, behind, own)


def _of_root(nodes: TreeNodes, root: int, ids: Sequence[int]) -> tuple[TreeNodes, list[int], Floats]:
    """A root's nodes, best first; the places of these tokens among them; and the scores that they go on from."""
    order = nodes.order()
    order = order[nodes.roots[order] == root]
    place_of = {int(at): place for place, at in enumerate(order)}
    children = {(int(nodes.parents[at]), int(nodes.tokens[at])): int(at) for at in order}
    path, at = list[int](), -1
    for token in ids:
        if (at := children.get((at, token), -1)) < 0:
            break
        path.append(place_of[at])
    return nodes.select(order), path, nodes.behind()[order]
