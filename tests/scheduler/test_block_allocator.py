"""Block ownership against a naive ledger of who holds what."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from scheduler.block_allocator import BlockAccountingError, BlockAllocator, BlockCounts, OutOfBlocks


class NaiveOwners:
    """Every share of every block as an entry of a list."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.requests: list[list[int]] = []  # blocks of each sequence
        self.transfers: list[list[int]] = []

    def owners(self, block_id: int) -> tuple[int, int]:
        in_requests = sum(blocks.count(block_id) for blocks in self.requests)
        return in_requests, sum(blocks.count(block_id) for blocks in self.transfers)

    def check(self) -> None:
        allocator = self.allocator
        allocator.check_integrity()
        by_block = [self.owners(block_id) for block_id in range(allocator.num_blocks)]
        free = sum(owners == (0, 0) for owners in by_block)
        assert allocator.num_free == free
        assert allocator.counts() == BlockCounts(
            total=allocator.num_blocks,
            free=free,
            request=sum(requests > 0 for requests, _ in by_block),
            transfer_only=sum(requests == 0 and transfers > 0 for requests, transfers in by_block),
        )
        for block_id, (requests, transfers) in enumerate(by_block):
            assert allocator.is_shared(block_id) == (requests > 1 or transfers > 0)


@pytest.mark.parametrize("seed", range(200))
def test_random_operations_match_a_naive_ledger(seed: int) -> None:
    rng = random.Random(seed)
    allocator = BlockAllocator(rng.choice([1, 3, 12, 25]))
    naive = NaiveOwners(allocator)
    for _ in range(250):
        rng.choice([allocate, allocate, grow, fork, release, release, hold, unhold])(naive, rng)
        naive.check()
    while naive.requests:
        release(naive, rng)
        naive.check()
    while naive.transfers:
        unhold(naive, rng)
        naive.check()
    assert allocator.num_free == allocator.num_blocks


def allocate(naive: NaiveOwners, rng: random.Random) -> None:
    count = rng.randint(0, 6)
    if count > naive.allocator.num_free:
        with pytest.raises(OutOfBlocks) as caught:
            naive.allocator.allocate(count)
        assert (caught.value.wanted, caught.value.free) == (count, naive.allocator.num_free)
        return
    free = {block_id for block_id in range(naive.allocator.num_blocks) if naive.owners(block_id) == (0, 0)}
    block_ids = naive.allocator.allocate(count)
    assert set(block_ids) <= free
    naive.requests.append(list(block_ids))


def grow(naive: NaiveOwners, rng: random.Random) -> None:
    grown = [blocks for blocks in naive.requests if blocks]
    if not grown or not naive.allocator.num_free:
        return
    blocks = rng.choice(grown)
    right = blocks[-1] + 1
    right_is_free = right < naive.allocator.num_blocks and naive.owners(right) == (0, 0)
    (block_id,) = naive.allocator.allocate(1, after=blocks[-1])
    assert not right_is_free or block_id == right
    blocks.append(block_id)


def fork(naive: NaiveOwners, rng: random.Random) -> None:
    if naive.requests:
        blocks = rng.choice(naive.requests)
        naive.allocator.share(blocks)
        naive.requests.append(list(blocks))


def release(naive: NaiveOwners, rng: random.Random) -> None:
    if naive.requests:
        blocks = naive.requests.pop(rng.randrange(len(naive.requests)))
        naive.allocator.release(iter(blocks))


def hold(naive: NaiveOwners, rng: random.Random) -> None:
    if naive.requests:
        blocks = rng.choice(naive.requests)
        naive.allocator.hold(blocks)
        naive.transfers.append(list(blocks))


def unhold(naive: NaiveOwners, rng: random.Random) -> None:
    if naive.transfers:
        naive.allocator.unhold(naive.transfers.pop(rng.randrange(len(naive.transfers))))


def test_a_block_is_free_only_when_both_owners_have_let_go() -> None:
    for first, second in (("release", "unhold"), ("unhold", "release")):
        allocator = BlockAllocator(2)
        block_ids = allocator.allocate(2)
        allocator.hold(block_ids)
        getattr(allocator, first)(block_ids)
        assert allocator.num_free == 0
        with pytest.raises(OutOfBlocks):
            allocator.allocate(1)
        getattr(allocator, second)(block_ids)
        assert allocator.num_free == 2
        allocator.check_integrity()


def test_a_transfer_outlives_its_request() -> None:
    allocator = BlockAllocator(3)
    block_ids = allocator.allocate(2)
    allocator.hold(block_ids)
    allocator.release(block_ids)
    assert allocator.counts() == BlockCounts(total=3, free=1, request=0, transfer_only=2)


def test_a_prompt_that_fits_is_one_piece() -> None:
    allocator = BlockAllocator(10)
    first, second = allocator.allocate(3), allocator.allocate(3)
    assert (first, second) == ((0, 1, 2), (3, 4, 5))
    allocator.release(first)
    assert allocator.allocate(4) == (6, 7, 8, 9)
    assert allocator.allocate(2) == (0, 1)
    assert allocator.allocate(1, after=1) == (2,)


def refused(operation: Callable[[], None], allocator: BlockAllocator) -> None:
    """It raises, and has changed nothing."""
    before = (list(allocator._free), Counter(allocator._request_refs), Counter(allocator._transfer_refs))
    with pytest.raises(BlockAccountingError):
        operation()
    allocator.check_integrity()
    assert before == (list(allocator._free), allocator._request_refs, allocator._transfer_refs)


def test_who_does_not_own_may_not_let_go() -> None:
    allocator = BlockAllocator(6)
    mine = allocator.allocate(2)
    held = allocator.allocate(1)
    allocator.hold(held)
    allocator.release(held)
    refused(lambda: allocator.release((5,)), allocator)  # free
    refused(lambda: allocator.release((6,)), allocator)  # no such block
    refused(lambda: allocator.release((-1,)), allocator)
    refused(lambda: allocator.release(held), allocator)  # the transfer's
    refused(lambda: allocator.unhold(mine), allocator)  # the request's
    refused(lambda: allocator.share(held), allocator)
    refused(lambda: allocator.hold(held), allocator)
    refused(lambda: allocator.share((mine[0], 5)), allocator)
    refused(lambda: allocator.hold((mine[0], 5)), allocator)
    refused(lambda: allocator.release((mine[0], mine[1], 5)), allocator)  # half of it would have been right


def test_letting_go_twice() -> None:
    allocator = BlockAllocator(4)
    block_ids = allocator.allocate(2)
    refused(lambda: allocator.release((0, 1, 0)), allocator)
    allocator.hold(block_ids)
    allocator.release(block_ids)
    refused(lambda: allocator.release(block_ids), allocator)
    allocator.unhold(block_ids)
    refused(lambda: allocator.unhold(block_ids), allocator)
    refused(lambda: allocator.release(block_ids), allocator)


def test_out_of_blocks_takes_nothing() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    with pytest.raises(OutOfBlocks, match="4 KV blocks wanted, 3 free"):
        allocator.allocate(4, after=0)
    allocator.check_integrity()
    assert allocator.num_free == 3


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError):
        BlockAllocator(0)


def test_check_integrity_sees_lost_and_doubled_blocks() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    del allocator._request_refs[1]
    with pytest.raises(BlockAccountingError, match="of 4"):
        allocator.check_integrity()
    allocator._request_refs[1] = 0
    with pytest.raises(BlockAccountingError, match="below one"):
        allocator.check_integrity()
    allocator._request_refs[1] = 1
    allocator._request_refs[3] = 1
    with pytest.raises(BlockAccountingError, match="both free and owned"):
        allocator.check_integrity()
    del allocator._request_refs[3], allocator._request_refs[1]
    allocator._transfer_refs[7] = 1
    with pytest.raises(BlockAccountingError, match="outside"):
        allocator.check_integrity()
