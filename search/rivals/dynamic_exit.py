"""DEL: exit layer and gamma by the tokens expected of each, from what every layer would have said."""

from __future__ import annotations

from collections.abc import Iterable

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.rivals.common import Departure, Listed, Setup, by_throughput


class DynamicExit(Listed):
    """DEL (2504.05598): early exits, ordered by the tokens/s expected of each at every gamma.

    What every exit would have drafted (the paper's shadow tokens) gives its acceptance rate, and how sure it was there
    when it ends a draft: midway between its mean confidence where it was right and where it was wrong. Verification
    starts behind the exit layer where the space has it.
    Cost, once: a reading per exit layer.
    """

    DEPARTURES = (
        Departure("one exit and gamma for all text; the paper chooses both anew every round", "hurts it"),
        Departure("acceptance from all tuning texts at once instead of the latest rounds", "helps it"),
        Departure("tokens per second at the measured costs, where the paper counts layers", "helps it"),
        Departure(
            "when to stop drafting: one threshold an exit, by a rule of ours in the place of the paper's", "either way"
        ),
        Departure("the best estimates are measured, where the paper decodes by the first", "helps it"),
        Departure("the model is what it is; the paper's are trained to exit early", "hurts it"),
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__("del", setup)

    def configs(self) -> Iterable[DecodeConfig]:
        """Every exit at its best gamma, best estimate first, then at the others."""
        space, hints = self._setup.space, self._setup.hints
        exits = [self._setup.mask(SkipMask.early_exit(space.num_layers, i)) for i in range(1, space.num_layers)]
        agreements = {mask: hints.agreement(mask) for mask in exits if mask.num_skipped}
        threshold = {mask: sum(hints.confidences(mask)) / 2 for mask in agreements}
        return by_throughput(
            agreements,
            hints.cost,
            space.gamma_max,
            lambda mask, gamma: DecodeConfig(
                skip_mask=mask, gamma=gamma, draft_threshold=threshold[mask], share_prefix=space.share_prefix
            ),
        )
