"""Replicas of one pool that were ordered and have not come yet, and how long a start takes. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

# A start may take so many times as long as it is known to take: others start beside it, or a node must come first.
_SLACK = 2.0
_NUM_REMEMBERED = 4


class _Order(NamedTuple):
    """at_s: when it was first seen. is_timed: that was about when it was given. replaces: who left, if that is why."""

    at_s: float
    is_timed: bool = True
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaOrders:
    """orders: the oldest first; who comes is taken for the oldest. present: by name. target: how many are to be there,
    None before that is known."""

    orders: tuple[_Order, ...] = ()
    present: frozenset[str] = frozenset()
    target: int | None = None

    def seen(
        self, now_s: float, target: int | None, present: Collection[str]
    ) -> tuple[ReplicaOrders, tuple[float | None, ...]]:
        """As the pool is now; and of each ordered replica that has come how long that took, None where nobody knows.

        One that leaves the table for a moment and is back (Serve takes a replica off while it reconfigures it) was not
        started. Fewer wanted: the youngest orders are withdrawn.
        """
        now = frozenset(present)
        back = {order.replaces for order in self.orders} & now
        waiting = [order for order in self.orders if order.replaces not in back]
        num_new = len(now - self.present - back)
        came, waiting = waiting[:num_new], waiting[num_new:]
        num_missing = max(0, (target or 0) - len(now))
        gone = sorted(self.present - now)
        while len(waiting) < num_missing:
            waiting.append(_Order(now_s, self.target is not None, gone.pop() if gone else ""))
        after = ReplicaOrders(tuple(waiting[:num_missing]), now, target)
        return after, tuple(now_s - order.at_s if order.is_timed else None for order in came)


@dataclass(frozen=True, slots=True)
class StartTime:
    """How long it takes from the order of a replica until it serves. guess_s: the config's. told_s: what those that are
    there say that theirs took, from when their process was there; 0.0: nobody has. measured_s: of the last ones."""

    guess_s: float
    told_s: float = 0.0
    measured_s: tuple[float, ...] = ()

    @property
    def expected_s(self) -> float:
        """The longest of the last ones; before there was any what replicas say, or the guess if that is longer."""
        return max(self.measured_s, default=max(self.guess_s, self.told_s))

    @property
    def longest_s(self) -> float:
        """After so long it is no longer waited for."""
        return max(_SLACK * self.expected_s, self.guess_s)

    def measured(self, start_s: float) -> StartTime:
        return replace(self, measured_s=(*self.measured_s, start_s)[-_NUM_REMEMBERED:])


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What who waits for memory may hope for. num: replicas on their way. next_s: when the first of them is expected,
    due_s: until when the last of them is waited for. num_overdue: were ordered, and have taken too long. last_came_s:
    when the last one that had been ordered came. Without any: 0.0."""

    num: int = 0
    next_s: float = 0.0
    due_s: float = 0.0
    num_overdue: int = 0
    last_came_s: float = 0.0


def arrivals(now_s: float, orders: ReplicaOrders, start: StartTime, last_came_s: float = 0.0) -> Arrivals:
    """Of one pool."""
    coming = [order.at_s for order in orders.orders if now_s < order.at_s + start.longest_s]
    num_overdue = len(orders.orders) - len(coming)
    if not coming:
        return Arrivals(num_overdue=num_overdue, last_came_s=last_came_s)
    next_s = max(now_s, coming[0] + start.expected_s)
    return Arrivals(len(coming), next_s, coming[-1] + start.longest_s, num_overdue, last_came_s)


def waits_until(began_s: float, queue_timeout_s: float, longest_s: float, coming: Arrivals) -> float:
    """When one gives up who waits for a decode replica to admit it, since began_s.

    That is after queue_timeout_s, but for replicas that are on their way: then as long as their start may take. Who has
    waited for one that has come waits for room there too, longest_s in all and at least queue_timeout_s more: what a
    burst has ordered serves it, round by round. All that is waited has a bound: longest_s and queue_timeout_s.
    """
    until_s = began_s + queue_timeout_s
    if coming.num:
        until_s = max(until_s, coming.due_s)
    if coming.last_came_s > began_s:
        until_s = max(until_s, began_s + longest_s, coming.last_came_s + queue_timeout_s)
    return min(until_s, began_s + max(longest_s, queue_timeout_s) + queue_timeout_s)
