"""One attempt at a leg: admitted by decode, prefilled, handed over, decoded. All of it can fail; nothing stays behind.

    generate ----------------------------------------------------------------> reply (counts only)
        admitted -> prefill -> first token -> (KV moves) -> frames: tokens ... the last one

Whatever way it ends, its calls are over or cancelled and its mailbox is closed. Calls run as tasks in a
context of their own: Serve cancels what a request's context started when the client goes, and matches
concurrent calls of one request by an id in it; we cancel by ourselves, explicitly.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

from cluster.attempt_mailboxes import Admitted, ChannelLost, Mail, Mailboxes
from cluster.generation import Leg
from cluster.pool_client import PoolClient, ReplicaLost
from cluster.pool_view import PoolView
from cluster.routing_policy import Need, Route
from replicas.messages import (
    CallStatus,
    ChannelAddress,
    GenerateCall,
    GenerateReply,
    GenerationRequest,
    PrefillCall,
    PrefillReply,
    TokenItem,
)

_T = TypeVar("_T")


class Stage(StrEnum):
    """Where an attempt failed."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


class AttemptFailed(Exception):
    """This attempt is over without its last token. may_retry: another try, perhaps elsewhere, can succeed."""

    def __init__(self, stage: Stage, status: CallStatus, detail: str, may_retry: bool) -> None:
        super().__init__(stage, status, detail, may_retry)
        self.stage, self.status, self.detail, self.may_retry = stage, status, detail, may_retry

    def __str__(self) -> str:
        return f"{self.stage}: {self.status}: {self.detail}"


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """queue_s: for admission. handoff_s: from prefill's answer to the first token decode adds. tail_s: for
    frames that the reply counts and that have not come."""

    queue_s: float
    handoff_s: float
    tail_s: float = 5.0


class Attempt:
    """One try of one leg on one route. Use once: `await run()`."""

    def __init__(
        self,
        leg: Leg,
        request: GenerationRequest,
        route: Route,
        need: Need,
        *,
        decode: PoolClient,
        prefill: PoolClient | None,
        view: PoolView,
        mailboxes: Mailboxes,
        channel: ChannelAddress,
        limits: AttemptLimits,
        on_left_queue: Callable[[], None],
    ) -> None:
        self._leg, self._request, self._route, self._need = leg, request, route, need
        self._decode, self._prefill, self._view = decode, prefill, view
        self._mailboxes, self._channel, self._limits = mailboxes, channel, limits
        self._on_left_queue = on_left_queue  # called once: admitted, or over without
        self._is_unheard = True

    async def run(self) -> None:
        """Emit the leg's tokens to the end. Raises AttemptFailed; cancelling it ends both replicas' work."""
        decode_id = self._route.decode_id
        self._box = self._mailboxes.open(self._request.request_id, decode_id)
        self._view.sent(decode_id, self._need.decode_blocks)
        self._generate = _start(self._call_generate())
        try:
            await self._wait_admitted()
            if self._route.prefill_id is not None:
                await self._run_prefill(self._route.prefill_id)
            await self._take_tokens()
        finally:
            self._generate_over()
            self._mailboxes.close(self._request.request_id)
            self._heard()
            self._view.ended(decode_id)

    # -- the phases --------------------------------------------------------------------------------

    async def _wait_admitted(self) -> None:
        mail = await self._next_mail(self._limits.queue_s, Stage.QUEUE)
        if not isinstance(mail, Admitted):
            raise AttemptFailed(Stage.QUEUE, CallStatus.ERROR, f"{type(mail).__name__} before admission", True)
        self._heard()

    async def _run_prefill(self, prefill_id: str) -> None:
        assert self._prefill is not None
        try:
            reader = self._view.decode_peer(self._route.decode_id)
        except KeyError:
            raise AttemptFailed(Stage.DECODE, CallStatus.ERROR, "the decode replica has left", True) from None
        num_tokens = len(self._request.prompt_ids)
        self._view.prompt_sent(prefill_id, num_tokens)
        call = _start(self._prefill.call(prefill_id, "prefill", PrefillCall(self._request, reader)))
        try:
            await asyncio.wait({call, self._generate}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # decode gave up first: its reply says why
                self._raise_generate_failed(Stage.DECODE)
            reply: PrefillReply = call.result()
        except ReplicaLost as error:
            raise AttemptFailed(Stage.PREFILL, CallStatus.ERROR, str(error), True) from error
        finally:
            call.cancel()
            self._view.prompt_answered(prefill_id, num_tokens)
        self._view.heard_prefill(prefill_id, reply.load)
        if reply.status is not CallStatus.OK:
            raise _failure(Stage.PREFILL, reply.status, reply.detail)
        self._leg.take_first(reply.first_tokens)

    async def _take_tokens(self) -> None:
        stage, timeout_s = Stage.TRANSFER, self._limits.handoff_s
        if self._route.prefill_id is None:
            stage, timeout_s = Stage.PREFILL, self._request.timeout_s
        while not self._leg.is_done:
            mail = await self._next_mail(timeout_s, stage)
            if isinstance(mail, ChannelLost):
                raise AttemptFailed(Stage.DECODE, CallStatus.ERROR, mail.detail, True)
            if isinstance(mail, TokenItem):
                self._leg.take(mail)
                stage, timeout_s = Stage.DECODE, self._request.timeout_s

    async def _next_mail(self, timeout_s: float, stage: Stage) -> Mail:
        """The next thing decode says. Raises AttemptFailed when its call ended and nothing more can come."""
        if self._box.empty():
            get = asyncio.ensure_future(self._box.get())
            try:
                await asyncio.wait({get, self._generate}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    return get.result()
                if not self._generate.done():
                    raise AttemptFailed(stage, CallStatus.TIMEOUT, f"nothing for {timeout_s:g} s", True)
                return await self._tail_mail(get, stage)
            finally:
                get.cancel()
        return self._box.get_nowait()

    async def _tail_mail(self, get: asyncio.Future[Mail], stage: Stage) -> Mail:
        """The reply is here, its frames may still be on the way: wait for what it counts, no longer."""
        reply = self._generate_reply(stage)
        if reply.status is CallStatus.OK and any(n > self._leg_frames(c) for c, n in reply.num_tokens_sent):
            await asyncio.wait({get}, timeout=self._limits.tail_s)
            if get.done():
                return get.result()
            raise AttemptFailed(stage, CallStatus.ERROR, "frames that decode counts have not come", True)
        self._raise_generate_failed(stage)

    def _leg_frames(self, choice: int) -> int:
        """Tokens of a choice that came in frames: all but the one that came from prefill."""
        return self._leg.num_taken(choice) - (1 if self._route.prefill_id is not None else 0)

    # -- the generate call -------------------------------------------------------------------------

    async def _call_generate(self) -> GenerateReply:
        source = None
        if self._route.prefill_id is not None:
            try:
                source = self._view.prefill_peer(self._route.prefill_id)
            except KeyError:
                raise ReplicaLost(self._route.prefill_id, "has left", is_dead=False) from None
        call = GenerateCall(self._request, self._channel, source)
        reply: GenerateReply = await self._decode.call(self._route.decode_id, "generate", call)
        return reply

    def _generate_reply(self, stage: Stage) -> GenerateReply:
        try:
            return self._generate.result()
        except ReplicaLost as error:
            raise AttemptFailed(stage, CallStatus.ERROR, str(error), True) from error

    def _raise_generate_failed(self, stage: Stage) -> NoReturn:
        reply = self._generate_reply(stage)
        if reply.status is CallStatus.OK:
            raise AttemptFailed(stage, CallStatus.ERROR, "decode ended without the last token", True)
        raise _failure(Stage.TRANSFER if reply.status is CallStatus.KV_LOST else stage, reply.status, reply.detail)

    def _generate_over(self) -> None:
        """A finished leg's call is about to answer by itself, unless prefill's token ended it or it failed."""
        ended_by_decode = self._leg.is_done and any(self._leg_frames(c) > 0 for c in self._request.choices)
        if not ended_by_decode:
            self._generate.cancel()
        self._generate.add_done_callback(retrieve)

    def _heard(self) -> None:
        if self._is_unheard:
            self._is_unheard = False
            self._view.admitted(self._route.decode_id, self._need.decode_blocks)
            self._on_left_queue()


def _failure(stage: Stage, status: CallStatus, detail: str) -> AttemptFailed:
    return AttemptFailed(stage, status, detail, may_retry=status is not CallStatus.TIMEOUT)


def _start(coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    return asyncio.create_task(coroutine, context=contextvars.Context())


def retrieve(task: asyncio.Task[Any]) -> None:
    """Nobody waits for this result any more; do not let asyncio log it as never retrieved."""
    if not task.cancelled():
        task.exception()
