"""One attempt at a leg: admitted by decode, prefilled, handed over, decoded. All of it can fail; nothing stays behind.

    generate ----------------------------------------------------------------> reply (counts only)
        admitted -> prefill -> first token -> (KV moves) -> frames: tokens ... the last one

Whatever way it ends, its calls are over or cancelled and its mailbox is closed. Calls run as tasks in a context of
their own: Serve cancels what a request's context started when the client goes; we cancel by ourselves, explicitly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from cluster.policies.routing_policy import Route
from cluster.routing.attempt_failed import AttemptFailed, Stage
from cluster.routing.attempt_parts import AttemptParts
from cluster.routing.detached_tasks import retrieve, start_detached, wait_for_any
from cluster.routing.generation import Leg
from cluster.routing.mailboxes import Admitted, Cached, ChannelLost, Drafted, Mail
from cluster.routing.model_binding import OtherModel
from cluster.routing.pool_client import ReplicaLost
from cluster.routing.prompt_forecast import SentPrompt
from replicas.channels.wire import MalformedMessage, NotSendable
from replicas.messages import (
    CallStatus,
    GenerateCall,
    GenerateReply,
    PrefillCall,
    PrefillReply,
    PromptLogprobs,
    Token,
    TransferPeer,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Move(Protocol):
    """Of an attempt that is to go on at another replica: `cluster.routing.move`."""

    def passed_on(self) -> Attempt:
        """Its replica has let go of it: the attempt that goes on."""

    def close(self) -> None:
        """It ends by itself."""


class AttemptMoved(Exception):
    """Another attempt goes on with the leg, behind the last token of this one."""

    def __init__(self, successor: Attempt) -> None:
        super().__init__(successor)
        self.successor = successor


class Attempt:
    """One try of one leg on one route. Use once: `open()`, `await run()`; `close()` whatever happened between."""

    def __init__(
        self,
        leg: Leg,
        route: Route,
        prompt: SentPrompt,
        parts: AttemptParts,
        *,
        request_id: str,
        timeout_s: float,
    ) -> None:
        self.route, self._prompt = route, prompt
        self.stage = Stage.QUEUE  # where it is now
        self.leg, self._spec = leg, leg.attempt_spec()
        self.request_id, self._timeout_s = request_id, timeout_s
        self.parts, self._decode, self._view, self._limits = parts, parts.decode, parts.view, parts.limits
        self.move: Move | None = None  # on its way to another replica
        self._counted: Mapping[int, int] | None = None  # all that it sends here, by choice, once it is moved
        self._generate: asyncio.Task[GenerateReply] | None = None
        self._source: TransferPeer | None = None
        self._reader: TransferPeer | None = None
        self._num_from_prefill = 0  # tokens of each choice: none of a beam search that goes on
        self._is_unheard = True
        self._is_coming = False  # its KV, by the pair's way
        self._is_closed = False

    def open(self) -> None:
        """Count it in, before anything is awaited: the next request is routed in the knowledge of this one.

        Whom it reads from and who reads is looked up now: a replica that leaves the pool still ends what it has begun.
        """
        self.leg.model = self.route.model
        self.decode_metadata = self._view.decode_metadata(self.route.decode_id)
        if self.route.prefill_id is not None:
            self._source = self._view.prefill_peer(self.route.prefill_id)
            self._reader = self._view.decode_peer(self.route.decode_id)
        self._box = self.parts.mailboxes.open(self.request_id, self.route.decode_id)
        # What is expected to be in their caches is neither computed nor read.
        self._computed_tokens = self._spec.prompt_len - self.route.cached_tokens
        self._read_tokens = self._spec.prompt_len - self.route.kept_tokens
        self._local_tokens = self._computed_tokens if self.route.prefill_id is None else 0
        self._view.sent(self.route.decode_id, self.route.decode_blocks, self.route.must_wait, self._local_tokens)
        self._view.pairs.sent(self.route, self._read_tokens)
        self._is_coming = True
        if self.route.prefill_id is not None:
            self._view.prompt_coming(self.route.prefill_id, self._computed_tokens)
        self._trace = self.leg.generation.trace.attempt(self.route)

    async def run(self) -> None:
        """Emit the leg's tokens to the end. Raises AttemptFailed; AttemptMoved, when all that decode has sent is
        emitted and another attempt goes on. Cancelling it ends both replicas' work."""
        try:
            await self._take_tokens(await self._begin())
        except OtherModel as error:
            raise self._failed(CallStatus.ERROR, str(error)) from error
        finally:
            self.close()

    def close(self) -> None:
        """No call, mailbox or count of it remains. Idempotent; needed even if `run` never got to run."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_generate()
        if self.move is not None:
            self.move.close()
        self.parts.mailboxes.close(self.request_id)
        self._heard()
        self._arrived()
        self._prompt.close()
        self._view.ended(self.route.decode_id)

    @property
    def may_move(self) -> bool:
        """Whether it could go on elsewhere from where it is now: it is decoded, and nobody has asked yet."""
        return self.stage is Stage.DECODE and self.move is None and not self.leg.is_search and not self.leg.is_done

    # -- the phases --------------------------------------------------------------------------------

    async def _begin(self) -> float:
        """Until decode waits for KV, or computes it itself. By when it is to have it."""
        generate = self._submit(0)
        await self._prompt.went_out()
        await self._wait_admitted(self._limits.queue_timeout_s)
        handoff_by_s = time.monotonic() + self._limits.handoff_timeout_s
        if self.route.prefill_id is not None:
            await self._run_prefill(self.route.prefill_id, generate, handoff_by_s)
        return handoff_by_s

    def _submit(self, num_generated: int) -> asyncio.Task[GenerateReply]:
        timeout_s, channel = self._timeout_s, self.parts.channel
        call = GenerateCall(self.request_id, self._spec, timeout_s, channel, self._source, num_generated)
        self._generate = start_detached(self._decode.submit(self.route.decode_id, call))
        self._generate.add_done_callback(self._trace.ended)
        self._generate.add_done_callback(self._prompt.ended)
        return self._generate

    async def _wait_admitted(self, timeout_s: float) -> None:
        mail = await self._next_mail(timeout_s)
        if not isinstance(mail, Admitted):
            raise self._failed(CallStatus.ERROR, f"{type(mail).__name__} before admission")
        self._heard()
        if self.route.prefill_id is None:
            self._found(0)
        self._trace.admitted()
        self.stage = Stage.PREFILL

    async def _run_prefill(self, prefill_id: str, generate: asyncio.Task[GenerateReply], handoff_by_s: float) -> None:
        assert self.parts.prefill is not None
        assert self._reader is not None
        self._view.prompt_sent(prefill_id, self._computed_tokens)
        prefill = PrefillCall(self.request_id, self._spec, self._timeout_s, self._reader)
        call = start_detached(self.parts.prefill.submit(prefill_id, prefill))
        try:
            await wait_for_any(call, generate, timeout_s=handoff_by_s - time.monotonic())
            if not call.done() and generate.done():
                # It failed, or it was quicker than prefill's answer is: the handoff does not pass through us.
                self._check_generate(Stage.DECODE)
                await wait_for_any(call, timeout_s=self._limits.tail_s)
            if not call.done():
                raise self._failed(CallStatus.TIMEOUT, "prefill has not answered in time")
            reply: PrefillReply = self._result(call, Stage.PREFILL)
        finally:
            call.cancel()
            self._view.prompt_answered(prefill_id, self._computed_tokens)
        self._view.heard_load(prefill_id, reply.load)
        self._prompt.prefilled(reply)
        if reply.status is not CallStatus.OK:
            raise self._failed(reply.status, reply.detail, may_retry=reply.status.may_retry)
        self._found(reply.num_cached)
        self._num_from_prefill = 1 if reply.first_tokens else 0
        try:
            await self.leg.take_scores(reply.prompt_scores)
        except MalformedMessage as error:
            raise self._failed(CallStatus.ERROR, str(error)) from error
        for token in reply.first_tokens:
            self.leg.take(token)
        self._trace.prefilled(reply)
        self.stage = Stage.TRANSFER

    async def _take_tokens(self, handoff_by_s: float) -> None:
        is_over = self.leg.is_done
        while not is_over and self.stage is not Stage.DECODE:
            is_handing_over = self.stage is Stage.TRANSFER
            is_over = self._take(await self._next_mail(handoff_by_s - time.monotonic() if is_handing_over else None))
        if self.stage is Stage.DECODE:
            self._arrived()
            self._view.pairs.worked(self.route)
            self._trace.handed_over()
        if not is_over:
            over = self._box.pass_on(self._take)
            over.add_done_callback(retrieve)
            await self._wait_for(over, None)
            over.result()

    def _take(self, mail: Mail) -> bool:
        """Emit what has come; whether it was the last token from here. Raises AttemptFailed, ProtocolError."""
        if isinstance(mail, Token):
            self.leg.take(mail)
            self.stage = Stage.DECODE
            return (mail.finish_reason is not None and self.leg.is_done) or self._is_all_here
        if isinstance(mail, ChannelLost):
            raise self._failed(CallStatus.ERROR, mail.detail, Stage.DECODE)
        if isinstance(mail, PromptLogprobs):
            self.leg.take_prompt(mail)
        if isinstance(mail, Cached) and self.route.prefill_id is None:  # else prefill says what nobody had to compute
            self._found(mail.num_tokens)
        if isinstance(mail, Drafted):
            self.leg.generation.drafts.tell(self.request_id, mail.num_drafted, mail.num_accepted)
        if isinstance(mail, Admitted):  # once more: the KV of a beam search is there, its tokens come at its end
            self.stage = Stage.DECODE
        return False

    def _found(self, num_tokens: int) -> None:
        """So much of it was in the prefix cache of the engine that computes its prompt."""
        generation, is_local = self.leg.generation, self.route.prefill_id is None
        generation.finding.tell(self.request_id, min(num_tokens, generation.spec.prompt_len), is_local)

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

    def _heard(self) -> None:
        if self._is_unheard:
            self._is_unheard = False
            route = self.route
            self._view.admitted(route.decode_id, route.decode_blocks, route.must_wait, self._local_tokens)
            if route.prefill_id is not None:
                self._view.prompt_came(route.prefill_id, self._computed_tokens)

    def _arrived(self) -> None:
        """Its KV is no longer on its way."""
        if self._is_coming:
            self._is_coming = False
            self._view.pairs.arrived(self.route, self._read_tokens)

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
