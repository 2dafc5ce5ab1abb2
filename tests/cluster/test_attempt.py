"""One attempt against scripted replicas that do their work: every token once, in whatever order things arrive.

Each test ends in `running_router`'s check that nothing is left: tasks, calls, mailboxes, counts, memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from replicas.messages import Frame
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, model_tokens, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import running_router

pytestmark = pytest.mark.usefixtures("skipped_waits")

LAYOUTS = pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
CHOICES = pytest.mark.parametrize("n", [1, 3])
NEVER_S = 30.0


# -- nothing fails ---------------------------------------------------------------------------------


@LAYOUTS
@CHOICES
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "parted"])
async def test_every_token_once_in_order(num_prefill: int, n: int, temperature: float) -> None:
    generation = generation_of(n=n, temperature=temperature)
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(generation) == undisturbed(generation)
        await rig.settle()
        assert [call.end for call in rig.cluster.calls] == ["ok"] * (1 + num_prefill)


async def test_the_first_token_waits_for_nothing_that_decode_does() -> None:
    generation = generation_of(n=2)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(Fault(Phase.TRANSFER, "hang")))
        tokens = rig.router.generate(generation)
        firsts = await anext(tokens)
        assert [(token.choice, token.token_id) for token in firsts] == [
            (c, undisturbed(generation)[c][0][0]) for c in (0, 1)
        ]
        await tokens.aclose()


@LAYOUTS
@CHOICES
async def test_max_tokens_1(num_prefill: int, n: int) -> None:
    generation = generation_of(n=n, max_tokens=1)
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(generation) == undisturbed(generation)
        await rig.settle()
        (generate,) = rig.cluster.of("generate")
        assert generate.end == ("cancelled" if num_prefill else "ok"), "nothing is handed over: decode waits in vain"


@LAYOUTS
@CHOICES
async def test_the_first_token_ends_a_choice(num_prefill: int, n: int) -> None:
    """Of three choices only that one: the others go on, and nothing waits for it."""
    plain = generation_of(n=n)
    first = undisturbed(plain)[n - 1][0][0]
    generation = generation_of(n=n, stop=[first])
    assert len(undisturbed(generation)[n - 1]) == 1
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 1


@LAYOUTS
async def test_choices_end_at_different_tokens(num_prefill: int) -> None:
    plain = undisturbed(generation_of(n=3))
    generation = generation_of(n=3, stop=[plain[0][1][0], plain[1][4][0]])
    assert len({len(tokens) for tokens in undisturbed(generation).values()}) == 3
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        assert await rig.tokens(generation) == undisturbed(generation)


# -- order of arrival ------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [Script(answer_s=0.03), Script(answer_s=0.02, token_s=0.005)], ids=["all", "some"])
@CHOICES
async def test_frames_overtake_the_answer_of_prefill(script: Script, n: int) -> None:
    """Even all of them, and decode's reply too: the handoff does not pass through the router."""
    generation = generation_of(n=n)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(script)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 1


async def test_the_answer_of_prefill_never_comes_though_decode_is_done() -> None:
    generation = generation_of()
    async with running_router(FakeCluster(), tail_s=0.1) as rig:
        rig.cluster.play(Script(answer_s=NEVER_S))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert rig.count("splitserve_retries") == rig.count("splitserve_retries", stage="prefill") == 1


@LAYOUTS
@pytest.mark.parametrize("whole", [True, False], ids=["all", "the last"])
async def test_the_reply_overtakes_the_frames(num_prefill: int, whole: bool) -> None:
    generation = generation_of(n=3)
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        rig.cluster.on_wire = late(rig.cluster, from_seq=0 if whole else 8 - num_prefill)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 1


def late(cluster: FakeCluster, from_seq: int) -> Callable[[Frame], Iterable[Frame]]:
    def on_wire(frame: Frame) -> Iterable[Frame]:
        if frame.seq < from_seq:
            return (frame,)
        replica = cluster.decode.members[frame.replica_id]
        asyncio.get_running_loop().call_later(0.02, cluster.deliver, replica, frame)
        return ()

    return on_wire


async def test_frames_that_the_reply_counts_never_come() -> None:
    """The last ones: no later frame shows the gap. The tokens are generated again, and passed on once."""
    generation = generation_of()
    async with running_router(FakeCluster(), tail_s=0.1) as rig:
        rig.cluster.on_wire = lambda frame: (frame,) if frame.seq < 4 or len(rig.cluster.requests) > 1 else ()
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 2


@pytest.mark.parametrize("lost", [{0}, {1}, {3, 4}, {2, 5, 6}, set(range(6))], ids=str)
async def test_lost_frames_are_replayed(lost: set[int]) -> None:
    generation = generation_of(n=3)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(token_s=0.002))
        rig.cluster.on_wire = lambda frame: () if frame.seq in lost else (frame,)
        alive = asyncio.create_task(rig.signs_of_life())
        assert await rig.tokens(generation) == undisturbed(generation)
        alive.cancel()
        assert len(rig.cluster.requests) == 1
        assert len(rig.cluster.of("replay")) == rig.count("splitserve_retries", stage="frames") >= 1


async def test_a_replay_that_is_too_long_comes_in_parts() -> None:
    generation = generation_of(n=3)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(token_s=0.002))
        rig.cluster.replay = "short"
        rig.cluster.on_wire = lambda frame: () if frame.seq in (1, 2, 3, 4) else (frame,)
        alive = asyncio.create_task(rig.signs_of_life())
        assert await rig.tokens(generation) == undisturbed(generation)
        alive.cancel()
        assert len(rig.cluster.requests) == 1
        assert [call.arguments[1] for call in rig.cluster.of("replay")] == [1, 3]


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

    generation = generation_of(n=3)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.on_wire = on_wire
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 1


@pytest.mark.parametrize("replay", ["gone", "hang", "wrong"])
@pytest.mark.parametrize("num_decode", [1, 2])
@CHOICES
async def test_lost_frames_that_cannot_be_had(replay: str, num_decode: int, n: int) -> None:
    """Everything at that replica is generated again from what had come; nobody hangs behind the gap, later neither."""
    generations = [generation_of(seed, n=n, seed=seed) for seed in range(3)]
    async with running_router(FakeCluster(num_decode=num_decode), tail_s=0.05) as rig:
        rig.cluster.replay = replay
        rig.cluster.script = lambda _: Script(token_s=0.002)
        lost = (f"decode-{num_decode - 1}", 4)
        rig.cluster.on_wire = lambda frame: () if (frame.replica_id, frame.seq) == lost else (frame,)
        got = await asyncio.gather(*(rig.tokens(generation) for generation in generations))
        assert got == [undisturbed(generation) for generation in generations]
        assert len(rig.cluster.requests) > 3
        assert len(rig.cluster.of("replay")) == 1


# -- the fake itself ------------------------------------------------------------------------------


def test_the_fake_model_depends_on_all_it_may() -> None:
    """Or the tests here would prove nothing."""
    generation = generation_of()
    tokens = {
        tuple(model_tokens(prompt, generation_of(seed=seed).spec.sampling, choice, 8, frozenset()))
        for prompt in ((1, 2, 3), (1, 2, 3, 3), (1, 2, 4))
        for seed in (1, 2)
        for choice in (0, 1)
    }
    assert len(tokens) == 12
    whole = undisturbed(generation)[0]
    replayed = (*generation.spec.prompt_ids, *(token_id for token_id, _ in whole[:3]))
    assert model_tokens(replayed, generation.spec.sampling, 0, 5, frozenset()) == whole[3:]
