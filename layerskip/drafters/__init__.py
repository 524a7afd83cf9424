"""Ways to propose tokens; one file each."""

from layerskip.drafters.base import Draft, Drafter
from layerskip.drafters.layer_skip import LayerSkipDrafter

__all__ = ["Draft", "Drafter", "LayerSkipDrafter"]
