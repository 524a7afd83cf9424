"""The models of the proving ground. Written down before any result was looked at; a model is never dropped or retrained
because of what a search does on it.

They differ in depth, in how they learnt to do without layers, in their text and in their seed, so that a rule of the
search that suits one kind of model alone shows. Widths and steps are what one CPU core trains in about four minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from search.study.space import SearchSpace
from studies.demo.recipe import Recipe
from studies.demo.training import Settings, Size
from studies.proving.texts import TEXTS, VOCABULARY

GAMMA_MAX = 16
MAX_BITS = 8
"""Of a mask that is enumerated: 256 masks."""
MAX_READINGS = 256
"""Of each text: one of each of 256 masks, or four, of deeper and deeper drafts, of each of 64."""
_TOKENS_BY_LAYERS = {4: 1_600_000, 6: 1_400_000, 8: 1_200_000, 12: 900_000, 24: 500_000}
"""Of training: about four minutes each."""


@dataclass(frozen=True)
class ModelRecipe:
    """One model: its shape, how it learns to run without layers, and on what text."""

    name: str
    layers: int
    learns: str
    """Key of `LEARNS`."""
    text: str
    """Key of `studies.proving.texts.TEXTS`."""
    seed: int = 0
    bits: tuple[int, ...] | None = None
    """Layers that masks may skip, whole; None: attention and MLP of every layer apart."""

    def __post_init__(self) -> None:
        if self.text not in TEXTS:
            raise ValueError(f"text: must be one of {sorted(TEXTS)}, got {self.text!r}")
        if self.num_bits > MAX_BITS:
            raise ValueError(f"bits: at most {MAX_BITS} mask bits can be enumerated, got {self.num_bits}")

    @property
    def num_bits(self) -> int:
        """Of a mask."""
        return 2 * self.layers if self.bits is None else len(self.bits)

    @property
    def depth(self) -> int:
        """Drafts of a round, after the first, that are read apart: what the size of the files leaves room for."""
        return MAX_READINGS // (1 << self.num_bits) - 1

    @property
    def space(self) -> SearchSpace:
        """What is searched: exactly the masks that are enumerated, with gamma and both thresholds."""
        apart = tuple(range(self.layers)) if self.bits is None else ()
        return SearchSpace(self.layers, GAMMA_MAX, apart, apart, self.bits or ())

    @property
    def settings(self) -> Settings:
        """Of its training."""
        exits = (max(1, self.layers // 4), max(1, self.layers // 2))
        size = Size(
            self.name, self.layers, 128, 4, 344, VOCABULARY, window=128, batch=8, context=512,
            matrix_lr=0.02, vector_lr=0.004, exits=exits, minutes=4.0,
        )  # fmt: skip
        return Settings(
            size,
            LEARNS[self.learns].recipe(self.learns, exits),
            seed=self.seed,
            num_steps=_TOKENS_BY_LAYERS[self.layers] // (size.window * size.batch),
            minutes=size.minutes,
            decay_share=0.5,
            device="cpu",
            dtype=torch.float32,
        )


@dataclass(frozen=True)
class Learning:
    """What training does to the layers, for a model of any depth; see `studies.demo.recipe.Recipe`."""

    dropout_max: float = 0.0
    exit_scale: float = 0.0
    from_middle: bool = False
    """Exits from half of the layers on take a loss, instead of from a quarter on."""
    distils: bool = False
    """Late exits learn the target's distribution."""

    def recipe(self, name: str, exits: tuple[int, int]) -> Recipe:
        """For a model whose earliest exit and last late exit are these."""
        first = exits[1] if self.from_middle else exits[0]
        late = {"late_from": 0.55, "late_distill": True} if self.distils else {}
        return Recipe(
            name,
            dropout_max=self.dropout_max,
            exit_scale=self.exit_scale,
            first_exit=first,
            late_last_exit=max(first, exits[1]),
            **late,  # type: ignore[arg-type]
        )


LEARNS = {
    "stock": Learning(),
    "dropout": Learning(dropout_max=0.3),
    "exit_early": Learning(exit_scale=1.0),
    "exit_middle": Learning(exit_scale=1.0, from_middle=True),
    "distilled": Learning(exit_scale=1.0, distils=True),
    "layerskip": Learning(dropout_max=0.2, exit_scale=1.0, distils=True),
}


def _whole(layers: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, layers))


RECIPES = {
    one.name: one
    for one in (
        ModelRecipe("l4_stock_python", 4, "stock", "python"),
        ModelRecipe("l6_distilled_python", 6, "distilled", "python", bits=_whole(6)),
        ModelRecipe("l8_layerskip_python", 8, "layerskip", "python", bits=_whole(8)),
        ModelRecipe("l4_dropout_prose", 4, "dropout", "prose"),
        ModelRecipe("l6_stock_prose", 6, "stock", "prose", bits=_whole(6)),
        ModelRecipe("l8_stock_sentences", 8, "stock", "sentences", bits=_whole(8)),
        # Of twelve layers, those from which early exits begin.
        ModelRecipe("l12_layerskip_python", 12, "layerskip", "python", bits=_whole(12, first=4)),
        ModelRecipe("l4_exit_early_sentences", 4, "exit_early", "sentences"),
        ModelRecipe("l6_distilled_python_s1", 6, "distilled", "python", seed=1, bits=_whole(6)),
        ModelRecipe("l8_exit_middle_prose", 8, "exit_middle", "prose", bits=_whole(8)),
        ModelRecipe("l4_stock_python_s1", 4, "stock", "python", seed=1),
        ModelRecipe("l12_stock_prose", 12, "stock", "prose", bits=_whole(12, first=4)),
        # Of twenty-four layers, every third.
        ModelRecipe("l24_dropout_python", 24, "dropout", "python", bits=tuple(range(2, 24, 3))),
    )
}
"""In the order in which they are made."""
