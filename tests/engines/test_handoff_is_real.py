"""The KV that decode uses is the KV that moved: counters exact, corruption seen, nothing shared but by transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replicas.settings import EngineSettings, FaultSettings
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import LocalSystem, touch
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

PATIENCE_S = 120.0


def _system(model: Path, fault_dir: Path, lag: int = 0, verify: bool = True) -> LocalSystem:
    def one(pool: str) -> EngineSettings:
        testing = FaultSettings(str(fault_dir))
        base = tiny_settings(pool, model, lag=lag, testing=testing, has_prefix_cache=False)  # all is read, each time
        return replace(base, transfer=replace(base.transfer, verify_digest=verify))

    return LocalSystem(one("decode"), one("prefill"))


@pytest.fixture(scope="module")
def fault_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def system(request: pytest.FixtureRequest, tiny_goldens: TinyGoldens, fault_dir: Path) -> Iterator[LocalSystem]:
    system = _system(tiny_goldens.folder, fault_dir, lag=request.param)
    yield system
    system.close()


@pytest.fixture(autouse=True)
def _clean_faults(fault_dir: Path) -> None:
    for path in fault_dir.iterdir():
        path.unlink()


def _counts(system: LocalSystem) -> tuple[int, int, int, int]:
    batch, transfers = system.decode.engine.scheduler.batch, system.decode.transfers.snapshot()
    return (
        batch.num_forwarded_tokens,
        batch.num_surplus_tokens,
        transfers.results.get("ready", 0),
        transfers.bytes_read,
    )


def test_decode_forwards_exactly_the_tokens_after_the_first(system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(300)
    forwarded, surplus, ready, bytes_read = _counts(system)
    (got,) = system.run([system.generation(golden.prompt_ids, 64)])
    golden.check(got.token_ids[0])
    assert got.finish_reasons == {0: "length"}
    new_forwarded, new_surplus, new_ready, new_bytes = _counts(system)
    assert new_forwarded - forwarded == 63
    assert new_surplus - surplus == 0
    assert new_ready - ready == 1
    assert new_bytes - bytes_read == 19 * system.decode.layout.block_bytes  # ceil(300 / 16) blocks
    assert system.decode.engine.steps.num_prefilled_tokens == 0


def test_a_stop_token_leaves_at_most_lag_surplus_tokens(system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(32)
    stop = next(t for i, t in enumerate(golden.output_ids) if i >= 4 and t not in golden.output_ids[:i])
    end = golden.output_ids.index(stop)
    forwarded, surplus, _, _ = _counts(system)
    (got,) = system.run([system.generation(golden.prompt_ids, 64, stop_token_ids=frozenset({stop}))])
    assert got.token_ids[0] == golden.output_ids[: end + 1]
    assert got.finish_reasons == {0: "stop"}
    asyncio.run(system.wait_for_baseline())
    assert _counts(system)[0] - forwarded == end
    assert _counts(system)[1] - surplus == system.decode.settings.lag


def test_one_token_moves_nothing(system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(17)
    before = _counts(system)
    (got,) = system.run([system.generation(golden.prompt_ids, 1)])
    assert got.token_ids == {0: golden.output_ids[:1]}
    assert got.finish_reasons == {0: "length"}
    assert _counts(system) == before
    asyncio.run(system.wait_for_baseline())


def test_a_first_token_that_stops_moves_nothing(system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(17)
    before = _counts(system)
    (got,) = system.run([system.generation(golden.prompt_ids, 9, stop_token_ids=frozenset(golden.output_ids[:1]))])
    assert got.token_ids == {0: golden.output_ids[:1]}
    assert got.finish_reasons == {0: "stop"}
    assert _counts(system) == before
    asyncio.run(system.wait_for_baseline())


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33])
def test_block_boundaries(system: LocalSystem, num_tokens: int, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(num_tokens)
    (got,) = system.run([system.generation(golden.prompt_ids, 40)])
    assert got.token_ids[0] == golden.output_ids[:40]


def test_choices_share_one_transfer(system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(33)
    sampling = SamplingParams(temperature=1.0, seed=11)
    _, _, ready, bytes_read = _counts(system)
    (together,) = system.run([system.generation(golden.prompt_ids, 24, sampling, num_choices=3)])
    assert _counts(system)[2] - ready == 1
    assert _counts(system)[3] - bytes_read == 3 * system.decode.layout.block_bytes
    assert len({tuple(ids) for ids in together.token_ids.values()}) == 3
    (again,) = system.run([system.generation(golden.prompt_ids, 24, sampling, num_choices=3)])
    assert again.token_ids == together.token_ids
    asyncio.run(system.wait_for_baseline())


def test_corruption_is_refused_and_retried(system: LocalSystem, fault_dir: Path, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(48)
    corrupt = system.decode.transfers.snapshot().results.get("lost: digest mismatch", 0)
    touch(fault_dir, "corrupt.received")
    (got,) = system.run([system.generation(golden.prompt_ids, 32)])
    assert (fault_dir / "did.corrupt.received").exists()
    assert system.decode.transfers.snapshot().results["lost: digest mismatch"] == corrupt + 1
    assert got.token_ids[0] == golden.output_ids[:32]
    asyncio.run(system.wait_for_baseline())


def test_zeroing_the_source_after_confirmation_changes_nothing(
    system: LocalSystem, fault_dir: Path, tiny_goldens: TinyGoldens
) -> None:
    golden = tiny_goldens.of(48)
    touch(fault_dir, "zero.source")
    (got,) = system.run([system.generation(golden.prompt_ids, 32)])
    deadline_s = time.monotonic() + PATIENCE_S
    while not (fault_dir / "did.zero.source").exists():  # prefill does so once it has told decode
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.01)
    assert got.token_ids[0] == golden.output_ids[:32]


def test_corruption_changes_the_output_when_nobody_verifies(tmp_path: Path, tiny_goldens: TinyGoldens) -> None:
    """The counter-test: it is these very blocks that decode computes on."""
    system = _system(tiny_goldens.folder, tmp_path, verify=False)
    try:
        golden = tiny_goldens.of(48)
        (clean,) = system.run([system.generation(golden.prompt_ids, 32)])
        assert clean.token_ids[0] == golden.output_ids[:32]
        touch(tmp_path, "corrupt.received")
        (got,) = system.run([system.generation(golden.prompt_ids, 32)])
        assert (tmp_path / "did.corrupt.received").exists()
        assert got.token_ids[0] != golden.output_ids[:32]
    finally:
        system.close()
