"""DraftTree: drafted tokens and siblings beside some of them, in one verification: where they stand, what they see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from layerskip.engines.base import Engine
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.kv_cache import first_visible
from layerskip.huggingface.rounding import logit_difference


@dataclass(frozen=True)
class DraftTree:
    """Rows of a verification: the last emitted token, the drafts, then the siblings of the first draft that has any, of
    the second, and so on. A sibling is a leaf: it stands at the position of the draft in whose place it is, and sees
    what comes before that, and itself.
    """

    num_drafts: int
    siblings: int
    """Of each draft that has any."""
    branches: tuple[int, ...]
    """Which of the drafts have, counted from 0, ascending."""

    @property
    def num_rows(self) -> int:
        return 1 + self.num_drafts + len(self.branches) * self.siblings

    def positions(self, start: int, device: torch.device) -> torch.Tensor:
        """(R,) int64, the last emitted token standing at `start`."""
        own = [start + 1 + place for place in self.branches for _ in range(self.siblings)]
        return torch.tensor([*range(start, start + self.num_drafts + 1), *own], device=device)

    def visible(self, start: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(R, keys) boolean: which keys each row sees. The keys are those of the cache from the first position that any
        row sees, and after them those of the rows."""
        first = first_visible(start, window)
        own = self.positions(start, device).unsqueeze(1)
        places = torch.arange(first, start + self.num_rows, device=device)
        before = (places < own) & (places <= start + self.num_drafts)
        if window is not None:
            before &= places > own - window
        before[:, start - first :].fill_diagonal_(1)
        return before


@runtime_checkable
class TreeEngine(Protocol):
    """An engine that verifies siblings."""

    def verify_tree(self, input_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """Logits (R, V) of the whole model for the tree's rows; the cache advances by R, in the order of the rows."""
        ...

    def keep_sibling(self, source: int, place: int) -> None:
        """What the row at position `source` of the cache left there stands at `place` from now on."""
        ...


_CONTEXT, _TREE = 5, DraftTree(num_drafts=3, siblings=2, branches=(0, 2))


def tree_refusal(engine: Engine, adapter: ModelAdapter) -> str | None:
    """Why siblings cannot be verified on this engine or model; None where they can.

    Cost: a dozen forwards over a few tokens, whose logits are compared. Positions that a model takes from the order of
    its keys (ALiBi) make them differ.
    """
    if not isinstance(engine, TreeEngine):
        return f"the engine eager or fused, got {engine.name}"
    try:
        same = _matches_chains(engine, adapter)
    except Exception as error:  # noqa: BLE001 (an architecture may refuse a mask of ours in any way it likes)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"a model that can be told its tokens' positions and what each sees, got {reason}"
    rule = "a model that can be told its tokens' positions and what each sees"
    return None if same else f"{rule}, this one then gives other logits"


@torch.inference_mode()
def _matches_chains(engine: Any, adapter: ModelAdapter) -> bool:
    """Whether the rows of a tree say what ordinary forwards over their paths say, the step after a sibling included."""
    tree, generator = _TREE, torch.Generator().manual_seed(0)
    vocabulary = int(adapter.text_config.vocab_size)
    ids = torch.randint(vocabulary, (_CONTEXT + tree.num_rows,), generator=generator).to(adapter.device)
    start, end = _CONTEXT, _CONTEXT + 1 + tree.num_drafts
    context, chain, siblings = ids[:start], ids[start:end], ids[end:]
    last = len(siblings) - 1
    """A sibling of the last draft, which is accepted."""
    places = [place for place in tree.branches for _ in range(tree.siblings)]
    paths = [torch.cat([chain[: 1 + place], siblings[i : i + 1]]) for i, place in enumerate(places)]
    expected = []
    for path in (chain, *paths, torch.cat([paths[last], context[:1]])):
        with engine.session(len(context) + len(path)):
            engine.forward(context)
            expected.append(engine.forward(path, num_logits=len(path) if path is chain else 1).clone())
    with engine.session(len(ids)):
        engine.forward(context)
        found = engine.verify_tree(torch.cat([chain, siblings]), tree).clone()
        engine.keep_sibling(end + last, end - 1)
        engine.cache.rollback_to(end)
        after = engine.forward(context[:1])
        difference, tolerance = logit_difference(torch.cat([found, after]), torch.cat(expected))
    return difference <= tolerance
