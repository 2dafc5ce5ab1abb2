"""KV moves between two processes on one card, at the card's speed: by CUDA IPC, whether there is NVLink or not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from benchmarks.gpu.handoff import MIB, HandoffPair
from replicas.kv.pair_rate import Pace

# Not by importing it: that would close the handlers of all logs.
pytestmark = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="NIXL is not installed")

BLOCK_BYTES = 2 * MIB
NUM_BLOCKS = 128  # 256 MiB, which is 2,048 tokens of Llama-3.1-8B


@pytest.fixture(scope="module")
def pair() -> Iterator[HandoffPair]:
    """A pool of 256 MiB and a block more on both sides."""
    pair = HandoffPair("cuda", NUM_BLOCKS + 1, BLOCK_BYTES)
    yield pair
    pair.close()


def test_the_bytes_are_the_source_s_and_come_faster_than_by_tcp(pair: HandoffPair) -> None:
    times = pair.times(NUM_BLOCKS, repeats=10)
    pair.check(NUM_BLOCKS)
    gb_per_s = NUM_BLOCKS * BLOCK_BYTES / min(times.later_s) / 1e9
    print(f"256 MiB: first {1e3 * times.first_s:.2f} ms, best {1e3 * min(times.later_s):.2f} ms, {gb_per_s:.0f} GB/s")
    assert gb_per_s > 10.0, "it was read over TCP, or through the host"


def test_a_probe_finds_that_out_and_touches_no_block(pair: HandoffPair) -> None:
    before = pair.pool.clone()
    rate = pair.probe()
    print(f"probe: {rate.bytes_per_s / 1e9:.1f} GB/s, {1e3 * rate.latency_s:.2f} ms")
    assert rate.pace is Pace.DEVICE
    assert (pair.pool == before).all()


def test_the_memory_of_a_source_that_has_gone_is_free_again() -> None:
    """Whoever has read from it would else keep its pool, and a new one in its place would find no room."""
    pair = HandoffPair("cuda", 4 * NUM_BLOCKS, BLOCK_BYTES)
    try:
        pair.times(NUM_BLOCKS, repeats=1)
        pair.check(NUM_BLOCKS)
        before, _ = torch.cuda.mem_get_info()
        pair.end_source()
        pair.reader.remove_peer(pair.peer.agent_name)
        after, _ = torch.cuda.mem_get_info()
        print(f"{(after - before) / MIB:.0f} MiB are free again, of a pool of {pair.pool.nbytes / MIB:.0f}")
        assert after - before >= pair.pool.nbytes
    finally:
        pair.close()
