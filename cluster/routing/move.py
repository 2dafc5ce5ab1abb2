"""One running attempt on its way to another decode replica, until its own has stopped, or stays where it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum

from cluster.routing.attempt import Attempt
from cluster.routing.attempt_failed import AttemptFailed
from cluster.routing.detached_tasks import start_detached
from cluster.routing.moved_attempt import MovedAttempt

logger = logging.getLogger(__name__)


class MoveOutcome(StrEnum):
    """What came of a move: the values of the label `outcome` of splitserve_migrations_total."""

    MOVED = "moved"  # it goes on, without a token computed again
    REFUSED = "refused"  # one of the two replicas said no, or nothing in time: it goes on where it was
    LOST = "lost"  # its KV has not come: it is replayed


class Move:
    """Starts as soon as it is made. On the router's event loop; the old attempt has it as its `move`."""

    def __init__(self, successor: MovedAttempt, admit_s: float, on_refused: Callable[[Move, str], None]) -> None:
        """admit_s: how long the new replica may take to promise memory. on_refused: is told why it stays."""
        self.successor = successor
        self._admit_s, self._on_refused = admit_s, on_refused
        self._is_passed_on = False
        successor.open()
        successor.old.move = self
        self._task = start_detached(self._run())

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet what becomes of it."""
        return not self._task.done()

    def passed_on(self) -> Attempt:
        self._is_passed_on = True
        return self.successor

    def close(self) -> None:
        """The old attempt is over. Nothing of the new one remains, unless it was passed on."""
        if not self._is_passed_on:
            self._task.cancel()
            self.successor.close()

    async def _run(self) -> None:
        try:
            await self.successor.be_admitted(self._admit_s)
        except AttemptFailed as failure:
            self._refused(str(failure))
            return
        try:
            refusal = await self.successor.stop_old()
        except AttemptFailed as failure:
            # It may have stopped: then the old attempt ends, as moved or with its replica. Else it goes on there.
            extra = {"event": "move_unknown", "request": self.successor.old.request_id, "reason": str(failure)}
            logger.warning("nobody knows whether a request is moved", extra=extra)
            return
        if refusal:
            self._refused(refusal)

    def _refused(self, reason: str) -> None:
        self.successor.old.move = None
        self.successor.close()
        self._on_refused(self, reason)
