"""Every fault at every phase of an attempt, and a client that goes at any moment.

Each test ends in `running_router`'s check that nothing is left: tasks, calls, mailboxes, counts, memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cluster.api_error import ApiError
from cluster.routing.attempt_failed import Stage
from cluster.routing.generation import GenerationItem
from replicas.messages import CallStatus
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

LAYOUTS = pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
CHOICES = pytest.mark.parametrize("n", [1, 3])
NEVER_S = 30.0


# -- faults ----------------------------------------------------------------------------------------

LOST = ["gone", "dead", "raise", "cancelled"]
REPLIES = [CallStatus.KV_LOST, CallStatus.REJECTED, CallStatus.ERROR, CallStatus.CANCELLED]
STAGE = {
    Phase.QUEUE: Stage.QUEUE,
    Phase.PREFILL: Stage.PREFILL,
    Phase.TRANSFER: Stage.TRANSFER,
    Phase.DECODE: Stage.DECODE,
}


@pytest.mark.parametrize("what", [*LOST, *REPLIES])
@pytest.mark.parametrize("phase", STAGE)
@pytest.mark.parametrize("num_prefill", [0, 2], ids=["colocated", "split"])
@CHOICES
async def test_a_fault_costs_one_retry_and_no_token(num_prefill: int, phase: Phase, what: str, n: int) -> None:
    if phase is Phase.PREFILL and not num_prefill:
        return
    generation = generation_of(n=n)
    async with running_router(FakeCluster(num_decode=2, num_prefill=num_prefill)) as rig:
        rig.cluster.fail(Fault(phase, what))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) == 1
        assert rig.count("splitserve_retries") == 1
        if num_prefill and what != CallStatus.KV_LOST:
            assert rig.count("splitserve_retries", stage=STAGE[phase]) == 1
        retried = rig.cluster.requests[1:]
        parted = n if phase is Phase.DECODE or (phase is Phase.TRANSFER and num_prefill) else 1
        assert len(retried) == parted, "choices that have parted go on each by itself"


@pytest.mark.parametrize("what", [*LOST, *REPLIES])
async def test_decode_fails_while_prefill_works(what: str) -> None:
    """Prefill's work is given up at once, not when it is done."""
    generation = generation_of()
    async with running_router(FakeCluster(num_decode=2, num_prefill=2)) as rig, asyncio.timeout(4.0):
        rig.cluster.play(Script(Fault(Phase.ADMITTED, what), prefill_s=NEVER_S))
        assert await rig.tokens(generation) == undisturbed(generation)
        # Whose handoff has failed needs none for its next try.
        ends = ["cancelled"] if what == CallStatus.KV_LOST else ["cancelled", "ok"]
        assert [call.end for call in rig.cluster.of("prefill")] == ends
        assert rig.count("splitserve_retries", stage="transfer" if what == CallStatus.KV_LOST else "decode") == 1


@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER])
@CHOICES
async def test_who_hangs_is_given_up(phase: Phase, n: int) -> None:
    generation = generation_of(n=n)
    limit = {"queue_s" if phase is Phase.QUEUE else "handoff_s": 0.2}
    async with running_router(FakeCluster(num_decode=2, num_prefill=2), **limit) as rig:
        rig.cluster.fail(Fault(phase, "hang"))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert rig.count("splitserve_retries", stage=STAGE[phase]) == 1


@LAYOUTS
@CHOICES
@pytest.mark.parametrize("what", [*LOST, *REPLIES, "hang"])
async def test_what_happens_after_the_last_token_changes_nothing(num_prefill: int, n: int, what: str) -> None:
    generation = generation_of(n=n)
    async with running_router(FakeCluster(num_prefill=num_prefill), tail_s=0.03) as rig:
        rig.cluster.fail(Fault(Phase.REPLY, what))
        assert await rig.tokens(generation) == undisturbed(generation)
        await rig.settle()
        assert len(rig.cluster.requests) == len(rig.cluster.struck) == 1


@LAYOUTS
@pytest.mark.parametrize("phase", STAGE)
@pytest.mark.parametrize("what", [CallStatus.TIMEOUT, "hang"])
async def test_out_of_time(num_prefill: int, phase: Phase, what: str) -> None:
    """By decode's clock or by ours: not tried again. While no replica has admitted it, that is a full house: 429."""
    if phase is Phase.PREFILL and not num_prefill:
        return
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        rig.cluster.fail(Fault(phase, what))
        with pytest.raises(ApiError) as caught:
            await rig.tokens(generation_of(timeout_s=NEVER_S if what == CallStatus.TIMEOUT else 0.2))
        assert caught.value.status == (429 if phase is Phase.QUEUE else 504)
        assert rig.count("splitserve_request_rejections", reason="queue_timeout") == (phase is Phase.QUEUE)
        assert len(rig.cluster.requests) == 1


@pytest.mark.parametrize("what", [CallStatus.ERROR, "raise"])
async def test_what_a_replica_says_of_its_fault_is_for_the_log(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """The client gets the stage, and the id to look it up by."""
    generation = generation_of()
    async with running_router(FakeCluster(), max_retries=0) as rig:
        rig.cluster.fail(Fault(Phase.DECODE, what))
        with pytest.raises(ApiError) as caught:
            await rig.tokens(generation)
    detail = "scripted" if what == CallStatus.ERROR else "RuntimeError"
    assert caught.value.status == 500
    assert detail not in caught.value.message
    assert f"failed at decode; the server's log has more under {generation.generation_id}" in caught.value.message
    (record,) = (record for record in caplog.records if record.message == "attempt failed")
    assert (vars(record)["detail"], vars(record)["generation"]) == (detail, generation.generation_id)


# -- the client goes -------------------------------------------------------------------------------

WAITS = {
    "queued": Script(Fault(Phase.QUEUE, "hang")),
    "prefilling": Script(Fault(Phase.PREFILL, "hang")),
    "transferring": Script(Fault(Phase.TRANSFER, "hang")),
    "decoding": Script(Fault(Phase.DECODE, "hang")),
    "frames late": Script(token_s=0.01),
}


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
@pytest.mark.parametrize("phase", WAITS)
@CHOICES
async def test_cancelled_while_it_waits(num_prefill: int, phase: str, n: int) -> None:
    if phase == "prefilling" and not num_prefill:
        return
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        rig.cluster.play(WAITS[phase])
        consumer = rig.start(generation_of(n=n))
        await until(lambda: bool(rig.cluster.struck) or phase == "frames late")
        await asyncio.sleep(0.005)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await rig.settle()
        assert "cancelled" in {call.end for call in rig.cluster.calls}


SWEEPS = {
    "plain": [],
    "prefill dies": [Fault(Phase.PREFILL, "dead")],
    "kv lost": [Fault(Phase.TRANSFER, CallStatus.KV_LOST)],
    "decode leaves": [Fault(Phase.DECODE, "gone")],
    "three times": [Fault(Phase.DECODE, "gone"), Fault(Phase.QUEUE, "raise"), Fault(Phase.PREFILL, "gone")],
}


@pytest.mark.parametrize("faults", SWEEPS)
@pytest.mark.parametrize("ending", ["cancel", "close"])
async def test_the_client_goes_at_any_moment(faults: str, ending: str) -> None:
    """After every number of turns of the event loop, from none to all that it takes. Nothing here waits for a clock."""
    async with running_router(FakeCluster(num_decode=2, num_prefill=2), retry_delay_s=0.0) as rig:
        for turns in range(200):
            rig.cluster.fail(*SWEEPS[faults])
            generation = generation_of(turns, n=2, max_tokens=4, seed=turns)
            if ending == "cancel":
                is_done = await cancel_after(turns, rig.start(generation))
            else:
                is_done = await close_after(turns, rig.router.generate(generation))
            await rig.settle()
            for pool in rig.cluster.pools:
                pool.replace_dead()
            if is_done:
                break
        assert is_done


async def cancel_after(turns: int, consumer: asyncio.Task[object]) -> bool:
    for _ in range(turns):
        await asyncio.sleep(0)
    is_done = consumer.done()
    consumer.cancel()
    await asyncio.wait({consumer})
    return is_done


async def close_after(turns: int, batches: AsyncGenerator[list[GenerationItem], None]) -> bool:
    """The consumer takes so many batches of tokens and closes."""
    for _ in range(turns):
        if await anext(batches, None) is None:
            return True
    await batches.aclose()
    return False


async def test_two_cancellations_in_a_row() -> None:
    """The second one hits while the first is being carried out."""
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(Fault(Phase.DECODE, "hang")))
        consumer = rig.start(generation_of())
        await until(lambda: bool(rig.cluster.struck))
        consumer.cancel()
        await asyncio.sleep(0)
        consumer.cancel()
        await asyncio.wait({consumer})
