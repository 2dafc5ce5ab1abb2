"""The loop that both engines share: events in, admission, one step, tokens out. Its own thread, no Ray.

    inbox -> expire -> admit -> plan -> launch -> commit (lag steps later) -> flush

Everything that touches the scheduler, the runner or the slots runs on this thread; other threads only
`_post` actions to it and wait on futures.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from replicas.engine.engine_status import EngineStatus, StepClock
from replicas.engine.step_isolation import run_isolated
from replicas.engine.step_recorder import StepRecorder
from replicas.engine.step_timer import StepTimer
from replicas.fault_points import FaultPoints
from replicas.messages import CallStatus, EngineLoad, TokenLogprobs
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.model.model_runner import ModelRunner, StepHandle
from replicas.token_choice.token_choice import NOT_A_TOKEN, NOTHING_ALLOWED
from scheduler.engine_scheduler import EngineScheduler
from scheduler.plan import StepOutput, StepPlan
from scheduler.request import Request, RequestState

logger = logging.getLogger(__name__)

_HELD_POLL_S = 0.01
_MAX_IDLE_S = 0.5
_MAX_LOOP_FAILURES = 3
_BROKEN = {
    NOT_A_TOKEN: (CallStatus.ERROR, "the model's output was not a number"),
    NOTHING_ALLOWED: (CallStatus.NOTHING_ALLOWED, "its rules of token choice leave no token to choose"),
}


SchedulerT = TypeVar("SchedulerT", bound=EngineScheduler)
OpenCallT = TypeVar("OpenCallT")


@dataclass(frozen=True, slots=True)
class EngineParts(Generic[SchedulerT]):
    """What every engine is made of. lag: steps planned ahead of known tokens. num_threads: torch's, fixed."""

    scheduler: SchedulerT
    runner: ModelRunner
    faults: FaultPoints
    metrics: EngineMetrics
    lag: int
    num_threads: int
    recorder: StepRecorder = field(default_factory=StepRecorder)


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
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._in_flight: deque[StepHandle | StepOutput] = deque()
        self._stopping = False
        self._num_loop_failures = 0
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

        self._post(begin)
        self._thread.join(timeout_s)

    def cancel(self, request_id: str) -> None:
        """The caller has gone. Does not wait; unknown and ended requests are ignored."""
        self._post(lambda: self._end(request_id, RequestState.CANCELLED, CallStatus.CANCELLED, "cancelled"))

    def is_healthy(self, max_silence_s: float) -> bool:
        """Alive, not failing over and over, and its loop has come round within `max_silence_s`."""
        fresh = time.monotonic() - self.last_beat_s < max_silence_s
        return self._thread.is_alive() and fresh and self._num_loop_failures < _MAX_LOOP_FAILURES

    @property
    def thread(self) -> threading.Thread:
        """The engine's own; for those that watch it."""
        return self._thread

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open here: no request, lease or block held, nothing unsent. As of 50 ms ago."""
        return self.status.ledger.is_idle

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

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
                self._iterate()
                self._num_loop_failures = 0
            except Exception:  # a bug of ours; requests fail, the engine tries to go on, health tells
                self._num_loop_failures += 1
                logger.exception("engine loop failed", extra={"event": "loop_failed", "engine": self.name})
                self._end_all(CallStatus.ERROR, "the engine failed; see its log")
        self._drain_inbox()
        self._end_all(CallStatus.REJECTED, "the engine is stopping")
        self._close()

    def _iterate(self) -> None:
        self.faults.freeze(f"{self.name}.thread")
        now_s = time.monotonic()
        self.last_beat_s = now_s
        self._drain_inbox()
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
            logger.warning(
                "step failed, running it in pieces",
                exc_info=error,
                extra={"event": "step_failed", "step": plan.step_id},
            )
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
            self._end(request_id, RequestState.FAILED, CallStatus.ERROR, f"{type(error).__name__}: {error}")
        return isolated.output

    def _commit(self, handle: StepHandle | StepOutput) -> None:
        output = handle.result() if isinstance(handle, StepHandle) else handle
        self.recorder.committed(output.step_id)
        if (timed := self._timer.committed(output.step_id, time.monotonic())) is not None:
            self._count(*timed)
        broken = {prompt.request_id: _BROKEN[NOT_A_TOKEN] for prompt in output.prompts if _has_nan(prompt.positions)}
        suspects = [token for token in output.tokens if token.token_id < 0 or token.logprobs is not None]
        for token in suspects:
            kind = NOT_A_TOKEN if _has_nan((token.logprobs,)) else token.token_id
            # What comes behind a choice's end may be anything: it is dropped.
            if kind in _BROKEN and self.scheduler.counts(token):
                broken[token.request_id] = _BROKEN[kind]
        for request_id, (status, detail) in broken.items():
            self._end(request_id, RequestState.FAILED, status, detail)
        if broken:
            tokens = tuple(token for token in output.tokens if token.request_id not in broken)
            prompts = tuple(prompt for prompt in output.prompts if prompt.request_id not in broken)
            output = replace(output, tokens=tokens, prompts=prompts)
        self._on_tokens(output, time.monotonic())

    def _drain_inbox(self) -> None:
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return
            action()

    def _wait(self, longest_s: float) -> None:
        """Sleep until something arrives, the next deadline, or `longest_s`."""
        deadline_s = self.scheduler.next_deadline_s
        if deadline_s is not None:
            longest_s = max(0.0, min(longest_s, deadline_s - time.monotonic()))
        try:
            action = self._inbox.get(timeout=min(longest_s, self._idle_s()))
        except queue.Empty:
            return
        action()

    def _end_all(self, status: CallStatus, detail: str) -> None:
        self._in_flight.clear()
        self.scheduler.steps_abandoned()
        for request_id in list(self._calls):
            self._end(request_id, RequestState.FAILED, status, detail)
        self._flush(time.monotonic())

    def _load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self.scheduler.num_running,
            num_queued=self.scheduler.num_queued,
            queued_prompt_tokens=self.scheduler.queued_prompt_tokens,
            free_blocks=self.scheduler.free_blocks(),
            total_blocks=self.scheduler.budget.num_blocks,
            step_s=self.steps.mean_s,
            prefill_tokens_per_s=self.steps.prefill_tokens_per_s,
            later_free_blocks=self.scheduler.later_free_blocks(),
            expected_tokens=self.scheduler.expected_tokens or 0,
        )

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
    def _end(self, request_id: str, state: RequestState, status: CallStatus, detail: str) -> None:
        """End a request early, whatever its phase, and answer its call. Ignores unknown ones."""

    @abstractmethod
    def _flush(self, now_s: float) -> None:
        """Send what this iteration produced."""

    def _idle_s(self) -> float:
        """Longest time the loop may sleep."""
        return _MAX_IDLE_S

    def _close(self) -> None:
        """The thread ends: release what it owns."""


def _has_nan(positions: Iterable[TokenLogprobs | None]) -> bool:
    return any(position is not None and math.isnan(position.logprob) for position in positions)
