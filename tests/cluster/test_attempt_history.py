"""Which failures count against a request's retries, and whom it avoids after them."""

from __future__ import annotations

import pytest

from cluster.policies.routing_policy import Route, RouteKind
from cluster.routing.attempt_failed import AttemptFailed, AttemptHistory, Stage
from cluster.routing.pool_client import Loss, ReplicaLost
from replicas.messages import CallStatus

ROUTE = Route(RouteKind.REMOTE, "d", "p", must_wait=False, decode_blocks=1)


def test_both_are_avoided_unless_it_is_known_who_was_at_fault() -> None:
    failure = AttemptFailed(Stage.TRANSFER, CallStatus.KV_LOST, "", may_retry=True)
    assert AttemptHistory().after(failure, ROUTE) == AttemptHistory(1, frozenset({"d", "p"}), num_lost=1)
    failure.__cause__ = ReplicaLost("p", Loss.DEAD, "died")
    after = AttemptHistory(1).after(failure, ROUTE, has_killed=True)
    assert after == AttemptHistory(2, frozenset({"p"}), num_deaths=1)
    waited = AttemptHistory(1).after(failure, ROUTE)
    assert waited == AttemptHistory(1, frozenset({"p"})), "it only waited there"
    assert waited.after(failure, ROUTE).num_failed == 2, "once"


def test_a_replica_that_leaves_is_avoided_and_counts_only_if_it_was_avoided_before() -> None:
    failure = AttemptFailed(Stage.PREFILL, CallStatus.ERROR, "", may_retry=True)
    failure.__cause__ = ReplicaLost("p", Loss.LEAVING, "is leaving")
    once = AttemptHistory(1).after(failure, ROUTE)
    assert once == AttemptHistory(1, frozenset({"p"}))
    assert once.after(failure, ROUTE) == AttemptHistory(2, frozenset({"p"}))


@pytest.mark.parametrize("is_search", [False, True])
def test_an_eviction_is_nobodys_fault_and_counts_only_where_work_begins_anew(is_search: bool) -> None:
    failure = AttemptFailed(Stage.DECODE, CallStatus.EVICTED, "", may_retry=True)
    before = AttemptHistory(1, frozenset({"x"}))
    assert before.after(failure, ROUTE, is_search=is_search) == AttemptHistory(1 + is_search, frozenset({"x"}))


def test_evictions_come_to_an_end_unless_there_is_a_token_in_between() -> None:
    failure = AttemptFailed(Stage.DECODE, CallStatus.EVICTED, "", may_retry=True)
    past, num_evictions = AttemptHistory(), 0
    pauses_s = []
    while not past.is_over(max_retries=2):
        past = past.after(failure, ROUTE, has_advanced=False)
        num_evictions += 1
        pauses_s.append(past.pause_s(0.05))
        assert num_evictions < 100, "it never ends"
    assert past.num_failed == 0
    assert num_evictions == 9
    assert pauses_s[:3] == [0.05, 0.1, 0.2]
    past = AttemptHistory()
    for number in range(1000):  # a token now and then is progress, and there are max_tokens of them
        past = past.after(failure, ROUTE, has_advanced=number % 8 == 7)
        assert not past.is_over(max_retries=2)
    assert past.pause_s(0.05) == 0.025


def test_failures_end_it_as_before_whatever_evictions_there_were() -> None:
    failure = AttemptFailed(Stage.DECODE, CallStatus.ERROR, "", may_retry=True)
    past = AttemptHistory(num_barren=3)
    for _ in range(3):
        assert not past.is_over(max_retries=2)
        past = past.after(failure, ROUTE, has_advanced=False)
    assert past.is_over(max_retries=2)
