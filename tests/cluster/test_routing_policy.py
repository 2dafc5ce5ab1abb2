"""Where requests go, as tables. D(...) and P(...) are candidates; the policy is a pure function of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.config.root import Config
from cluster.policies.policy_table import POLICIES
from cluster.policies.routing_policy import (
    Costs,
    DecodeCandidate,
    Need,
    NeverFits,
    PrefillCandidate,
    Route,
    RouteKind,
    RoutingPolicy,
    RoutingRules,
    Unavailable,
)
from cluster.routing import pairing
from cluster.routing.pairing import choose_decode, choose_prefill, choose_route
from scheduler.admission import LATER_STEPS

SPLIT = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)
SHORT_LOCAL = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=8, fallback_to_decode=False)
FALLBACK = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=True)
COLOCATED = RoutingRules(has_prefill_pool=False, local_prefill_max_tokens=0, fallback_to_decode=False)


# 20 blocks of one token at decode, one each with the prompt's 9 and the 11 rows that follow; 9 at prefill.
NEED = Need(prompt_tokens=9, max_tokens=12, num_choices=1, block_size=1)


def D(replica_id: str, free: int, *, total: int = 100, mine: int = 0, queued: int = 0, **more: Any) -> DecodeCandidate:
    return DecodeCandidate(replica_id, total, free, mine, queued, **more)


def P(replica_id: str, queued: int, *, total: int = 100, rate: float = 0.0) -> PrefillCandidate:
    return PrefillCandidate(replica_id, total, queued, rate)


@pytest.mark.parametrize(
    ("candidates", "excluded", "chosen"),
    [
        ([D("a", 10)], "", "a"),
        ([D("a", 10), D("b", 50)], "", "b"),
        ([D("a", 50, mine=3), D("b", 50, mine=1)], "", "b"),
        ([D("a", 50, step_s=0.2), D("b", 50, step_s=0.1)], "", "b"),
        ([D("a", 50, mine=1), D("b", 50, mine=1)], "", "a"),  # any rule will do, but always the same one
        # Room is what counts, not whether it is enough: the one with the most is the first to have enough.
        ([D("a", 3), D("b", -5)], "", "a"),
        # Memory helps nobody who stands behind a queue (for slots, or of someone larger).
        ([D("a", 90, queued=1), D("b", 20)], "", "b"),
        ([D("a", 90, queued=1), D("b", 19)], "", "a"),
        ([D("a", 90, queued=1), D("b", 80, queued=5)], "", "a"),
        # Of those with equally much room too.
        ([D("a", 90, queued=1), D("b", 90)], "", "b"),
        ([D("a", 90, queued=1), D("b", 90), D("c", 90)], "", "b"),
        # Soon others end there; or outputs are shorter there than they may be.
        ([D("a", 19), D("b", 15, expected_tokens=4)], "", "b"),
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
        decided = choose_decode(NEED, order, SPLIT, set(excluded))
        assert isinstance(decided, DecodeCandidate)
        assert decided.replica_id == chosen


@pytest.mark.parametrize(
    ("candidates", "excluded", "chosen"),
    [
        ([P("a", 10), P("b", 5)], "", "b"),
        ([P("a", 5), P("b", 5)], "", "a"),
        ([P("a", 500), P("b", 0, total=8)], "", "a"),
        # The expected wait counts: (queued + 9) / rate.
        ([P("a", 91, rate=100.0), P("b", 21, rate=20.0)], "", "a"),
        ([P("a", 91, rate=100.0), P("b", 9, rate=20.0)], "", "b"),
        # An idle slow one can be the later one: the prompt itself takes time.
        ([P("a", 1, rate=100.0), P("b", 0, rate=10.0)], "", "a"),
        # Who has not been measured is taken for an average one.
        ([P("a", 91, rate=100.0), P("b", 90), P("c", 300, rate=100.0)], "", "b"),
        ([P("a", 91, rate=100.0), P("b", 92), P("c", 300, rate=100.0)], "", "a"),
        ([P("a", 500), P("b", 0)], "b", "a"),
        ([P("a", 500), P("b", 0)], "ab", "b"),
    ],
)
def test_prefill_replica_by_expected_wait(candidates: Sequence[PrefillCandidate], excluded: str, chosen: str) -> None:
    for order in (candidates, candidates[::-1]):
        decided = choose_prefill(NEED, order, D("d", 0), SPLIT, set(excluded))
        assert isinstance(decided, PrefillCandidate)
        assert decided.replica_id == chosen


@pytest.mark.parametrize(
    ("queued_near", "queued_far", "penalty", "chosen"),
    [
        (0, 0, 2.0, "near"),
        # 9 tokens count 27 far away: near is worth a wait of 18.
        (17, 0, 2.0, "near"),
        (19, 0, 2.0, "far"),
        (17, 0, 0.0, "far"),
    ],
)
def test_a_prefill_replica_on_decodes_node_is_worth_a_wait(
    queued_near: int, queued_far: int, penalty: float, chosen: str
) -> None:
    rules = replace(SPLIT, other_node_penalty=penalty)
    prefills = [
        P("near", queued_near)._replace(node_id="one"),
        P("far", queued_far)._replace(node_id="two"),
    ]
    route = choose_route(NEED, [D("d", 50, node_id="one")], prefills, rules)
    assert isinstance(route, Route)
    assert route.prefill_id == chosen


def test_nobody_is_large_enough_or_there() -> None:
    assert choose_decode(NEED, [D("a", 0, total=19), D("b", 0, total=7)], SPLIT) == NeverFits("decode", 20, 19)
    assert choose_prefill(NEED, [P("a", 0, total=8)], D("d", 0), SPLIT) == NeverFits("prefill", 9, 8)
    assert choose_decode(NEED, [], SPLIT) == Unavailable("decode")
    assert choose_prefill(NEED, [], D("d", 0), SPLIT) == Unavailable("prefill")
    assert choose_decode(NEED, [D("a", 20, total=20)], SPLIT) == D("a", 20, total=20)


REMOTE, LOCAL, FELL_BACK = RouteKind.REMOTE, RouteKind.LOCAL, RouteKind.FALLBACK


@pytest.mark.parametrize(
    ("rules", "prefills", "decided"),
    [
        (SPLIT, [P("p", 0)], Route(REMOTE, "d", "p", False, 20)),
        (SPLIT, [], Unavailable("prefill")),
        (SPLIT, [P("p", 0, total=8)], NeverFits("prefill", 9, 8)),
        (SHORT_LOCAL, [P("p", 0)], Route(REMOTE, "d", "p", False, 20)),
        (FALLBACK, [P("p", 0)], Route(REMOTE, "d", "p", False, 20)),
        (FALLBACK, [], Route(FELL_BACK, "d", None, False, 20)),
        # Too long a prompt for the prefill pool is the client's affair, not a failure to fall back from.
        (FALLBACK, [P("p", 0, total=8)], NeverFits("prefill", 9, 8)),
        (COLOCATED, [], Route(LOCAL, "d", None, False, 20)),
    ],
)
def test_who_prefills(rules: RoutingRules, prefills: list[PrefillCandidate], decided: object) -> None:
    assert choose_route(NEED, [D("d", 20)], prefills, rules) == decided


@pytest.mark.parametrize(("prompt_tokens", "kind"), [(1, LOCAL), (8, LOCAL), (9, REMOTE)])
def test_short_prompts_stay_with_decode(prompt_tokens: int, kind: RouteKind) -> None:
    route = choose_route(Need(prompt_tokens, 12, 1, 1), [D("d", 21)], [P("p", 0)], SHORT_LOCAL)
    assert isinstance(route, Route)
    assert route.kind is kind


@pytest.mark.parametrize(
    ("candidate", "must_wait"),
    [
        (D("d", 20), False),
        (D("d", 19), True),
        (D("d", -1), True),
        (D("d", 100, queued=1), True),
        # It may grow into what others leave, if they leave in time: it is 20 blocks large after 11 steps.
        (D("d", 19, later_free_blocks=(20, 20, 20, 20)), True),
        # A shorter output is expected there: 9 + 3 rows.
        (D("d", 12, expected_tokens=4), False),
        (D("d", 11, expected_tokens=4), True),
        (D("d", 19, expected_tokens=4000), True),
    ],
)
@pytest.mark.parametrize("rules", [SPLIT, COLOCATED])
def test_must_wait(candidate: DecodeCandidate, must_wait: bool, rules: RoutingRules) -> None:
    route = choose_route(NEED, [candidate], [P("p", 0)], rules)
    assert isinstance(route, Route)
    assert route.must_wait is must_wait


@pytest.mark.parametrize(
    ("free", "later", "must_wait"),
    [
        # 100 prompt tokens, up to 301 more: 116 after 16 rows, 164 after 64, 356 after 256, 400 at the end.
        (400, (400, 400, 400, 400), False),
        (116, (164, 356, 400, 400), False),
        (115, (164, 356, 400, 400), True),
        (116, (163, 356, 400, 400), True),
        (116, (164, 355, 400, 400), True),
        (116, (164, 356, 399, 400), True),
        (116, (164, 356, 400, 399), True),
        (399, (), True),
        (400, (), False),
    ],
)
def test_room_grows_as_others_end(free: int, later: tuple[int, ...], must_wait: bool) -> None:
    need = Need(prompt_tokens=100, max_tokens=301, num_choices=1, block_size=1)
    assert LATER_STEPS == (16, 64, 256, 1024)
    assert D("d", free, total=1000, later_free_blocks=later).must_wait(need) is must_wait


def test_a_need_in_blocks() -> None:
    need = Need(prompt_tokens=9, max_tokens=9, num_choices=2, block_size=4)
    assert (need.prefill_blocks, need.decode_blocks) == (3, 2 + 2 * 3)
    # Before the first row the last block of the prompt is shared, with it one of them copies it.
    assert [need.blocks_after(rows) for rows in (0, 1, 3, 4, 8, 99)] == [3, 4, 4, 6, 8, 8]


def test_the_blocks_of_a_route_are_those_that_are_expected() -> None:
    route = choose_route(NEED, [D("d", 50, expected_tokens=4)], [], COLOCATED)
    assert route == Route(LOCAL, "d", None, False, 12)


@pytest.mark.parametrize("rules", [SPLIT, SHORT_LOCAL, FALLBACK, COLOCATED])
def test_without_decode_nothing_goes(rules: RoutingRules) -> None:
    assert choose_route(NEED, [], [P("p", 0)], rules) == Unavailable("decode")
    assert choose_route(NEED, [D("d", 0, total=19)], [P("p", 0)], rules) == NeverFits("decode", 20, 19)


def test_an_excluded_pair_is_avoided_on_both_sides() -> None:
    route = choose_route(NEED, [D("d", 90), D("e", 50)], [P("p", 0), P("q", 9)], SPLIT, {"d", "p"})
    assert route == Route(REMOTE, "e", "q", False, 20)


class Recorder:
    """A policy that wants the last by name, and remembers between whom it was asked to choose."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.policy = RoutingPolicy(decode_costs=self.costs, prefill_costs=self.costs)

    def costs(self, need: Need, candidates: Sequence[DecodeCandidate | PrefillCandidate], *rest: Any) -> Costs:
        self.asked.append("".join(found.replica_id for found in candidates))
        return [(-ord(found.replica_id),) for found in candidates]


@pytest.fixture
def last_by_name(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(pairing, "POLICIES", POLICIES | {"last_by_name": recorder.policy})
    return recorder


def like(fingerprint: str, *candidates: Any) -> list[Any]:
    return [candidate._replace(fingerprint=fingerprint) for candidate in candidates]


def test_the_policy_of_that_name_decides(last_by_name: Recorder) -> None:
    decodes, prefills = [D("a", 90), D("b", 50)], [P("p", 0), P("q", 9)]
    assert choose_route(NEED, decodes, prefills, SPLIT) == Route(REMOTE, "a", "p", False, 20)
    assert last_by_name.asked == []
    rules = replace(SPLIT, policy="last_by_name")
    assert choose_route(NEED, decodes, prefills, rules) == Route(REMOTE, "b", "q", False, 20)
    assert last_by_name.asked == ["ab", "pq"]


def test_no_policy_is_asked_about_a_replica_that_may_not_be_taken(last_by_name: Recorder) -> None:
    """What it would like best is another model's, too small, the one that failed, or no partner of the other's."""
    rules = replace(SPLIT, policy="last_by_name")
    decodes = [*like("model=1", D("a", 50), D("b", 50), D("s", 19, total=19), D("x", 50)), *like("model=2", D("y", 50))]
    prefills = [*like("model=1", P("p", 0), P("q", 0), P("r", 0, total=8)), *like("model=3", P("z", 0))]
    assert "" != decodes[0].model != decodes[-1].model
    bound = replace(NEED, model=decodes[0].model)
    for need in (NEED, bound):  # y has no partner
        route = choose_route(need, decodes, prefills, rules, excluded={"x"})
        assert route == Route(REMOTE, "b", "q", False, 20, decodes[0].model)
    assert last_by_name.asked == ["ab", "pq"] * 2
    local = choose_route(bound, decodes, prefills, replace(rules, local_prefill_max_tokens=9), excluded={"x"})
    assert local == Route(LOCAL, "b", None, False, 20, decodes[0].model)
    assert last_by_name.asked[4:] == ["ab"]


def test_equally_dear_replicas_are_taken_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    indifferent = RoutingPolicy(
        lambda need, those, *_: [(1,)] * len(those), lambda need, those, *_: [(1,)] * len(those)
    )
    monkeypatch.setattr(pairing, "POLICIES", {"indifferent": indifferent})
    rules = replace(SPLIT, policy="indifferent")
    for decodes in ([D("b", 9), D("a", 1)], [D("a", 1), D("b", 9)]):
        assert choose_route(NEED, decodes, [P("q", 0), P("p", 9)], rules) == Route(REMOTE, "a", "p", True, 20)


def test_a_policy_that_forgets_a_candidate_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "POLICIES", {"short": RoutingPolicy(lambda *_: [(1,)], lambda *_: [(1,)])})
    with pytest.raises(ValueError, match="1 costs for 2 replicas"):
        choose_route(NEED, [D("a", 9), D("b", 9)], [P("p", 0)], replace(SPLIT, policy="short"))


def test_the_config_and_the_rules_have_the_same_default() -> None:
    assert Config.model_fields["routing"].get_default().policy == SPLIT.policy
    assert SPLIT.policy in POLICIES
