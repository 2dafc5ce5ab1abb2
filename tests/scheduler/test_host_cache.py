"""Host blocks: who has them, what is found in them, what goes first; and when cached blocks go there and come back."""

from __future__ import annotations

import pytest

from scheduler.block_chain import PromptChain, prompt_chain
from scheduler.capabilities import PREFILL
from scheduler.generation_spec import GenerationSpec
from scheduler.host_cache import HostCache
from scheduler.plan import BlockSwap, SampledToken, StepOutput, StepPlan
from scheduler.pool_limits import PoolLimits
from scheduler.prefix_book import PrefixOptions
from scheduler.prefix_cache import BlockName
from scheduler.prefix_hash import chain_start
from scheduler.request import Request, RequestState
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.test_prefix_cache import names_of


def chain_of(ids: list[int]) -> PromptChain:
    return prompt_chain(chain_start("model"), ids, 1)


def always(block_id: int, name: BlockName) -> bool:
    return True


def filled(num_blocks: int, ids: list[int]) -> HostCache:
    """With blocks of this prompt, its last one first, as the device gives them."""
    host = HostCache(num_blocks)
    for step_id, name in enumerate(reversed(names_of(chain_of(ids)))):
        assert host.has_room(step_id)
        host.begin_save(step_id, 0, name)
    assert host.saved(len(ids), always) == len(ids)
    return host


def test_who_gives_way_takes_everything_that_others_do_not_need() -> None:
    host = filled(6, [1, 2, 3])
    names = names_of(chain_of([7, 8]))
    host.begin_save(9, 0, names[0])
    assert (host.num_free, host.num_cached, host.num_written, host.num_used) == (2, 3, 1, 0)
    assert host.take(7) is None
    first = host.take(3)
    assert first is not None
    assert (host.num_free, host.num_cached, host.num_written, host.num_used) == (0, 2, 1, 3)
    assert len(host.find(chain_of([1, 2, 3]), 0, 3, 9)) == 2, "what came first, a prompt's last block, has gone first"
    second = host.take(3)
    assert second is not None
    assert (host.num_free, host.num_cached, host.num_written, host.num_used) == (0, 0, 0, 6)
    assert host.saved(9, always) == 0, "its block was taken"
    assert host.take(1) is None
    assert not host.has_room(10)
    host.give(first + second)
    host.check_integrity(())
    assert host.num_free == 6


def test_what_was_written_over_before_it_was_copied_is_not_found() -> None:
    host = HostCache(3)
    for place, name in enumerate(names_of(chain_of([1, 2]))):
        host.begin_save(0, place, name)
    assert host.saved(0, lambda block_id, name: block_id == 0) == 1
    assert len(host.find(chain_of([1, 2]), 0, 2, 1)) == 1
    assert host.num_free == 2


def test_a_step_does_not_copy_over_what_it_copies_back() -> None:
    host = filled(2, [1, 2])
    assert len(host.find(chain_of([1, 2]), 0, 2, 5)) == 2
    assert not host.has_room(5)
    assert host.has_room(6)
    host.begin_save(6, 0, names_of(chain_of([9]))[0])
    assert len(host.find(chain_of([1, 2]), 0, 2, 6)) == 1


def test_ids_are_compared_and_forgotten_keys_are_not_found() -> None:
    host = filled(4, [1, 2, 3])
    chain = chain_of([1, 2, 3])
    assert len(host.find(PromptChain(chain.start, chain.keys, chain_of([1, 5, 3]).ids, 4), 0, 3, 1)) == 1
    host.forget({chain.keys[1]})
    assert len(host.find(chain, 0, 3, 1)) == 1
    assert not host.drop(chain.keys[1], 0)
    host_id = host.find(chain, 2, 1, 1)[0]
    assert host.drop(chain.keys[2], host_id)
    host.forget()
    assert host.num_free == 4


# -- the tier in a scheduler: a pool of 8 blocks of one token, prompts of up to 4 ------------------------


class Engine:
    """Computes prompts, whose readers take them at once."""

    def __init__(self, num_host_blocks: int) -> None:
        limits = PoolLimits(num_blocks=8, block_size=1, max_sequences=4, max_step_tokens=16)
        prefixes = PrefixOptions("model", uses_host=True)
        self.scheduler = Scheduler(limits, PREFILL, num_host_blocks=num_host_blocks, prefixes=prefixes)
        self.plans: list[StepPlan] = []
        self._num_asked = 0

    def submit(self, ids: list[int], *, use_cache: bool = True) -> Request:
        self._num_asked += 1
        spec = GenerationSpec(tuple(ids), (0,), 2, frozenset(), SamplingParams(), use_cache=use_cache)
        request = Request(f"r{self._num_asked}", spec, 1e9, hands_over=True)
        self.scheduler.submit(request, 0.0)
        self.scheduler.admit(0.0)
        return request

    def step(self, damaged: tuple[BlockSwap, ...] = ()) -> StepPlan | None:
        plan = self.scheduler.plan(0.0)
        if plan is not None:
            self.plans.append(plan)
            tokens = tuple([SampledToken(chunk.request_id, 0, 77) for chunk in plan.chunks if chunk.num_sampled])
            events = self.scheduler.commit(StepOutput(plan.step_id, tokens, damaged=damaged), 0.0)
            for done in events.prompts:
                self.scheduler.lease_ended(done.request_id, 0.0)
        return plan

    def ask(self, ids: list[int]) -> Request:
        request = self.submit(ids)
        while self.step() is not None:
            pass
        assert request.state is RequestState.FINISHED
        return request


def away() -> Engine:
    """Has computed a prompt whose blocks are on the host only."""
    engine = Engine(16)
    engine.ask([1, 2, 3, 4])
    for first in (10, 20, 30, 40, 50):
        engine.ask([first, first + 1])
    prefixes = engine.scheduler.prefixes
    assert prefixes is not None
    assert not prefixes.cache.find(chain_of([1, 2, 3, 4]), 1)
    return engine


def test_nothing_is_copied_before_memory_runs_short() -> None:
    engine = Engine(16)
    engine.ask([1, 2, 3, 4])
    assert not any(plan.saves for plan in engine.plans)
    engine.ask([5, 6, 7])
    saves = [swap for plan in engine.plans for swap in plan.saves]
    assert len(saves) == 1, "two blocks of eight are to be free or copied, and one is free"


def test_a_prompt_waits_for_what_comes_back_and_is_computed_from_there_on() -> None:
    engine = away()
    request = engine.submit([1, 2, 3, 4])
    assert engine.scheduler.queued_prompt_tokens == 4
    plan = engine.step()
    assert plan is not None
    assert len(plan.fetches) == 3
    assert not plan.chunks
    assert request.num_cached == 3
    plan = engine.step()
    assert plan is not None
    assert [(chunk.start, chunk.token_ids) for chunk in plan.chunks] == [(3, (4,))]
    tier = engine.scheduler.host_tier
    assert tier is not None
    assert (tier.num_found_tokens, tier.num_pending_tokens, tier.is_busy) == (3, 0, False)
    assert engine.ask([1, 2, 3, 4]).num_cached == 3, "on the device"
    assert tier.num_found_tokens == 3


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_lies_behind_a_damaged_block_is_computed(place: int) -> None:
    engine = away()
    request = engine.submit([1, 2, 3, 4])
    swap = BlockSwap(request.sequences[0].block_ids[place], -1)
    host_id = engine.scheduler.host._cached[chain_of([1, 2, 3, 4]).keys[place]].host_id
    engine.step(damaged=(BlockSwap(swap.device, host_id),))
    assert request.num_cached == place
    assert engine.scheduler.host_tier is not None
    assert engine.scheduler.host_tier.num_damaged_blocks == 1
    assert len(engine.scheduler.host.find(chain_of([1, 2, 3, 4]), 0, 3, 99)) == place
    plan = engine.step()
    assert plan is not None
    assert [chunk.start for chunk in plan.chunks] == [place]


def test_one_that_is_cancelled_while_its_blocks_come_keeps_them_until_they_are_there() -> None:
    engine = away()
    request = engine.submit([1, 2, 3, 4])
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    assert plan.fetches
    engine.scheduler.end(request.request_id, RequestState.CANCELLED, 0.0)
    assert engine.scheduler.allocator.counts().request == 4
    engine.scheduler.commit(StepOutput(plan.step_id, ()), 0.0)
    assert engine.scheduler.allocator.counts().request == 0
    assert engine.scheduler.queued_prompt_tokens == 0
    assert len(engine.scheduler.host.find(chain_of([1, 2, 3, 4]), 0, 3, 99)) == 3


def test_who_asks_for_no_cache_waits_for_nothing() -> None:
    engine = away()
    request = engine.submit([1, 2, 3, 4], use_cache=False)
    plan = engine.step()
    assert plan is not None
    assert [chunk.start for chunk in plan.chunks] == [0]
    assert request.num_cached == 0


def test_what_gave_way_meanwhile_is_computed() -> None:
    """All host memory is taken between its admission and the plan."""
    engine = away()
    request = engine.submit([1, 2, 3, 4])
    assert engine.scheduler.host.take(16) is not None
    plan = engine.step()
    assert plan is not None
    assert not plan.fetches
    assert [chunk.start for chunk in plan.chunks] == [0]
    assert request.num_cached == 0


def test_what_is_not_trusted_is_not_found_on_the_host_either() -> None:
    engine = away()
    request = engine.submit([1, 2, 3, 4])
    engine.step()
    engine.scheduler.distrust(request.sequences[0].block_ids[1:2])
    assert len(engine.scheduler.host.find(chain_of([1, 2, 3, 4]), 0, 3, 99)) == 1
    engine.scheduler.steps_abandoned()
    assert engine.scheduler.host.num_free == 16
