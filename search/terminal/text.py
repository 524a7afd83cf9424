"""Words of a trial, and a duration in few characters."""

from __future__ import annotations

from optuna.trial import FrozenTrial, TrialState

from search.study.leaderboard import tokens_per_s_of
from search.study.space import DRAFTER, GAMMA, LOOKUP_GAMMA, LOOKUP_METHOD, MIN_MATCH


def trial_line(trial: FrozenTrial, done: int, total: int, best: str) -> str:
    """One trial in one line of at most about 150 ASCII characters."""
    attrs = trial.user_attrs
    head = f"trial {done:>{len(str(total))}}/{total}"
    origin = origin_of(trial)
    if trial.state == TrialState.PRUNED:
        return f"{head}  NOT LOSSLESS: {attrs.get('violation')}; mask {attrs.get('skip_mask')}  [{origin}]"
    if trial.state == TrialState.FAIL or trial.value is None:
        return f"{head}  failed: {attrs.get('failure', 'no reason kept')}  [{origin}]"
    stopped = "<" if attrs.get("stopped_early") else " "
    parts = [
        f"{head} {stopped}{tokens_per_s_of(trial):7.1f} tok/s",
        f"{attrs['speedup']:.2f}x {interval_of(trial):<11}",
        f"best {best}",
        f"accept {_number(attrs.get('acceptance_rate'))}",
        f"len {_number(attrs.get('mean_accepted_length'))}",
        *_drafting(trial),
        f"[{origin}]",
    ]
    return "  ".join(parts)


def _drafting(trial: FrozenTrial) -> list[str]:
    """How a trial drafted: by lookup, under a mask, or both."""
    attrs, params = trial.user_attrs, trial.params
    layers = attrs.get("skip_mask", "?").partition(":")[0]
    told = []
    if LOOKUP_GAMMA in params:
        method = params.get(LOOKUP_METHOD, params.get(DRAFTER))
        told.append(f"{method} {params[MIN_MATCH]}+ gamma {params[LOOKUP_GAMMA]}")
    if GAMMA in params:
        told.append(f"skip attn {attrs['num_skipped_attention']:>2} mlp {attrs['num_skipped_mlp']:>2} of {layers}")
        told.append(f"gamma {params[GAMMA]}")
    return told


def origin_of(trial: FrozenTrial) -> str:
    """Who proposed it."""
    attrs = trial.user_attrs
    return f"repeat of #{attrs['repeat_of']}" if "repeat_of" in attrs else attrs.get("origin", "?")


def interval_of(trial: FrozenTrial) -> str:
    """95 % interval of the speedup; empty if it stopped early."""
    attrs = trial.user_attrs
    if "speedup_ci_low" not in attrs or attrs.get("stopped_early"):
        return ""
    return f"{attrs['speedup_ci_low']:.2f}..{attrs['speedup_ci_high']:.2f}"


def duration(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None) -> str:
    return "  - " if value is None else f"{value:4.2f}"
