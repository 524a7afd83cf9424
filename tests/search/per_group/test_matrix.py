"""The matrix of settings and groups, the choice that follows from it, and its table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from layerskip import Confirmed, DecodeConfig, SkipMask
from search.measure.decoder import Decoded
from search.measure.pairs import LosslessViolation, PromptCase
from search.per_group.choice import decide, tolerance
from search.per_group.export import GroupResult, combined_config
from search.per_group.matrix import NO_PROMPT, Cell, measure_matrix, table, violations_of
from tests.search.helpers.fakes import CALM, NUM_LAYERS, WILD, FakeDecoder, group_prompts, truth, wild_needs_late_layers


def setting(layers: Sequence[int], gamma: int = 4) -> DecodeConfig:
    return DecodeConfig(skip_mask=SkipMask.from_layers(NUM_LAYERS, layers), gamma=gamma)


BROAD, NARROW, PLAIN = setting([1, 2, 3, 4]), setting([1, 2]), DecodeConfig.plain(NUM_LAYERS, reason="slower")


def decoder_with(fault: str) -> FakeDecoder:
    """Something goes wrong with BROAD on wild prompts alone, or with plain decoding."""

    def spoil(prompt_ids: Sequence[int], config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
        picked = config.speculates and config.skip_mask == BROAD.skip_mask and prompt_ids[2] == 3
        if picked and fault == "memory":
            raise MemoryError("no room")
        differs = (picked and fault == "output") or (not config.speculates and fault == "plain")
        return Decoded((*out.ids[:5], 99, *out.ids[6:]), out.stats) if differs else out

    return FakeDecoder(then=spoil)


def cases_of(counts: dict[str, int], decoder: FakeDecoder) -> dict[str, list[PromptCase]]:
    cases: dict[str, list[PromptCase]] = {name: [] for name in counts}
    for prompt in group_prompts(counts, first=500):
        reference = FakeDecoder().decode(prompt.ids, PLAIN).ids
        cases[str(prompt.group)].append(PromptCase(prompt.prompt_id, prompt.ids, reference))
    return cases


def measure(decoder: FakeDecoder, rows: dict[str, DecodeConfig], counts: dict[str, int], repeats: int = 2) -> Any:
    return measure_matrix(decoder, rows, cases_of(counts, decoder), repeats=repeats, seed=0)


def test_equal_settings_are_measured_once_and_plain_decoding_never() -> None:
    decoder = FakeDecoder(interaction=wild_needs_late_layers)
    rows = {"default": BROAD, "calm": BROAD.model_copy(update={"reason": "x"}), "wild": PLAIN}
    matrix = measure(decoder, rows, {"calm": 3, "wild": 2}, repeats=2)
    assert decoder.num_decoded == 2 * 2 * (3 + 2)
    assert matrix["calm"]["wild"] is matrix["default"]["wild"]
    assert matrix["wild"]["calm"].speedup == matrix["wild"]["wild"].speedup == 1.0
    assert matrix["default"]["calm"].speedup == pytest.approx(truth(BROAD, CALM), rel=0.03)
    assert matrix["default"]["wild"].speedup == pytest.approx(truth(BROAD, WILD), rel=0.03)
    assert violations_of(matrix) == []


def test_a_setting_is_measured_as_it_will_decode() -> None:
    """It was measured with mask, gamma and thresholds alone, whatever else it said."""
    used: list[DecodeConfig] = []
    decoder = FakeDecoder(break_on=used.append)  # type: ignore[arg-type]
    branches = BROAD.model_copy(update={"siblings": 2, "reason": "x"})
    matrix = measure(decoder, {"default": branches}, {"calm": 2}, repeats=1)
    assert {config.siblings for config in used if config.speculates} == {2}
    assert matrix["default"]["calm"].config == branches.bare()


def test_every_setting_goes_first_and_last_and_plain_goes_first_half_of_the_time() -> None:
    order: list[DecodeConfig] = []
    decoder = FakeDecoder(break_on=order.append)  # type: ignore[arg-type]
    measure(decoder, {"default": BROAD, "calm": NARROW}, {"calm": 4, "wild": 0}, repeats=2)
    masks = [config.skip_mask if config.speculates else None for config in order]
    pairs = list(zip(masks[::2], masks[1::2], strict=True))
    assert len(pairs) == 16
    for mask in (BROAD.skip_mask, NARROW.skip_mask):
        assert pairs.count((None, mask)) == pairs.count((mask, None)) == 4
    first = [set(pair) - {None} for pair in pairs[::2]]
    assert first.count({BROAD.skip_mask}) == first.count({NARROW.skip_mask}) == 4


def test_an_output_that_differs_on_one_group_excludes_the_setting_from_all() -> None:
    decoder = decoder_with("output")
    matrix = measure(decoder, {"default": NARROW, "calm": BROAD, "wild": NARROW}, {"calm": 3, "wild": 3})
    assert [matrix["calm"][group].speedup for group in ("calm", "wild")] == [None, None]
    assert matrix["default"]["wild"].speedup is not None
    (line,) = violations_of(matrix)
    assert line.startswith("matrix: not lossless: prompt 'wild3': output differs from the target's from token 5 on")
    assert decoder.num_freed == 1


def test_a_failure_on_one_group_excludes_the_setting_there_alone() -> None:
    decoder = decoder_with("memory")
    matrix = measure(decoder, {"default": NARROW, "calm": BROAD}, {"calm": 3, "wild": 3})
    assert matrix["calm"]["wild"].excluded == "MemoryError: no room"
    assert matrix["calm"]["calm"].speedup == pytest.approx(truth(BROAD, CALM), rel=0.03)
    assert violations_of(matrix) == []


def test_plain_decoding_that_does_not_repeat_itself_blames_no_setting() -> None:
    decoder = decoder_with("plain")
    with pytest.raises(LosslessViolation):
        measure(decoder, {"default": NARROW, "calm": BROAD}, {"calm": 2, "wild": 2})


def test_a_group_without_a_prompt_to_time_has_no_numbers() -> None:
    matrix = measure(FakeDecoder(), {"default": BROAD, "wild": PLAIN}, {"calm": 2, "wild": 0})
    assert matrix["default"]["wild"].excluded == matrix["wild"]["wild"].excluded == NO_PROMPT


# What a group gets.


def cell(config: DecodeConfig, speedup: float, *, spread: float = 0.02, num_prompts: int = 16, **changes: Any) -> Cell:
    measured = Confirmed(
        tokens_per_s=100 * speedup,
        plain_tokens_per_s=100.0,
        speedup=speedup,
        speedup_ci_low=speedup * (1 - spread),
        speedup_ci_high=speedup * (1 + spread),
        num_prompts=num_prompts,
        num_identical=num_prompts,
        num_repeats=3,
    )
    return Cell(config, measured, **changes)


EXCLUDED = Cell(BROAD, excluded="not lossless: prompt 'p'", lossless=False)


@pytest.mark.parametrize(
    ("own", "default", "noise", "source", "said"),
    [
        (cell(BROAD, 1.30), cell(NARROW, 1.20), 0.01, "own", None),
        (cell(BROAD, 1.205), cell(NARROW, 1.20), 0.0, "default", r"1\.205x on its 16 .* \+0\.4 %, .* than 1\.0 %"),
        (cell(BROAD, 1.25), cell(NARROW, 1.20), 0.20, "default", r"\+4\.2 %, and better means more than 7\.3 %"),
        (cell(BROAD, 1.10), cell(NARROW, 1.20), 0.0, "default", r"-8\.3 %"),
        (cell(BROAD, 1.30), cell(BROAD, 1.30), 0.0, "default", "arrived at it too"),
        (EXCLUDED, cell(NARROW, 1.20), 0.0, "default", "the group's own was excluded"),
        (cell(BROAD, 1.30), Cell(NARROW, excluded="MemoryError: x"), 0.0, "own", None),
        (cell(BROAD, 1.05, spread=0.1), cell(NARROW, 0.9), 0.0, "plain", "own setting .* interval 0.945 to 1.155"),
        (cell(BROAD, 1.02, spread=0.1), cell(NARROW, 1.03, spread=0.1), 0.0, "plain", "default setting .* 0.927 to"),
        (EXCLUDED, Cell(NARROW, excluded="MemoryError: x"), 0.0, "plain", r"not lossless.*; .*MemoryError"),
    ],
)
def test_what_a_group_gets(own: Cell, default: Cell, noise: float, source: str, said: str | None) -> None:
    decision = decide(own, default, noise_sigma=noise, search_said=None)
    given = {"own": own, "default": default, "plain": Cell(PLAIN)}[source]
    assert decision.source == source
    assert decision.setting.skip_mask == given.config.skip_mask
    assert decision.setting.gamma == given.config.gamma
    assert decision.setting.confirmed == (None if source == "plain" else given.measured)
    if said is None:
        assert decision.setting.reason is None
    else:
        prefix = "do not speculate: " if source == "plain" else "the default's setting: "
        assert decision.setting.reason.startswith(prefix)
        assert re.search(said, decision.setting.reason)


def test_a_group_whose_own_search_ended_plainly_may_still_take_the_default() -> None:
    said = "do not speculate: no candidate passed"
    taken = decide(Cell(PLAIN), cell(NARROW, 1.2), noise_sigma=0.0, search_said=said)
    assert (taken.source, taken.setting.gamma) == ("default", 4)
    slow = decide(Cell(PLAIN), cell(NARROW, 0.8), noise_sigma=0.0, search_said=said)
    assert (slow.source, slow.setting.reason) == ("plain", said)
    unsure = decide(Cell(PLAIN), cell(NARROW, 1.01, spread=0.1), noise_sigma=0.0, search_said=said)
    assert unsure.source == "plain"
    assert unsure.setting.reason.startswith(f"{said}; the group's own (plain decoding) reached 1.000x")


def test_the_tolerance_is_one_per_cent_or_the_noise_of_the_mean() -> None:
    assert tolerance(0.0, 16) == tolerance(0.001, 16) == 0.01
    assert tolerance(0.2, 16) == pytest.approx(0.2 * math.sqrt(2) / 4)


# The table.


def test_the_table_is_plain_ascii_in_blocks_that_fit() -> None:
    names = ["prosä", *(f"group{i}" for i in range(7)), "a" * 40]
    row = {name: cell(BROAD, 1.25) for name in names}
    other = dict.fromkeys(names, EXCLUDED) | {"group0": Cell(PLAIN), "group1": cell(BROAD, 1.5, num_prompts=1)}
    lines = table({"default": row, "prosä": other}, {("default", "prosä"), ("prosä", "group1")})
    assert all(line.isascii() and len(line) <= 110 for line in lines)
    assert len(lines) == 3 * 3
    assert lines[0].split("  ")[0] == "setting of"
    text = "\n".join(lines)
    assert text.count("1.250 1.225..1.275*") == 1
    assert text.count("1.250 1.225..1.275") == len(names)
    assert text.count("excluded") == len(names) - 2
    assert "1.000 plain" in text
    assert "1.500 one prompt*" in text
    assert r"on pros\xe4" in text
    assert "on " + "a" * 22 + ".." in text


# What is exported.


def test_a_default_whose_output_differed_in_the_matrix_alone_is_not_exported() -> None:
    broken = BROAD.model_copy(update={"confirmed": cell(BROAD, 1.3).measured})
    outcomes: dict[str, Any] = {"default": SimpleNamespace(config=broken, summary={"not_lossless": ["trial 3: x"]})}
    outcomes["calm"] = SimpleNamespace(config=NARROW, summary={"not_lossless": ["trial 5: y"]})
    fine = cell(NARROW, 1.2)
    matrix = {"default": {"calm": EXCLUDED}, "calm": {"calm": fine}}
    decisions = {"calm": decide(fine, EXCLUDED, noise_sigma=0.0, search_said=None)}
    result = GroupResult({}, outcomes, matrix, decisions)
    config = combined_config(result)
    assert (config.gamma, config.confirmed) == (0, None)
    assert config.reason == f"do not speculate: {EXCLUDED.excluded}"
    assert config.for_group("calm").skip_mask == NARROW.skip_mask
    assert result.violations[1:] == ["trial 3: x", "calm: trial 5: y"]
    kept = combined_config(replace(result, matrix={"default": {"calm": fine}, "calm": {"calm": fine}}))
    assert (kept.skip_mask, kept.confirmed) == (BROAD.skip_mask, broken.confirmed)
