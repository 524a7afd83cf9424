"""The only file that knows Hugging Face internals: find the decoder stack and run it under a skip mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, cast
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import get_layer_types_and_kwargs

from layerskip.config.draft_ids import unpack_ids
from layerskip.config.skip_mask import SkipMask
from layerskip.huggingface.growing_keys import over_growing_keys
from layerskip.huggingface.kv_cache import SharedLengthCache
from layerskip.huggingface.placement import Placement
from layerskip.huggingface.placement import UnsupportedModelError as UnsupportedModelError
from layerskip.huggingface.quantization.modules import Int8Modules
from layerskip.huggingface.quantization.products import int8_refusal
from layerskip.huggingface.quantization.weights import is_quantized
from layerskip.huggingface.recurrent import (
    RECURRENT_LAYER_TYPES,
    RecurrentCall,
    RecurrentLayer,
    in_short_chunks,
)

_ATTENTION_NAMES = ("self_attn", "attention", "self_attention", "attn")
_RECURRENT_NAMES = ("linear_attn", "conv", "mamba", "self_attn")
_MLP_NAMES = ("mlp", "ffn", "feed_forward", "block_sparse_moe", "shared_mlp")
_SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention", *RECURRENT_LAYER_TYPES)


_ATTACHED: WeakSet[nn.Module] = WeakSet()
"""Models whose modules have gates at present."""
ALREADY_DECODING = "this model is already decoding; one run at a time (load it a second time for another)"


def widened(logits: torch.Tensor, vocab_size: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """(T, vocab_size) from the columns of these ids, or of the first ones: what a draft cannot choose is -inf."""
    if ids is None:
        return F.pad(logits, (0, vocab_size - logits.shape[1]), value=float("-inf"))
    return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, ids, logits)


@dataclass
class _Gate:
    """One module whose forward can be left out.

    `kind` says what a skipped module answers: a layer returns its input, a sublayer zeros (its residual addition then
    changes nothing), a sublayer that adds the residual itself the residual it was given. `arity` is the length of the
    tuple that the module returns, 0 for a bare tensor; a probe forward finds it out.
    """

    module: nn.Module
    kind: str  # "layer" | "sublayer" | "fc1" | "fc2"
    skip: bool = False
    arity: int = 0
    residual_index: int | None = None
    recurrent: int | None = None
    """Which layer's state it goes on from, of a module that keeps one."""
    is_read: bool = False
    """Whether later layers read the keys and values that it makes. So it runs when it is skipped, too."""

    def install(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters) if self.recurrent is not None else []

        def gated(*args: Any, **kwargs: Any) -> Any:
            if self.skip:
                if self.is_read:
                    forward(*args, **kwargs)
                return self._skipped(args, kwargs)
            if self.recurrent is not None:
                given = dict(zip(names, args, strict=False)) | kwargs
                hidden = given.pop(names[0])
                cache = next((name for name, one in given.items() if isinstance(one, SharedLengthCache)), None)
                if cache is not None:
                    layer = cast(RecurrentLayer, given.pop(cache).layers[self.recurrent])
                    return layer.run(RecurrentCall(forward, cache, given), hidden)
            return forward(*args, **kwargs)

        return gated

    def _skipped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.kind in ("layer", "fc1"):
            out = hidden
        elif self.residual_index is not None:
            out = args[self.residual_index] if len(args) > self.residual_index else kwargs["residual"]
        else:
            out = torch.zeros_like(hidden)
        return (out, *([None] * (self.arity - 1))) if self.arity else out


@dataclass(frozen=True)
class ForcedPositions:
    """Positions and visibility of a forward whose tokens do not simply follow the cache."""

    positions: torch.Tensor
    """(T,) int64."""
    attention_mask: torch.Tensor | dict[str, torch.Tensor]
    """Additive, (1, 1, T, keys), or one for each layer type."""

    @classmethod
    def of(cls, positions: torch.Tensor, visible: Mapping[int | None, torch.Tensor], dtype: torch.dtype) -> Self:
        """visible: (T, keys) boolean for each of the model's windows, None being full attention; True = seen."""
        masks = {}
        for window, seen in visible.items():
            hidden = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=seen.device)
            masks[window] = hidden.masked_fill(seen, 0.0)[None, None]
        if len(masks) == 1:
            return cls(positions, next(iter(masks.values())))
        window = next(window for window in masks if window is not None)
        return cls(positions, {"full_attention": masks[None], "sliding_attention": masks[window]})


@dataclass(frozen=True)
class _LayerGates:
    layer: _Gate
    attention: tuple[_Gate, ...]
    mlp: tuple[_Gate, ...]

    def __iter__(self) -> Iterator[_Gate]:
        return iter((self.layer, *self.attention, *self.mlp))


class ModelAdapter:
    """Runs a Hugging Face causal LM over a shared-length cache, under a skip mask or whole.

    The model is changed only inside `attached()`: each layer's and sublayer's `forward` gets an instance-level gate,
    and the exit of the context takes them off again, whatever happened inside.

    Cost: two short forwards at construction, to learn what each module returns and what may be skipped, and four of a
    model whose layers keep a state, to see that it can be rolled back.
    Raises: UnsupportedModelError for encoder-decoders, layers whose state cannot be rolled back, stacks that cannot be
    found, and tensor parallel models.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.placement = Placement.of(model)
        self.config = cast(Any, model.config)
        self.text_config = self.config.get_text_config(decoder=True)
        kinds = _LayerKinds.of(self.config, self.text_config)
        self.windows, self.recurrent_layers, self.num_keyed = kinds.windows, kinds.recurrent, kinds.num_keyed
        self.sources = kinds.sources
        self.stack_path, self.layers = _find_stack(model, len(self.windows))
        self._gates = [
            _layer_gates(layer, i if i in self.recurrent_layers else None, is_read=i in kinds.sources.values())
            for i, layer in enumerate(self.layers)
        ]
        self._needs_all_rows = False
        self._all_gates = [gate for gates in self._gates for gate in gates]
        self._int8 = Int8Modules(self.layers, self.head)
        self._draft_ids: dict[str, torch.Tensor] = {}
        self._narrow_heads: dict[str, dict[str, torch.Tensor]] = {}
        self._no_skip = SkipMask.none(self.num_layers)
        self._mask = self._no_skip
        self._attached = False
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._keep_argument = "logits_to_keep" if "logits_to_keep" in parameters else None
        self.sublayers_skippable = self._probe()
        """Per layer: may attention and MLP be skipped apart? Where not, only the whole layer may."""
        if self.recurrent_layers:
            self._check_rollback()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def decoder(self) -> Any:
        """The module that holds the layers, and what is before and after them."""
        path = self.stack_path.rpartition(".")[0]
        return self.model.get_submodule(path) if path else self.model

    @property
    def _embedding(self) -> nn.Embedding:
        return cast(Any, self.model).get_input_embeddings()  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where token ids go in: the embedding's device."""
        weight: torch.Tensor = self._embedding.weight
        # Offloaded weights are nowhere between two forwards.
        return self.placement.entrance if weight.device.type == "meta" else weight.device

    @property
    def dtype(self) -> torch.dtype:
        weight: torch.Tensor = self._embedding.weight
        return weight.dtype

    @property
    def sublayers(self) -> tuple[tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]], ...]:
        """Per layer the modules of its attention and those of its MLP."""
        return tuple(
            (tuple(gate.module for gate in gates.attention), tuple(gate.module for gate in gates.mlp))
            for gates in self._gates
        )

    @property
    def takes_positions(self) -> bool:
        """Whether the model can be told its tokens' positions (alibi models cannot)."""
        return self._takes_positions

    @property
    def max_positions(self) -> int | None:
        """Longest text the position encodings are made for, None if the config does not say.

        With `longrope` (Phi-3, Phi-4-mini) as long as its short factors hold: past that every earlier token's keys
        would have to be computed anew.
        """
        config = self.text_config
        found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
        rope = getattr(config, "rope_parameters", None) or {}
        if "longrope" in str(rope.get("rope_type")):
            name = "original_max_position_embeddings"
            found.insert(0, rope.get(name) or getattr(config, name, None))
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    @property
    def head(self) -> Any:
        """The output embedding."""
        return cast(Any, self.model).get_output_embeddings()

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return int(self.head.weight.shape[0])

    @property
    def can_narrow(self) -> bool:
        """Whether a draft may choose among the first token ids alone."""
        return type(self.head) is nn.Linear and self.head.weight.device.type != "meta"

    @property
    def int8_refusal(self) -> str | None:
        """What drafts with 8-bit weights need that there is not; None where they can be."""
        if not self.placement.is_whole:
            return f"a model that is whole on one device, got one on {self.placement}"
        if self._is_quantized:
            return "weights that are not quantised already"
        return int8_refusal(self.device)

    @cached_property
    def _is_quantized(self) -> bool:
        """A look at every parameter takes two milliseconds, and every config is checked before it is followed."""
        return is_quantized(self.model)

    @property
    def matrices(self) -> list[torch.Tensor]:
        """Weights that layers multiply with, experts' among them."""
        return [one for layer in self.layers for one in layer.parameters() if one.ndim > 1]

    def prepare_int8(self, mask: SkipMask) -> int:
        """Make the 8-bit weights that drafts under this mask need; returns how many it made. Cost: see `Int8Linear`."""
        return self._int8.make(mask, self.draft_rows(mask))

    def know_draft_ids(self, sets: Mapping[str, str]) -> None:
        """Packed sets of token ids, see `layerskip.config.draft_ids`, that masks may choose among from now on."""
        device = self.head.weight.device if self.can_narrow else self.device
        for name, packed in sets.items():
            if name not in self._draft_ids:
                self._draft_ids[name] = torch.from_numpy(unpack_ids(packed)).to(device)

    def ids_of(self, mask: SkipMask) -> torch.Tensor | None:
        """(n,): the token ids that a draft chooses among; None: all, or the first so many."""
        return None if mask.draft_ids is None else self._draft_ids[mask.draft_ids]

    def draft_rows(self, mask: SkipMask) -> torch.Tensor | slice:
        """Of the output embedding those that a draft computes with."""
        ids = self.ids_of(mask)
        return slice(mask.draft_vocab) if ids is None else ids

    @contextmanager
    def _weights_of(self, mask: SkipMask) -> Iterator[None]:
        """Inside, weights have 8 bits where the mask says so, and the output embedding has its first so many rows, of
        which there is no copy, or those of a set, of which there is one."""
        if mask.bits is not None:
            with self._int8.instead(mask, self.draft_rows(mask)):
                yield
            return
        if mask.draft_vocab is None:
            yield
            return
        parameters, rows = self.head._parameters, self.draft_rows(mask)
        whole = dict(parameters)
        narrow = self._narrow_heads.get(mask.draft_ids or "")
        if narrow is None:
            narrow = {name: one.detach()[rows] for name, one in whole.items() if one is not None}
            if mask.draft_ids is not None:
                self._narrow_heads[mask.draft_ids] = narrow
        try:
            parameters.update(narrow)
            yield
        finally:
            parameters.update(whole)

    def new_cache(self, capacity: int) -> SharedLengthCache:
        return SharedLengthCache(self.windows[: self.num_keyed], capacity, self.recurrent_layers)

    def check_mask(self, mask: SkipMask) -> None:
        """Raises ValueError if the mask does not fit this model."""
        if mask.num_layers != self.num_layers:
            raise ValueError(f"skip_mask: must have the model's {self.num_layers} layers, got {mask.num_layers}")
        self.check_vocab("skip_mask", mask.draft_vocab)
        self._check_ids(mask)
        if mask.bits is not None and (refusal := self.int8_refusal) is not None:
            raise ValueError(f"skip_mask: int{mask.bits} drafts need {refusal}")
        for i, apart in enumerate(self.sublayers_skippable):
            if not apart and mask.attention[i] != mask.mlp[i]:
                raise ValueError(f"skip_mask: layer {i} of this model can only be skipped whole, got {mask}")

    def _check_ids(self, mask: SkipMask) -> None:
        if mask.draft_ids is None:
            return
        if (ids := self._draft_ids.get(mask.draft_ids)) is None:
            raise ValueError(f"skip_mask: the set {mask.draft_ids} must be among the config's draft_ids, it is not")
        if len(ids) != mask.draft_vocab:
            raise ValueError(f"skip_mask: draft_vocab must be the {len(ids)} of its draft_ids, got {mask.draft_vocab}")
        if int(ids[-1]) >= self.vocab_size:
            raise ValueError(f"draft_ids: must be below the model's {self.vocab_size}, got {int(ids[-1])}")

    def check_vocab(self, field: str, draft_vocab: int | None) -> None:
        """Raises ValueError if a draft cannot choose among so many of the first token ids."""
        if draft_vocab is None:
            return
        if not self.can_narrow:
            raise ValueError(f"{field}: draft_vocab needs a plain output embedding, got another and {draft_vocab}")
        if draft_vocab > self.vocab_size:
            raise ValueError(f"{field}: draft_vocab must be at most the model's {self.vocab_size}, got {draft_vocab}")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Gates on; off again on every exit. Not re-entrant: one run at a time on one model, however often wrapped."""
        if self.model in _ATTACHED:
            raise RuntimeError(ALREADY_DECODING)
        previous = {id(gate): gate.module.__dict__.get("forward") for gate in self._all_gates}
        _ATTACHED.add(self.model)
        self._attached = True
        try:
            for gate in self._all_gates:
                gate.module.forward = gate.install(gate.module.forward)
            with in_short_chunks([gate.module for gate in self._all_gates if gate.recurrent is not None]):
                yield
        finally:
            try:
                self._detach(previous)
            except BaseException:  # Ctrl-C in the midst of it: the model is the user's, and must be whole
                self._detach(previous)
                raise

    def _detach(self, previous: Mapping[int, Any]) -> None:
        """Gates off, from wherever that was broken off. previous: each gate's own `forward`, or None."""
        for gate in self._all_gates:
            gate.module.__dict__.pop("forward", None)
            if (forward := previous[id(gate)]) is not None:
                gate.module.forward = forward
        self._set_mask(self._no_skip)
        self._attached = False
        _ATTACHED.discard(self.model)

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: SharedLengthCache,
        mask: SkipMask | None = None,
        *,
        num_logits: int,
        forced: ForcedPositions | None = None,
    ) -> torch.Tensor:
        """Logits of the last `num_logits` positions, and the cache advanced by the input.

        Shapes: input_ids (T,) int64 at positions [length, length + T); returns (num_logits, V) in the model's dtype.
        Cost: one forward over T tokens; no device sync of its own.
        Raises: RuntimeError outside `attached()`.
        """
        if not self._attached:
            raise RuntimeError("forward needs the gates: call it inside `with adapter.attached()`")
        self._set_mask(mask or self._no_skip)
        num_tokens = input_ids.shape[0]
        arguments: dict[str, Any] = {"input_ids": input_ids.unsqueeze(0), "past_key_values": cache, "use_cache": True}
        if self._takes_positions:
            # Left implicit, some models would read them from a cache layer's own count.
            start = cache.length
            positions = forced.positions if forced else torch.arange(start, start + num_tokens, device=input_ids.device)
            arguments["position_ids"] = positions.unsqueeze(0)
        if self._keep_argument is not None:
            arguments[self._keep_argument] = num_logits
            if self._needs_all_rows and num_logits < num_tokens:
                # Given a number, layers that share keys compute those rows alone.
                arguments[self._keep_argument] = torch.arange(num_tokens - num_logits, num_tokens)
        if forced is not None:
            arguments["attention_mask"] = forced.attention_mask
        with over_growing_keys(self.placement.devices), self._weights_of(self._mask):
            logits: torch.Tensor = self.model(**arguments).logits[0, -num_logits:]
        cache.advance(num_tokens)
        if self._mask.draft_vocab is None:
            return logits
        return widened(logits, self.vocab_size, self.ids_of(self._mask))

    @contextmanager
    def states_of(self, layers: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """Inside, the hidden states (B, T, hidden) that these layers give, counted from 0, are put into the list."""
        found: list[torch.Tensor] = []

        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        hooks = [self.layers[i].register_forward_hook(note) for i in layers]
        self._needs_all_rows = self.num_keyed < self.num_layers
        try:
            yield found
        finally:
            self._needs_all_rows = False
            for hook in hooks:
                hook.remove()

    def _set_mask(self, mask: SkipMask) -> None:
        if mask is self._mask or mask == self._mask:
            return
        for i, gates in enumerate(self._gates):
            attention, mlp = mask.attention[i], mask.mlp[i]
            gates.layer.skip = attention and mlp
            for gate in gates.attention:
                gate.skip = attention
            for gate in gates.mlp:
                gate.skip = mlp
        self._mask = mask

    @torch.inference_mode()
    def _probe(self) -> tuple[bool, ...]:
        """Learn arities from one forward; then stub both sublayers of every layer: does layer(x) still give x?"""
        # Not the first ones: a padding token's embedding may be zero, of which every layer makes zero.
        count = int(self.text_config.vocab_size)
        ids = torch.tensor([count // 3, count // 2], device=self.device)
        arities: dict[int, int] = {}
        unchanged: dict[int, bool] = {}
        hooks = [gate.module.register_forward_hook(_record_arity(arities)) for gate in self._all_gates]
        try:
            with self.attached():
                self.forward(ids, cache := self.new_cache(2), num_logits=1)
        except (AttributeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UnsupportedModelError(f"{self.config.model_type}: refuses a cache of ours: {reason}") from error
        finally:
            for hook in hooks:
                hook.remove()
        for i, layer in enumerate(cache.layers):
            if not layer.is_initialized:
                raise UnsupportedModelError(
                    f"{self.config.model_type}: layer {i} does not use the key-value cache it is given, so a rejected "
                    "draft could not be rolled back"
                )
        for gate in self._all_gates:
            gate.arity = arities.get(id(gate.module), 0)
        hooks = [layer.register_forward_hook(_record_unchanged(unchanged), with_kwargs=True) for layer in self.layers]
        try:
            with self.attached():
                for gates in self._gates:
                    for gate in (*gates.attention, *gates.mlp):
                        gate.skip = True
                self._mask = SkipMask.from_layers(self.num_layers, range(self.num_layers))
                self._run_stubbed(ids)
        finally:
            for hook in hooks:
                hook.remove()
        apart = (bool(g.attention) and bool(g.mlp) for g in self._gates)
        return tuple(ok and unchanged.get(id(g.layer.module), False) for ok, g in zip(apart, self._gates, strict=True))

    @torch.inference_mode()
    def _check_rollback(self) -> None:
        """Raises UnsupportedModelError unless a text says the same at once, and in pieces with rollbacks between."""
        ids = torch.arange(9, device=self.device) % int(self.text_config.vocab_size)
        with self.attached():
            expected = self.forward(ids, self.new_cache(9), num_logits=3)
            cache = self.new_cache(9)
            for first, last, length in ((0, 1, 1), (5, 7, 1), (1, 3, 3), (0, 2, 3), (3, 6, 5), (5, 6, 6)):
                self.forward(ids[first:last], cache, num_logits=1)
                cache.rollback_to(length)
            found = self.forward(ids[6:], cache, num_logits=3)
        tolerance = float(torch.finfo(found.dtype).eps ** 0.5)
        difference = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
        if not difference <= tolerance:
            name = type(self.model).__name__
            raise UnsupportedModelError(
                f"{self.config.model_type}: after a rollback {name} goes on otherwise, by {difference:.2g} of the "
                f"logits (rounding explains {tolerance:.2g})"
            )

    def _run_stubbed(self, ids: torch.Tensor) -> None:
        """A forward that keeps the gates as they are set by hand."""
        self.model(input_ids=ids.unsqueeze(0), past_key_values=self.new_cache(2), use_cache=True)


def _record_arity(arities: dict[int, int]) -> Callable[..., None]:
    def hook(module: nn.Module, _args: Any, output: Any) -> None:
        arities[id(module)] = len(output) if isinstance(output, tuple) else 0

    return hook


def _record_unchanged(unchanged: dict[int, bool]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        # The first layer of a device is given what another one computed; its hook moves that before its forward.
        unchanged[id(module)] = bool(torch.equal(before.to(after.device), after))

    return hook


@dataclass(frozen=True)
class _LayerKinds:
    """What a model's layers keep of a text."""

    windows: tuple[int | None, ...]
    """Per layer its sliding window, or None."""
    recurrent: dict[int, int]
    """Of the layers that keep a state in place of keys, how many parts it has."""
    num_keyed: int
    sources: dict[int, int]
    """Of the layers after the first `num_keyed`, whose keys and values each reads."""

    @classmethod
    def of(cls, config: Any, text_config: Any) -> Self:
        """Raises: UnsupportedModelError for other kinds."""
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{config.model_type}: encoder-decoder models are not supported")
        num_layers = text_config.num_hidden_layers
        types, arguments = get_layer_types_and_kwargs(text_config)
        num_keyed = num_layers - (getattr(text_config, "num_kv_shared_layers", None) or 0)
        # Transformers 5.17 leaves out the layers that read others' keys; 5.23 calls them 'dummy', and others too.
        types = list(types[:num_keyed])
        for i, layer_type in enumerate(types):
            if layer_type not in _SUPPORTED_LAYER_TYPES:
                supported = ", ".join(_SUPPORTED_LAYER_TYPES)
                raise UnsupportedModelError(
                    f"{config.model_type}: layer {i} is of type {layer_type!r}, which is not known to be taken back "
                    f"after a rejected draft (supported: {supported})"
                )
        # Transformers 5.17 has one dictionary for all layers; whether the window is its own, the layer's type tells.
        of_layer = [arguments] * num_keyed if isinstance(arguments, dict) else arguments[:num_keyed]
        kinds = list(zip(types, of_layer, strict=True))
        windows = [kind["sliding_window"] if one == "sliding_attention" else None for one, kind in kinds]
        recurrent = {
            i: int(kind.get("number_of_states", 1))
            for i, (one, kind) in enumerate(kinds)
            if one in RECURRENT_LAYER_TYPES
        }
        if len(recurrent) == len(kinds):
            raise UnsupportedModelError(f"{config.model_type}: no layer has attention, whose keys tell a text's length")
        last = {one: i for i, one in enumerate(types)}
        """Of each type the last that keeps keys, which those after it read."""
        sharing = text_config.layer_types[num_keyed:num_layers] if num_keyed < num_layers else []
        sources = {num_keyed + i: last[one] for i, one in enumerate(sharing)}
        windows += [windows[source] for source in sources.values()]
        return cls(tuple(windows), recurrent, num_keyed, sources)


def _find_stack(model: nn.Module, num_layers: int) -> tuple[str, list[nn.Module]]:
    """The ModuleList that holds the decoder layers, by the class names that the model itself says not to split."""
    block_names = set(getattr(model, "_no_split_modules", None) or ())
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            layers = list(module)
            named = all(type(layer).__name__ in block_names for layer in layers)
            if named or (not block_names and all(_submodule(layer, _ATTENTION_NAMES) for layer in layers)):
                return path, layers
    raise UnsupportedModelError(
        f"{type(model).__name__}: no list of {num_layers} decoder layers found "
        f"(looked for {', '.join(sorted(block_names)) or 'layers with an attention module'})"
    )


def _submodule(layer: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    return next((layer._modules[name] for name in names if layer._modules.get(name) is not None), None)


def _layer_gates(layer: nn.Module, recurrent: int | None, *, is_read: bool) -> _LayerGates:
    """recurrent: the layer's place, if it keeps a state; is_read: whether later layers read its keys and values."""
    names = _ATTENTION_NAMES if recurrent is None else _RECURRENT_NAMES
    attention = _submodule(layer, names)
    if attention is None:
        raise UnsupportedModelError(
            f"{type(layer).__name__}: no attention module found (looked for {', '.join(names)})"
        )
    mlps = [layer._modules[name] for name in _MLP_NAMES if layer._modules.get(name) is not None]
    if mlps:
        mlp_gates = tuple(_sublayer_gate(cast(nn.Module, one)) for one in mlps)
    elif (fc1 := layer._modules.get("fc1")) is not None and (fc2 := layer._modules.get("fc2")) is not None:
        # OPT has no MLP module: a skipped fc1 passes its input on, a skipped fc2 turns that into zeros.
        mlp_gates = (_Gate(fc1, "fc1"), _Gate(fc2, "fc2"))
    else:
        mlp_gates = ()
    attention_gate = replace(_sublayer_gate(attention), recurrent=recurrent, is_read=is_read)
    return _LayerGates(_Gate(layer, "layer", is_read=is_read), (attention_gate,), mlp_gates)


def _sublayer_gate(module: nn.Module) -> _Gate:
    names = list(inspect.signature(module.forward).parameters)
    # Bloom and MPT add the residual inside the sublayer.
    index = names.index("residual") if "residual" in names else None
    return _Gate(module, "sublayer", residual_index=index)
