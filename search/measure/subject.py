"""Subject: what is searched, a model ready to decode with its prompts and its identity."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import optuna

from layerskip.config.sampling_regime import GREEDY, Sampling
from layerskip.huggingface.rounding import RoundingSpread
from search.measure.decoder import Decoder
from search.measure.reference import Reference
from search.measure.threads import ThreadChoice
from search.study.attributes import DRAFT_IDS, POOL
from search.study.draft_ids import by_size, likeliest_sets, sets_in
from search.study.fingerprint import Fingerprint
from search.study.prompts import MIN_HELD_OUT, MIN_TUNING, EncodedPrompt, encoded_fingerprint, in_regime
from search.study.space import SearchSpace
from search.study.spec import StudySpec

MOST_RANKED = 24
"""Texts on which token ids are ranked."""


@dataclass(frozen=True)
class Subject:
    """What is searched: a model ready to decode, its prompts and its identity."""

    decoder: Decoder
    space: SearchSpace
    tuning: tuple[EncodedPrompt, ...]
    held_out: tuple[EncodedPrompt, ...]
    fingerprint: Fingerprint
    model: str
    """As best.json names it."""
    sampling: Sampling = GREEDY
    """How tokens are chosen."""
    whole: Subject | None = None
    """With the prompts of all regimes, where this is in one."""
    threads: ThreadChoice | None = None
    """How the number of CPU threads was measured; None where it was given."""
    rounding: Callable[[], RoundingSpread | None] = lambda: None
    """What this process has judged logit ties by so far; None where nothing had to be judged."""

    def in_regime(self, sampling: Sampling) -> Subject:
        """The same model decoded with tokens chosen so, on the prompts whose records do not ask for another way.

        Raises: ValueError if there are too few of these.
        """
        whole = self.whole or self
        tuning, held_out = (in_regime(prompts, sampling) for prompts in (whole.tuning, whole.held_out))
        for what, part, prompts, least in (
            ("tuning", tuning, whole.tuning, MIN_TUNING),
            ("held-out", held_out, whole.held_out, MIN_HELD_OUT),
        ):
            if len(part) < min(least, len(prompts)):
                raise ValueError(
                    f"regime {sampling.name}: needs at least {least} {what} prompts, got {len(part)} of {len(prompts)} "
                    "whose records ask for no other way to choose tokens"
                )
        changed = replace(
            whole.on_prompts(tuning, held_out),
            decoder=self.decoder.with_sampling(sampling),
            sampling=sampling,
            threads=self.threads,
            whole=whole,
        )
        return replace(changed, fingerprint=replace(changed.fingerprint, sampling=sampling.name))

    def with_room(self, reference: Reference, spec: StudySpec) -> tuple[Subject, str | None]:
        """(The same, with no larger gamma than a round of the reference's texts has room for; what was lowered, and
        why). What the spec itself says stays: where it does not fit, predicting refuses it."""
        most, longest = self.space.gamma_max, reference.longest
        fitting = longest - 2  # all but the first token, which comes from the prefill, and the target's own at the end
        if spec.gamma_max is not None or not 0 < fitting < most:
            return self, None
        note = f"gamma 1..{fitting} instead of 1..{most}: the longest continuation has {longest} tokens"
        return replace(self, space=replace(self.space, gamma_max=fitting)), note

    @property
    def ranks_ids(self) -> bool:
        """Whether drafts under a mask may choose among few token ids."""
        return len(self.space.draft_vocabs) > 1 and self.space.uses_masks

    def with_draft_ids(self, study: optuna.Study, reference: Reference) -> Subject:
        """The same with what the study knows as likeliest token ids, found here and kept there where it is new; without
        any where no `draft_vocab` of masks is searched, and in a study that was begun without."""
        space = self.space
        if not self.ranks_ids:
            return self
        if DRAFT_IDS not in study.user_attrs and POOL not in study.user_attrs:
            shares = self.decoder.token_shares([case.text.ids for case in reference.cases[:MOST_RANKED]])
            study.set_user_attr(DRAFT_IDS, json.dumps(likeliest_sets(shares, space.draft_vocabs[1:])))
        sets = sets_in(study.user_attrs)
        self.decoder.know_draft_ids(sets)
        return replace(self, space=replace(space, draft_ids=by_size(sets)))

    def with_new_tokens(self, most: int) -> Subject:
        """The same with at most so many new tokens a prompt."""
        if most == self.fingerprint.max_new_tokens:
            return self
        return replace(
            self,
            decoder=self.decoder.with_new_tokens(most),
            space=replace(self.space, lookup_gamma_max=min(self.space.lookup_gamma_max, max(1, most - 2))),
            fingerprint=replace(self.fingerprint, max_new_tokens=most),
            whole=None if self.whole is None else self.whole.with_new_tokens(most),
        )

    def on_prompts(self, tuning: tuple[EncodedPrompt, ...], held_out: tuple[EncodedPrompt, ...]) -> Subject:
        """The same on a part of the prompts; with all of them it is the same."""
        if (len(tuning), len(held_out)) == (len(self.tuning), len(self.held_out)):
            return self
        prints = encoded_fingerprint(tuning), encoded_fingerprint(held_out)
        return replace(
            self,
            tuning=tuning,
            held_out=held_out,
            fingerprint=replace(self.fingerprint, tuning_prompts=prints[0], held_out_prompts=prints[1]),
        )
