"""Which engine: the one asked for, or by measurement."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from layerskip.config.decode_config import ENGINE_NAMES
from layerskip.config.skip_mask import SkipMask
from layerskip.engines.base import Engine
from layerskip.engines.compiled import CompiledFunctions
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.cuda_graph.static_modules import ModuleExecutor
from layerskip.engines.cuda_graph.static_step import StaticExecutor
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.recorder import CudaRecorder
from layerskip.engines.tree import DraftTree
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from layerskip.huggingface.rounding import logit_difference

LOG = logging.getLogger(__name__)

_CONTEXT = 8
_NUM_TIMED = 5
_FAR_SLOWER = 3.0
"""Times the fastest engine's time: one so much slower is not timed again."""
_VERIFIED = 4
"""Tokens of the verification that engines are compared by."""
_MOST_OF_OWN = 4.0
"""Of how far the reference is from itself run token by token. Of SmolLM2 in bfloat16 under two masks 1 to 3."""
_TREE = DraftTree((0, 1, 2, 0, 0, 2, 2, 7, 7))
"""A chain of three, two beside its first and two beside its last, of which the latter is gone on from twice."""
_COMPILED_GAIN = 0.97
"""Compiled layers must take less than this part of the others' time, to be worth their compilation."""
_MOST_COMPILE_S = 5.0
"""For one function and number of tokens: a search of gamma up to 8 needs some 25 of them, in every new process but
faster, as torch keeps what it compiled on disk."""

EngineT = TypeVar("EngineT", bound=Engine)


@dataclass(frozen=True)
class EngineChoice:
    """An engine and why it is this one."""

    engine: Engine
    reason: str


def make_engine(name: str, adapter: ModelAdapter, *, with_graphs: bool = True) -> EngineChoice:
    """The engine of this name; `auto` takes the fastest of those that serve this model here.

    with_graphs: whether `auto` may take `cuda_graph`, which verifies by no lossy rule.

    Cost of `auto`: about three dozen forwards over a few tokens. Of `cuda_graph`, and of `auto` on a CUDA device, with
    lean layers: besides, the timing of attention kernels and six compilations, of a few seconds each when they are made
    for the first time on a machine (TORCHDYNAMO_DISABLE=1 leaves those out).
    Raises: ValueError for an unknown name, UnsupportedModelError if the engine asked for cannot serve the model.
    """
    if name not in ENGINE_NAMES:
        raise ValueError(f"engine: must be one of {', '.join(ENGINE_NAMES)}, got {name!r}")
    eager = EagerEngine(adapter)
    if name == "eager":
        return EngineChoice(eager, "asked for")
    if name == "fused":
        fused = _fused(eager, adapter)
        return EngineChoice(fused, "; ".join(["asked for", *_layouts(fused)]))
    if name == "cuda_graph":
        engine, layers = _cuda_graph(adapter, None, eager)
        return EngineChoice(engine, "; ".join(["asked for", layers, *_layouts(engine.lean)]))
    return _fastest(eager, adapter, with_graphs=with_graphs and _has_graphs(adapter.device))


def _fastest(eager: EagerEngine, adapter: ModelAdapter, *, with_graphs: bool) -> EngineChoice:
    """By measurement, and why; an engine that cannot serve the model is left out, and the reason says so."""
    if not adapter.placement.is_whole:
        return EngineChoice(eager, f"the only one for a model that is not whole on one device: {adapter.placement}")
    candidates: list[Engine] = []
    refusals: list[str] = []
    layers = ""
    fused: FusedEngine | None = None
    try:
        candidates.append(fused := _fused(eager, adapter))
    except UnsupportedModelError as error:
        refusals.append(str(error))
        fused = None
    if with_graphs:
        try:
            recorded, layers = _cuda_graph(adapter, fused, eager)
            candidates.append(recorded)
        except UnsupportedModelError as error:
            refusals.append(str(error))
    if not candidates:
        return EngineChoice(eager, "; ".join(refusals))
    candidates.append(eager)
    timed: list[tuple[float, Engine]] = []
    for engine in candidates:
        try:
            fastest_ms = min((ms for ms, _ in timed), default=math.inf)
            timed.append((_decode_and_verify_ms(engine, fastest_ms), engine))
        except RuntimeError as error:
            if not isinstance(engine, CudaGraphEngine):
                raise
            refusals.append(_recording_failed(error))
    fastest = min(timed, key=lambda one: one[0])[1]
    for engine in candidates:
        if isinstance(engine, CudaGraphEngine) and engine is not fastest:
            engine.close()
    times = ", ".join(f"{ms:.2f} ms {engine.name}" for ms, engine in timed)
    reasons = [f"one token and then four take {times}", *refusals]
    if isinstance(fastest, CudaGraphEngine):
        reasons.append(layers)
    return EngineChoice(fastest, "; ".join(reasons + _layouts(None if fastest is eager else fused)))


def _fused(eager: EagerEngine, adapter: ModelAdapter) -> FusedEngine:
    """With sublayers compiled for this CPU if they give the model's own logits, else by torch's operations.

    Raises: UnsupportedModelError if that does not either.
    """
    compiled = FusedEngine(adapter, compiled=True)
    try:
        return _checked(compiled, eager, adapter)
    except UnsupportedModelError as error:
        if compiled.refusal is not None:
            raise
        LOG.warning("compiled sublayers are left out: %s", error)
    return _checked(FusedEngine(adapter), eager, adapter)


def _layouts(fused: FusedEngine | None) -> list[str]:
    """What is worth telling of how its sublayers are computed."""
    if fused is None:
        return []
    told = [fused.maker.description]
    if fused.refusal and fused.device.type == "cpu":
        told.append(f"not compiled for this CPU: {fused.refusal}")
    return [one for one in told if one]


def _cuda_graph(adapter: ModelAdapter, fused: FusedEngine | None, eager: EagerEngine) -> tuple[CudaGraphEngine, str]:
    """The engine, once it has given the model's own logits, and what it records: lean layers where they serve the model
    (`fused`, if made already), else its own.

    Raises: UnsupportedModelError without a CUDA device, for a model on several devices or offloaded, or if neither can
    be recorded.
    """
    adapter.placement.check_whole("cuda_graph")
    if not _has_graphs(adapter.device):
        raise UnsupportedModelError(
            f"engine cuda_graph: needs a model on a CUDA device, got {adapter.device.type} (engine auto takes what is "
            "there)"
        )
    try:
        executor: StaticExecutor = LeanExecutor(fused or FusedEngine(adapter))
        layers = "lean layers"
    except UnsupportedModelError as error:
        executor = ModuleExecutor(adapter)
        layers = f"the model's own modules ({error})"
    engine = _checked(CudaGraphEngine(adapter, executor, CudaRecorder(adapter.device)), eager, adapter)
    if isinstance(executor, LeanExecutor) and _compiles(adapter.device):
        return _compiled_if_faster(engine, executor, eager, adapter)
    return engine, layers


def _compiled_if_faster(
    plain: CudaGraphEngine, executor: LeanExecutor, eager: EagerEngine, adapter: ModelAdapter
) -> tuple[CudaGraphEngine, str]:
    """`plain`, or the same with compiled layers, by measurement, and why; the other one is closed."""
    functions = CompiledFunctions()
    layers = LeanExecutor(executor.fused, compiled=functions, attention=executor.attention)
    compiled = CudaGraphEngine(adapter, layers, CudaRecorder(adapter.device))
    try:
        check_agreement(compiled, eager, adapter)
        plain_ms, compiled_ms = _decode_and_verify_ms(plain), _decode_and_verify_ms(compiled)
    except Exception as error:  # noqa: BLE001 (a compiler may fail in any way it likes)
        compiled.close()
        return plain, f"lean layers, as compiling them failed: {type(error).__name__}: {_first_line(error)}"
    if not functions.seconds:
        compiled.close()
        return plain, "lean layers; torch.compile is switched off"
    seconds = statistics.median(functions.seconds)
    times = f"{compiled_ms:.2f} ms compiled, {plain_ms:.2f} ms as they are, {seconds:.1f} s a compilation"
    if compiled_ms < _COMPILED_GAIN * plain_ms and seconds <= _MOST_COMPILE_S:
        plain.close()
        return compiled, f"lean layers, compiled: {times}"
    compiled.close()
    return plain, f"lean layers, not compiled: {times}"


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda"


def _checked(engine: EngineT, eager: EagerEngine, adapter: ModelAdapter) -> EngineT:
    """The engine, once it has given the model's own logits.

    Raises: UnsupportedModelError if it does not, or if its work cannot be recorded.
    """
    try:
        check_agreement(engine, eager, adapter)
    except RuntimeError as error:
        if engine.name != "cuda_graph":
            raise
        raise UnsupportedModelError(_recording_failed(error)) from error
    return engine


def _recording_failed(error: RuntimeError) -> str:
    return f"engine cuda_graph: recording failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["?"])[0]


def check_agreement(engine: Engine, reference: Engine, adapter: ModelAdapter) -> None:
    """Same logits on the same ids, whole and under a mask, in one forward and in steps.

    Of the two steps of one token, a recording engine replays at the second what it recorded at the first. Under a mask
    a stock model says little, and rounding alone may move that far: then as far as it moves the reference.

    Raises: UnsupportedModelError with the largest difference where it exceeds rounding.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(adapter.text_config.vocab_size)
    ids = torch.randint(vocabulary, (_CONTEXT + 2 + _VERIFIED,), generator=generator).to(adapter.device)
    num_layers = adapter.num_layers
    mask = SkipMask.from_sublayers(num_layers, attention=range(0, num_layers, 2), mlp=range(1, num_layers, 3))
    if not all(adapter.sublayers_skippable):
        mask = SkipMask.from_layers(num_layers, range(0, num_layers, 2))
    pieces = (_CONTEXT, 1, 1, _VERIFIED)
    for skip in (None, mask):
        rows = _logits_of(reference, ids, skip, pieces)
        difference, tolerance = logit_difference(_logits_of(engine, ids, skip, pieces), rows)
        if not difference <= tolerance:
            one_by_one = _logits_of(reference, ids, skip, (1,) * len(ids))
            tolerance = max(tolerance, _MOST_OF_OWN * logit_difference(one_by_one, rows)[0])
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"engine {engine.name}: its logits differ from the model's by {difference:.3g} of their norm (rounding "
                f"explains {tolerance:.3g})"
            )


def _logits_of(engine: Engine, ids: torch.Tensor, mask: SkipMask | None, pieces: Sequence[int]) -> torch.Tensor:
    """(T, V), forward by forward over so many tokens each."""
    with engine.session(len(ids)):
        parts = torch.split(ids, list(pieces))
        return torch.cat([engine.forward(part, mask, num_logits=len(part)) for part in parts])


def _decode_and_verify_ms(engine: Engine, fastest_ms: float = math.inf) -> float:
    """The shortest of a few decode steps and verifications of four tokens, added, as a machine that is busy otherwise
    takes longer now and then; of one of each where they take far longer than `fastest_ms`, as quantised weights do by
    their own modules."""
    total = 0.0
    with engine.session(_CONTEXT + 8):
        ids = torch.ones(_CONTEXT, dtype=torch.long, device=engine.device)
        engine.forward(ids)
        for num_tokens in (1, _VERIFIED):
            seconds = []
            for _ in range(_NUM_TIMED + 2):
                engine.synchronize()
                start = time.perf_counter()
                engine.forward(ids[:num_tokens], num_logits=num_tokens)
                engine.synchronize()
                seconds.append(time.perf_counter() - start)
                engine.cache.rollback_to(_CONTEXT)
                is_far = 1000 * seconds[-1] > _FAR_SLOWER * fastest_ms
                if is_far and len(seconds) == 2:  # the first makes what others use
                    break
            total += min(seconds[2:] or seconds[1:])
    return 1000 * total


def tree_refusal(engine: Engine, adapter: ModelAdapter) -> str | None:
    """Why siblings and trees of this model cannot be verified on this engine; None where they can.

    Cost: a dozen forwards over a few tokens, whose logits are compared. Positions that a model takes from the order of
    its keys (ALiBi) make them differ.
    """
    rule = "a model that can be told its tokens' positions and what each sees"
    if adapter.recurrent_layers:
        return f"{rule}, in this one layers keep a state in place of keys"
    try:
        same = _matches_chains(engine, adapter)
    except Exception as error:  # noqa: BLE001 (an architecture may refuse a mask of ours in any way it likes)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{rule}, got {reason}"
    return None if same else f"{rule}, this one then gives other logits"


@torch.inference_mode()
def _matches_chains(engine: Engine, adapter: ModelAdapter) -> bool:
    """Whether the rows of a tree say what ordinary forwards over their paths say, the step after a sibling included."""
    tree, generator = _TREE, torch.Generator().manual_seed(0)
    vocabulary = int(adapter.text_config.vocab_size)
    ids = torch.randint(vocabulary, (_CONTEXT + tree.num_rows,), generator=generator).to(adapter.device)
    context, rows = ids[:_CONTEXT], ids[_CONTEXT:]
    paths = [[0]]
    for row, parent in enumerate(tree.parents, 1):
        paths.append([*paths[parent], row])
    expected = []
    for after in (rows[:0], context[:1]):
        for path in paths if not len(after) else paths[-1:]:
            with engine.session(len(ids) + 1):
                engine.forward(context)
                expected.append(engine.forward(torch.cat([rows[path], after])).clone())
    with engine.session(len(ids)):
        engine.forward(context)
        found = engine.verify_tree(rows, tree).clone()
        kept = paths[-1][1:]
        engine.keep_rows([_CONTEXT + row for row in kept], _CONTEXT + 1)
        engine.cache.rollback_to(_CONTEXT + 1 + len(kept))
        last = engine.forward(context[:1])
        difference, tolerance = logit_difference(torch.cat([found, last]), torch.cat(expected))
    return difference <= tolerance
