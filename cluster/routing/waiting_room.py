"""Who waits for a decode replica to admit it, and who of them goes to another one that has room. No I/O; time is an
argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.policies.routing_policy import NeverFits, Route, Unavailable
from cluster.routing.settling_room import SettlingRoom

WhoT = TypeVar("WhoT")

# So many may not fit anywhere before those behind them are not asked any more.
_MAX_UNFIT = 8


@dataclass(slots=True)
class Waiting(Generic[WhoT]):
    """One that was sent to a decode replica and has not been admitted, as far as is known. is_begun: its client has got
    tokens. came_s: when its request came, over all attempts: its place. num_moves: how often it was moved already.
    priority, client: as an engine's own queue goes by them (scheduler.waiting_queue)."""

    decode_id: str
    sent_s: float
    came_s: float
    is_begun: bool = False
    num_moves: int = 0
    priority: int = 0
    client: str = ""
    who: WhoT = field(init=False)

    @property
    def level(self) -> tuple[bool, int]:
        """Whoever has begun goes first, then who has the higher priority."""
        return not self.is_begun, -self.priority


class WaitingRoom(SettlingRoom[Waiting[WhoT]], Generic[WhoT]):
    """One per router."""

    def movable(
        self, now_s: float, decide: Callable[[WhoT], Route | NeverFits | Unavailable | None]
    ) -> Iterator[tuple[WhoT, Route]]:
        """Who goes where, the first of them first: to where it is admitted at once, so as many as there is room for.

        decide: where one would go as things are now; None: nowhere, it is being admitted. What was yielded must be
        counted before the next one is asked for: each goes in the knowledge of those before it. Those who are moved
        leave the room by themselves. Mutates.
        """
        settled = [waiting for waiting in self._look(now_s) if self._has_settled(waiting, now_s)]
        num_unfit = 0
        for waiting in _in_order(settled):
            route = decide(waiting.who)
            if route is None:
                continue
            if isinstance(route, Route) and not route.must_wait:
                if route.decode_id != waiting.decode_id:  # else it is about to be admitted where it is
                    yield waiting.who, route
                continue
            num_unfit += 1
            if num_unfit >= _MAX_UNFIT:
                return


def _in_order(settled: Iterable[Waiting[WhoT]]) -> list[Waiting[WhoT]]:
    """By level; of one level each client's first ones before their second ones; of these who came first."""
    turns: Counter[tuple[tuple[bool, int], str]] = Counter()
    ranked = []
    for waiting in sorted(settled, key=lambda found: found.came_s):
        of_client = waiting.level, waiting.client
        ranked.append((waiting.level, turns[of_client], waiting))
        turns[of_client] += 1
    return [waiting for _, _, waiting in sorted(ranked, key=lambda found: found[:2])]
