"""search.tune: the whole search for a model that is in memory already, for notebooks and scripts."""

from __future__ import annotations

import io
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from layerskip.config.decode_config import DecodeConfig, write_atomically
from search.stop import StopSignal
from search.study.spec import EngineName, Granularity, ObjectiveName, SamplerName, StudyPaths, StudySpec, to_toml

if TYPE_CHECKING:
    from search.measure.subject import Subject

Prompts = str | Path | Sequence[str | Sequence[Mapping[str, str]] | Mapping[str, Any]]
"""A JSONL file, or a list whose items are each a text, a chat (a list of messages) or a record as in such a file."""
_FILES = {"prompts": "tuning.jsonl", "held_out": "held_out.jsonl"}


class TuneOptions(TypedDict, total=False):
    """What `tune` takes besides; from `engine` on, names and meanings are those of `StudySpec`."""

    held_out: Prompts | None
    """Prompts that judge the winner; without them, part of `prompts` is put aside before the search starts."""
    study: str | Path | None
    """Folder of a study that is kept: called again, it continues to the total, and `search.report` and
    `search.dashboard` read it. Without it the study lives in a temporary folder and ends with the call."""
    quiet: bool
    """Print nothing."""
    engine: EngineName
    max_new_tokens: int
    gamma_max: int
    granularity: Granularity
    draft_vocab: bool
    int8: bool
    int4: bool
    siblings: bool
    trees: bool
    drafters: Sequence[str]
    draft_weights: str | Sequence[str]
    regimes: Sequence[str]
    objective: ObjectiveName
    sampler: SamplerName
    force: bool
    seed: int
    until_settled: float | None
    timeout_s: float | None
    budget_minutes: float | None
    trial_timeout_s: float | None
    trial_seconds: float
    prompts_per_trial: int | None
    repeat_every: int
    num_confirm_candidates: int
    confirm_repeats: int
    num_confirm_prompts: int
    allow_lossy: bool
    max_failures: int
    per_group: bool
    group_field: str


class SearchFailed(RuntimeError):  # noqa: N818 (reads as the fact it states)
    """Trials kept failing, or an output was not the target's own: a broken machine or a bug, never a slow config."""


def tune(
    model: Any, tokenizer: Any, prompts: Prompts, *, trials: int = 200, **options: Unpack[TuneOptions]
) -> DecodeConfig:
    """The fastest lossless config for this model on its device: what `python -m search.run` exports as best.json.

    model: a Hugging Face causal LM in evaluation mode; it is decoded as it is, on its device and in its number format,
    with torch's present number of threads, and not changed. Where nothing beats plain decoding, the config has gamma 0
    and says why. Cost: minutes; each trial decodes several prompts.
    Raises: ValueError or OSError in one line for bad input, before anything is measured; SearchFailed; and
    KeyboardInterrupt, after which a kept study can be continued.
    """
    given: dict[str, Any] = dict(options)
    if unknown := sorted(given.keys() - TuneOptions.__annotations__.keys()):
        raise TypeError(f"tune: unknown options {', '.join(unknown)} (known: {', '.join(TuneOptions.__annotations__)})")
    held_out, study, quiet = given.pop("held_out", None), given.pop("study", None), bool(given.pop("quiet", False))
    start = time.perf_counter()
    given |= {"model": _name_of(model), "trials": trials, **_place_of(model)}
    StudySpec(**given, prompts="-")  # before a file is written
    with _folder_of(study) as folder:
        paths = StudyPaths(folder)
        given["prompts"] = _prompt_file(prompts, "prompts", paths)
        if held_out is not None:
            given["held_out"] = _prompt_file(held_out, "held_out", paths)
        spec = StudySpec(**given)
        subject = _subject(model, tokenizer, spec, paths)
        if study is not None and not paths.spec_file.exists():
            write_atomically(paths.spec_file, to_toml(spec, folder))
        return _search(subject, spec, paths, quiet=quiet, keeps=study is not None, load_s=time.perf_counter() - start)


def _search(
    subject: Subject, spec: StudySpec, paths: StudyPaths, *, quiet: bool, keeps: bool, load_s: float
) -> DecodeConfig:
    """The pipeline on a subject that is ready; the exported config."""
    from search.context import Tools
    from search.per_group.run import GroupRun
    from search.pipeline import SearchRun
    from search.regime_run import RegimeRun
    from search.terminal.event import Event, Warned
    from search.terminal.reporter import Reporter

    warnings: list[str] = []

    class Remembering(Reporter):
        def tell(self, event: Event) -> None:
            if isinstance(event, Warned):
                warnings.append(event.text)
            super().tell(event)

    stop = StopSignal()
    tools = Tools(Remembering(io.StringIO() if quiet else None), stop, "search.tune")
    # Signals reach the main thread alone, so in another one there is nothing to handle.
    in_main = threading.current_thread() is threading.main_thread()
    with stop.installed() if in_main else nullcontext():
        if spec.per_group or spec.has_several_regimes:
            kind = GroupRun if spec.per_group else RegimeRun
            code = kind(subject, spec, paths, tools, load_s=load_s).run()
            config = DecodeConfig.load(paths.best) if code == 0 else None
        else:
            run = SearchRun(subject, spec, paths, tools, load_s=load_s, exports=keeps)
            code = run.run()
            config = run.outcome.config if run.outcome is not None else None
    if code or config is None:
        raise SearchFailed(warnings[-1] if warnings else "the search ended without a result")
    if (made_for := config.provenance) is None:
        return config
    # Its file names the model from the study's folder; this one lies in none.
    return config.model_copy(update={"provenance": made_for.model_copy(update={"model": spec.model})})


def _subject(model: Any, tokenizer: Any, spec: StudySpec, paths: StudyPaths) -> Subject:
    """Prompts first: they are cheap to check."""
    from layerskip.model import LayerSkipModel
    from search.preflight import subject_of
    from search.study.grouping import Grouping, count_groups
    from search.study.opening import as_before
    from search.study.prompts import load_prompts

    try:
        sets = load_prompts(spec.prompts, spec.held_out, Grouping(spec.group_field, required=spec.per_group))
        if spec.per_group:
            count_groups(sets[0].prompts, sets[1].prompts)
        if tokenizer is None:
            raise ValueError("tokenizer: is required to encode the prompts, got None")
        spec = as_before(spec, paths)
        wrapped = LayerSkipModel(model, tokenizer, engine=spec.engine, allow_lossy=spec.allow_lossy)
        return subject_of(wrapped, spec, paths, sets)
    except ValueError as error:
        raise ValueError(_without_files(str(error), spec, paths)) from None


@contextmanager
def _folder_of(study: str | Path | None) -> Iterator[Path]:
    """The study's folder; a temporary one where nothing is to be kept."""
    if study is None:
        with tempfile.TemporaryDirectory(prefix="search-tune-") as name:
            yield Path(name)
        return
    from search.storages.opening import check_writable

    folder = Path(study).expanduser().absolute()
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _prompt_file(prompts: Prompts, argument: str, paths: StudyPaths) -> str:
    """The prompts as a JSONL file: theirs, or one in the study's folder."""
    if isinstance(prompts, str | Path):
        return str(Path(prompts).expanduser().absolute())
    records = [_record(one, f"{argument}[{i}]") for i, one in enumerate(prompts)]
    if not records:
        raise ValueError(f"{argument}: must hold at least one prompt, got none")
    file = paths.folder / _FILES[argument]
    try:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument}: must hold texts, chats and records of JSON values: {error}") from None
    begun = paths.spec_file.exists()
    if begun and not (file.exists() and file.read_text(encoding="utf-8") == text):
        raise ValueError(f"{argument}: must be those that the study began with ({file}); use another study folder")
    write_atomically(file, text)
    return str(file)


def _record(prompt: Any, name: str) -> dict[str, Any]:
    """One line of a prompt file."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        return {"messages": [dict(message) for message in prompt]}
    raise ValueError(f"{name}: must be a text, a chat (a list of messages) or a record, got {type(prompt).__name__}")


def _without_files(text: str, spec: StudySpec, paths: StudyPaths) -> str:
    """In the caller's words: `tuning.jsonl:3` of a folder they never saw is the third prompt they gave."""
    for argument, file in _FILES.items():
        if getattr(spec, argument) == str(paths.folder / file):
            text = text.replace(str(paths.folder / file), argument)
    return text.replace("--held-out", "held_out").replace("--per-group", "per_group")


def _name_of(model: Any) -> str:
    """What the model was loaded from; a folder as an absolute path."""
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _place_of(model: Any) -> dict[str, Any]:
    """Its device, or the map of one that is spread over several: what `search.run` would load it with."""
    parameter = next(iter(getattr(model, "parameters", tuple)()), None)
    if parameter is None:
        raise ValueError(f"model: must be a causal LM with weights, got {type(model).__name__}")
    if not hasattr(model, "hf_device_map") and parameter.device.type != "meta":
        return {"device": str(parameter.device)}
    from layerskip.huggingface.placement import Placement

    placement = Placement.of(model)
    return {"device_map": placement.device_map} if placement.device_map else {"device": str(placement.entrance)}
