"""StudySpec: study.toml and flags become one validated value."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from layerskip.config.decode_config import (
    BY_GIVEN_WEIGHTS,
    MAX_NEW_TOKENS,
    MAX_REGIMES,
    MAX_THREADS,
    UNTRAINED,
    QuantizationName,
    check_ways,
    near_path,
)
from layerskip.config.sampling_regime import Sampling
from layerskip.config.validated import MAX_GAMMA, OneLineErrors
from layerskip.huggingface.device_map import check_device_map
from search.storages.address import FROM_ENVIRONMENT, JOURNAL, SQLITE, STORAGE_VARIABLE, storage_argument

STUDY_FILE = "study.toml"
_MAX_FILE_BYTES = 1 << 20
Granularity = Literal["layer", "sublayer"]
SamplerName = Literal["replay", "tpe", "gp", "random"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
ObjectiveName = Literal["tokens_per_s", "speedup"]
EngineName = Literal["auto", "eager", "fused", "cuda_graph"]
NonEmpty = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


def _as_tuple(value: object) -> object:
    """TOML and JSON have lists only; one name may stand by itself."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


class StudySpec(OneLineErrors):
    """What to search, on what, for how long. Paths are absolute once loaded.

    Raises: ValueError naming the field, the rule and the value got; unknown fields are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: NonEmpty
    """Hub id, or the folder of a saved model."""
    prompts: NonEmpty
    """JSONL file of tuning prompts: the search sees only these."""
    held_out: NonEmpty | None = None
    """JSONL file of held-out prompts, which judge the winner; None = split off from `prompts`."""
    storage: NonEmpty | None = None
    """Optuna storage: an RDB URL, or `journal:PATH`; None = `study.db` (SQLite) in the study folder. In a study.toml
    also `$LAYERSKIP_STORAGE`: what the environment says."""
    study_name: NonEmpty | None = None
    """Name inside the storage; None = the folder's name."""
    trials: Positive = 200
    """Trials in the study in total, earlier runs included."""
    until_settled: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Per cent: the trials end when no config that was not measured is expected to beat the best measured one by more,
    three proposals in a row; the choice among the best of them when it is expected to miss no more. None = all `trials`
    and all prompts that choose."""
    timeout_s: Seconds | None = None
    """Seconds of searching in this run; the confirm stage follows all the same. None = no limit."""
    budget_minutes: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Minutes that the whole run may take, from its start to its result: prompts, new tokens, repeats, candidates and
    trials follow, in this order, and the confirm stage keeps its share. None = as long as all of it takes."""
    device: NonEmpty = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`."""
    device_map: str | dict[str, int | str] | None = None
    """For a model larger than one device, in place of `device`: `auto`, `balanced`, `sequential`, or module names and
    their devices. The map that comes of it is part of the fingerprint."""
    dtype: DTypeName = "auto"
    """Number format of weights and arithmetic."""
    quantization: QuantizationName | None = None
    """What the weights are rounded to when the model is loaded: what is decoded is then that model's output."""
    engine: EngineName = "auto"
    """How one forward is executed; plain and speculative decoding always use the same one."""
    max_new_tokens: Annotated[int, Field(ge=2, le=MAX_NEW_TOKENS)] = 64
    """Tokens decoded per prompt; the first comes from the prefill and is not timed, so at least 2."""
    gamma_max: Annotated[int, Field(ge=1, le=MAX_GAMMA)] | None = None
    """Most draft tokens per round under a mask that the search may propose. None = what an existing study has; of a new
    one 16, or as many as the longest continuation has room for if that is fewer."""
    granularity: Granularity = "sublayer"
    """Skip attention and MLP apart, or whole layers only."""
    draft_vocab: bool | None = None
    """Search over `SkipMask.draft_vocab` too: of how many token ids a draft chooses, under a mask of the likeliest.
    None = what an existing study has; of a new one, where the model has a thousand ids or more and a plain output
    embedding.
    """
    int8: bool | None = None
    """Search over `SkipMask.bits` too: whether a draft under a mask computes with 8-bit copies of the weights. None =
    what an existing study has; of a new one, where the device can."""
    int4: bool | None = None
    """The same with 4-bit copies."""
    siblings: bool | None = None
    """Search over `siblings` too: of how many draft tokens next best in each place are verified as well. None = what an
    existing study has; of a new one, where the engine and the model can."""
    trees: bool | None = None
    """Search over `tree_tokens` of drafts by `eagle` and `mtp` too. None = what an existing study has, in a new one
    where the engine can verify them."""
    drafters: Annotated[tuple[NonEmpty, ...], BeforeValidator(_as_tuple)] | None = None
    """Ways to draft that are searched; `layer_skip` and `hybrid` under a mask, `eagle`, `draft_model` and their hybrids
    by `draft_weights`, `mtp` and its hybrid by what lies with the model. Lookups cost nothing to predict. None, or
    `all` = all that there are weights for, and those that need none."""
    draft_weights: Annotated[tuple[NonEmpty, ...], BeforeValidator(_as_tuple)] = ()
    """Folders, or hub ids, of weights that `python -m layerskip.train` has made for this model and of smaller
    models, whatever their tokenizer; which of them drafts is searched."""
    regimes: Annotated[tuple[NonEmpty, ...], BeforeValidator(_as_tuple)] | None = None
    """How tokens are chosen: `greedy`, `t0.7`, `t0.7_p0.9_k40` and so on, see `layerskip.Sampling.name`. Each is
    searched apart, with an equal share of the trials, and all are exported in one config. None = the one that the
    model's generation_config asks for."""
    objective: ObjectiveName = "tokens_per_s"
    """What is maximised. `speedup` lets workers on unlike devices share a study: each compares with its own plain
    decoding, and has costs and predictions of its own."""
    sampler: Annotated[SamplerName, BeforeValidator(lambda name: "tpe" if name == "local-tpe" else name)] = "replay"
    """Who proposes new configs; warm starts and re-measurements come with each of them. `local-tpe`, of studies from
    before, is `tpe` now."""
    force: bool = False
    """Search on where predictions say that nothing can beat plain decoding."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    num_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = None
    """CPU threads of torch; None = the fastest number, measured, unless OMP_NUM_THREADS or MKL_NUM_THREADS says. Part
    of the fingerprint."""
    trust_remote_code: bool = False
    """Let a hub model run its own Python code."""
    revision: NonEmpty | None = None
    """Branch, tag or commit of a hub model."""
    trial_timeout_s: Seconds | None = None
    """Seconds after which a trial that has not ended is failed; None = no limit."""
    trial_seconds: Seconds = 20.0
    """Time a full trial should take; decides the prompts per trial from the measured plain speed."""
    prompts_per_trial: Positive | None = None
    """Prompts of a full trial; None = derived from `trial_seconds`, from 4 to 16. Hopeless trials use fewer."""
    repeat_every: Annotated[int, Field(ge=0)] = 4
    """Every so many trials a leading config is measured again; 0 = never."""
    num_confirm_candidates: Positive = 4
    """Leading configs that go to the confirm stage."""
    confirm_repeats: Positive = 3
    """Fresh passes over the held-out prompts from which the winner's number is taken."""
    num_confirm_prompts: Annotated[int, Field(ge=4)] = 32
    """Most held-out prompts used."""
    allow_lossy: bool = False
    """Measure lossy rules on the confirmed winner too, and write each as a config of its own. best.json stays lossless.
    """
    max_failures: Positive = 5
    """Failed trials in a row that end the run."""
    per_group: bool = False
    """Search each prompt group apart as well, `trials` trials each, and export a setting per group."""
    group_field: Annotated[str, Field(min_length=1, max_length=64)] = "category"
    """Field of a prompt's record that names its group; of no account without `per_group`."""

    @field_validator("drafters")
    @classmethod
    def _check_drafters(cls, drafters: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if drafters in (None, ("all",)):
            return None
        check_ways(drafters)
        return drafters

    @property
    def ways(self) -> tuple[str, ...]:
        """`drafters`, or what stands for None."""
        if self.drafters is not None:
            return self.drafters
        return (*UNTRAINED, *BY_GIVEN_WEIGHTS) if self.draft_weights else UNTRAINED

    @field_validator("regimes")
    @classmethod
    def _check_regimes(cls, regimes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if regimes is None:
            return None
        if not 1 <= len(regimes) <= MAX_REGIMES + 1:
            raise ValueError(f"must be 1 to {MAX_REGIMES + 1} names, got {len(regimes)}")
        names = tuple(Sampling.parse(one).name for one in regimes)
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"must name each regime once, got {twice[0]} {names.count(twice[0])} times")
        return names

    @model_validator(mode="after")
    def _check_settling(self) -> StudySpec:
        if self.until_settled is not None and self.sampler != "replay":
            raise ValueError(f"until_settled: needs the sampler replay, which expects something; got {self.sampler}")
        return self

    @model_validator(mode="after")
    def _check_draft_weights(self) -> StudySpec:
        if twice := [one for one in self.draft_weights if self.draft_weights.count(one) > 1]:
            raise ValueError(f"draft_weights: must name each once, got {twice[0]} {len(twice)} times")
        if self.draft_weights and not set(BY_GIVEN_WEIGHTS) & set(self.ways):
            names = ", ".join(BY_GIVEN_WEIGHTS)
            raise ValueError(f"draft_weights: must be left out where drafters has none of {names}")
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> StudySpec:
        if self.per_group and self.has_several_regimes:
            raise ValueError(f"regimes: must be one in a per-group search, got {len(self.regimes or ())}")
        if self.per_group and self.budget_minutes is not None:
            raise ValueError(f"budget_minutes: must not be given in a per-group search, got {self.budget_minutes:g}")
        if self.per_group and self.allow_lossy:
            raise ValueError("allow_lossy: must not be given in a per-group search, got True")
        return self

    @property
    def has_several_regimes(self) -> bool:
        return self.regimes is not None and len(self.regimes) > 1

    @model_validator(mode="after")
    def _check_device_map(self) -> StudySpec:
        if self.device_map is not None:
            check_device_map(self.device_map, self.device)
        return self


@dataclass(frozen=True)
class StudyPaths:
    """The study folder and the files the search keeps in it."""

    folder: Path

    @property
    def spec_file(self) -> Path:
        return self.folder / STUDY_FILE

    @property
    def best(self) -> Path:
        return self.folder / "best.json"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def archive(self) -> Path:
        """The finished study, to be looked at where `study.db` is not there; see `search.reporting.archive`."""
        return self.folder / "study.jsonl.xz"

    @property
    def artifacts(self) -> Path:
        """Where the dashboard keeps files of the study."""
        return self.folder / "artifacts"

    def storage_url(self, spec: StudySpec) -> str:
        """The storage to open: the spec's, or SQLite in the folder."""
        return spec.storage or f"sqlite:///{self.folder / 'study.db'}"

    def study_name(self, spec: StudySpec) -> str:
        """The spec's name, or the folder's."""
        return spec.study_name or self.folder.name


def load_spec(flags: Mapping[str, Any], study: str | None, *, demo: Path) -> tuple[StudySpec, StudyPaths]:
    """The validated spec and its folder, from study.toml (if there is one) with flags on top.

    `flags` holds StudySpec fields; None means not given. Its paths are relative to the working directory, those in
    study.toml to the study folder. Writes nothing.
    Raises: ValueError in one line, naming the file where it comes from study.toml.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    file = _study_file(given, study, demo)
    data: dict[str, Any] = {}
    if file.is_file():
        data = _read_study_file(file)
    elif not {"model", "prompts"} <= given.keys():
        raise ValueError(f"{file}: no such file; give --study, or --model and --prompts for a new study")
    data |= resolve_paths(given, Path.cwd())
    if data.get("storage") == FROM_ENVIRONMENT:
        if (url := storage_argument(None)) is None:
            raise ValueError(f"{file}: storage: its address is to be set in the environment, as {STORAGE_VARIABLE}")
        data |= resolve_paths({"storage": url}, Path.cwd())
    for field in ("model", "prompts"):
        if field not in data:
            raise ValueError(f"{file}: {field}: is required, there or as --{field}")
    return StudySpec(**data), StudyPaths(file.parent.absolute())


def _read_study_file(file: Path) -> dict[str, Any]:
    """The fields of study.toml, paths made absolute from its folder. Checked alone, so that an error in it names it."""
    filler = {"model": "-", "prompts": "-"}  # flags may still provide these two
    try:
        data = resolve_paths(_read_toml(file), file.parent)
        StudySpec(**(filler | data))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return data


def resolve_paths(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The same fields with relative file paths made absolute from `base`."""
    resolved = dict(data)
    for field in ("prompts", "held_out"):
        if isinstance(resolved.get(field), str) and resolved[field]:
            resolved[field] = os.path.normpath(base.absolute() / _path(resolved[field], field))
    if isinstance(resolved.get("model"), str):
        resolved["model"] = _resolve_model(resolved["model"], base.absolute())
    names = _as_tuple(resolved.get("draft_weights"))
    if isinstance(names, tuple):
        resolved["draft_weights"] = tuple(
            _resolve_model(one, base.absolute(), "draft_weights") if isinstance(one, str) else one for one in names
        )
    if isinstance(resolved.get("storage"), str):
        resolved["storage"] = _resolve_storage(resolved["storage"], base.absolute())
    return resolved


def to_toml(spec: StudySpec, folder: Path) -> str:
    """study.toml text for this spec: only what differs from the defaults; paths relative to `folder` where near."""
    lines = ["# Written by search.run; `python -m search.run --study FOLDER` reads it."]
    for name, field in StudySpec.model_fields.items():
        value = getattr(spec, name)
        if value is None or (value == field.default and not field.is_required()):
            continue
        if name in ("prompts", "held_out") or (name == "model" and Path(value).is_absolute()):
            value = near_path(Path(value), folder)
        if name == "draft_weights":
            value = [near_path(Path(one), folder) if Path(one).is_absolute() else one for one in value]
        if name == "storage":
            value = _near_storage(value, folder)
        lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _study_file(given: Mapping[str, Any], study: str | None, demo: Path) -> Path:
    if study is not None:
        path = Path(study).expanduser()
        return path if path.suffix == ".toml" else path / STUDY_FILE
    if "model" in given or "prompts" in given:
        if "model" not in given or "prompts" not in given:
            missing = "prompts" if "model" in given else "model"
            raise ValueError(f"--{missing}: a new study needs --model and --prompts, or --study to change one of them")
        name = Path(given["model"].rstrip("/")).name or "model"
        return Path("studies") / f"{name}-{_device_word(given.get('device', 'auto'))}" / STUDY_FILE
    return demo / STUDY_FILE


def _device_word(device: str) -> str:
    if device == "auto":
        from layerskip.huggingface.loading import resolve_device

        device = resolve_device(device).type
    return device.replace(":", "")


def _read_toml(file: Path) -> dict[str, Any]:
    if file.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"a study file is at most {_MAX_FILE_BYTES} bytes, got {file.stat().st_size}")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        # Not TOMLDecodeError alone: numbers of thousands of digits and deep nesting raise what Python raises.
        raise ValueError(f"not valid TOML: {error}") from None


def _resolve_model(model: str, base: Path, field: str = "model") -> str:
    path = _path(model, field)
    looks_local = path.is_absolute() or model.startswith(("./", "../", "~"))
    if looks_local or (model and _is_folder(base / path)):
        return os.path.normpath(base / path)
    return model


def _resolve_storage(storage: str, base: Path) -> str:
    return _with_file(storage, lambda path: os.path.normpath(base / _path(path, "storage")))


def _near_storage(storage: str, folder: Path) -> str:
    return _with_file(storage, lambda path: near_path(Path(path), folder))


def _with_file(storage: str, change: Callable[[str], str]) -> str:
    """The URL with another path where it is a file's; others stay as they are."""
    for prefix in (SQLITE, JOURNAL):
        if storage.startswith(prefix) and storage != prefix:
            path, mark, query = storage.removeprefix(prefix).partition("?")
            return f"{prefix}{change(path)}{mark}{query}"
    return storage


def _path(text: str, field: str) -> Path:
    if not text.startswith("~"):
        return Path(text)  # Path("./~x") is Path("~x"), which must not become somebody's home
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{field}: there is no such home folder, got {text[:80]!r}") from None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long to be one
        return False


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_value(key)} = {_toml_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, str):
        # JSON's escapes are TOML's too; DEL alone is left as it is by JSON and refused by TOML.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
