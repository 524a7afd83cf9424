"""A decode config from flags: to try a way to draft without writing a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from layerskip.config.decode_config import DRAFTERS, OWN_LAYERS, TRAINED, DecodeConfig, DraftWeights
from layerskip.config.lookup_settings import PromptLookup, SuffixLookup
from layerskip.config.skip_mask import SkipMask
from layerskip.config.usual_lookups import NGRAMS, NUM_TOKENS, SUFFIXES, lookup_alone, lookup_else

_BY_MASK = ("layer_skip", "hybrid")
_COMPUTED = (*_BY_MASK, *TRAINED)
_BY_NGRAMS = ("prompt_lookup", "hybrid")


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `setting_by_hand` reads."""
    group = parser.add_argument_group("a setting by hand, with --model")
    group.add_argument("--drafter", choices=DRAFTERS, help="who proposes tokens; default: layer_skip, with --mask")
    group.add_argument("--mask", metavar="MASK", help="skip mask such as 12:3,5-11,m1, of layer_skip and hybrid")
    group.add_argument(
        "--draft-weights",
        metavar="NAME",
        help="trained weights or a smaller model, a folder or hub id: of eagle, draft_model, and of a hybrid without a "
        "mask",
    )
    group.add_argument(
        "--gamma",
        type=int,
        help=f"most draft tokens per round; of a hybrid the computed ones; of a lookup {NUM_TOKENS}",
    )
    group.add_argument("--draft-threshold", type=float, help="a computed draft stops below this confidence; 0 = off")
    group.add_argument(
        "--siblings", type=int, help="of every computed draft token so many next best are verified too; 0 = off"
    )
    group.add_argument(
        "--sibling-threshold", type=float, help="only draft tokens below this confidence have siblings; default: all"
    )
    group.add_argument(
        "--tree-tokens",
        type=int,
        help="of eagle and mtp: so many of all it proposes are verified, as a tree; default: a chain",
    )
    group.add_argument("--min-match", type=int, help=f"fewest tokens that a lookup goes by; else {NGRAMS.min_match}")
    group.add_argument(
        "--max-match", type=int, help=f"most tokens that n-grams are told apart by; else {NGRAMS.max_match}"
    )


def setting_by_hand(arguments: argparse.Namespace) -> Callable[[int], DecodeConfig] | None:
    """The config that the flags spell, for a model of so many layers; None where none of them is given.

    Raises: ValueError naming the flag or the field.
    """
    drafter = arguments.drafter or (None if arguments.mask is None else "layer_skip")
    _check_flags(arguments, drafter)
    if drafter is None:
        return None

    def setting(num_layers: int) -> DecodeConfig:
        gamma = NUM_TOKENS if arguments.gamma is None else arguments.gamma
        if drafter not in _COMPUTED:
            return lookup_alone(num_layers, _lookup(arguments, drafter), gamma)
        computed = _computed(arguments, num_layers, gamma)
        return lookup_else(computed, _lookup(arguments, drafter)) if drafter == "hybrid" else computed

    setting(1)  # what is wrong with the flags is told before a model is loaded
    return setting


def _computed(arguments: argparse.Namespace, num_layers: int, gamma: int) -> DecodeConfig:
    """The part that computes its drafts."""
    names = ("draft_threshold", "siblings", "sibling_threshold")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.drafter == "mtp":
        weights = DraftWeights(drafter="mtp", path=OWN_LAYERS, fingerprint="", tree_tokens=arguments.tree_tokens)
        return DecodeConfig(
            drafter="mtp", skip_mask=SkipMask.none(num_layers), gamma=gamma, draft_weights=weights, **given
        )
    if arguments.draft_weights is None:
        return DecodeConfig(skip_mask=SkipMask.parse(arguments.mask), gamma=gamma, **given)
    from layerskip.drafters.draft_weights import describe_weights

    weights = describe_weights(arguments.draft_weights)
    if arguments.drafter in TRAINED and arguments.drafter != weights.drafter:
        raise ValueError(
            f"--drafter: {arguments.draft_weights} has weights of {weights.drafter}, got {arguments.drafter}"
        )
    given |= {"draft_weights": weights.model_dump() | {"tree_tokens": arguments.tree_tokens}}
    return DecodeConfig(drafter=weights.drafter, skip_mask=SkipMask.none(num_layers), gamma=gamma, **given)


def _check_flags(arguments: argparse.Namespace, drafter: str | None) -> None:
    """Which flags go together."""
    if drafter is not None and arguments.config is not None:
        flag = "--mask" if arguments.drafter is None else "--drafter"
        raise ValueError(f"{flag}: give it with --model alone, a config has its own")
    if drafter == "hybrid" and arguments.mask is not None and arguments.draft_weights is not None:
        raise ValueError("--mask: give it or --draft-weights, a hybrid computes its drafts in one way")
    if drafter in _COMPUTED:
        by_weights = drafter in TRAINED or arguments.draft_weights is not None
        source = () if drafter == "mtp" else ("draft_weights" if by_weights else "mask",)
        for name in (*source, "gamma"):
            if getattr(arguments, name) is None:
                flag = "--mask" if arguments.drafter is None else f"--drafter {drafter}"
                raise ValueError(f"{flag}: needs --{name.replace('_', '-')}")
    needed = {"mask": _BY_MASK, "gamma": DRAFTERS, "draft_threshold": _COMPUTED}
    needed |= {"draft_weights": ("eagle", "draft_model", "hybrid"), "tree_tokens": (*TRAINED, "hybrid")}
    needed |= {"siblings": _COMPUTED, "sibling_threshold": _COMPUTED}
    needed |= {"min_match": ("prompt_lookup", "suffix", "hybrid"), "max_match": _BY_NGRAMS}
    for name, drafters in needed.items():
        if getattr(arguments, name) is not None and drafter not in drafters:
            rule = "needs --mask or --drafter" if drafter is None else f"is nothing that {drafter} has"
            raise ValueError(f"--{name.replace('_', '-')}: {rule}")


def _lookup(arguments: argparse.Namespace, drafter: str) -> PromptLookup | SuffixLookup:
    least, most = arguments.min_match, arguments.max_match
    if drafter == "suffix":
        return SUFFIXES if least is None else SuffixLookup(min_match=least)
    least = NGRAMS.min_match if least is None else least
    return PromptLookup(min_match=least, max_match=max(least, NGRAMS.max_match) if most is None else most)
