"""The log of what a prefix cache took in: runs from any position, gaps, epochs, and a reader beside the writer."""

from __future__ import annotations

import random
import struct
import threading

import pytest

from scheduler.recent_keys import PIECE_KEY_BYTES, KeyRun, RecentKeys, piece_number


def block_key(number: int) -> bytes:
    """Of a block: the first half is its piece's."""
    return number.to_bytes(PIECE_KEY_BYTES, "little") + b"\xff" * 8


def numbers(run: KeyRun) -> list[int]:
    return list(struct.unpack(f"<{len(run.keys) // PIECE_KEY_BYTES}Q", run.keys))


def test_a_piece_is_named_by_the_first_half_of_its_blocks_key() -> None:
    assert piece_number(block_key(77)) == piece_number(block_key(77)[:PIECE_KEY_BYTES]) == 77


@pytest.mark.parametrize("size", [2, 3, 8, 100])
def test_what_is_read_is_what_was_written(size: int) -> None:
    """Against a list of all that ever was."""
    rng = random.Random(size)
    log, every = RecentKeys("e", size), list[int]()
    for _ in range(500):
        for _ in range(rng.randrange(4)):
            every.append(rng.randrange(1 << 64))
            log.append(block_key(every[-1]))
        position, limit = rng.randrange(len(every) + 1), rng.randrange(1, 2 * size)
        run = log.since("e", position, limit)
        # One slot counts as being written.
        oldest = max(0, len(every) - size + 1)
        assert run.start == max(position, oldest)
        assert numbers(run) == every[run.start : run.start + limit]
        assert run.end == len(every)


def test_an_unknown_position_begins_with_the_oldest_that_is_kept() -> None:
    log = RecentKeys("e2", 4)
    for number in range(10):
        log.append(block_key(number))
    assert [log.since(*of, 9).start for of in (("e1", 8), ("", 0), ("e2", 11), ("e2", 0), ("e2", 8))] == [7, 7, 7, 7, 8]
    assert log.since("e2", 10, 9) == KeyRun(10, b"", 10), "all is known"


def test_a_reader_beside_the_writer_sees_no_key_at_another_ones_position() -> None:
    """The ring is so short that the writer laps the reader over and over."""
    log, is_over = RecentKeys("e", 64), threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            log.append(block_key(number))
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        position, num_read = 0, 0
        while num_read < 20_000:
            run = log.since("e", position, 64)
            assert numbers(run) == list(range(run.start, run.start + len(numbers(run))))
            assert run.start >= position
            position = run.start + len(numbers(run))
            num_read += len(numbers(run))
    finally:
        is_over.set()
        writer.join()
