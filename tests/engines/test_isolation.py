"""One request's failure is nobody else's: batch-mates get the tokens that they get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cluster.api_error import ApiError
from scheduler.plan import StepPlan
from tests.engines.local_system import Generated, LocalSystem, collect
from tests.engines.test_engine_leaving import until
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings
from tests.golden.golden_set import Golden

POISON_PROMPT = [17] * 21


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def system(request: pytest.FixtureRequest, tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    engine = tiny_settings("decode", tiny_goldens.folder, lag=request.param, has_prefix_cache=False)
    system = LocalSystem(engine, None)
    yield system
    system.close()


@pytest.fixture(scope="module")
def goldens(tiny_goldens: TinyGoldens) -> list[Golden]:
    return [tiny_goldens.of(num_tokens) for num_tokens in (15, 16, 17, 33)]


def _poisoned_rows(plan: StepPlan, poisoned: set[str]) -> list[int]:
    names = [part.request_id for part in plan.slices for _ in part.sampled_choices]
    return [index for index, name in enumerate(names) if name in poisoned]


def _run_beside_poison(system: LocalSystem, goldens: list[Golden]) -> tuple[list[Generated], ApiError]:
    async def run() -> tuple[list[Generated], ApiError]:
        router = await system.start_router(max_retries=0)
        try:
            bad = asyncio.create_task(collect(router, system.generation(POISON_PROMPT, 32)))
            good = await asyncio.gather(*(collect(router, system.generation(g.prompt_ids, 24)) for g in goldens))
            with pytest.raises(ApiError) as raised:
                await bad
            await system.wait_for_baseline()
            return good, raised.value
        finally:
            await router.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("fault", ["raises", "not a number"])
def test_a_poisoned_request_fails_alone(
    system: LocalSystem, goldens: list[Golden], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = system.decode.engine.runner
    forward = runner._forward
    poisoned: set[str] = set()
    hits: list[str] = []

    def faulty(plan: StepPlan) -> Any:
        poisoned.update(chunk.request_id for chunk in plan.chunks if list(chunk.token_ids) == POISON_PROMPT)
        rows = _poisoned_rows(plan, poisoned)
        decoding = any(row.request_id in poisoned and row.start > 25 for row in plan.rows)
        if not (rows and decoding):
            return forward(plan)
        hits.append(fault)
        if fault == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        logits = forward(plan)
        logits[rows] = torch.nan
        return logits

    monkeypatch.setattr(runner, "_forward", faulty)
    good, error = _run_beside_poison(system, goldens)
    assert hits
    assert error.status == 500
    for golden, generated in zip(goldens, good, strict=True):
        assert generated.token_ids == {0: golden.output_ids[:24]}
    asyncio.run(until(lambda: system.decode.engine.is_healthy(max_silence_s=10)))


def test_what_a_poisoned_request_left_in_its_blocks_harms_nobody(system: LocalSystem, goldens: list[Golden]) -> None:
    """Masked keys and values are still multiplied: were they no numbers, the sums would not be either."""
    system.decode.engine.runner.pool.tensor.fill_(torch.nan)
    generated = system.run([system.generation(golden.prompt_ids, 24) for golden in goldens])
    for golden, got in zip(goldens, generated, strict=True):
        assert got.token_ids == {0: golden.output_ids[:24]}
