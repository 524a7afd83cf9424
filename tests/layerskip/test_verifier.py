"""Verification by hand: who is accepted and which token follows."""

from __future__ import annotations

import math

import pytest
import torch

from layerskip.sampling import Sampler, SamplingParams
from layerskip.verifier import recovery_weights, verify_greedy, verify_sampled


def one_hot_logits(*tokens: int) -> torch.Tensor:
    """Rows whose best token is given; vocabulary 5, probability of the best e^2 / (e^2 + 4)."""
    rows = torch.zeros(len(tokens), 5)
    rows[torch.arange(len(tokens)), torch.tensor(tokens)] = 2.0
    return rows


@pytest.mark.parametrize(
    ("draft", "target", "accepted", "token"),
    [
        ([], [3], 0, 3),  # nothing drafted: the target's own token
        ([1], [1, 4], 1, 4),  # gamma 1, kept: bonus
        ([1], [2, 4], 0, 2),  # gamma 1, rejected: recovered
        ([1, 2, 3], [1, 2, 3, 0], 3, 0),  # all
        ([1, 2, 3], [1, 2, 4, 0], 2, 4),  # last rejected
        ([1, 2, 3], [1, 4, 3, 0], 1, 4),  # a match after a rejection counts for nothing
        ([1, 2, 3], [0, 2, 3, 4], 0, 0),  # none, though the rest agrees
        ([0, 0], [0, 0, 0], 2, 0),  # token 0 is a token like any other
    ],
)
def test_greedy_table(draft: list[int], target: list[int], accepted: int, token: int) -> None:
    ids = torch.tensor(draft, dtype=torch.long)
    for with_prob in (False, True):
        verdict = verify_greedy(ids, one_hot_logits(*target), with_prob=with_prob)
        assert (verdict.num_accepted, verdict.next_token) == (accepted, token)
        expected = math.exp(2) / (math.exp(2) + 4) if with_prob else None
        assert verdict.next_token_prob == (None if expected is None else pytest.approx(expected, rel=1e-5))


def test_greedy_takes_the_first_of_equal_logits_as_argmax_does() -> None:
    logits = torch.zeros(2, 5)
    assert verify_greedy(torch.tensor([0]), logits).num_accepted == int(logits[0].argmax() == 0)


def test_large_token_ids_survive_the_transfer() -> None:
    # Ids and a probability travel in one float tensor: it must be one that holds ids above 2**24 (float32 would not).
    logits = torch.zeros(1, 2**24 + 3)
    logits[0, 2**24 + 1] = 5.0
    assert verify_greedy(torch.empty(0, dtype=torch.long), logits).next_token == 2**24 + 1


class Scripted(Sampler):
    """Uniform numbers from a list; draws the likeliest token and remembers the weights."""

    def __init__(self, uniforms: list[float]) -> None:
        super().__init__(SamplingParams(do_sample=True))
        self.uniforms = uniforms
        self.weights = torch.empty(0)

    def uniform(self, num: int, device: torch.device) -> torch.Tensor:
        assert num == len(self.uniforms)
        return torch.tensor(self.uniforms)

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        self.weights = probs[0]
        return probs.argmax(-1)


TARGET = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.3, 0.0], [0.0, 0.2, 0.2, 0.6]])
DRAFT = torch.tensor([[0.25, 0.6, 0.15, 0.0], [0.0, 0.3, 0.1, 0.6]])


@pytest.mark.parametrize(
    ("draft", "uniforms", "accepted", "weights"),
    [
        ([0, 1], [0.999, 0.999], 2, TARGET[2]),  # target above draft: always kept; bonus from the last row
        ([1, 1], [0.49, 0.999], 2, TARGET[2]),  # kept with probability .3 / .6
        ([1, 1], [0.51, 0.0], 0, [0.25, 0.0, 0.05, 0.0]),  # rejected; what follows does not count
        ([0, 3], [0.0, 0.0], 1, [0.1, 0.3, 0.2, 0.0]),  # the target never says 3: rejected even at u = 0
        ([2, 2], [0.0, 0.99], 2, TARGET[2]),
    ],
)
def test_sampled_table(draft: list[int], uniforms: list[float], accepted: int, weights: list[float]) -> None:
    sampler = Scripted(uniforms)
    verdict = verify_sampled(torch.tensor(draft), DRAFT, TARGET, sampler)
    assert verdict.num_accepted == accepted
    torch.testing.assert_close(sampler.weights, torch.as_tensor(weights))
    assert verdict.next_token == int(sampler.weights.argmax())
    # The probability is the target's own, not that of the residual.
    assert verdict.next_token_prob == pytest.approx(float(TARGET[accepted, verdict.next_token]))


def test_sampled_gamma_1_and_0() -> None:
    assert verify_sampled(torch.tensor([1]), DRAFT[:1], TARGET[:2], Scripted([0.4])).num_accepted == 1
    assert verify_sampled(torch.tensor([1]), DRAFT[:1], TARGET[:2], Scripted([0.6])).num_accepted == 0
    nothing = Scripted([])
    verdict = verify_sampled(torch.empty(0, dtype=torch.long), DRAFT[:0], TARGET[2:], nothing)
    assert (verdict.num_accepted, verdict.next_token) == (0, 3)
    assert torch.equal(nothing.weights, TARGET[2])


def test_equal_rows_are_always_accepted() -> None:
    almost_one = 1.0 - 2.0**-24
    ids = torch.tensor([0, 1])
    assert verify_sampled(ids, TARGET[:2], TARGET, Scripted([almost_one, almost_one])).num_accepted == 2


def test_zero_residual_draws_from_the_target() -> None:
    # Equal rows leave no residual to draw from: dividing by its sum would give NaN, and multinomial an error.
    torch.testing.assert_close(recovery_weights(TARGET[0], TARGET[0]), TARGET[0])
    torch.testing.assert_close(recovery_weights(TARGET[0], DRAFT[0]), torch.tensor([0.25, 0.0, 0.05, 0.0]))


def test_a_draft_probability_that_underflowed_is_no_division_by_zero() -> None:
    draft = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert verify_sampled(torch.tensor([0]), draft, TARGET[:2], Scripted([0.9])).num_accepted == 1


def test_shapes_are_checked() -> None:
    for ids, rows in ((torch.zeros(2).long(), 2), (torch.zeros(2).long(), 4), (torch.zeros(1, 2).long(), 3)):
        with pytest.raises(ValueError, match="target: must have one row per draft token and one more"):
            verify_greedy(ids, torch.zeros(rows, 4))
        with pytest.raises(ValueError, match="target: must have one row per draft token and one more"):
            verify_sampled(ids, DRAFT, torch.zeros(rows, 4), Scripted([0.5, 0.5]))
    for draft in (torch.cat([DRAFT, DRAFT])[:3], DRAFT[:, :3]):
        with pytest.raises(ValueError, match="draft_probs: must have at most 2 rows of 4"):
            verify_sampled(torch.tensor([0, 1]), draft, TARGET, Scripted([0.5, 0.5]))
