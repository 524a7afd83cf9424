"""A search of several regimes, ways to choose tokens: one study each, and one config with a setting for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerskip.config.decode_config import DecodeConfig, Provenance
from layerskip.config.sampling_regime import Sampling
from search.confirm.files import one_folder_down, save_best, save_spec, save_summary
from search.confirm.regime_settings import combined_config, found_in, regime_facts
from search.context import Tools
from search.measure.subject import Subject
from search.pipeline import RunOutcome, SearchRun, publish_together
from search.study.attributes import BY_REGIME
from search.study.spec import StudyPaths, StudySpec
from search.terminal.result_events import regime_verdict

_SAME_ON_RESUME = (
    *("study", "weights_fingerprint", "num_layers"),
    *("prompts_fingerprint", "held_out_fingerprint", "max_new_tokens"),
)
"""Fields of the provenance of one study's every run."""


class RegimeRun:
    """One run of all the studies; `run` returns the exit code, as SearchRun's does.

    The first regime's study is the folder's own, each other one has a folder of its own in it and lies in the same
    storage: every one of them is an ordinary study. Each goes on where it was stopped.
    """

    def __init__(
        self, subject: Subject, spec: StudySpec, paths: StudyPaths, tools: Tools, *, load_s: float = 0.0
    ) -> None:
        self._subject, self._spec, self._paths, self._tools = subject, spec, paths, tools
        self._load_s = load_s
        self._start = tools.clock() - load_s

    def run(self) -> int:
        """Everything, in order. Raises: as SearchRun's."""
        outcomes: dict[str, RunOutcome] = {}
        codes = []
        names = self._spec.regimes or ()
        before, settings = self._exported_before(), dict[str, DecodeConfig]()
        for place, name in enumerate(names):
            spec, paths = regime_study(self._spec, self._paths, name)
            if outcomes:  # one file names one length for all of its settings
                spec = spec.model_copy(update={"max_new_tokens": next(iter(outcomes.values())).max_new_tokens})
            self._tools.reporter.phase(
                "regime", f"{place + 1} of {len(names)}, {name}: study {spec.study_name}, {spec.trials} trials"
            )
            if place:
                paths.folder.mkdir(parents=True, exist_ok=True)
                save_spec(spec, paths)
            subject = self._subject.with_new_tokens(spec.max_new_tokens).in_regime(Sampling.parse(name))
            run = SearchRun(
                _from_within(subject) if place else subject,
                spec.model_copy(update={"budget_minutes": self._minutes_of(place)}),
                paths,
                self._tools,
                load_s=0.0 if place else self._load_s,
                goes_on=place > 0,
            )
            codes.append(run.run())
            if run.outcome is None:
                return max(codes)
            outcomes[name] = run.outcome
            if not place:  # only now is it known how many new tokens its prompts had
                settings = _settings_of(before, run.outcome.config.provenance)
            settings[name] = run.outcome.config
            # At once: the first regime's run has just written its own setting alone.
            save_best(combined_config([settings[one] for one in names if one in settings]), self._paths)
        self._export(outcomes)
        return max(codes)

    def _minutes_of(self, place: int) -> float | None:
        """An equal share of what is left of the budget; loading the model counts for the first regime."""
        if self._spec.budget_minutes is None:
            return None
        spent = (self._tools.clock() - self._start) / 60
        share = max(0.0, self._spec.budget_minutes - spent) / (len(self._spec.regimes or ()) - place)
        return share if place else share + self._load_s / 60

    def _exported_before(self) -> DecodeConfig | None:
        """An earlier run's best.json; None where it cannot be read."""
        try:
            return DecodeConfig.load(self._paths.best)
        except (OSError, ValueError):
            return None

    def _export(self, outcomes: dict[str, RunOutcome]) -> None:
        summary = next(iter(outcomes.values())).summary | {
            BY_REGIME: {name: found_in(outcome.summary) for name, outcome in outcomes.items()},
        }
        summary["budget"] = summary["budget"] | {"minutes": self._spec.budget_minutes}
        summary["seconds"] = summary["seconds"] | {"total": self._tools.clock() - self._start}
        summary["not_lossless"] = [line for one in outcomes.values() for line in one.summary["not_lossless"]]
        save_summary(summary, self._paths)
        for name, outcome in outcomes.items():
            self._tools.reporter.tell(regime_verdict(outcome.summary["study"]["name"], name, outcome.confirmation))
        # Last: what is above is written, and this is extra.
        facts = regime_facts(summary[BY_REGIME], {name: one.config.draft_ids for name, one in outcomes.items()})
        publish_together(self._spec, self._paths, self._tools, BY_REGIME, facts)


def regime_study(spec: StudySpec, paths: StudyPaths, name: str) -> tuple[StudySpec, StudyPaths]:
    """The study of one regime, as a spec of its own and where it lies."""
    names = spec.regimes or ()
    whole = paths.study_name(spec)
    is_first = name == names[0]
    changes: dict[str, Any] = {
        "regimes": (name,),
        "study_name": whole if is_first else f"{whole}/{name}",
        "storage": paths.storage_url(spec),
        "trials": -(-spec.trials // len(names)),
        "timeout_s": None if spec.timeout_s is None else spec.timeout_s / len(names),
        "budget_minutes": None if spec.budget_minutes is None else spec.budget_minutes / len(names),
    }
    return spec.model_copy(update=changes), paths if is_first else replace(paths, folder=paths.folder / name)


def _settings_of(before: DecodeConfig | None, provenance: Provenance | None) -> dict[str, DecodeConfig]:
    """The settings of an earlier run's config by regime; none where it was measured on something else.

    The provenance of a config of several regimes is the first one's, and so are both that are compared.
    """
    if before is None or before.provenance is None:
        return {}
    if any(getattr(before.provenance, name) != getattr(provenance, name) for name in _SAME_ON_RESUME):
        return {}
    return {one.name: before.for_sampling(one.params()) for one in before.samplings}


def _from_within(subject: Subject) -> Subject:
    """The same for a folder in the study's: a model that is named from the study's folder is one further up."""
    return replace(subject, model=one_folder_down(subject.model))
