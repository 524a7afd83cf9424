"""Taking a table's readings from a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from layerskip import LayerSkipModel
from layerskip.analysis.repetition import repeated_ngram_share
from layerskip.analysis.teacher_forcing import ForcedText, make_teacher_forcing
from layerskip.config.decode_config import DecodeConfig
from search.predict.predictor import LayerStates
from search.rivals.hidden_states import PLANS, plan_facts
from studies.proving.recipes import ModelRecipe
from studies.proving.table import Table, encode, levels_of, masks_of
from studies.proving.texts import Text

NEW_TOKENS = 32
NUM_TUNING, NUM_CONFIRMING, NUM_REPORTING = 32, 24, 104


def take_readings(
    model: LlamaForCausalLM,
    text: Text,
    recipe: ModelRecipe,
    facts: dict[str, Any],
    between: Callable[[], None] = lambda: None,
) -> Table:
    """Every mask of the recipe's space, greedily, as deep as it says, on prompts that the model was not trained on.

    `between` is called after every mask. Prompts that the model ends early are left out.
    Cost: up to a draft forward over all continuation tokens a mask and draft deep.
    """
    model.eval()
    decoder = LayerSkipModel(model)
    space, depth = recipe.space, recipe.depth
    masks = masks_of(space)
    documents = text.documents
    tuning = _continued(decoder, text.prompts(documents.tuning), NUM_TUNING)
    plans = plan_facts(states_of(model, tuning), space)
    others = _continued(decoder, text.prompts(documents.reporting), NUM_CONFIRMING + NUM_REPORTING)
    texts = tuning + others
    forcing = make_teacher_forcing(decoder, texts)
    codes = np.empty((depth + 1, len(texts), NEW_TOKENS, len(masks)), dtype=np.uint8)
    for place, mask in enumerate(masks):
        reading = forcing.read(mask, depth)
        codes[..., place] = encode(reading.accepted, reading.confidence)
        between()
    repeated = repeated_ngram_share((one.prompt_ids, one.continuation_ids) for one in texts)
    return Table(
        space,
        codes,
        levels_of(forcing.target_probs),
        np.array([one.prompt_ids for one in texts], dtype=np.uint16),
        np.array([one.continuation_ids for one in texts], dtype=np.uint16),
        NUM_TUNING,
        NUM_CONFIRMING,
        facts | {"keys": forcing.keys, "repeated_ngram_share": repeated, "torch": torch.__version__, PLANS: plans},
    )


def states_of(model: LlamaForCausalLM, texts: Sequence[ForcedText]) -> LayerStates:
    """What CLaSp and KnapSpec plan from. Cost: a target forward over every text."""
    forcing = make_teacher_forcing(LayerSkipModel(model, engine="fused"), texts)
    if not isinstance(forcing, LayerStates):
        raise ValueError("model: must be one that is read layer by layer")
    return forcing


def _continued(decoder: LayerSkipModel, prompts: Iterator[tuple[int, ...]], count: int) -> list[ForcedText]:
    """The first `count` prompts, each once, that the target continues to the full length."""
    found: dict[tuple[int, ...], ForcedText] = {}
    plain = DecodeConfig.plain(decoder.num_layers)
    for prompt in prompts:
        if len(found) == count:
            break
        if prompt not in found:
            ids = decoder.generate(list(prompt), config=plain, max_new_tokens=NEW_TOKENS).ids
            if len(ids) == NEW_TOKENS:
                found[prompt] = ForcedText(prompt, tuple(ids))
    if len(found) < count:
        raise ValueError(f"text: must have {count} prompts that are continued in full, has {len(found)}")
    return list(found.values())
