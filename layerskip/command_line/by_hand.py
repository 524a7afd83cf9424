"""A decode config from flags: to try a way to draft without writing a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from layerskip.config.decode_config import DRAFTERS, DecodeConfig
from layerskip.config.lookup_settings import PromptLookup, SuffixLookup
from layerskip.config.skip_mask import SkipMask
from layerskip.config.usual_lookups import NGRAMS, NUM_TOKENS, SUFFIXES, lookup_alone, lookup_else_mask

_BY_MASK = ("layer_skip", "hybrid")
_BY_NGRAMS = ("prompt_lookup", "hybrid")


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `setting_by_hand` reads."""
    group = parser.add_argument_group("a setting by hand, with --model")
    group.add_argument("--drafter", choices=DRAFTERS, help="who proposes tokens; default: layer_skip, with --mask")
    group.add_argument("--mask", metavar="MASK", help="skip mask such as 12:3,5-11,m1, of layer_skip and hybrid")
    group.add_argument(
        "--gamma", type=int, help=f"most draft tokens per round; with a mask those drafted by it, else {NUM_TOKENS}"
    )
    group.add_argument("--draft-threshold", type=float, help="drafting by mask stops below this confidence; 0 = off")
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
        if drafter not in _BY_MASK:
            return lookup_alone(num_layers, _lookup(arguments, drafter), gamma)
        mask = SkipMask.parse(arguments.mask)
        by_mask = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=arguments.draft_threshold or 0.0)
        return by_mask if drafter == "layer_skip" else lookup_else_mask(by_mask, _lookup(arguments, drafter))

    setting(1)  # what is wrong with the flags is told before a model is loaded
    return setting


def _check_flags(arguments: argparse.Namespace, drafter: str | None) -> None:
    """Which flags go together."""
    if drafter is not None and arguments.config is not None:
        flag = "--mask" if arguments.drafter is None else "--drafter"
        raise ValueError(f"{flag}: give it with --model alone, a config has its own")
    if drafter in _BY_MASK:
        for name in ("mask", "gamma"):
            if getattr(arguments, name) is None:
                flag = "--mask" if arguments.drafter is None else f"--drafter {drafter}"
                raise ValueError(f"{flag}: needs --{name}")
    needed = {"mask": _BY_MASK, "gamma": DRAFTERS, "draft_threshold": _BY_MASK}
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
