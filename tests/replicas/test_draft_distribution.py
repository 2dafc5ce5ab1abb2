"""What comes through rows with drafts is distributed as the model says, whatever is drafted and however well.

(A verification that reuses the drafts' noise for what it puts in their place draws another distribution.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from replicas.sampling.sample_place import SamplePlace, counting
from replicas.sampling.sampled_tokens import sample_tokens
from replicas.sampling.slot_state import SlotState
from scheduler.plan import SlotInit, StepPlan
from scheduler.sampling_params import SamplingParams

PROBABILITIES = (0.6, 0.3, 0.1)
NUM_SEQUENCES = 400
NUM_TOKENS = 500  # of each, at most: 200,000 in all
MOST_DRAFTS = 4
# Of a chi-square with two degrees of freedom, and with eight: exceeded once in 10,000 times.
LIMIT_2, LIMIT_8 = 18.42, 31.83

Numbers = NDArray[np.int64]


def likeliest(own: Numbers, rng: np.random.Generator) -> Numbers:
    return np.zeros_like(own)


def drawn_elsewhere(own: Numbers, rng: np.random.Generator) -> Numbers:
    return rng.choice(3, size=own.shape, p=[0.4, 0.3, 0.3])


def drawn_with_the_same_noise(own: Numbers, rng: np.random.Generator) -> Numbers:
    """A draft model that is the model itself, four times out of five: the noise is by position."""
    return np.where(rng.random(own.shape) < 0.8, own, (own + 1) % 3)


def never_right(own: Numbers, rng: np.random.Generator) -> Numbers:
    return (own + 1) % 3


def own_draws() -> Numbers:
    """Without drafts, one by one: int64 [NUM_SEQUENCES, NUM_TOKENS + MOST_DRAFTS]."""
    slots = started()
    columns = []
    for position in range(1, 1 + NUM_TOKENS + MOST_DRAFTS):
        places = [SamplePlace(slot, slot % 3, position, slot) for slot in range(NUM_SEQUENCES)]
        columns.append(sample_tokens(logits(len(places)), places, slots).tokens.numpy())
    return np.stack(columns, axis=1)


def started() -> SlotState:
    slots = SlotState(NUM_SEQUENCES, 1, 1)
    inits = tuple(SlotInit(n, n % 3, SamplingParams(seed=1000 + n // 3), 0) for n in range(NUM_SEQUENCES))
    slots.apply(StepPlan(0, inits, (), (), ()))
    return slots


def logits(num_rows: int) -> torch.Tensor:
    return torch.tensor(PROBABILITIES).log().repeat(num_rows, 1)


def chi_square(counts: Numbers, probabilities: Numbers) -> float:
    wanted = probabilities * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.fixture(scope="module")
def own() -> Numbers:
    return own_draws()  # takes two seconds


@pytest.mark.parametrize(
    ("draft", "num_tokens"),
    [
        (drawn_with_the_same_noise, 60),
        *[
            pytest.param(draft, NUM_TOKENS, marks=pytest.mark.slow)
            for draft in (likeliest, drawn_elsewhere, drawn_with_the_same_noise, never_right)
        ],
    ],
)
def test_a_distribution_of_three_tokens(
    own: Numbers, draft: Callable[[Numbers, np.random.Generator], Numbers], num_tokens: int
) -> None:
    slots, drafts = started(), draft(own, np.random.default_rng(1))
    known = np.zeros(NUM_SEQUENCES, dtype=np.int64)
    drawn = np.full_like(own, -1)
    num_steps = num_held = 0
    while (known < num_tokens).any():
        places = []
        for slot in np.flatnonzero(known < num_tokens).tolist():
            first = int(known[slot])
            guesses = (*drafts[slot, first : first + (slot + num_steps) % (MOST_DRAFTS + 1)].tolist(), None)
            places += [SamplePlace(slot, slot % 3, 1 + first + i, slot, guess) for i, guess in enumerate(guesses)]
        token_ids = sample_tokens(logits(len(places)), places, slots).tokens.tolist()
        for place, token_id, counts in zip(places, token_ids, counting(places, token_ids), strict=True):
            if counts:
                drawn[place.slot, place.position - 1] = token_id
                known[place.slot] = place.position
                num_held += place.guess == token_id
        assert (slots.length.numpy() == known).all(), "a slot is where its last token is that counts"
        assert (slots.last_token.numpy() == drawn[np.arange(NUM_SEQUENCES), known - 1]).all()
        num_steps += 1
    tokens = drawn[:, :num_tokens]
    assert (tokens == own[:, :num_tokens]).all(), "another text than without drafts"
    probabilities = np.array(PROBABILITIES)
    assert chi_square(np.bincount(tokens.ravel(), minlength=3), probabilities) < LIMIT_2
    pairs = np.bincount((3 * tokens[:, :-1] + tokens[:, 1:]).ravel(), minlength=9)
    assert chi_square(pairs, np.outer(probabilities, probabilities).ravel()) < LIMIT_8
    share = num_held / tokens.size
    assert share == 0 if draft is never_right else share > 0.2, "many tokens were drafts"
