"""WeightsLoader: draft weights into an engine, checked against the model that they are to draft for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layerskip.config.decode_config import OWN_LAYERS, DraftWeights
from layerskip.config.hub import locate_weights
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.draft_weights import describe_weights, has_other_tokenizer, other_tokens
from layerskip.drafters.eagle.head import load_eagle, read_config
from layerskip.drafters.eagle.lean import LeanEagle, LeanHead
from layerskip.drafters.eagle.published import is_published, load_published
from layerskip.drafters.mtp import MtpHead
from layerskip.drafters.translation import Translation
from layerskip.engines import Engine, make_engine
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean.layers import LayerMaker
from layerskip.engines.lean.weight_layout import TorchLayers
from layerskip.engines.native.layers import NativeLayers
from layerskip.engines.states import StatesEngine
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.loading import load_pretrained, weights_fingerprint
from layerskip.huggingface.mtp import load_mtp, mtp_refusal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightsLoader:
    """Into `engine.draft_weights`, by their path."""

    engine: Engine
    adapter: ModelAdapter
    tokenizer: Any
    num_tokens: int
    """Ids that the model's texts may hold."""
    target_fingerprint: Callable[[], str]
    """The model's `weights_fingerprint`."""

    def load(self, weights: DraftWeights) -> None:
        """Once for a folder, as long as its fingerprint is the one asked for.

        Raises: ValueError in one line for weights of another model, changed ones, missing ones, and an engine or a
        placement that they cannot draft on.
        """
        known = self.engine.draft_weights.get(weights.path)
        whatever_lies_there = weights.path == OWN_LAYERS and not weights.fingerprint
        if known is None or not (whatever_lies_there or known.fingerprint == weights.fingerprint):
            loads = {"eagle": self._eagle, "mtp": self._mtp, "draft_model": self._draft_model}
            self.engine.draft_weights[weights.path] = loads[weights.drafter](weights)
        if weights.draft_vocab is not None and has_other_tokenizer(self.engine, weights):
            raise ValueError(
                "draft_weights.draft_vocab: must be left out where the draft model has another tokenizer, as "
                f"{weights.path} has; got {weights.draft_vocab}"
            )

    @property
    def mtp_refusal(self) -> str | None:
        """Why no multi-token-prediction layer of the model's own checkpoint may draft; None where one may be loaded."""
        if not isinstance(self.engine, StatesEngine):
            return f"the engine eager or fused, got {self.engine.name}"
        return mtp_refusal(self.adapter)

    @property
    def _records_lean(self) -> bool:
        """Whether the engine records lean layers."""
        return isinstance(self.engine, CudaGraphEngine) and self.engine.lean is not None

    @property
    def _maker(self) -> LayerMaker:
        """Of layers that only draft: in 8 bits and compiled for this CPU where that can be, else torch's.

        They read half of a checkpoint's bytes, and hardly a draft changes (`python -m studies.engine.draft_bits`).
        """
        device = self.adapter.device
        if self._records_lean or NativeLayers.refusal(device, self.adapter.dtype) is not None:
            return TorchLayers(device)
        return NativeLayers().rounded(8)

    def own_layer(self) -> DraftWeights:
        """The first such layer, loaded. Raises: ValueError where there is none, or it cannot draft."""
        self.load(DraftWeights(drafter="mtp", path=OWN_LAYERS, fingerprint=""))
        fingerprint = self.engine.draft_weights[OWN_LAYERS].fingerprint
        return DraftWeights(drafter="mtp", path=OWN_LAYERS, fingerprint=fingerprint)

    def _mtp(self, weights: DraftWeights) -> MtpHead:
        if self.mtp_refusal is not None:
            raise ValueError(f"draft_weights: mtp needs {self.mtp_refusal}")
        found = load_mtp(self.adapter)
        fingerprint = weights_fingerprint(found.layers[0])
        if weights.fingerprint not in ("", fingerprint):
            raise ValueError(
                f"draft_weights.fingerprint: must be that of the model's own layer, {fingerprint}, got "
                f"{weights.fingerprint}"
            )
        return MtpHead(found, self.adapter.model, fingerprint)

    def _eagle(self, weights: DraftWeights) -> LeanHead:
        if not (self._records_lean or isinstance(self.engine, StatesEngine)):
            raise ValueError(
                "draft_weights: eagle needs the engine eager or fused, or cuda_graph over lean layers, got "
                f"{self.engine.name} over {type(self.adapter.model).__name__}'s own modules"
            )
        self.adapter.placement.check_whole("draft_weights")
        folder = locate_weights(weights.path)
        if is_published(config := read_config(folder)):
            _check_fingerprint(weights)
            return load_published(folder, config, weights.fingerprint, self.adapter.model, self._maker)
        head = load_eagle(weights, self.adapter.model, self.target_fingerprint())
        return LeanEagle(head, self.adapter.head, weights.fingerprint, self._maker)

    def _draft_model(self, weights: DraftWeights) -> DraftModel:
        """Raises: ValueError if it is another one now, or its tokens cannot be compared or are more than it knows."""
        _check_fingerprint(weights)
        model, tokenizer = load_pretrained(
            locate_weights(weights.path), device=self.adapter.device, dtype=self.adapter.dtype
        )
        difference = other_tokens(self.tokenizer, tokenizer)
        adapter = ModelAdapter(model)
        known = int(model.get_input_embeddings().weight.shape[0])
        if None in (self.tokenizer, tokenizer) and known != self.num_tokens:
            raise ValueError(
                f"draft_weights: without tokenizers to compare, {weights.path} must know as many tokens as the model, "
                f"{self.num_tokens}, got {known}"
            )
        translation = None
        if difference is not None:
            if adapter.recurrent_layers:  # own tokens change further back than a state is kept
                raise ValueError(
                    f"draft_weights: a draft model with another tokenizer must have attention alone, layers of "
                    f"{weights.path} keep a state"
                )
            logger.info("%s has another tokenizer (%s): what it drafts is encoded anew", weights.path, difference)
            translation = Translation(self.tokenizer, tokenizer, self.num_tokens)
            if translation.own.num_ids > known:
                raise ValueError(
                    f"draft_weights: the tokenizer of {weights.path} must have at most the {known} ids of its model, "
                    f"got {translation.own.num_ids}"
                )
        engine = make_engine("auto", adapter).engine
        if isinstance(engine, FusedEngine):
            engine.round_weights()
        return DraftModel(
            engine,
            weights.fingerprint,
            num_layers=adapter.num_layers,
            num_tokens=known,
            vocabulary=self.adapter.vocab_size if translation is None else translation.own.num_ids,
            max_positions=adapter.max_positions,
            nbytes=sum(one.nbytes for one in model.parameters()),
            translation=translation,
        )


def _check_fingerprint(weights: DraftWeights) -> None:
    """Raises: ValueError if what lies there is something else now."""
    found = describe_weights(weights.path)
    if (found.drafter, found.fingerprint) != (weights.drafter, weights.fingerprint):
        raise ValueError(
            f"draft_weights.fingerprint: must be that of {weights.path}, {found.drafter} {found.fingerprint}, got "
            f"{weights.drafter} {weights.fingerprint}"
        )
