"""Real engines between which no handoff comes through: each request is answered all the same, with the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from replicas.settings import FaultSettings
from tests.engines.local_system import LocalSystem, collect, touch
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

HANDOFF_S = 5.0


def test_while_handoffs_hang_decode_computes_the_prompts(tmp_path: Path, tiny_goldens: TinyGoldens) -> None:
    faults = FaultSettings(str(tmp_path))
    decode, prefill = (tiny_settings(pool, tiny_goldens.folder, testing=faults) for pool in ("decode", "prefill"))
    system = LocalSystem(decode, prefill)
    goldens = [tiny_goldens.of(33, number) for number in range(3)]

    def decided(result: str) -> float:
        (family,) = (of for of in system.metrics.snapshot() if of["name"] == "splitserve_router_decisions")
        return sum(v for suffix, of, v in family["samples"] if suffix == "_total" and of["result"] == result)

    async def run() -> None:
        router = await system.start_router(handoff_s=HANDOFF_S, max_retries=1)
        try:
            touch(tmp_path, "hold.send_handoff")
            began_s = asyncio.get_running_loop().time()
            together = [collect(router, system.generation(golden.prompt_ids, 16)) for golden in goldens]
            for golden, got in zip(goldens, await asyncio.gather(*together), strict=True):
                assert got.token_ids[0] == golden.output_ids[:16]
            assert asyncio.get_running_loop().time() - began_s > HANDOFF_S, "each has waited for its handoff"
            assert (tmp_path / "did.hold.send_handoff").exists()
            assert (decided("remote"), decided("local_failed_pair")) == (3, 3)
            for golden in goldens:  # who comes now does not: no handoff is begun
                got = await collect(router, system.generation(golden.prompt_ids, 16))
                assert got.token_ids[0] == golden.output_ids[:16]
            assert (decided("remote"), decided("local_failed_pair")) == (3, 6)
            (tmp_path / "hold.send_handoff").unlink()
            await system.wait_for_baseline()
        finally:
            await router.stop()

    try:
        asyncio.run(run())
    finally:
        system.close()


@pytest.mark.parametrize("num_prompt_tokens", [17, 300])
def test_both_ways_give_the_same_tokens(num_prompt_tokens: int, tmp_path: Path, tiny_goldens: TinyGoldens) -> None:
    """Over a slow pair decode computes the prompt, over a fast one the pool does."""
    decode, prefill = (tiny_settings(p, tiny_goldens.folder, has_prefix_cache=False) for p in ("decode", "prefill"))
    system = LocalSystem(decode, prefill)
    golden = tiny_goldens.of(num_prompt_tokens)

    async def run() -> None:
        router = await system.start_router()
        try:
            moved = []
            for bytes_per_s in (50e9, 50e9, 1.0, 1.0):
                router._view.pairs.measured("decode-0", [("prefill-0", bytes_per_s)])
                got = await collect(router, system.generation(golden.prompt_ids, 32))
                assert got.token_ids[0] == golden.output_ids[:32]
                moved.append(system.decode.transfers.snapshot().results.get("ready", 0))
            assert moved == [1, 2, 2, 2]
            assert system.decode.engine.steps.num_prefilled_tokens == 2 * num_prompt_tokens
            await system.wait_for_baseline()
        finally:
            await router.stop()

    try:
        asyncio.run(run())
    finally:
        system.close()
