"""Real engines: decode holds a part of the prompt's KV, reads only the rest, and the text is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import LocalSystem
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

NUM_BLOCKS = 3  # of a prompt of 48 tokens


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def system(request: pytest.FixtureRequest, tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    changes = {"lag": request.param, "has_prefix_cache": False}  # what is kept is pretended here
    decode, prefill = (tiny_settings(pool, tiny_goldens.folder, **changes) for pool in ("decode", "prefill"))
    system = LocalSystem(decode, prefill)
    yield system
    system.close()


class KeepsBlocks:
    """Between decode's engine and its transfers: decode's first num_kept blocks hold the prompt's KV already.

    The source's copies of these blocks are overwritten at that moment, and, once, those of `corrupted` too.
    """

    def __init__(self, system: LocalSystem, num_kept: int, corrupted: Sequence[int] = ()) -> None:
        assert system.prefill is not None
        self.num_reads = 0
        self._num_kept, self._corrupted = num_kept, list(corrupted)
        self._calls, self._transfers = system.decode.engine.calls, system.decode.transfers
        self._here, self._there = (built.engine.runner.pool.tensor for built in (system.decode, system.prefill))
        self._read_into = self._transfers.read_into

    def __enter__(self) -> KeepsBlocks:
        self._transfers.read_into = self.read_into  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._transfers.read_into  # type: ignore[method-assign]

    def read_into(self, transfer_id: str, block_ids: Sequence[int], num_kept: int) -> None:
        assert num_kept == 0
        self.num_reads += 1
        handoff = self._calls.by_id[transfer_id].handoff
        assert handoff is not None
        kept = list(handoff.block_ids[: self._num_kept])
        self._here[list(block_ids[: self._num_kept])] = self._there[kept]
        self._there[kept] = 1.0
        self._there[[handoff.block_ids[place] for place in self._corrupted]] = 1.0
        self._corrupted.clear()
        self._read_into(transfer_id, block_ids, self._num_kept)


def _read(system: LocalSystem) -> int:
    """Blocks that decode has read."""
    num_bytes = system.decode.transfers.snapshot().bytes_read
    assert num_bytes % system.decode.layout.block_bytes == 0
    return num_bytes // system.decode.layout.block_bytes


@pytest.mark.parametrize("num_kept", range(NUM_BLOCKS + 1))
def test_the_text_is_the_same_whatever_was_kept(system: LocalSystem, num_kept: int, tiny_goldens: TinyGoldens) -> None:
    golden, before = tiny_goldens.of(48, num_kept), _read(system)
    with KeepsBlocks(system, num_kept) as kept:
        (got,) = system.run([system.generation(golden.prompt_ids, 32)])
    assert kept.num_reads == 1
    assert got.token_ids[0] == golden.output_ids[:32]
    assert got.finish_reasons == {0: "length"}
    assert _read(system) - before == NUM_BLOCKS - num_kept
    assert system.decode.engine.steps.num_prefilled_tokens == 0
    asyncio.run(system.wait_for_baseline())


def test_choices_share_what_was_kept(system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    golden, sampling = tiny_goldens.of(48, 10), SamplingParams(temperature=1.0, seed=11)
    (expected,) = system.run([system.generation(golden.prompt_ids, 24, sampling, num_choices=3)])
    with KeepsBlocks(system, NUM_BLOCKS) as kept:
        (got,) = system.run([system.generation(golden.prompt_ids, 24, sampling, num_choices=3)])
    assert kept.num_reads == 1
    assert got.token_ids == expected.token_ids
    asyncio.run(system.wait_for_baseline())


def test_a_block_that_is_read_and_is_not_what_was_offered_is_noticed_and_retried(
    system: LocalSystem, tiny_goldens: TinyGoldens, caplog: pytest.LogCaptureFixture
) -> None:
    golden = tiny_goldens.of(48, 11)
    lost = system.decode.transfers.snapshot().results.get("lost: digest mismatch", 0)
    with KeepsBlocks(system, num_kept=1, corrupted=[2]):
        (got,) = system.run([system.generation(golden.prompt_ids, 32)])
    assert got.token_ids[0] == golden.output_ids[:32]
    assert system.decode.transfers.snapshot().results["lost: digest mismatch"] == lost + 1
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "kv_lost"]
    assert line.detail.startswith("block 2 of the prompt (")  # type: ignore[attr-defined]
    assert line.detail.endswith("wrong in all: 1 of 2 read")  # type: ignore[attr-defined]
    asyncio.run(system.wait_for_baseline())
