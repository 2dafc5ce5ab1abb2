"""Where requests go, as tables. D(...) and P(...) are candidates; the policy is a pure function of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.routing_policy import (
    DecodeCandidate,
    Need,
    NeverFits,
    PrefillCandidate,
    Route,
    RouteKind,
    RoutingRules,
    Unavailable,
    choose_decode,
    choose_prefill,
    choose_route,
)

SPLIT = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)
SHORT_LOCAL = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=8, fallback_to_decode=False)
FALLBACK = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=True)
COLOCATED = RoutingRules(has_prefill_pool=False, local_prefill_max_tokens=0, fallback_to_decode=False)


def D(replica_id: str, free: int, *, total: int = 100, mine: int = 0, queued: int = 0) -> DecodeCandidate:
    return DecodeCandidate(replica_id, total, free, mine, queued)


def P(replica_id: str, queued: int, *, total: int = 100) -> PrefillCandidate:
    return PrefillCandidate(replica_id, total, queued)


@pytest.mark.parametrize(
    ("candidates", "excluded", "chosen"),
    [
        ([D("a", 10)], "", "a"),
        ([D("a", 10), D("b", 50)], "", "b"),
        ([D("a", 50, mine=3), D("b", 50, mine=1)], "", "b"),
        ([D("a", 50, mine=1), D("b", 50, mine=1)], "", "b"),  # any rule will do, but always the same one
        # Room is what counts, not whether it is enough: the one with the most is the first to have enough.
        ([D("a", 3), D("b", -5)], "", "a"),
        # Memory helps nobody who stands behind a queue (for slots, or of someone larger).
        ([D("a", 90, queued=1), D("b", 20)], "", "b"),
        ([D("a", 90, queued=1), D("b", 19)], "", "a"),
        ([D("a", 90, queued=1), D("b", 80, queued=5)], "", "a"),
        # Too small for ever is no candidate, however empty.
        ([D("a", 19, total=19), D("b", 0)], "", "b"),
        # Who failed this request is taken only when there is no other, were it without room.
        ([D("a", 90), D("b", 0)], "a", "b"),
        ([D("a", 90), D("b", 80), D("c", 70)], "ab", "c"),
        ([D("a", 90), D("b", 80)], "ab", "a"),
        ([D("a", 90), D("b", 19, total=19)], "a", "a"),
    ],
)
def test_decode_replica_by_room(candidates: Sequence[DecodeCandidate], excluded: str, chosen: str) -> None:
    for order in (candidates, candidates[::-1]):
        decided = choose_decode(20, order, set(excluded))
        assert isinstance(decided, DecodeCandidate)
        assert decided.replica_id == chosen


@pytest.mark.parametrize(
    ("candidates", "excluded", "chosen"),
    [
        ([P("a", 10), P("b", 5)], "", "b"),
        ([P("a", 5), P("b", 5)], "", "a"),
        ([P("a", 500), P("b", 0, total=19)], "", "a"),
        ([P("a", 500), P("b", 0)], "b", "a"),
        ([P("a", 500), P("b", 0)], "ab", "b"),
    ],
)
def test_prefill_replica_by_queue(candidates: Sequence[PrefillCandidate], excluded: str, chosen: str) -> None:
    for order in (candidates, candidates[::-1]):
        decided = choose_prefill(20, order, set(excluded))
        assert isinstance(decided, PrefillCandidate)
        assert decided.replica_id == chosen


def test_nobody_is_large_enough_or_there() -> None:
    assert choose_decode(20, [D("a", 0, total=19), D("b", 0, total=7)]) == NeverFits("decode", 20, 19)
    assert choose_prefill(20, [P("a", 0, total=19)]) == NeverFits("prefill", 20, 19)
    assert choose_decode(20, []) == Unavailable("decode")
    assert choose_prefill(20, []) == Unavailable("prefill")
    assert choose_decode(20, [D("a", 20, total=20)]) == D("a", 20, total=20)


NEED = Need(decode_blocks=20, prefill_blocks=10, prompt_tokens=9)
REMOTE, LOCAL, FELL_BACK = RouteKind.REMOTE, RouteKind.LOCAL, RouteKind.FALLBACK


@pytest.mark.parametrize(
    ("rules", "prefills", "decided"),
    [
        (SPLIT, [P("p", 0)], Route(REMOTE, "d", "p", False)),
        (SPLIT, [], Unavailable("prefill")),
        (SPLIT, [P("p", 0, total=9)], NeverFits("prefill", 10, 9)),
        (SHORT_LOCAL, [P("p", 0)], Route(REMOTE, "d", "p", False)),
        (FALLBACK, [P("p", 0)], Route(REMOTE, "d", "p", False)),
        (FALLBACK, [], Route(FELL_BACK, "d", None, False)),
        # Too long a prompt for the prefill pool is the client's affair, not a failure to fall back from.
        (FALLBACK, [P("p", 0, total=9)], NeverFits("prefill", 10, 9)),
        (COLOCATED, [], Route(LOCAL, "d", None, False)),
    ],
)
def test_who_prefills(rules: RoutingRules, prefills: list[PrefillCandidate], decided: object) -> None:
    assert choose_route(NEED, [D("d", 20)], prefills, rules) == decided


@pytest.mark.parametrize(("prompt_tokens", "kind"), [(1, LOCAL), (8, LOCAL), (9, REMOTE)])
def test_short_prompts_stay_with_decode(prompt_tokens: int, kind: RouteKind) -> None:
    route = choose_route(Need(20, 10, prompt_tokens), [D("d", 20)], [P("p", 0)], SHORT_LOCAL)
    assert isinstance(route, Route)
    assert route.kind is kind


@pytest.mark.parametrize(
    ("candidate", "must_wait"),
    [(D("d", 20), False), (D("d", 19), True), (D("d", -1), True), (D("d", 100, queued=1), True)],
)
@pytest.mark.parametrize("rules", [SPLIT, COLOCATED])
def test_must_wait(candidate: DecodeCandidate, must_wait: bool, rules: RoutingRules) -> None:
    route = choose_route(NEED, [candidate], [P("p", 0)], rules)
    assert isinstance(route, Route)
    assert route.must_wait is must_wait


@pytest.mark.parametrize("rules", [SPLIT, SHORT_LOCAL, FALLBACK, COLOCATED])
def test_without_decode_nothing_goes(rules: RoutingRules) -> None:
    assert choose_route(NEED, [], [P("p", 0)], rules) == Unavailable("decode")
    assert choose_route(NEED, [D("d", 0, total=19)], [P("p", 0)], rules) == NeverFits("decode", 20, 19)


def test_an_excluded_pair_is_avoided_on_both_sides() -> None:
    route = choose_route(NEED, [D("d", 90), D("e", 50)], [P("p", 0), P("q", 9)], SPLIT, {"d", "p"})
    assert route == Route(REMOTE, "e", "q", False)
