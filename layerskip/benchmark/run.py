"""One benchmark: rows, step costs and facts of one model under one config, as plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layerskip.analysis.distance import Emitted, measure_distance
from layerskip.analysis.identity import IdentityReport, check_identity
from layerskip.benchmark.alternation import Case, Row, Turn, alternate, make_cases
from layerskip.benchmark.hf_ways import HuggingFaceWay, huggingface_ways
from layerskip.benchmark.memory import read_bandwidth, step_bytes
from layerskip.benchmark.names import ALL_ROWS, HF_GENERATE, LOSSY, OWN_ROWS, PLAIN, ROW_NAMES, SPECULATIVE
from layerskip.benchmark.step_records import Machine, step_records
from layerskip.benchmark.steps import StepTurn, forward_share
from layerskip.benchmark.summary import row_records
from layerskip.benchmark.ways import Refused, Way, own_settings, own_ways
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.lossy_acceptance import Distance
from layerskip.config.sampling_params import SamplingParams
from layerskip.drafters.draft_weights import loaded_weights
from layerskip.machine.host import device_name, git_commit, package_version
from layerskip.machine.watch import MachineWatch
from layerskip.model import LayerSkipModel


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    max_new_tokens: int
    repeats: int
    names: Sequence[str] = ROW_NAMES
    compiled: bool | None = None
    """Run Hugging Face compiled; None is on a GPU alone."""


@dataclass(frozen=True)
class Benchmark:
    """What was found."""

    rows: list[dict[str, Any]]
    """See `summary.row_records`."""
    steps: dict[str, Any] | None
    """See `step_records`; None where no row of our own was asked for."""
    forward_share: dict[str, Any] | None
    """By row of our own; see `steps.forward_share`."""
    facts: dict[str, Any]
    machine: dict[str, Any]
    """See `MachineWatch.record`."""
    cases: list[Case]

    @property
    def broken(self) -> list[str]:
        """Our own lossless rows with outputs that are neither the reference nor a tie: bugs."""
        return [row["name"] for row in self.rows if row["name"] in OWN_ROWS and row.get("differing")]


def run_benchmark(
    model: LayerSkipModel,
    config: DecodeConfig | None,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    plan: Plan,
    *,
    progress: Callable[[], None] = lambda: None,
) -> Benchmark:
    """Measure every row and the steps, in turns on the same prompts, after one untimed reference run of each prompt.

    prompts: (name, token ids). config: None has no speculative row.
    Raises: CannotRun if Hugging Face's own `generate` fails, as there is nothing to compare with then;
    ValueError if no row can be measured.
    """
    if config is not None:
        model.check_config(config)  # which loads draft weights
    watch = MachineWatch(model)
    cases = make_cases(HuggingFaceWay(HF_GENERATE, model), prompts, plan.max_new_tokens)
    settings = own_settings(model.num_layers, config)
    rows, refused = _rows(model, config, settings, plan, cases)
    stepped = {name: settings[name] for name in (PLAIN, SPECULATIVE) if name in settings and name in plan.names}
    config_of_steps = next(reversed(stepped.values()), None)
    steps = None if config_of_steps is None else StepTurn(model, config_of_steps, len(cases), plan.max_new_tokens)
    turns: list[Turn] = [*rows, *([steps] if steps is not None else [])]
    if not turns:
        raise ValueError("no row to measure: " + "; ".join(f"{one.name}: {one.reason}" for one in refused))
    failed = alternate(turns, cases, plan.repeats, progress=progress)
    refused += [Refused(name, reason) for name, reason in failed.items()]
    found = {row.name: row for row in rows if row.name not in failed}
    records: dict[str, Any] | None = None
    shares: dict[str, Any] | None = None
    if steps is not None and config_of_steps is not None:
        machine = Machine(step_bytes(model), read_bandwidth(model.engine), _weights_bytes(model, config))
        own = {name: found[name] for name in stepped if name in found}
        records = step_records(steps, config_of_steps, cases, machine, own)
        shares = {
            name: None if share is None else share.to_dict("share")
            for name in own
            for share in [forward_share(model, settings[name], cases, plan.max_new_tokens)]
        }
    order = [name for name in ALL_ROWS if name in plan.names]
    facts, rows_found = _facts(model, plan, cases), row_records(found, refused, order)
    if LOSSY in found:
        rows_found[-1]["distance"] = _distance(model, found[LOSSY], cases).model_dump()
    return Benchmark(rows_found, records, shares, facts, watch.record(), cases)


def _distance(model: LayerSkipModel, row: Row, cases: Sequence[Case]) -> Distance:
    """Of a row's outputs from the reference, a prompt's repeats being alike."""
    pairs = zip(cases, row.samples, strict=True)
    outputs = [Emitted(case.prompt_ids, samples[0].ids, case.reference_ids) for case, samples in pairs]
    return measure_distance(model, outputs, SamplingParams())


def _weights_bytes(model: LayerSkipModel, config: DecodeConfig | None) -> int:
    if config is None or config.draft_weights is None:
        return 0
    return loaded_weights(model.engine, config.draft_weights).nbytes


def _rows(
    model: LayerSkipModel,
    config: DecodeConfig | None,
    settings: Mapping[str, DecodeConfig],
    plan: Plan,
    cases: Sequence[Case],
) -> tuple[list[Row], list[Refused]]:
    theirs, refused = huggingface_ways(model, config, plan.names, compiled=plan.compiled)
    ours, also_refused = own_ways(model, settings, plan.names, has_config=config is not None)

    def check(prompt: Sequence[int], ids: Sequence[int], reference: Sequence[int]) -> IdentityReport:
        return check_identity(model, prompt, ids, reference)

    ways: list[Way] = [*theirs, *ours]
    rows = [Row(way, cases, plan.max_new_tokens, check) for way in ways]
    return rows, refused + also_refused


def _facts(model: LayerSkipModel, plan: Plan, cases: Sequence[Case]) -> dict[str, Any]:
    return {
        "model_class": model.model_class,
        "weights_fingerprint": model.weights_fingerprint(),
        "num_layers": model.num_layers,
        "device": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "num_threads": torch.get_num_threads(),
        "engine": model.engine_name,
        "engine_reason": model.engine_reason,
        "batch_size": 1,
        "versions": {name: package_version(name) for name in ("layerskip", "torch", "transformers")},
        "commit": git_commit(Path(__file__).parent),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "max_new_tokens": plan.max_new_tokens,
        "repeats": plan.repeats,
        "num_prompts": len(cases),
        "prompts": [case.prompt_id for case in cases],
        "prompt_tokens": [len(case.prompt_ids) for case in cases],
    }
