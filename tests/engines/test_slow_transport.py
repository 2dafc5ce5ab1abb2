"""Over a transport made slow texts are the same, nothing fails, and everybody is told how slow it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replicas.fault_points import FaultPoints
from replicas.settings import EngineSettings, FaultSettings
from tests.engines.local_system import LocalSystem, collect
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

BYTES_PER_S = 2e6


@pytest.fixture
def system(tiny_goldens: TinyGoldens, tmp_path: Path) -> Iterator[LocalSystem]:
    (tmp_path / "slow.reads").write_text(f"{BYTES_PER_S:g}\n")

    def one(pool: str) -> EngineSettings:
        base = tiny_settings(pool, tiny_goldens.folder, testing=FaultSettings(str(tmp_path)))
        return replace(base, transfer=replace(base.transfer, max_bytes_in_flight=1))

    system = LocalSystem(one("decode"), one("prefill"))
    yield system
    system.close()


def test_slow_reads_take_their_turns_and_the_texts_are_the_same(
    system: LocalSystem, tiny_goldens: TinyGoldens, tmp_path: Path
) -> None:
    goldens = [tiny_goldens.of(300, number) for number in range(3)]
    started_s = time.monotonic()
    results = system.run([system.generation(golden.prompt_ids, 16) for golden in goldens])
    took_s = time.monotonic() - started_s
    for golden, result in zip(goldens, results, strict=True):
        assert result.token_ids[0] == golden.output_ids[:16]
    transfers = system.decode.transfers.snapshot()
    assert (tmp_path / "did.slow.reads").exists()
    assert transfers.results == {"ready": 3}
    assert took_s > transfers.bytes_read / BYTES_PER_S, "it was not slowed"
    (rate,) = transfers.rates.values()
    assert rate.replica_id == system.prefill.peer.replica_id  # type: ignore[union-attr]
    assert transfers.bytes_read / 3 / took_s < rate.bytes_per_s < 2.5 * BYTES_PER_S, "a busy machine makes it slower"
    load = system.decode.engine._load()
    assert (load.slowest_source, load.slowest_read_bytes_per_s) == (rate.replica_id, rate.bytes_per_s)
    assert (load.read_source, load.read_bytes_per_s) == (rate.replica_id, rate.bytes_per_s)
    families = {family["name"]: family for family in system.decode.metrics_snapshot()}
    ((_, labels, value),) = families["splitserve_kv_transfer_rate_bytes_per_second"]["samples"]
    assert (labels["peer"], value) == (rate.replica_id, rate.bytes_per_s)
    by_pace = {labels["pace"]: value for _, labels, value in families["splitserve_kv_transfer_pairs"]["samples"]}
    assert by_pace == {"tcp": 1.0, "network": 0.0, "device": 0.0}


@pytest.mark.parametrize("text", ["", "fast", "nan", "-1", "0", "inf"])
def test_what_is_no_rate_slows_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "slow.reads").write_text(text)
    assert FaultPoints(str(tmp_path), torch.zeros(1)).slow_reads_bytes_per_s() is None
    assert not (tmp_path / "did.slow.reads").exists()
    assert FaultPoints(None, torch.zeros(1)).slow_reads_bytes_per_s() is None


def test_what_a_slow_pair_has_told_keeps_later_prompts_at_decode(
    system: LocalSystem, tiny_goldens: TinyGoldens, tmp_path: Path
) -> None:
    """The first one takes its KV's slow way, the others do not; unless this machine stood still in the middle of its
    prompt, and computing seems to be as slow: then another one goes that way.
    """

    def decided() -> dict[str, float]:
        (family,) = (of for of in system.metrics.snapshot() if of["name"] == "splitserve_router_decisions")
        return {of["result"]: v for suffix, of, v in family["samples"] if suffix == "_total" and v}

    async def run() -> None:
        router = await system.start_router()
        try:
            for number in range(10):
                golden = tiny_goldens.of(300, number)
                got = await collect(router, system.generation(golden.prompt_ids, 16))
                assert got.token_ids[0] == golden.output_ids[:16]
                if decided().get("local_slow_pair") == 2.0:
                    break
        finally:
            await router.stop()

    asyncio.run(run())
    assert (tmp_path / "did.slow.reads").exists()
    assert decided().keys() == {"remote", "local_slow_pair"}
    assert decided()["local_slow_pair"] == 2.0
    assert system.decode.transfers.snapshot().results == {"ready": decided()["remote"]}
    assert system.decode.engine.steps.num_prefilled_tokens == 600
