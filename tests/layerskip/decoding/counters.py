"""What the counters of any decoding have to add up to, whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip import DecodeConfig, LayerSkipModel
from layerskip.decoding.loop import ACCEPTED, BONUS, LOOKED_UP, RECOVERED, TARGET_ONLY
from layerskip.model import GenerateOutput
from tests.layerskip import zoo


def check_counters(out: GenerateOutput, config: DecodeConfig) -> None:
    stats = out.stats
    drafted, accepted = stats.drafted_by_position, stats.accepted_by_position
    assert stats.num_emitted + stats.num_cut == 1 + stats.num_accepted + stats.num_rounds + stats.num_target_only
    assert stats.num_recovered + stats.num_bonus == stats.num_rounds
    assert (sum(drafted), sum(accepted)) == (stats.num_drafted, stats.num_accepted)
    assert len(drafted) == len(accepted) == config.max_gamma
    assert drafted == sorted(drafted, reverse=True)
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    if config.gamma:
        assert drafted[0] == stats.num_rounds  # a round drafts at least one token
    assert stats.num_emitted == len(out.ids) == len(out.origins)
    assert stats.num_looked_up_accepted <= stats.num_looked_up <= stats.num_drafted
    assert stats.num_rounds == sum(stats.rounds_by_drafted) + sum(stats.lookup_rounds_by_drafted)
    assert sum(stats.lookup_rounds_by_drafted) == stats.num_lookup_rounds
    if not config.computes_drafts:
        assert stats.num_looked_up == stats.num_drafted
    assert stats.num_sibling_hits <= min(stats.num_siblings, stats.num_accepted)
    if not config.tree_tokens:
        assert stats.num_sibling_hits <= stats.num_bonus
    if not config.siblings:
        assert accepted == sorted(accepted, reverse=True)
    if stats.num_cut == 0:
        looked_up = stats.num_looked_up_accepted
        expected = {
            ACCEPTED: stats.num_accepted - looked_up,
            LOOKED_UP: looked_up,
            RECOVERED: stats.num_recovered,
            BONUS: stats.num_bonus,
            TARGET_ONLY: 1 + stats.num_target_only,
        }
        assert {origin: out.origins.count(origin) for origin in expected} == expected
        num_rejected = sum(map(len, out.rejected.values()))
        assert num_rejected == stats.num_drafted - stats.num_accepted + stats.num_sibling_hits


def check_ends(
    model: LayerSkipModel, prompt: Sequence[int], config: DecodeConfig, reference: Sequence[int], most_cut: int = 1
) -> None:
    """Any token may be the end of text, wherever it lies in a round; some end at least `most_cut` tokens before it."""
    cuts = set()
    for token in sorted(set(reference)):
        expected = list(reference[: reference.index(token) + 1])
        out = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config, eos_token_id=token)
        assert out.ids == expected
        assert out.finish_reason == "eos"
        check_counters(out, config)
        cuts.add(out.stats.num_cut)
    assert 0 in cuts
    assert max(cuts) >= most_cut, "no end of text inside a round"
