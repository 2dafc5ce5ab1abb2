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
from typing import Any, TypeVar

from cluster.policies.routing_policy import Route, RouteKind
from cluster.routing.admission_wait import AdmissionWait
from cluster.routing.attempt_failed import AttemptFailed, Stage
from cluster.routing.detached_tasks import retrieve, start_detached, wait_for_any
from cluster.routing.generation import Leg
from cluster.routing.mailboxes import Admitted, Cached, ChannelLost, Drafted, Mail, Mailboxes
from cluster.routing.model_binding import OtherModel
from cluster.routing.pool_client import PoolClient, ReplicaLost
from cluster.routing.pool_view import PoolView
from cluster.routing.prompt_forecast import SentPrompt
from cluster.routing.router_limits import AttemptLimits
from replicas.channels.wire import MalformedMessage, NotSendable
from replicas.messages import (
    CallStatus,
    ChannelAddress,
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


class Attempt:
    """One try of one leg on one route. Use once: `open()`, `await run()`; `close()` whatever happened between."""

    def __init__(
        self,
        leg: Leg,
        route: Route,
        prompt: SentPrompt,
        *,
        request_id: str,
        deadline_s: float,
        decode: PoolClient,
        prefill: PoolClient | None,
        view: PoolView,
        mailboxes: Mailboxes,
        channel: ChannelAddress,
        limits: AttemptLimits,
        wait: AdmissionWait,
    ) -> None:
        self.route, self._prompt, self._wait = route, prompt, wait
        self.stage = Stage.QUEUE  # where it is now
        self._leg, self._spec = leg, leg.attempt_spec()
        self._request_id, self._deadline_s = request_id, deadline_s
        self._decode, self._prefill, self._view = decode, prefill, view
        self._mailboxes, self._channel, self._limits = mailboxes, channel, limits
        self._source: TransferPeer | None = None
        self._reader: TransferPeer | None = None
        self._num_from_prefill = 0  # tokens of each choice: none of a beam search that goes on
        self._is_unheard, self._is_closed = True, False
        self._is_coming = False  # its KV, by the pair's way

    def open(self) -> None:
        """Count it in and send decode's call, before anything is awaited: the next request is routed in the knowledge
        of this one, and comes there behind it. Whom it reads from and who reads is looked up now: a replica that leaves
        the pool still ends what it has begun."""
        self._leg.model = self.route.model
        if self.route.prefill_id is not None:
            self._source = self._view.prefill_peer(self.route.prefill_id)
            self._reader = self._view.decode_peer(self.route.decode_id)
        self._box = self._mailboxes.open(self._request_id, self.route.decode_id)
        # What is expected to be in their caches is neither computed nor read.
        self._computed_tokens = self._spec.prompt_len - self.route.cached_tokens
        self._read_tokens = self._spec.prompt_len - self.route.kept_tokens
        self._local_tokens = self._computed_tokens if self.route.prefill_id is None else 0
        self._view.sent(self.route.decode_id, self.route.decode_blocks, self.route.must_wait, self._local_tokens)
        self._view.pairs.sent(self.route, self._read_tokens)
        self._is_coming = True
        if self.route.prefill_id is not None:
            self._view.prompt_coming(self.route.prefill_id, self._computed_tokens)
        self._trace = self._leg.generation.trace.attempt(self.route)
        facts = self._channel, self._source, self._leg.has_begun, self.route.kind is RouteKind.SUSPECT
        call = GenerateCall(self._request_id, self._spec, self._deadline_s - time.monotonic(), *facts)
        self._generate = start_detached(self._decode.submit(self.route.decode_id, call))
        self._generate.add_done_callback(self._trace.ended)
        self._generate.add_done_callback(self._prompt.ended)

    async def run(self) -> None:
        """Emit the leg's tokens to the end. Raises AttemptFailed, MovedOn; cancelling it ends both replicas' work."""
        try:
            await self._prompt.went_out()
            await self._wait_admitted()
            handoff_by_s = time.monotonic() + self._limits.handoff_timeout_s
            if self.route.prefill_id is not None:
                await self._run_prefill(self.route.prefill_id, self._generate, handoff_by_s)
            await self._take_tokens(max(handoff_by_s, time.monotonic() + self._limits.tail_s))
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
        self._mailboxes.close(self._request_id)
        self._heard()
        self._arrived()
        self._prompt.close()
        self._view.ended(self.route.decode_id)

    # -- the phases --------------------------------------------------------------------------------

    async def _wait_admitted(self) -> None:
        await self._wait.wait(self._box.arrival(), self._generate)
        mail = await self._next_mail(0.0)
        if not isinstance(mail, Admitted):
            raise self._failed(CallStatus.ERROR, f"{type(mail).__name__} before admission")
        self._heard()
        if self.route.prefill_id is None:
            self._leg.found(self._request_id, 0, is_local=True)
        self._trace.admitted()
        self.stage = Stage.PREFILL

    async def _run_prefill(self, prefill_id: str, generate: asyncio.Task[GenerateReply], handoff_by_s: float) -> None:
        assert self._prefill is not None
        assert self._reader is not None
        self._view.prompt_sent(prefill_id, self._computed_tokens)
        facts = self._deadline_s - time.monotonic(), self._reader, self._leg.has_begun
        call = start_detached(self._prefill.submit(prefill_id, PrefillCall(self._request_id, self._spec, *facts)))
        try:
            began_s = handoff_by_s - self._limits.handoff_timeout_s
            await self._wait.for_prompt(call, generate, prefill_id, self._computed_tokens, began_s)
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
        self._leg.found(self._request_id, reply.num_cached, is_local=False)
        self._num_from_prefill = 1 if reply.first_tokens else 0
        try:
            await self._leg.take_scores(reply.prompt_scores)
        except MalformedMessage as error:
            raise self._failed(CallStatus.ERROR, str(error)) from error
        for token in reply.first_tokens:
            self._leg.take(token)
        self._trace.prefilled(reply)
        self._view.pairs.reading(self.route)
        self.stage = Stage.TRANSFER

    async def _take_tokens(self, handoff_by_s: float) -> None:
        is_over = self._leg.is_done
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
        """Emit what has come; whether it was the leg's last token. Raises AttemptFailed, ProtocolError."""
        if isinstance(mail, Token):
            self._leg.take(mail)
            self.stage = Stage.DECODE
            return mail.finish_reason is not None and self._leg.is_done
        if isinstance(mail, ChannelLost):
            raise self._failed(CallStatus.ERROR, mail.detail, Stage.DECODE)
        if isinstance(mail, PromptLogprobs):
            self._leg.take_prompt(mail)
        if isinstance(mail, Cached) and self.route.prefill_id is None:  # else prefill says what nobody had to compute
            self._leg.found(self._request_id, mail.num_tokens, is_local=True)
        if isinstance(mail, Drafted):
            self._leg.generation.drafts.tell(self._request_id, mail.num_drafted, mail.num_accepted)
        if isinstance(mail, Admitted):  # once more: the KV of a beam search is there, its tokens come at its end
            self.stage = Stage.DECODE
        return False

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
        await wait_for_any(awaited, self._generate, timeout_s=timeout_s)
        if not awaited.done() and self._generate.done():
            # Its reply is here, its frames may still be on their way: wait for what it counts, no longer.
            reply = self._check_generate(self.stage)
            if not any(n > self._num_from_decode(c) for c, n in reply.num_tokens_sent):
                raise self._failed(CallStatus.ERROR, "decode ended without the last token")
            await wait_for_any(awaited, timeout_s=self._limits.tail_s)
            if not awaited.done():
                raise self._failed(CallStatus.ERROR, "frames that decode counts have not come")
        if not awaited.done():
            raise self._failed(CallStatus.TIMEOUT, "nothing heard in time")

    def _num_from_decode(self, choice: int) -> int:
        """Tokens of a choice that came in frames: all but the one that came from prefill."""
        return self._leg.num_taken(choice) - self._num_from_prefill

    # -- the generate call -------------------------------------------------------------------------

    def _check_generate(self, stage: Stage) -> GenerateReply:
        """The reply that has come. Raises AttemptFailed unless it is OK."""
        reply = self._result(self._generate, stage)
        if reply.status is not CallStatus.OK:
            stage = Stage.TRANSFER if reply.status is CallStatus.KV_LOST else stage
            raise self._failed(reply.status, reply.detail, stage, may_retry=reply.status.may_retry)
        return reply

    def _end_generate(self) -> None:
        """A leg that decode finished: its call is about to answer by itself. Any other is cancelled now."""
        if self._generate.done():
            return
        if self._leg.is_done and any(self._num_from_decode(c) > 0 for c in self._leg.open_choices):
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
            self._view.pairs.arrived(self.route, self._read_tokens, self.stage in (Stage.TRANSFER, Stage.DECODE))

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
