"""The search with one of its parts left out, each by a patch: what a part is worth is what is lost without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from search.confirm import passes
from search.outlook import forecast, refinement
from search.outlook.opening import OutlookOpening
from search.outlook.outlook import Outlook
from search.predict import costs, learnt_costs
from search.predict.learnt_costs import CostLearner
from search.predict.more_texts import MoreTexts
from search.study import leaderboard
from search.study.attributes import MORE, TEXTS
from search.trials import proposals, replay_proposer

Patches = Callable[[ExitStack], None]


def _one_fidelity(stack: ExitStack) -> None:
    """All tuning texts are read for every mask; none are made beyond them."""
    begin = OutlookOpening.outlook

    def outlook(self: OutlookOpening) -> Outlook:
        if TEXTS not in self.study.user_attrs:
            self.study.set_user_attr(TEXTS, len(self._reference_texts()))
            self.study.set_user_attr(MORE, MoreTexts().to_json())
        return begin(self)

    stack.enter_context(patch.object(OutlookOpening, "outlook", outlook))


def _no_learnt_costs(stack: ExitStack) -> None:
    stack.enter_context(patch.object(CostLearner, "learn", lambda _self, measured, _trials: measured))


def _no_taste(stack: ExitStack) -> None:
    """Prompts' interaction with configs is not taken out, nor forecasts drawn towards, which ask for it."""
    stack.enter_context(patch.object(leaderboard, "interactions_of", lambda _attributes: None))
    stack.enter_context(patch("search.trials.objective.interactions_of", lambda _attributes: None))


def _no_shrinkage(stack: ExitStack) -> None:
    """Leaders as measured, not drawn towards their forecasts."""

    def as_measured(fit: Any, _forecasts: Any, sigma: float, _may_lead: Any) -> tuple[Any, Any]:
        return fit.configs, np.sqrt(sigma**2 / fit.pairs)

    stack.enter_context(patch.object(leaderboard, "_shrink_to_forecasts", as_measured))


def _no_repeats(stack: ExitStack) -> None:
    stack.enter_context(patch.object(proposals, "not_taken", lambda *_: []))


def _only_predicted(stack: ExitStack) -> None:
    """The leader is what the prediction says of all that was measured; nothing is learnt from measuring."""
    for one in (_no_learnt_costs, _no_repeats):
        one(stack)

    def as_forecast(_fit: Any, forecasts: Any, _sigma: float, _may_lead: Any) -> tuple[Any, Any]:
        return np.array([0.0 if one is None else one for one in forecasts]), np.zeros(len(forecasts))

    stack.enter_context(patch.object(leaderboard, "_shrink_to_forecasts", as_forecast))


ABLATIONS: dict[str, Patches] = {
    "one_fidelity": _one_fidelity,
    "no_learnt_costs": _no_learnt_costs,
    "no_taste": _no_taste,
    "no_shrinkage": _no_shrinkage,
    "no_repeats": _no_repeats,
    "only_predicted": _only_predicted,
}
"""By name: the part that is left out."""


CONSTANTS: dict[str, ModuleType] = {
    **dict.fromkeys(("_INTERACTION_PRIOR", "_PRIOR_FORECAST_SIGMA", "_FORECAST_PRIOR", "PRIOR_SIGMA"), leaderboard),
    **dict.fromkeys(("_MOMENT", "_SINGLE", "_COMMON", "_OWN", "_TERM"), learnt_costs),
    **dict.fromkeys(("_NUM_AHEAD",), refinement),
    **dict.fromkeys(("_NUM_ELITE", "_NUM_ORDERED"), forecast),
    **dict.fromkeys(("_NUM_PARENTS", "_NUM_VARIANTS"), replay_proposer),
    "_NUM_REPEAT": proposals,
    "_NUM_KEPT": costs,
    "RACE_FROM": passes,
    "TIE": passes,
}
"""Constants of the search's statistics that were set by hand, and the module that has each."""


def _at(factor: float, name: str) -> Patches:
    """With a constant at so many times its value; a number of things is a whole one, and at least 1."""

    def patches(stack: ExitStack) -> None:
        value = getattr(CONSTANTS[name], name)
        other = max(1, round(factor * value)) if isinstance(value, int) else factor * value
        stack.enter_context(patch.object(CONSTANTS[name], name, other))

    return patches


AT_HALF_AND_DOUBLE: dict[str, Patches] = {
    f"{word}_{name.strip('_').lower()}": _at(factor, name)
    for name in CONSTANTS
    for word, factor in (("half", 0.5), ("double", 2.0))
}
"""By name: a constant at half its value, or twice."""


@contextmanager
def left_out(names: str) -> Iterator[None]:
    """Without these parts of the search, or with these constants at half or double, with a plus between them; as it is
    where no name is given."""
    with ExitStack() as stack:
        for name in filter(None, names.split("+")):
            (ABLATIONS | AT_HALF_AND_DOUBLE)[name](stack)
        yield
