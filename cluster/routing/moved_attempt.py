"""An attempt that goes on with what another one has begun: its KV comes from the decode replica that it leaves.

    generate -> admitted -> migrate, to the replica that it leaves -> (KV moves) -> frames: tokens ... the last one
                                `-> that one's generate call ends as moved, with the counts of its last tokens

Until the other replica has stopped, nothing has changed: what fails costs the move. From then on it is an attempt like
any other, and what fails costs the attempt: the leg is replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.policies.routing_policy import Route
from cluster.routing.attempt import Attempt
from cluster.routing.attempt_failed import Stage
from cluster.routing.detached_tasks import start_detached, wait_for_any
from cluster.routing.prompt_forecast import SentPrompt
from replicas.messages import CallStatus, MigrateCall, MigrateReply


class MovedAttempt(Attempt):
    """`open()`, `await be_admitted()`, `await stop_old()`, and when the old attempt has ended, `await run()`; `close()`
    whatever happened."""

    def __init__(
        self,
        old: Attempt,
        route: Route,
        cause: str,
        *,
        request_id: str,
        deadline_s: float,
        on_first: Callable[[MovedAttempt], None],
    ) -> None:
        """cause: as in `moves`. on_first: told when the first token has come from the new replica."""
        super().__init__(old.leg, route, SentPrompt(), old.parts, request_id=request_id, deadline_s=deadline_s)
        self.old, self.cause = old, cause
        self.ordered_s: float | None = None  # when the old replica was told to stop
        self._spec = old.leg.moved_spec()
        self._on_first = on_first
        self._num_before: dict[int, int] | None = None  # tokens from elsewhere, by choice; None: they still come
        self._handoff_by_s = 0.0

    def open(self) -> None:
        super().open()
        self._source = self._view.peer(self.old.route.decode_id, self.old.decode_metadata)
        self._reader = self._view.decode_peer(self.route.decode_id)

    def _call_decode(self) -> None:
        """Later, when it is known from whom it reads: `be_admitted`."""

    @property
    def has_begun(self) -> bool:
        """Whether a token has come from the new replica."""
        return self.stage is Stage.DECODE

    @property
    def num_tokens(self) -> int:
        """Of the choice that has most: what need not be computed again."""
        return self._spec.prompt_len + max((self._num_before or {}).values(), default=0)

    async def be_admitted(self, timeout_s: float) -> None:
        """Have the new replica promise memory. Raises AttemptFailed."""
        self._submit(max([self.leg.num_taken(choice) for choice in self._spec.choices]), self._trace.ended)
        self._take_admission(await self._next_mail(timeout_s))
        self.stage = Stage.TRANSFER

    async def stop_old(self) -> str:
        """Have the old replica stop. Why it does not; empty: it does. Raises AttemptFailed: nobody knows."""
        assert self._generate is not None
        assert self._reader is not None
        if self._generate.done():
            self._check_generate(Stage.TRANSFER)
        limit_s = self._limits.handoff_timeout_s
        self.ordered_s = time.monotonic()
        self._handoff_by_s = self.ordered_s + limit_s
        migrate = MigrateCall(self.old.request_id, self.request_id, self._reader, limit_s)
        call = start_detached(self.old.decode.submit(self.old.route.decode_id, migrate))
        await wait_for_any(call, timeout_s=None)
        reply: MigrateReply = self._result(call, Stage.TRANSFER)
        return "" if reply.status is CallStatus.OK else reply.detail or reply.status

    async def _begin(self) -> float:
        self._num_before = {choice: self.leg.num_taken(choice) for choice in self.leg.open_choices}
        return self._handoff_by_s

    def _num_from_decode(self, choice: int) -> int:
        return 0 if self._num_before is None else self.leg.num_taken(choice) - self._num_before[choice]

    def _found(self, num_tokens: int) -> None:
        """What is in caches was counted when the prompt was computed."""

    def _arrived(self) -> None:
        if self._is_coming and self.has_begun:
            self._on_first(self)
        super()._arrived()
