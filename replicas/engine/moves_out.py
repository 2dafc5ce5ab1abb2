"""Requests that are decoded here and go on at another engine: asked for, stopped, offered, let go.

    asked -> its reader is looked for, while it runs on -> stopped -> what is in flight is known -> offered -> released

Until it is offered it is an ordinary request: what ends it ends the move. From then on its call is answered, and only
the lease is left of it here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.engine.open_call import OpenCall
from replicas.kv.handoff_actions import CommandRefused, Event, ReaderChecked, SourceReleased
from replicas.messages import CallStatus, MigrateCall, MigrateReply, MovedChoice
from scheduler.moving import MovedOut
from scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from replicas.kv.transfer_thread import TransferThread

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    call: MigrateCall
    future: Future[MigrateReply]
    deadline_s: float

    def reply(self, status: CallStatus, detail: str = "") -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_result(MigrateReply(status, detail))


class MovesOut:
    """Engine thread only. by_id: the open calls; who is offered is none of them any more. transfers: who offers."""

    def __init__(
        self, scheduler: Scheduler, by_id: dict[str, OpenCall], transfers: Callable[[], TransferThread]
    ) -> None:
        self.num_offered = 0  # ever
        self._scheduler, self._by_id, self._transfers = scheduler, by_id, transfers
        self._asked: dict[str, _Move] = {}  # not offered yet, by the id of the transfer
        self._leased: dict[str, str] = {}  # request ids, by that
        self._transfer_ids: dict[str, str] = {}  # the other way round

    def begin(self, call: MigrateCall, future: Future[MigrateReply], now_s: float) -> None:
        """A call has come. Answers it if nothing comes of it."""
        move = _Move(call, future, now_s + call.timeout_s)
        why_not = "" if call.request_id in self._by_id else "it is over, or was never here"
        why_not = why_not or self._scheduler.why_stays(call.request_id)
        if any(asked.call.request_id == call.request_id for asked in self._asked.values()):
            why_not = "it is on its way already"
        if call.transfer_id in self._asked or call.transfer_id in self._leased:
            why_not = "this transfer is known"
        if why_not:
            move.reply(CallStatus.REJECTED, why_not)
            return
        self._asked[call.transfer_id] = move
        self._transfers().check_reader(call.transfer_id, call.reader)

    def transfer_of(self, request_id: str) -> str | None:
        """The transfer by whose name its blocks are offered; None: it has none of its own."""
        return self._transfer_ids.get(request_id)

    def take(self, event: Event) -> bool:
        """Whether what the transfers report is of a move out; then it is taken care of."""
        transfer_id = event.transfer_id
        if isinstance(event, ReaderChecked) and transfer_id in self._asked:
            self._stop(transfer_id, event.problem)
            return True
        if transfer_id not in self._leased:
            return False
        if isinstance(event, CommandRefused | SourceReleased):
            request_id = self._leased.pop(transfer_id)
            del self._transfer_ids[request_id]
            self._scheduler.lease_ended(request_id, time.monotonic())
            return True
        return False

    def offer_stopped(self, now_s: float) -> list[tuple[OpenCall, CallStatus]]:
        """Offer who has stopped. Whose calls are to be answered now, behind the tokens that are known, and how."""
        if not self._asked:
            return []
        ended = [self._offer(moved) for moved in self._scheduler.take_moved_out(now_s)]
        for transfer_id, move in list(self._asked.items()):
            if move.call.request_id not in self._by_id:
                self._asked.pop(transfer_id).reply(CallStatus.REJECTED, "it has ended meanwhile")
        return ended

    def refuse_all(self, detail: str) -> None:
        """The engine can't go on. Raises nothing."""
        while self._asked:
            self._asked.popitem()[1].reply(CallStatus.ERROR, detail)

    def _stop(self, transfer_id: str, problem: str) -> None:
        move = self._asked[transfer_id]
        request_id = move.call.request_id
        if time.monotonic() >= move.deadline_s:
            problem = problem or "it was not stopped in time"
        problem = problem or self._scheduler.why_stays(request_id)
        if not problem:
            self._scheduler.move_out(request_id)
            return
        del self._asked[transfer_id]
        extra = {"event": "move_refused", "request": request_id, "reason": problem}
        logger.warning("a request stays", extra=extra)
        move.reply(CallStatus.REJECTED, problem)

    def _offer(self, moved: MovedOut) -> tuple[OpenCall, CallStatus]:
        request_id = moved.request_id
        opened = self._by_id[request_id]
        ((transfer_id, move),) = [one for one in self._asked.items() if one[1].call.request_id == request_id]
        del self._asked[transfer_id]
        self._leased[transfer_id], self._transfer_ids[request_id] = request_id, transfer_id
        choices = []
        for choice, num_known, places in moved.tables:
            token_ids = tuple(opened.token_ids[choice])
            assert len(token_ids) == num_known, f"{len(token_ids)} tokens of {num_known}"
            choices.append(MovedChoice(choice, token_ids, places))
        self._transfers().offer(
            transfer_id,
            reader=move.call.reader,
            block_ids=moved.block_ids,
            prompt_len=opened.request.prompt_len,
            first_tokens=(),
            deadline_s=opened.request.deadline_s,
            moved=choices,
        )
        self.num_offered += 1
        extra = {"event": "moved_out", "request": request_id, "reader": move.call.reader.replica_id}
        logger.info("a request goes on elsewhere", extra={**extra, "num_blocks": len(moved.block_ids)})
        move.reply(CallStatus.OK)
        return self._by_id.pop(request_id), CallStatus.MOVED
