"""Verification by hand: who is accepted and which token follows."""

from __future__ import annotations

import math

import pytest
import torch

from layerskip.rounds.sampling import Sampler, SamplingParams
from layerskip.rounds.verifier import verify

GREEDY = Sampler(SamplingParams())


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
        verdict = verify(ids, one_hot_logits(*target), GREEDY, 0, with_prob=with_prob)
        assert (verdict.num_accepted, verdict.next_token) == (accepted, token)
        expected = math.exp(2) / (math.exp(2) + 4) if with_prob else None
        assert verdict.next_token_prob == (None if expected is None else pytest.approx(expected, rel=1e-5))


def test_greedy_takes_the_first_of_equal_logits_as_argmax_does() -> None:
    logits = torch.zeros(2, 5)
    assert verify(torch.tensor([0]), logits, GREEDY, 0).num_accepted == int(logits[0].argmax() == 0)


def test_large_token_ids_survive_the_transfer() -> None:
    # Ids and a probability travel in one float tensor: it must be one that holds ids above 2**24 (float32 would not).
    logits = torch.zeros(1, 2**24 + 3)
    logits[0, 2**24 + 1] = 5.0
    assert verify(torch.empty(0, dtype=torch.long), logits, GREEDY, 0).next_token == 2**24 + 1


TARGET = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.3, 0.0], [0.0, 0.2, 0.2, 0.6]])
DRAFT = torch.tensor([[0.25, 0.6, 0.15, 0.0], [0.0, 0.3, 0.1, 0.6], [0.3, 0.3, 0.2, 0.2]])
NUM_DRAWS = 20_000


def drawing(seed: int = 0, place: int = 7) -> Sampler:
    sampler = Sampler(SamplingParams(do_sample=True), torch.Generator().manual_seed(seed))
    sampler.begin(place)
    return sampler


def test_tokens_are_those_of_multinomial_one_after_another() -> None:
    sampler, generator = drawing(3), torch.Generator().manual_seed(3)
    rows = torch.rand(50, 11).softmax(-1)
    expected = [int(torch.multinomial(row.unsqueeze(0), 1, generator=generator)) for row in rows]
    assert sampler.choose(rows[:20].log(), 7).tolist() == expected[:20]
    assert sampler.choose(rows[10:40].log(), 17).tolist() == expected[10:40]  # of places asked for before, the same
    sampler.settle(40)
    assert sampler.choose(rows[33:].log(), 40).tolist() == expected[33:]
    with pytest.raises(ValueError, match="place: must be at least 40, those before are settled, got 39"):
        sampler.choose(rows[:1].log(), 39)


def test_the_generator_goes_back_to_the_end_of_the_text() -> None:
    generator, other = (torch.Generator().manual_seed(1) for _ in range(2))
    sampler = Sampler(SamplingParams(do_sample=True), generator)
    sampler.begin(4)
    sampler.choose(torch.zeros(9, 6), 4)
    sampler.settle(6)
    sampler.end(7)
    for _ in range(3):
        torch.multinomial(torch.ones(1, 6), 1, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_sampled_verification_keeps_what_the_target_says_itself() -> None:
    for seed in range(200):
        own = drawing(seed).choose(TARGET.log(), 7).tolist()
        for draft in ([own[0], own[1]], [own[0], 3 - own[1]], [(own[0] + 1) % 4, own[1]]):
            accepted = next((i for i in range(2) if draft[i] != own[i]), 2)
            verdict = verify(torch.tensor(draft), TARGET.log(), drawing(seed), 7)
            assert (verdict.num_accepted, verdict.next_token) == (accepted, own[accepted])
            assert verdict.next_token_prob == pytest.approx(float(TARGET[accepted, own[accepted]]))
            nothing = verify(torch.empty(0, dtype=torch.long), TARGET[:1].log(), drawing(seed), 7, with_prob=False)
            assert (nothing.next_token, nothing.next_token_prob) == (own[0], None)


@pytest.mark.parametrize("row", range(3))
def test_draft_and_target_agree_as_often_as_coupled_draws_can(row: int) -> None:
    sampler = drawing()
    drafted, said = (sampler.choose(probs[row].log().expand(NUM_DRAWS, 4), 7) for probs in (DRAFT, TARGET))
    p, q = TARGET[row].tolist(), DRAFT[row].tolist()
    # The chance that one token has the smallest noise / probability in both, over all tokens.
    both = [i for i in range(4) if p[i] > 0 and q[i] > 0]
    exact = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(4)) for i in both)
    assert float((drafted == said).float().mean()) == pytest.approx(exact, abs=4 * (0.25 / NUM_DRAWS) ** 0.5)
    distance = sum(abs(one - other) for one, other in zip(p, q, strict=True)) / 2
    assert (1 - distance) / (1 + distance) - 1e-9 <= exact <= 1 - distance + 1e-9
    certain = torch.zeros(4).scatter(0, torch.tensor([1]), 1.0).log().expand(NUM_DRAWS, 4)
    kept = float((sampler.choose(certain, 7) == said).float().mean())
    assert kept == pytest.approx(p[1], abs=4 * (0.25 / NUM_DRAWS) ** 0.5)  # as rejection sampling would


def test_shapes_are_checked() -> None:
    for ids, rows in ((torch.zeros(2).long(), 2), (torch.zeros(2).long(), 4), (torch.zeros(1, 2).long(), 3)):
        for sampler in (GREEDY, drawing()):
            with pytest.raises(ValueError, match="target: must have one row per draft token and one more"):
                verify(ids, torch.zeros(rows, 4), sampler, 7)
