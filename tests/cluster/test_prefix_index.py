"""What a router believes of prefix caches: against a brute force model, and what corrects it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cluster.routing.key_feed import MAX_PARTS, KeyFeed
from cluster.routing.prefix_index import SENT_TTL_S, PrefixIndex, pieces_of, tokens_of
from replicas.messages import KeyPart, KeyPosition
from replicas.recent_part import KEYS_IN_PART, recent_part
from scheduler.recent_keys import PIECE_BLOCKS, PIECE_KEY_BYTES, RecentKeys

NAMES = ("a", "b", "c")


def table(*names: str, pieces: int = 1_000, epoch: str = "e1", fingerprint: str = "f") -> dict[str, Any]:
    peer = {"fingerprint": fingerprint, "epoch": epoch}
    return {name: {"num_blocks": pieces * PIECE_BLOCKS, "peer": peer} for name in names}


def index_of(*names: str, **more: Any) -> PrefixIndex:
    index = PrefixIndex()
    index.present([table(*(names or NAMES), **more)])
    return index


class BruteIndex:
    """The same beliefs, looked for one by one. Each replica: its pieces and when they were last used, or until when
    they are believed."""

    def __init__(self, names: Sequence[str], most: int) -> None:
        self.held: dict[str, list[int]] = {name: [] for name in names}  # least recently used first
        self.sent_until: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        self.most = most

    def has(self, name: str, key: int, now_s: float) -> bool:
        return key in self.held[name] or any(of == key and until > now_s for of, until in self.sent_until[name])

    def expected(self, keys: Sequence[int], now_s: float) -> dict[str, int]:
        found = {}
        for name in self.held:
            depth = 0
            while depth < len(keys) and self.has(name, keys[depth], now_s):
                depth += 1
            if depth:
                found[name] = depth
        return found

    def sent(self, name: str, keys: Sequence[int], now_s: float) -> None:
        sent = [(of, until) for of, until in self.sent_until[name] if of not in keys and until > now_s]
        sent += [(key, now_s + SENT_TTL_S) for key in reversed(keys) if key not in self.held[name]]
        self.sent_until[name] = sent[-self.most :]

    def unsent(self, name: str, keys: Sequence[int]) -> None:
        self.sent_until[name] = [of for of in self.sent_until[name] if of[0] not in keys]

    def holds(self, name: str, keys: Sequence[int]) -> None:
        for key in keys:
            self.held[name] = [*(of for of in self.held[name] if of != key), key]
        self.unsent(name, keys)
        self.held[name] = self.held[name][-self.most :]

    def forget(self, name: str) -> None:
        self.held[name], self.sent_until[name] = [], []


@pytest.mark.parametrize("seed", range(12))
def test_it_believes_what_a_brute_force_model_does(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.choice((3, 10, 1_000))
    index, brute = index_of(pieces=most), BruteIndex(NAMES, most)
    # Prompts that share beginnings: paths in a small tree.
    prompts = [[100 * (path >> (4 - depth)) + depth for depth in range(rng.randrange(1, 6))] for path in range(16)]
    now_s = 0.0
    for _ in range(400):
        now_s += rng.choice((0.0, 1.0, 30.0))
        name, keys = rng.choice(NAMES), rng.choice(prompts)
        match rng.randrange(5):
            case 0:
                index.expected([], now_s)  # what is late is dropped before it is used again
                index.sent(name, keys, now_s)
                brute.sent(name, keys, now_s)
            case 1:
                index.unsent(name, keys)
                brute.unsent(name, keys)
            case 2 | 3:
                index.holds(name, keys)
                brute.holds(name, keys)
            case 4 if rng.random() < 0.1:
                index.forget(name)
                brute.forget(name)
        asked = rng.choice(prompts)
        assert index.expected(asked, now_s) == brute.expected(asked, now_s)
    assert set(index._holders) == {key for of in index._replicas.values() for key in (*of.held, *of.sent)}, (
        "nothing is left behind"
    )


def test_no_more_is_hashed_than_somebody_has_and_one_piece() -> None:
    index, taken = index_of(), list[int]()

    def keys() -> Iterator[int]:
        for key in range(100):
            taken.append(key)
            yield key

    assert index.expected(keys(), 0.0) == {}
    assert taken == [0]
    taken.clear()
    index.holds("a", [0, 1, 2])
    index.holds("b", [0, 1])
    assert index.expected(keys(), 0.0) == {"a": 3, "b": 2}
    assert taken == [0, 1, 2, 3]


def test_what_was_sent_is_believed_for_a_while_and_what_was_answered_for_good() -> None:
    index = index_of()
    index.sent("a", [1, 2], 10.0)
    assert index.expected([1, 2], 10.0 + SENT_TTL_S - 0.1) == {"a": 2}
    index.sent("a", [1], 50.0)  # once more, in another prompt
    assert index.expected([1, 2], 10.0 + SENT_TTL_S) == {"a": 1}
    index.answered("a", [1], 0, 0, index.num_uses)
    assert index.expected([1, 2], 1e9) == {"a": 1}
    assert index.expected([2], 1e9) == {}


def test_an_attempt_that_fails_takes_back_what_it_sent_but_not_what_is_known() -> None:
    index = index_of()
    index.holds("a", [1])
    index.sent("a", [1, 2, 3], 0.0)
    assert index.expected([1, 2, 3], 0.0) == {"a": 3}
    index.unsent("a", [1, 2, 3])
    assert index.expected([1, 2, 3], 0.0) == {"a": 1}


def test_it_forgets_what_was_used_longest_ago_leaves_first() -> None:
    index = index_of("a", pieces=4)
    index.answered("a", [1, 2, 3], 0, 0, 0)
    index.answered("a", [7, 8], 0, 0, 0)
    assert index.expected([1, 2, 3], 0.0) == {"a": 2}, "its last piece made room"
    index.answered("a", [1, 2], 2, 2, index.num_uses)  # used again
    index.answered("a", [9], 0, 0, 0)
    assert index.expected([7, 8], 0.0) == {"a": 1}
    assert index.expected([1, 2], 0.0) == {"a": 2}


def test_where_one_piece_is_gone_those_used_before_it_are_too() -> None:
    index = index_of()
    for keys in ([1, 2], [3, 4], [5, 6]):
        index.holds("a", keys)
        index.holds("b", keys)
    before = index.num_uses
    assert index.expected([3, 4], 0.0) == {"a": 2, "b": 2}
    index.answered("a", [3, 4], 2, 0, before)
    assert index.expected([1, 2], 0.0) == {"b": 2}, "older than what was not found"
    assert index.expected([5, 6], 0.0) == {"a": 2, "b": 2}, "younger"
    assert index.expected([3, 4], 0.0) == {"a": 2, "b": 2}, "computed now"
    assert index.credit("a") < index.credit("b") == 1.0


def test_what_was_only_sent_and_is_not_there_yet_proves_nothing_of_others() -> None:
    """Two prompts with one beginning, one behind the other: the second is looked up before the first is computed."""
    index = index_of()
    index.holds("a", [1, 2])
    index.sent("a", [7, 8], 0.0)
    index.answered("a", [7, 8, 9], 2, 0, index.num_uses)
    assert index.expected([1, 2], 0.0) == {"a": 2}


def test_a_use_since_the_prediction_proves_nothing_of_what_is_older() -> None:
    """The replica's own word has overtaken its reply: it computed the piece that it did not have."""
    index = index_of()
    index.holds("a", [1, 2])
    index.holds("a", [3, 4])
    before = index.num_uses
    index.holds("a", [3, 4])
    index.answered("a", [3, 4], 2, 0, before)
    assert index.expected([1, 2], 0.0) == {"a": 2}


def test_more_than_was_expected_is_learned() -> None:
    index = index_of()
    index.answered("a", [1, 2, 3], 0, 3, 0)
    assert index.expected([1, 2, 3, 4], 0.0) == {"a": 3}
    assert index.credit("a") == 1.0


def test_a_replica_that_lies_loses_its_credit_and_can_win_it_back() -> None:
    index = index_of()
    for _ in range(40):
        index.holds("a", [1, 2, 3])  # it says so again and again
        index.answered("a", [1, 2, 3], 3, 0, index.num_uses)
    assert index.credit("a") < 0.02
    assert index.credit("b") == 1.0
    for _ in range(40):
        index.answered("a", [1, 2, 3], 3, 10**9, index.num_uses)  # however much it says
    assert 0.98 < index.credit("a") <= 1.0
    assert index.credit("nobody") == 0.0


def test_replicas_that_leave_or_start_again_are_believed_to_have_nothing() -> None:
    index = index_of()
    for name in NAMES:
        index.holds(name, [1])
    index.present([table("a", "b")])
    assert index.expected([1], 0.0) == {"a": 1, "b": 1}
    index.present([table("a"), table("b", epoch="e2")])
    assert index.expected([1], 0.0) == {"a": 1}
    index.present([table("a", fingerprint="g"), table("b", epoch="e2")])
    assert index.expected([1], 0.0) == {}
    assert sorted(index.fingerprints) == ["f", "g"]
    assert index.num_pieces == 0
    # Of one that nobody knows nothing is kept, whoever tells it.
    index.holds("c", [1])
    index.sent("c", [1], 0.0)
    index.answered("c", [1], 1, 1, 0)
    assert index.expected([1], 0.0) == {}


def test_tokens_and_pieces() -> None:
    size = 16 * PIECE_BLOCKS
    assert [tokens_of(n, 1_000, 16) for n in (0, 1, 3)] == [0, size, 3 * size]
    # The last token is always computed, and only whole blocks are found.
    assert tokens_of(2, 2 * size, 16) == 2 * size - 16
    assert tokens_of(2, 2 * size + 1, 16) == 2 * size
    assert [pieces_of(n, 16) for n in (0, size - 1, size, 2 * size + 5)] == [0, 0, 1, 2]


# -- what replicas tell ----------------------------------------------------------------------------


def tell(log: RecentKeys, *keys: int) -> None:
    for key in keys:
        log.append(key.to_bytes(16, "little"))


def take_all(feed: KeyFeed, name: str, log: RecentKeys | None) -> int:
    """As a router asks; how often it did."""
    for number in range(1, MAX_PARTS + 1):
        after = feed.position(name)
        if not feed.heard(name, recent_part(log, after), after):
            return number
    raise AssertionError("it has no end")


def test_several_routers_know_what_one_would() -> None:
    indexes = [index_of() for _ in range(4)]
    feeds = [KeyFeed(index, "prefill") for index in indexes]
    logs = {name: RecentKeys(f"log-{name}") for name in NAMES}
    rng = random.Random(1)
    every: dict[str, list[int]] = {name: [] for name in NAMES}
    for _ in range(50):
        name, keys = rng.choice(NAMES), [rng.randrange(1 << 64) for _ in range(3)]
        every[name] += keys
        tell(logs[name], *keys)
        if rng.random() < 0.3:
            take_all(rng.choice(feeds), name, logs[name])
    for feed in feeds:
        for name, log in logs.items():
            take_all(feed, name, log)
    for index in indexes:
        for name, keys in every.items():
            assert all(index.expected([key], 0.0) == {name: 1} for key in keys)


def test_a_router_that_is_new_learns_all_that_is_kept_in_parts() -> None:
    index = index_of(pieces=70_000)
    feed, log = KeyFeed(index, "prefill"), RecentKeys("e")
    tell(log, *range(70_000))
    assert take_all(feed, "a", log) == 64
    assert index.num_pieces == 65_535
    assert index.expected([69_999], 0.0) == {"a": 1}
    assert index.expected([4_464], 0.0) == {}, "fallen out"
    assert take_all(feed, "a", log) == 1
    tell(log, 5)
    take_all(feed, "a", log)
    assert index.expected([5], 0.0) == {"a": 1}


def test_a_gap_costs_what_lay_in_it_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    index = index_of()
    feed, log = KeyFeed(index, "prefill"), RecentKeys("e", 5)
    tell(log, 1, 2)
    take_all(feed, "a", log)
    tell(log, *range(10, 20))
    take_all(feed, "a", log)
    assert [key for key in range(30) if index.expected([key], 0.0)] == [1, 2, 16, 17, 18, 19]
    (gap,) = [record for record in caplog.records if getattr(record, "event", "") == "cached_keys_gap"]
    assert gap.__dict__["num_missed"] == 6, "10 to 15"


def test_a_new_epoch_is_another_cache() -> None:
    index = index_of()
    feed = KeyFeed(index, "prefill")
    first, second = RecentKeys("e1"), RecentKeys("e2")
    tell(first, 1, 2, 3)
    take_all(feed, "a", first)
    tell(second, 9)
    take_all(feed, "a", second)
    assert [key for key in (1, 2, 3, 9) if index.expected([key], 0.0)] == [9]
    assert feed.position("a") == KeyPosition("e2", 1)


@pytest.mark.parametrize("moment", ["between two questions", "before the answer", "around the answer"])
def test_one_that_is_off_the_table_for_a_moment_tells_all_again(moment: str) -> None:
    """Serve gives it new options, and puts it back before anybody has looked who is to be asked."""
    index = index_of()
    feed, log = KeyFeed(index, "decode"), RecentKeys("e")
    tell(log, 1, 2)
    take_all(feed, "a", log)
    tell(log, 3)
    after = feed.position("a")
    asked = recent_part(log, after)
    index.present([table("b", "c")])
    if moment == "around the answer":
        assert not feed.heard("a", asked, after), "it is asked when it is back"
    index.present([table("a", "b", "c")])
    if moment == "before the answer":
        assert feed.heard("a", asked, after), "it is asked again"
    take_all(feed, "a", log)
    assert [key for key in (1, 2, 3) if index.expected([key], 0.0)] == [1, 2, 3]


def test_one_that_keeps_saying_that_there_is_more_is_not_asked_on_for_ever() -> None:
    feed = KeyFeed(index_of(), "decode")

    def heard(part: KeyPart | None) -> bool:
        return feed.heard("a", part, feed.position("a"))

    assert not heard(None)
    assert heard(KeyPart("e", 0, b"x" * PIECE_KEY_BYTES, 10**6))
    assert not heard(KeyPart("e", 0, b"x" * PIECE_KEY_BYTES, 10**6)), "it does not go on"
    assert not heard(KeyPart("e", 1, b"", 10**6))


@pytest.mark.parametrize(("start", "keys", "end"), [(0, b"1234567", 1), (0, b"12345678", 0), (5, b"1" * 16, 6)])
def test_a_part_that_cannot_be_is_refused(start: int, keys: bytes, end: int) -> None:
    with pytest.raises(ValueError, match="bytes of keys"):
        KeyPart("e", start, keys, end)


def test_each_is_asked_once_a_second_and_those_of_a_large_pool_less_often() -> None:
    feed = KeyFeed(index_of(), "decode")
    asked = [(now_s, name) for now_s in (0.0, 0.5, 1.0, 1.4, 2.0) for name in feed.due(now_s, ["a", "b"])]
    assert asked == [(now_s, name) for now_s in (0.0, 1.0, 2.0) for name in "ab"]
    assert feed.due(2.1, ["a", "c"]) == ["c"]
    many = [str(number) for number in range(1_000)]
    feed = KeyFeed(index_of(), "decode")
    times_s = [now_s / 2 for now_s in range(200) if feed.due(now_s / 2, many)]
    assert times_s == [0.0, 30.0, 60.0, 90.0]
    assert KEYS_IN_PART * MAX_PARTS > 65_536


def test_of_a_replica_that_keeps_blocks_on_its_host_as_much_more_is_believed() -> None:
    """What has gone from its device is found there all the same."""
    keys = list(range(6))
    for num_host_pieces, known in ((0, 0), (3, 6)):
        told = table("a", pieces=3)
        told["a"]["num_prefix_blocks"] = (3 + num_host_pieces) * PIECE_BLOCKS
        index = PrefixIndex()
        index.present([told])
        index.holds("a", keys)
        assert index.expected(keys, 0.0).get("a", 0) == known
