"""Hugging Face's own ways to decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import CompileConfig, StaticCache
from transformers.generation.streamers import BaseStreamer

from layerskip.benchmark.names import HF_ASSISTANT, HF_COMPILED, HF_EARLY_EXIT, HF_GENERATE, HF_MTP, HF_PROMPT_LOOKUP
from layerskip.benchmark.ways import CannotRun, Refused, Sample, Stopwatch
from layerskip.config.decode_config import DecodeConfig, DraftWeights
from layerskip.config.hub import locate_weights
from layerskip.drafters.draft_weights import other_tokens
from layerskip.huggingface.loading import load_pretrained
from layerskip.huggingface.mtp import generates_with, load_mtp
from layerskip.model import LayerSkipModel

LOOKUP_TOKENS = 10
"""Draft tokens of a prompt lookup: the number that Hugging Face's own documentation uses."""
_MAX_REASON = 200
_GREEDY = {"do_sample": False, "repetition_penalty": 1.0}
_NO_STOP_STRINGS = {"stop_strings": None}
"""As our own rows decode: what a generation config says of sampling, penalties and stop strings is left out."""


class HuggingFaceWay:
    """`model.generate` with some arguments, greedy, batch 1.

    Timed by a streamer, which `generate` calls once for the prompt and then once a step (once a round when assisted),
    with tokens that it has copied to the host: as our own loop hands over the tokens of each step. Assisted generation
    drafts before its first target forward; that round and all its tokens count as the prompt's part.
    """

    def __init__(
        self,
        name: str,
        model: LayerSkipModel,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """settings: what `generate` takes from `model.generation_config` alone, set for the time of a run."""
        self.name = name
        self.settings: dict[str, object] = {
            key: value if isinstance(value, str | int | float) else str(value)
            for key, value in {**(arguments or {}), **(settings or {})}.items()
        }
        self._model = model
        self._arguments = dict(arguments or {})
        self._generation_settings = _NO_STOP_STRINGS | dict(settings or {})

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        model: Any = self._model.model
        watch = Stopwatch(self._model.engine)
        try:
            ids = torch.tensor([list(prompt_ids)], device=self._model.device)
            with _settings(model, self._generation_settings):
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_new_tokens,
                    num_beams=1,
                    streamer=_Arrivals(watch),
                    tokenizer=self._model.tokenizer,
                    **_GREEDY,
                    **self._arguments,
                    **self._cache(len(prompt_ids) + max_new_tokens),
                )
            emitted = output[0, len(prompt_ids) :].tolist()
            return watch.stop(emitted)
        except Exception as error:  # whatever it is, it is a fact about this row
            raise CannotRun(_one_line(error)) from error

    def _cache(self, _capacity: int) -> dict[str, Any]:
        """Arguments that hand `generate` a cache for so many tokens; none leaves that to `generate`."""
        return {}


class CompiledWay(HuggingFaceWay):
    """`generate` with its compiled forward and one static cache for all runs.

    Given the name of a cache instead, `generate` makes a new one on every call, which on a GPU compiles or records
    anew: its graphs know the cache's buffers by address. Only a text that does not fit makes a larger one.
    """

    def __init__(self, model: LayerSkipModel) -> None:
        compile_config = CompileConfig()
        # Without it, `generate` compiles on accelerators alone.
        compile_config._compile_all_devices = True
        super().__init__(HF_COMPILED, model, {"compile_config": compile_config})
        self.settings["past_key_values"] = "one StaticCache, reset before every run"
        self._static: StaticCache | None = None
        self._capacity = 0

    def _cache(self, capacity: int) -> dict[str, Any]:
        if self._static is None or self._capacity < capacity:
            model: Any = self._model.model
            self._static, self._capacity = StaticCache(config=model.config, max_cache_len=capacity), capacity
        self._static.reset()
        return {"past_key_values": self._static}


class MtpWay(HuggingFaceWay):
    """`generate` with the multi-token-prediction layers of the model's checkpoint, one draft token for each, which are
    read once and not at every call."""

    def __init__(self, model: LayerSkipModel) -> None:
        super().__init__(HF_MTP, model, {"use_mtp": True})
        self._mtp = load_mtp(model.adapter)

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Sample:
        with generates_with(self._mtp):
            return super().run(prompt_ids, max_new_tokens)


class _Arrivals(BaseStreamer):  # type: ignore[misc]
    """Tells a stopwatch of the tokens that come after the prompt."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._watch.tokens_came(value.numel())
        self._has_prompt = True

    def end(self) -> None:
        pass


def huggingface_ways(
    model: LayerSkipModel, config: DecodeConfig | None, names: Sequence[str], *, compiled: bool | None = None
) -> tuple[list[HuggingFaceWay], list[Refused]]:
    """The rows asked for, as far as they can be tried.

    compiled: whether to run `generate` compiled; None is yes on a GPU, no on a CPU.
    """
    ways: list[HuggingFaceWay] = []
    refused: list[Refused] = []
    if HF_GENERATE in names:
        ways.append(HuggingFaceWay(HF_GENERATE, model))
    if HF_COMPILED in names:
        if compiled or (compiled is None and model.device.type == "cuda"):
            ways.append(CompiledWay(model))
        else:
            reason = "off: give --compile; on a CPU it compiles for half a minute and more"
            refused.append(Refused(HF_COMPILED, reason if compiled is None else "off: --no-compile"))
    if HF_EARLY_EXIT in names:
        exit_layer = _exit_layer(config)
        if config is None or exit_layer is None:
            refused.append(Refused(HF_EARLY_EXIT, "needs a config whose mask skips a layer whole, not the first"))
        else:
            ways.append(_early_exit(model, config, exit_layer))
    if HF_ASSISTANT in names:
        weights = None if config is None else config.draft_weights
        if config is None or weights is None or weights.drafter != "draft_model":
            refused.append(Refused(HF_ASSISTANT, "needs a config that drafts by a draft model"))
        else:
            ways.append(_assistant(model, config, weights))
    if HF_MTP in names:
        try:
            ways.append(MtpWay(model))
        except ValueError as error:
            refused.append(Refused(HF_MTP, str(error)))
    if HF_PROMPT_LOOKUP in names:
        ways.append(HuggingFaceWay(HF_PROMPT_LOOKUP, model, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}))
    return ways, refused


def _exit_layer(config: DecodeConfig | None) -> int | None:
    """The first layer that the draft skips whole; None if there is none or nothing would be left before it."""
    if config is None or not config.drafts_by_mask:
        return None
    return next((layer for layer in config.skip_mask.skipped_layers[:1] if layer > 0), None)


def _early_exit(model: LayerSkipModel, config: DecodeConfig, exit_layer: int) -> HuggingFaceWay:
    # `generate` ignores these three as arguments: its drafting part reads the model's generation config.
    settings = {
        "num_assistant_tokens": config.gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": config.draft_threshold,
    }
    return HuggingFaceWay(HF_EARLY_EXIT, model, {"assistant_early_exit": exit_layer}, settings)


def _assistant(model: LayerSkipModel, config: DecodeConfig, weights: DraftWeights) -> HuggingFaceWay:
    """The same draft model; `generate` reads what it follows from that model's generation config. With another
    tokenizer it is told of both, and encodes anew what is drafted, as ours does."""
    loaded = load_pretrained(locate_weights(weights.path), device=model.device, dtype=model.dtype)
    assistant: Any = loaded[0]
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = config.gamma, "constant"
    settings.assistant_confidence_threshold = config.draft_threshold
    other = {"assistant_tokenizer": loaded[1]} if other_tokens(model.tokenizer, loaded[1]) else {}
    way = HuggingFaceWay(HF_ASSISTANT, model, {"assistant_model": assistant, **other})
    way.settings = {
        "assistant_model": weights.path,
        **({"assistant_tokenizer": weights.path} if other else {}),
        "num_assistant_tokens": config.gamma,
        "assistant_confidence_threshold": config.draft_threshold,
    }
    return way


@contextmanager
def _settings(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """`settings` on the model's generation config; on every exit that and the number of layers are what they were."""
    generation_config = model.generation_config
    before = {name: getattr(generation_config, name) for name in settings}
    # An early exit sets the number of layers while it drafts, and an exception there leaves it so.
    base_config = getattr(model, model.base_model_prefix, model).config
    num_layers = base_config.num_hidden_layers
    try:
        for name, value in settings.items():
            setattr(generation_config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(generation_config, name, value)
        base_config.num_hidden_layers = num_layers


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "…"
