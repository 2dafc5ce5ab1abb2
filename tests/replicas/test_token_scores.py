"""The most likely tokens: the same whatever else is asked for in the same step."""

from __future__ import annotations

import math
import random

import pytest
import torch

from replicas.sampling.token_scores import TokenScores
from scheduler.token_logprobs import LOWEST_LOGPROB


def brute_force(row: torch.Tensor, k: int) -> list[int]:
    values = row.log_softmax(-1).tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


@pytest.mark.parametrize("seed", range(20))
def test_equal_ones_come_by_id_for_any_k(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice([1, 7, 300, 5000])
    few = [rng.gauss(0, 3) for _ in range(rng.choice([1, 3, 50]))] + [-math.inf]
    logits = torch.tensor([[rng.choice(few) for _ in range(vocab_size)] for _ in range(4)])
    logits[:, 0] = few[0]
    chosen = torch.zeros(4, dtype=torch.int64)
    for num_top in (0, 1, 2, 5, 20, vocab_size):
        scores = TokenScores.of(logits, chosen, num_top)
        assert scores.top_ids.tolist() == [brute_force(row, num_top) for row in logits]
        assert torch.equal(scores.top_logprobs, logits.log_softmax(-1).gather(1, scores.top_ids))


def test_the_order_is_that_of_the_numbers() -> None:
    """Over all magnitudes, beside zeros of both signs."""
    logits = torch.tensor([[-0.0, 0.0, 1e-30, -1e-30, 3e38, -3e38, -math.inf, 1.0, 88.0]])
    top = TokenScores.of(logits, torch.tensor([4]), 9)
    assert top.top_ids[0].tolist()[0] == 4
    assert top.top_ids[0].tolist() == brute_force(logits[0], 9)
    assert top.read([9])[0].top[-1][1] == LOWEST_LOGPROB


def test_not_a_number_is_seen() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 2.0, 1.0]])
    bad, good = TokenScores.of(logits, torch.tensor([0, 1]), 2).read([2, 2])
    assert math.isnan(bad.logprob)
    assert [token_id for token_id, _ in good.top] == [1, 2]
