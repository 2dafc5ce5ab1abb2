"""Decode engine: admits by memory, loads KV (or prefills itself), decodes the running batch, sends tokens.

A call's life: submit -> admitted (told in a frame) -> handoff arrives -> read -> confirmed -> running ->
reply. Tokens leave in frames, one per step and router; the reply only says how many there were.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from replicas.channels.outbox import Outbox, Parts
from replicas.engine.call_table import OpenCall, scheduler_request
from replicas.engine.engine import Engine
from replicas.engine.engine_parts import EngineParts
from replicas.kv.handoff_actions import CommandRefused, Event, HandoffArrived, KvLost, KvReady, LossReason, ReadReleased
from replicas.messages import (
    CallStatus,
    EngineLoad,
    FinishReason,
    Frame,
    GenerateCall,
    GenerateReply,
    Handoff,
    TokenItem,
)
from scheduler.memory_budget import num_blocks_for
from scheduler.outcome import NeverFits, TokenEvent
from scheduler.plan import StepOutput
from scheduler.request import Request, RequestState

if TYPE_CHECKING:
    from replicas.channels.token_sender import TokenSender
    from replicas.kv.transfer_thread import TransferThread


logger = logging.getLogger(__name__)

# A channel that was just opened takes frames only after its handshake, and nothing tells when: ask again soon.
_UNSENT_POLL_S = 0.005


@dataclass(slots=True)
class DecodeOpenCall(OpenCall[GenerateCall, GenerateReply]):
    """What else decode keeps of a call."""

    handoff: Handoff | None = None  # once it has arrived
    num_sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by choice, in frames

    @property
    def router_id(self) -> str:
        return self.call.channel.router_id


class DecodeEngine(Engine[DecodeOpenCall]):
    """Also the whole engine of a colocated system: a call without a source is prefilled here."""

    transfers: TransferThread  # set by the builder before start: its events come back to this engine

    def __init__(self, parts: EngineParts, sender: TokenSender, idle_frame_s: float) -> None:
        super().__init__("decode", parts)
        self.sender = sender
        self._idle_frame_s = idle_frame_s
        self._outbox: defaultdict[str, Outbox] = defaultdict(Outbox)  # by router
        self._last_sent_s: dict[str, float] = {}  # by router
        self._finished: list[DecodeOpenCall] = []  # to be answered after this iteration's frames

    def generate(self, call: GenerateCall) -> Future[GenerateReply]:
        """Queue a request. Any thread; does not block. The future is always answered."""
        request = scheduler_request(call.request, time.monotonic(), local_prefill=call.source is None)
        opened = DecodeOpenCall(call, request)
        self._inbox.put(partial(self._submit, opened))
        return opened.future

    def replay(self, router_id: str, from_seq: int) -> list[Frame]:
        """Frames a router missed. Any thread. Raises FrameGone when they are no longer kept."""
        return self.sender.replay(router_id, from_seq)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self.sender.owes_tokens

    def on_transfer_event(self, event: Event) -> None:
        """Called by the transfer thread. Does not block."""
        self._inbox.put(partial(self._on_transfer, event), event.transfer_id)

    # -- arrival -----------------------------------------------------------------------------------

    def _submit(self, opened: DecodeOpenCall) -> None:
        request = opened.request
        try:
            self.sender.open(opened.call.channel)
            self.scheduler.submit(request, time.monotonic())
        except NeverFits as error:
            needs = f"{request.prompt_len} prompt tokens and max_tokens {request.max_tokens}"
            self._reply(opened, CallStatus.REJECTED, f"{needs}, {len(request.choices)} choices: {error}")
            return
        except ValueError as error:  # an unusable channel address, or a known id
            self._reply(opened, CallStatus.ERROR, str(error))
            return
        except Exception as error:
            self._fail_new(opened, error)
            return
        self._calls[request.request_id] = opened

    def _on_admitted(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            try:
                self._tell_admitted(self._calls[request.request_id])
            except Exception as error:
                self._fail(request.request_id, error)

    def _tell_admitted(self, opened: DecodeOpenCall) -> None:
        request = opened.request
        if opened.call.source is not None:
            self.transfers.expect(
                request.request_id,
                source=opened.call.source,
                prompt_len=request.prompt_len,
                num_blocks=num_blocks_for(request.prompt_len, self.scheduler.limits.block_size),
                deadline_s=request.deadline_s,
            )
        self._outbox[opened.router_id].admitted.append(request.request_id)

    # -- the handoff -------------------------------------------------------------------------------

    def _on_transfer(self, event: Event) -> None:
        match event:
            case HandoffArrived(transfer_id, handoff):
                self._on_handoff(transfer_id, handoff)
            case KvReady(transfer_id):
                self._on_kv_ready(transfer_id)
            case KvLost(transfer_id, reason, detail):
                if reason is not LossReason.CANCELLED:
                    text = f"{reason}: {detail}" if detail else str(reason)
                    self._end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, text)
            case ReadReleased(transfer_id):
                self.scheduler.transfer_ended(transfer_id)
            case CommandRefused(transfer_id, command, detail):
                self.scheduler.transfer_ended(transfer_id)
                self._end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, f"{command}: {detail}")
            case _:
                raise AssertionError(f"a decode engine offers nothing, got {event}")

    def _on_handoff(self, transfer_id: str, handoff: Handoff) -> None:
        if self.scheduler.get(transfer_id) is None:
            return  # ended meanwhile; its cancel is on the way to the transfer thread
        self._calls[transfer_id].handoff = handoff
        block_ids = self.scheduler.begin_load(transfer_id, time.monotonic())
        self.transfers.read_into(transfer_id, block_ids)

    def _on_kv_ready(self, transfer_id: str) -> None:
        if self.scheduler.get(transfer_id) is None:
            return
        opened = self._calls[transfer_id]
        assert opened.handoff is not None, "KV was read without a handoff"
        try:
            self._join_batch(opened, opened.handoff)
        except ValueError as error:  # the handoff's first tokens are not those of this request
            self._end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, str(error))
            return
        self.metrics.kv_loaded(opened.time_between(RequestState.LOADING, RequestState.RUNNING))

    def _join_batch(self, opened: DecodeOpenCall, handoff: Handoff) -> None:
        """Raises ValueError."""
        request_id = opened.request.request_id
        if opened.request.search is not None:
            self.scheduler.beams_ready(request_id, handoff.candidates, time.monotonic())
            self._outbox[opened.router_id].admitted.append(request_id)
            return
        firsts = handoff.first_tokens
        by_choice = {t.choice: (t.token_id, t.finish_reason.value if t.finish_reason else None) for t in firsts}
        self.scheduler.kv_ready(request_id, by_choice, time.monotonic())

    # -- tokens ------------------------------------------------------------------------------------

    def _on_tokens(self, output: StepOutput, now_s: float) -> None:
        for prompt in output.prompts:
            if (opened := self._calls.get(prompt.request_id)) is not None:
                self._outbox[opened.router_id].prompts.append(prompt)
        events = self.core.commit(output, now_s).tokens
        for event in events:
            try:
                self._send_token(event)
            except Exception as error:
                self._fail(event.request_id, error)
        for request_id in {event.request_id for event in events if event.finish_reason}:
            if request_id in self._calls and self.scheduler.get(request_id) is None:
                self._finished.append(self._calls.pop(request_id))

    def _send_token(self, event: TokenEvent) -> None:
        opened = self._calls.get(event.request_id)
        if opened is None:
            return  # it has failed a token ago
        reason = FinishReason(event.finish_reason) if event.finish_reason else None
        item = TokenItem(event.request_id, event.choice, event.index, event.token_id, reason, event.logprobs)
        opened.num_sent[event.choice] += 1
        if not event.index and opened.first_token_s is None and opened.request.search is None:
            opened.first_token_s = time.monotonic()
        self._outbox[opened.router_id].tokens.append(item)

    def _flush(self, now_s: float) -> None:
        """A frame or some per router that has something, or that has not heard of us for a while; then the replies,
        which say how many tokens were sent.
        """
        load = self._load()
        for router_id, sent_s in list(self._last_sent_s.items()):
            if router_id not in self._outbox and now_s - sent_s >= self._idle_frame_s:
                self._send(router_id, load, (((), (), ()),), now_s)
        for router_id, outbox in self._outbox.items():
            self._send(router_id, load, outbox.parts(), now_s)
        self._outbox.clear()
        self.sender.flush()
        for router_id in self.sender.stalled_routers(now_s):
            self._give_up(router_id, CallStatus.CANCELLED, "the router's channel stayed away")
        for opened in self._finished:
            self._reply(opened, CallStatus.OK, "")
        self._finished.clear()

    def _send(self, router_id: str, load: EngineLoad, parts: Iterable[Parts], now_s: float) -> None:
        try:
            for part in parts:
                self.sender.send(router_id, load, *part)
            self._last_sent_s[router_id] = now_s
        except Exception as error:  # what is wrong with one router's frames is no other's
            logger.exception("frames could not be sent", extra={"event": "send_failed", "router": router_id})
            self._give_up(router_id, CallStatus.ERROR, f"its router's channel failed: {type(error).__name__}")

    def _give_up(self, router_id: str, status: CallStatus, detail: str) -> None:
        """This router is gone, whatever Serve believes: its requests end."""
        theirs = [request_id for request_id, opened in self._calls.items() if opened.router_id == router_id]
        extra = {"event": "router_given_up", "router": router_id, "num_requests": len(theirs)}
        logger.warning("a router is given up: %s", detail, extra=extra)
        for request_id in theirs:
            self._end(request_id, RequestState.CANCELLED, status, detail)
        self.sender.close(router_id)
        self._last_sent_s.pop(router_id, None)

    # -- ends --------------------------------------------------------------------------------------

    def _let_go(self, request_id: str, opened: DecodeOpenCall | None, state: RequestState) -> None:
        if opened is None:
            return
        entered_s = opened.request.entered_s
        self.scheduler.end(request_id, state, time.monotonic())
        is_moving = RequestState.ADMITTED in entered_s and RequestState.RUNNING not in entered_s
        if opened.call.source is not None and is_moving:
            self.transfers.cancel(request_id)

    def _answer_all(self, status: CallStatus, detail: str) -> None:
        for opened in self._finished:
            self._calls.setdefault(opened.request.request_id, opened)
        self._finished.clear()
        super()._answer_all(status, detail)

    def _reply(self, opened: DecodeOpenCall, status: CallStatus, detail: str) -> None:
        reply = GenerateReply(
            status=status,
            detail=detail,
            num_tokens_sent=tuple(sorted(opened.num_sent.items())),
            queue_s=opened.time_between(RequestState.QUEUED, RequestState.ADMITTED),
            transfer_s=opened.time_between(RequestState.LOADING, RequestState.RUNNING),
            decode_s=opened.decode_s(),
            prefill_s=opened.prefill_s(),
        )
        self.metrics.generation_done(reply)
        opened.reply(reply)

    def _idle_s(self) -> float:
        if self.sender.has_unsent:
            return _UNSENT_POLL_S
        return self._idle_frame_s if self._last_sent_s else super()._idle_s()

    def _close(self) -> None:
        self.sender.shut_down()
