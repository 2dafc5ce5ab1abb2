"""A request that kills every engine that has it in a step: three die of it, and all that sat beside it are served."""

from __future__ import annotations

import asyncio

import pytest

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from scheduler.generation_spec import GenerationSpec
from scheduler.request import Request
from tests.engines.dying_engines import dying_engines
from tests.engines.local_system import GREEDY, collect
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings
from tests.golden.golden_set import Golden

POISON = (6, 6, 6)
NUM_NEIGHBOURS = 12
NUM_TOKENS = 24


def generation(name: str, prompt_ids: tuple[int, ...]) -> Generation:
    return Generation(name, GenerationSpec(prompt_ids, (0,), NUM_TOKENS, frozenset(), GREEDY), 600.0)


def is_poison(request: Request) -> bool:
    return request.spec.prompt_ids[:3] == POISON


def kills_by_its_rows(request: Request) -> bool:
    """Its prompt is harmless: it has a token by then, of each engine one."""
    return is_poison(request) and any(sequence.num_known > 0 for sequence in request.sequences)


@pytest.mark.parametrize("kills", [is_poison, kills_by_its_rows])
def test_three_die_of_it_and_nobody_beside_it_suffers(tiny_goldens: TinyGoldens, kills: object) -> None:
    """The neighbours come together with it, each time: none has got any further when an engine dies."""
    goldens = [tiny_goldens.of(17, number) for number in range(4)]
    of_neighbours: list[Golden] = [goldens[number % 4] for number in range(NUM_NEIGHBOURS)]

    async def run() -> None:
        async with engines.routed(queue_s=300.0) as router:
            while not engines.are_all_known:  # their first frames wait for a connection
                warm_up = [collect(router, generation(f"w{n}", (n, 1, 2))) for n in range(8)]
                await asyncio.gather(*warm_up)
            engines.dies_of(kills)  # type: ignore[arg-type]
            poison = asyncio.create_task(collect(router, generation("poison", POISON)))
            neighbours = [
                asyncio.create_task(collect(router, generation(f"n{number}", tuple(golden.prompt_ids))))
                for number, golden in enumerate(of_neighbours)
            ]
            texts = await asyncio.gather(*neighbours)
            assert [text.token_ids[0] for text in texts] == [golden.output_ids[:NUM_TOKENS] for golden in of_neighbours]
            with pytest.raises(ApiError) as caught:
                await poison
            assert caught.value.code == "quarantined"
            assert len(engines.deaths) == 3
            with pytest.raises(ApiError):
                await collect(router, generation("again", POISON))
            assert len(engines.deaths) == 3

    with dying_engines(tiny_settings("decode", tiny_goldens.folder), 4) as engines:
        asyncio.run(run())
