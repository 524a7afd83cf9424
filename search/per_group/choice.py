"""Which setting a group gets: its own, the default's, or plain decoding; and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from layerskip.config.decode_config import DecodeConfig, GroupSetting
from search.confirm.passes import TIE
from search.per_group.matrix import Cell
from search.study.config_words import describe

_MAX_REASON = 500
_NO = "do not speculate"
Source = Literal["own", "default", "plain"]


@dataclass(frozen=True)
class Decision:
    """What a group gets, and from where."""

    setting: GroupSetting
    source: Source


def decide(own: Cell, default: Cell, *, noise_sigma: float, search_said: str | None) -> Decision:
    """The group's own setting where it beats the default's on the group's held-out prompts, else the default's.

    `search_said` is why the group's own search ended with plain decoding, if it did. The paired difference must exceed
    confirm's max(1 %, noise / sqrt(prompts) * sqrt(2)). The winner of the two is kept only if the low end of its
    interval lies above 1.0; else the group decodes plainly.
    """
    why_default = _why_default(own, default, noise_sigma)
    cell, source = (own, "own") if why_default is None else (default, "default")
    measured = cell.measured
    if measured is not None and cell.excluded is None and measured.speedup_ci_low > 1.0:
        reason = None if why_default is None else f"the default's setting: {why_default}"[:_MAX_REASON]
        fields = {name: getattr(cell.config, name) for name in GroupSetting.model_fields}
        setting = GroupSetting(**(fields | {"reason": reason, "confirmed": measured}))
        return Decision(setting, "own" if why_default is None else "default")
    said = search_said.removeprefix(_NO + ": ") if search_said else None
    differ = own.config != default.config
    reasons = [said, why_default if differ else None, _why_plain(cell, source)]
    reason = f"{_NO}: {'; '.join(one for one in reasons if one)}"[:_MAX_REASON]
    plain = DecodeConfig.plain(cell.config.skip_mask.num_layers)
    return Decision(GroupSetting(skip_mask=plain.skip_mask, gamma=0, reason=reason), "plain")


def tolerance(noise_sigma: float, num_prompts: int) -> float:
    """The log difference of two settings on the same prompts up to which they count as equal."""
    return max(TIE, math.sqrt(2) * noise_sigma / math.sqrt(num_prompts))


def _why_default(own: Cell, default: Cell, noise_sigma: float) -> str | None:
    """Why the group does not get its own setting; None if it does."""
    if own.config == default.config:
        return "the group's own search arrived at it too"
    if own.speedup is None:
        return f"the group's own was excluded ({own.excluded})"
    if default.speedup is None:
        return None
    number = next(cell.measured.num_prompts for cell in (own, default) if cell.measured)
    needed, gain = tolerance(noise_sigma, number), math.log(own.speedup / default.speedup)
    if gain > needed:
        return None
    return (
        f"the group's own ({describe(own.config)}) reached {own.speedup:.3f}x on its {number} held-out prompts, the "
        f"default's {default.speedup:.3f}x; that is {100 * math.expm1(gain):+.1f} %, and better means more than "
        f"{100 * math.expm1(needed):.1f} %"
    )


def _why_plain(cell: Cell, source: str) -> str | None:
    """What was wrong with the setting that would have been taken; None where it is plain decoding anyway."""
    if cell.excluded is not None:
        return f"the {source} setting was excluded ({cell.excluded})"
    measured = cell.measured
    if measured is None:
        return None
    return (
        f"the {source} setting ({describe(cell.config)}) reached {measured.speedup:.3f}x on {measured.num_prompts} "
        f"held-out prompts, 95 % interval {measured.speedup_ci_low:.3f} to {measured.speedup_ci_high:.3f}, which does "
        "not lie above 1.0"
    )
