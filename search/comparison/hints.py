"""What rivals may ask of the model: agreement, costs, settings and plans, shared by all runs and paid by each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.comparison.accounting import Account, SharedForcing
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.outlook.forecast import Candidates
from search.outlook.outlook import texts_to_time
from search.predict.costs import CostModel, measure_costs
from search.predict.predictor import LayerStates, Predictor
from search.predict.replay import TextRows
from search.rivals.common import Plan, mean_confidences
from search.rivals.hidden_states import layer_plan, sublayer_plan


class ModelHints:
    """See `search.rivals.common.Hints`. All tuning texts of the reference are read."""

    def __init__(self, subject: Subject, reference: Reference, account: Account) -> None:
        self._subject, self._reference, self._account = subject, reference, account
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

        return self._account.ask(("agreement", mask), work)

    def confidences(self, mask: SkipMask) -> tuple[float, float]:
        """Where the draft is right, and where it is wrong. Cost: a reading."""
        forcing = self._forcing
        return self._account.ask(
            ("confidences", mask), lambda: mean_confidences(forcing.forcing.read(mask), forcing.lengths)
        )

    def best_setting(self, mask: SkipMask) -> DecodeConfig:
        """By the predictor of `search.run`, on all texts. Cost: a reading, and some milliseconds."""
        return self._subject.space.to_config(self._candidates.of(mask).params)

    def layer_plan(self) -> Plan:
        """Cost: see `Clasp`. Raises: see `Hints`."""
        return self._plan("layers", lambda states: layer_plan(states, self._subject.space))

    def sublayer_plan(self, attention: int, mlp: int) -> Plan:
        """Cost: see `KnapSpec`. Raises: see `Hints`."""
        space = self._subject.space
        return self._plan((attention, mlp), lambda states: sublayer_plan(states, space, attention, mlp))

    def _plan(self, which: object, work: Callable[[LayerStates], Plan]) -> Plan:
        """No seed plays a part in it."""
        if self.states is None:  # asked before the plan is, so that both are paid
            raise ValueError("hidden states layer by layer are needed, which this engine does not give")
        return self._account.ask(("plan", which), lambda: work(self._forcing.forcing))

    @cached_property
    def _forcing(self) -> SharedForcing:
        return SharedForcing(self._subject.decoder, self._texts, self._account)

    @cached_property
    def _candidates(self) -> Candidates:
        forcing, subject = self._forcing, self._subject
        lengths, probs = np.asarray(forcing.lengths), np.asarray(forcing.target_probs)
        rows = TextRows(lengths, probs, subject.fingerprint.max_new_tokens)
        return Candidates(Predictor(forcing, rows, self.cost, subject.space.gamma_max), subject.space)

    def _measure_costs(self) -> CostModel:
        subject, space = self._subject, self._subject.space
        texts = texts_to_time(self._reference, space.gamma_max)
        return measure_costs(subject.decoder.timer(space.gamma_limit), texts, space, subject.fingerprint)
