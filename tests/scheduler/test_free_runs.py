"""Free runs against a plain set, and the promises about adjacency."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from scheduler.free_runs import FreeRuns


def runs_of(block_ids: set[int]) -> list[tuple[int, int]]:
    """Maximal runs (start, length) of a set, by brute force."""
    starts = sorted(block_id for block_id in block_ids if block_id - 1 not in block_ids)
    ends = sorted(block_id for block_id in block_ids if block_id + 1 not in block_ids)
    return [(start, end - start + 1) for start, end in zip(starts, ends, strict=True)]


def num_pieces(block_ids: list[int]) -> int:
    return 1 + sum(left + 1 != right for left, right in pairwise(block_ids))


@pytest.mark.parametrize("seed", range(200))
def test_random_operations_match_a_plain_set(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 7, 40])
    runs, free = FreeRuns(size), set(range(size))
    for _ in range(300):
        before = runs_of(free)
        if rng.random() < 0.5:
            count = rng.randint(0, len(free))
            after = rng.choice([None, rng.randrange(size)])
            taken = runs.take(count, after)
            assert len(taken) == len(set(taken)) == count
            assert set(taken) <= free
            free -= set(taken)
            check_adjacency(before, taken, after)
        else:
            used = [block_id for block_id in range(size) if block_id not in free]
            back = rng.sample(used, rng.randint(0, len(used)))
            runs.give(back)
            free |= set(back)
        runs.check_integrity()
        assert set(runs) == free
        assert list(runs) == sorted(free)
        assert len(runs) == len(free)
        assert runs.num_runs == len(runs_of(free))


def check_adjacency(before: list[tuple[int, int]], taken: list[int], after: int | None) -> None:
    """before: the runs that were free when `taken` was taken."""
    if not taken:
        return
    length_at = dict(before)
    if after is not None and after + 1 in length_at:
        in_place = min(len(taken), length_at[after + 1])
        assert taken[:in_place] == list(range(after + 1, after + 1 + in_place)), "did not grow in place"
        return
    whole = [length for _, length in before if length >= len(taken)]
    if whole:
        assert num_pieces(taken) == 1, "fits in one run, was split"
        assert length_at[taken[0]] == min(whole), "not the shortest run that holds it"
    else:
        longest_first = sorted((length for _, length in before), reverse=True)
        fewest = next(n for n in range(1, len(before) + 1) if sum(longest_first[:n]) >= len(taken))
        assert num_pieces(taken) <= fewest, "more pieces than needed"


def test_the_shortest_run_that_holds_it_whole_is_taken() -> None:
    runs = FreeRuns(20)
    runs.take(20)
    runs.give([0, 1, 2, 3, 4, 10, 11, 12, 15])  # runs of 5, 3 and 1
    assert runs.take(3) == [10, 11, 12]
    assert runs.take(1) == [15]
    assert runs.take(2) == [0, 1]


def test_growth_in_place_when_the_neighbour_is_free() -> None:
    runs = FreeRuns(10)
    assert runs.take(3) == [0, 1, 2]
    assert runs.take(1, after=2) == [3]
    assert runs.take(2, after=2) == [4, 5], "the neighbour is taken, so anywhere"
    assert runs.take(3, after=9) == [6, 7, 8], "nothing lies behind the last block"


def test_neighbours_merge() -> None:
    runs = FreeRuns(5)
    runs.take(5)
    for block_id in (0, 4, 2):
        runs.give([block_id])
    assert runs.num_runs == 3
    runs.give([1])
    assert runs.num_runs == 2
    runs.give([3])
    assert runs.num_runs == 1
    assert runs.take(5) == [0, 1, 2, 3, 4]


def test_asking_for_too_many_takes_nothing() -> None:
    runs = FreeRuns(4)
    runs.take(1)
    with pytest.raises(ValueError):
        runs.take(4)
    runs.check_integrity()
    assert list(runs) == [1, 2, 3]


def test_none_at_all() -> None:
    runs = FreeRuns(0)
    assert runs.take(0) == []
    assert len(runs) == runs.num_runs == 0
    with pytest.raises(ValueError):
        runs.take(1)


@pytest.mark.parametrize("view", ["_length_at", "_start_before", "_by_length"])
def test_check_integrity_sees_a_damaged_view(view: str) -> None:
    runs = FreeRuns(4)
    getattr(runs, view).clear()
    with pytest.raises(AssertionError):
        runs.check_integrity()
