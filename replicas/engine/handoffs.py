"""What passes between engines, seen from one of them: KV that it reads, KV that it offers. These tokens, these blocks.

Reading: admitted -> expected -> the handoff arrives -> read -> confirmed -> running.
Offering: admitted -> its reader is looked for -> computed -> offered under a lease -> released.

A prompt of several chunks is offered, and read, in parts: what is computed of it while the rest is. What is offered
while it is decoded: `moves_out.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from replicas.engine.moves_out import MovesOut
from replicas.engine.open_call import OpenCall
from replicas.kv.handoff_actions import (
    BlocksDisputed,
    CommandRefused,
    Event,
    HandoffArrived,
    KvLost,
    KvReady,
    LastPartArrived,
    LossReason,
    ReaderChecked,
    ReadReleased,
    SourceOutcome,
    SourceReleased,
)
from replicas.messages import CallStatus, Handoff, PrefillCall, Token
from scheduler.beam_search import Candidate
from scheduler.memory_budget import num_blocks_for
from scheduler.outcome import Load, PromptDone, PromptPart
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from replicas.kv.transfer_thread import TransferThread

logger = logging.getLogger(__name__)


class Answers(Protocol):
    """The calls of the engine's requests, and how they are told: `open_calls.OpenCalls`."""

    by_id: dict[str, OpenCall]

    def answer(self, opened: OpenCall) -> None: ...

    def end(self, request_id: str, state: RequestState, status: CallStatus, detail: str) -> None: ...


class Handoffs:
    """Engine thread only. on_joined: is told whose KV was read, and runs."""

    transfers: TransferThread  # set by the builder before start: its events come back to this engine

    def __init__(self, scheduler: Scheduler, calls: Answers, on_joined: Callable[[OpenCall], None]) -> None:
        self._scheduler, self._calls, self._on_joined = scheduler, calls, on_joined
        self.moves = MovesOut(scheduler, calls.by_id, lambda: self.transfers)

    def admitted(self, opened: OpenCall) -> None:
        """Memory was promised to it: its source, or its reader, is looked for while it waits.

        A router would wait long for a handoff that never comes.
        """
        request, call = opened.request, opened.call
        if isinstance(call, PrefillCall):
            if call.spec.max_tokens > 1:
                self.transfers.check_reader(request.request_id, call.reader)
            else:  # nothing will be handed over
                opened.is_reader_checked = True
        elif call.source is not None:
            self.transfers.expect(
                request.request_id,
                source=call.source,
                prompt_len=request.prompt_len,
                num_blocks=None if request.num_generated else self._num_prompt_blocks(request),
                deadline_s=request.deadline_s,
            )

    def part_done(self, part: PromptPart) -> None:
        """Blocks of a prompt that goes on are offered. Raises as `prompt_done`."""
        self._offer(self._calls.by_id[part.request_id], part.block_ids, is_last=False)

    def _num_prompt_blocks(self, request: Request) -> int:
        return num_blocks_for(request.prompt_len, self._scheduler.limits.block_size)

    def prompt_done(self, done: PromptDone) -> None:
        """Its blocks are offered, if there are any. Raises what the transfers raise: then these were not offered, and
        nobody will have what was before."""
        opened = self._calls.by_id[done.request_id]
        opened.first_tokens = done.first_tokens
        if done.block_ids:
            first_tokens = tuple(token._replace(logprobs=None) for token in done.first_tokens)
            block_ids = done.block_ids[opened.num_offered :]
            self._offer(opened, block_ids, is_last=True, first_tokens=first_tokens, candidates=done.candidates)

    def _offer(
        self,
        opened: OpenCall,
        block_ids: tuple[int, ...],
        *,
        is_last: bool,
        first_tokens: tuple[Token, ...] = (),
        candidates: tuple[Candidate, ...] = (),
    ) -> None:
        assert isinstance(opened.call, PrefillCall)
        request = opened.request
        try:
            self.transfers.offer(
                request.request_id,
                reader=opened.call.reader,
                block_ids=block_ids,
                prompt_len=request.prompt_len,
                first_tokens=first_tokens,
                deadline_s=request.deadline_s,
                candidates=candidates,
                first_block=opened.num_offered,
                is_last=is_last,
            )
        except Exception:
            if opened.num_offered:
                self.transfers.cancel(request.request_id)
            else:  # no transfer will tell when its lease is over
                self._scheduler.lease_ended(request.request_id, time.monotonic())
            raise
        opened.num_offered += len(block_ids)

    def let_go(self, request_id: str, opened: OpenCall | None, state: RequestState) -> None:
        """End it in the scheduler and in the transfers. opened: None when it has been answered or is unknown."""
        request = self._scheduler.get(request_id)
        if request is not None and request.state is RequestState.LEASED:
            # The reader holds the other end: the transfer thread tells it, and reports the release.
            self.transfers.cancel(self.moves.transfer_of(request_id) or request_id)
            return
        self._scheduler.end(request_id, state, time.monotonic())
        if opened is not None and opened.is_kv_read:
            self._scheduler.transfer_ended(request_id)  # the read is over, also if it waited for its grammar then
        elif opened is not None and opened.is_read:
            entered_s = opened.request.entered_s
            if RequestState.ADMITTED in entered_s and RequestState.RUNNING not in entered_s:
                self.transfers.cancel(request_id)
        elif opened is not None and opened.num_offered:
            self.transfers.cancel(request_id)  # of the parts that its reader has

    def on_event(self, event: Event) -> None:
        """The transfers report."""
        if self.moves.take(event):
            return
        match event:
            case HandoffArrived(transfer_id, handoff):
                self._on_handoff(transfer_id, handoff)
            case LastPartArrived(transfer_id, handoff):
                self._on_last_part(transfer_id, handoff)
            case KvReady(transfer_id):
                self._on_kv_ready(transfer_id)
            case KvLost(transfer_id, reason, detail):
                if reason is not LossReason.CANCELLED:
                    text = f"{reason}: {detail}" if detail else str(reason)
                    self._calls.end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, text)
            case ReadReleased(transfer_id):
                self._scheduler.transfer_ended(transfer_id)
            case ReaderChecked(transfer_id, problem):
                self._on_reader_checked(transfer_id, problem)
            case SourceReleased(transfer_id, outcome):
                self._on_released(transfer_id, outcome)
            case BlocksDisputed(_, block_ids):
                self._scheduler.distrust(block_ids)
            case CommandRefused(transfer_id, command, detail):
                self._on_refused(transfer_id, f"{command}: {detail}")

    # -- what is read ------------------------------------------------------------------------------

    def _on_handoff(self, transfer_id: str, handoff: Handoff) -> None:
        if self._scheduler.get(transfer_id) is None:
            return  # ended meanwhile; its cancel is on the way to the transfer thread
        if handoff.is_last:
            self._on_last_part(transfer_id, handoff)
        try:
            load = self._begin_load(transfer_id, handoff)
        except ValueError as error:
            self._calls.end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, str(error))
            return
        self.transfers.read_into(transfer_id, load.block_ids, load.num_kept)

    def _begin_load(self, transfer_id: str, handoff: Handoff) -> Load:
        """Raises ValueError for what does not fit its request or the memory here."""
        now_s = time.monotonic()
        if handoff.moved:
            return self._scheduler.begin_moved_load(transfer_id, handoff.moved, len(handoff.block_ids), now_s)
        return self._scheduler.begin_load(transfer_id, now_s)

    def _on_last_part(self, transfer_id: str, handoff: Handoff) -> None:
        opened = self._calls.by_id.get(transfer_id)
        if opened is not None:
            opened.handoff, opened.handed_over_s = handoff, time.monotonic()

    def _on_kv_ready(self, transfer_id: str) -> None:
        if self._scheduler.get(transfer_id) is None:
            return
        opened = self._calls.by_id[transfer_id]
        assert opened.handoff is not None, "KV was read without a handoff"
        opened.is_kv_read = True
        if opened.coming is not None and opened.texts is None:
            return  # it runs when its grammar is there, too
        try:
            self._join_batch(opened.request, opened.handoff)
            self._take_known(opened, opened.handoff)
        except ValueError as error:  # the handoff's first tokens are not those of this request
            self._calls.end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, str(error))
            return
        self._on_joined(opened)

    def grammar_compiled(self, opened: OpenCall) -> None:
        """Of a call whose KV comes from a source: if that is here, it runs."""
        if opened.is_kv_read:
            self._on_kv_ready(opened.request.request_id)

    def _take_known(self, opened: OpenCall, handoff: Handoff) -> None:
        """Tokens that the source knows are this attempt's, though they are not sent from here."""
        first = [(token.choice, (token.token_id,)) for token in handoff.first_tokens]
        for choice, token_ids in [*first, *[(moved.choice, moved.token_ids) for moved in handoff.moved]]:
            opened.token_ids[choice] += token_ids
            if opened.texts is not None:
                text = opened.texts.of(choice)
                for token_id in token_ids:
                    text.take(token_id)

    def _join_batch(self, request: Request, handoff: Handoff) -> None:
        """Raises ValueError."""
        if handoff.moved:
            self._scheduler.moved_in(request.request_id, handoff.moved, time.monotonic())
            return
        if request.search is not None:
            self._scheduler.beams_ready(request.request_id, handoff.candidates, time.monotonic())
            return
        self._scheduler.kv_ready(request.request_id, handoff.first_tokens, time.monotonic())

    # -- what is offered ---------------------------------------------------------------------------

    def _on_reader_checked(self, request_id: str, problem: str) -> None:
        opened = self._calls.by_id.get(request_id)
        if opened is None:
            return
        opened.is_reader_checked = True
        if problem:
            logger.warning("no handoff", extra={"event": "reader_lost", "request": request_id, "reason": problem})
            detail = f"decode cannot be reached to hand the KV over: {problem}"
            self._calls.end(request_id, RequestState.FAILED, CallStatus.KV_LOST, detail)
        elif opened.first_tokens is not None:
            self._calls.answer(opened)

    def _on_released(self, request_id: str, outcome: SourceOutcome) -> None:
        request = self._scheduler.get(request_id)
        if request is not None and request.state is RequestState.PREFILLING:
            # Its reader has parts of it and lets go of them: nobody would read the rest.
            extra = {"event": "handoff_ended", "request": request_id, "outcome": str(outcome)}
            logger.warning("a prompt's reader has let go of it before it was computed", extra=extra)
            detail = f"decode let go of the KV before the prompt was computed: {outcome}"
            self._calls.end(request_id, RequestState.FAILED, CallStatus.KV_LOST, detail)
        self._scheduler.lease_ended(request_id, time.monotonic())

    def _on_refused(self, transfer_id: str, detail: str) -> None:
        """What was asked of the transfers was impossible; they hold nothing of it."""
        opened, request = self._calls.by_id.get(transfer_id), self._scheduler.get(transfer_id)
        known = opened.request if opened is not None else request
        if known is not None and known.hands_over:
            if known.state is RequestState.PREFILLING:  # what comes next of it would be refused, too
                self._calls.end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, detail)
            self._scheduler.lease_ended(transfer_id, time.monotonic())
            return
        self._scheduler.transfer_ended(transfer_id)
        self._calls.end(transfer_id, RequestState.FAILED, CallStatus.KV_LOST, detail)
