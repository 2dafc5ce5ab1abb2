"""Which running attempts go on at another decode replica: all of one that leaves, and the least important ones of one
whose memory runs short, as soon as others have room.

What is moved goes to a replica of the same model that has room for all that may come of it. Who finds none stays where
it is until there is one, or until its replica's drain is over: then it is replayed, as after a death.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import DecodeCandidate, Need, Route, RouteKind, RoutingRules
from cluster.routing.attempt import Attempt
from cluster.routing.decode_side import AttemptMoved
from cluster.routing.move import Move, MoveOutcome
from cluster.routing.moved_attempt import MovedAttempt
from cluster.routing.pairing import choose_decode
from cluster.routing.pool_view import PoolView
from cluster.routing.router_limits import MigrationLimits

logger = logging.getLogger(__name__)

_LOOK_S = 0.02  # how often is looked for who may be moved now
_PAUSE_S = 0.5  # before one that was refused is tried again
_RELIEF_S = 0.2  # between two moves from a replica that is short of memory: the first is to show in what it says
_STAYS_S = 5.0  # before one that was moved for memory is so again
LEAVING = "leaving"  # why: values of the label `cause` of splitserve_migrations_total
MEMORY = "memory"


class Moves:
    """One per router, on its event loop."""

    def __init__(
        self, view: PoolView, rules: RoutingRules, limits: MigrationLimits, block_size: int, metrics: IngressMetrics
    ) -> None:
        self._view, self._rules, self._limits = view, rules, limits
        self._block_size, self._metrics = block_size, metrics
        self._running: dict[str, dict[Attempt, float]] = {}  # by decode replica, with their deadlines
        self._leaving: set[str] = set()
        self._paused: dict[Attempt, float] = {}  # until then
        self._relieved_s: dict[str, float] = {}  # by decode replica: not again before
        self._open: set[Move] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def known(self, attempt: Attempt, deadline_s: float) -> Iterator[None]:
        """While it runs it may be moved."""
        decode_id = attempt.route.decode_id
        if isinstance(attempt, MovedAttempt) and attempt.cause == MEMORY:
            self._paused[attempt] = time.monotonic() + _STAYS_S
        self._running.setdefault(decode_id, {})[attempt] = deadline_s
        try:
            yield
        finally:
            self._paused.pop(attempt, None)
            here = self._running[decode_id]
            del here[attempt]
            if not here:
                del self._running[decode_id]

    def leaving(self, replica_id: str) -> None:
        """It has said that it leaves: what is open there goes on elsewhere. As often as it says so: something may have
        been on its way there."""
        if not self._limits.enabled:
            return
        self._leaving.add(replica_id)
        if replica_id in self._running and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._empty_all(), context=contextvars.Context())

    def relieve(self, replica_id: str) -> None:
        """Its memory is running short: the youngest of the least important goes on elsewhere, if somebody has room."""
        now_s = time.monotonic()
        if not (self._limits.enabled and self._limits.relieve_memory) or now_s < self._relieved_s.get(replica_id, 0.0):
            return
        self._relieved_s[replica_id] = now_s + _RELIEF_S
        here = reversed(list(self._running.get(replica_id, ())))
        able = [one for one in here if one.may_move and self._paused.get(one, 0.0) <= now_s]
        if able:
            self.start(min(able, key=lambda one: one.leg.generation.spec.priority), MEMORY)

    def left(self, present: Collection[str]) -> None:
        """These replicas there are now: of those that left nothing is kept once nothing is open there."""
        self._leaving = {name for name in self._leaving if name in present or name in self._running}
        self._relieved_s = {name: at_s for name, at_s in self._relieved_s.items() if name in present}

    async def stop(self) -> None:
        """Look for nobody any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def start(self, attempt: Attempt, cause: str) -> bool:
        """Move it, if somebody has room. It must be one that may be moved."""
        route = self._find(attempt)
        if route is None:
            return False
        deadline_s = self._running[attempt.route.decode_id][attempt]
        successor = MovedAttempt(
            attempt, route, cause, request_id=uuid.uuid4().hex, deadline_s=deadline_s, on_first=self._on_first
        )
        self._open.add(Move(successor, self._limits.admit_timeout_s, self._on_refused))
        return True

    @staticmethod
    def successor(moved: AttemptMoved) -> Attempt:
        """The attempt that goes on."""
        assert isinstance(moved.successor, Attempt), "only attempts are moved"
        return moved.successor

    def failed(self, attempt: Attempt) -> None:
        """An attempt has: if it was moved and has brought nothing, or was on its way elsewhere, its KV is lost."""
        if isinstance(attempt, MovedAttempt) and not attempt.has_begun:
            self._tell(attempt, MoveOutcome.LOST)
        if isinstance(attempt.move, Move):  # its replica has gone before it could pass it on
            self._tell(attempt.move.successor, MoveOutcome.LOST)

    # -- a replica that leaves ---------------------------------------------------------------------

    async def _empty_all(self) -> None:
        while any(name in self._running for name in self._leaving):
            try:
                for name in sorted(self._leaving):
                    self._empty(name)
            except Exception:
                logger.exception("moving requests failed; it goes on", extra={"event": "moves_failed"})
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(_LOOK_S)

    def _empty(self, replica_id: str) -> None:
        now_s = time.monotonic()
        self._open = {move for move in self._open if move.is_open}
        for attempt in list(self._running.get(replica_id, ())):
            if len(self._open) >= self._limits.max_at_once:
                return
            if attempt.may_move and self._paused.get(attempt, 0.0) <= now_s and not self.start(attempt, LEAVING):
                self._paused[attempt] = now_s + _PAUSE_S

    # -- where to ----------------------------------------------------------------------------------

    def _find(self, attempt: Attempt) -> Route | None:
        """A replica like its own with room for it now."""
        need = self._need(attempt)
        fingerprint = attempt.decode_metadata["peer"]["fingerprint"]

        def is_able(one: DecodeCandidate) -> bool:
            is_other = one.replica_id != attempt.route.decode_id and one.replica_id not in self._leaving
            is_like = one.fingerprint == fingerprint and one.total_blocks >= need.decode_blocks
            return is_other and is_like and not one.must_wait(need)

        able = [one for one in self._view.decode_candidates() if is_able(one)]
        chosen = choose_decode(need, able, self._rules) if able else None
        if not isinstance(chosen, DecodeCandidate):
            return None
        blocks = chosen.projected_blocks(need)
        return Route(
            RouteKind.MOVED, chosen.replica_id, None, must_wait=False, decode_blocks=blocks, model=chosen.model
        )

    def _need(self, attempt: Attempt) -> Need:
        """As if its prompt were all that it has by now."""
        spec = attempt.leg.moved_spec()
        num_known = max([attempt.leg.num_taken(choice) for choice in spec.choices])
        num_left = max(1, spec.max_tokens - num_known)
        return Need(spec.prompt_len + num_known, num_left, len(spec.choices), self._block_size)

    # -- what came of it ---------------------------------------------------------------------------

    def _on_refused(self, move: Move, reason: str) -> None:
        old = move.successor.old
        if old in self._running.get(old.route.decode_id, ()):
            self._paused[old] = time.monotonic() + _PAUSE_S
        self._tell(move.successor, MoveOutcome.REFUSED, reason)

    def _on_first(self, attempt: MovedAttempt) -> None:
        self._metrics.moved(time.monotonic() - (attempt.ordered_s or 0.0), attempt.num_tokens)
        self._tell(attempt, MoveOutcome.MOVED)

    def _tell(self, attempt: MovedAttempt, outcome: MoveOutcome, reason: str = "") -> None:
        self._metrics.migrated(attempt.cause, outcome)
        where = {"from": attempt.old.route.decode_id, "to": attempt.route.decode_id, "cause": attempt.cause}
        extra = {"event": "migration", "generation": attempt.leg.generation.generation_id, "outcome": str(outcome)}
        level = logging.INFO if outcome is MoveOutcome.MOVED else logging.WARNING
        logger.log(level, "migration: %s", outcome, extra={**extra, **where, "reason": reason})
