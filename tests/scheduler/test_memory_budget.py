"""What is promised against what a generation really takes, simulated block by block."""

from __future__ import annotations

import random

import pytest

from scheduler.memory_budget import MemoryBudget, blocks_for_generation, num_blocks_for


def peak_blocks(prompt_len: int, lengths: list[int], block_size: int, rng: random.Random) -> int:
    """Most distinct blocks while choices generate `lengths` tokens each, in random order, until all have ended.

    Blocks are numbered as they come; a table per choice; a written block is copied while anyone else has it.
    """
    next_id = num_blocks_for(prompt_len, block_size)
    tables = [list(range(next_id)) for _ in lengths]
    fed = [0] * len(lengths)
    peak = next_id
    while True:
        # The last token of a choice is never fed.
        running = [choice for choice, length in enumerate(lengths) if fed[choice] < length - 1]
        if not running:
            return peak
        choice = rng.choice(running)
        table, index = tables[choice], (prompt_len + fed[choice]) // block_size
        fed[choice] += 1
        if index == len(table):
            table.append(next_id)
            next_id += 1
        elif sum(table[index] in other for other in tables) > 1:
            table[index] = next_id
            next_id += 1
        peak = max(peak, len({block_id for table in tables for block_id in table}))


@pytest.mark.parametrize("seed", range(300))
def test_promise_against_simulation(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 16])
    prompt_len, max_tokens, num_choices = rng.randint(1, 40), rng.randint(1, 25), rng.randint(1, 5)
    promised = blocks_for_generation(prompt_len, max_tokens, num_choices, block_size)
    longest = [max_tokens] * num_choices
    assert peak_blocks(prompt_len, longest, block_size, rng) == promised, "not tight for choices that use all"
    some = [rng.randint(1, max_tokens) for _ in range(num_choices)]  # some stop early
    assert peak_blocks(prompt_len, some, block_size, rng) <= promised


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_choices", "blocks"),
    [
        (4, 1, 1, 1),  # the only token is never fed
        (4, 2, 1, 2),
        (3, 2, 1, 1),
        (3, 3, 1, 2),
        (8, 1, 9, 2),  # nothing is written, so nothing is copied
        (5, 1, 3, 2),
        (5, 2, 3, 4),  # one full block, then one of three partly filled ones each
        (8, 2, 3, 5),
        (8, 5, 3, 5),
        (8, 6, 3, 8),
    ],
)
def test_blocks_of_four(prompt_len: int, max_tokens: int, num_choices: int, blocks: int) -> None:
    assert blocks_for_generation(prompt_len, max_tokens, num_choices, 4) == blocks


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_num_blocks_for(num_tokens: int, blocks: int) -> None:
    assert num_blocks_for(num_tokens, 4) == blocks


@pytest.mark.parametrize("seed", range(10))
def test_promises_against_a_plain_dict(seed: int) -> None:
    rng = random.Random(seed)
    budget, expected = MemoryBudget(20, 4), dict[str, int]()
    for number in range(200):
        if expected and rng.random() < 0.5:
            request_id = rng.choice(list(expected))
            if rng.random() < 0.3:
                expected[request_id] = rng.randint(0, expected[request_id])
                budget.shrink(request_id, expected[request_id])
            else:
                del expected[request_id]
                budget.end(request_id)
        else:
            blocks = rng.randint(0, 12)
            fits = sum(expected.values()) + blocks <= 20
            assert budget.promise_blocks(f"r{number}", blocks) == fits
            if fits:
                expected[f"r{number}"] = blocks
        assert budget.promised == sum(expected.values())
        assert budget.available == 20 - budget.promised >= 0


def test_a_promise_is_made_once_and_never_grows() -> None:
    budget = MemoryBudget(10, 4)
    assert budget.promise_blocks("a", 4)
    with pytest.raises(AssertionError):
        budget.promise_blocks("a", 1)
    with pytest.raises(AssertionError):
        budget.shrink("a", 5)
    with pytest.raises(KeyError):
        budget.end("b")
    assert budget.promised == 4
    assert budget.fits_ever(10)
    assert not budget.fits_ever(11)
