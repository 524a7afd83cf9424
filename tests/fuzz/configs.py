"""Decode configs under test: valid ones with every drafter, and what an accepted one must say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from layerskip.config.decode_config import DecodeConfig


def read_config_file(data: bytes, folder: Path) -> DecodeConfig:
    path = folder / "best.json"
    path.write_bytes(data)
    return DecodeConfig.load(path)


def check_config(config: DecodeConfig, folder: Path) -> None:
    said = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    for name in ("gamma", "draft_threshold", "target_threshold", "share_prefix", "reason", "drafter"):
        assert getattr(config, name) == said.get(name, DecodeConfig.model_fields[name].default)
    if "sampling" in said:
        assert config.sampling is not None
        assert config.sampling.model_dump(include=set(said["sampling"])) == said["sampling"]
    assert len(config.regimes or ()) == len(said.get("regimes", ()))
    lookup = said.get("lookup")
    assert (None if config.lookup is None else config.lookup.model_dump(exclude_unset=True)) == lookup
    assert DecodeConfig.from_json(config.to_json()) == config


_MASKS = st.sampled_from(["4:none", "4:1-2,a3", "4:m0"])
_CONFIRMED = {"tokens_per_s": 2.0, "plain_tokens_per_s": 1.0, "speedup": 2.0, "speedup_ci_low": 1.5}
_CONFIRMED |= {"speedup_ci_high": 2.5, "num_prompts": 3, "num_identical": 3, "num_repeats": 1}
_ORIGIN = {"model": "./model", "weights_fingerprint": "00ff", "device": "cpu", "dtype": "float32", "num_layers": 4}
_LOOKUP = {"min_match": st.integers(1, 8)}
_NGRAMS = {"method": st.just("prompt_lookup"), **_LOOKUP, "max_match": st.integers(8, 64)}
_NGRAMS_OPTIONS: dict[str, st.SearchStrategy[Any]] = {"continuation": st.sampled_from(["recent", "frequent"])}
_SUFFIX = {"method": st.just("suffix"), **_LOOKUP}
_SUFFIX_OPTIONS = {"factor": st.floats(0.01, 64), "min_probability": st.floats(0, 1)}
_OWN = {"gamma": st.integers(1, 64), "target_threshold": st.floats(0, 1)}
"""What the lookup of a hybrid may have for itself."""


_SHARE = st.floats(0, 1, exclude_min=True)
_LOSSY = st.fixed_dictionaries({"rule": st.just("probability"), "threshold": _SHARE}) | st.fixed_dictionaries(
    {"rule": st.just("typical")}, optional={"epsilon": _SHARE, "delta": _SHARE}
)

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "repetition_penalty": 1.5},
    "warm": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "hot": {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "min_p": 0.5},
}


def _settings(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """One of every drafter, with these fields beside its own."""
    optional |= {"target_threshold": st.floats(0, 1)}
    drafting = optional | {"lossy": _LOSSY}
    by_mask = optional | {"draft_threshold": st.floats(0, 1), "share_prefix": st.booleans()}
    alone = {"skip_mask": st.just("4:none"), "gamma": st.integers(1, 64)}
    both = {"drafter": st.just("hybrid"), "skip_mask": _MASKS, "gamma": st.integers(1, 64)}
    ngrams = st.fixed_dictionaries(_NGRAMS, optional=_NGRAMS_OPTIONS)
    suffix = st.fixed_dictionaries(_SUFFIX, optional=_SUFFIX_OPTIONS)
    either = st.fixed_dictionaries(_NGRAMS, optional=_NGRAMS_OPTIONS | _OWN) | st.fixed_dictionaries(
        _SUFFIX, optional=_SUFFIX_OPTIONS | _OWN
    )
    return st.one_of(
        st.fixed_dictionaries(
            {"skip_mask": _MASKS, "gamma": st.integers(0, 64)}, optional=by_mask | {"drafter": st.just("layer_skip")}
        ),
        st.fixed_dictionaries({**alone, "drafter": st.just("prompt_lookup"), "lookup": ngrams}, optional=drafting),
        st.fixed_dictionaries({**alone, "drafter": st.just("suffix"), "lookup": suffix}, optional=drafting),
        st.fixed_dictionaries({**both, "lookup": either}, optional=by_mask),
    )


_ABOUT = {
    "reason": st.text(max_size=5),
    "confirmed": st.just(_CONFIRMED),
    "provenance": st.just({**_ORIGIN, "versions": {"torch": "2"}, "trial": 3, "seed": 0}),
}


@st.composite
def _in_regimes(draw: st.DrawFn) -> dict[str, Any]:
    """The default's setting and one or two others, each for its own way to choose tokens."""
    own, *others = draw(st.permutations(list(_WAYS.values())))
    regimes = [draw(_settings()) | {"sampling": way} for way in others[: draw(st.integers(1, 2))]]
    return draw(_settings(**_ABOUT)) | {"sampling": own, "regimes": regimes}


CONFIGS = st.one_of(
    _settings(
        **_ABOUT,
        sampling=st.sampled_from(list(_WAYS.values())),
        groups=st.dictionaries(st.sampled_from(["qa", "code"]), _settings(), min_size=1),
    ),
    _in_regimes(),
).map(lambda setting: {"schema_version": 1, **setting})
