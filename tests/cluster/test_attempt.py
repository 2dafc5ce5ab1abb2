"""One attempt against scripted replicas: order of what arrives, every fault at every phase, cancelling at any moment.

Each test ends in `running_router`'s check that nothing is left: tasks, calls, mailboxes, counts, memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

import pytest

from cluster.api_error import ApiError
from cluster.attempt import Stage
from cluster.generation import GeneratedToken
from replicas.messages import CallStatus, Frame
from tests.cluster.fake_model import Fault, Phase, Script, model_tokens, spec_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import running_router, until

LAYOUTS = pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
CHOICES = pytest.mark.parametrize("n", [1, 3])
NEVER_S = 30.0


# -- nothing fails ---------------------------------------------------------------------------------


@LAYOUTS
@CHOICES
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "parted"])
async def test_every_token_once_in_order(num_prefill: int, n: int, temperature: float) -> None:
    spec = spec_of(n=n, temperature=temperature)
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(spec) == undisturbed(spec)
        await rig.settle()
        assert [call.end for call in rig.cluster.calls] == ["ok"] * (1 + num_prefill)


async def test_over_a_real_socket() -> None:
    spec = spec_of(n=3)
    async with running_router(FakeCluster(real_channel=True)) as rig:
        assert await rig.tokens(spec) == undisturbed(spec)
        assert len(rig.cluster.requests) == 1


async def test_the_first_token_waits_for_nothing_that_decode_does() -> None:
    spec = spec_of(n=2)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(Fault(Phase.TRANSFER, "hang")))
        tokens = rig.router.generate(spec)
        firsts = [await anext(tokens), await anext(tokens)]
        assert [(t.choice, t.token_id) for t in firsts] == [(c, undisturbed(spec)[c][0][0]) for c in (0, 1)]
        await tokens.aclose()


@LAYOUTS
@CHOICES
async def test_max_tokens_1(num_prefill: int, n: int) -> None:
    spec = spec_of(n=n, max_tokens=1)
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(spec) == undisturbed(spec)
        await rig.settle()
        (generate,) = rig.cluster.of("generate")
        assert generate.end == ("cancelled" if num_prefill else "ok"), "nothing is handed over: decode waits in vain"


@LAYOUTS
@CHOICES
async def test_the_first_token_ends_a_choice(num_prefill: int, n: int) -> None:
    """Of three choices only that one: the others go on, and nothing waits for it."""
    plain = spec_of(n=n)
    first = undisturbed(plain)[n - 1][0][0]
    spec = spec_of(n=n, stop=[first])
    assert len(undisturbed(spec)[n - 1]) == 1
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(spec) == undisturbed(spec)
        assert len(rig.cluster.requests) == 1


@LAYOUTS
async def test_choices_end_at_different_tokens(num_prefill: int) -> None:
    plain = undisturbed(spec_of(n=3))
    spec = spec_of(n=3, stop=[plain[0][1][0], plain[1][4][0]])
    assert len({len(tokens) for tokens in undisturbed(spec).values()}) == 3
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(spec) == undisturbed(spec)


# -- order of arrival ------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [Script(answer_s=0.03), Script(answer_s=0.02, token_s=0.005)], ids=["all", "some"])
@CHOICES
async def test_frames_overtake_the_answer_of_prefill(script: Script, n: int) -> None:
    """Even all of them, and decode's reply too: the handoff does not pass through the router."""
    spec = spec_of(n=n)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(script)
        assert await rig.tokens(spec) == undisturbed(spec)
        assert len(rig.cluster.requests) == 1


async def test_the_answer_of_prefill_never_comes_though_decode_is_done() -> None:
    spec = spec_of()
    async with running_router(FakeCluster(), tail_s=0.02) as rig:
        rig.cluster.play(Script(answer_s=NEVER_S))
        assert await rig.tokens(spec) == undisturbed(spec)
        assert rig.count("splitserve_retries") == rig.count("splitserve_retries", stage="prefill") == 1


@LAYOUTS
async def test_the_reply_overtakes_the_frames(num_prefill: int) -> None:
    spec = spec_of(n=3)
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        rig.cluster.on_wire = late(rig.cluster)
        assert await rig.tokens(spec) == undisturbed(spec)
        assert len(rig.cluster.requests) == 1


def late(cluster: FakeCluster) -> Callable[[Frame], Iterable[Frame]]:
    def on_wire(frame: Frame) -> Iterable[Frame]:
        replica = cluster.decode.members[frame.replica_id]
        asyncio.get_running_loop().call_later(0.02, cluster.deliver, replica, frame)
        return ()

    return on_wire


async def test_frames_that_the_reply_counts_never_come() -> None:
    """The last ones: no later frame shows the gap. The tokens are generated again, and passed on once."""
    spec = spec_of()
    async with running_router(FakeCluster(), tail_s=0.02) as rig:
        rig.cluster.on_wire = lambda frame: (frame,) if frame.seq < 4 or len(rig.cluster.requests) > 1 else ()
        assert await rig.tokens(spec) == undisturbed(spec)
        assert len(rig.cluster.requests) == 2


@pytest.mark.parametrize("lost", [{0}, {1}, {3, 4}, {2, 5, 6}, set(range(6))], ids=str)
async def test_lost_frames_are_replayed(lost: set[int]) -> None:
    spec = spec_of(n=3)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(token_s=0.002))
        rig.cluster.on_wire = lambda frame: () if frame.seq in lost else (frame,)
        alive = asyncio.create_task(rig.signs_of_life())
        assert await rig.tokens(spec) == undisturbed(spec)
        alive.cancel()
        assert len(rig.cluster.requests) == 1
        assert len(rig.cluster.of("replay")) == rig.count("splitserve_retries", stage="frames") >= 1


@pytest.mark.parametrize("block", [2, 3, 5])
async def test_frames_arrive_backwards_and_twice(block: int) -> None:
    held: list[Frame] = []

    def on_wire(frame: Frame) -> Iterable[Frame]:
        held.append(frame)
        if frame.seq % block and frame.seq < 8:
            return ()
        arrived = [*reversed(held), *held]
        held.clear()
        return arrived

    spec = spec_of(n=3)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.on_wire = on_wire
        assert await rig.tokens(spec) == undisturbed(spec)
        assert len(rig.cluster.requests) == 1


@pytest.mark.parametrize("replay", ["gone", "hang", "wrong"])
@CHOICES
async def test_lost_frames_that_cannot_be_had(replay: str, n: int) -> None:
    """Everything at that replica is generated again from what had come; nobody hangs behind the gap."""
    specs = [spec_of(seed, n=n, seed=seed) for seed in range(3)]
    async with running_router(FakeCluster(num_decode=2), tail_s=0.05) as rig:
        rig.cluster.replay = replay
        rig.cluster.script = lambda _: Script(token_s=0.002)
        rig.cluster.on_wire = lambda frame: () if (frame.replica_id, frame.seq) == ("decode-1", 4) else (frame,)
        got = await asyncio.gather(*(rig.tokens(spec) for spec in specs))
        assert got == [undisturbed(spec) for spec in specs]
        assert len(rig.cluster.requests) > 3
        assert len(rig.cluster.of("replay")) == 1


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
    spec = spec_of(n=n)
    async with running_router(FakeCluster(num_decode=2, num_prefill=num_prefill)) as rig:
        rig.cluster.fail(Fault(phase, what))
        assert await rig.tokens(spec) == undisturbed(spec)
        assert len(rig.cluster.struck) == 1
        assert rig.count("splitserve_retries") == 1
        if num_prefill and what != CallStatus.KV_LOST:
            assert rig.count("splitserve_retries", stage=STAGE[phase]) == 1
        retried = rig.cluster.requests[1:]
        parted = n if phase is Phase.DECODE or (phase is Phase.TRANSFER and num_prefill) else 1
        assert len(retried) == parted, "choices that have parted go on each by itself"


@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER])
@CHOICES
async def test_who_hangs_is_given_up(phase: Phase, n: int) -> None:
    spec = spec_of(n=n)
    async with running_router(FakeCluster(num_decode=2, num_prefill=2), queue_s=0.05, handoff_s=0.05) as rig:
        rig.cluster.fail(Fault(phase, "hang"))
        assert await rig.tokens(spec) == undisturbed(spec)
        assert rig.count("splitserve_retries", stage=STAGE[phase]) == 1


@LAYOUTS
@CHOICES
@pytest.mark.parametrize("what", [*LOST, *REPLIES, "hang"])
async def test_what_happens_after_the_last_token_changes_nothing(num_prefill: int, n: int, what: str) -> None:
    spec = spec_of(n=n)
    async with running_router(FakeCluster(num_prefill=num_prefill), tail_s=0.03) as rig:
        rig.cluster.fail(Fault(Phase.REPLY, what))
        assert await rig.tokens(spec) == undisturbed(spec)
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
            await rig.tokens(spec_of(timeout_s=NEVER_S if what == CallStatus.TIMEOUT else 0.05))
        assert caught.value.status == (429 if phase is Phase.QUEUE else 504)
        assert len(rig.cluster.requests) == 1


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
        consumer = rig.start(spec_of(n=n))
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
    """After every number of turns of the event loop, from none to all that it takes."""
    async with running_router(FakeCluster(num_decode=2, num_prefill=2)) as rig:
        for turns in range(400):
            rig.cluster.fail(*SWEEPS[faults])
            spec = spec_of(turns, n=2, max_tokens=4, seed=turns)
            if ending == "cancel":
                is_done = await cancel_after(turns, rig.start(spec))
            else:
                is_done = await close_after(turns, rig.router.generate(spec))
            await rig.settle()
            for pool in rig.cluster.pools:
                pool.revive()
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


async def close_after(turns: int, tokens: AsyncGenerator[GeneratedToken, None]) -> bool:
    """The consumer takes so many tokens and closes."""
    for _ in range(turns):
        if await anext(tokens, None) is None:
            return True
    await tokens.aclose()
    return False


async def test_two_cancellations_in_a_row() -> None:
    """The second one hits while the first is being carried out."""
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(Fault(Phase.DECODE, "hang")))
        consumer = rig.start(spec_of())
        await until(lambda: bool(rig.cluster.struck))
        consumer.cancel()
        await asyncio.sleep(0)
        consumer.cancel()
        await asyncio.wait({consumer})


def test_the_fake_model_depends_on_all_it_may() -> None:
    """Or the tests here would prove nothing."""
    spec = spec_of()
    tokens = {
        tuple(model_tokens(prompt, spec_of(seed=seed).sampling, choice, 8, frozenset()))
        for prompt in ((1, 2, 3), (1, 2, 3, 3), (1, 2, 4))
        for seed in (1, 2)
        for choice in (0, 1)
    }
    assert len(tokens) == 12
    whole = undisturbed(spec)[0]
    replayed = (*spec.prompt_ids, *(token_id for token_id, _ in whole[:3]))
    assert model_tokens(replayed, spec.sampling, 0, 5, frozenset()) == whole[3:]
