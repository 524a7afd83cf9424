"""Decode under a decode config through Hugging Face's own `model.generate(..., custom_generate=...)`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from layerskip.config.decode_config import DecodeConfig
from layerskip.decoding.loop import DecodeLoop, DecodeRequest
from layerskip.decoding.stats import DecodeStats
from layerskip.drafters import TextStore
from layerskip.model import LayerSkipModel
from layerskip.rounds.penalties import LogitEdits
from layerskip.rounds.sampling import Sampler, SamplingParams

# Per processor the attribute that holds its number and what this decoder has of that meaning, in the order in which
# `generate` applies them and this decoder does too.
_PROCESSORS: dict[type[LogitsProcessor], tuple[str, str]] = {
    SequenceBiasLogitsProcessor: ("sequence_bias", "bias"),
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    MinLengthLogitsProcessor: ("min_length", "min_new_tokens"),
    MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
_HARMLESS_INPUTS = frozenset({"past_key_values", "use_cache", "logits_to_keep", "cache_position", "synced_gpus"})
"""What `generate` prepares for its own loop. Ours has a cache of its own, and one process."""
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class CustomGenerate:
    """The decoding loop that `model.generate(**inputs, custom_generate=this)` calls after its usual preparation.

    Returns what `generate` returns: the ids (1, prompt + emitted), or a `GenerateDecoderOnlyOutput` with `sequences`
    alone where `return_dict_in_generate` asks for one. Lengths, end-of-text ids, sampling settings, streamer and
    stopping criteria (called with ids and None) are `generate`'s. Sampling draws from torch's global generator.
    Not to be had: batches, padding, beams, assistants, other logits processors, scores, a cache given or returned. Each
    of these raises; `generate` itself refuses `stop_strings` beside a callable (use a `StopStringCriteria`).

    Make it once and pass the same object to every call: the first call with a model wraps it (two short forwards, and
    on the fused engine a second copy of its layers), later ones with that model reuse this until its weights change. It
    holds the latest model.
    Of a config with regimes each call follows the setting for its own sampling (`DecodeConfig.for_sampling`).
    Raises: ValueError naming the argument, the rule and the value got, before anything is decoded.
    """

    stats: DecodeStats | None = None
    """Counters and seconds of the latest run."""

    def __init__(
        self,
        config: DecodeConfig,
        engine: str,
        text_store: TextStore | None = None,
        *,
        tokenizer: Any = None,
        allow_lossy: bool = False,
    ) -> None:
        self.config = config
        self.engine = engine
        self.text_store = text_store
        self.tokenizer = tokenizer
        self._allow_lossy = allow_lossy
        self._wrapped: LayerSkipModel | None = None
        self._weights: list[tuple[int, int, torch.dtype]] = []

    # The parameters are those by which `generate` calls; `model` comes first and by position.
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Iterable[LogitsProcessor] = (),
        stopping_criteria: Iterable[Any] = (),
        generation_config: GenerationConfig | None = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        settings = model.generation_config if generation_config is None else generation_config
        given = _arguments_of_generate(model)
        streamer = given.get("streamer") if streamer is None else streamer
        _check_method(settings, given)
        _check_inputs(input_ids, model_kwargs)
        params, edits = read_processors(
            logits_processor, do_sample=bool(settings.do_sample), num_prompt=input_ids.shape[1]
        )
        wrapped = self._wrap(model, given.get("tokenizer"))
        wrapped.check_text_store(self.text_store)
        if edits is not None:
            edits.check(wrapped.vocab_size)
        request = _request(input_ids, stopping_criteria, wrapped)
        stats = self.stats = DecodeStats()
        emitted: list[int] = []
        config = self.config.for_sampling(params)
        loop = DecodeLoop(wrapped.engine, config, Sampler(params, edits=edits), store=self.text_store)
        with closing(loop.run(request, stats)) as rounds:  # type: ignore[type-var]
            for one in rounds:
                emitted += one.ids
                if streamer is not None:
                    for token in one.ids:
                        streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, input_ids.new_tensor([emitted])], dim=-1)
        return GenerateDecoderOnlyOutput(sequences=sequences) if settings.return_dict_in_generate else sequences

    def _wrap(self, model: PreTrainedModel, tokenizer: Any) -> LayerSkipModel:
        if model.training:
            raise ValueError("model: must be in evaluation mode (call model.eval()), got training mode")
        weights = [(id(one), one._version, one.dtype) for one in model.parameters() if not one.is_inference()]
        if self._wrapped is None or self._wrapped.model is not model or weights != self._weights:
            self._wrapped = None  # before the next one is made: two copies of the layers might not fit
            known, is_lossy = self._tokenizer_for(model, tokenizer), self._allow_lossy
            self._wrapped = LayerSkipModel(model, known, self.config, engine=self.engine, allow_lossy=is_lossy)
            self._weights = weights
        return self._wrapped

    def _tokenizer_for(self, model: PreTrainedModel, given: Any) -> Any:
        """What a draft model's tokens are compared by: the model's own where nobody gives one."""
        if not any(one.drafter == "draft_model" for one in self.config.all_draft_weights):
            return None
        if self.tokenizer is None and given is None:
            with suppress(OSError, ValueError):
                return AutoTokenizer.from_pretrained(model.name_or_path)
        return given if self.tokenizer is None else self.tokenizer


def custom_generate(
    config: DecodeConfig | str | os.PathLike[str],
    *,
    group: str | None = None,
    engine: str | None = None,
    text_store: TextStore | None = None,
    tokenizer: Any = None,
    allow_lossy: bool = False,
) -> CustomGenerate:
    """A callable for `model.generate(..., custom_generate=...)`; see `CustomGenerate`.

    config: a decode config or the file of one, made for the model it will be used with. group: its setting for this
    prompt group. engine: `eager`, `fused` or `auto`; None is the one that the config was tuned with. text_store:
    earlier texts that the drafter `suffix` looks into; nothing is added to it here. tokenizer: the model's, which a
    `draft_model` needs; without it that which lies where the model was loaded from. allow_lossy: take a config with a
    `lossy` rule, under which the output is not `generate`'s.
    Raises: ValueError for a config that cannot be read, or is lossy without that, FileNotFoundError without a file.
    """
    loaded = config if isinstance(config, DecodeConfig) else DecodeConfig.load(config)
    tuned = loaded.provenance.engine if loaded.provenance is not None else None
    loaded.check_consent(allow_lossy=allow_lossy)
    return CustomGenerate(
        loaded.for_group(group), engine or tuned or "auto", text_store, tokenizer=tokenizer, allow_lossy=allow_lossy
    )


def read_processors(
    processors: Iterable[LogitsProcessor], *, do_sample: bool, num_prompt: int
) -> tuple[SamplingParams, LogitEdits | None]:
    """The sampling parameters, and what else changes logits, that do what these processors do one after the other.

    num_prompt: tokens of the prompt.
    Raises: ValueError for a processor of another kind, in another order or given twice: it would change the output.
    """
    values: dict[str, Any] = {"top_k": 0}
    edits: dict[str, Any] = {}
    order = list(_PROCESSORS)
    reached = -1
    for processor in processors:
        kind = type(processor)
        if kind not in _PROCESSORS or _is_unusual(processor):
            known = ", ".join(one.__name__ for one in order)
            raise ValueError(f"logits_processor: must be one of {known} with default options, got {kind.__name__}")
        if order.index(kind) <= reached:
            raise ValueError(
                f"logits_processor: each kind can be applied once, in generate's order, got a second or late "
                f"{kind.__name__} (give its value to generate instead)"
            )
        reached = order.index(kind)
        attribute, name = _PROCESSORS[kind]
        value = getattr(processor, attribute)
        if isinstance(processor, SequenceBiasLogitsProcessor):
            edits[name] = {ids[0]: bias for ids, bias in value.items()}
        elif isinstance(processor, (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)):
            least = value - num_prompt if isinstance(processor, MinLengthLogitsProcessor) else value
            edits |= {name: max(edits.get(name, 0), least), "ends": frozenset(processor.eos_token_id.tolist())}
        else:
            values[name] = value
    return SamplingParams(do_sample=do_sample, **values), LogitEdits(**edits) if edits else None


def _is_unusual(processor: Any) -> bool:
    """An option that this decoder has no word for."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    return (
        any(len(ids) > 1 for ids in getattr(processor, "sequence_bias", ()))
        or getattr(processor, "min_tokens_to_keep", 1) != 1
        or getattr(processor, "filter_value", -float("inf")) != -float("inf")
        or (ignored is not None and bool(torch.as_tensor(ignored).any()))
    )


def _arguments_of_generate(model: PreTrainedModel) -> Mapping[str, Any]:
    """The arguments of the `generate` call that is running us, from its frame; empty where there is none.

    `generate` drops `streamer` and `assistant_model` on the way to a callable (huggingface/transformers#40586 replaces
    the dictionary that holds them), and both would be ignored without a word. Can go once they arrive as arguments.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    try:
        while frame is not None:
            if frame.f_code is code and frame.f_locals.get("self") is model:
                return dict(frame.f_locals)
            frame = frame.f_back
        return {}
    finally:
        del frame


def _check_method(settings: GenerationConfig, given: Mapping[str, Any]) -> None:
    """Refuse what another decoding method is asked for, and outputs that this one does not have."""
    mode = settings.get_generation_mode(given.get("assistant_model"))
    if mode not in _MODES:
        raise ValueError(f"custom_generate: takes the place of greedy search and sampling alone, got {mode.value}")
    if (given.get("kwargs") or {}).get("past_key_values") is not None:
        raise ValueError("past_key_values: must not be given, this decoder fills a cache of its own; got one")
    if given.get("synced_gpus"):
        raise ValueError("synced_gpus: must be off, this decoder runs on one process; got True")
    if settings.return_dict_in_generate:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            if getattr(settings, name, None):
                raise ValueError(f"{name}: must be off, this decoder keeps none of them, got True")


def _check_inputs(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """One row of ids without padding and nothing beside it."""
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            "input_ids: must be one row (batch 1, num_return_sequences 1), LayerSkipModel.generate_batch takes more; "
            f"got shape {tuple(input_ids.shape)}"
        )
    length = input_ids.shape[1]
    if length == 0:
        raise ValueError("input_ids: must hold at least one token, got none (inputs_embeds are not supported)")
    for name, value in model_kwargs.items():
        if value is None or name in _HARMLESS_INPUTS or (isinstance(value, Mapping) and not value):
            continue
        if name == "attention_mask":
            if not bool((value == 1).all()) or value.shape != input_ids.shape:
                raise ValueError("attention_mask: must be all ones, padding is not supported; got other values")
        elif name == "position_ids":
            # Of models that see pictures several rows, alike where there is none.
            if value.shape[-1] != length or not bool((value == torch.arange(length, device=value.device)).all()):
                raise ValueError("position_ids: must count from 0, got other values")
        elif name in ("token_type_ids", "mm_token_type_ids"):
            if bool(value.any()):
                raise ValueError(f"{name}: must be all 0, pictures are not decoded here; got other values")
        else:
            raise ValueError(
                f"{name}: is an input of the model that this decoder does not pass on (pictures are not decoded here), "
                "got one"
            )


def _request(input_ids: torch.Tensor, criteria: Iterable[Any], wrapped: LayerSkipModel) -> DecodeRequest:
    """What `generate`'s stopping criteria ask for. Length and end-of-text need no call per token."""
    prompt_ids: list[int] = input_ids[0].tolist()
    max_length: int | None = None
    eos: frozenset[int] = frozenset()
    others = StoppingCriteriaList()
    for one in criteria:
        if type(one) is MaxLengthCriteria:
            max_length = one.max_length if max_length is None else min(max_length, one.max_length)
        elif type(one) is EosTokenCriteria:
            eos |= frozenset(one.eos_token_id.tolist())
        else:
            others.append(one)
    if max_length is None or max_length <= len(prompt_ids):
        raise ValueError(f"max_length: must be above the prompt's {len(prompt_ids)} tokens, got {max_length}")
    if wrapped.max_positions is not None and max_length > wrapped.max_positions:
        raise ValueError(
            f"max_new_tokens: prompt and new tokens must fit the model's {wrapped.max_positions} positions, "
            f"got {len(prompt_ids)} + {max_length - len(prompt_ids)}"
        )
    should_stop = _criteria_check(others, input_ids, max_length) if others else None
    return DecodeRequest(prompt_ids, max_length - len(prompt_ids), eos, should_stop)


def _criteria_check(
    criteria: StoppingCriteriaList, input_ids: torch.Tensor, max_length: int
) -> Callable[[Sequence[int]], bool]:
    """Asks Hugging Face's criteria after each token. Cost: theirs, one value written, one device sync."""
    ids = input_ids.new_zeros((1, max_length))
    ids[:, : input_ids.shape[1]] = input_ids

    def should_stop(context: Sequence[int]) -> bool:
        ids[0, len(context) - 1] = context[-1]
        return bool(criteria(ids[:, : len(context)], None).all())

    return should_stop
