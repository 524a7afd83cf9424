"""What kernels find in a row of logits is what torch's operations find; of random numbers they give torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerskip.rounds.rows import RowKernels, row_kernels

found = row_kernels()
pytestmark = pytest.mark.skipif(found is None, reason="no kernels here")
COUNTS = st.sampled_from([1, 2, 3, 311, 312, 313, 623, 624, 625, 1_000, 1_248, 5_001])


def kernels() -> RowKernels:
    assert found is not None
    return found


def generator_after(seed: int, num_words: int) -> torch.Generator:
    """One that has drawn so many numbers of 32 bits."""
    generator = torch.Generator().manual_seed(seed)
    if num_words:
        torch.empty(num_words, dtype=torch.float32).uniform_(generator=generator)
    return generator


@given(st.integers(0, 2**32), st.integers(0, 1_300), COUNTS)
def test_uniform_numbers_are_torchs(seed: int, num_words: int, count: int) -> None:
    generator = generator_after(seed, num_words)
    before = generator.get_state()
    drawn = torch.empty(count, dtype=torch.float64).uniform_(generator=generator)
    after = before.clone()
    kernels().skip(after, count)
    assert torch.equal(kernels().uniform(before, count), drawn)
    # Where all words of a block are drawn, it matters not to later numbers whether the next block is made already.
    assert torch.equal(next_of(after), next_of(generator.get_state()))


def next_of(state: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    return torch.empty(2_000).uniform_(generator=generator)


@given(st.integers(0, 2**32), st.integers(0, 1_300), st.lists(st.integers(0, 4_000), min_size=1, max_size=60))
def test_those_that_are_wanted_are_some_of_them(seed: int, num_words: int, places: list[int]) -> None:
    state, wanted = generator_after(seed, num_words).get_state(), torch.tensor(places)
    assert torch.equal(kernels().uniform_at(state, wanted), kernels().uniform(state, 4_001)[wanted])


def rows() -> st.SearchStrategy[torch.Tensor]:
    """With ties and impossible ids."""
    numbers = st.one_of(st.floats(-20, 20, width=16), st.just(-math.inf))
    return st.lists(numbers, min_size=1, max_size=300).map(torch.tensor)


@given(rows(), st.integers(1, 320), st.floats(0.1, 3.0))
def test_the_likeliest_are_all_there_and_none_that_is_impossible(row: torch.Tensor, most: int, divisor: float) -> None:
    divided = torch.empty_like(row)
    ids = kernels().likeliest(row, most, -math.inf, divisor, divided)
    assert torch.equal(divided, row / divisor)
    last = float(divided.topk(min(most, len(row))).values[-1])
    wanted = ((divided >= last) & (divided > -math.inf)).nonzero().flatten().tolist()
    assert set(wanted) <= set(ids.tolist())
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert bool((divided[ids] > -math.inf).all())


@given(rows(), st.floats(-20, 20, width=16))
def test_those_above_a_limit_are_exactly_they(row: torch.Tensor, least: float) -> None:
    expected = (row >= least).nonzero().flatten()
    assert torch.equal(kernels().likeliest(row, len(row), least), expected)


@pytest.mark.parametrize("place", [0, 63, 64, 9_999])
def test_of_a_row_with_a_number_that_is_none_there_are_none(place: int) -> None:
    row = torch.zeros(10_000)
    row[place] = math.nan
    assert len(kernels().likeliest(row, 5, -math.inf)) == 0


def test_few_of_a_large_row_are_looked_at_again() -> None:
    row = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    ids = kernels().likeliest(row, 50, -math.inf)
    assert 50 <= len(ids) < 200
    kernels().leave_only(row, ids)
    assert torch.equal((row > -math.inf).nonzero().flatten(), ids)
