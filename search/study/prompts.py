"""Named prompt sets: tuning and held-out, never mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.config.sampling_params import SamplingParams
from layerskip.config.sampling_regime import Sampling
from layerskip.prompts import Encoder, Prompt, encode_prompt, read_prompts
from search.study.grouping import MIN_IN_GROUP, NO_GROUPS, Grouping, of_group

MIN_TUNING = 2
MIN_HELD_OUT = 4
MIN_TO_SPLIT = MIN_TUNING + MIN_HELD_OUT
MIN_CHOOSING = 8
"""Held-out prompts that choose among finalists, if any do."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one purpose, in file order."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def fingerprint(self) -> str:
        """Hash over the prompts' contents and kinds in order: a chat is not decoded as the same words in plain text."""
        kinds = ("" if one.kind == "text" else f" {one.kind}" for one in self.prompts)
        return _sha256("\n".join(one.fingerprint + kind for one, kind in zip(self.prompts, kinds, strict=True)))[:16]

    @property
    def uses_template(self) -> bool:
        """Whether a prompt goes through the tokenizer's chat template, where that has one."""
        return any(one.kind != "text" for one in self.prompts)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    prompt_id: str
    group: str | None
    ids: tuple[int, ...]
    is_text: bool = False
    """Plain text, of which a beginning is a prompt too; not so a chat, nor a turn that went through a template."""
    sampling: Sampling | None = None
    """How its tokens are chosen, where its record says."""


def continuation_seed(seed: int, prompt_ids: Sequence[int], number: int = 0) -> int:
    """Of the random numbers that a prompt is continued with for the `number`-th time, in a study with this seed."""
    text = f"{seed} {list(prompt_ids)}" + (f" {number}" if number else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def load_prompts(tuning: str, held_out: str | None, grouping: Grouping = NO_GROUPS) -> tuple[PromptSet, PromptSet]:
    """Read and check both sets; without a held-out file, split the tuning file.

    The split is deterministic: by content hash, a third of the prompts but at least 4 are held out; where groups are
    required, a third of each group but at least 2. Prompts whose records say how tokens are chosen are split so for
    each way that has prompts enough.
    Raises: ValueError or FileNotFoundError in one line with file and line.
    """
    tuning_set = PromptSet("tuning", read_prompts(Path(tuning), grouping))
    if held_out is None:
        return _split(tuning_set.prompts, tuning, by_group=grouping.required)
    held_out_set = PromptSet("held-out", read_prompts(Path(held_out), grouping))
    seen = {prompt.identity: prompt.source for prompt in tuning_set.prompts}
    for prompt in held_out_set.prompts:
        if prompt.identity in seen:
            raise ValueError(f"{prompt.source}: held-out prompt is also a tuning prompt ({seen[prompt.identity]})")
    for prompts, least in ((tuning_set, MIN_TUNING), (held_out_set, MIN_HELD_OUT)):
        if len(prompts.prompts) < least:
            path = tuning if prompts is tuning_set else held_out
            raise ValueError(f"{path}: needs at least {least} {prompts.name} prompts, got {len(prompts.prompts)}")
    return tuning_set, held_out_set


def encoded_fingerprint(prompts: Sequence[EncodedPrompt]) -> str:
    """Hash over the prompts' token ids in order."""
    return _sha256(json.dumps([prompt.ids for prompt in prompts]))[:16]


def encode_prompts(
    prompt_set: PromptSet, model: Encoder, *, room: int, generation_config: Any = None
) -> tuple[EncodedPrompt, ...]:
    """Token ids of every prompt; see `layerskip.prompts.encode_prompt` for `room` and what it raises.

    generation_config: what stands behind settings that a prompt's record leaves out.
    """
    return tuple(
        EncodedPrompt(
            prompt.prompt_id,
            prompt.group,
            encode_prompt(prompt, model, room=room),
            is_text=prompt.kind == "text",
            sampling=_sampling_of(prompt, generation_config),
        )
        for prompt in prompt_set.prompts
    )


def split_held_out(
    prompts: Sequence[EncodedPrompt], num_reporting: int
) -> tuple[tuple[EncodedPrompt, ...], tuple[EncodedPrompt, ...]]:
    """(prompts that choose among finalists, prompts that report): half each, at most `num_reporting`, in file order.

    The first half reports. Below 16 all report, and none is left to choose: fewer than eight would choose badly.
    """
    if len(prompts) < 2 * MIN_CHOOSING:
        return (), tuple(prompts[:num_reporting])
    half = min(num_reporting, (len(prompts) + 1) // 2)
    return tuple(prompts[half : 2 * half]), tuple(prompts[:half])


def in_regime(prompts: Sequence[EncodedPrompt], sampling: Sampling) -> tuple[EncodedPrompt, ...]:
    """The prompts that a regime is tuned on: those whose records say nothing of how tokens are chosen, or say this."""
    return tuple(one for one in prompts if one.sampling in (None, sampling))


def _sampling_of(prompt: Prompt, generation_config: Any) -> Sampling | None:
    if not prompt.settings:
        return None
    try:
        return Sampling.of(SamplingParams.from_generation_config(generation_config, **prompt.settings))
    except ValueError as error:
        raise ValueError(f"{prompt.source}: {error}") from None


def _split(prompts: tuple[Prompt, ...], path: str, *, by_group: bool) -> tuple[PromptSet, PromptSet]:
    if len(prompts) < MIN_TO_SPLIT:
        raise ValueError(
            f"{path}: without --held-out the prompts are split, which needs at least {MIN_TO_SPLIT}, got {len(prompts)}"
        )
    # Group by group where groups count, or chance would leave small ones without held-out prompts.
    parts = [of_group(prompts, name) for name in {one.group for one in prompts}] if by_group else [prompts]
    chosen: set[tuple[str, str]] = set()
    for part in parts:
        chosen.update(_chosen_of(part, MIN_IN_GROUP if by_group else MIN_HELD_OUT))
    return (
        PromptSet("tuning", tuple(prompt for prompt in prompts if prompt.identity not in chosen)),
        PromptSet("held-out", tuple(prompt for prompt in prompts if prompt.identity in chosen)),
    )


def _chosen_of(prompts: Sequence[Prompt], least: int) -> set[tuple[str, str]]:
    """The identities of a third of them, but at least so many.

    Each way to choose tokens that has prompts enough is split apart, for its regime is tuned on them alone.
    """
    ways: dict[Sampling | None, list[Prompt]] = {}
    for prompt in prompts:
        ways.setdefault(_sampling_of(prompt, None), []).append(prompt)
    enough = MIN_TUNING + least
    large = [part for part in ways.values() if len(part) >= enough]
    others = [prompt for part in ways.values() if len(part) < enough for prompt in part]
    chosen: set[tuple[str, str]] = set()
    for part, at_least in (*((one, least) for one in large), (others, 0 if large else least)):
        chosen.update(sorted(prompt.identity for prompt in part)[: max(at_least, len(part) // 3)])
    return chosen


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
