"""Masks: constructors, text form, errors."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip import SkipMask


@st.composite
def masks(draw: st.DrawFn) -> SkipMask:
    num_layers = draw(st.integers(1, 40))
    flags = st.lists(st.booleans(), min_size=num_layers, max_size=num_layers).map(tuple)
    size = draw(st.none() | st.integers(1, 1 << 24))
    ids = None if size is None else draw(st.none() | st.text("0123456789abcdef", min_size=8, max_size=8))
    return SkipMask(draw(flags), draw(flags), size, draw(st.sampled_from([None, 8, 4])), ids)


@given(masks())
def test_text_form_round_trips(mask: SkipMask) -> None:
    assert SkipMask.parse(str(mask)) == mask
    assert SkipMask.parse(str(mask).replace(",", " , ")) == mask


@given(masks())
def test_counts_agree_with_the_flags(mask: SkipMask) -> None:
    assert mask.num_skipped == sum(mask.attention) + sum(mask.mlp)
    assert mask.num_skipped_attention + mask.num_skipped_mlp == mask.num_skipped
    assert mask.skipped_layers == tuple(
        i for i, pair in enumerate(zip(mask.attention, mask.mlp, strict=True)) if all(pair)
    )
    assert mask.picture().count("x") == mask.num_skipped
    assert [len(row) for row in mask.picture().split("\n")] == [5 + mask.num_layers] * 2
    if mask.exit_layer is not None:
        exits = SkipMask.early_exit(mask.num_layers, mask.exit_layer)
        assert exits.narrowed(mask.draft_vocab, mask.draft_ids).rounded(mask.bits) == mask
    from_sublayers = SkipMask.from_sublayers(
        mask.num_layers,
        attention=[i for i, flag in enumerate(mask.attention) if flag],
        mlp=[i for i, flag in enumerate(mask.mlp) if flag],
    )
    assert from_sublayers.narrowed(mask.draft_vocab, mask.draft_ids).rounded(mask.bits) == mask


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (SkipMask.none(12), "12:none"),
        (SkipMask.from_sublayers(12, attention=[2, 4, 5, 6, 7], mlp=[4, 5, 6, 7, 9]), "12:4-7,a2,m9"),
        (SkipMask.early_exit(6, 4), "6:4-5"),
        (SkipMask.early_exit(6, 6), "6:none"),
        (SkipMask.early_exit(6, 0), "6:0-5"),
        (SkipMask.contiguous(6, 1, 3), "6:1-3"),
        (SkipMask.alternating(6), "6:1,3"),
        (SkipMask.alternating(6, offset=0), "6:0,2,4"),
        (SkipMask.alternating(1, offset=0), "1:none"),
        (SkipMask.from_sublayers(3, attention=[0, 1, 2], mlp=[1]), "3:1,a0,a2"),
        (SkipMask.from_layers(4, [1]).narrowed(8192), "4:1,v8192"),
        (SkipMask.none(4).rounded(8), "4:int8"),
        (SkipMask.from_layers(4, [1]).rounded(4), "4:1,int4"),
        (SkipMask.from_layers(4, [1]).narrowed(8192).rounded(8), "4:1,v8192,int8"),
    ],
)
def test_constructors_and_text(mask: SkipMask, text: str) -> None:
    assert str(mask) == text
    assert SkipMask.parse(text) == mask


def test_parse_merges_overlaps() -> None:
    assert SkipMask.parse("4:a0,m0,1-2,2") == SkipMask.from_layers(4, [0, 1, 2])


def test_exit_layer() -> None:
    assert SkipMask.early_exit(6, 4).exit_layer == 4
    assert SkipMask.early_exit(6, 0).exit_layer == 0
    assert SkipMask.none(6).exit_layer is None
    assert SkipMask.from_layers(6, [3, 5]).exit_layer is None
    assert SkipMask.parse("6:4-5,a0").exit_layer is None


def test_a_mask_is_a_value() -> None:
    mask = SkipMask.parse("4:1")
    assert hash(mask) == hash(SkipMask.from_layers(4, [1]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.mlp = (True,) * 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"skip_mask: must look like '12:4-7,a2,m9' or '12:none', got ''"),
        ("4", "must look like"),
        ("٤:1", "must look like"),
        ("0:none", r"skip_mask: number of layers must be in 1..1024, got 0"),
        ("4:", r"skip_mask: item must look like '3', '4-7', 'a2' or 'm9', or once like 'v8192' and 'int8' or 'int4'"),
        ("4:int8,int4", "got 'int4'"),
        ("4:int2", "got 'int2'"),
        ("4:v0", r"skip_mask: draft_vocab must be in 1..16777216, got 0"),
        ("4:1,,2", "got ''"),
        ("4:a-1", "got 'a-1'"),
        ("4:4", r"skip_mask: item must name layers in 0..3, got '4'"),
        ("4:m2-4", r"in 0..3, got 'm2-4'"),
        ("4:3-1", "got '3-1'"),
    ],
)
def test_bad_text_names_the_item(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SkipMask.parse(text)


def test_long_bad_text_is_cut_in_the_message() -> None:
    for text in ("x" * 10_000, "4:" + "y" * 10_000):
        with pytest.raises(ValueError, match="skip_mask") as error:
            SkipMask.parse(text)
        assert len(str(error.value)) < 200


def test_bad_arguments() -> None:
    for message, call in (
        ("must have one flag per layer each, got 2 and 1", lambda: SkipMask((True, False), (True,))),
        (r"number of layers must be in 1..1024, got 0", lambda: SkipMask((), ())),
        (r"attention layers must be in 0..3, got \[4\]", lambda: SkipMask.from_layers(4, [1, 4])),
        (r"mlp layers must be in 0..3, got \[-1\]", lambda: SkipMask.from_sublayers(4, mlp=[-1])),
        (r"exit_layer: must be in 0..4, got 5", lambda: SkipMask.early_exit(4, 5)),
        (r"exit_layer: must be in 0..4, got -1", lambda: SkipMask.early_exit(4, -1)),
        ("count: must be at least 0, got -1", lambda: SkipMask.contiguous(4, 0, -1)),
        (r"layers must be in 0..3, got \[4, 5\]", lambda: SkipMask.contiguous(4, 2, 4)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
