"""Trial <-> DecodeConfig: the search space; the only file that calls trial.suggest_*."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask

GAMMA = "gamma"
DRAFT_THRESHOLD = "draft_threshold"
TARGET_THRESHOLD = "target_threshold"
SHARE_PREFIX = "share_prefix"
THRESHOLD_STEP = 0.05
THRESHOLD_MAX = 0.95


@dataclass(frozen=True)
class SearchSpace:
    """One categorical bit per sublayer (or whole layer), gamma, and both thresholds.

    Bits are categorical because Optuna's samplers do worse, and slower, on 0/1 integers.
    Names are zero-padded (`skip.attn.07`) because the dashboard sorts them as text.
    """

    num_layers: int
    gamma_max: int
    attention_bits: tuple[int, ...]
    """Layers whose attention alone may be skipped."""
    mlp_bits: tuple[int, ...]
    """Layers whose MLP alone may be skipped."""
    layer_bits: tuple[int, ...]
    """Layers that are skipped whole or not at all."""
    share_prefix: bool = False
    """Whether to verify behind the layers that the draft keeps is searched too."""

    @classmethod
    def for_model(cls, model: Any, *, gamma_max: int, granularity: str, share_prefix: bool = False) -> SearchSpace:
        """What this model allows: where attention and MLP cannot be skipped apart, one bit stands for both."""
        whole: tuple[bool, ...] = model.whole_layers_only
        if granularity == "layer":
            whole = (True,) * model.num_layers
        apart = tuple(i for i, one in enumerate(whole) if not one)
        return cls(
            num_layers=model.num_layers,
            gamma_max=gamma_max,
            attention_bits=apart,
            mlp_bits=apart,
            layer_bits=tuple(i for i, one in enumerate(whole) if one),
            share_prefix=share_prefix,
        )

    @cached_property
    def bit_names(self) -> tuple[str, ...]:
        """Parameter names of the mask, layers in order."""
        width = max(2, len(str(self.num_layers - 1)))
        return tuple(
            f"skip.{kind}.{i:0{width}}"
            for kind, layers in (("attn", self.attention_bits), ("mlp", self.mlp_bits), ("layer", self.layer_bits))
            for i in layers
        )

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's view of the space; the same for every trial of a study."""
        threshold = FloatDistribution(0.0, THRESHOLD_MAX, step=THRESHOLD_STEP)
        bits: dict[str, BaseDistribution] = {name: CategoricalDistribution([False, True]) for name in self.bit_names}
        others: dict[str, BaseDistribution] = {
            GAMMA: IntDistribution(1, self.gamma_max),
            DRAFT_THRESHOLD: threshold,
            TARGET_THRESHOLD: threshold,
        }
        if self.share_prefix:
            others[SHARE_PREFIX] = CategoricalDistribution([False, True])
        return bits | others

    def suggest(self, trial: optuna.Trial) -> DecodeConfig:
        """Ask the trial for a config."""
        params: dict[str, Any] = {name: trial.suggest_categorical(name, [False, True]) for name in self.bit_names}
        params[GAMMA] = trial.suggest_int(GAMMA, 1, self.gamma_max)
        for name in (DRAFT_THRESHOLD, TARGET_THRESHOLD):
            params[name] = trial.suggest_float(name, 0.0, THRESHOLD_MAX, step=THRESHOLD_STEP)
        if self.share_prefix:
            params[SHARE_PREFIX] = trial.suggest_categorical(SHARE_PREFIX, [False, True])
        return self.to_config(params)

    def to_config(self, params: dict[str, Any]) -> DecodeConfig:
        """The config of a trial's parameters. Raises: ValueError if one is missing or unknown."""
        if params.keys() != self.distributions.keys():
            different = sorted(params.keys() ^ self.distributions.keys())
            raise ValueError(f"params: must be the space's parameters, differ in {different}")
        return DecodeConfig(
            skip_mask=self.to_mask(params),
            gamma=int(params[GAMMA]),
            draft_threshold=snap_threshold(params[DRAFT_THRESHOLD]),
            target_threshold=snap_threshold(params[TARGET_THRESHOLD]),
            share_prefix=bool(params.get(SHARE_PREFIX, False)),
        )

    def to_mask(self, bits: Mapping[str, Any]) -> SkipMask:
        """The mask of its bits; other parameters are ignored."""
        chosen = {name for name in self.bit_names if bits[name]}
        attention, mlp, layers = (_layers(chosen, kind) for kind in ("attn", "mlp", "layer"))
        return SkipMask.from_sublayers(self.num_layers, attention=attention | layers, mlp=mlp | layers)

    def to_bits(self, mask: SkipMask) -> dict[str, Any]:
        """The bits of a mask, those that the space has."""
        if mask.num_layers != self.num_layers:
            raise ValueError(f"skip_mask: must have {self.num_layers} layers, got {mask.num_layers}")
        flags = [mask.attention[i] for i in self.attention_bits]
        flags += [mask.mlp[i] for i in self.mlp_bits]
        flags += [mask.attention[i] and mask.mlp[i] for i in self.layer_bits]
        return dict(zip(self.bit_names, flags, strict=True))

    def to_params(self, config: DecodeConfig) -> dict[str, Any]:
        """The parameters of a config, moved to the nearest point of the space.

        Bits the space has not are dropped; a whole-layer bit is set if the config skips both halves; gamma is cut to
        1..gamma_max; thresholds are rounded to the step. On configs of the space it is the inverse of `to_config`.
        """
        params = self.to_bits(config.skip_mask) | {
            GAMMA: min(max(config.gamma, 1), self.gamma_max),
            DRAFT_THRESHOLD: snap_threshold(config.draft_threshold),
            TARGET_THRESHOLD: snap_threshold(config.target_threshold),
        }
        return params | {SHARE_PREFIX: config.share_prefix} if self.share_prefix else params


def snap_threshold(value: float) -> float:
    """The nearest threshold on the grid 0, 0.05, ..., 0.95, without binary dust."""
    return round(min(max(round(value / THRESHOLD_STEP), 0), round(THRESHOLD_MAX / THRESHOLD_STEP)) * THRESHOLD_STEP, 2)


def _layers(names: Iterable[str], kind: str) -> set[int]:
    return {int(name.rpartition(".")[2]) for name in names if name.startswith(f"skip.{kind}.")}
