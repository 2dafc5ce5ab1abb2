"""Prompts that wait at prefill replicas, and which of them go to another one that would be done with them much sooner.
No I/O; time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.policies.routing_policy import NeverFits, Route, Unavailable
from cluster.routing.settling_room import SettlingRoom

WhoT = TypeVar("WhoT")

# What is before it there must be so many times less: to move costs what has been computed of it, and its blocks at
# decode are promised anew.
_GAIN = 2


@dataclass(slots=True)
class WaitingPrompt(Generic[WhoT]):
    """One that was sent to a prefill replica and is not answered. num_tokens: that it is to compute."""

    prefill_id: str
    num_tokens: int
    sent_s: float
    num_moves: int = 0
    who: WhoT = field(init=False)


class PromptRoom(SettlingRoom[WaitingPrompt[WhoT]], Generic[WhoT]):
    """One per router, which knows only of its own."""

    def movable(
        self,
        now_s: float,
        queued_at: Mapping[str, int],
        decide: Callable[[WhoT], Route | NeverFits | Unavailable | None],
    ) -> Iterator[tuple[WhoT, Route]]:
        """Who goes where, in the order in which they were sent: to a replica that has less than half as much before it.
        So the first of a queue, which are perhaps being computed, stay.

        queued_at: prompt tokens that wait at each prefill replica. decide: where one would go; None: nowhere. Mutates:
        who was yielded counts there.
        """
        queued, before = Counter(queued_at), Counter[str]()
        for prompt in self._look(now_s):
            here, num_tokens = prompt.prefill_id, prompt.num_tokens
            others = [count for name, count in queued.items() if name != here]
            if others and self._has_settled(prompt, now_s) and _is_sooner(min(others), before[here], num_tokens):
                route = decide(prompt.who)
                if isinstance(route, Route) and self._is_worth(route, prompt, queued, before[here]):
                    assert route.prefill_id is not None
                    queued[route.prefill_id] += num_tokens
                    yield prompt.who, route
                    continue
            before[here] += num_tokens

    def _is_worth(self, route: Route, prompt: WaitingPrompt[WhoT], queued: Mapping[str, int], num_before: int) -> bool:
        there = route.prefill_id
        if there is None or there == prompt.prefill_id or route.must_wait:
            return False
        return _is_sooner(queued[there], num_before, prompt.num_tokens)


def _is_sooner(num_there: int, num_before: int, num_tokens: int) -> bool:
    """Whether a prompt of num_tokens is done much sooner where num_there wait than where num_before are before it."""
    return _GAIN * num_there + num_tokens < num_before
