"""Handoffs that fail: requests get slower, none fails, and whoever comes later does not meet the same fault."""

from __future__ import annotations

import asyncio

import pytest

from replicas.messages import CallStatus, GenerateCall
from tests.cluster.fake_model import PLAIN, Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import running_router

pytestmark = pytest.mark.usefixtures("skipped_waits")

FAILED = "local_failed_pair"


@pytest.mark.parametrize(("num_decode", "num_prefill"), [(1, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("what", [CallStatus.KV_LOST, "hang"])
async def test_with_every_handoff_failing_no_request_fails(num_decode: int, num_prefill: int, what: str) -> None:
    """Requests that come together each meet the fault once; those that come later do not."""
    cluster = FakeCluster(num_decode=num_decode, num_prefill=num_prefill)
    async with running_router(cluster, max_retries=1, handoff_s=0.2) as rig:
        cluster.script = lambda _: Script(Fault(Phase.ADMITTED, what))  # of a local prompt there is no such phase
        generations = [generation_of(seed=seed) for seed in range(12)]
        assert await asyncio.gather(*map(rig.tokens, generations)) == [
            undisturbed(generation) for generation in generations
        ]
        assert 0 < len(cluster.struck) <= 12
        assert rig.count("splitserve_retries") == len(cluster.struck)
        assert rig.count("splitserve_router_decisions", result=FAILED) == 12
        num_pairs, num_struck = num_decode * num_prefill, len(cluster.struck)
        for generation in generations:
            assert await rig.tokens(generation) == undisturbed(generation)
        # Of the pairs that nobody had tried yet each is tried at most once.
        assert len(cluster.struck) - num_struck < num_pairs
        assert rig.count("splitserve_router_decisions") == 24 + len(cluster.struck)


@pytest.mark.parametrize("what", [CallStatus.KV_LOST, CallStatus.ERROR, CallStatus.REJECTED, "raise", "hang"])
async def test_a_prefill_replica_that_fails_each_prompt(what: str) -> None:
    async with running_router(FakeCluster(), max_retries=1, handoff_s=0.1) as rig:
        rig.cluster.script = lambda _: Script(Fault(Phase.PREFILL, what))
        for seed in range(3):
            assert await rig.tokens(generation_of(seed=seed)) == undisturbed(generation_of(seed=seed))
        assert {call.end for call in rig.cluster.of("prefill")} <= {"ok", "failed", "cancelled"}
        assert 1 <= len(rig.cluster.of("prefill")) <= 3


async def test_a_retry_takes_another_pair_where_that_is_not_known_to_be_dearer() -> None:
    """Whose replica has died needs no other way, only another replica."""
    async with running_router(FakeCluster(num_prefill=2)) as rig:
        rig.cluster.fail(Fault(Phase.PREFILL, "gone"))
        assert await rig.tokens(generation_of()) == undisturbed(generation_of())
        assert rig.count("splitserve_router_decisions", result="remote") == 2
        # Another request's failure is this pair's, not the other's.
        rig.cluster.fail(Fault(Phase.ADMITTED, CallStatus.KV_LOST))
        for _ in range(4):
            assert await rig.tokens(generation_of()) == undisturbed(generation_of())
        assert rig.count("splitserve_router_decisions", result=FAILED) == 1, "the retry of the one that failed"
        assert [call.replica_id for call in rig.cluster.of("prefill")[-3:]] == ["prefill-1"] * 3


async def test_a_pair_that_is_well_again_is_used_again() -> None:
    async with running_router(FakeCluster()) as rig:
        pairs = rig.router._view.pairs
        rig.cluster.fail(Fault(Phase.ADMITTED, CallStatus.KV_LOST))
        await rig.tokens(generation_of())
        await rig.tokens(generation_of())
        assert len(rig.cluster.of("prefill")) == 1
        later_s = pairs._clock() + 300.0
        pairs._clock = lambda: later_s
        rig.cluster.script = lambda _: PLAIN
        for _ in range(3):
            assert await rig.tokens(generation_of()) == undisturbed(generation_of())
        assert len(rig.cluster.of("prefill")) == 4
        assert pairs.of("decode-0", "prefill-0").penalty_s == 0.0


async def test_without_costs_a_request_fails_as_it_did() -> None:
    """That the fault of these tests is one."""
    async with running_router(FakeCluster(), max_retries=1, local_by_cost=False) as rig:
        rig.cluster.script = lambda _: Script(Fault(Phase.ADMITTED, CallStatus.KV_LOST))
        with pytest.raises(Exception, match="failed at transfer"):
            await rig.tokens(generation_of())
        assert len(rig.cluster.struck) == 2


@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.DECODE])
async def test_other_failures_are_not_held_against_a_pair(phase: Phase) -> None:
    async with running_router(FakeCluster(num_decode=1)) as rig:
        rig.cluster.fail(Fault(phase, CallStatus.ERROR, steps=1))
        assert await rig.tokens(generation_of()) == undisturbed(generation_of())
        assert rig.count("splitserve_router_decisions", result="remote") == 2
        assert rig.router._view.pairs.of("decode-0", "prefill-0").penalty_s == 0.0


@pytest.mark.parametrize("local_by_cost", [True, False])
async def test_a_way_that_is_cut_between_two_who_are_well(local_by_cost: bool) -> None:
    """Decode-0 can't read from prefill-0; both are fine else. Who meets it is served; the others go by other ways, and
    when the way is there again it is used again."""
    cluster = FakeCluster(num_decode=2, num_prefill=2)
    is_cut, num_tries = True, 0

    def script(call: GenerateCall) -> Script:
        nonlocal num_tries
        (decode,) = [of.replica_id for of in cluster.of("generate") if of.arguments[0] is call]
        source = call.source.replica_id if call.source is not None else ""
        is_there = (decode, source) == ("decode-0", "prefill-0")
        num_tries += is_there
        return Script(Fault(Phase.ADMITTED, CallStatus.KV_LOST)) if is_there and is_cut else PLAIN

    async with running_router(cluster, local_by_cost=local_by_cost, max_retries=2) as rig:
        cluster.script = script
        for seed in range(30):
            assert await rig.tokens(generation_of(seed=seed)) == undisturbed(generation_of(seed=seed))
        assert 1 <= num_tries <= 2, "it was met, and then it was known"
        assert len(cluster.of("prefill")) >= 25, "prefill replicas go on to compute"
        later_s, is_cut, num_tries = rig.router._view.pairs._clock() + 300.0, False, 0
        rig.router._view.pairs._clock = lambda: later_s
        await asyncio.gather(*[rig.tokens(generation_of(*range(1, 3 + seed * seed % 11))) for seed in range(60)])
        assert num_tries > 0
        assert rig.router._view.pairs.of("decode-0", "prefill-0").penalty_s == 0.0
