"""What rivals may ask of the model: agreement, step costs and hidden states, shared by all runs and paid by each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layerskip.config import MaskField
from layerskip.skip_mask import SkipMask
from layerskip.validated import Probability, describe_validation_error
from search.comparison.accounting import Account, SharedForcing
from search.comparison.journal import Journal
from search.cost_model import CostModel, CostOptions, measure_costs
from search.outlook import texts_to_time
from search.predictor import LayerStates
from search.reference import Reference
from search.subject import Subject

T = TypeVar("T")


class ModelHints:
    """See `search.rivals.common.Hints`. All tuning texts of the reference are read.

    A strategy may ask for thousands of agreements, so these are kept in a journal, and a resume need not work them out
    again.
    """

    def __init__(self, subject: Subject, reference: Reference, account: Account, journal: Journal) -> None:
        self._subject, self._reference, self._account = subject, reference, account
        self._journal = journal
        self._texts = tuple(case.text for case in reference.cases)

    @property
    def cost(self) -> CostModel:
        """Measured once. Cost: as `measure_costs`."""
        return self._account.ask("costs", self._measure_costs)

    @property
    def states(self) -> LayerStates | None:
        """Of the teacher forcing, where it works layer by layer. Cost, once: a target forward over every text."""
        forcing = self._forcing.forcing
        return forcing if isinstance(forcing, LayerStates) else None

    def agreement(self, mask: SkipMask) -> float:
        """Share of positions with the target's token. Cost: a reading."""
        forcing = self._forcing

        def work() -> float:
            accepted = forcing.forcing.read(mask).accepted[0]
            return float(accepted.sum() / max(1, int((np.asarray(forcing.lengths) - 1).sum())))

        question = ("agreement", mask)
        is_new = self._account.price(question) is None
        value = self._account.ask(question, work)
        if is_new:
            seconds = self._account.price(question)
            self._journal.append({"mask": str(mask), "agreement": value, "seconds": seconds})
        return value

    def once(self, name: str, work: Callable[[], T]) -> T:
        """See `Hints`."""
        return self._account.ask(("once", name), work)

    def recall(self) -> None:
        """Put the journal's agreements where all runs find them. Raises: ValueError naming file and line."""
        for mask, agreement, seconds in read_agreements(self._journal):
            self._account.remember(("agreement", mask), agreement, seconds)

    @cached_property
    def _forcing(self) -> SharedForcing:
        return SharedForcing(self._subject.decoder, self._texts, self._account)

    def _measure_costs(self) -> CostModel:
        subject, space = self._subject, self._subject.space
        options = CostOptions(space.gamma_max)
        timer = subject.decoder.timer(space.gamma_max)
        return measure_costs(
            timer, texts_to_time(self._reference, space.gamma_max), space, subject.fingerprint, options
        )


class _Agreement(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    mask: MaskField
    agreement: Probability
    seconds: Annotated[float, Field(ge=0.0)]


def read_agreements(journal: Journal) -> list[tuple[SkipMask, float, float]]:
    """(mask, agreement, seconds it took) of every line. Raises: ValueError naming file, line and field."""
    found = []
    for number, fields in enumerate(journal.read(), start=1):
        try:
            one = _Agreement.model_validate(fields)
        except ValidationError as error:
            what = describe_validation_error(error)
            raise ValueError(f"{journal.path}: line {number} is not an agreement: {what}") from None
        found.append((one.mask, one.agreement, one.seconds))
    return found
