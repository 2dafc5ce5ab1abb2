"""Requests that replicas die of: refused after some deaths, with their like; whoever only sat beside them is not."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import Route, RouteKind
from cluster.routing.attempt_failed import AttemptFailed, AttemptHistory, Stage
from cluster.routing.generation import Generation
from cluster.routing.pool_client import Loss, ReplicaLost
from cluster.routing.quarantine import Quarantine
from replicas.messages import CallStatus, GenerateCall
from tests.cluster.fake_model import PLAIN, Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import Rig, running_router

pytestmark = pytest.mark.usefixtures("skipped_waits")

POISON = (6, 6, 6)
REMOTE = Route(RouteKind.REMOTE, "d", "p", must_wait=False, decode_blocks=1)
LOCAL = Route(RouteKind.LOCAL, "d", None, must_wait=False, decode_blocks=1)


def killing(phase: Phase, what: str = "dead", steps: int = 0) -> Script:
    return Script(Fault(phase, what, steps=steps))


def poisoned(phase: Phase, what: str, steps: int, rig: Rig) -> None:
    """Replicas go when they compute it; others come for them."""

    def script(call: GenerateCall) -> Script:
        for pool in rig.cluster.pools:
            pool.replace_dead()
        rig.router.pools_changed(rig.cluster.decode.replicas())
        is_poison = call.spec.prompt_ids[:3] == POISON
        at = Phase.DECODE if call.is_suspect else phase  # then decode computes its prompt, and nobody else
        return killing(at, what, steps) if is_poison else PLAIN

    rig.cluster.script = script


async def refused(rig: Rig, generation: Generation) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await rig.tokens(generation)
    return caught.value


@pytest.mark.parametrize("num_prefill", [0, 2])
@pytest.mark.parametrize(
    ("phase", "what"),
    [(Phase.PREFILL, "dead"), (Phase.DECODE, "dead"), (Phase.DECODE, "frozen"), (Phase.TRANSFER, "dead")],
)
async def test_it_kills_three_and_its_like_none(
    num_prefill: int, phase: Phase, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    if phase is Phase.PREFILL and not num_prefill:
        phase = Phase.TRANSFER
    cluster, frozen_after_s = FakeCluster(num_decode=6, num_prefill=num_prefill), 0.3 if what == "frozen" else 60.0
    async with running_router(cluster, max_retries=5, frozen_after_s=frozen_after_s) as rig:
        poisoned(phase, what, 0, rig)
        with caplog.at_level(logging.ERROR):
            error = await refused(rig, generation_of(*POISON, seed=1))
        assert (error.status, error.code) == (500, "quarantined")
        assert error.headers() == {"X-Should-Retry": "false"}
        assert len(rig.cluster.struck) == 3
        assert [call.is_suspect for call in rig.cluster.requests] == [False, False, True]
        last = rig.cluster.requests[-1]
        assert last.source is None, "one replica has all of it"
        (record,) = [one for one in caplog.records if vars(one).get("event") == "request_quarantined"]
        assert vars(record)["num_deaths"] == 3
        assert rig.count("splitserve_request_rejections", reason="quarantined") == 1
        assert rig.count("splitserve_router_decisions", result="local_suspect") == 1
        num_calls = len(rig.cluster.calls)
        assert (await refused(rig, generation_of(*POISON, seed=2))).code == "quarantined", "whatever its seed"
        assert len(rig.cluster.calls) == num_calls
        assert rig.count("splitserve_request_rejections", reason="quarantined") == 2
        other = generation_of(*POISON[:2], 7, seed=1)
        assert await rig.tokens(other) == undisturbed(other)
        for replica in rig.cluster.decode.members.values():
            replica.thaw.set()


@pytest.mark.parametrize("limit", [2, 5])
async def test_the_number_is_configured(limit: int) -> None:
    async with running_router(FakeCluster(num_decode=9, num_prefill=0), max_retries=9) as rig:
        rules = replace(rig.router._rules, quarantine_after_deaths=limit)
        rig.router._failures._rules = rig.router._routes._rules = rules
        poisoned(Phase.DECODE, "dead", 0, rig)
        assert (await refused(rig, generation_of(*POISON))).code == "quarantined"
        assert len(rig.cluster.struck) == limit
        assert [call.is_suspect for call in rig.cluster.requests] == [*[False] * (limit - 1), True]


async def test_links_that_break_are_no_deaths_where_replicas_answer_again() -> None:
    """A network that fails for a moment, again and again: nobody has died, and the request is not poison."""
    async with running_router(FakeCluster(num_decode=6, num_prefill=0), max_retries=9) as rig:
        scripts = [killing(Phase.DECODE, "gone")] * 5

        def script(call: GenerateCall) -> Script:
            for replica_id in list(rig.router._decode.lost):
                rig.router._decode._recover(replica_id)  # it has answered
            return scripts.pop() if scripts else PLAIN

        rig.cluster.script = script
        generation = generation_of(*POISON)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 6
        assert rig.count("splitserve_request_rejections", reason="quarantined") == 0


@pytest.mark.parametrize("what", ["dead", "frozen"])
async def test_replicas_that_leave_and_end_have_not_died_of_it(what: str) -> None:
    """A rolling update: each says that it leaves, and is gone before it has done what it was asked."""
    cluster, frozen_after_s = FakeCluster(num_decode=6, num_prefill=0), 0.3 if what == "frozen" else 60.0
    async with running_router(cluster, max_retries=9, frozen_after_s=frozen_after_s, migrates=False) as rig:
        scripts = [killing(Phase.DECODE, what)] * 4

        def script(call: GenerateCall) -> Script:
            if not scripts:
                return PLAIN
            rig.router._decode._says_it_leaves(rig.cluster.calls[-1].replica_id)
            return scripts.pop()

        rig.cluster.script = script
        generation = generation_of(*POISON)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 5
        assert len({call.replica_id for call in rig.cluster.calls if call.method == "generate"}) == 5
        assert not any(call.is_suspect for call in rig.cluster.requests)
        assert rig.count("splitserve_request_rejections", reason="quarantined") == 0
        for replica in rig.cluster.decode.members.values():
            replica.thaw.set()


async def test_who_has_left_the_pool_and_ends_later_has_not_died_of_it() -> None:
    """Serve takes a replica off its list when it tells it to go, and it ends what it has begun, or its process ends."""
    async with running_router(FakeCluster(num_decode=6), max_retries=9, migrates=False) as rig:
        watched, seen = rig.router._decode, []
        tick = watched._tick

        def noting(now_s: float) -> None:
            tick(now_s)
            seen.append(dict(watched.replicas()))

        watched._tick = noting  # type: ignore[method-assign]
        scripts = [Script(Fault(Phase.TRANSFER, "dead"), transfer_s=1.2)] * 3

        def script(call: GenerateCall) -> Script:
            if not scripts:
                return PLAIN
            name = rig.cluster.calls[-1].replica_id
            watched._says_it_leaves(name)
            rig.cluster.remove(name)
            rig.router.pools_changed(rig.cluster.decode.replicas())
            return scripts.pop()

        rig.cluster.script = script
        generation = generation_of(*POISON)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 4
        assert not any(call.is_suspect for call in rig.cluster.requests)
        assert {len(table) for table in seen} >= {5, 4, 3}, "the watch has looked while each was off the list"
        assert rig.count("splitserve_request_rejections", reason="quarantined") == 0


@pytest.mark.parametrize("num_prefill", [4, 9])
async def test_the_dead_that_it_is_sent_to_have_not_died_of_it(num_prefill: int) -> None:
    """All but one have died of something else, and nobody has told the router yet: it finds out call by call."""
    async with running_router(FakeCluster(num_prefill=num_prefill), max_retries=0) as rig:
        alive, *corpses = rig.cluster.prefill.members
        for name in corpses:
            rig.cluster.kill(name)
        # As long as they are all well known, the least busy is chosen: the one that lives has much to do.
        rig.router._view.prompt_sent(alive, 100_000)
        generation = generation_of(*POISON)
        assert await rig.tokens(generation) == undisturbed(generation)
        rig.router._view.prompt_answered(alive, 100_000)
        assert [call.replica_id for call in rig.cluster.of("prefill")] == [*corpses, alive]
        assert not any(call.is_suspect for call in rig.cluster.requests)
        assert rig.count("splitserve_request_rejections", reason="quarantined") == 0


async def test_whoever_gets_on_in_between_lives_through_many_deaths() -> None:
    """Each replica dies under it, but not of it: it has had a row or more by then."""
    generation = generation_of(max_tokens=31)
    async with running_router(FakeCluster(num_decode=9, num_prefill=0), max_retries=1) as rig:
        rig.cluster.play(*[killing(Phase.DECODE, steps=3)] * 7)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) == 7
        assert not any(call.is_suspect for call in rig.cluster.requests)


async def test_but_not_through_any_number_of_them() -> None:
    """It may be why, in a way that nobody can tell: not all replicas are to die of it."""
    async with running_router(FakeCluster(num_decode=20, num_prefill=0), max_retries=1) as rig:
        poisoned(Phase.DECODE, "dead", 3, rig)
        error = await refused(rig, generation_of(*POISON, max_tokens=200))
        assert (error.status, error.code) == (500, "failed")
        assert len(rig.cluster.struck) == 11


def lost(replica_id: str, stage: Stage, loss: Loss = Loss.DEAD, may_have_reached: bool = True) -> AttemptFailed:
    failure = AttemptFailed(stage, CallStatus.ERROR, "", may_retry=True)
    failure.__cause__ = ReplicaLost(replica_id, loss, "", may_have_reached=may_have_reached)
    return failure


def failed(stage: Stage, status: CallStatus) -> AttemptFailed:
    return AttemptFailed(stage, status, "", may_retry=True)


@pytest.mark.parametrize(
    ("failure", "stage", "route", "counts"),
    [
        (lost("d", Stage.QUEUE), Stage.QUEUE, LOCAL, False),  # it was in no step
        (lost("d", Stage.DECODE), Stage.PREFILL, REMOTE, False),  # its prompt was computed elsewhere
        (lost("p", Stage.PREFILL), Stage.PREFILL, REMOTE, True),
        (lost("p", Stage.DECODE), Stage.DECODE, REMOTE, False),  # it had answered
        (lost("d", Stage.TRANSFER), Stage.TRANSFER, REMOTE, True),
        (lost("d", Stage.PREFILL), Stage.PREFILL, LOCAL, True),
        (lost("d", Stage.DECODE), Stage.DECODE, LOCAL, True),
        (lost("d", Stage.DECODE, Loss.FROZEN), Stage.DECODE, LOCAL, True),
        (lost("d", Stage.DECODE, Loss.UNREACHABLE), Stage.DECODE, LOCAL, True),  # Ray may not know yet
        (lost("d", Stage.DECODE, Loss.LEAVING), Stage.DECODE, LOCAL, False),
        (lost("p", Stage.PREFILL, may_have_reached=False), Stage.PREFILL, REMOTE, False),
        (lost("p", Stage.PREFILL, Loss.UNREACHABLE, may_have_reached=False), Stage.PREFILL, REMOTE, False),
        (failed(Stage.DECODE, CallStatus.ENGINE_FAILED), Stage.DECODE, LOCAL, True),
        (failed(Stage.PREFILL, CallStatus.ENGINE_FAILED), Stage.PREFILL, REMOTE, True),
        (failed(Stage.QUEUE, CallStatus.ENGINE_FAILED), Stage.QUEUE, LOCAL, False),
        (failed(Stage.DECODE, CallStatus.ERROR), Stage.DECODE, LOCAL, False),  # its own failure, no other's
        (failed(Stage.TRANSFER, CallStatus.KV_LOST), Stage.TRANSFER, REMOTE, False),
        (failed(Stage.DECODE, CallStatus.EVICTED), Stage.DECODE, LOCAL, False),
    ],
)
def test_which_ends_are_deaths_of_who_computed_it(
    failure: AttemptFailed, stage: Stage, route: Route, counts: bool
) -> None:
    assert failure.is_death_of_who_computed(stage, route) == counts


@pytest.mark.parametrize(
    ("attempts", "num_deaths"),
    [
        ("kkk", 3),
        ("Kkk", 3),  # the first one at its 30th token, the others there again
        ("kkK", 1),  # it got past
        ("kKk", 2),
        ("k.k", 2),  # another failure in between proves nothing
        ("k!k", 1),  # but one after a row does
        ("kk!", 0),
    ],
)
def test_deaths_in_a_row(attempts: str, num_deaths: int) -> None:
    """k: a death; ".": another failure; K and "!": the same, after a row of its own."""
    past = AttemptHistory()
    for what in attempts:
        failure = lost("d", Stage.DECODE) if what in "kK" else failed(Stage.DECODE, CallStatus.ERROR)
        has_run = what in "K!"
        past = past.after(failure, LOCAL, has_advanced=has_run, has_run=has_run, has_killed=what in "kK")
    assert past.num_deaths == num_deaths


def silent(replica_id: str, loss: Loss) -> AttemptFailed:
    failure = failed(Stage.DECODE, CallStatus.ERROR)
    failure.__cause__ = ReplicaLost(replica_id, loss, "")
    return failure


def test_who_answers_again_has_not_died_of_it() -> None:
    past = AttemptHistory()
    for replica_id, loss in (("a", Loss.UNREACHABLE), ("b", Loss.FROZEN), ("c", Loss.DEAD)):
        past = past.after(silent(replica_id, loss), LOCAL, has_killed=True)
    past = past.after(failed(Stage.DECODE, CallStatus.ENGINE_FAILED), LOCAL, has_killed=True)
    assert (past.num_deaths, past.num_dead(["d"])) == (4, 4)
    assert past.num_dead(["a"]) == 3
    assert past.num_dead(["a", "b", "c", "d"]) == 2, "of these it is known"
    again = past.after(silent("a", Loss.FROZEN), LOCAL, has_killed=True)
    assert (again.num_dead([]), again.num_dead(["a"])) == (5, 3), "twice"
    past = past.after(silent("a", Loss.DEAD), LOCAL, has_run=True, has_killed=True)
    assert past.num_dead(["a", "b"]) == 1, "what was before it got on is forgotten"


def test_its_like_is_let_in_again_later_and_what_is_kept_is_bounded() -> None:
    now_s = 0.0
    quarantine = Quarantine(IngressMetrics("model", "1", "2"), lambda: now_s)
    spec = generation_of(1, 2).spec
    quarantine.check(spec)
    quarantine.found(spec, "g", 3)
    for changed in (
        replace(spec, prompt_ids=(1, 3)),
        replace(spec, max_tokens=spec.max_tokens + 1),
        replace(spec, sampling=replace(spec.sampling, temperature=0.5)),
    ):
        quarantine.check(changed)
    for alike in (spec, replace(spec, sampling=replace(spec.sampling, seed=99)), replace(spec, client="x", priority=3)):
        with pytest.raises(ApiError):
            quarantine.check(alike)
    now_s = 601.0
    quarantine.check(spec)
    for number in range(3000):
        quarantine.found(replace(spec, prompt_ids=(number + 5,)), "g", 3)
    assert len(quarantine._until_s) == 1024
