"""The waiting queue done the slow way: every tag of every request, sorted anew for each question."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.request import Request


@dataclass(slots=True)
class _Share:
    """One client at one priority. made_at: when its first request became the first."""

    start: int
    made_at: int = 0
    debt: int = 0
    requests: list[tuple[Request, int]] = field(default_factory=list)


class BruteQueue:
    def __init__(self) -> None:
        self._levels: dict[tuple[bool, int], dict[str, _Share]] = {}  # by whether it has begun, and priority
        self._virtual_time: dict[tuple[bool, int], int] = {}
        self._clock = 0

    def add(self, request: Request, cost: int) -> None:
        level = request.has_begun, request.spec.priority
        shares = self._levels.setdefault(level, {})
        now = self._virtual_time.setdefault(level, 0)
        if request.spec.client not in shares:
            shares[request.spec.client] = _Share(now, self._tick())
        shares[request.spec.client].requests.append((request, cost))

    def ids(self) -> list[str]:
        """In order."""
        return [
            request.request_id
            for level in sorted(self._levels, reverse=True)
            for _, _, _, request in sorted(self._tags(level), key=lambda entry: entry[:3])
        ]

    def remove(self, request_id: str, taken: bool) -> None:
        for level, shares in self._levels.items():
            for client, share in shares.items():
                for index, (request, cost) in enumerate(share.requests):
                    if request.request_id == request_id:
                        self._remove(level, client, index, cost, taken)
                        return

    def _remove(self, level: tuple[bool, int], client: str, index: int, cost: int, taken: bool) -> None:
        share = self._levels[level][client]
        first_tag = share.start + share.requests[0][1]
        if taken and index > 0:
            share.debt += cost
        if taken:
            self._virtual_time[level] = max(self._virtual_time[level], first_tag + share.debt)
        del share.requests[index]
        if index == 0:
            share.start = (first_tag if taken else share.start) + share.debt
            share.debt, share.made_at = 0, self._tick()
        if not share.requests:
            del self._levels[level][client]
        if not self._levels[level]:
            del self._levels[level], self._virtual_time[level]

    def _tags(self, level: tuple[bool, int]) -> list[tuple[int, int, int, Request]]:
        tagged = []
        for share in self._levels[level].values():
            tag = share.start
            for index, (request, cost) in enumerate(share.requests):
                tag += cost + (share.debt if index == 1 else 0)
                tagged.append((tag, share.made_at, index, request))
        return tagged

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
