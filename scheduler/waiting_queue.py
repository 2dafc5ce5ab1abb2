"""Who is next: who has begun; then higher priority; within a priority clients share fairly, each of them first come
first served.

Who has begun (`Request.has_begun`: a client has tokens of it, and its replica is lost or it moves) goes before
newcomers of all priorities, as who gave way comes back before anybody new is admitted: it held its memory when the
newcomers came, and a loss elsewhere must not give that to them. That comes to an end: each was a newcomer once. Among
those who have begun it is priority that counts, then as below.

Within a priority it is self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing Scheme for Broadband
Applications", INFOCOM 1994) over tokens instead of bits, for the reason that Sheng et al. give ("Fairness in Serving
Large Language Models", OSDI 2024): what requests cost differs by orders of magnitude. The tag of a client's first
request is its cost plus the tag of the client's last one that was taken or, if nothing of it waited since, plus the
virtual time; the smallest tag is next; the virtual time is the highest tag that was taken.

Bound: let W be the cost of a request and of those of its client that are before it, C the most clients that wait in
its priority at a time, and L the highest cost. Of its priority less than C (W + L) is served before it. That depends
neither on how much the others have waiting nor on how many clients come later. Priorities are strict: what is served
of higher ones, and of those who have begun, comes on top, and so does what its scheduler lets overtake it because it
does not fit yet.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from scheduler.request import Request

# Outdated heap entries that may lie about before the heap is made anew.
_MIN_STALE = 64

_Rank = tuple[bool, int]  # of a level: the smallest is served first


def nobody_ends_first(request: Request, waiting: Request) -> bool:
    """Where nothing is known of what is to come."""
    return False


@dataclass(slots=True)
class _Client:
    """What one client has waiting at one priority. start: where the tag of its first request began."""

    start: int
    serial: int = -1  # new with each tag; of equal tags the older one is first
    tag: int = 0
    debt: int = 0  # cost of requests that were taken from behind the first one
    waiting: OrderedDict[str, tuple[Request, int]] = field(default_factory=OrderedDict)  # by id: request and cost


@dataclass(frozen=True, slots=True)
class _Passed:
    """One that is not let in yet. behind: those whom it may not pass, so that they are let in before it."""

    waiting: Request
    behind: tuple[Request, ...]


class WaitingQueue:
    """All that waits in one engine. With n requests, add, take and discard are O(log n), and looking at the first k
    is O(k log n). Not thread-safe.
    """

    def __init__(self) -> None:
        self._levels: dict[_Rank, _Level] = {}
        self._order: list[_Rank] = []  # of those levels, ascending: few
        self._rank_of: dict[str, _Rank] = {}
        self.num_prompt_tokens = 0  # yet to be computed here, of all that wait

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._rank_of

    def add(self, request: Request, cost: int) -> None:
        """It waits from now on. cost: tokens, at least 1. Mutates."""
        rank = not request.has_begun, -request.spec.priority
        level = self._levels.get(rank)
        if level is None:
            level = self._levels[rank] = _Level()
            insort(self._order, rank)
        level.add(request, cost)
        self._rank_of[request.request_id] = rank
        if request.local_prefill:
            self.num_prompt_tokens += request.prompt_len

    def admit(
        self,
        lets_in: Callable[[Request], bool],
        max_overtakes: int,
        ends_first: Callable[[Request, Request], bool] = nobody_ends_first,
        must_wait: Callable[[Request], bool] = lambda _: False,
    ) -> tuple[Request, ...]:
        """Take whom lets_in lets in, who are asked in order. Mutates, but only after the last was asked.

        One that is not let in yet may be passed by at most max_overtakes requests behind it, ever, and one that has
        begun by no newcomer. Those do not count of whom ends_first(request, waiting) says that they, let in now, are
        over before the waiting one could be let in; with max_overtakes 0 nobody passes anybody. So what one waits for
        is those before it, these few, and what lets_in goes by. No more than max_overtakes + 1 are asked in vain,
        however many wait. Whom must_wait names is gone by as if it were not here.
        """
        admitted: list[Request] = []
        passed: list[_Passed] = []
        with closing(self.in_order()) as waiting_in_order:
            for request in waiting_in_order:
                if request.is_suspect and must_wait(request):
                    continue
                delayed = [of.waiting for of in passed if not _is_free_to_pass(request, of, ends_first)]
                behind = tuple([of for of in delayed if of.num_overtaken >= _most(of, request, max_overtakes)])
                if not behind and lets_in(request):
                    for waiting in delayed:
                        waiting.num_overtaken += 1
                    admitted.append(request)
                    continue
                passed.append(_Passed(request, behind))
                if len(passed) > max_overtakes:
                    break
        for request in admitted:
            self.take(request.request_id)
        return tuple(admitted)

    def take(self, request_id: str) -> None:
        """It is served, and its client is charged for it. Mutates. Raises KeyError."""
        self._remove(request_id, charge=True)

    def discard(self, request_id: str) -> bool:
        """It does not wait any more, at no charge; False when it did not wait. Mutates."""
        if request_id not in self._rank_of:
            return False
        self._remove(request_id, charge=False)
        return True

    def in_order(self) -> Generator[Request, None, None]:
        """From the next one on. The queue must not change while the iterator is in use; exhaust or close it."""
        for rank in self._order:
            yield from self._levels[rank].in_order()

    def _remove(self, request_id: str, charge: bool) -> None:
        rank = self._rank_of.pop(request_id)
        level = self._levels[rank]
        request = level.remove(request_id, charge)
        if request.local_prefill:
            self.num_prompt_tokens -= request.prompt_len
        if not level.clients:  # nobody is owed anything: the next one begins at virtual time 0
            del self._levels[rank]
            self._order.remove(rank)


def _most(waiting: Request, request: Request, max_overtakes: int) -> int:
    """How many of its kind may pass the waiting one."""
    return max_overtakes if request.has_begun or not waiting.has_begun else 0


def _is_free_to_pass(request: Request, of: _Passed, ends_first: Callable[[Request, Request], bool]) -> bool:
    """Whether it takes nothing from the waiting one, which can't be let in before those that it is behind."""
    return ends_first(request, of.waiting) or any(ends_first(request, other) for other in of.behind)


class _Level:
    """One priority of those who have begun, or of newcomers.

    A client is known while it waits: what it was served before gives it no tag above virtual time.
    """

    def __init__(self) -> None:
        self.clients: dict[str, _Client] = {}
        self._client_of: dict[str, str] = {}
        self._heap: list[tuple[int, int, str]] = []  # keys of clients, and outdated ones
        self._virtual_time = 0
        self._num_serials = 0

    def add(self, request: Request, cost: int) -> None:
        assert cost >= 1, f"{request.request_id} costs {cost}"
        name = self._client_of[request.request_id] = request.spec.client
        client = self.clients.setdefault(name, _Client(self._virtual_time))
        client.waiting[request.request_id] = (request, cost)
        if len(client.waiting) == 1:
            self._new_first(name, client)

    def remove(self, request_id: str, charge: bool) -> Request:
        name = self._client_of.pop(request_id)
        client = self.clients[name]
        is_first = next(iter(client.waiting)) == request_id
        request, cost = client.waiting.pop(request_id)
        if charge and is_first:
            client.start = client.tag
        elif charge:
            client.debt += cost  # its first one keeps its place: this counts from the next one on
        if charge:
            self._virtual_time = max(self._virtual_time, client.tag + client.debt)
        if not client.waiting:
            del self.clients[name]
        elif is_first:
            self._new_first(name, client)
        return request

    def in_order(self) -> Generator[Request, None, None]:
        seen: list[tuple[int, int, str]] = []
        behind: list[tuple[int, int, str, Request, Iterator[tuple[Request, int]]]] = []  # behind one that was seen
        try:
            while True:
                self._drop_outdated()
                if self._heap and (not behind or self._heap[0] < behind[0][:3]):
                    tag, serial, name = heapq.heappop(self._heap)
                    seen.append((tag, serial, name))
                    rest = iter(self.clients[name].waiting.values())
                    request, _ = next(rest)
                    tag += self.clients[name].debt
                elif behind:
                    tag, serial, name, request, rest = heapq.heappop(behind)
                else:
                    return
                yield request
                for request, cost in rest:
                    heapq.heappush(behind, (tag + cost, serial, name, request, rest))
                    break
        finally:
            for entry in seen:
                heapq.heappush(self._heap, entry)

    def _new_first(self, name: str, client: _Client) -> None:
        _, cost = next(iter(client.waiting.values()))
        client.start += client.debt
        client.debt = 0
        client.tag = client.start + cost
        client.serial = self._num_serials
        self._num_serials += 1
        heapq.heappush(self._heap, (client.tag, client.serial, name))
        if len(self._heap) > 2 * len(self.clients) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def _drop_outdated(self) -> None:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)

    def _counts(self, entry: tuple[int, int, str]) -> bool:
        client = self.clients.get(entry[2])
        return client is not None and client.serial == entry[1]
