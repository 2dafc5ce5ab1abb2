"""Who waits at a simulated router: for decode to admit him, for prefill, for replicas on their way; and who is held as
a pool has no replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from cluster.policies.routing_policy import Need, NeverFits, Route, Unavailable
from cluster.routing.order_book import OrderBook
from cluster.routing.prompt_room import PromptRoom, WaitingPrompt
from cluster.routing.replica_orders import waits_until
from cluster.routing.waiting_room import Waiting, WaitingRoom
from cluster.simulation.client import Attempt, Client
from cluster.simulation.router_times import RouterTimes

# Orders come and go while somebody waits: his patience is looked at so often, as cluster.routing.admission_wait does.
_LOOK_AGAIN_S = 1.0
# As in cluster.routing.router_limits.
_TAIL_S = 5.0


class SimulatedWaits:
    """One per router: cluster.routing.admission_wait on the simulated clock."""

    def __init__(self, times: RouterTimes, clock: Callable[[], float]) -> None:
        self.orders = OrderBook(self, times.cold_start_timeout_s, clock)
        self.held = HeldClients()
        self.num_moves = 0
        self._times = times
        self._room: WaitingRoom[Attempt] = WaitingRoom(times.settle_s)
        self._seats: dict[str, Waiting[Attempt]] = {}  # by attempt
        self._prompts: PromptRoom[Attempt] = PromptRoom(times.settle_s)
        self._sent: dict[str, WaitingPrompt[Attempt]] = {}  # by attempt
        self._prompt_moves: Counter[int] = Counter()  # by job
        self._asked_s: dict[int, float] = {}  # by job: since when it waits for prefill, before it was moved too
        self._moves: dict[int, tuple[float, int]] = {}  # of those that were moved: waiting since, and how often, by job

    def on_their_way(self, pool: str, num_replicas: int, start_s: float) -> None:
        """Nobody looks at it here."""

    def enter(self, attempt: Attempt, now_s: float) -> None:
        """It has been sent to decode. Mutates."""
        client = attempt.client
        _, num_moves = self._moves.setdefault(client.job.index, (now_s, 0))
        is_begun = client.num_tokens > 0
        seat: Waiting[Attempt] = Waiting(attempt.route.decode_id, now_s, client.job.arrival_s, is_begun, num_moves)
        seat.who = attempt
        self._seats[attempt.request_id] = seat
        self._room.enter(seat)

    def leave(self, attempt: Attempt) -> None:
        """It has been admitted, or is over. Idempotent. Mutates."""
        self._moves.pop(attempt.client.job.index, None)
        self._stand_up(attempt)

    def _stand_up(self, attempt: Attempt) -> None:
        if (seat := self._seats.pop(attempt.request_id, None)) is not None:
            self._room.leave(seat)

    def prompt_sent(self, attempt: Attempt, now_s: float) -> None:
        """To prefill. Mutates."""
        assert attempt.route.prefill_id is not None
        num_moves = self._prompt_moves[attempt.client.job.index]
        prompt: WaitingPrompt[Attempt] = WaitingPrompt(
            attempt.route.prefill_id, attempt.computed_tokens, now_s, num_moves
        )
        prompt.who = attempt
        self._sent[attempt.request_id] = prompt
        self._asked_s.setdefault(attempt.client.job.index, now_s)
        self._prompts.enter(prompt)

    def prompt_over(self, attempt: Attempt) -> None:
        """Prefill has answered, or is not waited for any more. Idempotent. Mutates."""
        if (prompt := self._sent.pop(attempt.request_id, None)) is not None:
            self._prompts.leave(prompt)

    def movable(
        self,
        now_s: float,
        queued_at: Mapping[str, int],
        decide: Callable[[Attempt], Route | NeverFits | Unavailable],
    ) -> Iterator[tuple[Attempt, Route]]:
        """Who goes where, as of WaitingRoom and PromptRoom (queued_at). Who is yielded goes on as another attempt, and
        has waited for decode since it came. Mutates."""
        for attempt, route in self._room.movable(now_s, decide):
            began_s, num_moves = self._moves[attempt.client.job.index]
            self._moves[attempt.client.job.index] = began_s, num_moves + 1
            self._stand_up(attempt)
            self.num_moves += 1
            yield attempt, route
        if not self._prompts.is_due(now_s):
            return
        for attempt, route in self._prompts.movable(now_s, queued_at, decide):
            self._prompt_moves[attempt.client.job.index] += 1
            self.num_moves += 1
            yield attempt, route

    def admission_over_s(self, attempt: Attempt, now_s: float) -> float | None:
        """When to look again whether it still waits for decode; None: it is too late."""
        began_s, _ = self._moves[attempt.client.job.index]
        return self._look_again("decode", began_s, self._times.queue_timeout_s, now_s)

    def prompt_over_s(self, attempt: Attempt, began_s: float, now_s: float) -> float | None:
        """Likewise, for prefill since began_s, and for its KV."""
        if not attempt.is_prefilling:
            until_s = attempt.answered_s + _TAIL_S
            return until_s if now_s < until_s else None
        timeout_s, asked_s = self._times.handoff_timeout_s, self._asked_s[attempt.client.job.index]
        looks = [self._look_again("prefill", since_s, timeout_s, now_s) for since_s in (asked_s, began_s)]
        return max((look for look in looks if look is not None), default=None)

    def _look_again(self, pool: str, began_s: float, timeout_s: float, now_s: float) -> float | None:
        longest_s = self._times.cold_start_timeout_s
        until_s = waits_until(began_s, timeout_s, longest_s, self.orders.coming(pool))
        return None if now_s >= until_s else min(until_s, max(now_s, began_s + timeout_s) + _LOOK_AGAIN_S)


class HeldClients:
    """For the demand that autoscaling sees."""

    def __init__(self) -> None:
        self._held: list[tuple[Client, Need]] = []

    def hold(self, client: Client, need: Need) -> None:
        self._held.append((client, need))

    def release(self) -> list[Client]:
        """All who have not given up. Mutates: nobody is held any more."""
        held, self._held = self._held, []
        return [client for client, _ in held if not client.is_over]

    @property
    def num_held(self) -> int:
        return sum(not client.is_over for client, _ in self._held)

    @property
    def held_blocks(self) -> int:
        return sum(need.decode_blocks for client, need in self._held if not client.is_over)

    @property
    def held_prompt_tokens(self) -> int:
        return sum(need.prompt_tokens for client, need in self._held if not client.is_over)
