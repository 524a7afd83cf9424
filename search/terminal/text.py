"""Words of a trial, and a duration in few characters."""

from __future__ import annotations

from optuna.trial import FrozenTrial, TrialState

from search.study.attributes import (
    ACCEPTANCE_RATE,
    FAILURE,
    MEAN_ACCEPTED_LENGTH,
    NUM_SKIPPED_ATTENTION,
    NUM_SKIPPED_MLP,
    ORIGIN,
    REPEAT_OF,
    SKIP_MASK,
    SPEEDUP,
    SPEEDUP_CI_HIGH,
    SPEEDUP_CI_LOW,
    STOPPED_EARLY,
    VIOLATION,
)
from search.study.space import DRAFTER, GAMMA, LOOKUP_GAMMA, LOOKUP_METHOD, MIN_MATCH
from search.study.trials import tokens_per_s_of


def trial_line(trial: FrozenTrial, done: int, total: int, best: str) -> str:
    """One trial in one line of at most about 150 ASCII characters."""
    attrs = trial.user_attrs
    head = f"trial {done:>{len(str(total))}}/{total}"
    origin = origin_of(trial)
    if trial.state == TrialState.PRUNED:
        return f"{head}  NOT LOSSLESS: {attrs.get(VIOLATION)}; mask {attrs.get(SKIP_MASK)}  [{origin}]"
    if trial.state == TrialState.FAIL or trial.value is None:
        return f"{head}  failed: {attrs.get(FAILURE, 'no reason kept')}  [{origin}]"
    stopped = "<" if attrs.get(STOPPED_EARLY) else " "
    parts = [
        f"{head} {stopped}{tokens_per_s_of(trial):7.1f} tok/s",
        f"{attrs[SPEEDUP]:.2f}x {interval_of(trial):<11}",
        f"best {best}",
        f"accept {_number(attrs.get(ACCEPTANCE_RATE))}",
        f"len {_number(attrs.get(MEAN_ACCEPTED_LENGTH))}",
        *_drafting(trial),
        f"[{origin}]",
    ]
    return "  ".join(parts)


def _drafting(trial: FrozenTrial) -> list[str]:
    """How a trial drafted: by lookup, under a mask, or both."""
    attrs, params = trial.user_attrs, trial.params
    layers = attrs.get(SKIP_MASK, "?").partition(":")[0]
    told = []
    if LOOKUP_GAMMA in params:
        method = params.get(LOOKUP_METHOD, params.get(DRAFTER))
        told.append(f"{method} {params[MIN_MATCH]}+ gamma {params[LOOKUP_GAMMA]}")
    if GAMMA in params:
        told.append(f"skip attn {attrs[NUM_SKIPPED_ATTENTION]:>2} mlp {attrs[NUM_SKIPPED_MLP]:>2} of {layers}")
        told.append(f"gamma {params[GAMMA]}")
    return told


def origin_of(trial: FrozenTrial) -> str:
    """Who proposed it."""
    attrs = trial.user_attrs
    return f"repeat of #{attrs[REPEAT_OF]}" if REPEAT_OF in attrs else attrs.get(ORIGIN, "?")


def interval_of(trial: FrozenTrial) -> str:
    """95 % interval of the speedup; empty if it stopped early."""
    attrs = trial.user_attrs
    if SPEEDUP_CI_LOW not in attrs or attrs.get(STOPPED_EARLY):
        return ""
    return f"{attrs[SPEEDUP_CI_LOW]:.2f}..{attrs[SPEEDUP_CI_HIGH]:.2f}"


def duration(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None) -> str:
    return "  - " if value is None else f"{value:4.2f}"
