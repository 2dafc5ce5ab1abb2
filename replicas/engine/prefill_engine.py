"""Prefill engine: computes prompts, answers with the first token, hands the KV over under a lease."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from replicas.channels.call_wire import encode_scores
from replicas.engine.call_table import OpenCall, scheduler_request
from replicas.engine.engine import Engine
from replicas.engine.engine_parts import EngineParts
from replicas.kv.handoff_actions import CommandRefused, Event, ReaderChecked, SourceReleased
from replicas.messages import CallStatus, FinishReason, FirstToken, PrefillCall, PrefillReply, PromptLogprobs
from scheduler.outcome import DuplicateRequest, NeverFits, PromptDone
from scheduler.plan import StepOutput
from scheduler.request import Request, RequestState

if TYPE_CHECKING:
    from replicas.kv.transfer_thread import TransferThread


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefillOpenCall(OpenCall[PrefillCall, PrefillReply]):
    """What else prefill keeps of a call."""

    scores: list[bytes] = field(default_factory=list)  # of the prompt's chunks so far, if asked for; as in the reply
    is_reader_checked: bool = False  # nobody would read from it in vain
    first_tokens: tuple[FirstToken, ...] | None = None  # once they are known


class PrefillEngine(Engine[PrefillOpenCall]):
    """A call is open from submission until its prompt is computed, and its reader known to be there; its blocks live on
    until the lease ends."""

    transfers: TransferThread  # set by the builder before start: its events come back to this engine

    def __init__(self, parts: EngineParts) -> None:
        super().__init__("prefill", parts)

    def prefill(self, call: PrefillCall) -> Future[PrefillReply]:
        """Queue a prompt. Any thread; does not block. The future is always answered."""
        request = scheduler_request(call.request, time.monotonic(), local_prefill=True, hands_over=True)
        opened = PrefillOpenCall(call, request)
        self._inbox.put(partial(self._submit, opened))
        return opened.future

    def on_transfer_event(self, event: Event) -> None:
        """Called by the transfer thread. Does not block."""
        match event:
            case ReaderChecked(transfer_id, problem):
                self._inbox.put(lambda: self._on_reader_checked(transfer_id, problem), transfer_id)
            case SourceReleased(transfer_id) | CommandRefused(transfer_id):
                self._inbox.put(lambda: self.scheduler.lease_ended(transfer_id, time.monotonic()), transfer_id)
            case _:
                raise AssertionError(f"a prefill engine reads nothing, got {event}")

    # -- engine thread -----------------------------------------------------------------------------

    def _submit(self, opened: PrefillOpenCall) -> None:
        request = opened.request
        try:
            self.scheduler.submit(request, time.monotonic())
        except NeverFits as error:
            self._reply(opened, CallStatus.REJECTED, f"a prompt of {request.prompt_len} tokens {error}")
            return
        except DuplicateRequest as error:
            self._reply(opened, CallStatus.ERROR, str(error))
            return
        except Exception as error:
            self._fail_new(opened, error)
            return
        self._calls[request.request_id] = opened

    def _on_admitted(self, requests: tuple[Request, ...]) -> None:
        """The scheduler has put them in line for the next step. Meanwhile it is found out whether their readers can be
        reached: the router would wait long for a handoff that never comes."""
        for request in requests:
            opened = self._calls[request.request_id]
            if request.max_tokens > 1:
                self.transfers.check_reader(request.request_id, opened.call.reader)
            else:  # nothing will be handed over
                opened.is_reader_checked = True

    def _on_reader_checked(self, request_id: str, problem: str) -> None:
        opened = self._calls.get(request_id)
        if opened is None:
            return
        opened.is_reader_checked = True
        if problem:
            self._lose_reader(opened, problem)
        elif opened.first_tokens is not None:
            self._answer(opened, opened.first_tokens)

    def _lose_reader(self, opened: PrefillOpenCall, problem: str) -> None:
        detail = f"decode cannot be reached to hand the KV over: {problem}"
        request_id = opened.request.request_id
        logger.warning("no handoff", extra={"event": "reader_lost", "request": request_id, "reason": problem})
        self._end(request_id, RequestState.FAILED, CallStatus.KV_LOST, detail)

    def _on_tokens(self, output: StepOutput, now_s: float) -> None:
        for prompt in output.prompts:
            try:
                self._keep_scores(prompt)
            except Exception as error:
                self._fail(prompt.request_id, error)
        for done in self.core.commit(output, now_s).prompts:
            try:
                opened = self._calls[done.request_id]
                opened.first_tokens = _first_tokens(done)
                self._hand_over(opened, done, opened.first_tokens)
            except Exception as error:  # nothing was offered: no transfer will tell when its lease is over
                self.scheduler.lease_ended(done.request_id, time.monotonic())
                self._fail(done.request_id, error)
            else:
                if opened.is_reader_checked or not done.block_ids:
                    self._answer(opened, opened.first_tokens)

    def _answer(self, opened: PrefillOpenCall, first_tokens: tuple[FirstToken, ...]) -> None:
        del self._calls[opened.request.request_id]
        self._reply(opened, CallStatus.OK, "", first_tokens)

    def _keep_scores(self, prompt: PromptLogprobs) -> None:
        if (opened := self._calls.get(prompt.request_id)) is not None:
            opened.scores += encode_scores(prompt)

    def _hand_over(self, opened: PrefillOpenCall, done: PromptDone, first_tokens: tuple[FirstToken, ...]) -> None:
        if done.block_ids:
            self.transfers.offer(
                done.request_id,
                reader=opened.call.reader,
                block_ids=done.block_ids,
                prompt_len=opened.request.prompt_len,
                first_tokens=tuple(replace(token, logprobs=None) for token in first_tokens),
                deadline_s=opened.request.deadline_s,
                candidates=done.candidates,
            )

    def _let_go(self, request_id: str, opened: PrefillOpenCall | None, state: RequestState) -> None:
        request = self.scheduler.get(request_id)
        if request is not None and request.state is RequestState.LEASED:
            # The reader holds the other end: the transfer thread tells it, and reports the release.
            self.transfers.cancel(request_id)
        else:
            self.scheduler.end(request_id, state, time.monotonic())

    def _reply(
        self, opened: PrefillOpenCall, status: CallStatus, detail: str, first_tokens: tuple[FirstToken, ...] = ()
    ) -> None:
        queue_s = opened.time_between(RequestState.QUEUED, RequestState.ADMITTED)
        done_state = RequestState.LEASED if RequestState.LEASED in opened.request.entered_s else RequestState.FINISHED
        prefill_s = opened.time_between(RequestState.ADMITTED, done_state)
        self.metrics.prompt_done(status, queue_s, prefill_s)
        scores = tuple(opened.scores) if status is CallStatus.OK else ()
        load = self.status.load if self._is_broken else self._load()
        opened.reply(PrefillReply(status, detail, first_tokens, queue_s, prefill_s, load, scores))

    def _flush(self, now_s: float) -> None:
        pass  # replies and handoffs leave as they come up


def _first_tokens(done: PromptDone) -> tuple[FirstToken, ...]:
    return tuple(
        FirstToken(
            event.choice,
            event.token_id,
            FinishReason(event.finish_reason) if event.finish_reason else None,
            event.logprobs,
        )
        for event in done.first_tokens
    )
