"""Real engines tell routers what they have cached, and routers believe no less and no more than engines find."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from cluster.routing.generation import Generation
from cluster.routing.router import Router
from tests.engines.local_system import LocalSystem, collect
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

PIECE = 256
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def system(tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    system = LocalSystem(tiny_settings("decode", tiny_goldens.folder), tiny_settings("prefill", tiny_goldens.folder))
    yield system
    system.close()


def text(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(512) for _ in range(num_tokens)]


def believed(router: Router, generation: Generation) -> dict[str, int]:
    return dict(router._forecasts.of(generation.spec).cached())


async def until_believed(router: Router, generation: Generation, tokens: dict[str, int]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while believed(router, generation) != tokens:
            await asyncio.sleep(0.01)


def test_another_router_is_told_and_what_it_predicts_is_found(system: LocalSystem) -> None:
    prompt = text(1, PIECE + 20)
    generation, again = system.generation(prompt, 4), system.generation(prompt, 4)

    async def run() -> None:
        first, second = await system.start_router(), await system.start_router()
        try:
            answer = await collect(first, generation)
            both = {"prefill-0": PIECE, "decode-0": PIECE}
            await until_believed(second, again, both)
            answered = await collect(second, again)
            assert answered.token_ids == answer.token_ids
            assert again.finding.num_tokens == (len(prompt) - 1) // 16 * 16
        finally:
            await second.stop()
            await first.stop()

    asyncio.run(run())


def test_a_new_turn_finds_the_former_answer_at_decode_by_its_own_word(system: LocalSystem) -> None:
    prompt = text(2, PIECE - 10)
    generation = system.generation(prompt, 40)

    async def run() -> None:
        router = await system.start_router()
        try:
            answer = await collect(router, generation)
            turn = system.generation([*prompt, *answer.token_ids[0], *text(3, 30)], 4)
            # Prefill has less than a piece of it; decode has the answer's tokens too.
            await until_believed(router, turn, {"decode-0": PIECE})
        finally:
            await router.stop()

    asyncio.run(run())
