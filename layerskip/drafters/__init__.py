"""Ways to propose tokens; one file each."""

from layerskip.drafters.base import Draft, Drafter, DraftOnDevice, DraftSession, Proposal
from layerskip.drafters.choice import make_drafter
from layerskip.drafters.layer_skip import LayerSkipDrafter, LayerSkipSettings
from layerskip.drafters.lookups.text_store import TextStore

__all__ = [
    "Draft",
    "DraftOnDevice",
    "DraftSession",
    "Drafter",
    "LayerSkipDrafter",
    "LayerSkipSettings",
    "Proposal",
    "TextStore",
    "make_drafter",
]
