"""What an attempt has to do with its decode replica: the generate call, the mail, and how both end or fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from cluster.policies.routing_policy import Route, RouteKind
from cluster.routing.attempt_failed import AttemptFailed, Stage
from cluster.routing.attempt_parts import AttemptParts
from cluster.routing.detached_tasks import start_detached, wait_for_any
from cluster.routing.generation import Leg
from cluster.routing.mailboxes import Mail
from cluster.routing.pool_client import ReplicaLost
from replicas.channels.wire import NotSendable
from replicas.messages import CallStatus, GenerateCall, GenerateReply, TransferPeer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Move(Protocol):
    """Of an attempt that is to go on at another replica: `cluster.routing.move`."""

    def passed_on(self) -> DecodeSide:
        """Its replica has let go of it: the attempt that goes on."""

    def close(self) -> None:
        """It ends by itself."""


class AttemptMoved(Exception):
    """Another attempt goes on with the leg, behind the last token of this one."""

    def __init__(self, successor: DecodeSide) -> None:
        super().__init__(successor)
        self.successor = successor


class DecodeSide:
    """`Attempt` is built on it."""

    def __init__(self, leg: Leg, route: Route, parts: AttemptParts, request_id: str, deadline_s: float) -> None:
        self.leg, self.route, self.parts, self.request_id = leg, route, parts, request_id
        self.stage = Stage.QUEUE  # where it is now
        self.move: Move | None = None  # on its way to another replica
        self._spec, self._deadline_s = leg.attempt_spec(), deadline_s
        self._view, self._limits = parts.view, parts.limits
        self.decode = parts.pool_of(route.decode_id)  # also when the replica is no more in it
        self._source: TransferPeer | None = None
        self._generate: asyncio.Task[GenerateReply] | None = None
        self._num_from_prefill = 0  # tokens of each choice: none of a beam search that goes on
        self._counted: Mapping[int, int] | None = None  # all that come from here, by choice, once it is moved

    def _open_box(self) -> None:
        self._box = self.parts.mailboxes.open(self.request_id, self.route.decode_id)

    def _submit(
        self, num_generated: int = 0, *tell_ended: Callable[[asyncio.Task[GenerateReply]], None]
    ) -> asyncio.Task[GenerateReply]:
        """Ask decode. num_generated: as in the call. tell_ended: told when the call is over."""
        call = GenerateCall(
            self.request_id, self._spec, self._deadline_s - time.monotonic(), self.parts.channel, self._source,
            has_begun=self.leg.has_begun, is_suspect=self.route.kind is RouteKind.SUSPECT, num_generated=num_generated,
        )  # fmt: skip
        self._generate = start_detached(self.decode.submit(self.route.decode_id, call))
        for tell in tell_ended:
            self._generate.add_done_callback(tell)
        return self._generate

    # -- mail --------------------------------------------------------------------------------------

    async def _next_mail(self, timeout_s: float | None) -> Mail:
        """The next thing decode says. Raises AttemptFailed when nothing more can come, or not in time.

        timeout_s None: there is only the deadline of the whole request.
        """
        if (mail := self._box.get_nowait()) is not None:
            return mail
        await self._wait_for(self._box.arrival(), timeout_s)
        mail = self._box.get_nowait()
        assert mail is not None, "it has arrived, and nobody else takes it"
        return mail

    async def _wait_for(self, awaited: asyncio.Future[Any], timeout_s: float | None) -> None:
        """Until frames make it done. Raises AttemptFailed when decode's call ended and they can't, or not in time."""
        assert self._generate is not None
        await wait_for_any(awaited, self._generate, timeout_s=timeout_s)
        if not awaited.done() and self._generate.done():
            # Its reply is here, its frames may still be on their way: wait for what it counts, no longer.
            reply = self._check_generate(self.stage)
            if reply.status is CallStatus.MOVED:
                await self._go_on_elsewhere(reply, awaited)
            if not any(n > self._num_from_decode(c) for c, n in reply.num_tokens_sent):
                raise self._failed(CallStatus.ERROR, "decode ended without the last token")
            await self._wait_for_tail(awaited)
        if not awaited.done():
            raise self._failed(CallStatus.TIMEOUT, "nothing heard in time")

    @property
    def _is_all_here(self) -> bool:
        """Whether every token has come that decode counts in its reply."""
        counted = self._counted
        return counted is not None and not any(n > self._num_from_decode(c) for c, n in counted.items())

    async def _go_on_elsewhere(self, reply: GenerateReply, over: asyncio.Future[Any]) -> NoReturn:
        """Raises AttemptMoved when the last token from here has come; AttemptFailed, also if nobody knows of a move."""
        if self.move is None:
            raise self._failed(CallStatus.ERROR, "decode has let go of it, for nobody")
        self._counted = dict(reply.num_tokens_sent)
        if not self._is_all_here:
            await self._wait_for_tail(over)
        if over.done():
            over.result()
        raise AttemptMoved(self.move.passed_on())

    async def _wait_for_tail(self, awaited: asyncio.Future[Any]) -> None:
        await wait_for_any(awaited, timeout_s=self._limits.tail_s)
        if not awaited.done():
            raise self._failed(CallStatus.ERROR, "frames that decode counts have not come")

    def _num_from_decode(self, choice: int) -> int:
        """Tokens of a choice that came in frames: all but the one that came from prefill."""
        return self.leg.num_taken(choice) - self._num_from_prefill

    # -- the generate call -------------------------------------------------------------------------

    def _check_generate(self, stage: Stage) -> GenerateReply:
        """The reply that has come. Raises AttemptFailed unless it is OK, or it goes on elsewhere."""
        assert self._generate is not None
        reply = self._result(self._generate, stage)
        if reply.status not in (CallStatus.OK, CallStatus.MOVED):
            stage = Stage.TRANSFER if reply.status is CallStatus.KV_LOST else stage
            raise self._failed(reply.status, reply.detail, stage, may_retry=reply.status.may_retry)
        return reply

    def _end_generate(self) -> None:
        """A leg that decode finished: its call is about to answer by itself. Any other is cancelled now."""
        if self._generate is None or self._generate.done():
            return
        if self.leg.is_done and any(self._num_from_decode(c) > 0 for c in self.leg.open_choices):
            timer = asyncio.get_running_loop().call_later(self._limits.tail_s, self._generate.cancel)
            self._generate.add_done_callback(lambda _: timer.cancel())
        else:
            self._generate.cancel()

    # -- failures ----------------------------------------------------------------------------------

    def _result(self, call: asyncio.Task[_T], stage: Stage) -> _T:
        """What a finished call returned. Raises AttemptFailed, whatever it failed with."""
        if call.cancelled():
            raise self._failed(CallStatus.ERROR, "its call was cancelled", stage)
        error = call.exception()
        if error is None:
            return call.result()
        if isinstance(error, ReplicaLost):
            raise self._failed(CallStatus.ERROR, str(error), stage) from error
        # The client gets no more than its name: the text could be anything.
        logger.error("call failed", exc_info=error, extra={"event": "call_failed", "stage": stage})
        may_retry = not isinstance(error, NotSendable)
        raise self._failed(CallStatus.ERROR, type(error).__name__, stage, may_retry) from error

    def _failed(
        self, status: CallStatus, detail: str, stage: Stage | None = None, may_retry: bool = True
    ) -> AttemptFailed:
        return AttemptFailed(stage or self.stage, status, detail, may_retry)
