"""What a prompt costs here and there, in seconds, as tables; and that the cheapest way is taken."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cluster.policies.prefill_cost import LOST_S, MESSAGES_S, local_s, remote_s, why_local
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
from cluster.routing.pairing import choose_route

RULES = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)
# 1,000 tokens of 16 KB each, in blocks of 16.
NEED = Need(prompt_tokens=1_000, max_tokens=10, num_choices=1, block_size=16)
BLOCK_BYTES = 16 * 16_000
REMOTE, BUSY, SLOW, FAILED = RouteKind.REMOTE, RouteKind.BUSY_PREFILL, RouteKind.SLOW_PAIR, RouteKind.FAILED_PAIR


def D(replica_id: str = "d", **more: Any) -> DecodeCandidate:
    return DecodeCandidate(replica_id, 10_000, 10_000, 0, **{"block_bytes": BLOCK_BYTES, "tokens_per_s": 1e4} | more)


def P(replica_id: str = "p", queued: int = 0, rate: float = 1e4, **more: Any) -> PrefillCandidate:
    return PrefillCandidate(replica_id, 10_000, queued, rate, **more)


@pytest.mark.parametrize(
    ("prefill", "pair", "need", "cost_s"),
    [
        (P(), Pair(), NEED, 0.1),
        (P(queued=2_000), Pair(), NEED, 0.3),
        # 16 MB at 160 MB/s.
        (P(), Pair(160e6), NEED, 0.1 + 0.1),
        # 48 MB go before it, which takes longer than to compute it; or not.
        (P(), Pair(160e6, coming_tokens=3_000), NEED, 0.3 + 0.1),
        (P(queued=5_000), Pair(160e6, coming_tokens=3_000), NEED, 0.6 + 0.1),
        (P(), Pair(penalty_s=3.0), NEED, 0.1 + 3.0),
        (P(), Pair(), replace(NEED, num_lost=2), 0.1 + 2 * LOST_S),
        # Twice as much on another node, until the pair is measured.
        (P(node_id="b"), Pair(), NEED, 0.3),
        (P(node_id="a"), Pair(), NEED, 0.1),
        (P(node_id="b"), Pair(160e6), NEED, 0.2),
    ],
)
def test_a_prompt_at_a_prefill_replica(prefill: PrefillCandidate, pair: Pair, need: Need, cost_s: float) -> None:
    rules = replace(RULES, other_node_penalty=2.0)
    found_s = remote_s(need, prefill, D(node_id="a" if prefill.node_id else ""), rules, pair, prefill.tokens_per_s)
    assert found_s == pytest.approx(cost_s + MESSAGES_S)


@pytest.mark.parametrize(
    ("decode", "budget_s", "cost_s"),
    [
        # Nobody is there: it counts as if one were.
        (D(), 0.0, 0.1 + 0.1),
        (D(num_rows=4), 0.0, 0.1 + 5 * 0.1),
        (D(num_rows=4, queued_tokens=500), 0.0, 0.15 + 5 * 0.1),
        # A step of 0.1 s may be as long as this; or is 30 ms too long.
        (D(num_rows=4), 0.1, 0.1),
        (D(num_rows=4), 0.07, 0.1 + 5 * 0.03),
        # Steps of 256 tokens beside 6 rows: four of 25 ms; with the budget nobody waits too long.
        (D(num_rows=6, step_tokens=256), 0.0, 0.1 + 7 * 0.1),
        (D(num_rows=6, step_tokens=256), 0.025, 0.1),
        (D(num_rows=6, step_tokens=256), 0.02, 0.1 + 7 * 4 * 0.005),
        # Two of 400 tokens and the rest: 200 more, which are within it.
        (D(num_rows=6, step_tokens=406), 0.03, 0.1 + 7 * 2 * 0.01),
        # More rows than a step has room for, as it seems for a moment.
        (D(num_rows=6, step_tokens=5), 0.0, 0.1 + 7 * 0.1),
    ],
)
def test_a_prompt_beside_streams(decode: DecodeCandidate, budget_s: float, cost_s: float) -> None:
    assert local_s(NEED, decode, replace(RULES, itl_budget_s=budget_s), 1e4) == pytest.approx(cost_s)


COLD_P, COLD_D = P(rate=0.0), D(tokens_per_s=0.0)


@pytest.mark.parametrize(
    ("prefill", "decode", "pair", "need", "kind"),
    [
        # Nothing is known: the prefill pool, whatever the reads may be like.
        (COLD_P, COLD_D, Pair(), NEED, REMOTE),
        (COLD_P, COLD_D, Pair(1e3), NEED, REMOTE),
        (COLD_P, COLD_D, Pair(coming_tokens=10**6), NEED, REMOTE),
        # Unless it has failed.
        (COLD_P, COLD_D, Pair(penalty_s=1.0), NEED, FAILED),
        (COLD_P, COLD_D, Pair(), replace(NEED, num_lost=1), FAILED),
        # Idle: the pool too, with fast reads and with unknown ones.
        (P(), D(), Pair(), NEED, REMOTE),
        (P(), D(), Pair(50e9), NEED, REMOTE),
        (P(), COLD_D, Pair(50e9), NEED, REMOTE),
        (COLD_P, D(), Pair(50e9), NEED, REMOTE),
        # Reads of 16 MB take longer than the next stream waits; with more streams they do not.
        (P(), D(), Pair(100e6), NEED, SLOW),
        (P(), COLD_D, Pair(100e6), NEED, SLOW),
        (COLD_P, D(), Pair(100e6), NEED, SLOW),
        (P(), D(num_rows=1), Pair(100e6), NEED, REMOTE),
        (P(), D(num_rows=1), Pair(70e6), NEED, SLOW),
        (P(), D(num_rows=20), Pair(70e6), NEED, REMOTE),
        # Where others wait for their KV, too.
        (P(), D(num_rows=20), Pair(70e6, coming_tokens=9_000), NEED, SLOW),
        # Prefill is overrun, decode is not.
        (P(queued=20_000), D(), Pair(50e9), NEED, BUSY),
        (P(queued=20_000), D(num_rows=4), Pair(50e9), NEED, BUSY),
        (P(queued=20_000), D(num_rows=30), Pair(50e9), NEED, REMOTE),
        (P(queued=20_000), D(queued_tokens=30_000), Pair(50e9), NEED, REMOTE),
        # Decode is so slow that nothing is gained; or so fast that the pool is of no use.
        (P(), D(tokens_per_s=100.0), Pair(10e6), NEED, REMOTE),
        (P(), D(tokens_per_s=1e6), Pair(50e9), NEED, BUSY),
        # A failure counts on the scale of all else.
        (P(), D(), Pair(50e9, penalty_s=2.0), NEED, FAILED),
        (P(), D(num_rows=30), Pair(50e9, penalty_s=10.0), NEED, FAILED),
        (P(), D(num_rows=30), Pair(50e9, penalty_s=0.5), NEED, REMOTE),
        (P(), D(num_rows=200), Pair(50e9), replace(NEED, num_lost=1), FAILED),
    ],
)
def test_remote_or_local(
    prefill: PrefillCandidate, decode: DecodeCandidate, pair: Pair, need: Need, kind: RouteKind
) -> None:
    route = choose_route(need, [decode], [prefill], RULES, pairs=lambda *_: pair)
    assert isinstance(route, Route)
    assert route.kind is kind
    assert (route.prefill_id, route.avoided_id) == (("p", None) if kind is REMOTE else (None, "p"))
    # Switched off, it is as if nothing were known.
    off = choose_route(need, [decode], [prefill], replace(RULES, local_by_cost=False), pairs=lambda *_: pair)
    assert isinstance(off, Route)
    assert (off.kind, off.prefill_id, off.avoided_id) == (REMOTE, "p", None)


def test_the_floor_stays() -> None:
    """Up to local_prefill_max_tokens decode computes a prompt, however dear it is there."""
    rules = replace(RULES, local_prefill_max_tokens=1_000)
    route = choose_route(NEED, [D(num_rows=200)], [P()], rules, pairs=lambda *_: Pair(1e12))
    assert isinstance(route, Route)
    assert (route.kind, route.avoided_id) == (RouteKind.LOCAL, None)


def test_a_slow_or_failing_pair_is_left_for_another_before_decode_computes_itself() -> None:
    known = {("d", "p"): Pair(50e6), ("d", "q"): Pair(50e9), ("d", "r"): Pair(50e9, penalty_s=2.0)}
    prefills = [P("p"), P("q"), P("r")]

    def kinds(*without: str) -> tuple[RouteKind, str | None]:
        left = [prefill for prefill in prefills if prefill.replica_id not in without]
        route = choose_route(NEED, [D()], left, RULES, pairs=lambda d, p: known[d, p])
        assert isinstance(route, Route)
        return route.kind, route.prefill_id

    assert kinds() == (REMOTE, "q")
    assert kinds("q") == (SLOW, None), "p costs 0.4 s, r 2.1 s, decode itself 0.2 s"
    assert kinds("q", "p") == (FAILED, None)


def _by_prefill(pairs: Mapping[str, Pair], decode_id: str, prefill_id: str) -> Pair:
    return pairs[prefill_id]


def test_what_the_cheapest_of_all_ways_is() -> None:
    """Against the sum of its parts, by hand, for each way."""
    rng = random.Random(7)
    seen = set()
    for _ in range(4_000):
        need = replace(NEED, prompt_tokens=rng.choice((10, 300, 2_048, 9_000)), num_lost=rng.random() < 0.05)
        step_tokens, num_rows = rng.choice((512, 2_048)), rng.choice((0, 1, 5, 60))
        decode = D(num_rows=num_rows, queued_tokens=rng.choice((0, 0, 4_000)), step_tokens=step_tokens)
        rules = replace(RULES, itl_budget_s=rng.choice((0.0, 0.02, 0.1)))
        prefills = [P(name, rng.choice((0, 2_048, 30_000)), rng.choice((3e3, 1e4))) for name in "pqr"]
        pairs = {
            prefill.replica_id: Pair(
                rng.choice((0.0, 50e6, 1e9, 1e11)), rng.choice((0, 5_000)), rng.choice((0.0, 0.0, 0.0, 1.5))
            )
            for prefill in prefills
        }
        costs = {}
        for prefill in prefills:
            pair = pairs[prefill.replica_id]
            computed_s = (prefill.queued_tokens + need.prompt_tokens) / prefill.tokens_per_s
            begins_s, read_s = computed_s, 0.0
            if pair.bytes_per_s:
                begins_s = max(computed_s, pair.coming_tokens * 16_000 / pair.bytes_per_s)
                read_s = need.prompt_tokens * 16_000 / pair.bytes_per_s
            costs[prefill.replica_id] = begins_s + read_s + MESSAGES_S + pair.penalty_s + LOST_S * need.num_lost
        left, local = need.prompt_tokens, (decode.queued_tokens + need.prompt_tokens) / decode.tokens_per_s
        while left > 0:
            chunk = min(left, step_tokens - num_rows)
            local += (num_rows + 1) * max(0.0, chunk / decode.tokens_per_s - rules.itl_budget_s)
            left -= chunk
        route = choose_route(need, [decode], prefills, rules, pairs=partial(_by_prefill, pairs))
        assert isinstance(route, Route)
        chosen = local if route.prefill_id is None else costs[route.prefill_id]
        assert chosen == pytest.approx(min(local, *costs.values()))
        seen.add(route.kind)
    assert seen == {REMOTE, BUSY, SLOW, FAILED}


def test_why_names_what_made_the_difference() -> None:
    assert why_local(NEED, P(queued=50_000), D(), RULES, Pair(50e6)) is BUSY, "most of it is the wait there"
    assert why_local(NEED, P(queued=50_000), D(), RULES, Pair(50e6, penalty_s=0.1)) is FAILED
    assert unknown_pairs("d", "p") == Pair()
