"""LayerSkipModel: a Hugging Face causal LM as its own drafter."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StopStringCriteria

from layerskip.config.decode_config import DecodeConfig, DraftWeights, QuantizationName, number_format
from layerskip.config.hub import DECODE_CONFIG_NAME, HubArguments
from layerskip.config.skip_mask import DraftBits
from layerskip.decoding.loop import DecodeLoop, DecodeRequest, Emitted
from layerskip.decoding.prefix_cache import PrefixCache
from layerskip.decoding.stats import DecodeStats
from layerskip.decoding.text_stream import TextStream
from layerskip.drafters import TextStore
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.draft_weights import has_other_tokenizer
from layerskip.drafters.load_weights import WeightsLoader
from layerskip.engines import Engine, make_engine, tree_refusal
from layerskip.engines.batch import Batch, Slot
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.fused import FusedEngine
from layerskip.engines.native.layers import NativeLayers
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.device_map import DeviceMap
from layerskip.huggingface.loading import load_pretrained, resolve_device, weights_fingerprint
from layerskip.huggingface.placement import Placement
from layerskip.huggingface.quantization.products import lack_of_rounded_room
from layerskip.huggingface.quantization.weights import quantization_of
from layerskip.huggingface.rounding import RoundingSpread, is_reduced, measure_rounding
from layerskip.openmp import release_team
from layerskip.rounds.grammar import Grammar, GrammarTokens
from layerskip.rounds.logprobs import MAX_LOGPROBS, TokenLogprobs
from layerskip.rounds.penalties import LogitEdits
from layerskip.rounds.sampling import Sampler, SamplingParams

logger = logging.getLogger(__name__)
_MAX_NEW_TOKENS = 128
"""Where nobody says."""

Prompt = str | Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class GenerateOutput:
    """What one run emitted."""

    ids: list[int]
    """Emitted tokens, prompt excluded."""
    text: str
    """Their text, without special tokens unless these were asked for; empty without a tokenizer."""
    origins: list[str]
    """Per token: accepted, looked-up, recovered, bonus or target-only."""
    finish_reason: str | None
    """`length`, `eos` or `stop`; None where it was left before its end."""
    stats: DecodeStats
    sampled: bool = False
    """Whether tokens were drawn; False is greedy."""
    rejected: dict[int, list[int]] = field(default_factory=dict)
    """Draft tokens that verification threw away, by the place in `ids` of the token that stands for the first."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each of `ids`, where `logprobs` asked for them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens but the first, where `prompt_logprobs` asked for them."""


@dataclass(frozen=True)
class StreamPiece:
    """What one round, or one target-only step, added."""

    text: str
    ids: list[int]
    origins: list[str]
    rejected: list[int] = field(default_factory=list)
    """Draft tokens that verification threw away; the last of `ids` stands in their place, or where a sibling was
    accepted, the last two."""
    rejected_from: int = -1
    """Index in `ids` of the token in whose place the first of them stood."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each of `ids`, where `logprobs` asked for them."""


@dataclass(frozen=True)
class GenerateArguments:
    """Keyword arguments of `generate` and `stream`; names and defaults as in Hugging Face's `generate`.

    None means: what the model's own `generation_config` says.
    """

    max_new_tokens: int | None = None
    """128 where the generation config does not say either."""
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    """In [-2, 2]; subtracted from the logit of every token said so far behind the prompt, as in OpenAI's API."""
    frequency_penalty: float | None = None
    """In [-2, 2]; the same for each time that it was said."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, as `sequence_bias` of `generate` does."""
    min_new_tokens: int | None = None
    """No token ends the text before so many. Of a generation config it is refused."""
    logprobs: int | None = None
    """Of each new token its log-probability by the model alone, before penalties, temperature and cuts, and of so many
    tokens that are likeliest there; see `GenerateOutput.logprobs`."""
    prompt_logprobs: bool = False
    """With `logprobs`: of the prompt's tokens too, all of which are then computed, whatever the `prefix_cache` has."""
    eos_token_id: int | Sequence[int] | torch.Tensor | None = None
    """One or several end-of-text ids; an empty list never stops at one."""
    stop_strings: str | Sequence[str] | None = None
    """The text ends with the token that completes one of these."""
    seed: int | None = None
    generator: torch.Generator | None = None
    """On the model's device; not together with `seed`."""
    config: DecodeConfig | None = None
    """Overrides the model's decode config for this run."""
    group: str | None = None
    """Decode with the config's setting for this prompt group; None is the default setting."""
    text_store: TextStore | None = None
    """Earlier texts that the drafter `suffix` looks into besides this one. Nothing is added to it here."""
    continues_text: bool | None = None
    """Whether the emitted text is the rest of the prompt's, rather than what its ids say by themselves: some tokenizers
    drop the blank that a text begins with. None: where the prompt is given as text."""
    grammar: Grammar | None = None
    """What the output has to look like: `Grammar.json(schema)`, say."""
    skip_special_tokens: bool = True
    """Whether the emitted text leaves them out."""
    prefix_cache: PrefixCache | None = None
    """Earlier texts of this model; what the prompt begins with and one of them too is not computed again."""
    batch: Batch | None = None
    """In a run of which it is iterated; see `generate_batch`."""

    def __post_init__(self) -> None:
        count = self.max_new_tokens
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"max_new_tokens: must be a whole number of at least 1, got {count!r}")
        if self.config is not None and not isinstance(self.config, DecodeConfig):
            raise ValueError(f"config: must be a DecodeConfig (DecodeConfig.load reads a file), got {self.config!r}")
        if self.seed is not None and not isinstance(self.seed, Integral):
            raise ValueError(f"seed: must be a whole number, got {self.seed!r}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(
                f"grammar: must be a Grammar (Grammar.json makes one of a schema), got {self.grammar!r:.80}"
            )
        for name, most in (("min_new_tokens", math.inf), ("logprobs", MAX_LOGPROBS)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 0 <= value <= most):
                rule = "of at least 0" if most == math.inf else f"in 0..{most}"
                raise ValueError(f"{name}: must be a whole number {rule}, got {value!r}")
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("prompt_logprobs: needs logprobs, which says how many of each place")
        self._check_bias()
        if self.seed is not None and self.generator is not None:
            raise ValueError("seed: give either a seed or a generator, not both")

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias: must map token ids to numbers, got {self.logit_bias!r:.80}")
        for one, value in self.logit_bias.items():
            if type(one) is not int or not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"logit_bias: must map token ids to finite numbers, got {one!r:.80}: {value!r:.80}")


class LayerSkipModel:
    """Wraps a causal LM; decodes it under a `DecodeConfig`, losslessly unless that has a `lossy` rule.

    The config's `drafter` says who proposes tokens: the model with layers skipped, a lookup in the text, or both.
    The model itself is not changed: gates are put on for the time of a run and taken off after it. One run at a time.
    Without a config it decodes plainly (gamma = 0), in the same loop. engine: `eager` runs the model's own modules and
    serves every supported architecture; `fused` runs lean layers at the cost of a second copy of most weights, made
    here: change the model (merge an adapter, move it) before wrapping it; `cuda_graph` records
    steps and whole rounds of either on a CUDA device, lean layers compiled where that is faster; `auto` takes the
    fastest (`engine_name` and `engine_reason` say which and why).

    allow_lossy: take configs with a `lossy` rule, under which the output is not the target's own.

    Raises: ValueError (UnsupportedModelError) if the architecture cannot be decoded so, if the model is in training
    mode, if the config was made for another model, or if it is lossy without `allow_lossy`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        config: DecodeConfig | str | os.PathLike[str] | None = None,
        *,
        engine: str = "auto",
        allow_lossy: bool = False,
    ) -> None:
        if model.training:
            raise ValueError("model: must be in evaluation mode (call model.eval()): dropout would change its tokens")
        self.model = model
        self.tokenizer = tokenizer
        self._adapter = ModelAdapter(model)
        if config is not None and not isinstance(config, DecodeConfig):
            config = DecodeConfig.load(config)
        self._engine_asked, self._allow_lossy = engine, allow_lossy
        self._asked_for_siblings: Engine | None = None
        self._siblings_refusal: str | None = None
        self._choose_engine(with_graphs=config is None or not config.lossy_rules)
        self._fingerprint: str | None = None
        self._stop_criteria: dict[tuple[str, ...], StopStringCriteria] = {}
        self.rounding: RoundingSpread | None = None
        """What a difference between two greedy outputs is judged by in reduced precision; see `rounding_spread`."""
        self._config = DecodeConfig.plain(self.num_layers)
        if config is not None:
            self.config = config
        release_team()  # a server decodes in another thread than the one that loads

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        config: DecodeConfig | str | os.PathLike[str] | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        quantization: QuantizationName | None = None,
        engine: str = "auto",
        device_map: DeviceMap | None = None,
        looks_for_config: bool = True,
        allow_lossy: bool = False,
        **hub_arguments: Any,
    ) -> LayerSkipModel:
        """Load model and tokenizer as `AutoModelForCausalLM` does, safetensors only, in evaluation mode; what that does
        not know and sees pictures too, such as Mistral 3 and Qwen3-VL, as `AutoModelForImageTextToText`.

        config: None takes the `decode_config.json` that lies next to the model (`DecodeConfig.save_pretrained`), as
        Hugging Face takes a `generation_config.json`; where there is none, or with looks_for_config=False, the model
        decodes plainly.
        device: `auto` is CUDA where there is one, else the CPU. dtype: `float32`, `bfloat16`, `float16`, by name or as
        of torch; `auto` is what the config was tuned in, or else the checkpoint's own, but on a CPU float32 unless that
        is bfloat16 and kernels decode it (which needs a C++ compiler, an engine other than `eager`, and an architecture
        that they serve). engine: see the class.
        quantization: `int8` rounds the weights of linear modules to 8 bits with a scale for each output, the output
        embedding's among them, `int4` to 4 bits with a scale and a zero for 32 inputs, and the output embedding's to 8
        (as torchao does; needs the extra `quantized`). What is decoded is then that model's output. None: what the
        config was tuned with, or else the checkpoint as it is, which may be quantised by itself.
        device_map: for a model larger than one device, in place of `device`: `auto`, `balanced`, `balanced_low_0`,
        `sequential`, or module names and their devices (a number, `cuda:N`, `cpu`, `disk`). Needs the extra `large`.
        Whole layers go to several devices and, what they cannot hold, to main memory and disk; the engine is `eager`.
        allow_lossy: see the class.
        hub_arguments: `revision`, `trust_remote_code`, `attn_implementation`, `local_files_only`, and with a device_map
        `max_memory` and `offload_folder`, passed on.
        Raises: ValueError in one line for an unknown model, a folder without weights, a device that is not there,
        tensor parallelism.
        """
        if config is not None and not isinstance(config, DecodeConfig):
            config = DecodeConfig.load(config)
        if config is None and looks_for_config:
            config = config_next_to(name_or_path, hub_arguments)
        if config is not None:
            config.check_consent(allow_lossy=allow_lossy)  # loading may take minutes
        if (tuned := None if config is None else config.provenance) is not None:
            quantization = quantization or tuned.quantization
            dtype = tuned.dtype if dtype == "auto" else dtype
        load = partial(
            load_pretrained,
            name_or_path,
            device=device,
            quantization=quantization,
            device_map=device_map,
            **hub_arguments,
        )
        wrap = partial(cls, config=config, engine=engine, allow_lossy=allow_lossy)
        has_kernels = device_map is None and engine != "eager" and _has_kernels(resolve_device(device))
        model = wrap(*load(dtype=dtype, cpu_bfloat16=has_kernels))
        if has_kernels and dtype == "auto" and is_reduced(model.dtype) and not model.engine.batch_invariant:
            del model  # kernels do not serve it
            model = wrap(*load(dtype="float32"))
        return model

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        **arguments: Any,
    ) -> LayerSkipModel:
        """The model that an exported config names, under that config, as it was tuned: in what number format, on which
        engine.

        Arguments as for `from_pretrained`. Warns where torch uses another number of CPU threads than the search did:
        that is the process's own setting, so it is not changed here.
        """
        config = DecodeConfig.load(path)
        tuned = config.provenance
        if tuned is None:
            raise ValueError(f"{path}: provenance: is required to know the model; load it with from_pretrained")
        arguments.setdefault("engine", tuned.engine or "auto")
        name = resolve_model_path(tuned.model, Path(path))
        model = cls.from_pretrained(name, config=config, device=device, dtype=dtype, **arguments)
        threads = torch.get_num_threads()
        if model.device.type == "cpu" and tuned.num_threads not in (None, threads):
            logger.warning(
                "%s was tuned with %d CPU threads, torch uses %d here: call torch.set_num_threads(%d) first",
                path,
                tuned.num_threads,
                threads,
                tuned.num_threads,
            )
        return model

    @property
    def config(self) -> DecodeConfig:
        """How `generate` decodes unless told otherwise. Setting it checks that it fits this model."""
        return self._config

    @config.setter
    def config(self, config: DecodeConfig) -> None:
        recorded = self._engine if isinstance(self._engine, CudaGraphEngine) else None
        if recorded is not None and self._engine_asked == "auto" and not self._may_record(config, recorded):
            recorded.close()
            self._choose_engine(with_graphs=False)
        self.check_config(config)
        self._config = config

    def _may_record(self, config: DecodeConfig, engine: CudaGraphEngine) -> bool:
        if config.lossy_rules or (config.has_branches and self.siblings_refusal is not None):
            return False
        return engine.lean is not None or not any(one.reads_states for one in config.all_draft_weights)

    def check_config(self, config: DecodeConfig) -> None:
        """Raises ValueError if the config is lossy and that was not allowed, if a mask does not fit this model or the
        config was made for other weights; or draft weights do not, which are loaded here where they are not yet."""
        config.check_consent(allow_lossy=self._allow_lossy)
        if config.lossy_rules and self.lossy_refusal is not None:
            raise ValueError(f"lossy: needs {self.lossy_refusal}")
        self._adapter.know_draft_ids(config.draft_ids or {})
        for path, setting in config.named_settings():
            try:
                self._adapter.check_mask(setting.skip_mask)
                bits = setting.skip_mask.bits
                if bits is not None and (refusal := self._engine.bits_refusal(bits)) is not None:
                    raise ValueError(f"skip_mask: int{bits} drafts need {refusal}")
            except ValueError as error:
                raise ValueError(f"{path}{error}") from None
        if config.has_branches and self.siblings_refusal is not None:
            raise ValueError(f"siblings and trees: need {self.siblings_refusal}")
        made_for = config.provenance
        if made_for is not None and made_for.weights_fingerprint != self.weights_fingerprint():
            raise ValueError(
                f"provenance.weights_fingerprint: the config was made for {made_for.model} "
                f"({made_for.weights_fingerprint}), this model is {self.weights_fingerprint()}"
            )
        for _, one in config.named_settings():
            if one.draft_weights is not None:
                self._adapter.check_vocab("draft_weights", one.draft_weights.draft_vocab)
                self._weights_loader.load(one.draft_weights)
                if one.siblings and has_other_tokenizer(self._engine, one.draft_weights):
                    raise ValueError(
                        f"siblings: must be 0 where the draft model has another tokenizer, as {one.draft_weights.path} "
                        f"has; got {one.siblings}"
                    )

    @property
    def siblings_refusal(self) -> str | None:
        """Why `DecodeConfig.siblings` must be 0 on this model and engine, and no tree drafted; None where not so. See
        `tree_refusal`."""
        if self._asked_for_siblings is not self._engine:
            self._siblings_refusal = tree_refusal(self._engine, self._adapter)
            self._asked_for_siblings = self._engine
        return self._siblings_refusal

    @property
    def lossy_refusal(self) -> str | None:
        """Why `DecodeConfig.lossy` must be left out on this engine; None where it need not."""
        recorded = self._engine.name == "cuda_graph"
        return f"the engine eager or fused, got {self._engine.name}" if recorded else None

    def _choose_engine(self, *, with_graphs: bool) -> None:
        choice = make_engine(self._engine_asked, self._adapter, with_graphs=with_graphs)
        self._engine, self.engine_reason = choice.engine, choice.reason

    @property
    def _weights_loader(self) -> WeightsLoader:
        return WeightsLoader(
            self._engine, self._adapter, self.tokenizer, self._vocabulary_size, self.weights_fingerprint
        )

    @property
    def mtp_refusal(self) -> str | None:
        """Why no multi-token-prediction layer of the model's own checkpoint may draft; None where one may be loaded."""
        return self._weights_loader.mtp_refusal

    def mtp_weights(self) -> DraftWeights:
        """The first multi-token-prediction layer of the model's own checkpoint, loaded, as a config names it.

        Cost: its weights are read once. Raises: ValueError where there is none, or it cannot draft.
        """
        return self._weights_loader.own_layer()

    def check_text_store(self, store: TextStore | None) -> None:
        """Raises ValueError if it holds token ids that this model does not have, which no forward could take."""
        if store is not None and store.largest_id >= self._vocabulary_size:
            raise ValueError(
                f"text_store: token ids must be in 0..{self._vocabulary_size - 1}, got {store.largest_id}; "
                "were they another tokenizer's?"
            )

    @property
    def num_layers(self) -> int:
        return self._adapter.num_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return self._adapter.vocab_size

    @property
    def can_narrow(self) -> bool:
        """Whether a mask may have a `draft_vocab`."""
        return self._adapter.can_narrow

    def bits_refusal(self, bits: DraftBits) -> str | None:
        """Why a draft cannot compute with weights of so many bits: what that needs; None where it can."""
        return self._engine.bits_refusal(bits)

    def bits_lack(self, bits: DraftBits) -> str:
        """Why memory has no room for the copy of the weights in so many bits, which the first such draft makes; empty
        where it has."""
        return lack_of_rounded_room(self._adapter.matrices, bits)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self._adapter.device

    @property
    def placement(self) -> Placement:
        """All devices that compute, and whether weights are offloaded."""
        return self._adapter.placement

    @property
    def dtype(self) -> torch.dtype:
        return self._adapter.dtype

    @property
    def max_positions(self) -> int | None:
        """Longest text (prompt and output) the model is made for; None if unknown or unlimited."""
        return self._adapter.max_positions

    @property
    def engine(self) -> Engine:
        """How forwards are executed; for measuring steps one by one."""
        return self._engine

    @property
    def engine_name(self) -> str:
        return self._engine.name

    @property
    def quantization(self) -> QuantizationName | None:
        """What its weights were rounded to after loading; None for a checkpoint as it is."""
        return quantization_of(self.model)

    @property
    def number_format(self) -> str:
        """See `decode_config.number_format`."""
        return number_format(str(self.dtype).removeprefix("torch."), self.quantization)

    @property
    def model_class(self) -> str:
        return type(self.model).__name__

    @property
    def adapter(self) -> ModelAdapter:
        """What is known of the architecture; for `doctor` and tests."""
        return self._adapter

    @property
    def whole_layers_only(self) -> tuple[bool, ...]:
        """Per layer: attention and MLP cannot be skipped apart."""
        return tuple(not apart for apart in self._adapter.sublayers_skippable)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends a text unless `eos_token_id` says otherwise."""
        generation_config: Any = self.model.generation_config
        return _id_set(generation_config.eos_token_id)

    def weights_fingerprint(self) -> str:
        """Short hash of architecture and sampled weights, the same for every dtype and device. Computed once."""
        if self._fingerprint is None:
            self._fingerprint = weights_fingerprint(self.model)
        return self._fingerprint

    @property
    def _vocabulary_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def encode(self, text: str) -> list[int]:
        """Token ids as the tokenizer makes them by default, special tokens included."""
        if self.tokenizer is None:
            raise ValueError("prompt: this model has no tokenizer, give token ids instead of text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt: must be text of whole characters, got {text[error.start]!a}") from None
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def generate(self, prompt: Prompt, **arguments: Any) -> GenerateOutput:
        """Decode a whole continuation. Arguments: see `GenerateArguments`; unknown ones raise TypeError.

        Output is token-identical to that of Hugging Face's `generate` in float32, and identical up to ties in bfloat16
        and float16; sampled output too, where both draw from the same state of a generator: under any config without a
        `lossy` rule, the same seed gives the same text.
        Raises: ValueError naming the argument for bad values and for prompts longer than the model's positions.
        """
        stream = self.stream(prompt, **arguments)
        for _ in stream:
            pass
        return stream.output()

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_batch_size: int = 8,
        max_drafting: int | None = None,
        **arguments: Any,
    ) -> list[GenerateOutput]:
        """`generate` for each prompt with these arguments, the outputs in the same order; up to max_batch_size texts at
        a time share forwards, and where one ends the next begins. With a `seed` the i-th has seed + i, from i = 0.

        A step of several texts takes hardly longer than of one, so a draft saves less: while more than max_drafting are
        decoded, by default what the config says or else 2, none of them drafts. The output is that of `generate` for
        each alone, to the bit where sublayers are compiled for this CPU; else up to ties.
        Raises: ValueError as `generate`, and without the engine `fused`; for a `generator`, which has no order here.
        """
        given = (
            ("max_batch_size", max_batch_size, 1),
            ("max_drafting", 0 if max_drafting is None else max_drafting, 0),
        )
        for name, value, least in given:
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: must be a whole number of at least {least}, got {value!r}")
        if isinstance(prompts, str):
            raise ValueError(f"prompts: must be several, got a text: {prompts!r:.80}")
        if arguments.get("generator") is not None:
            raise ValueError("generator: of a batch each text draws by itself; give a seed")
        batch, seed = Batch(max_drafting), arguments.pop("seed", None)
        streams = [
            self.stream(one, **arguments, seed=seed + i if isinstance(seed, Integral) else seed, batch=batch)
            for i, one in enumerate(prompts)
        ]
        batch.run_all([partial(deque, one, 0) for one in streams], max_batch_size)
        return [one.output() for one in streams]

    @property
    def batch_refusal(self) -> str | None:
        """What decoding in a batch needs that is not so here; None where it may be."""
        if not isinstance(self._engine, FusedEngine):
            return f"the engine fused, it is {self._engine.name}"
        models = [one for one in self._engine.draft_weights.values() if isinstance(one, DraftModel)]
        other = next((one.engine.name for one in models if not isinstance(one.engine, FusedEngine)), None)
        return None if other is None else f"a draft model on the engine fused, it is on {other}"

    def _slot(self, batch: Batch, config: DecodeConfig) -> Slot:
        if self.batch_refusal is not None:
            raise ValueError(f"batch: needs {self.batch_refusal}")
        assert isinstance(self._engine, FusedEngine)
        most = config.drafts_among if batch.max_drafting is None else batch.max_drafting
        slot = Slot(self._engine, batch, most)
        if (weights := config.draft_weights) is not None:
            found = self._engine.draft_weights[weights.path]
            if isinstance(found, DraftModel):
                assert isinstance(found.engine, FusedEngine)
                found = replace(found, engine=Slot(found.engine, batch, most, drafts=True))
            slot.draft_weights = {weights.path: found}
        return slot

    def stream(self, prompt: Prompt, **arguments: Any) -> GenerationStream:
        """Decode piece by piece: iterate for a `StreamPiece` per round, then read `.stats` or `.output()`.

        Of a config with regimes it follows the setting that `DecodeConfig.for_sampling` gives; `.config` tells which.
        Leaving the iteration early (break, an exception, `.close()`) frees the cache and the model.
        """
        given = GenerateArguments(**arguments)
        self.check_text_store(given.text_store)
        if given.prefix_cache is not None:
            given.prefix_cache.check_model(self.model)
        config = self._config if given.config is None else given.config
        if given.config is not None:
            self.check_config(given.config)
        if given.group is not None:
            config = config.for_group(given.group)
        sampler = self._sampler(given)
        config = config.for_sampling(sampler.params)
        return GenerationStream(
            DecodeLoop(
                self._engine if given.batch is None else self._slot(given.batch, config),
                config,
                sampler,
                store=given.text_store,
            ),
            self._request(prompt, given),
            self.tokenizer,
            sampled=not sampler.greedy,
            continues_text=isinstance(prompt, str) if given.continues_text is None else given.continues_text,
            skip_special_tokens=given.skip_special_tokens,
        )

    def sampler(self, **arguments: Any) -> Sampler:
        """What `generate` with these arguments shapes logits with and chooses tokens by."""
        return self._sampler(GenerateArguments(**arguments))

    def _sampler(self, given: GenerateArguments) -> Sampler:
        grammar = None if given.grammar is None else self._grammar_tokens.state(given.grammar)
        return Sampler(
            self._sampling(given), self._generator(given), grammar, self._edits(given), num_logprobs=given.logprobs
        )

    def _edits(self, given: GenerateArguments) -> LogitEdits | None:
        bias = {} if given.logit_bias is None else given.logit_bias
        least = given.min_new_tokens or 0
        if least and given.grammar is not None:
            raise ValueError("min_new_tokens: not together with a grammar, which says where the text ends")
        edits = LogitEdits(bias, least, self._ends(given) if least else frozenset())
        edits.check(self.vocab_size)
        return edits if bias or least else None

    def _ends(self, given: GenerateArguments) -> frozenset[int]:
        return self.eos_token_ids if given.eos_token_id is None else _id_set(given.eos_token_id)

    @cached_property
    def _grammar_tokens(self) -> GrammarTokens:
        return GrammarTokens(self.tokenizer, self.vocab_size, sorted(self.eos_token_ids))

    def _request(self, prompt: Prompt, given: GenerateArguments) -> DecodeRequest:
        max_new_tokens = self._default(given.max_new_tokens, "max_new_tokens") or _MAX_NEW_TOKENS
        return DecodeRequest(
            prompt_ids=self._prompt_ids(prompt, max_new_tokens),
            max_new_tokens=max_new_tokens,
            eos_token_ids=self._ends(given),
            should_stop=self._stop_check(self._default(given.stop_strings, "stop_strings")),
            prefix_cache=None if given.prompt_logprobs else given.prefix_cache,
            prompt_logprobs=given.prompt_logprobs,
        )

    def target_logits(self, ids: Sequence[int], *, num_logits: int) -> torch.Tensor:
        """The full model's logits (num_logits, V) at the last positions of `ids`, in one forward from scratch."""
        with self._engine.session(len(ids)):
            return self._engine.forward(torch.tensor(list(ids), device=self.device), num_logits=num_logits).clone()

    def rounding_spread(self, prompts: Sequence[Sequence[int]]) -> RoundingSpread:
        """What rounding alone does to logits in this model's dtype: `rounding`, measured on these prompts if it is not
        there yet. See `measure_rounding`."""
        if self.rounding is None:
            self.rounding = measure_rounding(self._adapter, prompts)
        return self.rounding

    def _sampling(self, given: GenerateArguments) -> SamplingParams:
        overrides = {one.name: getattr(given, one.name) for one in fields(SamplingParams)}
        return SamplingParams.from_generation_config(self.model.generation_config, **overrides)

    def _default(self, value: Any, name: str) -> Any:
        """An argument, or what the model's generation config says where it was not given."""
        return getattr(self.model.generation_config, name, None) if value is None else value

    def _generator(self, given: GenerateArguments) -> torch.Generator | None:
        if given.seed is None:
            return given.generator
        if not -(1 << 63) <= given.seed < 1 << 64:  # torch's own range
            raise ValueError(f"seed: must be in -2**63..2**64-1, got {given.seed}")
        return torch.Generator(device=self.device).manual_seed(int(given.seed))

    def _stop_check(self, stop_strings: str | Sequence[str] | None) -> Callable[[Sequence[int]], bool] | None:
        if not stop_strings:
            return None
        if self.tokenizer is None:
            raise ValueError("stop_strings: this model has no tokenizer to match them with")
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        if other := [one for one in strings if not isinstance(one, str)]:
            raise ValueError(f"stop_strings: must be text, got {other[0]!r}")
        if "" in strings:
            raise ValueError("stop_strings: must not be empty, every text ends with one that is")
        if (criteria := self._stop_criteria.get(tuple(strings))) is None:
            self._stop_criteria.clear()  # of a large vocabulary they take a second to make; most ask for the same ones
            criteria = self._stop_criteria[tuple(strings)] = StopStringCriteria(self.tokenizer, strings)
        most = criteria.maximum_token_len
        return lambda ids: bool(criteria(torch.tensor([ids[-most:]]), None).item())

    def _prompt_ids(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        if isinstance(prompt, str):
            ids = self.encode(prompt)
        else:
            try:
                tensor = torch.as_tensor(prompt)
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"prompt: must be text or token ids, got {type(prompt).__name__}") from None
            if tensor.ndim == 2 and tensor.shape[0] == 1:
                tensor = tensor[0]
            if tensor.ndim != 1:
                raise ValueError(f"prompt: must be text or one row of token ids, got shape {tuple(tensor.shape)}")
            if tensor.numel() and tensor.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"prompt: token ids must be int64 or int32, got {tensor.dtype}")
            ids = [int(i) for i in tensor.tolist()]
        if not ids:
            raise ValueError("prompt: must hold at least one token, got none")
        vocabulary = self._vocabulary_size
        outside = next((i for i in ids if not 0 <= i < vocabulary), None)
        if outside is not None:
            raise ValueError(f"prompt: token ids must be in 0..{vocabulary - 1}, got {outside}")
        if self.max_positions is not None and len(ids) + max_new_tokens > self.max_positions:
            raise ValueError(
                f"prompt: prompt and max_new_tokens must fit the model's {self.max_positions} positions, "
                f"got {len(ids)} + {max_new_tokens}"
            )
        return ids


class GenerationStream:
    """Iterator over the pieces of one run; holds the cache until it ends or is closed."""

    def __init__(
        self,
        loop: DecodeLoop,
        request: DecodeRequest,
        tokenizer: Any,
        *,
        sampled: bool,
        continues_text: bool,
        skip_special_tokens: bool,
    ) -> None:
        self.stats = DecodeStats()
        self.config = loop.config
        """What the run follows: of a config with regimes, the setting for this request's sampling."""
        self._sampled = sampled
        self._tokenizer = tokenizer
        self._run = loop.begin(request, self.stats)
        self._before = request.prompt_ids if continues_text else ()
        self._skip_special_tokens = skip_special_tokens
        text = self.new_text() if tokenizer is not None else None
        self._pieces = _pieces(loop.complete(self._run), text)

    def __iter__(self) -> Iterator[StreamPiece]:
        # A generator of its own, so that a loop left early (break, an exception) closes the run although the caller
        # still holds this object.
        try:
            yield from self._pieces
        finally:
            self.close()

    def __next__(self) -> StreamPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop here; frees the cache and the model."""
        self._pieces.close()

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """See `GenerateOutput`; from the first piece on."""
        return self._run.prompt_logprobs

    def new_text(self) -> TextStream:
        """What makes text of its ids, before the first. Needs a tokenizer."""
        return TextStream(self._tokenizer, self._before, skip_special_tokens=self._skip_special_tokens)

    def output(self) -> GenerateOutput:
        """Everything emitted so far."""
        ids = self._run.emitted_ids
        text = ""
        if self._tokenizer is not None:
            whole = self.new_text()
            text = whole.push(ids) + whole.finish()
        return GenerateOutput(
            ids,
            text,
            list(self._run.origins),
            self._run.finish_reason,
            self.stats,
            sampled=self._sampled,
            rejected=dict(self._run.rejected),
            logprobs=list(self._run.logprobs),
            prompt_logprobs=self.prompt_logprobs,
        )


def _pieces(run: Iterator[Emitted], text: TextStream | None) -> Generator[StreamPiece, None, None]:
    """Pieces of a run.

    No method: a generator that held its owner would be freed with it only by the garbage collector, some time later.
    """
    for emitted in run:
        piece = text.push(emitted.ids) if text else ""
        yield StreamPiece(
            piece, emitted.ids, emitted.origins, emitted.rejected, emitted.rejected_from, emitted.logprobs
        )
    if text and (rest := text.finish()):
        yield StreamPiece(rest, [], [])


def resolve_model_path(model: str, config_path: Path) -> str:
    """A config's model: `./name` and `../name` are relative to the folder of the config file, anything else is taken as
    it is."""
    return str((config_path.parent / model).resolve()) if model.startswith(("./", "../")) else model


def _has_kernels(device: torch.device) -> bool:
    """Whether bfloat16 is decoded there by kernels, to the same bits in any number of rows."""
    return NativeLayers.refusal(device, torch.bfloat16) is None


def config_next_to(name: str | os.PathLike[str], hub_arguments: dict[str, Any]) -> DecodeConfig | None:
    """The model's own decode config. Raises: ValueError if it cannot be read; what is no model, its loading tells."""
    known = {key: value for key, value in hub_arguments.items() if key in HubArguments.__annotations__}
    try:
        config = DecodeConfig.from_pretrained(name, **known)
    except OSError:
        return None
    logger.info("decoding %s under its own %s", name, DECODE_CONFIG_NAME)
    return config


def _id_set(ids: int | Sequence[int] | torch.Tensor | None) -> frozenset[int]:
    try:
        found = torch.as_tensor([] if ids is None else ids)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or (found.numel() and (found.is_floating_point() or found.dtype == torch.bool)):
        raise ValueError(f"eos_token_id: must be a token id or several, got {ids!r}")
    return frozenset(found.flatten().tolist())
