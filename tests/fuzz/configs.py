"""Decode configs under test: valid ones with every drafter, and what an accepted one must say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from layerskip import DecodeConfig, Sampling
from layerskip.config.decode_config import MAX_GROUP_NAME, is_group_name
from layerskip.config.sampling_params import LEAST_TEMPERATURE
from layerskip.rounds.sampling import SamplingParams


def read_config_file(data: bytes, folder: Path) -> DecodeConfig:
    path = folder / "best.json"
    path.write_bytes(data)
    return DecodeConfig.load(path)


def check_config(config: DecodeConfig, folder: Path) -> None:
    said = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    for name in ("gamma", "draft_threshold", "target_threshold", "reason", "drafter"):
        assert getattr(config, name) == said.get(name, DecodeConfig.model_fields[name].default)
    sampling = said.get("sampling")  # null is none
    assert (None if config.sampling is None else config.sampling.model_dump(include=set(sampling or ()))) == sampling
    assert len(config.regimes or ()) == len(said.get("regimes") or ())  # null is none
    lookup = said.get("lookup")
    assert (None if config.lookup is None else config.lookup.model_dump(exclude_unset=True)) == lookup
    text = config.to_json()
    assert DecodeConfig.from_json(text) == config
    assert DecodeConfig.from_json(text).to_json() == text
    assert text.endswith("}\n")


_MASKS = st.sampled_from(["4:none", "4:1-2,a3", "4:m0"])
_TEXTS = st.text(max_size=20)
_GROUP_NAMES = st.text(min_size=1, max_size=MAX_GROUP_NAME).filter(is_group_name)
_RATES = st.floats(min_value=1e-300, allow_infinity=False, allow_nan=False)
_SHARES = st.floats(0, 1)
_CONFIRMED = st.fixed_dictionaries(
    dict.fromkeys(("tokens_per_s", "plain_tokens_per_s", "speedup", "speedup_ci_low", "speedup_ci_high"), _RATES)
    | {"num_prompts": st.integers(1, 99), "num_identical": st.integers(0, 99), "num_repeats": st.integers(1, 9)},
    optional={"acceptance_rate": _SHARES, "mean_accepted_length": st.floats(1, 60)},
)
_PROVENANCE = st.fixed_dictionaries(
    dict.fromkeys(("model", "weights_fingerprint", "device", "dtype"), _TEXTS) | {"num_layers": st.just(4)},
    optional={
        "versions": st.dictionaries(_TEXTS, _TEXTS, max_size=3),
        "study": _TEXTS,
        "trial": st.integers(0, 10**6),
        "seed": st.integers(-(10**6), 10**6),
        "searched_tokens_per_s": _RATES,
    },
)
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

_ABOVE_0 = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
_PENALTIES: dict[str, Any] = {
    "repetition_penalty": st.just(1.0) | _ABOVE_0,
    "presence_penalty": st.just(0.0) | st.floats(-2, 2),
    "frequency_penalty": st.just(0.0) | st.floats(-2, 2),
}
greedy_params = st.builds(SamplingParams, **_PENALTIES)
sampled_params = st.builds(
    SamplingParams,
    do_sample=st.just(True),
    temperature=st.floats(min_value=LEAST_TEMPERATURE, allow_infinity=False, allow_nan=False),
    top_k=st.just(50) | st.integers(0, 10**6),
    top_p=st.just(1.0) | _SHARE,
    min_p=st.just(0.0) | _SHARES,
    **_PENALTIES,
)
samplings = (greedy_params | sampled_params).map(Sampling.of)


def _settings(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """One of every drafter, with these fields beside its own."""
    optional |= {"target_threshold": st.floats(0, 1)}
    drafting = optional | {"lossy": _LOSSY}
    by_mask = optional | {"draft_threshold": st.floats(0, 1)}
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
    "confirmed": _CONFIRMED,
    "provenance": _PROVENANCE,
}


@st.composite
def _in_regimes(draw: st.DrawFn) -> dict[str, Any]:
    """The default's setting and one or two others, each for its own way to choose tokens."""
    ways = draw(st.lists(samplings, min_size=2, max_size=3, unique_by=lambda one: one.name))
    own, *others = [way.model_dump() for way in ways]
    regimes = [draw(_settings()) | {"sampling": way} for way in others]
    return draw(_settings(**_ABOUT)) | {"sampling": own, "regimes": regimes}


CONFIGS = st.one_of(
    _settings(
        **_ABOUT,
        sampling=samplings.map(Sampling.model_dump),
        groups=st.dictionaries(_GROUP_NAMES, _settings(), min_size=1, max_size=3),
    ),
    _in_regimes(),
).map(lambda setting: {"schema_version": 1, **setting})
