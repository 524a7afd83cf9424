"""DecodeConfig: how to decode one model on one device, with where the numbers come from; strict JSON."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeGuard, Unpack, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from layerskip.config.draft_ids import DraftIds, check_sets
from layerskip.config.hub import (
    HubArguments,
    PushArguments,
    check_file_name,
    is_hub_id,
    locate_config,
    upload_config,
)
from layerskip.config.lookup_settings import LookupSettings, SuffixLookup
from layerskip.config.lossy_acceptance import Distance, LossyAcceptance, lossy_label
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.sampling_regime import Sampling, nearest
from layerskip.config.skip_mask import MAX_VOCABULARY, SkipMask
from layerskip.config.strict_json import parse_json
from layerskip.config.validated import MAX_DRAFTING, MAX_GAMMA, Count, Frozen, OneLineErrors, Probability, Rate, without

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

MAX_NEW_TOKENS = 100_000
MAX_THREADS = 1024
MAX_SIBLINGS = 4
MAX_TREE_TOKENS = 64
"""Bounds on what a config file can make us allocate."""
ENGINE_NAMES = ("auto", "eager", "fused", "cuda_graph")
MAX_GROUPS = 64
MAX_GROUP_NAME = 64
MAX_REGIMES = 16
DEFAULT_GROUP = "default"
"""What tables call the setting for text of no group, so no group may have this name."""
GROUP_NAME_RULE = (
    f"must be text of 1 to {MAX_GROUP_NAME} printable characters, without blanks at its ends, not {DEFAULT_GROUP!r}"
)
_MAX_FILE_BYTES = 1 << 20


def is_group_name(value: object) -> TypeGuard[str]:
    """Whether a prompt group may be called so; `GROUP_NAME_RULE` says the rule."""
    return (
        isinstance(value, str)
        and 1 <= len(value) <= MAX_GROUP_NAME
        and value.isprintable()
        and value == value.strip()
        and value != DEFAULT_GROUP
    )


def _check_group_name(name: str) -> str:
    if not is_group_name(name):
        raise ValueError(f"group name {GROUP_NAME_RULE}, got {name[:80]!a}")
    return name


def check_ways(names: Sequence[str]) -> None:
    """Raises: ValueError unless these are one or more ways to draft, each once."""
    if not names or len(set(names)) < len(names) or not set(names) <= set(WAYS):
        raise ValueError(f"drafters: must be one or more of {', '.join(WAYS)}, each once; got {list(names)}")


def _read_mask(value: object) -> SkipMask:
    if isinstance(value, SkipMask):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be text such as '12:4-7,a2', got {type(value).__name__}")
    return SkipMask.parse(value)


MaskField = Annotated[SkipMask, PlainValidator(_read_mask), PlainSerializer(str, return_type=str)]
GroupName = Annotated[str, AfterValidator(_check_group_name)]
DrafterName = Literal["layer_skip", "prompt_lookup", "suffix", "hybrid", "eagle", "mtp", "draft_model"]
TrainedDrafter = Literal["eagle", "mtp", "draft_model"]
DRAFTERS: tuple[DrafterName, ...] = get_args(DrafterName)
UNTRAINED: tuple[DrafterName, ...] = ("layer_skip", "prompt_lookup", "suffix", "hybrid")
"""Those that need nothing but the model."""


READ_STATES: tuple[TrainedDrafter, ...] = ("eagle", "mtp")
"""Those that are a layer, which goes on from the target's hidden states, and no whole model."""
OWN_LAYERS = "model"
"""The path of `mtp`: its weights lie with the model's own."""


class DraftWeights(Frozen):
    """Trained weights that propose tokens: those that `python -m layerskip.train` writes, multi-token-prediction layers
    of the model's own checkpoint, or a smaller model."""

    drafter: TrainedDrafter = "eagle"
    path: Annotated[str, Field(min_length=1)]
    """Their folder, or their repository on the hub; in a config file, a folder starting with `./` or `../` is relative
    to the file's own. Of mtp `model`."""
    fingerprint: str
    """Of the weights; others in this folder are refused. Of mtp it may be empty: whatever lies with the model."""
    draft_vocab: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)] | None = None
    """They choose among so many of the first token ids, see `SkipMask.draft_vocab`; where they were trained to choose
    among the commonest, of those."""
    tree_tokens: Annotated[int, Field(ge=1, le=MAX_TREE_TOKENS)] | None = None
    """Of eagle and mtp: not a chain is drafted but a tree, and of all that the weights propose up to gamma tokens deep
    the likeliest so many are verified. Their likelihood is that of their whole path."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.tree_tokens is not None and not self.reads_states:
            raise ValueError(f"tree_tokens: must be left out where the drafter is {self.drafter}")
        if (self.path == OWN_LAYERS) != (self.drafter == "mtp"):
            rule = f"must be {OWN_LAYERS}" if self.drafter == "mtp" else "must be a folder or a hub id"
            raise ValueError(f"path: {rule} where the drafter is {self.drafter}, got {self.path}")
        return self

    @property
    def reads_states(self) -> bool:
        """See `READ_STATES`."""
        return self.drafter in READ_STATES

    def narrowed(self, draft_vocab: int | None) -> DraftWeights:
        """The same weights, with this `draft_vocab`."""
        return self.model_copy(update={"draft_vocab": draft_vocab})

    def branching(self, tree_tokens: int | None) -> DraftWeights:
        """The same weights, with these `tree_tokens`."""
        return self.model_copy(update={"tree_tokens": tree_tokens})


DraftedBy = SkipMask | DraftWeights
"""What computes a draft token."""
TRAINED: tuple[TrainedDrafter, ...] = get_args(TrainedDrafter)
HYBRIDS = ("hybrid", *(f"hybrid_{one}" for one in TRAINED))
WAYS: tuple[str, ...] = (*UNTRAINED, *TRAINED, *HYBRIDS[1:])
"""Drafters as a search tells them apart; see `DecodeConfig.way`."""


def ways_by(weights: DraftWeights) -> tuple[str, str]:
    """The ways to draft that trained weights allow: alone, and where a lookup finds nothing."""
    return weights.drafter, f"hybrid_{weights.drafter}"


BY_WEIGHTS = tuple(one for one in WAYS if one not in UNTRAINED)


def trained_by(way: str) -> str | None:
    """The drafter of weights by which a way computes its drafts; None of a way that needs none."""
    name = way.removeprefix("hybrid_")
    return name if name in TRAINED else None


BY_GIVEN_WEIGHTS = tuple(one for one in BY_WEIGHTS if trained_by(one) != "mtp")
"""Ways whose weights do not lie with the model."""


QuantizationName = Literal["int8", "int4"]
"""What a model's weights are rounded to when it is loaded."""


ABOUT_QUANTIZATION = (
    "what the model's weights are rounded to when it is loaded (needs the extra quantized); what is decoded is then "
    "that model's output (default: the checkpoint as it is, or what the config was tuned with)"
)


def number_format(dtype: str, quantization: str | None) -> str:
    """In words, such as `bfloat16, int8 weights`."""
    return f"{dtype}, {quantization} weights" if quantization else dtype


class Provenance(Frozen):
    """Where a config comes from and what it was measured on."""

    model: str
    """Hub id, absolute path, or a path starting with `./` or `../`, which is relative to the config file's folder."""
    weights_fingerprint: str
    device: str
    dtype: str
    quantization: QuantizationName | None = None
    """What the weights were rounded to when the model was loaded: it decodes as that model does."""
    num_layers: Annotated[int, Field(ge=1)]
    versions: dict[str, str] = Field(default_factory=dict)
    study: str | None = None
    trial: Count | None = None
    seed: int | None = None
    num_trials: Count | None = None
    prompts_fingerprint: str | None = None
    held_out_fingerprint: str | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    """Most tokens that a prompt was continued by, when searching and when confirming: the speedup depends on it."""
    num_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = None
    engine: str | None = None
    attention_backend: str | None = None
    """What computed attention; see `Engine.attention_backend`."""
    commit: str | None = None
    command: str | None = None
    created_at: str | None = None
    """UTC, ISO 8601."""
    searched_tokens_per_s: Rate | None = None
    """The pooled value the search saw, on tuning prompts; `confirmed` is the number to quote."""


_OF_LOSSY = ("lossy", "distance")


class _LosslessAsBefore(Frozen):
    """What is lossless says nothing of lossy rules: its files are what they were before there were any."""

    @model_serializer(mode="wrap")
    def _told(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None or name not in _OF_LOSSY}


class Confirmed(_LosslessAsBefore):
    """The winner against plain decoding on held-out prompts, interleaved, in the same engine."""

    tokens_per_s: Rate
    plain_tokens_per_s: Rate
    speedup: Rate
    """Geometric mean over prompts of paired ratios; equals tokens_per_s / plain_tokens_per_s."""
    speedup_ci_low: Rate
    speedup_ci_high: Rate
    ci_level: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    speedup_prompt_low: Rate | None = None
    """Where a single new prompt is expected, at the same level: prompts differ far more than their mean does."""
    speedup_prompt_high: Rate | None = None
    end_to_end_speedup: Rate | None = None
    """The same as `speedup` with each prompt's own forward in the seconds."""
    end_to_end_speedup_ci_low: Rate | None = None
    end_to_end_speedup_ci_high: Rate | None = None
    num_prompts: Annotated[int, Field(ge=1)]
    num_choosing: Count | None = None
    """Other prompts that it was chosen on; 0: it was chosen on these, which flatters it."""
    num_identical: Count
    """Prompts whose output was identical to plain decoding's in every repeat."""
    num_ties: Count = 0
    """Prompts that differed only where the target's two logits tie within the dtype's rounding (bfloat16, float16)."""
    num_repeats: Annotated[int, Field(ge=1)]
    acceptance_rate: Probability | None = None
    mean_accepted_length: Annotated[float, Field(ge=1.0)] | None = None
    repeated_ngram_share: Probability | None = None
    """Share of the outputs' 4-grams that occurred before in their prompt or output: text in loops is easy to draft."""
    distance: Distance | None = None
    """From the target's own outputs, of a lossy setting alone."""
    machine: str | None = None
    """The machine's state while this was measured, in words: clocks, power, driver, attention, recordings, memory."""


class _Versioned(Frozen):
    """A base of its own, so that the version is the first field of the file."""

    schema_version: Literal[1] = 1


_RETIRED = ("continue_lookup", "share_prefix")
"""Fields that files from before may have, and that decide nothing any more."""


class _Setting(_LosslessAsBefore):
    """What a run of the decoder follows, and what speaks for it."""

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, data: object) -> object:
        return without(data, _RETIRED)

    drafter: DrafterName = "layer_skip"
    """Who proposes tokens: the target under `skip_mask`, a lookup in the text, or where that finds nothing the mask."""
    skip_mask: MaskField
    """Without a skip where the drafter is a lookup alone."""
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)]
    """Most draft tokens a round; of a hybrid, those of layer skipping. 0 = plain decoding."""
    draft_threshold: Probability = 0.0
    """Drafting stops after the first token whose draft top probability is below this; 0 = off. Of a tree:
    what is less likely than this is not gone on from."""
    target_threshold: Probability = 0.0
    """While the target's probability of the token it just emitted is below this, it decodes alone; 0 = off."""
    siblings: Annotated[int, Field(ge=0, le=MAX_SIBLINGS)] = 0
    """Of a drafted token so many that the draft holds next best are verified too, in the same forward: where the
    token is wrong and one of them is right, the round goes on by one token. 0 = off."""
    sibling_threshold: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    """Only drafted tokens with a draft top probability below this have siblings: a draft is seldom wrong where it is
    sure. 1 = all."""
    lookup: LookupSettings | None = None
    """How tokens are looked up, for every drafter but `layer_skip`."""
    draft_weights: DraftWeights | None = None
    """Of `eagle`, `mtp` and `draft_model`, and of a hybrid that drafts by trained weights in place of a mask."""
    lossy: LossyAcceptance | None = None
    """A rule that accepts draft tokens besides the target's own choices: the output is then not the target's, and a
    model takes the config only with `allow_lossy`. None = lossless."""
    max_drafting: Annotated[int, Field(ge=1)] | None = None
    """Of texts that are decoded at once, see `LayerSkipModel.generate_batch`: while they are more than so many none of
    them drafts. None = not measured."""
    sampling: Sampling | None = None
    """How tokens were chosen where this was tuned and confirmed; None = not known, and it is used for every request."""
    reason: str | None = None
    """Why the search decided so, where it says not to speculate or gives a group the default's setting."""
    confirmed: Confirmed | None = None

    @model_validator(mode="after")
    def _check_drafter(self) -> Self:
        looks_up = self.drafter not in ("layer_skip", *TRAINED)
        if looks_up != (self.lookup is not None):
            rule = "is required" if looks_up else "must be left out"
            raise ValueError(f"lookup: {rule} where the drafter is {self.drafter}")
        if self.lookup is not None and self.drafter not in ("hybrid", self.lookup.method):
            raise ValueError(f"lookup.method: must be the drafter, {self.drafter}, got {self.lookup.method}")
        if self.drafter != "layer_skip" and self.gamma == 0:
            raise ValueError(f"gamma: must be at least 1 where the drafter is {self.drafter}, got 0")
        if self.lossy is not None and self.gamma == 0:
            raise ValueError(f"lossy: must be left out where gamma is 0, got {self.lossy.name}")
        self._check_draft_weights()
        self._check_siblings()
        if looks_up and self.drafter != "hybrid":
            self._check_lookup_alone()
        return self

    def _check_draft_weights(self) -> None:
        """They draft in place of a mask."""
        if self.draft_weights is None:
            if self.drafter in TRAINED:
                raise ValueError(f"draft_weights: is required where the drafter is {self.drafter}")
            return
        if self.drafter in UNTRAINED and self.drafter != "hybrid":
            raise ValueError(f"draft_weights: must be left out where the drafter is {self.drafter}")
        if self.drafter not in (self.draft_weights.drafter, "hybrid"):
            raise ValueError(
                f"draft_weights.drafter: must be the drafter, {self.drafter}, got {self.draft_weights.drafter}"
            )
        self._check_left_out("skip_mask", where="draft_weights are given, they draft in its place")

    def _check_siblings(self) -> None:
        """They branch off drafts that are computed."""
        if self.siblings and self.gamma == 0:
            raise ValueError(f"siblings: must be 0 where gamma is 0, got {self.siblings}")
        if self.siblings and self.tree_tokens:
            raise ValueError(f"siblings: must be 0 where draft_weights.tree_tokens are given, got {self.siblings}")
        if self.sibling_threshold < 1.0 and not self.siblings:
            raise ValueError(f"sibling_threshold: must be 1 where siblings is 0, got {self.sibling_threshold}")

    def _check_lookup_alone(self) -> None:
        """What belongs to layer skipping, or tells it and a lookup apart, is left out."""
        alone = f"the drafter is {self.drafter}, which drafts alone"
        self._check_left_out("skip_mask", "draft_threshold", "siblings", where=alone)
        for name in ("gamma", "target_threshold"):
            if getattr(self.lookup, name) is not None:
                raise ValueError(f"lookup.{name}: must be left out where {alone}")

    def _check_left_out(self, *names: str, where: str) -> None:
        for name in names:
            default = _Setting.model_fields[name].default
            nothing = SkipMask.none(self.skip_mask.num_layers) if name == "skip_mask" else default
            if getattr(self, name) != nothing:
                raise ValueError(f"{name}: must be left out where {where}")

    @property
    def drafts_among(self) -> int:
        """Most texts decoded at once among which it drafts: as was measured, or else `MAX_DRAFTING`."""
        return self.max_drafting or MAX_DRAFTING

    @property
    def lookup_gamma(self) -> int:
        """Most tokens that a lookup proposes; 0 without one."""
        if self.lookup is None:
            return 0
        return self.gamma if self.lookup.gamma is None else self.lookup.gamma

    @property
    def lookup_target_threshold(self) -> float:
        """The `target_threshold` of lookups."""
        own = None if self.lookup is None else self.lookup.target_threshold
        return self.target_threshold if own is None else own

    @property
    def max_gamma(self) -> int:
        """Most draft tokens of any round."""
        return max(self.gamma, self.lookup_gamma)

    @property
    def max_verified(self) -> int:
        """Most tokens that any round verifies, siblings among them."""
        return max(self.tree_tokens or self.gamma * (1 + self.siblings), self.lookup_gamma)

    @property
    def tree_tokens(self) -> int:
        """Tokens of a tree, of which the rest is as deep as gamma; 0 for a chain."""
        return 0 if self.draft_weights is None else self.draft_weights.tree_tokens or 0

    @property
    def branches(self) -> bool:
        """Whether its drafts have siblings or are trees."""
        return self.siblings > 0 or self.tree_tokens > 0

    @property
    def watches_confidence(self) -> bool:
        """Whether drafting looks at the top probability of each token that it computes."""
        return self.draft_threshold > 0.0 or self.sibling_threshold < 1.0

    @property
    def drafts_by_mask(self) -> bool:
        """Whether any token is drafted under the skip mask."""
        return self.gamma > 0 and self.drafter in ("layer_skip", "hybrid") and self.draft_weights is None

    @property
    def drafted_by(self) -> DraftedBy:
        """What computes the drafts that are computed; without a skip where none are."""
        return self.skip_mask if self.draft_weights is None else self.draft_weights

    @property
    def way(self) -> str:
        """The drafter, and of a hybrid what it computes by: `hybrid` is by a mask, `hybrid_eagle` by weights."""
        if self.drafter != "hybrid" or self.draft_weights is None:
            return self.drafter
        return ways_by(self.draft_weights)[1]

    @property
    def computes_drafts(self) -> bool:
        """Whether any token is drafted by a forward, under the skip mask or of trained weights, and not looked up."""
        return self.drafts_by_mask or self.draft_weights is not None


class GroupSetting(_Setting):
    """How to decode the prompts of one group; `confirmed` was measured on that group's held-out prompts."""


class RegimeSetting(_Setting):
    """How to decode where tokens are chosen as `sampling` says; `confirmed` was measured on held-out text chosen so."""

    sampling: Sampling


def _read_regimes(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Regimes = Annotated[
    tuple[RegimeSetting, ...], Field(min_length=1, max_length=MAX_REGIMES), BeforeValidator(_read_regimes)
]


class DecodeConfig(OneLineErrors, _Setting, _Versioned):
    """How to decode: skip mask, gamma and thresholds. gamma = 0 is plain decoding.

    With `groups`, these are the default for text of no group, and `for_group` gives each group's own. With `regimes`,
    they are one of several settings, and `for_sampling` gives the one for a way to choose tokens.
    Raises: ValueError naming the field, the rule and the value got; unknown fields are refused.
    """

    provenance: Provenance | None = None
    draft_ids: Annotated[DraftIds, AfterValidator(check_sets)] | None = None
    """The sets of token ids that masks name, see `SkipMask.draft_ids`."""
    groups: Annotated[Mapping[GroupName, GroupSetting], Field(min_length=1, max_length=MAX_GROUPS)] | None = None
    """Settings by prompt group, searched on prompts of that group alone."""
    regimes: Regimes | None = None
    """Settings for other ways to choose tokens than the default's, which `sampling` then tells. Not with `groups`."""

    @model_validator(mode="after")
    def _check_layers(self) -> DecodeConfig:
        if self.provenance is not None and self.provenance.num_layers != self.skip_mask.num_layers:
            raise ValueError(
                f"skip_mask: must have provenance.num_layers = {self.provenance.num_layers} layers, "
                f"got {self.skip_mask.num_layers}"
            )
        for path, setting in self.named_settings():
            if setting.skip_mask.num_layers != self.skip_mask.num_layers:
                raise ValueError(
                    f"{path}skip_mask: must have the default's {self.skip_mask.num_layers} layers, "
                    f"got {setting.skip_mask.num_layers}"
                )
        return self

    @model_validator(mode="after")
    def _check_regimes(self) -> DecodeConfig:
        if self.regimes is None:
            return self
        if self.groups is not None:
            raise ValueError("regimes: must be left out where there are groups, a config has one of them; got both")
        if self.sampling is None:
            raise ValueError("sampling: is required where there are regimes, to tell whose setting the default is")
        for place, regime in enumerate(self.regimes):
            if regime.sampling.name in self.regime_names[: place + 1]:
                raise ValueError(
                    f"regimes.{place}.sampling: must be another than every setting's before it and the default's, "
                    f"got {regime.sampling.name}"
                )
        return self

    @classmethod
    def plain(cls, num_layers: int, *, reason: str | None = None) -> DecodeConfig:
        """Do not speculate."""
        return cls(skip_mask=SkipMask.none(num_layers), gamma=0, reason=reason)

    @property
    def speculates(self) -> bool:
        return self.gamma > 0

    def bare(self) -> DecodeConfig:
        """What the decoder follows by default, and nothing else: no reason, number or origin, no groups, no regimes."""
        names = ("max_drafting", "sampling", "reason", "confirmed", "provenance", "groups", "regimes")
        return self.model_copy(update=dict.fromkeys(names))

    @property
    def looks_into_stores(self) -> bool:
        """Whether any of its settings, groups and regimes included, drafts from a `TextStore` where one is given."""
        return any(isinstance(one.lookup, SuffixLookup) for one in self._settings)

    @property
    def has_branches(self) -> bool:
        """Whether any of its settings, groups and regimes included, drafts siblings or trees."""
        return any(one.branches for one in self._settings)

    @property
    def lossy_rules(self) -> tuple[LossyAcceptance, ...]:
        """Of its settings, groups and regimes included, those that are not lossless."""
        return tuple(one.lossy for one in self._settings if one.lossy is not None)

    def check_consent(self, *, allow_lossy: bool) -> None:
        """Raises: ValueError if any of its settings is lossy and that was not allowed."""
        if self.lossy_rules and not allow_lossy:
            raise ValueError(
                "lossy: must be left out unless it is allowed (allow_lossy=True, or --allow-lossy on a command), got "
                f"{self.lossy_rules[0].name}: {lossy_label(self.lossy_rules[0])}"
            )

    @property
    def all_draft_weights(self) -> tuple[DraftWeights, ...]:
        """Of any of its settings."""
        return tuple(one.draft_weights for one in self._settings if one.draft_weights is not None)

    def named_settings(self) -> Iterator[tuple[str, _Setting]]:
        """Its own setting and those of groups and regimes, each after what stands before the names of its fields."""
        yield "", self
        for name, setting in (self.groups or {}).items():
            yield f"groups.{name}.", setting
        for place, regime in enumerate(self.regimes or ()):
            yield f"regimes.{place}.", regime

    @property
    def _settings(self) -> list[_Setting]:
        return [setting for _, setting in self.named_settings()]

    def for_group(self, name: str | None) -> DecodeConfig:
        """The config for prompts of one group, None being the default, without `groups`.

        The provenance is kept as it is: its `trial` and `searched_tokens_per_s` are the default's.
        Raises: ValueError naming the known groups if there is no such group.
        """
        if name is None:
            return self if self.groups is None else self.model_copy(update={"groups": None})
        if self.groups is None:
            raise ValueError(f"group: this config has no groups, got {str(name)[:80]!a}")
        if name not in self.groups:
            raise ValueError(f"group: must be one of {', '.join(self.groups)}; got {str(name)[:80]!a}")
        return self._narrowed(self.groups[name])

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """The ways to choose tokens that it has settings for, the default's first; none where they are not known."""
        return () if self.sampling is None else (self.sampling, *(one.sampling for one in self.regimes or ()))

    @property
    def regime_names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(one.name for one in self.samplings)

    def regime_for(self, params: SamplingParams) -> str | None:
        """The name of the regime whose setting `for_sampling` gives; None where none is known."""
        return None if self.sampling is None else self.regime_names[nearest(Sampling.of(params), self.samplings)]

    def for_sampling(self, params: SamplingParams) -> DecodeConfig:
        """The config for requests whose tokens are chosen so, without `regimes`: its own, or the nearest regime's.

        A config that does not know its `sampling` is taken as it is. Of one that does, it is the default's or a
        regime's setting: the one with the same `sampling`, or where there is none the nearest in temperature. Greedy
        counts as temperature 0, so a greedy request takes a greedy setting if there is one. Of equally near ones it is
        that with the nearer top_p, then the first. A setting whose search said not to speculate has gamma 0 and decodes
        plainly.
        The provenance is kept as it is: its `trial` and `searched_tokens_per_s` are the default's.
        """
        if self.regimes is None:
            return self
        place = nearest(Sampling.of(params), self.samplings)  # the default's is the first
        return self._narrowed(self.regimes[place - 1]) if place else self.model_copy(update={"regimes": None})

    def _narrowed(self, setting: _Setting) -> DecodeConfig:
        """A config of this setting alone."""
        fields = {field: getattr(setting, field) for field in GroupSetting.model_fields}
        return DecodeConfig(**fields, provenance=self.provenance)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, exclude_none=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DecodeConfig:
        """Strict: unknown fields, wrong types, NaN and other schema versions are refused with a one-line ValueError."""
        data = parse_json(text)
        if not isinstance(data, dict):
            raise ValueError(f"must be a JSON object, got {type(data).__name__}")
        if "schema_version" not in data:
            raise ValueError("schema_version: is required")
        return cls(**data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write atomically: the file is the old one or the new one, never half of either. Draft weights near
        the file's folder are named from there, others by their whole path."""
        folder = Path(path).absolute().parent
        write_atomically(Path(path), self._with_weights_at(lambda at: _named_from(at, folder)).to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DecodeConfig:
        """Read a file made by `save`. Raises ValueError naming the file, FileNotFoundError if there is none."""
        path = Path(path)
        if path.is_file() and path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: a decode config is at most {_MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))._with_weights_at(lambda at: _placed(at, path.parent))
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not UTF-8 text") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        config_file_name: str | os.PathLike[str] | None = None,
        **hub_arguments: Unpack[HubArguments],
    ) -> DecodeConfig:
        """Read the config next to a model: in its folder, or in its repository on the hub. See `locate_config`.

        Raises: FileNotFoundError if there is none, OSError if the hub cannot be asked, ValueError naming the file.
        """
        return cls.load(locate_config(pretrained_model_name, config_file_name, **hub_arguments))

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        config_file_name: str | os.PathLike[str] | None = None,
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_arguments: Unpack[PushArguments],
    ) -> None:
        """Write `decode_config.json` into a model's folder, which is made if there is none; push it too if asked.

        A model that the provenance names by a path is now the one next to the file (`./`); a hub id stays.
        """
        folder, name = Path(save_directory), check_file_name(config_file_name)
        if folder.is_file():
            raise ValueError(f"save_directory: must be a folder, got the file {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        self._next_to_its_model().save(folder / name)
        if push_to_hub:
            self.push_to_hub(repo_id or folder.absolute().name, name, **push_arguments)

    def push_to_hub(
        self,
        repo_id: str,
        config_file_name: str | os.PathLike[str] | None = None,
        **push_arguments: Unpack[PushArguments],
    ) -> CommitInfo:
        """Commit the config to a model repository on the hub, as `save_pretrained` writes it. See `upload_config`.

        Raises: ValueError for a config with draft weights in a folder of this machine, which would mean nothing there.
        """
        for path in (one.path for one in self.all_draft_weights):
            if path != OWN_LAYERS and not is_hub_id(path):
                raise ValueError(f"draft_weights: a config on the hub cannot name a folder of this machine, got {path}")
        return upload_config(
            self._next_to_its_model().to_json(), repo_id, check_file_name(config_file_name), **push_arguments
        )

    def _with_weights_at(self, moved: Callable[[str], str]) -> DecodeConfig:
        """The same with every path of draft weights given anew."""

        def of(setting: _Setting) -> dict[str, Any]:
            weights = setting.draft_weights
            if weights is None or weights.path == OWN_LAYERS:
                return {}
            return {"draft_weights": weights.model_copy(update={"path": moved(weights.path)})}

        changes = of(self)
        if self.groups is not None:
            changes["groups"] = {name: one.model_copy(update=of(one)) for name, one in self.groups.items()}
        if self.regimes is not None:
            changes["regimes"] = tuple(one.model_copy(update=of(one)) for one in self.regimes)
        return self.model_copy(update=changes)

    def _next_to_its_model(self) -> DecodeConfig:
        made_for = self.provenance
        if made_for is None or not (made_for.model.startswith(".") or Path(made_for.model).is_absolute()):
            return self
        return self.model_copy(update={"provenance": made_for.model_copy(update={"model": "./"})})


def _placed(weights: str, folder: Path) -> str:
    """Where weights lie that a config file in this folder names."""
    return os.path.normpath(folder.absolute() / weights) if weights.startswith(("./", "../")) else weights


def _named_from(weights: str, folder: Path) -> str:
    """The inverse of `_placed`."""
    return weights if is_hub_id(weights) else near_path(Path(weights).absolute(), folder)


def near_path(path: Path, folder: Path) -> str:
    """An absolute path as a file in this folder names it: from there where it lies near, else whole."""
    folder = folder.absolute()
    near = os.path.relpath(path, folder).replace(os.sep, "/")
    is_far = near.split("/").count("..") > 3  # a regime's study lies in a folder of the whole study's
    if is_far or os.path.commonpath([path, folder]) == folder.anchor:
        return str(path)
    return near if near.startswith("../") else f"./{near}"


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write to a temporary file in the same folder, flush it to disk and rename it over `path`.

    Raises: OSError naming `path`, which is then as it was before.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
