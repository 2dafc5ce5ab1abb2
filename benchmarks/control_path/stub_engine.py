"""A decode engine that computes nothing: it admits at once, and every token is there one step after the other.

Real calls, real frames through the real sender, a thread of its own, as in `replicas/engine/engine.py`. The handoff
costs nothing: tokens follow admission without waiting for prefill, so what is measured is a lower bound of the path.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty

from replicas.channels.token_sender import TokenSender
from replicas.messages import (
    CallStatus,
    EngineLoad,
    FinishReason,
    GenerateCall,
    GenerateReply,
    Token,
)
from replicas.timed_queue import TimedQueue

NUM_BLOCKS = 1_000_000
_IDLE_FRAME_S = 0.5
_UNSENT_POLL_S = 0.005


@dataclass(slots=True)
class _Running:
    """next_index: of the token that the next step makes; prefill makes token 0."""

    call: GenerateCall
    future: Future[GenerateReply] = field(default_factory=Future)
    next_index: int = 1


class StubDecodeEngine:
    """step_s 0: as fast as it goes. Every token of a request is the first token of its prompt."""

    def __init__(self, sender: TokenSender, step_s: float) -> None:
        self.sender = sender
        self._step_s = step_s
        self._inbox: TimedQueue[Callable[[], None]] = TimedQueue()
        self._running: dict[str, _Running] = {}
        self._last_sent_s: dict[str, float] = {}  # by router
        self._thread = threading.Thread(target=self._run, name="stub-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def generate(self, call: GenerateCall) -> Future[GenerateReply]:
        """Any thread; does not block."""
        running = _Running(call)
        self._inbox.put(lambda: self._admit(running))
        return running.future

    def cancel(self, request_id: str) -> None:
        """Any thread; unknown ids are ignored."""
        self._inbox.put(lambda: self._end(request_id, CallStatus.CANCELLED))

    def _run(self) -> None:
        next_step_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if self._running and now_s >= next_step_s:
                self._step()
                # Time that was lost is not made up for: a real step would not be shorter either.
                next_step_s = max(next_step_s + self._step_s, now_s)
            self._send_idle_frames(now_s)
            self.sender.flush()
            self._wait(next_step_s)

    def _wait(self, next_step_s: float) -> None:
        """Until something arrives or the next step is due; then take all that has arrived."""
        timeout_s = next_step_s - time.monotonic() if self._running else _IDLE_FRAME_S
        if self.sender.has_unsent:
            timeout_s = min(timeout_s, _UNSENT_POLL_S)
        try:
            self._inbox.get(max(0.0, timeout_s))()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _admit(self, running: _Running) -> None:
        call = running.call
        self.sender.open(call.channel)
        self._running[call.request_id] = running
        self._send(call.channel.router_id, admitted=(call.request_id,))

    def _step(self) -> None:
        tokens: defaultdict[str, list[Token]] = defaultdict(list)
        finished = []
        for request_id, running in self._running.items():
            spec = running.call.spec
            is_last = running.next_index == spec.max_tokens - 1
            reason = FinishReason.LENGTH if is_last else None
            item = Token(request_id, spec.choices[0], running.next_index, spec.prompt_ids[0], reason)
            tokens[running.call.channel.router_id].append(item)
            running.next_index += 1
            if is_last:
                finished.append(request_id)
        for router_id, items in tokens.items():
            self._send(router_id, tokens=tuple(items))
        for request_id in finished:
            self._end(request_id, CallStatus.OK)

    def _end(self, request_id: str, status: CallStatus) -> None:
        running = self._running.pop(request_id, None)
        if running is None:
            return
        num_sent = ((running.call.spec.choices[0], running.next_index - 1),)
        if running.future.set_running_or_notify_cancel():
            running.future.set_result(GenerateReply(status, "", num_sent, 0.0, 0.0, 0.0))

    def _send(self, router_id: str, admitted: tuple[str, ...] = (), tokens: tuple[Token, ...] = ()) -> None:
        self.sender.send(router_id, self.load(), admitted, tokens)
        self._last_sent_s[router_id] = time.monotonic()

    def _send_idle_frames(self, now_s: float) -> None:
        for router_id, sent_s in self._last_sent_s.items():
            if now_s - sent_s >= _IDLE_FRAME_S:
                self._send(router_id)

    def load(self) -> EngineLoad:
        return stub_load(num_running=len(self._running), step_s=self._step_s)


def stub_load(num_running: int = 0, step_s: float = 0.0) -> EngineLoad:
    """An engine with room for everybody."""
    return EngineLoad(
        num_running=num_running,
        num_queued=0,
        queued_prompt_tokens=0,
        free_blocks=NUM_BLOCKS,
        total_blocks=NUM_BLOCKS,
        step_s=step_s,
    )
