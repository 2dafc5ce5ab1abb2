"""Who has begun: told to the replicas, not turned away by the queue's time, not kept by a queue that it goes before."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.api_error import ApiError
from cluster.policies.routing_policy import DecodeCandidate, Need
from replicas.messages import CallStatus, PrefillCall
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import running_router
from tests.cluster.skipped_waits import ROUNDING_S

pytestmark = pytest.mark.usefixtures("skipped_waits")

QUEUE_S = 0.1
SLOW = Script(admit_s=4 * QUEUE_S)


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
async def test_replicas_are_told(num_prefill: int, n: int) -> None:
    async with running_router(FakeCluster(num_decode=2, num_prefill=num_prefill)) as rig:
        rig.cluster.fail(Fault(Phase.QUEUE, CallStatus.ERROR), Fault(Phase.DECODE, "dead"))
        assert await rig.tokens(generation_of(n=n)) == undisturbed(generation_of(n=n))
        told = [call.has_begun for call in rig.cluster.requests]
        assert told == [False, False, *[True] * (len(told) - 2)]
        assert len(told) > 2
        begun_of = {call.request_id: call.has_begun for call in rig.cluster.requests}
        for call in rig.cluster.of("prefill"):
            (prompt,) = call.arguments
            assert isinstance(prompt, PrefillCall)
            assert prompt.has_begun == begun_of[prompt.request_id]


@pytest.mark.parametrize("what", ["dead", "gone", CallStatus.EVICTED, CallStatus.ENGINE_FAILED])
async def test_it_waits_for_longer_than_the_queue_s_time(what: str) -> None:
    async with running_router(FakeCluster(num_decode=2), queue_s=QUEUE_S, max_retries=1) as rig:
        rig.cluster.play(Script(Fault(Phase.DECODE, what)), SLOW)
        assert await rig.tokens(generation_of()) == undisturbed(generation_of())
        assert rig.count("splitserve_request_rejections") == 0


async def test_newcomers_are_told_to_come_again_as_ever() -> None:
    async with running_router(FakeCluster(), queue_s=QUEUE_S) as rig:
        rig.cluster.play(SLOW)
        with pytest.raises(ApiError) as caught:
            await rig.tokens(generation_of())
        assert (caught.value.status, caught.value.code) == (429, "queue_timeout")


async def test_another_prompt_of_a_request_whose_answer_has_begun_waits_too() -> None:
    """Its client has got text: it can't be told any more to come again, and must not be cut."""
    async with running_router(FakeCluster(), queue_s=QUEUE_S) as rig:
        first, second = generation_of(1, seed=1), generation_of(2, seed=2)
        second = replace(second, binding=first.binding)
        rig.cluster.script = lambda call: SLOW if call.spec.prompt_ids == (2,) else Script()
        got = await asyncio.gather(rig.tokens(second), rig.tokens(first))
        assert got == [undisturbed(second), undisturbed(first)]


async def test_its_own_deadline_holds() -> None:
    async with running_router(FakeCluster(num_decode=2), queue_s=QUEUE_S) as rig:
        rig.cluster.fail(Fault(Phase.DECODE, "dead"), Fault(Phase.QUEUE, "hang"))
        with pytest.raises(ApiError) as caught:
            await rig.tokens(generation_of(timeout_s=0.8))
        assert (caught.value.status, caught.value.code) == (504, "timeout")


@pytest.mark.parametrize(
    ("num_queued", "free_blocks", "has_begun", "must_wait"),
    [(0, 9, False, False), (3, 9, False, True), (3, 9, True, False), (3, 0, True, True), (0, 0, True, True)],
)
def test_a_queue_is_nothing_to_who_goes_before_it(
    num_queued: int, free_blocks: int, has_begun: bool, must_wait: bool
) -> None:
    decode = DecodeCandidate("d", 10, free_blocks, 0, num_queued=num_queued)
    assert decode.must_wait(Need(8, 8, 1, 4, has_begun=has_begun)) == must_wait


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_no_replica_is_given_more_time_than_is_left(num_prefill: int) -> None:
    """What waited at decode is not computed at prefill for as long again."""
    async with running_router(FakeCluster(num_decode=2, num_prefill=num_prefill)) as rig:
        rig.cluster.play(Script(Fault(Phase.DECODE, "dead"), admit_s=0.2, token_s=0.05), Script(admit_s=0.2))
        assert await rig.tokens(generation_of(timeout_s=20.0)) == undisturbed(generation_of())
        first, second = rig.cluster.requests
        assert first.timeout_s <= 20.0 + ROUNDING_S
        assert second.timeout_s <= 19.7
        prompts = [call.arguments[0].timeout_s for call in rig.cluster.of("prefill")]
        assert len(prompts) == 2 * num_prefill
        for left_s, call in zip(prompts, rig.cluster.requests, strict=False):
            assert left_s <= call.timeout_s - 0.19
