"""Preflight: from a spec to a model ready to be searched, with every check that needs the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from layerskip.config.decode_config import (
    BY_GIVEN_WEIGHTS,
    BY_WEIGHTS,
    DEFAULT_GROUP,
    UNTRAINED,
    DecodeConfig,
    DraftWeights,
    trained_by,
    ways_by,
)
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.sampling_regime import Sampling
from layerskip.config.skip_mask import DraftBits, SkipMask
from layerskip.drafters.draft_weights import describe_weights, has_other_tokenizer
from search.budget.pace import Pace, measure_pace
from search.budget.plan import make_plan
from search.budget.work import PHASES, Work
from search.confirm.files import portable_model_name
from search.measure.decoder import ModelDecoder, load_model
from search.measure.subject import Subject
from search.measure.threads import choose_threads
from search.study.fingerprint import take_fingerprint
from search.study.prompts import PromptSet, encode_prompts
from search.study.space import GAMMA_MAX, LOOKUP_GAMMA_MAX, SIBLINGS_MAX, SearchSpace, vocabs_of
from search.study.spec import StudyPaths, StudySpec
from search.terminal.progress_events import LONG_S, Planned, phases

LOG = logging.getLogger(__name__)


def open_subject(spec: StudySpec, paths: StudyPaths, prompt_sets: tuple[PromptSet, PromptSet]) -> Subject:
    """Load the model, measure how many CPU threads suit it unless the spec says, encode the prompts, take the
    fingerprint. Writes nothing.

    Raises: ValueError or OSError in one line for a model that cannot be used or a prompt that does not fit.
    """
    model = load_model(spec)
    threads = choose_threads(model) if spec.num_threads is None else None
    return replace(subject_of(model, spec, paths, prompt_sets), threads=threads)


def subject_of(model: Any, spec: StudySpec, paths: StudyPaths, prompt_sets: tuple[PromptSet, PromptSet]) -> Subject:
    """The same for a LayerSkipModel that is there already; its device and number format are its own, not the spec's."""
    tuning, held_out = prompt_sets
    if model.tokenizer is None:
        raise ValueError(f"{spec.model}: has no tokenizer, which prompts need")
    space = space_for(model, spec)
    defaults = model.model.generation_config
    encoded = [encode_prompts(one, model, room=spec.max_new_tokens, generation_config=defaults) for one in prompt_sets]
    subject = Subject(
        ModelDecoder(model, spec.max_new_tokens),
        space,
        encoded[0],
        encoded[1],
        take_fingerprint(model, spec, space, tuning, held_out),
        portable_model_name(spec.model, paths.folder),
        rounding=lambda: model.rounding,
    )
    for name in spec.regimes or ():
        subject.in_regime(Sampling.parse(name))  # each has prompts
    if spec.regimes and (warning := _unlike_defaults(spec.regimes, defaults)):
        LOG.warning(warning)
    return subject.in_regime(first_regime(spec, model))


def space_for(model: Any, spec: StudySpec) -> SearchSpace:
    """What is searched: as the spec says, and where it says nothing as far as the engine can.

    Raises: ValueError if something is asked for that the engine or the model cannot.
    """
    if spec.draft_vocab and not (model.can_narrow and vocabs_of(model.vocab_size)):
        raise ValueError(
            "draft_vocab: needs a plain output embedding of a thousand token ids or more, this model has "
            f"{model.vocab_size}"
        )
    int8, int4 = _may_round(model, 8, spec.int8), _may_round(model, 4, spec.int4)
    for name in ("siblings", "trees"):
        if getattr(spec, name) and model.siblings_refusal is not None:
            raise ValueError(f"{name}: need {model.siblings_refusal}")
    if spec.allow_lossy and model.lossy_refusal is not None:
        raise ValueError(f"allow_lossy: needs {model.lossy_refusal}")
    searches_siblings = model.siblings_refusal is None if spec.siblings is None else spec.siblings
    trees = model.siblings_refusal is None if spec.trees is None else spec.trees
    weights = _draft_weights(model, spec)
    if spec.trees and not any(one.reads_states for one in weights):
        raise ValueError("trees: need an eagle layer among draft_weights, or mtp, which draft them; there is none")
    return SearchSpace.for_model(
        model,
        gamma_max=GAMMA_MAX if spec.gamma_max is None else spec.gamma_max,
        granularity=spec.granularity,
        draft_vocab=model.can_narrow if spec.draft_vocab is None else spec.draft_vocab,
        int8=int8,
        int4=int4,
        drafters=_ways(spec, weights),
        draft_weights=weights,
        narrows_weights=not any(has_other_tokenizer(model.engine, one) for one in weights),
        siblings_max=SIBLINGS_MAX if searches_siblings else 0,
        trees=trees,
        lookup_gamma_max=min(LOOKUP_GAMMA_MAX, max(1, spec.max_new_tokens - 2)),
    )


def _may_round(model: Any, bits: DraftBits, asked: bool | None) -> bool:
    """Whether drafts with weights of so many bits are searched. asked: None = where they can be.

    Raises: ValueError where they are asked for and cannot be.
    """
    if asked is False:
        return False
    refusal = model.bits_refusal(bits)
    if refusal is None and (lack := model.bits_lack(bits)):
        refusal = f"a copy of them ({lack})"
    if refusal is None:
        return True
    if asked:
        raise ValueError(f"int{bits}: drafts with {bits}-bit weights need {refusal}")
    is_remediable = bits == 8 or model.device.type == "cpu"  # those of 4 bits are for CPUs alone
    LOG.log(
        logging.WARNING if is_remediable else logging.INFO,
        "drafts with %d-bit weights are left out: they need %s",
        bits,
        refusal,
    )
    return False


def _draft_weights(model: Any, spec: StudySpec) -> list[DraftWeights]:
    """Loaded into the model. Raises: ValueError if there are none for it, or none are given and needed."""
    needed = [one for one in spec.ways if one in BY_GIVEN_WEIGHTS]
    if needed and not spec.draft_weights:
        raise ValueError(f"draft_weights: are required to search {', '.join(needed)}; layerskip.train makes them")
    found = [*_own_layers(model, spec), *(describe_weights(one) for one in spec.draft_weights)]
    for one in found:
        if same := [other.path for other in found if other.fingerprint == one.fingerprint and other is not one]:
            raise ValueError(f"draft_weights: must be different ones, got the same in {one.path} and {same[0]}")
        none = SkipMask.none(model.num_layers)
        model.check_config(DecodeConfig(drafter=one.drafter, skip_mask=none, gamma=1, draft_weights=one))
    return found


def _own_layers(model: Any, spec: StudySpec) -> list[DraftWeights]:
    """The multi-token-prediction layer that lies with the model, if ways by it are searched and it has one.

    Raises: ValueError if they are asked for by name and it has none.
    """
    asked = [one for one in spec.drafters or () if trained_by(one) == "mtp"]
    if spec.drafters is not None and not asked:
        return []
    if model.mtp_refusal is not None:
        if asked:
            raise ValueError(f"drafters: {', '.join(asked)} need {model.mtp_refusal}")
        if getattr(model.model.config.get_text_config(decoder=True), "num_mtp_layers", None):
            LOG.warning("the model's multi-token-prediction layer does not draft, it needs %s", model.mtp_refusal)
        return []
    try:
        return [model.mtp_weights()]
    except ValueError as error:
        if asked:
            raise
        LOG.warning("%s; searching without it", error)
        return []


def _ways(spec: StudySpec, weights: Sequence[DraftWeights]) -> tuple[str, ...]:
    """Raises: ValueError for ways without weights, and for weights that none of the ways drafts by."""
    allowed = {way for one in weights for way in ways_by(one)}
    if spec.drafters is None:
        return (*UNTRAINED, *(one for one in BY_WEIGHTS if one in allowed))
    names = ", ".join(one.path for one in weights)
    if others := [one for one in spec.drafters if one in BY_WEIGHTS and one not in allowed]:
        raise ValueError(
            f"drafters: {', '.join(others)} cannot draft by {names}; there are weights for {', '.join(sorted(allowed))}"
        )
    for one in weights:
        if not set(ways_by(one)) & set(spec.drafters):
            raise ValueError(
                f"draft_weights: {one.path} is for {' and '.join(ways_by(one))}, drafters must have one of them; got "
                f"{', '.join(spec.drafters)}"
            )
    return spec.drafters


def first_regime(spec: StudySpec, model: Any) -> Sampling:
    """How tokens are chosen in the spec's first regime, or where it says nothing as the model's own defaults say.

    Raises: ValueError for defaults that cannot be decoded with.
    """
    if spec.regimes:
        return Sampling.parse(spec.regimes[0])
    return Sampling.of(SamplingParams.from_generation_config(model.model.generation_config))


def _unlike_defaults(names: Sequence[str], generation_config: Any) -> str | None:
    """A warning where the model's own defaults would have a request for a regime decoded otherwise than it says."""
    asked = [Sampling.parse(name).name for name in names]
    decoded = [_by_defaults(Sampling.parse(name), generation_config).name for name in names]
    changes = {name: other for name, other in zip(asked, decoded, strict=True) if other != name}
    if not changes:
        return None
    are, them = ("regime {} is", "it") if len(changes) == 1 else ("regimes {} are", "them")
    return (
        f"{are.format(', '.join(changes))} tuned as named; this model's own defaults make {them} "
        f"{', '.join(changes.values())}: give --regimes {','.join(dict.fromkeys(decoded))} to tune for what generate "
        "and the server decode"
    )


def _by_defaults(sampling: Sampling, generation_config: Any) -> Sampling:
    """What a request for this is decoded with: what its name leaves out is as the model's own defaults say."""
    plain = Sampling()
    named = {
        name: value for name in Sampling.model_fields if (value := getattr(sampling, name)) != getattr(plain, name)
    }
    named |= {"do_sample": sampling.do_sample, "temperature": sampling.temperature}
    try:
        return Sampling.of(SamplingParams.from_generation_config(generation_config, **named))
    except ValueError:  # defaults that nothing decodes with
        return sampling


def foresee(
    subject: Subject, spec: StudySpec, left_s: float | None, clock: Callable[[], float] = time.perf_counter
) -> Planned:
    """How long a new study will take, and with what of everything. Cost: see `measure_pace`.

    left_s: of a budget; None without one. Raises: ValueError if that is too little for anything.
    """
    return planned(Work.of(spec, subject), pace_of(subject, spec, clock), left_s)


def pace_of(subject: Subject, spec: StudySpec, clock: Callable[[], float] = time.perf_counter) -> Pace:
    """How long a token and a prompt take here. Cost: see `measure_pace`."""
    # Of the verification that tells what further tokens cost:
    most_tokens = max(2, min((spec.gamma_max or GAMMA_MAX) + 1, spec.max_new_tokens))
    return measure_pace(subject.decoder, subject.tuning, most_tokens, clock)


def planned(work: Work, pace: Pace, left_s: float | None, spent_s: float = 0.0, *, at_least: bool = False) -> Planned:
    """The plan, and beside one without a budget that takes long the one with a budget. See `make_plan` for the rest,
    and for what it raises."""
    plan, shorter = make_plan(work, pace, left_s, spent_s=spent_s, at_least=at_least), None
    if left_s is None and plan.total_s > LONG_S:
        with suppress(ValueError):  # half an hour is not enough for anything
            shorter = make_plan(work, pace, LONG_S)
    return Planned(plan, pace, work.trials, shorter)


def estimate_groups(
    subjects: Mapping[str, Subject], spec: StudySpec, clock: Callable[[], float] = time.perf_counter
) -> str:
    """How long the searches of all prompts and of each group will take in total, at the pace of all prompts.

    Cost: see `measure_pace`.
    """
    timeout_s = None if spec.timeout_s is None else spec.timeout_s / len(subjects)
    one = spec.model_copy(update={"timeout_s": timeout_s})
    pace = pace_of(subjects[DEFAULT_GROUP], spec, clock)
    seconds = estimate((Work.of(one, subject), pace) for subject in subjects.values())
    groups = [subject for name, subject in subjects.items() if name != DEFAULT_GROUP]
    num_held_out = sum(min(len(subject.held_out), spec.num_confirm_prompts) for subject in groups)
    num_decodings = num_held_out * (1 + 2 * spec.confirm_repeats * len(subjects))
    seconds["matrix"] = num_decodings * pace.decoding_s(spec.max_new_tokens)
    studies = f"{len(subjects)} studies (all prompts, and {len(groups)} groups) of {spec.trials} trials"
    return f"{studies}, in all at most about {phases(seconds)}; nothing was written"


def estimate_regimes(
    subject: Subject, specs: Mapping[str, StudySpec], clock: Callable[[], float] = time.perf_counter
) -> str:
    """How long the studies of all regimes will take in total, by each one's own speed.

    Cost: see `measure_pace`, for each.
    """
    studies = [(subject.in_regime(Sampling.parse(name)), spec) for name, spec in specs.items()]
    seconds = estimate((Work.of(spec, one), pace_of(one, spec, clock)) for one, spec in studies)
    trials = max(spec.trials for spec in specs.values())
    named = f"{len(specs)} studies ({', '.join(specs)}) of {trials} trials"
    return f"{named}, in all at most about {phases(seconds)}; nothing was written"


def estimate(studies: Iterable[tuple[Work, Pace]]) -> dict[str, float]:
    """Seconds that studies of so much work at such a pace will take at most in total, by phase."""
    total = dict.fromkeys(PHASES, 0.0)
    for work, pace in studies:
        for phase, seconds in work.seconds(work.amounts(pace), pace).items():
            total[phase] += seconds
    return total
