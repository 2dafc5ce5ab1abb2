"""Running requests are moved between decode engines again and again: their texts are those of transformers, nothing is
computed twice, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engines.moving_system import MovingSystem
from tests.engines.tiny_goldens import TinyGoldens

PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(5 + 19 * number)] for number in range(6)]
LAYOUTS = ["1p2d lag 0", "1p2d lag 1", "colocated lag 0", "colocated lag 1", "two_lanes lag 1"]


@contextmanager
def running(folder: Any, layout: str, **changes: Any) -> Iterator[MovingSystem]:
    changes = {"lag": int(layout[-1]), "max_batch_tokens": 64, **changes}
    if "two_lanes" in layout:
        changes["layout"] = "two_lanes"
    system = MovingSystem.tiny(folder, has_prefill="1p" in layout, **changes)
    yield system
    asyncio.run(system.wait_for_baseline())
    system.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def system(request: pytest.FixtureRequest, tiny_goldens: TinyGoldens) -> Iterator[MovingSystem]:
    with running(tiny_goldens.folder, request.param) as system:
        yield system


def test_texts_are_those_of_transformers(system: MovingSystem, tiny_goldens: TinyGoldens) -> None:
    goldens = [tiny_goldens.of(length, number) for length in (1, 15, 16, 17, 70) for number in range(2)]
    before = system.moved()
    asked = [system.generation(golden.prompt_ids, len(golden.output_ids)) for golden in goldens]
    for golden, got in zip(goldens, system.run_moving(asked), strict=True):
        assert got.token_ids == {0: golden.output_ids}
        assert got.finish_reasons == {0: "length"}
    assert system.moved() > before + 5
    assert not system.moved("lost")
