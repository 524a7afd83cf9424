"""Which way of teacher forcing a model takes: layer by layer, with substituted keys, or with the draft's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from layerskip.analysis.teacher_forcing.base import TeacherForcing
from layerskip.analysis.teacher_forcing.by_weights import WeightsForcing
from layerskip.analysis.teacher_forcing.layerwise import LayerwiseForcing
from layerskip.analysis.teacher_forcing.own_keys import OwnKeysForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText
from layerskip.analysis.teacher_forcing.whole_model import WholeModelForcing
from layerskip.config.skip_mask import SkipMask
from layerskip.engines.base import Engine
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.huggingface.rounding import logit_difference
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import SamplingParams

LOG = logging.getLogger(__name__)


def make_teacher_forcing(
    model: LayerSkipModel, texts: Sequence[ForcedText], sampling: SamplingParams | None = None
) -> TeacherForcing:
    """The best way that this model allows, found by comparing readings with live draft steps; and drafts by trained
    weights.

    `.keys` says which: `target` where earlier positions are the target's, as when drafting; `own` where that cannot be
    had and the readings are an approximation. sampling: how the continuations were chosen, greedily without it.
    Cost: one target forward a text, and a few to check.
    """
    forcing = _by_masks(model, texts, sampling)
    forcing.by_weights = WeightsForcing(model.engine, forcing.texts)
    return forcing


def _by_masks(model: LayerSkipModel, texts: Sequence[ForcedText], sampling: SamplingParams | None) -> TeacherForcing:
    engine = model.engine
    lean = engine.lean if isinstance(engine, CudaGraphEngine) else engine
    eager = EagerEngine(model.adapter)
    if model.adapter.recurrent_layers:
        LOG.info("layers keep a state, for which the target's cannot be substituted: predictions use the draft's own")
        return OwnKeysForcing(lean if isinstance(lean, FusedEngine) else eager, texts, sampling)
    if isinstance(lean, FusedEngine) and not model.adapter.sources:
        forcing: TeacherForcing = LayerwiseForcing(lean, texts, sampling)
        if matches_live(forcing, engine, model.num_layers):
            return forcing
        LOG.warning("layer-by-layer teacher forcing does not match live drafting; using the model's own modules")
    try:
        forcing = WholeModelForcing(model.adapter, texts, sampling)
        if matches_live(forcing, engine, model.num_layers):
            return forcing
        reason = "the draft's logits differ from a live step's"
    except Exception as error:  # noqa: BLE001 (an architecture may refuse a mask of ours in any way it likes)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    LOG.info("the target's keys cannot be substituted (%s): predictions use the draft's own", reason)
    return OwnKeysForcing(lean if isinstance(lean, FusedEngine) else eager, texts, sampling)


@torch.inference_mode()
def matches_live(forcing: TeacherForcing, engine: Engine, num_layers: int) -> bool:
    """Whether readings of the shortest text equal live draft steps, first and second of a round, up to rounding.

    Of all of them together, and at twice what rounding explains in a whole model: what half of its layers make of a
    text is far from what they were trained for, and rounding grows on the way. In bfloat16 single steps of SmolLM2 were
    off by up to 0.14 of their norm, where the draft's own keys stood for the target's by 0.6 to 2.
    """
    mask = SkipMask.from_layers(num_layers, range(1, num_layers, 2))
    i = min(range(len(forcing.texts)), key=lambda one: len(forcing.texts[one].ids))
    text = forcing.texts[i]
    rows = next(logits for at, logits in enumerate(forcing.draft_logits(mask, depth=1)) if at == i)
    count = len(text.continuation_ids)
    found, expected = [], []
    for depth, k in {(0, 0), (0, count // 2), (0, count - 1), (min(1, count - 1), count - 1)}:
        ids = torch.tensor(text.ids[: len(text.prompt_ids) + k + 1], device=engine.device)
        with engine.session(len(ids)):
            engine.forward(ids[: len(ids) - depth - 1])
            for token in ids[len(ids) - depth - 1 :]:
                live = engine.forward(token.view(1), mask).clone()
        found.append(rows[depth, k])
        expected.append(live[0])
    difference, tolerance = logit_difference(torch.stack(found), torch.stack(expected))
    return difference <= 2 * tolerance
