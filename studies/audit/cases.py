"""Cases of the audit: what one run decodes and how, drawn from (seed, number) alone."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from layerskip import DecodeConfig, SkipMask
from tests.layerskip import zoo

VERSION = 5
"""Of what is drawn for a number: a record goes on only with cases of the version that it began with."""
DTYPES = ("float32", "float32", "bfloat16")
"""Every third case is in reduced precision: there a difference may be a tie, so the claim is weaker."""
LEAN, MODULES = "cuda_graph lean", "cuda_graph modules"
LONGEST = 20
"""Most tokens a case asks for: several rounds, and texts that cross the small sliding windows."""
_GAMMAS = (0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 12)
_DRAFT_THRESHOLDS = (0.0, 0.0, 0.2, 0.3, 0.4, 0.6, 0.9, 1.0)
_TARGET_THRESHOLDS = (0.0, 0.0, 0.0, 0.2, 0.35, 0.5, 0.8, 1.0)
_PROMPT_LENGTHS = (1, 2, 3, 5, 7, 11, 17)
_NUM_PROMPTS = 3
"""Texts of each length; their references are shared by all cases."""
_DRAFTERS = ("layer_skip", "layer_skip", "prompt_lookup", "suffix", "hybrid", "hybrid")


@dataclass(frozen=True)
class Case:
    """One greedy run; its fields are plain JSON, so that a failure can be kept and run again."""

    number: int
    architecture: str
    engine: str
    dtype: str
    prompt: tuple[int, ...]
    budget: int
    eos: tuple[int, ...]
    skip_mask: str
    gamma: int
    draft_threshold: float
    target_threshold: float
    drafter: str = "layer_skip"
    lookup: dict[str, Any] | None = None
    has_store: bool = False
    """Whether an earlier text is given that is like the one to come."""

    @property
    def config(self) -> DecodeConfig:
        """How the case decodes."""
        names = ("gamma", "draft_threshold", "target_threshold", "drafter", "lookup")
        fields = {name: getattr(self, name) for name in names}
        return DecodeConfig(skip_mask=SkipMask.parse(self.skip_mask), **fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        """What `to_dict` gave. Raises: ValueError if it is no case of this version."""
        try:
            return cls(**{**fields, "prompt": tuple(fields["prompt"]), "eos": tuple(fields["eos"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"case: has other fields than this version's: {error}") from None


def engines_of(architecture: str) -> tuple[str, ...]:
    """Every way to run it; the CUDA-graph engine over lean layers, over modules, or over both."""
    engines = ["eager"]
    if architecture in zoo.FUSED:
        engines += ["fused"] if architecture in zoo.COMPILED else ["fused", LEAN]
    if architecture in zoo.RECORDED:
        engines.append(MODULES)
    return tuple(engines)


PAIRS = tuple((name, engine) for name in zoo.NAMES for engine in engines_of(name))
"""Equally often each, or engines that few architectures have would hardly come."""


def draw_case(seed: int, number: int) -> Case:
    """The case of this number: always the same one, whichever were run before it."""
    draw = random.Random(f"{seed} {number}")
    architecture, engine = draw.choice(PAIRS)
    length = draw.choice(_PROMPT_LENGTHS)
    case = Case(
        number=number,
        architecture=architecture,
        engine=engine,
        dtype=draw.choice(DTYPES),
        prompt=zoo.prompt_of(length, draw.randrange(_NUM_PROMPTS)),
        budget=draw.randint(1, LONGEST),
        # One of 61 tokens ends a text inside a round often enough with a few of them, and not always.
        eos=tuple(sorted(draw.sample(range(zoo.VOCAB), draw.choice((0, 0, 1, 2, 4))))),
        skip_mask=str(_draw_mask(draw, sublayers=zoo.spec_of(architecture).sublayers)),
        gamma=draw.choice(_GAMMAS),
        draft_threshold=draw.choice(_DRAFT_THRESHOLDS),
        target_threshold=draw.choice(_TARGET_THRESHOLDS),
    )
    drafter = draw.choice(_DRAFTERS)
    if drafter == "layer_skip" or case.gamma == 0:
        return case
    return _with_lookup(draw, case, drafter)


def _with_lookup(draw: random.Random, case: Case, drafter: str) -> Case:
    """The case with another drafter; half of the prompts come twice, so that there is something to look up at once."""
    prompt = case.prompt * draw.choice((1, 2))
    method = draw.choice(("prompt_lookup", "suffix")) if drafter == "hybrid" else drafter
    least = draw.choice((1, 1, 1, 2, 3))
    lookup: dict[str, Any] = {"method": method, "min_match": least}
    if method == "suffix":
        lookup |= {"factor": draw.choice((0.5, 1.0, 4.0)), "min_probability": draw.choice((0.0, 0.1, 0.5))}
    else:
        lookup |= {"max_match": least + draw.choice((0, 2)), "continuation": draw.choice(("recent", "frequent"))}
    case = replace(case, prompt=prompt, drafter=drafter, lookup=lookup, has_store=draw.random() < 0.5)
    if drafter != "hybrid":
        none = str(SkipMask.none(zoo.NUM_LAYERS))
        return replace(case, skip_mask=none, draft_threshold=0.0)
    if draw.random() < 0.7:
        lookup |= {"gamma": draw.choice(_GAMMAS[1:]), "target_threshold": draw.choice(_TARGET_THRESHOLDS)}
    return case


def _draw_mask(draw: random.Random, *, sublayers: bool) -> SkipMask:
    """Any mask, the light ones and those that keep the first layers more often: their drafts are accepted."""
    count = zoo.NUM_LAYERS
    first, share = draw.choice((0, 0, 1, 2)), draw.choice((0.15, 0.3, 0.5, 1.0))
    attention = [i for i in range(first, count) if draw.random() < share]
    mlp = [i for i in range(first, count) if draw.random() < share] if sublayers else attention
    return SkipMask.from_sublayers(count, attention=attention, mlp=mlp)
