"""Words of a trial, and a duration in few characters."""

from __future__ import annotations

from optuna.trial import FrozenTrial, TrialState

from layerskip.config.decode_config import DraftWeights
from search.study import attributes as names
from search.study.config_words import beside_skipping, name_weights
from search.study.space import (
    DRAFTER,
    GAMMA,
    LOOKUP_GAMMA,
    LOOKUP_METHOD,
    MIN_MATCH,
    SIBLING_THRESHOLD,
    SIBLINGS,
    WEIGHTS_GAMMA,
    WEIGHTS_SIBLING_THRESHOLD,
    WEIGHTS_SIBLINGS,
    WEIGHTS_TREE,
)
from search.study.trials import tokens_per_s_of


def trial_line(trial: FrozenTrial, done: int, total: int, best: str) -> str:
    """One trial in one line of at most about 150 ASCII characters."""
    attrs = trial.user_attrs
    head = f"trial {done:>{len(str(total))}}/{total}"
    origin = origin_of(trial)
    if (trouble := trouble_of(trial)) is not None:
        mask = f"; mask {attrs.get(names.SKIP_MASK)}" if trial.state == TrialState.PRUNED else ""
        return f"{head}  {trouble}{mask}  [{origin}]"
    stopped = "<" if attrs.get(names.STOPPED_EARLY) else " "
    parts = [
        f"{head} {stopped}{tokens_per_s_of(trial):7.1f} tok/s",
        f"{attrs[names.SPEEDUP]:.2f}x {interval_of(trial):<11}",
        f"best {best}",
        f"accept {_number(attrs.get(names.ACCEPTANCE_RATE))}",
        f"len {_number(attrs.get(names.MEAN_ACCEPTED_LENGTH))}",
        *_drafting(trial),
        f"[{origin}]",
    ]
    return "  ".join(parts)


def trouble_of(trial: FrozenTrial) -> str | None:
    """Why a trial has no numbers; None if it has some."""
    if trial.state == TrialState.PRUNED:
        return f"NOT LOSSLESS: {trial.user_attrs.get(names.VIOLATION)}"
    if trial.state == TrialState.FAIL or trial.value is None:
        return f"failed: {trial.user_attrs.get(names.FAILURE, 'no reason kept')}"
    return None


def _drafting(trial: FrozenTrial) -> list[str]:
    """How a trial drafted: by lookup, under a mask or by trained weights, or by a lookup and one of these."""
    attrs, params = trial.user_attrs, trial.params
    mask = attrs.get(names.SKIP_MASK, "?")
    layers = mask.partition(":")[0]
    parts = []
    if LOOKUP_GAMMA in params:
        method = params.get(LOOKUP_METHOD, params.get(DRAFTER))
        parts.append(f"{method} {params[MIN_MATCH]}+ gamma {params[LOOKUP_GAMMA]}")
    if GAMMA in params:
        skipped = f"attn {attrs[names.NUM_SKIPPED_ATTENTION]:>2} mlp {attrs[names.NUM_SKIPPED_MLP]:>2}"
        parts += [f"skip {skipped} of {layers} {beside_skipping(mask)}".rstrip(), f"gamma {params[GAMMA]}"]
    if WEIGHTS_GAMMA in params:
        weights = DraftWeights.model_validate(attrs[names.DRAFT_WEIGHTS])
        parts += [name_weights(weights), f"gamma {params[WEIGHTS_GAMMA]}"]
    if siblings := params.get(SIBLINGS, 0) or params.get(WEIGHTS_SIBLINGS, 0):
        below = params.get(SIBLING_THRESHOLD, params.get(WEIGHTS_SIBLING_THRESHOLD, 1.0))
        parts.append(f"siblings {siblings}" + (f" below {below:g}" if below < 1.0 else ""))
    if tree_tokens := params.get(WEIGHTS_TREE, 0):
        parts.append(f"tree of {tree_tokens}")
    return parts


def origin_of(trial: FrozenTrial) -> str:
    """Who proposed it."""
    attrs = trial.user_attrs
    return f"repeat of #{attrs[names.REPEAT_OF]}" if names.REPEAT_OF in attrs else attrs.get(names.ORIGIN, "?")


def interval_of(trial: FrozenTrial) -> str:
    """95 % interval of the speedup; empty if it stopped early."""
    attrs = trial.user_attrs
    if names.SPEEDUP_CI_LOW not in attrs or attrs.get(names.STOPPED_EARLY):
        return ""
    return f"{attrs[names.SPEEDUP_CI_LOW]:.2f}..{attrs[names.SPEEDUP_CI_HIGH]:.2f}"


def duration(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None) -> str:
    return "  - " if value is None else f"{value:4.2f}"
