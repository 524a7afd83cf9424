"""CostModel: measured seconds of the steps that decoding is made of, on this device and at the study's text lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from layerskip.config.decode_config import DraftedBy, DraftWeights
from layerskip.config.skip_mask import DRAFT_BITS, DraftBits, SkipMask
from layerskip.config.validated import describe_validation_error
from search.measure.decoder import Timer
from search.study.fingerprint import Fingerprint
from search.study.space import SearchSpace

NUM_REPEATS = 11
"""Of a measurement of the costs."""
_DRAFT_LENGTH = 4
_FURTHER = (13, 17)
"""Tokens of verifications that only lookups need."""
_NUM_KEPT = 5
"""Of the measurements made during a study, the latest so many are pooled."""
_LEAST_SHARE = 0.05
"""Of a draft step that is left whatever its `draft_vocab` is measured to save."""
_DEVICE_FIELDS = ("device", "cpu", "dtype", "quantization", "engine", "num_threads", "weights")


@dataclass(frozen=True)
class CostModel:
    """Seconds. A draft step under a mask costs `fixed_s` and what its kept sublayers cost."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    verify_s: tuple[float, ...]
    """Entry n: verifying n draft tokens, a target forward over n + 1; entry 0 is the target alone. Up to gamma_max, or
    as far as lookups go; there some numbers are measured, and those in between are taken to lie on lines."""
    fixed_s: float
    attention_s: tuple[float, ...]
    mlp_s: tuple[float, ...]
    threshold_s: float
    """What looking at the draft's confidence adds to a draft step."""
    fit_error: float
    """Median relative error of the sum of terms on the masks it was fitted to."""
    context_tokens: int
    """Text length at which it was measured."""
    measured_on: Mapping[str, object]
    """Device, engine and weights."""
    narrowed_s: Mapping[str, float] = field(default_factory=dict)
    """What a draft token under a mask takes less with this `draft_vocab`, and with this one and weights of fewer
    bits."""
    weights_s: Mapping[str, float] = field(default_factory=dict)
    """A draft token of trained weights, or a level of a tree, by name; see `named`."""
    int8_s: tuple[float, float, float] | None = None
    """Under a mask with 8-bit weights: what is fixed of a draft step, an attention and an MLP. None where it is not
    searched."""
    int4_s: tuple[float, float, float] | None = None
    """The same with 4-bit weights."""

    def rounded_s(self, bits: DraftBits | None) -> tuple[float, float, float] | None:
        """`int8_s` or `int4_s`; None where they were not measured, and of weights as they are."""
        return {8: self.int8_s, 4: self.int4_s, None: None}[bits]

    def with_rounded(self, bits: DraftBits, terms: tuple[float, float, float] | None) -> CostModel:
        """With these for `int8_s` or `int4_s`."""
        return replace(self, int8_s=terms) if bits == 8 else replace(self, int4_s=terms)

    def draft_s(self, drafted_by: DraftedBy, *, threshold: bool) -> float:
        """One draft token, under a mask by the sum of terms."""
        if not isinstance(drafted_by, SkipMask):
            return self.by_weights_s(named(drafted_by)) + (self.threshold_s if threshold else 0.0)
        mask = drafted_by
        if (rounded_s := self.rounded_s(mask.bits)) is not None:
            whole = float(np.dot(rounded_s, kept_of(mask)))
        else:
            whole = self.fixed_s + sum(s for s, skip in zip(self.attention_s, mask.attention, strict=True) if not skip)
            whole += sum(s for s, skip in zip(self.mlp_s, mask.mlp, strict=True) if not skip)
        return max(_LEAST_SHARE * whole, whole - self.saved_s(mask)) + (self.threshold_s if threshold else 0.0)

    def saved_s(self, mask: SkipMask) -> float:
        """What its `draft_vocab` saves of a draft token."""
        return 0.0 if mask.draft_vocab is None else self.narrowed_s.get(_narrowing(mask), 0.0)

    def by_weights_s(self, name: str) -> float:
        """One draft token of trained weights of this name, see `named`, without a look at its confidence."""
        return self.weights_s[name]

    def to_json(self) -> str:
        """One line, for a study's attributes."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, now: Fingerprint) -> CostModel:
        """The inverse of `to_json`. Raises: ValueError if it was measured on another device, engine or model."""
        model = cls.parse(text)
        here = device_facts(now)
        for name, value in here.items():
            if model.measured_on.get(name) != value:
                raise ValueError(
                    f"cost_model.measured_on.{name}: must be this run's {value!r}, got "
                    f"{model.measured_on.get(name)!r}; use another --study-name"
                )
        return model

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """The inverse of `to_json`, wherever it was measured. Raises: ValueError if it cannot be read."""
        try:
            return _COST_MODEL.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"cost_model: cannot be read: {describe_validation_error(error)}") from None


_COST_MODEL = TypeAdapter(CostModel)


def kept_of(mask: SkipMask) -> tuple[float, float, float]:
    """1, and how many attention and MLP sublayers it keeps: what a draft step's terms are multiplied by."""
    count = mask.num_layers
    return 1.0, float(count - mask.num_skipped_attention), float(count - mask.num_skipped_mlp)


def _narrowing(mask: SkipMask) -> str:
    return f"{mask.draft_vocab}{'' if mask.bits is None else f' int{mask.bits}'}"


def named(weights: DraftWeights) -> str:
    """Their fingerprint, with their `draft_vocab` and `tree_tokens` if they have such."""
    vocab = "" if weights.draft_vocab is None else f" v{weights.draft_vocab}"
    return weights.fingerprint + vocab + ("" if weights.tree_tokens is None else f" t{weights.tree_tokens}")


def device_facts(fingerprint: Fingerprint) -> dict[str, object]:
    """The fingerprint's fields that step times depend on."""
    return {name: getattr(fingerprint, name) for name in _DEVICE_FIELDS}


def measure_costs(
    timer: Timer,
    texts: Sequence[Sequence[int]],
    space: SearchSpace,
    now: Fingerprint,
    *,
    repeats: int = NUM_REPEATS,
    seed: int = 0,
) -> CostModel:
    """Time everything once per repeat, all things in turn, and take medians; texts alternate from repeat to repeat.

    Cost: repeats x (gamma_max + 1 verifications and about 10 masks x 4 draft steps, of `num_further` masks more),
    each mask's after a target step.
    Raises: ValueError without a text.
    """
    if not texts:
        raise ValueError("texts: at least one is needed to time steps, got none")
    masks = _fitting_masks(space, seed)
    counts = _counts(space)
    trained = [one for weights in space.draft_weights for one in space.variants_of(weights)]
    telling_apart = [*masks[:2], *masks[4:6]]
    by_bits = {None: masks} | {bits: [mask.rounded(bits) for mask in telling_apart] for bits in space.draft_bits}
    emptiest = [of_bits[1] for of_bits in by_bits.values()] if space.draft_vocabs else []
    narrow = [[mask, space.narrowed(mask, space.draft_vocabs[-1])] for mask in emptiest]
    drafts = [mask for row in (*by_bits.values(), *narrow) for mask in row]
    verify, plain_draft, watched, weights = [], [], [], []
    for repeat in range(repeats + 1):
        text = texts[repeat % len(texts)]
        verify.append(timer.verify_s(text, counts))
        plain_draft.append(timer.draft_s(text, drafts, gamma=_DRAFT_LENGTH, threshold=False))
        watched.append(timer.draft_s(text, masks[:2], gamma=_DRAFT_LENGTH, threshold=True))
        if trained:  # apart: where steps are recorded, others are recorded for drafts that read hidden states
            weights.append(timer.draft_s(text, trained, gamma=_DRAFT_LENGTH, threshold=False))
    draft_s = _median(plain_draft[1:])  # the first repeat warms up
    weights_s = _median(weights[1:]).tolist() if weights else []
    ends = np.cumsum([len(of_bits) for of_bits in by_bits.values()])
    masks_s = dict(zip(by_bits, np.split(draft_s[: ends[-1]], ends[:-1]), strict=True))
    narrowed_s = np.array(plain_draft[1:])[:, ends[-1] :]
    fixed_s, attention_s, mlp_s, error = _fit(masks, masks_s[None])
    cost = CostModel(
        verify_s=tuple(np.interp(np.arange(1, counts[-1] + 1), counts, _median(verify[1:])).tolist()),
        fixed_s=fixed_s,
        attention_s=(attention_s,) * space.num_layers,
        mlp_s=(mlp_s,) * space.num_layers,
        threshold_s=max(0.0, float(np.median(_median(watched[1:]) - masks_s[None][:2]))),
        fit_error=error,
        context_tokens=round(float(np.mean([len(text) for text in texts]))),
        measured_on=device_facts(now),
        narrowed_s=_saved(emptiest, narrowed_s, space.draft_vocabs) if narrow else {},
        weights_s={named(one): s for one, s in zip(trained, weights_s, strict=True)},
    )
    for bits in space.draft_bits:
        cost = cost.with_rounded(bits, _fit(telling_apart, masks_s[bits])[:3])
    return cost


def num_further(space: SearchSpace) -> int:
    """Masks, at most, whose draft steps are timed because bits and vocabularies of drafts are searched."""
    num_bits = len(space.draft_bits)
    return 4 * num_bits + (2 * (1 + num_bits) if space.draft_vocabs else 0)


def _saved(masks: Sequence[SkipMask], seconds: np.ndarray, vocabs: Sequence[int]) -> dict[str, float]:
    """What each mask saves with each vocabulary but the first, which is whole: as much a token id as with the last.

    seconds: (repeats, 2 * masks), each mask's with the whole vocabulary and with the last.
    """
    most = np.median(seconds[:, ::2] - seconds[:, 1::2], axis=0)
    return {
        _narrowing(mask.narrowed(size)): max(0.0, float(s)) * (vocabs[0] - size) / (vocabs[0] - vocabs[-1])
        for mask, s in zip(masks, most, strict=True)
        for size in vocabs[1:]
    }


def _counts(space: SearchSpace) -> list[int]:
    """Tokens of the forwards to time, ascending."""
    most, limit = space.gamma_max + 1, space.gamma_limit + 1
    further = {count for count in (*_FURTHER, limit) if most < count <= limit}
    return [*range(1, most + 1), *sorted(further)]


def free_costs(space: SearchSpace, gamma_max: int) -> CostModel:
    """Nothing costs anything: for counting alone."""
    nothing = (0.0,) * space.num_layers
    return CostModel((0.0,) * (gamma_max + 1), 0.0, nothing, nothing, 0.0, 0.0, 0, {})


def pool_costs(history: Sequence[CostModel]) -> CostModel:
    """Entry by entry the median of the latest measurements: drift is followed, one bad moment is not."""
    latest = list(history)[-_NUM_KEPT:]
    if not latest:
        raise ValueError("history: must hold at least one measurement, got none")
    newest = latest[-1]

    def median_of(name: str) -> float:
        return float(np.median([getattr(one, name) for one in latest]))

    cost = CostModel(
        verify_s=tuple(np.median([one.verify_s for one in latest], axis=0).tolist()),
        fixed_s=median_of("fixed_s"),
        attention_s=tuple(np.median([one.attention_s for one in latest], axis=0).tolist()),
        mlp_s=tuple(np.median([one.mlp_s for one in latest], axis=0).tolist()),
        threshold_s=median_of("threshold_s"),
        fit_error=median_of("fit_error"),
        context_tokens=newest.context_tokens,
        measured_on=newest.measured_on,
        narrowed_s={
            name: float(np.median([one.narrowed_s.get(name, 0.0) for one in latest])) for name in newest.narrowed_s
        },
        weights_s={name: float(np.median([one.by_weights_s(name) for one in latest])) for name in newest.weights_s},
    )
    for bits in DRAFT_BITS:
        cost = cost.with_rounded(bits, _median_terms([one.rounded_s(bits) for one in latest]))
    return cost


def _median_terms(terms: Sequence[tuple[float, float, float] | None]) -> tuple[float, float, float] | None:
    """None where the last ones are."""
    if terms[-1] is None:
        return None
    fixed, attention, mlp = _median([one for one in terms if one is not None]).tolist()
    return fixed, attention, mlp


def _fitting_masks(space: SearchSpace, seed: int) -> list[SkipMask]:
    """Masks that tell fixed, attention and MLP costs apart, as far as the space skips them apart."""
    count = space.num_layers
    rng = np.random.default_rng(seed)
    halves = [sorted(rng.permutation(count)[: count // 2].tolist()) for _ in range(2)]
    masks = [SkipMask.none(count), SkipMask.early_exit(count, 0)]
    masks += [SkipMask.from_layers(count, half) for half in halves]
    if len(space.attention_bits) == count:
        masks += [
            SkipMask.from_sublayers(count, attention=range(count)),
            SkipMask.from_sublayers(count, mlp=range(count)),
            SkipMask.from_sublayers(count, attention=halves[0], mlp=range(count)),
            SkipMask.from_sublayers(count, attention=range(count), mlp=halves[1]),
        ]
    return masks


def _fit(masks: Sequence[SkipMask], seconds: np.ndarray) -> tuple[float, float, float, float]:
    """(fixed, one attention, one MLP, median relative error), none of them negative, relative errors weighed alike."""
    from scipy.optimize import nnls

    kept = np.array([kept_of(mask) for mask in masks])
    if all(row[1] == row[2] for row in kept):  # whole layers only: their cost is split evenly, no mask tells it apart
        terms, _ = nnls(kept[:, :2] / seconds[:, None], np.ones(len(masks)))
        terms = np.array([terms[0], terms[1] / 2, terms[1] / 2])
    else:
        terms, _ = nnls(kept / seconds[:, None], np.ones(len(masks)))
    error = float(np.median(np.abs(kept @ terms / seconds - 1.0)))
    return float(terms[0]), float(terms[1]), float(terms[2]), error


def _median(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.asarray(np.median(np.array(rows), axis=0))
