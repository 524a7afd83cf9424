"""Trial <-> DecodeConfig: the search space; the only file that calls trial.suggest_*."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler

from layerskip.config.decode_config import (
    BY_WEIGHTS,
    HYBRIDS,
    READ_STATES,
    TRAINED,
    DecodeConfig,
    DraftWeights,
    check_ways,
    trained_by,
)
from layerskip.config.hub import num_draft_ids
from layerskip.config.lookup_settings import PromptLookup, SuffixLookup
from layerskip.config.skip_mask import DRAFT_BITS, DraftBits, SkipMask
from search.study.lookup_choice import LookupChoice

GAMMA = "gamma"
DRAFT_THRESHOLD = "draft_threshold"
TARGET_THRESHOLD = "target_threshold"
SIBLINGS, WEIGHTS_SIBLINGS = "siblings", "weights.siblings"
SIBLING_THRESHOLD, WEIGHTS_SIBLING_THRESHOLD = "sibling_threshold", "weights.sibling_threshold"
WEIGHTS_TREE = "weights.tree_tokens"
SHARE_PREFIX = "share_prefix"
RETIRED: dict[str, BaseDistribution] = {SHARE_PREFIX: CategoricalDistribution([False, True])}
"""Parameters that trials of earlier versions have besides; they are read as if they had not."""
_MAY_DIFFER = {"drafter", SIBLING_THRESHOLD, WEIGHTS_SIBLING_THRESHOLD, *RETIRED}
"""Parameters that only some trials have: those of earlier versions, and those that have come since."""
DRAFT_VOCAB = "draft_vocab"
DRAFT_INT8, BITS = "draft_int8", "draft_bits"
"""Of the weights that a draft under a mask computes with: whether 8, where no others are searched; else how many, None
as they are."""
DRAFTER, LOOKUP_METHOD = "drafter", "lookup.method"
MIN_MATCH, LOOKUP_GAMMA, LOOKUP_THRESHOLD = "lookup.min_match", "lookup.gamma", "lookup.target_threshold"
FACTOR, MIN_PROBABILITY = "lookup.factor", "lookup.min_probability"
WEIGHTS_GAMMA, WEIGHTS_DRAFT_THRESHOLD = "weights.gamma", "weights.draft_threshold"
WEIGHTS_TARGET_THRESHOLD = "weights.target_threshold"
WEIGHTS_DRAFT_VOCAB = "weights.draft_vocab"
THRESHOLDS = (
    DRAFT_THRESHOLD,
    TARGET_THRESHOLD,
    WEIGHTS_DRAFT_THRESHOLD,
    WEIGHTS_TARGET_THRESHOLD,
    LOOKUP_THRESHOLD,
)
"""Those that are off at 0."""
_WEIGHTS = "weights."
"""What the names of those begin with that drafts by trained weights have, and drafts under a mask too."""
_WEIGHTS_NAMES = (WEIGHTS_GAMMA, WEIGHTS_DRAFT_THRESHOLD, WEIGHTS_TARGET_THRESHOLD)
THRESHOLD_STEP = 0.05
THRESHOLD_MAX = 0.95
MIN_MATCH_MAX = 6
SIBLINGS_MAX = 3
"""Of each draft token: a fourth guess is hardly ever right where three are wrong."""
SIBLING_THRESHOLDS = (1.0, 0.7, 0.5, 0.3)
"""Those predicted; any other multiple of the step may be asked for."""
TREES = (0, 4, 8, 16, 24)
"""What `tree_tokens` may be, 0 for a chain."""
GAMMA_MAX = 16
"""Of drafts under a mask, unless the study says: a cheap draft that is mostly right is worth long rounds."""
LOOKUP_GAMMA_MAX = 24
"""Text that repeats itself rewards long proposals: on the demo most are best at the end of this range."""
_VOCAB_SHARES = (1, 2, 4, 8, 16)
_LEAST_VOCAB = 512
FACTORS = (1.0, 2.0, 4.0, 16.0)
_MAX_MATCH = 16
"""Of prompt lookup, not searched, as is the most frequent continuation: neither made a difference on the demo."""

_METHODS = ("prompt_lookup", "suffix")


@dataclass(frozen=True)
class SearchSpace:
    """A drafter, and what that drafter has: of layer skipping one categorical bit per sublayer (or whole layer), gamma
    and both thresholds; of lookups their own. Which parameters a trial has follows from its drafter.

    Bits are categorical because Optuna's samplers do worse, and slower, on 0/1 integers.
    Names are zero-padded (`skip.attn.07`) because the dashboard sorts them as text.
    """

    num_layers: int
    gamma_max: int
    attention_bits: tuple[int, ...]
    """Layers whose attention alone may be skipped."""
    mlp_bits: tuple[int, ...]
    """Layers whose MLP alone may be skipped."""
    layer_bits: tuple[int, ...]
    """Layers that are skipped whole or not at all."""
    draft_vocabs: tuple[int, ...] = ()
    """Of how many token ids a computed draft chooses, the first entry being all; without any, of all."""
    draft_ids: tuple[tuple[int, str], ...] = field(default=(), repr=False)
    """By such a number the set of ids that drafts under a mask choose among; without one, the first ones."""
    int8: bool = False
    """Whether a draft under a mask computes with 8-bit weights is searched too."""
    int4: bool = False
    """And with 4-bit ones."""
    drafters: tuple[str, ...] = ("layer_skip",)
    """Ways to draft, see `DecodeConfig.way`; with `layer_skip` alone there is no parameter for it."""
    lookup_gamma_max: int = LOOKUP_GAMMA_MAX
    draft_weights: tuple[DraftWeights, ...] = ()
    """What ways to draft by trained weights draft by. Of several for one drafter, a parameter says which."""
    narrows_weights: bool = field(default=True, repr=False)
    """Whether `draft_vocabs` and siblings are for these too: not if one of them has another tokenizer."""
    siblings_max: int = 0
    """Most siblings of a computed draft token; 0: not searched. Never more than `gamma_limit` tokens are verified: so a
    config may have fewer than its parameter says."""
    trees: tuple[int, ...] = ()
    """`tree_tokens` of drafts by `eagle` and `mtp`, from 0 on, in place of siblings; without any, chains alone. None
    are more than `gamma_limit`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trees", tuple(one for one in self.trees if one <= self.gamma_limit))
        check_ways(self.drafters)
        given = {one.drafter for one in self.draft_weights}
        if missing := [one for one in self.drafters if one in BY_WEIGHTS and trained_by(one) not in given]:
            raise ValueError(f"draft_weights: are required to search {', '.join(missing)}")

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        gamma_max: int,
        granularity: str,
        draft_vocab: bool = False,
        int8: bool = False,
        int4: bool = False,
        drafters: Sequence[str] = ("layer_skip",),
        lookup_gamma_max: int = LOOKUP_GAMMA_MAX,
        draft_weights: Sequence[DraftWeights] = (),
        narrows_weights: bool = True,
        siblings_max: int = 0,
        trees: bool = False,
    ) -> SearchSpace:
        """What this model allows: where attention and MLP cannot be skipped apart, one bit stands for both."""
        whole: tuple[bool, ...] = model.whole_layers_only
        if granularity == "layer":
            whole = (True,) * model.num_layers
        apart = tuple(i for i, one in enumerate(whole) if not one)
        reads_states = any(one.reads_states for one in draft_weights)
        return cls(
            num_layers=model.num_layers,
            gamma_max=gamma_max,
            attention_bits=apart,
            mlp_bits=apart,
            layer_bits=tuple(i for i, one in enumerate(whole) if one),
            draft_vocabs=vocabs_of(model.vocab_size) if draft_vocab else (),
            int8=int8,
            int4=int4,
            drafters=tuple(drafters),
            lookup_gamma_max=lookup_gamma_max,
            draft_weights=tuple(draft_weights),
            narrows_weights=narrows_weights,
            siblings_max=siblings_max,
            trees=TREES if trees and reads_states else (),
        )

    @property
    def draft_bits(self) -> tuple[DraftBits, ...]:
        """Of how many bits the weights of a draft under a mask may be besides as they are."""
        has: dict[DraftBits, bool] = {8: self.int8, 4: self.int4}
        return tuple(bits for bits in DRAFT_BITS if has[bits])

    @property
    def uses_masks(self) -> bool:
        """Whether any drafter drafts under a mask."""
        return "layer_skip" in self.drafters or "hybrid" in self.drafters

    @property
    def lookup_methods(self) -> tuple[str, ...]:
        """Ways to look tokens up, alone or in a hybrid."""
        if self._has_hybrids:
            return _METHODS
        return tuple(one for one in _METHODS if one in self.drafters)

    @property
    def _has_hybrids(self) -> bool:
        return any(one in self.drafters for one in HYBRIDS)

    def variants_of(self, weights: DraftWeights) -> list[DraftWeights]:
        """These with each `draft_vocab` that they may have, of which none lets them choose among all they can; and with
        each number of `tree_tokens`."""
        known = num_draft_ids(weights.path) if weights.drafter == "eagle" else None
        most = math.inf if known is None else known
        narrowed = [weights, *(weights.narrowed(size) for size in self._weights_vocabs[1:] if size < most)]
        return [
            one.branching(size or None)
            for one in narrowed
            for size in (self.trees if weights.reads_states else ()) or (0,)
        ]

    @property
    def _weights_vocabs(self) -> tuple[int, ...]:
        return self.draft_vocabs if self.narrows_weights else ()

    def has_weights_siblings(self, drafter: str | None) -> bool:
        """Whether drafts by these trained weights may have siblings; where trees are searched, layers on the
        target's states have those."""
        return self.siblings_max > 0 and self.narrows_weights and not (self.trees and drafter in READ_STATES)

    @property
    def uses_weights(self) -> bool:
        """Whether any way drafts by trained weights."""
        return any(one in self.drafters for one in BY_WEIGHTS)

    @cached_property
    def weights_by_name(self) -> dict[str, DraftWeights]:
        """The draft weights by their folders' names, by whole paths where these are not unique."""
        names = [Path(one.path).name for one in self.draft_weights]
        return {
            name if names.count(name) == 1 else one.path: one
            for name, one in zip(names, self.draft_weights, strict=True)
        }

    def _names_of(self, drafter: str | None) -> list[str]:
        return [name for name, one in self.weights_by_name.items() if one.drafter == drafter]

    def _has_choice(self, drafter: str | None) -> bool:
        return len(self._names_of(drafter)) > 1

    @property
    def gamma_limit(self) -> int:
        """Most tokens that any round verifies: so far costs are measured, and siblings are searched no further."""
        branches = self.siblings_max or self.trees
        return max(self.gamma_max, self.lookup_gamma_max if self.lookup_methods or branches else 0)

    @cached_property
    def bit_names(self) -> tuple[str, ...]:
        """Parameter names of the mask, layers in order."""
        width = max(2, len(str(self.num_layers - 1)))
        return tuple(
            f"skip.{kind}.{i:0{width}}"
            for kind, layers in (("attn", self.attention_bits), ("mlp", self.mlp_bits), ("layer", self.layer_bits))
            for i in layers
        )

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's view of the space: every parameter that any trial of a study may have."""
        threshold = FloatDistribution(0.0, THRESHOLD_MAX, step=THRESHOLD_STEP)
        below = FloatDistribution(THRESHOLD_STEP, 1.0, step=THRESHOLD_STEP)
        found: dict[str, BaseDistribution] = {}
        if self.uses_masks:
            found |= {name: CategoricalDistribution([False, True]) for name in self.bit_names}
            found |= {
                GAMMA: IntDistribution(1, self.gamma_max),
                DRAFT_THRESHOLD: threshold,
                TARGET_THRESHOLD: threshold,
            }
            if self.draft_vocabs:
                found[DRAFT_VOCAB] = CategoricalDistribution(self.draft_vocabs)
            if self.draft_bits:
                choices = [False, True] if self._bits_name == DRAFT_INT8 else [None, *self.draft_bits]
                found[self._bits_name] = CategoricalDistribution(choices)
            if self.siblings_max:
                found |= {SIBLINGS: IntDistribution(0, self.siblings_max), SIBLING_THRESHOLD: below}
        if self.uses_weights:
            found |= {
                WEIGHTS_GAMMA: IntDistribution(1, self.gamma_max),
                WEIGHTS_DRAFT_THRESHOLD: threshold,
                WEIGHTS_TARGET_THRESHOLD: threshold,
            }
            if self._weights_vocabs:
                found[WEIGHTS_DRAFT_VOCAB] = CategoricalDistribution(self._weights_vocabs)
            if any(self.has_weights_siblings(one.drafter) for one in self.draft_weights):
                found |= {WEIGHTS_SIBLINGS: IntDistribution(0, self.siblings_max), WEIGHTS_SIBLING_THRESHOLD: below}
            if self.trees:
                found[WEIGHTS_TREE] = CategoricalDistribution(self.trees)
            found |= {
                weights_of(one): CategoricalDistribution(self._names_of(one))
                for one in TRAINED
                if self._has_choice(one)
            }
        if self.lookup_methods:
            found |= {
                MIN_MATCH: IntDistribution(1, MIN_MATCH_MAX),
                LOOKUP_GAMMA: IntDistribution(1, self.lookup_gamma_max),
                LOOKUP_THRESHOLD: threshold,
            }
        if "suffix" in self.lookup_methods:
            found |= {FACTOR: CategoricalDistribution(FACTORS), MIN_PROBABILITY: threshold}
        if self._has_hybrids:
            found[LOOKUP_METHOD] = CategoricalDistribution(_METHODS)
        if self.drafters != ("layer_skip",):
            found[DRAFTER] = CategoricalDistribution(self.drafters)
        return found

    def names_for(self, drafter: str, method: str | None = None) -> list[str]:
        """Parameters that a trial with this drafter has; `method` is a hybrid's."""
        names = [DRAFTER] if DRAFTER in self.distributions else []
        if drafter in ("layer_skip", "hybrid"):
            names += [*self.bit_names, GAMMA, DRAFT_THRESHOLD, TARGET_THRESHOLD]
            names += [DRAFT_VOCAB] if self.draft_vocabs else []
            names += [self._bits_name] if self.draft_bits else []
            names += [SIBLINGS, SIBLING_THRESHOLD] if self.siblings_max else []
        if drafter in BY_WEIGHTS:
            names += _WEIGHTS_NAMES
            names += [WEIGHTS_DRAFT_VOCAB] if self._weights_vocabs else []
            kind = trained_by(drafter)
            names += [WEIGHTS_SIBLINGS, WEIGHTS_SIBLING_THRESHOLD] if self.has_weights_siblings(kind) else []
            names += [WEIGHTS_TREE] if self.trees and kind in READ_STATES else []
            names += [weights_of(kind)] if self._has_choice(kind) else []
        if drafter in HYBRIDS:
            names.append(LOOKUP_METHOD)
        if drafter not in ("layer_skip", *TRAINED):
            names += [MIN_MATCH, LOOKUP_GAMMA, LOOKUP_THRESHOLD]
        if (method if drafter in HYBRIDS else drafter) == "suffix":
            names += [FACTOR, MIN_PROBABILITY]
        return names

    def holds(self, params: Mapping[str, Any]) -> bool:
        """Whether these are the parameters of a whole config of this space."""
        drafter = params.get(DRAFTER, "layer_skip")
        if drafter not in self.drafters:
            return False
        expected = set(self.names_for(drafter, params.get(LOOKUP_METHOD)))
        return params.keys() | _MAY_DIFFER == expected | _MAY_DIFFER

    def reduce(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Of a value for every parameter, those that the drafter has."""
        names = self.names_for(params.get(DRAFTER, self.drafters[0]), params.get(LOOKUP_METHOD))
        return {name: params[name] for name in names}

    def suggest(self, trial: optuna.Trial) -> DecodeConfig:
        """Ask the trial for a config: for its drafter first, then for what that has."""
        params: dict[str, Any] = {}

        def ask(name: str) -> Any:
            if name not in params:
                params[name] = _ask(trial, name, self.distributions[name])
            return params[name]

        drafter = ask(DRAFTER) if DRAFTER in self.distributions else "layer_skip"
        method = ask(LOOKUP_METHOD) if drafter in HYBRIDS else None
        for name in self.names_for(drafter, method):
            ask(name)
        return self.to_config(params)

    def to_config(self, params: Mapping[str, Any]) -> DecodeConfig:
        """The config of a trial's parameters. Raises: ValueError if one is missing or unknown."""
        drafter = params.get(DRAFTER, "layer_skip")
        if not self.holds(params):
            expected = self.names_for(drafter, params.get(LOOKUP_METHOD)) if drafter in self.drafters else []
            different = sorted(params.keys() ^ set(expected))
            raise ValueError(f"params: must be the space's parameters, differ in {different}")
        if drafter == "layer_skip":
            return DecodeConfig(**self._mask_fields(params))
        if drafter in TRAINED:
            return DecodeConfig(drafter=drafter, **self._weights_fields(drafter, params))
        choice = _choice_of(params, params.get(LOOKUP_METHOD, drafter))
        if drafter in HYBRIDS:
            fields = self._mask_fields(params) if drafter == "hybrid" else self._weights_fields(drafter, params)
            return DecodeConfig(drafter="hybrid", **fields, lookup=choice.in_hybrid())
        return choice.alone(self.num_layers)

    def _mask_fields(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"skip_mask": self.to_mask(params), **self._computed_fields(params, "")}

    def _weights_fields(self, way: str, params: Mapping[str, Any]) -> dict[str, Any]:
        drafter = trained_by(way)
        name = params[weights_of(drafter)] if self._has_choice(drafter) else self._names_of(drafter)[0]
        return {
            "skip_mask": SkipMask.none(self.num_layers),
            **self._computed_fields(params, _WEIGHTS),
            "draft_weights": self.weights_by_name[name]
            .narrowed(self._narrowing(params.get(WEIGHTS_DRAFT_VOCAB)))
            .branching(int(params.get(WEIGHTS_TREE, 0)) or None),
        }

    def _computed_fields(self, params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Of any computed draft; as many siblings as asked for, and as have a measured cost."""
        gamma = int(params[prefix + GAMMA])
        siblings = min(int(params.get(prefix + SIBLINGS, 0)), max(0, self.gamma_limit // gamma - 1))
        below = snap_threshold(params.get(prefix + SIBLING_THRESHOLD, 1.0), most=1.0) if siblings else 1.0
        return {
            "gamma": gamma,
            "draft_threshold": snap_threshold(params[prefix + DRAFT_THRESHOLD]),
            "target_threshold": snap_threshold(params[prefix + TARGET_THRESHOLD]),
            "siblings": siblings,
            "sibling_threshold": below,
        }

    def to_mask(self, bits: Mapping[str, Any]) -> SkipMask:
        """The mask of its bits, its `draft_vocab` and the bits of its weights; other parameters are ignored. Without
        these it skips nothing."""
        chosen = [name for name in self.bit_names if bits.get(name, False)]
        attention, mlp, layers = (
            {layer_of(name) for name in chosen if kind_of(name) == kind} for kind in ("attn", "mlp", "layer")
        )
        mask = SkipMask.from_sublayers(self.num_layers, attention=attention | layers, mlp=mlp | layers)
        rounded: DraftBits | None = 8 if bits.get(DRAFT_INT8, False) else bits.get(BITS)
        return self.narrowed(mask, bits.get(DRAFT_VOCAB)).rounded(rounded)

    def narrowed(self, mask: SkipMask, draft_vocab: int | None) -> SkipMask:
        """The mask with this `draft_vocab`, of which None is all, and what the space knows as its ids."""
        size = self._narrowing(draft_vocab)
        return mask.narrowed(size, None if size is None else dict(self.draft_ids).get(size))

    def _narrowing(self, draft_vocab: int | None) -> int | None:
        """None where it is all."""
        return None if draft_vocab in self.draft_vocabs[:1] else draft_vocab

    def _nearest_vocab(self, draft_vocab: int | None) -> int:
        wanted = draft_vocab or self.draft_vocabs[0]
        return min(self.draft_vocabs, key=lambda one: abs(one - wanted))

    def to_bits(self, mask: SkipMask) -> dict[str, Any]:
        """The bits of a mask, its `draft_vocab` and the bits of its weights, those that the space has."""
        if mask.num_layers != self.num_layers:
            raise ValueError(f"skip_mask: must have {self.num_layers} layers, got {mask.num_layers}")
        flags = [mask.attention[i] for i in self.attention_bits]
        flags += [mask.mlp[i] for i in self.mlp_bits]
        flags += [mask.attention[i] and mask.mlp[i] for i in self.layer_bits]
        bits: dict[str, Any] = dict(zip(self.bit_names, flags, strict=True))
        if self.draft_vocabs:
            bits[DRAFT_VOCAB] = self._nearest_vocab(mask.draft_vocab)
        return bits | self.bits_params(mask.bits)

    def bits_params(self, bits: DraftBits | None) -> dict[str, Any]:
        """The parameter that says of how many bits a draft's weights are, if the space has it."""
        if not self.draft_bits:
            return {}
        is_searched = bits in self.draft_bits
        return {self._bits_name: is_searched if self._bits_name == DRAFT_INT8 else bits if is_searched else None}

    @property
    def _bits_name(self) -> str:
        return DRAFT_INT8 if self.draft_bits == (8,) else BITS

    def to_params(self, config: DecodeConfig) -> dict[str, Any]:
        """The parameters of a config, moved to the nearest point of the space.

        Bits the space has not are dropped; a whole-layer bit is set if the config skips both halves; gamma is cut to
        1..gamma_max; thresholds are rounded to the step, and so on. On configs of the space it is the inverse of
        `to_config`.
        """
        params: dict[str, Any] = {}
        if config.draft_weights is not None:
            drafter = config.draft_weights.drafter
            params = self._computed_params(config, _WEIGHTS, siblings=self.has_weights_siblings(drafter))
            if self._weights_vocabs:
                params[WEIGHTS_DRAFT_VOCAB] = self._nearest_vocab(config.draft_weights.draft_vocab)
            if self.trees and config.draft_weights.reads_states:
                params[WEIGHTS_TREE] = min(self.trees, key=lambda one: abs(one - config.tree_tokens))
            if self._has_choice(drafter):
                fingerprint = config.draft_weights.fingerprint
                params[weights_of(drafter)] = next(
                    name for name, one in self.weights_by_name.items() if one.fingerprint == fingerprint
                )
        if config.way in ("layer_skip", "hybrid"):
            params = self.to_bits(config.skip_mask)
            params |= self._computed_params(config, "", siblings=self.siblings_max > 0)
        if DRAFTER in self.distributions:
            params[DRAFTER] = config.way
        if (choice := LookupChoice.of(config)) is None:
            return params
        lookup = choice.settings
        if config.drafter == "hybrid":
            params[LOOKUP_METHOD] = lookup.method
        if isinstance(lookup, SuffixLookup):
            params[FACTOR] = min(FACTORS, key=lambda one: abs(one - lookup.factor))
            params[MIN_PROBABILITY] = snap_threshold(lookup.min_probability)
        return params | {
            MIN_MATCH: min(lookup.min_match, MIN_MATCH_MAX),
            LOOKUP_GAMMA: min(choice.gamma, self.lookup_gamma_max),
            LOOKUP_THRESHOLD: snap_threshold(choice.target_threshold),
        }

    def _computed_params(self, config: DecodeConfig, prefix: str, *, siblings: bool) -> dict[str, Any]:
        params = {
            prefix + GAMMA: min(max(config.gamma, 1), self.gamma_max),
            prefix + DRAFT_THRESHOLD: snap_threshold(config.draft_threshold),
            prefix + TARGET_THRESHOLD: snap_threshold(config.target_threshold),
        }
        if siblings:
            params[prefix + SIBLINGS] = min(config.siblings, self.siblings_max)
            params[prefix + SIBLING_THRESHOLD] = config.sibling_threshold
        return params


def vocabs_of(vocab_size: int) -> tuple[int, ...]:
    """What `SearchSpace.draft_vocabs` may be for a model with so many token ids: none for a small vocabulary."""
    found = tuple(size for share in _VOCAB_SHARES if (size := vocab_size // share) >= _LEAST_VOCAB)
    return found if len(found) > 1 else ()


def weights_of(drafter: str | None) -> str:
    """The parameter that says by which weights a drafter drafts, where there are several."""
    return f"{drafter}.weights"


def lookup_settings(method: str, min_match: int, factor: float, min_probability: float) -> PromptLookup | SuffixLookup:
    """Those of the space; what the method has not is ignored."""
    if method == "prompt_lookup":
        return PromptLookup(min_match=min_match, max_match=_MAX_MATCH)
    return SuffixLookup(min_match=min_match, factor=factor, min_probability=min_probability)


def _choice_of(params: Mapping[str, Any], method: str) -> LookupChoice:
    probability = snap_threshold(params.get(MIN_PROBABILITY, 0.0))
    settings = lookup_settings(method, int(params[MIN_MATCH]), float(params.get(FACTOR, 1.0)), probability)
    return LookupChoice(settings, int(params[LOOKUP_GAMMA]), snap_threshold(params[LOOKUP_THRESHOLD]))


def _ask(trial: optuna.Trial, name: str, one: BaseDistribution) -> Any:
    if isinstance(one, CategoricalDistribution):
        return trial.suggest_categorical(name, one.choices)
    if isinstance(one, IntDistribution):
        return trial.suggest_int(name, one.low, one.high)
    assert isinstance(one, FloatDistribution)
    return trial.suggest_float(name, one.low, one.high, step=one.step)


def snap_threshold(value: float, most: float = THRESHOLD_MAX) -> float:
    """The nearest threshold on the grid 0, 0.05, ..., `most`, without binary dust."""
    return round(min(max(round(value / THRESHOLD_STEP), 0), round(most / THRESHOLD_STEP)) * THRESHOLD_STEP, 2)


def random_params(space: SearchSpace, rng: np.random.Generator) -> dict[str, Any]:
    """The parameters of a random config: every parameter uniform and on its own, of which the drafter's are kept."""
    sampler = RandomSampler(seed=int(rng.integers(2**32)))
    drawn = optuna.create_study(sampler=sampler).ask(space.distributions).params
    return space.to_params(space.to_config(space.reduce(drawn)))


def kind_of(bit: str) -> str:
    """What a bit of this name skips: `attn`, `mlp` or a whole `layer`."""
    return bit.split(".")[1]


def layer_of(bit: str) -> int:
    """The layer that a bit of this name is about."""
    return int(bit.rpartition(".")[2])
