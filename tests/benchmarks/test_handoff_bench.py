"""The script that times handoffs on a card, here on CPUs: the bytes are the source's, its figures its reads'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.gpu.handoff import MIB, HandoffPair, ReadTimes


@pytest.fixture(scope="module")
def pair() -> Iterator[HandoffPair]:
    pair = HandoffPair("cpu", num_blocks=9, block_bytes=MIB // 4)
    yield pair
    pair.close()


@pytest.mark.slow
def test_it_reads_what_it_says(pair: HandoffPair) -> None:
    times = pair.times(num_blocks=4, repeats=3)
    pair.check(4)
    assert times.num_bytes == MIB
    assert len(times.later_s) == 3
    assert min(times.first_s, *times.later_s) > 0.0
    pair.pool[2, 7] += 1
    with pytest.raises(AssertionError, match="not the source's"):
        pair.check(4)
    pair.pool[5] = 1
    pair.read(4)
    with pytest.raises(AssertionError, match="behind the blocks"):
        pair.check(4)


@pytest.mark.slow
def test_it_measures_a_pair_as_a_replica_does(pair: HandoffPair) -> None:
    before = pair.pool.clone()
    rate = pair.probe()
    assert rate.replica_id == "source"
    assert 0.0 < rate.bytes_per_s < 1e12
    assert (pair.pool == before).all()


def test_a_row_is_made_of_the_median_and_the_best() -> None:
    times = ReadTimes(32 * MIB, 0.5, (0.25, 0.03125, 0.0625))
    assert times.row() == ("32", "500.000", "62.500", "31.250", "0.50")
