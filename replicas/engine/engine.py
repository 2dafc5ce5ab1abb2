"""One engine: calls and KV in, steps, tokens and KV out. Its own thread, no Ray.

    inbox -> turn (expire, admit, plan) -> launch -> commit (lag steps later) -> flush

What it can do its scheduler says: compute prompts, decode, offer KV, read KV. A call's life:

    generate: submit -> admitted (told in a frame) -> its prompt computed here, or its KV read -> running -> reply
    prefill:  submit -> admitted -> its prompt computed -> offered -> reply; its blocks live on until the lease ends

Tokens leave in frames, one per step and router; the reply to generate only says how many there were. Everything that
touches the scheduler, the runner or the slots runs on this thread; others put actions into its inbox.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from replicas.engine.broken_output import broken_requests, tell_damage, without
from replicas.engine.departures import Departures
from replicas.engine.engine_parts import EngineParts
from replicas.engine.engine_watch import Watched
from replicas.engine.expected_prompts import expect_prompts
from replicas.engine.inbox import Inbox
from replicas.engine.open_call import open_call
from replicas.engine.open_calls import OpenCalls
from replicas.engine.step_launch import StepLaunch
from replicas.engine.step_timer import StepTimer
from replicas.engine.token_frames import TokenFrames
from replicas.kv.handoff_actions import Event
from replicas.messages import CallStatus, EngineLoad, GenerateCall, GenerateReply, PrefillCall, PrefillReply
from replicas.metrics.engine_status import EngineStatus, StepClock, load_of
from replicas.model.model_runner import StepHandle
from scheduler.engine_core import EngineCore
from scheduler.lane import Lane
from scheduler.plan import StepOutput, StepPlan
from scheduler.request import RequestState

if TYPE_CHECKING:
    from replicas.channels.token_sender import TokenSender
    from replicas.kv.pair_rate import PairRate
    from replicas.kv.transfer_thread import TransferThread

logger = logging.getLogger(__name__)

_HELD_POLL_S = 0.01
_MAX_IDLE_S = 0.5
_MAX_LOOP_FAILURES = 3


class Engine(Departures):
    """One engine thread around a scheduler and a runner."""

    def __init__(
        self, name: str, parts: EngineParts, frames: TokenFrames | None = None, core: EngineCore[Any] | None = None
    ) -> None:
        """frames: what tokens leave by. core: what turns it; None: one lane. Raises ValueError if it decodes and has no
        frames, or the other way round."""
        if parts.scheduler.capabilities.decodes != (frames is not None):
            raise ValueError(f"{name} engine: it has token frames if it decodes, and only then")
        self.name = name
        self.frames = frames
        self.scheduler = parts.scheduler
        self.core: EngineCore[Any] = core or EngineCore(parts.scheduler)
        self.runner = parts.runner
        self.faults, self.metrics, self.recorder = parts.faults, parts.metrics, parts.recorder
        self._num_threads = parts.num_threads
        self._grammars = parts.grammars
        self.calls = OpenCalls(name, self.core, parts.metrics, frames, self._known_load, parts.grammars)
        self._launching = StepLaunch(self.core, self.calls, self._commit)
        self.steps, self._timer = StepClock(), StepTimer()
        self._slowest_pair: Callable[[], PairRate | None] = lambda: None  # until there are transfers
        self._pair_in_turn: Callable[[], PairRate | None] = lambda: None
        self._inbox = Inbox(self.calls.fail)
        self._stopping = False
        self._is_broken = False  # for good: nothing is computed any more
        self._num_loop_failures = 0  # since a step was committed
        self._prepared: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, name=f"{name}-engine", daemon=True)
        self.last_beat_s = time.monotonic()
        self.status = EngineStatus(self.scheduler.ledger(), self._load())

    # -- any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Blocks until its thread is ready for the first step. Raises what the runner raises."""
        self.thread.start()
        self._prepared.result()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End every request, then the thread. Blocks until it has ended or the time is up."""

        def begin() -> None:
            self._stopping = True

        self._inbox.put(begin)
        self.thread.join(timeout_s)

    def generate(self, call: GenerateCall) -> Future[GenerateReply]:
        """Queue a request. Any thread; does not block. The future is always answered."""
        return self._take(call)

    def prefill(self, call: PrefillCall) -> Future[PrefillReply]:
        """Queue a prompt whose KV is handed over. As `generate`."""
        return self._take(call)

    def _take(self, call: GenerateCall | PrefillCall) -> Future[Any]:
        opened = open_call(call, time.monotonic())
        if (grammar := call.spec.grammar) is not None and self._grammars is not None:
            opened.coming = self._grammars.cache.begin(grammar, call.spec.prompt_ids[call.spec.output_start :])
        self._inbox.put(partial(self.calls.submit, opened))
        if opened.coming is not None:  # behind `submit`, also if it is known already
            ready = partial(self.calls.grammar_compiled, call.request_id)
            opened.coming.add_done_callback(lambda _: self._inbox.put(ready, call.request_id))
        return opened.future

    def on_transfer_event(self, event: Event) -> None:
        """Called by the transfer thread. Does not block."""
        self._inbox.put(partial(self.calls.handoffs.on_event, event), event.transfer_id)

    def cancel(self, request_id: str) -> None:
        """The caller has gone. Does not wait; unknown and ended requests are ignored."""
        end = partial(self.calls.end, request_id, RequestState.CANCELLED, CallStatus.CANCELLED, "cancelled")
        self._inbox.put(end, request_id)

    def is_healthy(self, max_silence_s: float) -> bool:
        """Alive, not failing over and over, and its loop has come round within `max_silence_s`."""
        fresh = time.monotonic() - self.last_beat_s < max_silence_s
        return self.thread.is_alive() and fresh and not self._is_broken and self._num_loop_failures < _MAX_LOOP_FAILURES

    def watched(self) -> dict[str, Watched]:
        """Its threads, for a watch."""
        return {"engine": Watched(self.thread, lambda: self.last_beat_s)}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open here: no request, lease or block held, nothing unsent. As of 50 ms ago."""
        owes_tokens = self.frames is not None and self.frames.sender.owes_tokens
        return self.status.ledger.is_idle and not self.calls.is_compiling and not owes_tokens

    @property
    def transfers(self) -> TransferThread:
        """What moves its KV."""
        return self.calls.handoffs.transfers

    @transfers.setter
    def transfers(self, transfers: TransferThread) -> None:
        """Before start: its events come back to this engine."""
        self.calls.handoffs.transfers = transfers
        self._slowest_pair, self._pair_in_turn = transfers.slowest_pair, transfers.pair_in_turn

    @property
    def sender(self) -> TokenSender:
        """Of an engine that decodes."""
        assert self.frames is not None, f"{self.name} sends no tokens"
        return self.frames.sender

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            self._prepare()
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
                self._end_all(CallStatus.ENGINE_FAILED, "the engine failed; see its log")
                # What fails with nothing open fails at once again: not a thousand times a second.
                time.sleep(min(_HELD_POLL_S * 2**self._num_loop_failures, _MAX_IDLE_S))
        self._end_all(CallStatus.REJECTED, "the engine is stopping")
        if self.frames is not None:
            self.frames.sender.shut_down()

    def _prepare(self) -> None:
        """Before the first turn. Blocks."""
        self.runner.prepare_thread(self.scheduler.limits.max_step_tokens)

    def _finish_steps(self) -> None:
        self.runner.finish()

    def _iterate(self) -> None:
        self.faults.freeze(f"{self.name}.thread")
        now_s = time.monotonic()
        self.last_beat_s = now_s
        self._inbox.run()
        may_admit, held = not self.faults.hold(f"{self.name}.admit"), self.faults.hold(f"{self.name}.step")
        turn = self.core.turn(now_s, may_admit=may_admit, may_plan=not held)
        self.calls.turned(turn, now_s)
        if turn.admitted:
            self._flush(now_s)  # before the step: if this process dies in it, their routers know who was in it
        expect_prompts(self.runner, turn.admitted)
        if turn.plan is not None:
            self.core.launched(self._launch(turn.plan))
        has_committed = bool(self.core.in_flight)
        for step in self.core.due(turn):
            self._commit(step)
        self._flush(now_s)
        if turn.plan is None:
            self.status = EngineStatus(self.scheduler.ledger(), self._load())
            if held or not (has_committed or self.runner.read_ahead()):  # a commit may have freed what is waited for
                self._wait(_HELD_POLL_S if held else _MAX_IDLE_S)
        elif self.steps.due_for_status(now_s):
            self.status = EngineStatus(self.scheduler.ledger(), self._load())

    def _launch(self, plan: StepPlan) -> StepHandle | StepOutput:
        started_s = time.monotonic()
        handle = self._launching.launch(self.runner, plan)
        self.recorder.launched(plan, started_s)
        if isinstance(handle, StepHandle) and handle.is_running:
            self._timer.launched(plan, started_s)
        else:
            self._timer.ran(plan, time.monotonic() - started_s)
        return handle

    def _count(self, plan: StepPlan, duration_s: float) -> None:
        self.steps.count(plan, duration_s, time.monotonic())
        self.metrics.step_done(duration_s)

    def _commit(self, handle: StepHandle | StepOutput) -> None:
        output = handle.result() if isinstance(handle, StepHandle) else handle
        self.recorder.committed(output.step_id)
        if (timed := self._timer.committed(output.step_id, time.monotonic())) is not None:
            self._count(*timed)
            if self.scheduler.drafts is not None:
                self.scheduler.drafts.step_took(timed[0], output.accepted, timed[1])
        self._take_output(output)

    def _take_output(self, output: StepOutput, lane: Lane | None = None) -> None:
        """What a step gave is passed on. lane: whose step it was; None: there is one."""
        broken = broken_requests(output, self.scheduler.counts, self.scheduler.batch.running_on)
        if output.damaged:
            tell_damage(self.name, len(output.damaged), self.metrics)
        for request_id, (status, detail) in broken.items():
            self.calls.end_broken(request_id, status, detail)
        self.calls.stepped(without(output, broken) if broken else output, time.monotonic(), lane)
        self._num_loop_failures = 0

    def _flush(self, now_s: float) -> None:
        self.calls.flush(now_s)

    def _wait(self, longest_s: float) -> None:
        """Sleep until something arrives, the next deadline, or `longest_s`."""
        deadline_s = min(self.scheduler.next_deadline_s or math.inf, self.calls.next_deadline_s)
        if deadline_s < math.inf:
            longest_s = max(0.0, min(longest_s, deadline_s - time.monotonic()))
        self._inbox.wait(min(longest_s, self._idle_s()))

    def _idle_s(self) -> float:
        return _MAX_IDLE_S if self.frames is None else self.frames.idle_s(_MAX_IDLE_S)

    # -- ends --------------------------------------------------------------------------------------

    def _end_all(self, status: CallStatus, detail: str) -> None:
        """Raises nothing. If blocks and books can't be trusted after it, no step is run any more."""
        try:
            self._finish_steps()  # what was launched uses blocks that are about to be free
            self._timer.abandon()
            self.core.abandon()
            if self._stopping:
                self._inbox.run()  # nobody does after this
            for request_id in list(self.calls.by_id):
                self.calls.end(request_id, RequestState.FAILED, status, detail)
            self._flush(time.monotonic())
        except Exception:
            self._is_broken = True
            extra = {"event": "engine_broken", "engine": self.name}
            logger.critical("the engine can't go on; it waits to be replaced", exc_info=True, extra=extra)
            self.calls.answer_all(status, detail)

    def _refuse_all(self) -> None:
        """What a broken engine does: answer calls, so that routers go elsewhere at once."""
        self.last_beat_s = time.monotonic()
        self._inbox.wait(_MAX_IDLE_S)
        self.calls.answer_all(CallStatus.ENGINE_FAILED, "the engine has failed and waits to be replaced")

    def _load(self) -> EngineLoad:
        pairs, mixture = (self._slowest_pair(), self._pair_in_turn()), self.steps.mixture.at(time.monotonic())
        return load_of(self.scheduler, *self.steps.means, *pairs, is_leaving=self._is_leaving, mixture=mixture)

    def _known_load(self) -> EngineLoad:
        """As long as the books can be trusted, as of now."""
        return self.status.load if self._is_broken else self._load()
