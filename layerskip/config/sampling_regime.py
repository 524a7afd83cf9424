"""Sampling: how tokens are chosen, as a part of a decode config, with a short name for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Self

from pydantic import model_validator

from layerskip.config.sampling_params import SamplingParams
from layerskip.config.validated import Frozen, OneLineErrors

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_LETTERS = {
    "top_p": "p",
    "top_k": "k",
    "min_p": "min",
    "repetition_penalty": "r",
    "presence_penalty": "pres",
    "frequency_penalty": "freq",
}
"""In a name, what stands before the value of each field that differs from its default; in this order."""
NAME_RULE = (
    "must be greedy or tTEMPERATURE, then any of _pTOP_P, _kTOP_K, _minMIN_P, _rREPETITION_PENALTY, "
    "_presPRESENCE_PENALTY and _freqFREQUENCY_PENALTY, each once"
)


class Sampling(OneLineErrors, Frozen):
    """How tokens are chosen; fields and rules are those of `SamplingParams`.

    What greedy choice ignores is left out, so that two of these are equal where they choose alike.
    Raises: ValueError in one line naming the field, the rule and the value got.
    """

    do_sample: bool = SamplingParams.do_sample
    temperature: float = SamplingParams.temperature
    top_k: int = SamplingParams.top_k
    top_p: float = SamplingParams.top_p
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        self.params()
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if not self.do_sample and value != getattr(SamplingParams, name):
                raise ValueError(f"{name}: must be left out where do_sample is false, greedy ignores it; got {value}")
        return self

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """What acts of these parameters: for greedy the penalties alone."""
        acting = cls.model_fields if params.do_sample else _PENALTIES
        return cls(**{name: type(cls.model_fields[name].default)(getattr(params, name)) for name in acting})

    def params(self) -> SamplingParams:
        """The same as parameters of a sampler."""
        return SamplingParams(**{name: getattr(self, name) for name in Sampling.model_fields})

    @property
    def name(self) -> str:
        """`greedy`, or `t0.7` for the temperature, and after it what differs from the defaults: `t0.7_p0.9_k40`."""
        parts = [f"t{_written(self.temperature)}" if self.do_sample else "greedy"]
        for field, letters in _LETTERS.items():
            value = getattr(self, field)
            if value != getattr(SamplingParams, field):
                parts.append(letters + _written(value))
        return "_".join(parts)

    @classmethod
    def parse(cls, name: str) -> Sampling:
        """The one of this name; parts may come in any order. Raises: ValueError in one line."""
        first, *parts = name.split("_")
        values: dict[str, Any] = {}
        if first != "greedy":
            values = {"do_sample": True, "temperature": _read("t", first, name)}
        for part in parts:
            field = next((one for one, letters in _LETTERS.items() if re.fullmatch(letters + _NUMBER, part)), None)
            if field is None or field in values:
                raise _unreadable(name)
            values[field] = _read(_LETTERS[field], part, name, whole=field == "top_k")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"regime {name[:80]!a}: {error}") from None


GREEDY = Sampling()


def nearest(wanted: Sampling, known: Sequence[Sampling]) -> int:
    """Which of `known`, at least one, is nearest: the same; else by temperature, greedy being 0; of equals by top_p,
    and then by the penalties.

    Of those that are as near in both, the first. Distances of a billionth and less are the same.
    """

    def distance(place: int) -> tuple[float, ...]:
        one = known[place]
        penalties = sum(abs(getattr(one, name) - getattr(wanted, name)) for name in _PENALTIES)
        apart = (abs(_heat(one) - _heat(wanted)), abs(one.top_p - wanted.top_p), penalties)
        return (one != wanted, *(round(each, 9) for each in apart))

    return min(range(len(known)), key=distance)


def _heat(sampling: Sampling) -> float:
    return sampling.temperature if sampling.do_sample else 0.0


def _written(value: float) -> str:
    """As short as a number can be written that is read back as the same one."""
    short = f"{value:g}"
    return short if isinstance(value, float) and float(short) == value else repr(value)


def _read(letters: str, part: str, name: str, *, whole: bool = False) -> float:
    digits = part.removeprefix(letters)
    if digits == part or not re.fullmatch("[0-9]+" if whole else _NUMBER, digits) or len(digits) > 32:
        raise _unreadable(name)
    return int(digits) if whole else float(digits)


def _unreadable(name: str) -> ValueError:
    return ValueError(f"regime: {NAME_RULE}; got {name[:80]!a}")
