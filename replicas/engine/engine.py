"""The loop that both engines share: events in, admission, one step, tokens out. Its own thread, no Ray.

    inbox -> expire -> admit -> plan -> launch -> commit (lag steps later) -> flush

Everything that touches the scheduler, the runner or the slots runs on this thread; other threads only
put actions into its inbox and wait on futures.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from replicas.engine.broken_output import broken_requests, without
from replicas.engine.call_table import OpenCall
from replicas.engine.engine_parts import EngineParts, SchedulerT
from replicas.engine.engine_status import EngineStatus, StepClock, load_of
from replicas.engine.inbox import Inbox
from replicas.engine.step_isolation import run_isolated
from replicas.engine.step_timer import StepTimer
from replicas.messages import CallStatus, EngineLoad
from replicas.model.model_runner import StepHandle
from scheduler.plan import StepOutput, StepPlan
from scheduler.request import Request, RequestState

logger = logging.getLogger(__name__)

_HELD_POLL_S = 0.01
_MAX_IDLE_S = 0.5
_MAX_LOOP_FAILURES = 3


OpenCallT = TypeVar("OpenCallT", bound=OpenCall[Any, Any])


class Engine(ABC, Generic[SchedulerT, OpenCallT]):
    """One engine thread around a scheduler and a runner."""

    def __init__(self, name: str, parts: EngineParts[SchedulerT]) -> None:
        self.name = name
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self.faults = parts.faults
        self.metrics = parts.metrics
        self.recorder = parts.recorder
        self._lag = parts.lag
        self._num_threads = parts.num_threads
        self._calls: dict[str, OpenCallT] = {}  # by request id, until their reply
        self.steps = StepClock()
        self._timer = StepTimer()
        self._inbox = Inbox(self._fail)
        self._in_flight: deque[StepHandle | StepOutput] = deque()
        self._stopping = False
        self._is_broken = False  # for good: nothing is computed any more
        self._num_loop_failures = 0  # since a step was committed
        self._prepared: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"{name}-engine", daemon=True)
        self.last_beat_s = time.monotonic()
        self.status = EngineStatus(self.scheduler.ledger(), self._load())

    # -- any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Blocks until its thread is ready for the first step. Raises what the runner raises."""
        self._thread.start()
        self._prepared.result()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End every request, then the thread. Blocks until it has ended or the time is up."""

        def begin() -> None:
            self._stopping = True

        self._inbox.put(begin)
        self._thread.join(timeout_s)

    def cancel(self, request_id: str) -> None:
        """The caller has gone. Does not wait; unknown and ended requests are ignored."""
        end = partial(self._end, request_id, RequestState.CANCELLED, CallStatus.CANCELLED, "cancelled")
        self._inbox.put(end, request_id)

    def is_healthy(self, max_silence_s: float) -> bool:
        """Alive, not failing over and over, and its loop has come round within `max_silence_s`."""
        fresh = time.monotonic() - self.last_beat_s < max_silence_s
        return (
            self._thread.is_alive() and fresh and not self._is_broken and self._num_loop_failures < _MAX_LOOP_FAILURES
        )

    @property
    def thread(self) -> threading.Thread:
        """The engine's own; for those that watch it."""
        return self._thread

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open here: no request, lease or block held, nothing unsent. As of 50 ms ago."""
        return self.status.ledger.is_idle

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            self.runner.prepare_thread(self.scheduler.limits.max_step_tokens)
        except Exception as error:
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        while not self._stopping:
            try:
                if self._is_broken:
                    self._refuse_all()
                else:
                    self._iterate()
            except Exception:  # a bug of ours; requests fail, the engine tries to go on, health tells
                self._num_loop_failures += 1
                logger.exception("engine loop failed", extra={"event": "loop_failed", "engine": self.name})
                self._end_all(CallStatus.ERROR, "the engine failed; see its log")
                # What fails with nothing open fails at once again: not a thousand times a second until it is replaced.
                time.sleep(min(_HELD_POLL_S * 2**self._num_loop_failures, _MAX_IDLE_S))
        self._end_all(CallStatus.REJECTED, "the engine is stopping")
        self._close()

    def _iterate(self) -> None:
        self.faults.freeze(f"{self.name}.thread")
        now_s = time.monotonic()
        self.last_beat_s = now_s
        self._inbox.run()
        for request_id in self.scheduler.expired(now_s):
            self._end(request_id, RequestState.FAILED, CallStatus.TIMEOUT, "the request's time is up")
        if not self.faults.hold(f"{self.name}.admit"):
            self._on_admitted(self.scheduler.admit(now_s))
        held = self.faults.hold(f"{self.name}.step")
        plan = None if held else self.scheduler.plan(now_s)
        self._on_planned()
        if plan is not None:
            self._in_flight.append(self._launch(plan))
        has_committed = bool(self._in_flight)
        while self._in_flight and (plan is None or len(self._in_flight) > self._lag):
            self._commit(self._in_flight.popleft())
        self._flush(now_s)
        if plan is None:
            self.status = EngineStatus(self.scheduler.ledger(), self._load())
            if held or not has_committed:  # else blocks came free that somebody may have waited for
                self._wait(_HELD_POLL_S if held else _MAX_IDLE_S)
        elif self.steps.due_for_status(now_s):
            self.status = EngineStatus(self.scheduler.ledger(), self._load())

    def _launch(self, plan: StepPlan) -> StepHandle | StepOutput:
        started_s = time.monotonic()
        try:
            handle: StepHandle | StepOutput = self.runner.launch(plan)
        except Exception as error:
            extra = {"event": "step_failed", "step": plan.step_id}
            logger.warning("step failed, running it in pieces", exc_info=error, extra=extra)
            handle = self._launch_in_pieces(plan)
        self.recorder.launched(plan, started_s)
        if isinstance(handle, StepHandle) and handle.is_running:
            self._timer.launched(plan, started_s)
        else:
            self._count(plan, time.monotonic() - started_s)
        return handle

    def _count(self, plan: StepPlan, duration_s: float) -> None:
        self.steps.count(plan, duration_s)
        self.metrics.step_done(duration_s)

    def _launch_in_pieces(self, plan: StepPlan) -> StepOutput:
        isolated = run_isolated(self.runner, plan)
        for request_id, error in isolated.errors.items():
            self._fail(request_id, error)
        return isolated.output

    def _commit(self, handle: StepHandle | StepOutput) -> None:
        output = handle.result() if isinstance(handle, StepHandle) else handle
        self.recorder.committed(output.step_id)
        if (timed := self._timer.committed(output.step_id, time.monotonic())) is not None:
            self._count(*timed)
        broken = broken_requests(output, self.scheduler.counts)
        for request_id, (status, detail) in broken.items():
            self._end(request_id, RequestState.FAILED, status, detail)
        self._on_tokens(without(output, broken) if broken else output, time.monotonic())
        self._num_loop_failures = 0

    def _wait(self, longest_s: float) -> None:
        """Sleep until something arrives, the next deadline, or `longest_s`."""
        deadline_s = self.scheduler.next_deadline_s
        if deadline_s is not None:
            longest_s = max(0.0, min(longest_s, deadline_s - time.monotonic()))
        self._inbox.wait(min(longest_s, self._idle_s()))

    # -- ends --------------------------------------------------------------------------------------

    def _fail(self, request_id: str, error: Exception) -> None:
        """What went wrong for one request costs that request only (design law 6)."""
        self._log_failure(request_id, error)
        self._end(request_id, RequestState.FAILED, CallStatus.ERROR, f"{type(error).__name__}: {error}")

    def _fail_new(self, opened: OpenCallT, error: Exception) -> None:
        """Likewise, of one that was not taken yet: it may have come as far as the scheduler."""
        request_id = opened.request.request_id
        self._log_failure(request_id, error)
        try:
            if self.scheduler.get(request_id) is opened.request:
                self.scheduler.end(request_id, RequestState.FAILED, time.monotonic())
        finally:
            self._reply(opened, CallStatus.ERROR, f"{type(error).__name__}: {error}")

    def _log_failure(self, request_id: str, error: Exception) -> None:
        extra = {"event": "request_failed", "engine": self.name, "request": request_id}
        logger.error("a request failed", exc_info=error, extra=extra)

    def _end(self, request_id: str, state: RequestState, status: CallStatus, detail: str) -> None:
        """End a request early, whatever its phase. Ignores unknown ones.

        Its call is answered in any case; raises what the scheduler raises: then its books are wrong.
        """
        opened = self._calls.pop(request_id, None)
        try:
            self._let_go(request_id, opened, state)
        finally:
            if opened is not None:
                self._reply(opened, status, detail)

    def _end_all(self, status: CallStatus, detail: str) -> None:
        """Raises nothing. If blocks and books can't be trusted after it, no step is run any more."""
        try:
            self.runner.finish()  # what was launched uses blocks that are about to be free
            self._in_flight.clear()
            self.scheduler.steps_abandoned()
            if self._stopping:
                self._inbox.run()  # nobody does after this
            for request_id in list(self._calls):
                self._end(request_id, RequestState.FAILED, status, detail)
            self._flush(time.monotonic())
        except Exception:
            self._is_broken = True
            extra = {"event": "engine_broken", "engine": self.name}
            logger.critical("the engine can't go on; it waits to be replaced", exc_info=True, extra=extra)
            self._answer_all(status, detail)

    def _refuse_all(self) -> None:
        """What a broken engine does: answer calls, so that routers go elsewhere at once."""
        self.last_beat_s = time.monotonic()
        self._inbox.wait(_MAX_IDLE_S)
        self._answer_all(CallStatus.ERROR, "the engine has failed and waits to be replaced")

    def _answer_all(self, status: CallStatus, detail: str) -> None:
        """Every open call, without a look at the scheduler. Raises nothing."""
        while self._calls:
            request_id, opened = self._calls.popitem()
            try:
                self._reply(opened, status, detail)
            except Exception as error:
                self._log_failure(request_id, error)
                opened.future.set_exception(error)

    def _load(self) -> EngineLoad:
        return load_of(self.scheduler, self.steps)

    # -- what differs between the engines ----------------------------------------------------------

    @abstractmethod
    def _on_admitted(self, requests: tuple[Request, ...]) -> None:
        """Memory was promised to these requests."""

    @abstractmethod
    def _on_planned(self) -> None:
        """The scheduler has planned, or found nothing to plan."""

    @abstractmethod
    def _on_tokens(self, output: StepOutput, now_s: float) -> None:
        """A step's tokens are known: commit them to the scheduler and pass on what follows."""

    @abstractmethod
    def _let_go(self, request_id: str, opened: OpenCallT | None, state: RequestState) -> None:
        """End it in the scheduler and in the transfers. opened: None when it has been answered or is unknown."""

    @abstractmethod
    def _reply(self, opened: OpenCallT, status: CallStatus, detail: str) -> None:
        """Answer its call."""

    @abstractmethod
    def _flush(self, now_s: float) -> None:
        """Send what this iteration produced."""

    def _idle_s(self) -> float:
        """Longest time the loop may sleep."""
        return _MAX_IDLE_S

    def _close(self) -> None:
        """The thread ends: release what it owns."""
