"""What is found by content, what goes first, and what it counts for in promises."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler.block_allocator import BlockAccountingError, BlockAllocator
from scheduler.block_chain import PromptChain, prompt_chain
from scheduler.capabilities import DECODE, PREFILL, Capabilities
from scheduler.generation_spec import GenerationSpec
from scheduler.plan import StepPlan
from scheduler.pool_limits import PoolLimits
from scheduler.prefix_book import PrefixBook, PrefixOptions
from scheduler.prefix_cache import PIECE_BLOCKS, BlockName, PrefixCache
from scheduler.prefix_hash import chain_start
from scheduler.request import Request, RequestState
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import STOP, first_tokens, sampled, step

OPTIONS = PrefixOptions("model")


def chain_of(ids: list[int], block_size: int = 1) -> PromptChain:
    return prompt_chain(chain_start("model"), ids, block_size)


def names_of(chain: PromptChain) -> list[BlockName]:
    block_bytes = chain.block_bytes
    return [
        BlockName(key, chain.parent(place), chain.ids[place * block_bytes : (place + 1) * block_bytes], place)
        for place, key in enumerate(chain.keys)
    ]


class Pool:
    """Blocks of one token, and prompts that are computed at once."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache()
        self.allocator = BlockAllocator(num_blocks, self.cache)

    def compute(self, ids: list[int]) -> tuple[int, ...]:
        """Whatever is there already."""
        blocks = self.allocator.allocate(len(ids))
        self.cache.enter_prompt(chain_of(ids), blocks, range(len(ids)))
        return blocks

    def find(self, ids: list[int]) -> list[int]:
        return self.cache.find(chain_of(ids), len(ids))


# -- what goes first ----------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_its_last_block_before_the_others() -> None:
    pool = Pool(6)
    first, second = pool.compute([1, 2, 3]), pool.compute([4, 5, 6])
    pool.allocator.release(first)
    pool.allocator.release(second)
    assert pool.allocator.counts().cached == pool.allocator.num_free == 6
    assert pool.allocator.allocate(1) == (first[2],)
    assert pool.find([1, 2, 3]) == list(first[:2])
    pool.allocator.use(first[:2], chain_of([1, 2]))
    pool.allocator.release(first[:2])
    assert set(pool.allocator.allocate(3)) == set(second)
    assert pool.find([1, 2, 3]) == list(first[:2])
    pool.allocator.check_integrity()


def test_what_a_block_builds_on_never_goes_before_it() -> None:
    """Both begin alike and are computed side by side: the second one's blocks build on the first one's."""
    pool = Pool(8)
    first, second = pool.compute([1, 2, 3]), pool.compute([1, 2, 9])
    assert pool.find([1, 2, 9]) == [first[0], first[1], second[2]]
    pool.allocator.release(first)
    pool.allocator.release(second)
    assert pool.cache.idle() == (first[2], second[2], first[1], first[0])
    assert pool.allocator.counts().free == 4  # the second one's own copies of the beginning
    pool.allocator.check_integrity()


def test_a_block_stays_out_of_reach_while_what_it_builds_on_is_gone() -> None:
    pool = Pool(4)
    first = pool.compute([1])
    second = pool.compute([1, 2])
    pool.allocator.release(first)
    taken = pool.allocator.allocate(2)
    assert pool.find([1, 2]) == []
    pool.allocator.release(taken)
    (again,) = pool.compute([1])
    assert pool.find([1, 2]) == [again, second[1]]


def test_prompts_stay_in_few_pieces_in_a_pool_that_is_full_of_cached_ones() -> None:
    rng, pool = random.Random(1), Pool(2048)
    held: list[tuple[int, ...]] = []
    pieces = []
    for number in range(400):
        blocks = pool.compute([number * 1000 + index for index in range(rng.randint(20, 120))])
        pieces.append(1 + sum(after != before + 1 for before, after in pairwise(blocks)))
        held.append(blocks)
        if len(held) > 8:
            pool.allocator.release(held.pop(rng.randrange(8)))
    assert sum(pieces[200:]) / 200 < 6, "70 blocks each, on average"


# -- what is found ------------------------------------------------------------------------------------


def test_a_key_alone_finds_nothing_its_ids_are_compared() -> None:
    pool = Pool(4)
    blocks = pool.compute([1, 2, 3])
    names = names_of(chain_of([1, 2, 3]))
    for wrong in (
        replace_name(names[1], ids=names[2].ids),
        replace_name(names[1], parent=names[1].key),
        replace_name(names[1], place=2),
    ):
        pool.cache._names[blocks[1]] = wrong
        assert pool.find([1, 2, 3]) == [blocks[0]]


def replace_name(name: BlockName, **changes: object) -> BlockName:
    return name._replace(**changes)


def test_only_blocks_with_names_are_used() -> None:
    pool = Pool(4)
    blocks = pool.allocator.allocate(2)
    with pytest.raises(BlockAccountingError):
        pool.allocator.use(blocks, chain_of([1, 2]))
    assert not pool.cache.enter(blocks[1], names_of(chain_of([1, 2]))[1]), "what it builds on is not here"


def test_what_builds_on_forgotten_blocks_is_forgotten_too() -> None:
    pool = Pool(8)
    first, other = pool.compute([1, 2, 3]), pool.compute([7, 8])
    pool.allocator.release(first)
    pool.allocator.forget_contents([first[1], other[1]])
    assert (pool.find([1, 2, 3]), pool.find([7, 8])) == ([first[0]], [other[0]])
    assert pool.allocator.counts().cached == 1
    pool.allocator.check_integrity()
    pool.allocator.forget_contents()
    assert pool.find([7, 8]) == []
    pool.allocator.release(other)
    assert pool.allocator.counts().free == 8


def test_pieces_are_told_of_when_they_are_entered_and_found() -> None:
    told: list[bytes] = []
    cache = PrefixCache(told.append)
    ids, keys = list(range(40)), chain_of(list(range(40))).keys
    cache.enter_prompt(chain_of(ids), range(40), range(10))
    assert told == []
    cache.enter_prompt(chain_of(ids), range(40), range(10, 33))
    assert told == [keys[PIECE_BLOCKS - 1], keys[2 * PIECE_BLOCKS - 1]]
    cache.use(cache.find(chain_of(ids), 20), chain_of(ids))
    assert told[2:] == [keys[PIECE_BLOCKS - 1]]
    cache.clear()
    for block_id, name in enumerate(names_of(chain_of(ids))[:16]):
        assert cache.enter(block_id, name)
    assert told[3:] == [keys[PIECE_BLOCKS - 1]]


# -- requests -----------------------------------------------------------------------------------------


def make(
    request_id: str, prompt_ids: list[int], max_tokens: int = 4, *, local_prefill: bool = True, hands_over: bool = False
) -> Request:
    spec = GenerationSpec(tuple(prompt_ids), (0,), max_tokens, frozenset({STOP}), SamplingParams(seed=1))
    return Request(request_id, spec, 100.0, local_prefill=local_prefill, hands_over=hands_over)


def scheduler_of(num_blocks: int, capabilities: Capabilities = DECODE, lag: int = 0) -> tuple[Scheduler, PrefixBook]:
    limits = PoolLimits(num_blocks, 4, 4, 64)
    scheduler = Scheduler(limits, capabilities, lag=lag, prefixes=OPTIONS)
    assert scheduler.prefixes is not None
    return scheduler, scheduler.prefixes


def run(scheduler: Scheduler, request: Request) -> list[StepPlan]:
    """Alone, to its end; its tokens are 7."""
    scheduler.submit(request, 0.0)
    assert scheduler.admit(0.0) == (request,)
    plans = []
    while not request.is_over:
        plans.append(step(scheduler)[0])
    return plans


def test_a_request_begins_behind_what_is_found() -> None:
    scheduler, book = scheduler_of(20)
    run(scheduler, make("first", list(range(10))))
    (plan, *_) = run(scheduler, second := make("second", [*range(9), 77, 78]))
    assert second.num_cached == 8
    assert [(chunk.start, chunk.token_ids) for chunk in plan.chunks] == [(8, (8, 77, 78))]
    assert plan.table_writes[0].start == 0
    assert (book.num_looked_up_tokens, book.num_found_tokens) == (21, 8)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler, _ = scheduler_of(20)
    for name, num_cached in (("first", 0), ("second", 4)):
        run(scheduler, request := make(name, list(range(8))))
        assert request.num_cached == num_cached


def test_an_answer_is_found_but_for_the_block_of_its_last_token() -> None:
    scheduler, _ = scheduler_of(20)
    run(scheduler, make("first", [1, 2, 3], max_tokens=6))  # eight positions are written
    run(scheduler, request := make("second", [1, 2, 3, 7, 7, 7, 7, 7, 7, 5, 6]))
    assert request.num_cached == 8
    run(scheduler, request := make("third", [1, 2, 3, 7, 7, 7, 7, 8, 9]))
    assert request.num_cached == 4


def test_nothing_is_found_before_the_step_that_wrote_it_is_committed() -> None:
    scheduler, _ = scheduler_of(20)
    first, second, third = (make(name, list(range(9))) for name in ("first", "second", "third"))
    scheduler.submit(first, 0.0)
    scheduler.admit(0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.submit(second, 0.0)
    scheduler.admit(0.0)
    assert second.num_cached == 0
    scheduler.commit(sampled(plan), 0.0)
    scheduler.submit(third, 0.0)
    scheduler.admit(0.0)
    assert third.num_cached == 8


def test_a_cancelled_prompt_is_not_entered() -> None:
    scheduler, book = scheduler_of(20, lag=1)
    scheduler.submit(request := make("first", list(range(9))), 0.0)
    scheduler.admit(0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.end("first", RequestState.CANCELLED, 0.0)
    scheduler.commit(sampled(plan), 0.0)
    assert request.is_over
    assert len(book.cache) == 0


def test_scored_prompts_are_computed_whole_and_can_be_found() -> None:
    scheduler, _ = scheduler_of(20)
    for name, scored, num_cached in (("first", 1, 0), ("second", 1, 0), ("third", None, 8)):
        request = make(name, list(range(9)))
        sampling = replace(request.spec.sampling, num_prompt_logprobs=scored)
        request = Request(name, replace(request.spec, sampling=sampling), 100.0)
        run(scheduler, request)
        assert request.num_cached == num_cached


@pytest.mark.parametrize("reads_rest", [True, False])
def test_a_read_leaves_out_what_is_here(reads_rest: bool) -> None:
    scheduler = Scheduler(PoolLimits(20, 4, 4, 64), DECODE, prefixes=PrefixOptions("model", reads_rest=reads_rest))
    for name, num_kept in (("first", 0), ("second", 2 if reads_rest else 0)):
        request = make(name, list(range(9)), local_prefill=False)
        scheduler.submit(request, 0.0)
        scheduler.admit(0.0)
        load = scheduler.begin_load(name, 0.0)
        assert (len(load.block_ids), load.num_kept, request.num_cached) == (3, num_kept, 4 * num_kept)
        assert scheduler._transfers[name] == load.block_ids[num_kept:]
        scheduler.kv_ready(name, first_tokens(request), 0.0)
        while not request.is_over:
            step(scheduler)


# -- promises -----------------------------------------------------------------------------------------


def test_what_all_have_in_common_is_counted_once() -> None:
    """Four of ten blocks each in a pool of twenty-one, as eight of these are the same."""
    scheduler, book = scheduler_of(21)
    requests = [make(f"r{number}", [*range(32), number], max_tokens=4) for number in range(4)]
    run(scheduler, make("before", [*range(32), 99]))
    for request in requests:
        scheduler.submit(request, 0.0)
    assert scheduler.admit(0.0) == tuple(requests)
    assert scheduler.ledger().promised_blocks == 12
    assert (len(book.shared), [request.num_shared for request in requests]) == (8, [8, 8, 8, 8])
    scheduler.end("r0", RequestState.CANCELLED, 0.0)
    assert scheduler.ledger().promised_blocks == 11
    for number in (1, 2, 3):
        scheduler.end(f"r{number}", RequestState.CANCELLED, 0.0)
    assert scheduler.ledger().promised_blocks == len(book.shared) == scheduler.budget.num_shared == 0
    assert scheduler.ledger().blocks.unowned == 21


def test_room_is_not_promised_twice_when_the_first_holder_ends_before_the_others() -> None:
    """The second one holds what they share when the first one's blocks are projected to be free: the third waits."""
    scheduler, _ = scheduler_of(12)
    run(scheduler, make("before", [*range(24), 99], max_tokens=1))
    short, long = make("short", [*range(24), 1], max_tokens=2), make("long", [*range(24), 2], max_tokens=12)
    for request in (short, long):
        scheduler.submit(request, 0.0)
    assert scheduler.admit(0.0) == (short, long)
    peak = scheduler.ledger().promised_blocks
    scheduler.submit(third := make("third", [*range(50, 58), 3], max_tokens=12), 0.0)
    assert (scheduler.admit(0.0) == (third,)) == (peak + 5 <= 12)
    while not all(request.is_over for request in (short, long)):
        step(scheduler)
        scheduler.admit(0.0)
        assert scheduler.ledger().promised_blocks <= 12


def test_blocks_under_a_lease_are_shared_until_the_last_lease_is_over() -> None:
    scheduler, book = scheduler_of(9, PREFILL)
    leased = []
    for number in range(3):  # 7 + 1 + 1
        request = make(f"r{number}", [*range(24), number], hands_over=True)
        scheduler.submit(request, 0.0)
        assert scheduler.admit(0.0) == (request,)
        plan = scheduler.plan(0.0)
        assert plan is not None
        (done,) = scheduler.commit(sampled(plan), 0.0).prompts
        leased.append(done.block_ids)
    assert leased[0][:6] == leased[1][:6] == leased[2][:6]
    assert scheduler.ledger().promised_blocks == 9
    for number, num_promised in enumerate((8, 7, 0)):
        scheduler.lease_ended(f"r{number}", 0.0)
        assert scheduler.ledger().promised_blocks == num_promised
    assert (len(book.shared), scheduler.ledger().blocks.cached) == (0, 6)


def test_after_a_failed_engine_nothing_is_found() -> None:
    scheduler, book = scheduler_of(20, lag=1)
    run(scheduler, make("first", list(range(9))))
    scheduler.submit(make("second", list(range(9))), 0.0)
    scheduler.admit(0.0)
    scheduler.plan(0.0)
    scheduler.steps_abandoned()
    scheduler.end("second", RequestState.FAILED, 0.0)
    assert len(book.cache) == 0
    assert scheduler.ledger().blocks.free == 20
    run(scheduler, third := make("third", list(range(9))))
    assert third.num_cached == 0
