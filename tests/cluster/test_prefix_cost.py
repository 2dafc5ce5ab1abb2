"""What is in a prefix cache costs nothing: tables of seconds, and where requests go for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.policies.memory_then_queue import roomiest
from cluster.policies.prefill_cost import MESSAGES_S, local_s, remote_s
from cluster.policies.routing_policy import (
    DecodeCandidate,
    Need,
    Pair,
    PrefillCandidate,
    Route,
    RouteKind,
    RoutingRules,
    unknown_pairs,
)
from cluster.routing.pairing import choose_decode, choose_route

RULES = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)
COLOCATED = replace(RULES, has_prefill_pool=False)
# 1,000 tokens of 16 KB each, in blocks of 16: 0.1 s to compute, and at 160 MB/s to read.
NEED = Need(prompt_tokens=1_000, max_tokens=101, num_choices=1, block_size=16)
REMOTE, LOCAL, CACHED, BUSY = RouteKind.REMOTE, RouteKind.LOCAL, RouteKind.CACHED, RouteKind.BUSY_PREFILL
SLOW_WAY = Pair(160e6)


def D(replica_id: str = "d", free: int = 10_000, **more: Any) -> DecodeCandidate:
    return DecodeCandidate(replica_id, 10_000, free, 0, **{"block_bytes": 16 * 16_000, "tokens_per_s": 1e4} | more)


def P(replica_id: str = "p", queued: int = 0, rate: float = 1e4, **more: Any) -> PrefillCandidate:
    return PrefillCandidate(replica_id, 10_000, queued, rate, **more)


def having(**cached: int) -> Need:
    return replace(NEED, cached=cached)


@pytest.mark.parametrize(
    ("cached", "queued", "pair", "penalty", "cost_s"),
    [
        ({}, 0, Pair(), 0.0, 0.1),
        # What prefill has is not computed, what decode has is not read.
        ({"p": 600}, 0, Pair(), 0.0, 0.04),
        ({"p": 600}, 2_000, Pair(), 0.0, 0.24),
        ({"d": 600}, 0, Pair(), 0.0, 0.1),
        ({"d": 600}, 0, SLOW_WAY, 0.0, 0.1 + 0.04),
        ({"p": 600, "d": 600}, 0, SLOW_WAY, 0.0, 0.04 + 0.04),
        ({"p": 600, "d": 600}, 0, SLOW_WAY._replace(coming_tokens=900), 0.0, 0.09 + 0.04),
        # What others have is no use.
        ({"q": 999, "e": 999}, 0, SLOW_WAY, 0.0, 0.2),
        # The longer way to another node is that of what is read.
        ({"d": 600}, 0, Pair(), 2.0, 0.1 + 2 * 0.04),
        ({"p": 600}, 0, Pair(), 2.0, 0.04 + 2 * 0.1),
    ],
)
def test_over_a_prefill_replica(cached: dict[str, int], queued: int, pair: Pair, penalty: float, cost_s: float) -> None:
    rules = replace(RULES, other_node_penalty=penalty)
    prefill, decode = P(queued=queued, node_id="a"), D(node_id="b")
    found_s = remote_s(having(**cached), prefill, decode, rules, pair, prefill.tokens_per_s)
    assert found_s == pytest.approx(cost_s + MESSAGES_S)


@pytest.mark.parametrize(
    ("cached", "decode", "budget_s", "cost_s"),
    [
        ({}, D(), 0.0, 0.1 + 0.1),
        ({"d": 900}, D(), 0.0, 0.01 + 0.01),
        ({"d": 900}, D(num_rows=4, queued_tokens=500), 0.0, 0.05 + 0.01 + 5 * 0.01),
        ({"p": 900}, D(), 0.0, 0.1 + 0.1),
        # A step of 10 ms is within the budget.
        ({"d": 900}, D(num_rows=4), 0.01, 0.01),
        # Two full steps of 256 tokens beside 6 rows instead of four.
        ({"d": 488}, D(num_rows=6, step_tokens=262), 0.0156, 0.0512 + 7 * 2 * 0.01),
    ],
)
def test_beside_streams(cached: dict[str, int], decode: DecodeCandidate, budget_s: float, cost_s: float) -> None:
    assert local_s(having(**cached), decode, replace(RULES, itl_budget_s=budget_s), 1e4) == pytest.approx(cost_s)


@pytest.mark.parametrize(
    ("cached", "decode", "prefills", "local_max", "kind", "prefill_id"),
    [
        ({}, D(), [P("p"), P("q", 10)], 0, REMOTE, "p"),
        # Load first: a queue that is longer than what is saved is not joined.
        ({"q": 900}, D(), [P("p"), P("q", 800)], 0, REMOTE, "q"),
        ({"q": 900}, D(), [P("p"), P("q", 1_000)], 0, REMOTE, "p"),
        # Faster, but without any of it.
        ({"q": 900}, D(), [P("p", rate=5e4), P("q")], 0, REMOTE, "q"),
        ({"q": 700}, D(), [P("p", rate=5e4), P("q")], 0, REMOTE, "p"),
        # Decode has most of it: nothing is gained by going elsewhere. Others at decode wait for the rest too.
        ({"d": 980}, D(), [P("p")], 0, CACHED, None),
        ({"d": 980}, D(num_rows=60), [P("p")], 0, REMOTE, "p"),
        # But where prefill has as much, and decode would hold up streams.
        ({"d": 960, "p": 960}, D(num_rows=10), [P("p")], 0, REMOTE, "p"),
        ({"d": 960, "p": 960}, D(num_rows=0), [P("p")], 0, REMOTE, "p"),
        # It would have gone there without a cache.
        ({"d": 100}, D(), [P("p", 20_000)], 0, BUSY, None),
        # Short by what is left of it.
        ({"d": 900}, D(num_rows=500), [P("p")], 100, LOCAL, None),
        ({"d": 899}, D(num_rows=500), [P("p")], 100, REMOTE, "p"),
        ({"p": 999}, D(num_rows=500), [P("p")], 100, REMOTE, "p"),
    ],
)
def test_where_it_is_computed(
    cached: dict[str, int],
    decode: DecodeCandidate,
    prefills: Sequence[PrefillCandidate],
    local_max: int,
    kind: RouteKind,
    prefill_id: str | None,
) -> None:
    rules = replace(RULES, local_prefill_max_tokens=local_max)
    route = choose_route(having(**cached), [decode], prefills, rules, pairs=lambda *_: Pair(50e9))
    assert isinstance(route, Route)
    assert (route.kind, route.prefill_id) == (kind, prefill_id)
    assert route.kept_tokens == cached.get("d", 0)
    assert route.cached_tokens == cached.get(prefill_id or "d", 0)


# 100 rows of 10 ms and 69 blocks: of 1,000 free blocks they are 69 ms, of 10,000 it is 6.9 ms.
STEP_S = 0.01


@pytest.mark.parametrize(
    ("cached", "pair", "decodes", "chosen"),
    [
        # A read of 100 ms is saved, or half of one.
        ({"a": 992}, SLOW_WAY, [D("a", 1_000), D("b", 10_000)], "a"),
        ({"a": 496}, SLOW_WAY, [D("a", 1_000), D("b", 10_000)], "b"),
        ({"a": 496}, SLOW_WAY, [D("a", 2_000), D("b", 10_000)], "a"),
        # Where reads are quick, room is what counts.
        ({"a": 992}, Pair(50e9), [D("a", 9_000), D("b", 10_000)], "b"),
        ({"a": 992}, Pair(50e9), [D("a", 9_999), D("b", 10_000)], "a"),
        # Of two that have it the one with more room, and of a little more of it no more than it is worth.
        ({"a": 496, "b": 496}, SLOW_WAY, [D("a", 5_000), D("b", 6_000), D("c", 9_000)], "b"),
        ({"a": 512, "b": 496}, SLOW_WAY, [D("a", 3_000), D("b", 6_000)], "b"),
        # Who must wait comes behind those that need not.
        ({"a": 992}, SLOW_WAY, [D("a", 60), D("b", 1_000)], "b"),
        ({"a": 992}, SLOW_WAY, [D("a", 9_000, num_queued=1), D("b", 1_000)], "b"),
        # What nobody has decides nothing: the most room.
        ({"z": 992}, SLOW_WAY, [D("a", 1_000), D("b", 1_001)], "b"),
    ],
)
def test_decode_by_room_and_by_what_it_has(
    cached: dict[str, int], pair: Pair, decodes: list[DecodeCandidate], chosen: str
) -> None:
    decodes = [found._replace(step_s=STEP_S) for found in decodes]
    # Streams there make it dear to compute the prompt at decode.
    decodes = [found._replace(num_rows=200) for found in decodes]
    for order in (decodes, decodes[::-1]):
        decided = choose_decode(having(**cached), order, RULES, (), [P()], lambda *_: pair)
        assert isinstance(decided, DecodeCandidate)
        assert decided.replica_id == chosen


@pytest.mark.parametrize(
    ("cached", "decodes", "chosen"),
    [
        ({}, [D("a", 9_000), D("b", 9_001)], "b"),
        # 992 tokens less to compute, which ten streams wait for too.
        ({"a": 992}, [D("a", 1_000, num_rows=10), D("b", 10_000, num_rows=10)], "a"),
        # But not behind a queue that takes longer.
        ({"a": 992}, [D("a", 9_000, queued_tokens=15_000, num_rows=10), D("b", 10_000, num_rows=10)], "b"),
        ({"a": 992}, [D("a", 9_000, queued_tokens=9_000, num_rows=10), D("b", 10_000, num_rows=10)], "a"),
        ({"a": 992}, [D("a", 10, num_rows=10), D("b", 10_000, num_rows=10)], "b"),
    ],
)
def test_colocated_replicas_by_what_they_have(
    cached: dict[str, int], decodes: list[DecodeCandidate], chosen: str
) -> None:
    decodes = [found._replace(step_s=STEP_S) for found in decodes]
    route = choose_route(having(**cached), decodes, [], COLOCATED)
    assert isinstance(route, Route)
    assert (route.kind, route.decode_id, route.kept_tokens) == (LOCAL, chosen, cached.get(chosen, 0))


def test_without_anything_cached_decode_is_chosen_as_ever() -> None:
    """The order of the seconds is that of the room, so that a hit of one token's worth turns nothing over."""
    decodes = [D(f"d{number}", 1_000 + 7 * (number * 5 % 9), step_s=STEP_S, num_rows=50) for number in range(9)]
    plain = roomiest(NEED, decodes, RULES, [P()], unknown_pairs)
    # Somebody is known who has something, and is no candidate's better.
    other = roomiest(having(d0=0), decodes, RULES, [P()], unknown_pairs)
    order = sorted(range(9), key=lambda index: plain[index])
    assert sorted(range(9), key=lambda index: other[index]) == order
