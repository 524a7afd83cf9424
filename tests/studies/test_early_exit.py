"""The study of early exits: adapters begin as no change and learn what the model says; what follows from agreement."""

from __future__ import annotations

import pytest
import torch

from studies.stock_weights.early_exit import Exits, best_speedup, train
from tests.layerskip import zoo


@pytest.mark.slow
def test_an_adapter_begins_as_no_change_and_learns_what_the_model_says() -> None:
    torch.manual_seed(0)
    exits = Exits(zoo.layerskip_of("llama").model, rank=8)
    texts = torch.randint(0, zoo.VOCAB, (16, 24))
    plain, adapted = exits.agreement([texts])
    assert plain == adapted
    assert len(plain) == zoo.NUM_LAYERS - 1
    steps, _ = train(exits, texts, 3.0)
    after, learnt = exits.agreement([texts])
    assert steps > 1
    assert after == plain, "the model is frozen"
    assert sum(learnt) > sum(plain)


def test_what_an_agreement_is_worth_at_given_costs() -> None:
    assert best_speedup(0.0, 0.2, [1.0, 1.0]) == (1.0, 0)
    assert best_speedup(1.0, 0.25, [1.0, 1.0, 1.0]) == (pytest.approx(2.0), 2)
    speedup, gamma = best_speedup(0.5, 0.1, [1.0, 1.2, 1.4, 1.6])
    assert (speedup, gamma) == (pytest.approx(1.5 / 1.3), 1)
