"""What is unsent stays, what was sent is kept while there is room."""

from __future__ import annotations

import random

from replicas.channels.frame_ring import FrameRing

ALL = 1 << 30


def test_the_ring_is_bounded_by_what_was_sent() -> None:
    ring = FrameRing(first_seq=5, max_frames=3, max_bytes=100)
    for number in range(10):
        ring.keep(b"%d" % number, is_owed=number == 2)
    assert (ring.oldest_seq, ring.next_seq, ring.num_unsent_bytes) == (5, 15, 10)
    assert ring.owes_items
    for number in range(8):
        assert ring.first_unsent == b"%d" % number
        ring.sent()
    assert not ring.owes_items
    assert (ring.oldest_seq, ring.num_unsent_bytes) == (12, 2)  # the last three: one that was sent, two to come
    assert ring.payloads(13, ALL) == [b"8", b"9"]
    # Until they are more than so many bytes, and never none.
    assert (ring.payloads(12, 1), ring.payloads(12, 0), ring.payloads(15, 0)) == ([b"7", b"8"], [b"7"], [])
    ring.keep(b"x" * 1000, is_owed=True)  # larger than the bound
    for _ in range(3):
        ring.sent()
    assert (ring.first_unsent, ring.has_unsent, ring.payloads(ring.oldest_seq, ALL)) == (None, False, [b"x" * 1000])


def test_any_order_of_keeping_and_sending_loses_nothing_that_is_unsent() -> None:
    rng = random.Random(3)
    ring = FrameRing(0, max_frames=4, max_bytes=60)
    unsent: list[bytes] = []
    for number in range(2000):
        if unsent and rng.random() < 0.5:
            assert ring.first_unsent == unsent.pop(0)
            ring.sent()
        else:
            unsent.append(b"%d" % number + b"." * rng.randrange(30))
            ring.keep(unsent[-1], is_owed=bool(number % 2))
        assert ring.has_unsent == bool(unsent)
        assert ring.num_unsent_bytes == sum(map(len, unsent))
        assert ring.payloads(ring.next_seq - len(unsent), ALL) == unsent
        sent = ring.payloads(ring.oldest_seq, ALL)[: -len(unsent) or None]
        assert len(sent) + len(unsent) <= max(4, len(unsent), 1)
