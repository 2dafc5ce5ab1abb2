"""Which failures count against a request's retries, and whom it avoids after them."""

from __future__ import annotations

import pytest

from cluster.routing.attempt_failed import AttemptFailed, Stage
from cluster.routing.attempt_history import AttemptHistory
from cluster.routing.pool_client import ReplicaLost
from cluster.routing.routing_policy import Route, RouteKind
from replicas.messages import CallStatus

ROUTE = Route(RouteKind.REMOTE, "d", "p", must_wait=False, decode_blocks=1)


def test_both_are_avoided_unless_it_is_known_who_was_at_fault() -> None:
    failure = AttemptFailed(Stage.TRANSFER, CallStatus.KV_LOST, "", may_retry=True)
    assert AttemptHistory().after(failure, ROUTE) == AttemptHistory(1, frozenset({"d", "p"}))
    failure.__cause__ = ReplicaLost("p", "died", is_dead=True)
    assert AttemptHistory(1).after(failure, ROUTE) == AttemptHistory(2, frozenset({"p"}))


def test_a_replica_that_leaves_is_avoided_and_counts_only_if_it_was_avoided_before() -> None:
    failure = AttemptFailed(Stage.PREFILL, CallStatus.ERROR, "", may_retry=True)
    failure.__cause__ = ReplicaLost("p", "is leaving", is_dead=False, has_left=True)
    once = AttemptHistory(1).after(failure, ROUTE)
    assert once == AttemptHistory(1, frozenset({"p"}))
    assert once.after(failure, ROUTE) == AttemptHistory(2, frozenset({"p"}))


@pytest.mark.parametrize("is_search", [False, True])
def test_an_eviction_is_nobodys_fault_and_counts_only_where_work_begins_anew(is_search: bool) -> None:
    failure = AttemptFailed(Stage.DECODE, CallStatus.EVICTED, "", may_retry=True)
    assert AttemptHistory(1, frozenset({"x"})).after(failure, ROUTE, is_search) == AttemptHistory(
        1 + is_search, frozenset({"x"})
    )
