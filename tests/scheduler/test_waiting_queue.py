"""Who is next: against the slow way, and the bounds that are promised."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing

import pytest

from scheduler.request import Request
from scheduler.waiting_queue import WaitingQueue
from tests.scheduler.brute_queue import BruteQueue
from tests.scheduler.short_requests import make_request


def request_of(request_id: str, client: str = "", priority: int = 0) -> Request:
    return make_request(request_id, client=client, priority=priority)


def ids(queue: WaitingQueue) -> list[str]:
    return [request.request_id for request in queue.in_order()]


def filled(*requests: tuple[str, str, int, int]) -> WaitingQueue:
    """id, client, priority, cost."""
    queue = WaitingQueue()
    for request_id, client, priority, cost in requests:
        queue.add(request_of(request_id, client, priority), cost)
    return queue


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        ([("a", "", 0, 9), ("b", "", 0, 1), ("c", "", 0, 5)], "abc"),
        ([("a", "", 0, 9), ("b", "", 3, 9), ("c", "", -1, 1), ("d", "", 3, 1)], "bdac"),
        # Client x has much to do: y's first request, and its second, do not wait for all of it.
        ([("a", "x", 0, 10), ("b", "x", 0, 10), ("c", "x", 0, 10), ("d", "y", 0, 10), ("e", "y", 0, 10)], "adbec"),
        # Tokens are shared, not turns.
        ([("a", "x", 0, 30), ("b", "x", 0, 30), ("c", "y", 0, 10), ("d", "y", 0, 10), ("e", "y", 0, 25)], "cdaeb"),
        # Priority first, also against one's fair share.
        ([("a", "x", 1, 99), ("b", "x", 1, 99), ("c", "y", 0, 1)], "abc"),
    ],
)
def test_the_order(requests: list[tuple[str, str, int, int]], order: str) -> None:
    queue = filled(*requests)
    assert "".join(ids(queue)) == order
    assert "".join(ids(queue)) == order, "looking changes nothing"
    taken = ""
    while queue:
        with closing(queue.in_order()) as waiting:
            request_id = next(waiting).request_id
        queue.take(request_id)
        taken += request_id
    assert taken == order


def test_who_has_begun_goes_before_newcomers_of_all_priorities_and_then_by_priority() -> None:
    queue = filled(("a", "x", 0, 9), ("b", "x", 9, 1))
    for request_id, client, priority in (("c", "x", -5), ("d", "x", 0), ("e", "x", 0), ("f", "y", 0), ("g", "y", 1)):
        request = request_of(request_id, client, priority)
        request.has_begun = True
        queue.add(request, 5)
    assert "".join(ids(queue)) == "gdfecba", "clients share fairly there too"


@pytest.mark.parametrize(
    ("fitting", "max_overtakes", "admitted"),
    [
        ("", 2, ""),
        ("Cde", 2, "C"),  # another that has begun passes, a newcomer does not
        ("de", 2, ""),
        ("BCde", 0, ""),
        ("ACde", 0, "A"),
        ("ABde", 2, "AB"),
        ("ABCe", 2, "ABCe"),
    ],
)
def test_no_newcomer_passes_one_that_has_begun(fitting: str, max_overtakes: int, admitted: str) -> None:
    """A, B and C have begun."""
    queue = WaitingQueue()
    for request_id in "ABCde":
        request = request_of(request_id)
        request.has_begun = request_id.isupper()
        queue.add(request, 1)
    let_in = queue.admit(lambda request: request.request_id in fitting, max_overtakes)
    assert "".join(request.request_id for request in let_in) == admitted


def test_whoever_is_over_in_time_passes_and_does_not_count() -> None:
    queue = filled(*[(request_id, "", 0, 1) for request_id in "abcdefgh"])

    def ends_first(request: Request, waiting: Request) -> bool:
        return request.request_id in "cdh" and waiting.request_id == "a"

    asked: list[str] = []

    def lets_in(request: Request) -> bool:
        asked.append(request.request_id)
        return request.request_id != "a"

    first = {request.request_id: request for request in queue.in_order()}
    let_in = queue.admit(lets_in, 1, ends_first)
    assert [request.request_id for request in let_in] == ["b", "c", "d"]
    assert asked == ["a", "b", "c", "d"], "e must not pass a, and then too many have been passed"
    assert first["a"].num_overtaken == 1
    let_in = queue.admit(lets_in, 4, ends_first)
    assert [request.request_id for request in let_in] == ["e", "f", "g", "h"]
    assert first["a"].num_overtaken == 4


def test_who_waits_for_another_is_passed_by_whom_that_one_lets_pass() -> None:
    """b fits, but may not pass a any more; what is over before a starts is so before b does."""
    queue = filled(*[(request_id, "", 0, 1) for request_id in "abcd"])
    waiting = {request.request_id: request for request in queue.in_order()}
    waiting["a"].num_overtaken = 3
    let_in = queue.admit(
        lambda request: request.request_id != "a",
        3,
        lambda request, of: request.request_id in "cd" and of.request_id == "a",
    )
    assert [request.request_id for request in let_in] == ["c", "d"]
    assert (waiting["a"].num_overtaken, waiting["b"].num_overtaken) == (3, 0)


def test_who_waited_for_nothing_gains_nothing_by_it() -> None:
    queue = filled(*[(f"x{i}", "x", 0, 10) for i in range(10)])
    for i in range(5):
        queue.take(f"x{i}")
    for i in range(3):
        queue.add(request_of(f"y{i}", "y"), 10)
    assert ids(queue) == ["x5", "y0", "x6", "y1", "x7", "y2", "x8", "x9"]


def test_a_cancelled_request_costs_its_client_nothing() -> None:
    queue = filled(("a", "x", 0, 1000), ("b", "x", 0, 10), ("c", "y", 0, 20))
    assert ids(queue) == ["c", "a", "b"]
    assert queue.discard("a")
    assert not queue.discard("a")
    assert ids(queue) == ["b", "c"]
    assert len(queue) == 2
    assert "a" not in queue


def test_who_is_taken_from_behind_is_paid_for_and_does_not_move_the_first() -> None:
    queue = filled(("a", "x", 0, 50), ("b", "x", 0, 40), ("c", "x", 0, 10), ("d", "y", 0, 55), ("e", "y", 0, 40))
    assert ids(queue) == ["a", "d", "b", "e", "c"]
    queue.take("b")
    assert ids(queue) == ["a", "d", "e", "c"], "a keeps its tag, c has that of a, b and c"
    queue.take("a")
    assert ids(queue) == ["d", "e", "c"]


@pytest.mark.parametrize("seed", range(20))
def test_as_the_slow_way(seed: int) -> None:
    rng = random.Random(seed)
    queue, brute = WaitingQueue(), BruteQueue()
    num_clients = rng.choice([1, 2, 5, 40])
    for number in range(600):
        waiting = brute.ids()
        assert ids(queue) == waiting
        assert len(queue) == len(waiting)
        if not waiting or rng.random() < (0.6 if number < 300 else 0.4):
            request = request_of(f"r{number}", f"c{rng.randrange(num_clients)}", rng.choice([0, 0, 0, 1, -1]))
            request.has_begun = rng.random() < 0.2
            cost = rng.choice([1, 10, rng.randint(1, 1000)])
            queue.add(request, cost)
            brute.add(request, cost)
            continue
        request_id = waiting[min(rng.choice([0, 0, 0, 1, 5]), len(waiting) - 1)]
        is_taken = rng.random() < 0.7
        if is_taken:
            queue.take(request_id)
        else:
            queue.discard(request_id)
        brute.remove(request_id, is_taken)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_starves(seed: int) -> None:
    """However much the others have, and whoever comes: less than C (W + L) of its priority is served before one."""
    rng = random.Random(seed)
    queue = WaitingQueue()
    costs: dict[str, int] = {}
    owner: dict[str, str] = {}
    served_by = 0
    own: dict[str, int] = {}  # W
    since: dict[str, int] = {}
    waits: list[tuple[str, int]] = []
    most_clients = 0
    waiting: Counter[str] = Counter()
    mine: Counter[str] = Counter()  # tokens a client has waiting
    for number in range(4000):
        # Too much comes for half of the time; some clients come once, some flood.
        while len(costs) < (200 if number < 2000 else 1):
            request_id = f"r{len(owner)}"
            client = rng.choice(["flood", "flood", "other", f"once{len(owner)}"])
            costs[request_id] = rng.choice([1, 20, 500])
            owner[request_id] = client
            waiting[client] += 1
            mine[client] += costs[request_id]
            own[request_id] = mine[client]
            since[request_id] = served_by
            queue.add(request_of(request_id, client), costs[request_id])
            most_clients = max(most_clients, sum(count > 0 for count in waiting.values()))
        with closing(queue.in_order()) as order:
            taken = next(order).request_id
        queue.take(taken)
        waits.append((taken, served_by - since[taken]))
        served_by += costs[taken]
        waiting[owner[taken]] -= 1
        mine[owner[taken]] -= costs.pop(taken)
    assert most_clients > 20
    for request_id, passed in waits:
        assert passed < most_clients * (own[request_id] + 500)
    once = [passed for request_id, passed in waits if owner[request_id].startswith("once") and own[request_id] == 1]
    assert max(once) < most_clients * 501 < sum(own.values()), "the flood is not waited for"


def test_clients_that_wait_all_the_time_get_equal_shares_whatever_they_send() -> None:
    queue = WaitingQueue()
    cost = {"long": 900, "short": 7, "middle": 100}
    served: Counter[str] = Counter()
    for client in cost:
        queue.add(request_of(f"{client} 0", client), cost[client])
    for number in range(1, 20_000):
        with closing(queue.in_order()) as order:
            first = next(order)
        queue.add(request_of(f"{first.spec.client} {number}", first.spec.client), cost[first.spec.client])
        queue.take(first.request_id)
        served[first.spec.client] += cost[first.spec.client]
    assert max(served.values()) - min(served.values()) <= 1800


def test_cancelled_requests_do_not_pile_up() -> None:
    queue = WaitingQueue()
    for client in range(100):
        queue.add(request_of(f"stays {client}", f"c{client}"), 1)
    for number in range(5000):
        queue.add(request_of(f"goes {number}", f"c{number % 100}"), 1)
        queue.discard(f"stays {number % 100}")
        queue.add(request_of(f"stays {number % 100}", f"c{number % 100}"), 1)
        queue.discard(f"goes {number}")
    assert len(queue._levels[True, 0]._heap) <= 2 * 100 + 64
    for request in list(queue.in_order()):
        queue.discard(request.request_id)
    assert not queue._levels
