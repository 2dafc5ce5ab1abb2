"""The router over the attempts of a request: retries, who is avoided, who is told, and who is turned away at once.

Each test ends in `running_router`'s check that nothing is left: tasks, calls, mailboxes, counts, memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import pytest
from msgspec import structs

from cluster.api_error import ApiError
from cluster.routing.generation import ProtocolError
from replicas.messages import CallStatus, Frame, GenerateCall
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

CHOICES = pytest.mark.parametrize("n", [1, 3])
BUSY = Script(Fault(Phase.DECODE, "hang"))


async def refusal(rig: Rig, **values: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await rig.tokens(generation_of(**values))
    return caught.value


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "status"),
    [("gone", 500), ("raise", 500), (CallStatus.KV_LOST, 500), (CallStatus.ERROR, 500), (CallStatus.REJECTED, 503)],
)
@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER])
@CHOICES
async def test_one_error_when_retries_are_used_up(phase: Phase, what: str, status: int, n: int) -> None:
    async with running_router(FakeCluster(), max_retries=2, local_by_cost=False) as rig:
        rig.cluster.script = lambda _: Script(Fault(phase, what))
        if (phase, what) == (Phase.PREFILL, "gone"):  # decode computes what may be why prefill replicas go
            assert await rig.tokens(generation_of(n=n)) == undisturbed(generation_of(n=n))
            assert [call.is_suspect for call in rig.cluster.requests] == [False, False, True]
            return
        error = await refusal(rig, n=n)
        assert (error.status, "secret" in error.message) == (status, False)
        failed_apart = n > 1 and phase is Phase.TRANSFER
        if (phase, what) == (Phase.QUEUE, "gone"):  # who loses a replica while it waits there has not failed
            assert rig.count("splitserve_retries") == 3
            return
        assert rig.count("splitserve_retries") == (2 if not failed_apart else pytest.approx(1 + n, abs=n - 1))
        assert len(rig.cluster.requests) <= (3 if not failed_apart else 1 + 2 * n)


@CHOICES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_who_is_evicted_is_replayed_and_the_client_sees_each_token_once(n: int, temperature: float) -> None:
    """It gave way to others for want of memory: nobody failed, so it costs no retry and no replica is avoided."""
    generation = generation_of(n=n, temperature=temperature, max_tokens=17)
    async with running_router(FakeCluster(), max_retries=0) as rig:
        rig.cluster.fail(*[Fault(Phase.DECODE, CallStatus.EVICTED, steps=3)] * 3)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) == 3
        first, second, *_ = rig.cluster.requests
        assert (second.spec.prompt_len, second.spec.max_tokens) == (first.spec.prompt_len + 4, 13), "1 token, 3 steps"
        assert second.spec.choices == first.spec.choices if temperature == 0.0 else (0,)
        assert {call.replica_id for call in rig.cluster.of("generate")} == {"decode-0"}


async def test_evictions_without_a_token_in_between_end_in_a_clear_error_long_before_the_deadline() -> None:
    async with running_router(FakeCluster(), max_retries=0) as rig:
        rig.cluster.script = lambda _: Script(Fault(Phase.QUEUE, CallStatus.EVICTED))
        error = await refusal(rig, timeout_s=3600.0)
        assert (error.status, error.code, error.headers()) == (429, "kv_memory_short", {"Retry-After": "1"})
        assert len(rig.cluster.requests) == len(rig.cluster.struck) == 9


async def test_evictions_with_a_token_now_and_then_go_on_to_the_last_token() -> None:
    """Seven without one before each token: honest, if slow."""
    generation = generation_of(max_tokens=5)

    def script(call: GenerateCall) -> Script:
        is_barren = len(rig.cluster.requests) % 8
        return Script(Fault(Phase.QUEUE if is_barren else Phase.TRANSFER, CallStatus.EVICTED))

    async with running_router(FakeCluster(), max_retries=0) as rig:
        rig.cluster.script = script
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) > 25


@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.TRANSFER, Phase.DECODE])
async def test_who_is_evicted_may_go_on_elsewhere(phase: Phase) -> None:
    """At the replica that evicted it there is no room; the other has room."""
    generation = generation_of(n=2)
    async with running_router(FakeCluster(num_decode=2, decode_blocks=40), max_retries=0) as rig:
        rig.cluster.fail(Fault(phase, CallStatus.EVICTED))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert rig.count("splitserve_retries") >= 1


async def test_no_retries_are_configured() -> None:
    async with running_router(FakeCluster(num_decode=2), max_retries=0) as rig:
        rig.cluster.fail(Fault(Phase.DECODE, "gone"))
        assert (await refusal(rig)).status == 500
        assert len(rig.cluster.requests) == 1


async def test_one_choice_cannot_be_finished() -> None:
    """The others are ended with it: the answer fails as a whole, with its error and no group of errors."""

    def script(call: GenerateCall) -> Script:
        first = len(rig.cluster.requests) == 1
        return Script(Fault(Phase.DECODE, "gone")) if first else Script(fault_of.get(call.spec.choices), token_s=0.01)

    fault_of = {(1,): Fault(Phase.QUEUE, CallStatus.ERROR)}
    async with running_router(FakeCluster(num_decode=2), max_retries=3) as rig:
        rig.cluster.script = script
        assert (await refusal(rig, n=3)).status == 500
        assert Counter(request.spec.choices for request in rig.cluster.requests)[(1,)] == 3, "the one before counts too"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("what", ["gone", "dead", CallStatus.KV_LOST])
@pytest.mark.parametrize("phase", [Phase.TRANSFER, Phase.DECODE])
async def test_who_failed_is_avoided(n: int, phase: Phase, what: str) -> None:
    """By every choice, also when each goes on by itself; until there is nobody else."""
    generation = generation_of(n=n)
    async with running_router(FakeCluster(num_decode=2, num_prefill=2)) as rig:
        rig.cluster.fail(Fault(phase, what))
        assert await rig.tokens(generation) == undisturbed(generation)
        first, *others = [call.replica_id for call in rig.cluster.of("generate")]
        assert len(others) == n
        assert first not in others
    async with running_router(FakeCluster(num_decode=1, num_prefill=1)) as rig:
        rig.cluster.fail(*[Fault(phase, what)] * (what != "dead"))
        assert await rig.tokens(generation) == undisturbed(generation)


async def test_whoever_failed_before_is_still_avoided() -> None:
    async with running_router(FakeCluster(num_decode=4, num_prefill=4), local_by_cost=False) as rig:
        rig.cluster.fail(*[Fault(Phase.TRANSFER, CallStatus.KV_LOST)] * 3)
        await rig.tokens(generation_of())
        for method in ("generate", "prefill"):
            assert len({call.replica_id for call in rig.cluster.of(method)}) == 4


async def test_a_lost_prefill_replica_is_not_held_against_decode() -> None:
    async with running_router(FakeCluster(num_decode=2, num_prefill=2)) as rig:
        rig.cluster.fail(Fault(Phase.PREFILL, "gone"))
        await rig.tokens(generation_of())
        assert [call.replica_id for call in rig.cluster.of("generate")] == ["decode-0"] * 2
        assert [call.replica_id for call in rig.cluster.of("prefill")] == ["prefill-0", "prefill-1"]


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize(("phase", "dead"), [(Phase.PREFILL, "prefill-0"), (Phase.DECODE, "decode-0")])
async def test_the_living_are_told_of_the_dead(phase: Phase, dead: str, hangs: bool) -> None:
    async with running_router(FakeCluster(num_decode=2, num_prefill=2), tail_s=0.1) as rig:
        rig.cluster.forget_peer_hangs = hangs
        rig.cluster.fail(Fault(phase, "dead"))
        generation = generation_of()
        assert await rig.tokens(generation) == undisturbed(generation)
        told = {call.replica_id: call.arguments for call in rig.cluster.of("forget_peer")}
        assert told == dict.fromkeys({"decode-0", "decode-1", "prefill-0", "prefill-1"} - {dead}, (f"agent-{dead}",))


async def test_the_living_are_told_of_one_that_died_with_no_call_open_there() -> None:
    async with running_router(FakeCluster(num_decode=2, num_prefill=2)) as rig:
        await rig.tokens(generation_of())
        assert not rig.cluster.of("forget_peer")
        rig.cluster.prefill.tell_of_death("prefill-0")
        await until(lambda: len(rig.cluster.of("forget_peer")) == 3)
        told = {call.replica_id: call.arguments for call in rig.cluster.of("forget_peer")}
        assert told == dict.fromkeys(("decode-0", "decode-1", "prefill-1"), ("agent-prefill-0",))


async def test_all_attempts_together_end_by_the_deadline() -> None:
    cluster = FakeCluster(num_decode=2, num_prefill=2)
    async with running_router(cluster, handoff_s=0.1, max_retries=20, local_by_cost=False) as rig:
        rig.cluster.script = lambda _: Script(Fault(Phase.PREFILL, "hang"))
        began_s = time.monotonic()
        assert (await refusal(rig, timeout_s=0.4)).status == 504
        assert time.monotonic() - began_s < 4.0
        assert 1 < len(rig.cluster.requests) < 11
        assert all(round(request.timeout_s, 6) <= 0.4 for request in rig.cluster.requests)


async def test_no_pause_outlasts_the_deadline() -> None:
    async with running_router(FakeCluster(num_decode=2), retry_delay_s=30.0) as rig:
        rig.cluster.fail(Fault(Phase.DECODE, "gone"))
        assert (await refusal(rig, timeout_s=20.0)).status == 500


@CHOICES
async def test_a_token_out_of_turn_is_our_bug_and_says_so(n: int) -> None:
    """Never passed on. The exception is itself also after choices have parted, not a group."""

    def on_wire(frame: Frame) -> Iterable[Frame]:
        is_bad = len(rig.cluster.requests) > 1 and frame.tokens
        if not is_bad:
            return (frame,)
        return (structs.replace(frame, tokens=(frame.tokens[0]._replace(index=6), *frame.tokens[1:])),)

    async with running_router(FakeCluster(num_decode=2)) as rig:
        rig.cluster.fail(Fault(Phase.DECODE, "gone"))
        rig.cluster.on_wire = on_wire
        with pytest.raises(ProtocolError):
            await rig.tokens(generation_of(n=n))


# -- who is turned away ----------------------------------------------------------------------------


async def test_the_queue_is_bounded_also_for_those_who_come_at_once() -> None:
    """Each needs 3 blocks of 4. One runs, two wait, the others are told to come back; later there is room again."""
    async with running_router(FakeCluster(decode_blocks=4), max_queued=2) as rig:
        rig.cluster.script = lambda _: Script(token_s=0.005)
        generations = [generation_of(i, max_tokens=11, seed=i) for i in range(10)]
        results = await asyncio.gather(*(rig.tokens(generation) for generation in generations), return_exceptions=True)
        assert results[:3] == [undisturbed(generation) for generation in generations[:3]]
        for error in results[3:]:
            assert isinstance(error, ApiError)
            assert (error.status, error.code, error.headers()) == (429, "queue_full", {"Retry-After": "2"})
        assert rig.count("splitserve_request_rejections", reason="queue_full") == 7
        await rig.settle()
        assert await rig.tokens(generations[9]) == undisturbed(generations[9])


@pytest.mark.parametrize("ending", ["cancel", "timeout", "gone"])
async def test_whoever_leaves_the_queue_makes_room_in_it(ending: str) -> None:
    async with running_router(FakeCluster(decode_blocks=4), max_queued=1, max_retries=0) as rig:
        rig.cluster.play(BUSY, Script(Fault(Phase.QUEUE, "gone" if ending == "gone" else "hang")))
        running = rig.start(generation_of())
        await until(lambda: bool(rig.cluster.struck))
        waiting = rig.start(generation_of(timeout_s=0.1 if ending == "timeout" else 20.0))
        await until(lambda: rig.router.num_waiting == 1 or waiting.done())
        if ending == "cancel":
            assert (await refusal(rig)).code == "queue_full"
            waiting.cancel()
        await asyncio.wait({waiting})
        assert rig.router.num_waiting == 0
        another = rig.start(generation_of())
        await until(lambda: rig.router.num_waiting == 1)
        for task in (running, another):
            task.cancel()
        await asyncio.wait({running, another})


async def test_no_queue_at_all() -> None:
    async with running_router(FakeCluster(decode_blocks=4), max_queued=0) as rig:
        rig.cluster.play(BUSY)
        running = rig.start(generation_of())
        await until(lambda: bool(rig.cluster.struck))
        assert (await refusal(rig)).code == "queue_full"
        running.cancel()
        await asyncio.wait({running})
        await rig.settle()
        assert await rig.tokens(generation_of()) == undisturbed(generation_of())


async def test_a_replica_without_slots_is_full_whatever_its_memory() -> None:
    """It says in its frames that requests wait there."""
    async with running_router(FakeCluster(), max_queued=1) as rig:
        rig.cluster.play(Script(token_s=0.01), *[Script(Fault(Phase.QUEUE, "hang"))] * 2)
        running = rig.start(generation_of(max_tokens=100))
        no_slot = rig.start(generation_of())
        await until(lambda: rig.router._view.decode_candidates()[0].num_queued == 1)
        waiting = rig.start(generation_of())
        await until(lambda: rig.router.num_waiting == 1)
        assert (await refusal(rig)).code == "queue_full"
        for task in (running, no_slot, waiting):
            task.cancel()
        await asyncio.wait({running, no_slot, waiting})


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_waiting_too_long_for_memory(num_decode: int) -> None:
    """A place in the queue is not given up for another one; only for a replica that has room."""
    async with running_router(FakeCluster(num_decode=num_decode, decode_blocks=4), queue_s=0.2) as rig:
        rig.cluster.play(*[BUSY] * num_decode)
        running = [rig.start(generation_of()) for _ in range(num_decode)]
        await until(lambda: len(rig.cluster.struck) == num_decode)
        error = await refusal(rig)
        assert (error.status, error.code, bool(error.headers())) == (429, "queue_timeout", True)
        assert len(rig.cluster.requests) == num_decode + 1
        assert rig.count("splitserve_retries") == 0
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_after_the_first_token_waiting_too_long_is_no_matter_of_a_full_house() -> None:
    async with running_router(FakeCluster(), queue_s=0.1) as rig:
        rig.cluster.fail(Fault(Phase.DECODE, "gone"), Fault(Phase.QUEUE, "hang"))
        assert (await refusal(rig, timeout_s=1.0)).status == 504


async def test_calls_do_not_inherit_the_context_of_their_request() -> None:
    """Serve would cancel them by itself, and mixes up concurrent calls that share an id in it."""
    of_request: ContextVar[str] = ContextVar("of_request", default="none")
    seen: list[str] = []
    async with running_router(FakeCluster(num_decode=2)) as rig:
        rig.cluster.seen = lambda: seen.append(of_request.get())
        rig.cluster.fail(Fault(Phase.DECODE, "dead"))
        of_request.set("request")
        await rig.tokens(generation_of(max_tokens=4))
    assert set(seen) == {"none"}
    assert len(seen) >= 5


async def test_a_pool_is_empty_and_comes_back() -> None:
    async with running_router(FakeCluster()) as rig:
        for name, pool in (("prefill-0", rig.cluster.prefill), ("decode-0", rig.cluster.decode)):
            replica = rig.cluster.remove(name)
            error = await refusal(rig)
            assert (error.status, error.headers()) == (503, {"Retry-After": "1"})
            assert pool is not None
            pool.members[name] = replica
            assert await rig.tokens(generation_of()) == undisturbed(generation_of())
        assert rig.count("splitserve_request_rejections", reason="no_capacity") == 2


async def test_the_pool_is_empty_when_it_is_tried_again() -> None:
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(BUSY)
        tokens = rig.router.generate(generation_of())
        await anext(tokens)
        rig.cluster.kill("decode-0")
        rig.cluster.remove("decode-0")
        with pytest.raises(ApiError) as caught:
            _ = [batch async for batch in tokens]
        assert caught.value.status == 503


@pytest.mark.parametrize("blocks", [{"decode_blocks": 3}, {"prefill_blocks": 1}])
async def test_what_never_fits_is_refused_with_the_numbers(blocks: dict[str, int]) -> None:
    async with running_router(FakeCluster(**blocks), fallback=True) as rig:
        error = await refusal(rig, max_tokens=20)
        pool = next(iter(blocks)).split("_")[0]
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert f"the largest {pool} replica has {4 * blocks[f'{pool}_blocks']}" in error.message
        assert not rig.cluster.calls


async def test_decode_prefills_short_prompts_and_if_allowed_when_nobody_else_lives() -> None:
    async with running_router(FakeCluster(), local_prefill_max_tokens=5, fallback=True) as rig:
        for prompt in ((1,) * 5, (1,) * 6):
            assert await rig.tokens(generation_of(*prompt)) == undisturbed(generation_of(*prompt))
        assert len(rig.cluster.of("prefill")) == 1
        rig.cluster.remove("prefill-0")
        assert await rig.tokens(generation_of(*(1,) * 6)) == undisturbed(generation_of(*(1,) * 6))
        for kind in ("local", "remote", "fallback_aggregated"):
            assert rig.count("splitserve_router_decisions", result=kind) == 1
