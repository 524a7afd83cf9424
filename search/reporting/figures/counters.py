"""Where a config's seconds went and which drafts were accepted: from the confirm stage, else from its trials."""

from __future__ import annotations

from dataclasses import dataclass

from search.confirm.held_out import Counters
from search.measure.pairs import add_lists
from search.reporting.record import MissingData, StudyRecord
from search.study.attributes import (
    ACCEPTED_BY_POSITION,
    DRAFT_S,
    DRAFTED_BY_POSITION,
    FORWARDS,
    PLAIN_TOKENS_PER_S_BY_PROMPT,
    PROMPT_STEPS,
    TOKENS_PER_S_BY_PROMPT,
    VERIFY_S,
)


@dataclass(frozen=True)
class Shown:
    """Counters with the words that say whose they are."""

    counters: Counters
    source: str


def counters_of(record: StudyRecord) -> Shown:
    """Counters of the config that the report is about.

    Raises: MissingData if neither the confirm stage nor a full trial of it has any.
    """
    held_out, choice = record.held_out, record.choice
    if held_out is not None:
        return Shown(held_out.counters, f"{len(held_out.prompt_ids)} held-out prompts")
    if choice is None or not (trials := record.trials_of(choice.config)):
        raise MissingData(f"counters: study {record.name!r} keeps none of the confirm stage, and no full trial of it")
    lengths = [len(case.reference_ids) for case in record.reference.cases]
    tokens, decode_s, plain_s = 0, 0.0, 0.0
    for trial in trials:
        attrs = trial.user_attrs
        for step, rate, plain in zip(
            attrs[PROMPT_STEPS],
            attrs[TOKENS_PER_S_BY_PROMPT],
            attrs[PLAIN_TOKENS_PER_S_BY_PROMPT],
            strict=True,
        ):
            tokens += lengths[step] - 1
            decode_s += (lengths[step] - 1) / rate
            plain_s += (lengths[step] - 1) / plain
    attrs_of = [trial.user_attrs for trial in trials]
    drafted, rounds, alone = (
        sum(int(row[place]) for attrs in attrs_of for row in attrs[FORWARDS]) for place in range(3)
    )
    return Shown(
        Counters(
            num_tokens=tokens,
            num_rounds=rounds,
            num_drafted=drafted,
            num_accepted=sum(sum(attrs[ACCEPTED_BY_POSITION]) for attrs in attrs_of),
            num_target_only=alone,
            accepted_by_position=tuple(add_lists([attrs[ACCEPTED_BY_POSITION] for attrs in attrs_of])),
            drafted_by_position=tuple(add_lists([attrs[DRAFTED_BY_POSITION] for attrs in attrs_of])),
            draft_s=sum(attrs[DRAFT_S] for attrs in attrs_of),
            verify_s=sum(attrs[VERIFY_S] for attrs in attrs_of),
            target_only_s=alone * plain_s / tokens,  # trials keep the number of these steps, not their seconds
            decode_s=decode_s,
            plain_decode_s=plain_s,
        ),
        f"{len(trials)} trials of it on tuning prompts",
    )


def times_of(counters: Counters) -> dict[str, dict[str, float]]:
    """Milliseconds per timed token in parts: of plain decoding, of speculative, and of the same forwards, had verifying
    cost one target step and then drafts nothing: no draft with this acceptance can do better at this gamma."""
    each = 1000.0 / counters.num_tokens
    draft = counters.draft_s * each
    spent = counters.draft_s + counters.verify_s + counters.target_only_s
    step = counters.plain_decode_s / counters.num_tokens
    free_drafts = (counters.num_rounds + counters.num_target_only) * step * each
    return {
        "plain": {"target step": counters.plain_decode_s * each},
        "speculative": {
            "draft": draft,
            "verify": counters.verify_s * each,
            "target-only": counters.target_only_s * each,
            "loop": max(0.0, counters.decode_s - spent) * each,
        },
        "verifying =<br>one step": {"draft": draft, "target step": free_drafts},
        "and drafts<br>free": {"target step": free_drafts},
    }
