"""One attempt at a leg: admitted by decode, prefilled, handed over, decoded. All of it can fail; nothing stays behind.

    generate ----------------------------------------------------------------> reply (counts only)
        admitted -> prefill -> first token -> (KV moves) -> frames: tokens ... the last one

Whatever way it ends, its calls are over or cancelled and its mailbox is closed. Calls run as tasks in a context of
their own: Serve cancels what a request's context started when the client goes; we cancel by ourselves, explicitly.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext

from cluster.policies.routing_policy import Route
from cluster.routing.admission_wait import AdmissionWait
from cluster.routing.attempt_failed import Stage
from cluster.routing.attempt_parts import AttemptParts
from cluster.routing.decode_side import DecodeSide
from cluster.routing.detached_tasks import retrieve, start_detached, wait_for_any
from cluster.routing.generation import Leg
from cluster.routing.mailboxes import Admitted, Cached, ChannelLost, Drafted, Mail
from cluster.routing.model_binding import OtherModel
from cluster.routing.pool_client import ReplicaLost
from cluster.routing.prompt_forecast import SentPrompt
from replicas.channels.wire import MalformedMessage
from replicas.messages import (
    CallStatus,
    GenerateReply,
    PrefillCall,
    PrefillReply,
    PromptLogprobs,
    Token,
    TransferPeer,
)


class Attempt(DecodeSide):
    """One try of one leg on one route. Use once: `open()`, `await run()`; `close()` whatever happened between."""

    def __init__(
        self,
        leg: Leg,
        route: Route,
        prompt: SentPrompt,
        parts: AttemptParts,
        *,
        request_id: str,
        deadline_s: float,
        wait: AdmissionWait | None = None,
    ) -> None:
        """deadline_s: of the request, on time.monotonic(). wait: until decode admits it; None: `run` does not wait."""
        super().__init__(leg, route, parts, request_id, deadline_s)
        self._prompt, self._wait = prompt, wait
        self._reader: TransferPeer | None = None
        self._is_unheard = True
        self._is_coming = False  # its KV, by the pair's way
        self._is_closed = False

    def open(self) -> None:
        """Count it in and send decode's call, before anything is awaited: the next request is routed in the knowledge
        of this one, and comes there behind it. Whom it reads from and who reads is looked up now: a replica that leaves
        the pool still ends what it has begun."""
        self.leg.model = self.route.model
        self.decode_metadata = self._view.decode_metadata(self.route.decode_id)
        if self.route.prefill_id is not None:
            self._source = self._view.prefill_peer(self.route.prefill_id)
            self._reader = self._view.decode_peer(self.route.decode_id)
        self._open_box()
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
        self._call_decode()

    def _call_decode(self) -> None:
        self._submit(0, self._trace.ended, self._prompt.ended)

    async def run_until(self, deadline_s: float) -> None:
        """As `run`, on time.monotonic()."""
        try:
            # Not `wait_for`: it would run the attempt in a task of its own, which a cancellation can miss.
            async with asyncio.timeout(deadline_s - time.monotonic()) as limit:
                await self.run()
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._failed(CallStatus.TIMEOUT, "the request's time is up", may_retry=False) from None

    async def run(self) -> None:
        """Emit the leg's tokens to the end. Raises AttemptFailed; MovedOn, when it is called elsewhere while it waits;
        AttemptMoved, when all that decode has sent is emitted and another attempt goes on. Cancelling it ends both
        replicas' work."""
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
        assert self._wait is not None
        assert self._generate is not None
        await self._prompt.went_out()
        await self._wait.wait(self._box.arrival(), self._generate)
        self._take_admission(await self._next_mail(0.0))
        handoff_by_s = time.monotonic() + self._limits.handoff_timeout_s
        if self.route.prefill_id is not None:
            await self._run_prefill(self.route.prefill_id, self._wait, self._generate, handoff_by_s)
        return max(handoff_by_s, time.monotonic() + self._limits.tail_s)

    def _take_admission(self, mail: Mail) -> None:
        if not isinstance(mail, Admitted):
            raise self._failed(CallStatus.ERROR, f"{type(mail).__name__} before admission")
        self._heard()
        if self.route.prefill_id is None:
            self._found(0)
        self._trace.admitted()
        self.stage = Stage.PREFILL

    async def _run_prefill(
        self, prefill_id: str, wait: AdmissionWait, generate: asyncio.Task[GenerateReply], handoff_by_s: float
    ) -> None:
        assert self._reader is not None
        self._view.prompt_sent(prefill_id, self._computed_tokens)
        facts = self._deadline_s - time.monotonic(), self._reader, self.leg.has_begun
        prefill = PrefillCall(self.request_id, self._spec, *facts)
        call = start_detached(self.parts.pool_of(prefill_id).submit(prefill_id, prefill))
        try:
            began_s = handoff_by_s - self._limits.handoff_timeout_s
            await wait.for_prompt(call, generate, prefill_id, self._computed_tokens, began_s)
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
        self._view.pairs.reading(self.route)
        self.stage = Stage.TRANSFER

    async def _take_tokens(self, handoff_by_s: float) -> None:
        try:
            async with self._while_source_answers():
                is_over = await self._take_until_handed_over(handoff_by_s)
        except ReplicaLost as lost:
            raise self._failed(CallStatus.ERROR, str(lost)) from lost
        if self.stage is Stage.DECODE:
            self._arrived()
            self._view.pairs.worked(self.route)
            self._trace.handed_over()
        if not is_over:
            over = self._box.pass_on(self._take)
            over.add_done_callback(retrieve)
            await self._wait_for(over, None)
            over.result()

    def _while_source_answers(self) -> AbstractAsyncContextManager[None]:
        """It has answered, and no call is open there that would be lost with it; its KV is still to come. Raises
        ReplicaLost, at its end."""
        source = self._source
        return nullcontext() if source is None else self.parts.pool_of(source.replica_id).until_lost(source.replica_id)

    async def _take_until_handed_over(self, handoff_by_s: float) -> bool:
        """Until decode has the prompt's KV, which shows with its first token; whether that was the last one."""
        is_over = self.leg.is_done
        while not is_over and self.stage is not Stage.DECODE:
            is_handing_over = self.stage is Stage.TRANSFER
            is_over = self._take(await self._next_mail(handoff_by_s - time.monotonic() if is_handing_over else None))
        return is_over

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
        self.leg.found(self.request_id, num_tokens, is_local=self.route.prefill_id is None)

    # -- counts ------------------------------------------------------------------------------------

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
