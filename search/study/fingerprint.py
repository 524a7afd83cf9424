"""Fingerprint: what a number was measured on; stored with the study and compared on resume."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from layerskip.huggingface.growing_keys import TORCHS_CHOICE
from layerskip.machine.host import cpu_name, device_names, git_commit, package_version
from search.study.prompts import PromptSet
from search.study.space import SearchSpace
from search.study.spec import StudySpec

SPACE_VERSION = 1
"""Grows when parameter names or their meaning change, so that old trials are not read with new eyes."""


@dataclass(frozen=True)
class Fingerprint:
    """Fields that must agree for two measurements to be comparable. A difference in any of them refuses a resume."""

    weights: str
    model_class: str
    device: str
    dtype: str
    engine: str
    num_threads: int
    cpu: str
    torch: str
    transformers: str
    layerskip: str
    tuning_prompts: str
    held_out_prompts: str
    max_new_tokens: int
    gamma_max: int
    granularity: str
    space_version: int = SPACE_VERSION
    objective: str = "tokens_per_s"
    drafters: tuple[str, ...] = ("layer_skip",)
    draft_vocabs: tuple[int, ...] = ()
    int8: bool = False
    int4: bool = False
    siblings: int = 0
    """Most of a draft token."""
    trees: tuple[int, ...] = ()
    sampling: str = "greedy"
    """How tokens are chosen; see `Sampling.name`."""
    draft_weights: str | None = None
    """Fingerprints of the trained weights, in the order given."""
    device_map: str | None = None
    """Which layers are on which device; None for a model that is whole on one."""
    attention_backend: str = TORCHS_CHOICE
    """What computed attention, and on a CPU whole sublayers."""
    quantization: str | None = None
    """What the weights were rounded to after loading."""
    chat_template: str | None = None
    """Hash of the tokenizer's, where prompts go through it."""


DEVICE_FIELDS = ("device", "cpu", "num_threads", "attention_backend")
"""What may differ between the workers of a study whose objective is the speedup, each over its own plain decoding."""


class FingerprintMismatch(ValueError):  # noqa: N818 (reads as the fact it states)
    """The study was measured on something else."""


def take_fingerprint(
    model: Any, spec: StudySpec, space: SearchSpace, tuning: PromptSet, held_out: PromptSet
) -> Fingerprint:
    """The fingerprint of a greedy run about to start. Cost: one pass over the weights."""
    import torch

    return Fingerprint(
        weights=model.weights_fingerprint(),
        model_class=model.model_class,
        device=device_names(model.placement.devices),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        engine=model.engine_name,
        attention_backend=model.engine.attention_backend,
        num_threads=torch.get_num_threads(),
        cpu=cpu_name(),
        torch=torch.__version__,
        transformers=package_version("transformers"),
        layerskip=package_version("layerskip"),
        tuning_prompts=tuning.fingerprint,
        held_out_prompts=held_out.fingerprint,
        max_new_tokens=spec.max_new_tokens,
        gamma_max=space.gamma_max,
        granularity=spec.granularity,
        objective=spec.objective,
        drafters=space.drafters,
        draft_vocabs=space.draft_vocabs,
        int8=space.int8,
        int4=space.int4,
        siblings=space.siblings_max,
        trees=space.trees,
        draft_weights=",".join(one.fingerprint for one in space.draft_weights) or None,
        device_map=model.placement.describe(),
        chat_template=_template_hash(model.tokenizer) if tuning.uses_template or held_out.uses_template else None,
    )


def _template_hash(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16] if template else None


def compare(stored: Mapping[str, Any], now: Fingerprint) -> None:
    """Raises: FingerprintMismatch naming every field that differs, with both values.

    Of a study that maximises the speedup, `DEVICE_FIELDS` may differ.
    """
    stored = dict(stored)
    for name in ("drafters", "draft_vocabs", "trees"):
        stored[name] = tuple(stored[name])  # JSON made a list of it
    ignored = DEVICE_FIELDS if stored["objective"] == now.objective == "speedup" else ()
    current = asdict(now)
    names = [field.name for field in fields(now)] + [name for name in stored if name not in current]
    differing = [
        f"{name} was {stored.get(name)!r}, now {current.get(name)!r}"
        for name in names
        if stored.get(name) != current.get(name) and name not in ignored
    ]
    if differing:
        raise FingerprintMismatch(
            f"the study was measured on something else: {'; '.join(differing)}. "
            "Use another --study-name, or another --study folder"
        )


def environment() -> dict[str, str]:
    """Facts worth recording that do not refuse a resume: they change no token and hardly a time."""
    facts = {name: package_version(name) for name in ("optuna", "optuna-dashboard", "numpy", "tokenizers")}
    facts |= {"python": platform.python_version(), "platform": platform.platform(), "host": platform.node()}
    commit = git_commit(Path(__file__).parent)
    return facts | ({"commit": commit} if commit else {})
