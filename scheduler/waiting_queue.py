"""Who is next: higher priority first; within a priority clients share fairly, each of them first come first served.

Within a priority it is self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing Scheme for Broadband
Applications", INFOCOM 1994) over tokens instead of bits, for the reason that Sheng et al. give ("Fairness in Serving
Large Language Models", OSDI 2024): what requests cost differs by orders of magnitude. The tag of a client's first
request is its cost plus the tag of the client's last one that was taken or, if nothing of it waited since, plus the
virtual time; the smallest tag is next; the virtual time is the highest tag that was taken.

Bound: let W be the cost of a request and of those of its client that are before it, C the most clients that wait in
its priority at a time, and L the highest cost. Of its priority less than C (W + L) is served before it. That depends
neither on how much the others have waiting nor on how many clients come later. Priorities are strict: what is served
of higher ones comes on top, and so does what its scheduler lets overtake it because it does not fit yet.
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


@dataclass(slots=True)
class _Client:
    """What one client has waiting at one priority. start: where the tag of its first request began."""

    start: int
    serial: int = -1  # new with each tag; of equal tags the older one is first
    tag: int = 0
    debt: int = 0  # cost of requests that were taken from behind the first one
    waiting: OrderedDict[str, tuple[Request, int]] = field(default_factory=OrderedDict)  # by id: request and cost


class WaitingQueue:
    """All that waits in one engine. With n requests, add, take and discard are O(log n), and looking at the first k
    is O(k log n). Not thread-safe.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # negated priorities of those levels, ascending: few
        self._priority_of: dict[str, int] = {}
        self.num_prompt_tokens = 0  # yet to be computed here, of all that wait

    def __len__(self) -> int:
        return len(self._priority_of)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._priority_of

    def add(self, request: Request, cost: int) -> None:
        """It waits from now on. cost: tokens, at least 1. Mutates."""
        priority = request.spec.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            insort(self._order, -priority)
        level.add(request, cost)
        self._priority_of[request.request_id] = priority
        if request.local_prefill:
            self.num_prompt_tokens += request.prompt_len

    def admit(self, lets_in: Callable[[Request], bool], max_overtakes: int) -> tuple[Request, ...]:
        """Take whom lets_in lets in, who are asked in order. Mutates, but only after the last was asked.

        One that is not let in yet may be passed by at most max_overtakes requests behind it, ever: then nobody behind
        it is asked before it. So what it waits for is those before it, these few, and what lets_in goes by. Asks no
        more than max_overtakes + 1 that are not let in, however many wait.
        """
        admitted: list[Request] = []
        passed: list[Request] = []
        with closing(self.in_order()) as waiting_in_order:
            for request in waiting_in_order:
                if any(waiting.num_overtaken >= max_overtakes for waiting in passed):
                    break
                if lets_in(request):
                    for waiting in passed:
                        waiting.num_overtaken += 1
                    admitted.append(request)
                    continue
                passed.append(request)
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
        if request_id not in self._priority_of:
            return False
        self._remove(request_id, charge=False)
        return True

    def in_order(self) -> Generator[Request, None, None]:
        """From the next one on. The queue must not change while the iterator is in use; exhaust or close it."""
        for negated in self._order:
            yield from self._levels[-negated].in_order()

    def _remove(self, request_id: str, charge: bool) -> None:
        priority = self._priority_of.pop(request_id)
        level = self._levels[priority]
        request = level.remove(request_id, charge)
        if request.local_prefill:
            self.num_prompt_tokens -= request.prompt_len
        if not level.clients:  # nobody is owed anything: the next one begins at virtual time 0
            del self._levels[priority]
            self._order.remove(-priority)


class _Level:
    """One priority. A client is known while it waits: what it was served before gives it no tag above virtual time."""

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
