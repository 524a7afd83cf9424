"""Opening an outlook: what a study keeps of its predictions is read, the rest is worked out in limited time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import optuna

from layerskip.analysis.teacher_forcing import ForcedText
from layerskip.config.decode_config import BY_WEIGHTS, HYBRIDS
from layerskip.config.skip_mask import SkipMask
from search.budget.work import (
    MIN_OPENING_S,
    MORE_SHARE,
    OPENING_SHARE,
    POOL_SHARE,
    READINGS_A_BIT,
    REFINE_SHARE,
    SENSITIVITY_SHARE,
    WEIGHTS_SHARE,
)
from search.measure.decoder import Decoder, TextForcing
from search.measure.reference import Reference
from search.outlook.forecast import Candidate, Candidates, Pool, make_pool
from search.outlook.outlook import Outlook, OutlookOptions, store_costs, texts_to_time
from search.outlook.refinement import refine_pool
from search.predict.costs import CostModel, measure_costs, pool_costs
from search.predict.more_texts import MAX_MORE, MAX_POSITIONS, MoreOptions, MoreText, MoreTexts, make_more_texts
from search.predict.predictor import Predictor
from search.predict.replay import TextRows
from search.predict.sensitivity import Sensitivity, measure_sensitivity
from search.progress import Tell, nobody
from search.study.attributes import COSTS, LOOKUPS, MORE, POOL, READINGS, SENSITIVITY, TEXTS
from search.study.fingerprint import Fingerprint
from search.study.lookup_choice import LookupChoice, read_choice, write_choice
from search.study.prompts import EncodedPrompt
from search.study.space import SearchSpace

_MIN_TEXTS, _MIN_TEXTS_IN_A_HURRY = 4, 2
"""For the first readings; the second where there is a limit for all predictions."""
_PROPOSAL_SHARE = 0.06
_MIN_PROPOSAL_S = 0.15
"""What a proposal predicts, neighbours or a mask on all texts, may take so long, or a share of a trial's time if that
is more. What too few texts cost in the end is worth more than the time."""
_MAX_READINGS = 4
"""Of a deep model they are quicker on the pool's average than later, because many of its masks begin alike."""


@dataclass
class OutlookOpening:
    """Makes a study's outlook."""

    study: optuna.Study
    decoder: Decoder
    space: SearchSpace
    reference: Reference
    fingerprint: Fingerprint
    options: OutlookOptions
    _: KW_ONLY
    prompts: Sequence[EncodedPrompt] = ()
    """The tuning prompts, from which more texts are made than the reference has, see `more_texts`."""
    clock: Callable[[], float] = time.perf_counter
    tell: Tell = nobody
    """Hears of the sublayers: the part whose length follows from the model, whatever time there is."""

    def outlook(self) -> Outlook:
        """What is stored is read, the rest is measured and stored. A study that was begun without more texts goes on
        without.

        Cost: a target forward over every text; before the first trial also the costs, two readings per sublayer, the
        pool, more texts and full-fidelity readings of the best, all these about 7 % of the time that the trials may
        take.
        Raises: ValueError if the stored costs were measured on something else, or no text is long enough to draft on.
        """
        _check_lengths(self.reference, self.space, self.options)
        options, study, space = self.options, self.study, self.space
        start = self.clock()
        timer = self.decoder.timer(space.gamma_limit)
        most_new = max(1, options.max_new_tokens - space.gamma_limit - 1)
        timed = texts_to_time(self.reference, space.gamma_max, most_new if space.lookup_methods else None)
        stored = study.user_attrs.get(COSTS)
        if stored is None:
            repeats, seed = options.cost_repeats, options.seed
            costs = [measure_costs(timer, timed, space, self.fingerprint, repeats=repeats, seed=seed)]
            store_costs(study, costs)
        else:
            costs = [CostModel.from_json(one, self.fingerprint) for one in json.loads(stored)]
        costs_s = self.clock() - start
        self.budget = max(MIN_OPENING_S, OPENING_SHARE * options.search_s)
        if options.seconds is not None:
            shares = SENSITIVITY_SHARE + POOL_SHARE + MORE_SHARE + REFINE_SHARE + WEIGHTS_SHARE * space.uses_weights
            self.budget = max(0.0, options.seconds - costs_s) / shares
        predictor = self._predictor(pool_costs(costs))
        sensitivity = self._sensitivity(predictor)
        predictor, pool = self._pool(predictor, sensitivity)
        return Outlook(
            space=space,
            predictor=predictor,
            candidates=Candidates(predictor, space),
            pool=pool,
            sensitivity=sensitivity,
            num_readings=study.user_attrs.get(READINGS, _MAX_READINGS),
            timer=timer,
            texts=timed,
            force=self._force,
            costs=costs,
            fingerprint=self.fingerprint,
            options=options,
            seconds={"costs": costs_s, "predictions": self.clock() - start - costs_s},
        )

    def _predictor(self, cost: CostModel) -> Predictor:
        """On the first texts, all or as many as can be read often enough; how many is decided once a study."""
        texts = self._reference_texts()
        stored = self.study.user_attrs.get(TEXTS)
        least = _MIN_TEXTS if self.options.seconds is None else _MIN_TEXTS_IN_A_HURRY
        tried = stored or (least if len(texts) > 2 * least else len(texts))
        forcing = self.decoder.teacher_forcing(texts[:tried])
        if stored is None:
            start = self.clock()
            forcing.read(SkipMask.none(self.space.num_layers))
            text_s = (self.clock() - start) / len(forcing.texts)
            allowed = SENSITIVITY_SHARE * self.budget / (READINGS_A_BIT * len(self.space.bit_names))
            texts = texts[: max(least, int(allowed / text_s) if text_s > 0 else len(texts))]
            if len(texts) != tried:
                forcing = self.decoder.teacher_forcing(texts)
            self.study.set_user_attr(TEXTS, len(texts))
        return Predictor(forcing, self._rows(forcing), cost, self.space.gamma_max)

    def _sensitivity(self, predictor: Predictor) -> Sensitivity:
        stored = self.study.user_attrs.get(SENSITIVITY)
        if stored is not None:
            return Sensitivity.from_json(stored)
        if not self.space.uses_masks:
            return Sensitivity((), str(SkipMask.none(self.space.num_layers)), 1.0)
        limit = None if self.options.seconds is None else SENSITIVITY_SHARE * self.budget
        sensitivity = measure_sensitivity(predictor.agreement, self.space, self.tell, seconds=limit, clock=self.clock)
        self.study.set_user_attr(SENSITIVITY, sensitivity.to_json())
        return sensitivity

    def _pool(self, first: Predictor, sensitivity: Sensitivity) -> tuple[Predictor, Pool]:
        """(Predictor on all texts, pool).

        The pool is found on the first texts, which tells how long a reading takes, and its best are then predicted on
        all.
        """
        attrs = self.study.user_attrs
        stored = attrs.get(POOL)
        if stored is not None:
            predictor = self._with_more_texts(first, attrs.get(MORE))
            self._look_up_with(predictor, [read_choice(one) for one in json.loads(attrs.get(LOOKUPS, "[]"))])
            return predictor, Pool.from_json(stored, Candidates(predictor, self.space))
        if "hybrid" in self.space.drafters:
            found = first.best_lookups(self.space.lookup_methods, self.space.lookup_gamma_max)
            self._look_up_with(first, [LookupChoice.of(one.config) for one in found])
        start = self.clock()
        pool = self._mask_pool(first, sensitivity)
        reading_s = (self.clock() - start) / max(1, len(pool.candidates))
        self._decide_readings(reading_s)
        if MORE not in attrs:
            more = self._choose_more_texts(reading_s / first.num_texts, first.num_texts)
            self.study.set_user_attr(MORE, more.to_json())
        predictor = self._with_more_texts(first, self.study.user_attrs[MORE])
        candidates = Candidates(predictor, self.space)
        is_hybrid = self._choose_hybrids(predictor, pool)
        if pool.candidates and (predictor.has_more or is_hybrid):
            seconds = REFINE_SHARE * self.budget
            pool = refine_pool(pool, candidates, seconds=seconds, clock=self.clock)
        lookups = self._lookups_alone(predictor)
        before = self._lookups_before_weights(predictor, lookups)
        pool = pool.with_others([*lookups, *self._by_weights(first, predictor, before)])
        stored = pool.to_json(candidates)
        self.study.set_user_attr(POOL, stored)
        # As stored, rounded: what a resume will read must be what this run works with.
        return predictor, Pool.from_json(stored, candidates)

    def _mask_pool(self, predictor: Predictor, sensitivity: Sensitivity) -> Pool:
        if not self.space.uses_masks:
            return Pool(())
        return make_pool(
            Candidates(predictor, self.space),
            self.space,
            sensitivity,
            seed=self.options.seed,
            seconds=POOL_SHARE * self.budget,
            clock=self.clock,
        )

    def _lookups_alone(self, predictor: Predictor) -> list[Candidate]:
        """The best of each way to look up, where the space has it alone or as part of a hybrid.

        They are predicted on every text of the reference, however many of these masks are read on: no draft of theirs
        has to be read.
        """
        methods = self.space.lookup_methods
        if not methods:
            return []
        return Candidates(self._on_whole_reference(predictor), self.space).lookups_alone(methods)

    def _by_weights(
        self, first: Predictor, predictor: Predictor, lookups: Sequence[LookupChoice | None]
    ) -> list[Candidate]:
        """The best by trained weights on all texts; where there is a limit and no time for it, on the first ones."""
        if self.options.seconds is not None and predictor.has_more:
            start = self.clock()
            found = Candidates(first, self.space).by_weights(lookups)
            text_s = (self.clock() - start) / first.num_texts
            if text_s * (predictor.num_texts - first.num_texts) > WEIGHTS_SHARE * self.budget:
                return found
        return Candidates(predictor, self.space).by_weights(lookups)

    def _lookups_before_weights(self, predictor: Predictor, alone: Sequence[Candidate]) -> list[LookupChoice | None]:
        """What trained weights are combined with: the best lookups alone, whether the space has them alone or not."""
        if not any(one in BY_WEIGHTS and one in HYBRIDS for one in self.space.drafters):
            return []
        configs = [self.space.to_config(one.params) for one in alone]
        if not configs:
            found = predictor.best_lookups(self.space.lookup_methods, self.space.lookup_gamma_max)
            configs = [one.config for one in found]
        return [LookupChoice.of(one) for one in configs]

    def _on_whole_reference(self, predictor: Predictor) -> Predictor:
        """This one, or one on the reference's texts where it has not all of them and they fit into memory."""
        texts = self._reference_texts()
        others = texts[predictor.num_first :]
        if len(texts) <= predictor.num_texts or sum(len(one.ids) for one in others) > MAX_POSITIONS:
            return predictor
        forcing = self.decoder.teacher_forcing(others)
        return predictor.with_more(forcing, self._rows(forcing))

    def _choose_hybrids(self, predictor: Predictor, pool: Pool) -> bool:
        """Decide for the study what masks are combined with: per method the lookup that suits the best mask so far."""
        if "hybrid" not in self.space.drafters or not pool.candidates:
            return False
        config = self.space.to_config(pool.best.params)
        limit = self.space.lookup_gamma_max
        found = predictor.best_lookups(self.space.lookup_methods, limit, config)
        choices = [LookupChoice.of(one.config) for one in found]
        self.study.set_user_attr(LOOKUPS, json.dumps([write_choice(one) for one in choices]))
        self._look_up_with(predictor, choices)
        return True

    def _look_up_with(self, predictor: Predictor, choices: Sequence[LookupChoice | None]) -> None:
        if "hybrid" in self.space.drafters:
            or_not = "layer_skip" in self.space.drafters
            predictor.look_up_with([one for one in choices if one is not None], or_not=or_not)

    @property
    def _proposal_s(self) -> float:
        return max(_MIN_PROPOSAL_S, _PROPOSAL_SHARE * self.options.trial_seconds)

    def _decide_readings(self, reading_s: float) -> None:
        if READINGS not in self.study.user_attrs:
            num_readings = int(np.clip(self._proposal_s / reading_s if reading_s > 0 else np.inf, 1, _MAX_READINGS))
            self.study.set_user_attr(READINGS, num_readings)

    def _choose_more_texts(self, text_s: float, num_first: int) -> MoreTexts:
        """The texts after the first ones, as many as a full-fidelity reading may have.

        text_s: seconds that a reading takes for each text, on the average of the pool's masks.
        """
        most = int(self._proposal_s / text_s) if text_s > 0 else MAX_MORE + len(self.reference.cases)
        num_reference = max(0, min(most, len(self.reference.cases)) - num_first)
        made: Sequence[MoreText] = ()
        if most > len(self.reference.cases):
            more = MoreOptions(
                self.space.num_layers,
                self.options.max_new_tokens,
                self.options.seed,
                limit=min(MAX_MORE, most - len(self.reference.cases)),
                seconds=MORE_SHARE * self.budget,
            )
            used = {case.prompt_ids for case in self.reference.cases}
            made = make_more_texts(self.decoder, self.prompts, used, more, clock=self.clock)
        return MoreTexts(num_reference, tuple(made))

    def _with_more_texts(self, first: Predictor, stored: str | None) -> Predictor:
        """On the first texts and those that the study keeps after them."""
        more = MoreTexts.from_json(stored) if stored else MoreTexts()
        texts = self._reference_texts()[first.num_texts :][: more.num_reference]
        texts += [one.text(self.prompts) for one in more.made]
        if not texts:
            return first
        forcing = self.decoder.teacher_forcing(texts)
        return first.with_more(forcing, self._rows(forcing))

    def _force(self, places: Sequence[int]) -> tuple[TextForcing, TextRows]:
        """The reference's texts at these places, and what replay needs of them."""
        texts = self._reference_texts()
        forcing = self.decoder.teacher_forcing([texts[place] for place in places])
        return forcing, self._rows(forcing)

    def _reference_texts(self) -> list[ForcedText]:
        return [case.text for case in self.reference.cases]

    def _rows(self, forcing: TextForcing) -> TextRows:
        return TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), self.options.max_new_tokens)


def _check_lengths(reference: Reference, space: SearchSpace, options: OutlookOptions) -> None:
    longest = reference.longest
    if longest < 3:
        raise ValueError(
            f"max_new_tokens: must leave room for a draft, three tokens, on at least one tuning prompt; the longest "
            f"continuation has {longest} (max_new_tokens {options.max_new_tokens})"
        )
    if space.gamma_max > longest - 2:
        raise ValueError(
            f"gamma_max: must be at most {longest - 2}, two less than the longest continuation ({longest} tokens), or "
            f"no round could draft so many, got {space.gamma_max}"
        )
