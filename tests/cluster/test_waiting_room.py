"""Who of those that wait is moved: the oldest first, no more than there is room for, nobody to and fro."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from cluster.policies.routing_policy import Route, RouteKind, Unavailable
from cluster.routing.waiting_room import Waiting, WaitingRoom


@dataclass
class Replicas:
    """free: slots by replica; everybody takes as many as his name says."""

    free: dict[str, int]

    def decide(self, who: str) -> Route | Unavailable:
        if not self.free:
            return Unavailable("decode")
        best = max(self.free, key=lambda name: (self.free[name], name))
        return Route(RouteKind.REMOTE, best, None, self.free[best] < size(who), 1)


def size(who: str) -> int:
    return int(who[1:]) if who[1:] else 1


def moves(room: WaitingRoom[str], replicas: Replicas, now_s: float = 10.0) -> list[tuple[str, str]]:
    found = []
    for who, route in room.movable(now_s, replicas.decide):
        replicas.free[route.decode_id] -= size(who)
        found.append((who, route.decode_id))
    return found


def room_of(*waiting: Waiting[str]) -> WaitingRoom[str]:
    room: WaitingRoom[str] = WaitingRoom(settle_s=1.0)
    for one in waiting:
        room.enter(one)
    return room


def one(who: str, came_s: float, at: str = "old", sent_s: float = 0.0, **values: object) -> Waiting[str]:
    waiting: Waiting[str] = Waiting(at, sent_s, came_s, **values)  # type: ignore[arg-type]
    waiting.who = who
    return waiting


@pytest.mark.parametrize(
    ("waiting", "free", "expected"),
    [
        ([], {"new": 4}, []),
        ([one("a", 1), one("b", 2)], {"old": 0}, []),
        ([one("a", 1), one("b", 2)], {}, []),
        # The oldest first, whatever the order in which they were sent, and no more than there is room for.
        ([one("c", 3), one("a", 1), one("b", 2)], {"old": 0, "new": 2}, [("a", "new"), ("b", "new")]),
        # Who has begun before anybody.
        ([one("a", 1), one("z", 9, is_begun=True)], {"new": 1}, [("z", "new")]),
        # Priorities are strict, and of a priority each client has its turn.
        ([one("a", 1), one("b", 2, priority=1)], {"new": 1}, [("b", "new")]),
        ([one("a", 1, priority=1), one("z", 9, is_begun=True)], {"new": 1}, [("z", "new")]),
        (
            [one("a", 1, client="x"), one("b", 2, client="x"), one("c", 3, client="x"), one("d", 4, client="y")],
            {"new": 3},
            [("a", "new"), ("d", "new"), ("b", "new")],
        ),
        # One that is too large now does not hold up those behind it.
        ([one("a9", 1), one("b", 2)], {"new": 1}, [("b", "new")]),
        # Room where it waits already: there it stays.
        ([one("a", 1), one("b", 2)], {"old": 1}, []),
        ([one("a", 1, at="old"), one("b", 2, at="x")], {"old": 2, "x": 0}, [("b", "old")]),
        # Not settled: sent half a second ago; moved a second ago, after others moves.
        ([one("a", 1, sent_s=9.5), one("b", 2)], {"new": 4}, [("b", "new")]),
        ([one("a", 1, sent_s=9.0, num_moves=1), one("b", 2, sent_s=8.0, num_moves=1)], {"new": 4}, [("b", "new")]),
    ],
)
def test_who_moves(waiting: list[Waiting[str]], free: dict[str, int], expected: list[tuple[str, str]]) -> None:
    assert moves(room_of(*waiting), Replicas(dict(free))) == expected


def test_so_many_are_asked_in_vain_and_no_more() -> None:
    room = room_of(*(one(f"a{20 + index}", index) for index in range(100)))
    asked: list[str] = []

    def decide(who: str) -> Route:
        asked.append(who)
        return Route(RouteKind.REMOTE, "new", None, True, 1)

    assert list(room.movable(10.0, decide)) == []
    assert asked == [f"a{20 + index}" for index in range(8)]


def test_who_is_being_admitted_is_left_alone_and_counts_for_nothing() -> None:
    room = room_of(*(one(f"a{index}", index) for index in range(20)), one("b", 30))
    new = Route(RouteKind.REMOTE, "new", None, False, 1)
    assert list(room.movable(10.0, lambda who: new if who == "b" else None)) == [("b", new)]


def test_when_it_is_looked_through() -> None:
    room = room_of()
    assert not room.is_due(10.0)
    waiting = one("a", 1)
    room.enter(waiting)
    assert room.is_due(10.0)
    assert moves(room, Replicas({})) == []
    assert not room.is_due(10.05)
    assert room.is_due(10.2)
    room.leave(waiting)
    room.leave(waiting)
    assert (len(room), room.is_due(11.0)) == (0, False)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_older_is_left_behind_and_nothing_is_overbooked(seed: int) -> None:
    """Random rooms, all of one size: who moved is older than whoever did not, and everybody has a place."""
    rng = random.Random(seed)
    waiting = [one(f"{index}", rng.random(), is_begun=rng.random() < 0.2) for index in range(rng.randint(0, 40))]
    for index, found in enumerate(waiting):
        found.who = chr(97 + index % 26)
    free = {f"r{index}": rng.randint(0, 6) for index in range(rng.randint(0, 5))}
    room, replicas = room_of(*waiting), Replicas(dict(free))
    moved = moves(room, replicas)
    assert len(moved) == min(len(waiting), sum(free.values()))
    assert all(left >= 0 for left in replicas.free.values())
    in_order = sorted(waiting, key=lambda found: (not found.is_begun, found.came_s))
    assert [who for who, _ in moved] == [found.who for found in in_order[: len(moved)]]
