"""An engine whose prompts and rows are computed at the same time: two lanes with threads of their own, one scheduler.

    inbox (steps that have run are committed) -> turn (expire, admit, plan both lanes) -> submit -> flush -> wait

A stream never waits for a prompt's step. The handoff is a change of owner: when the step that ends a prompt is
committed, its blocks and slots are the decode lane's.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial

from replicas.engine.engine import Engine
from replicas.engine.engine_parts import EngineParts
from replicas.engine.engine_watch import Watched
from replicas.engine.lane_threads import LaneStep, LaneThreads
from replicas.engine.token_frames import TokenFrames
from replicas.metrics.engine_status import SMOOTHING, EngineStatus
from replicas.metrics.lane_clock import LaneClock
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.lane_split import ALONE, LaneShare, choose_share
from scheduler.plan import StepPlan
from scheduler.two_lane_core import TwoLaneCore

_HELD_POLL_S = 0.01
_MAX_IDLE_S = 0.5
_STOP_S = 5.0
_LAUNCH_S = 0.001  # before one was measured
_WAKE_S = 0.001  # until a thread that was to wake up has done so, and has planned


class TwoLaneEngine(Engine):
    """As Engine. parts.scheduler must have two lanes."""

    core: TwoLaneCore[LaneStep]

    def __init__(self, name: str, parts: EngineParts, frames: TokenFrames | None = None) -> None:
        super().__init__(name, parts, frames, TwoLaneCore(parts.scheduler))
        self._objectives = parts.objectives
        self._prompt_recorder = parts.recorder.beside("prefill")
        self.steps: LaneClock = LaneClock()
        self._share = ALONE  # of the prompts that are computed now
        self._launch_s = _LAUNCH_S  # of a step of rows, until the device has it; lately
        self._decode = LaneThreads("decode-lane", parts.num_threads, self._on_step)
        self._prefill = LaneThreads("prefill-lane", parts.num_threads, self._on_step)

    @property
    def _lanes(self) -> tuple[LaneThreads, LaneThreads]:
        return self._decode, self._prefill

    def is_healthy(self, max_silence_s: float) -> bool:
        oldest_s = time.monotonic() - max_silence_s
        return super().is_healthy(max_silence_s) and all(
            lane.is_alive and lane.beat_s > oldest_s for lane in self._lanes
        )

    def watched(self) -> dict[str, Watched]:
        return super().watched() | self._decode.watched() | self._prefill.watched()

    # -- the lanes' threads ------------------------------------------------------------------------

    def _on_step(self, step: LaneStep) -> None:
        self._inbox.put(partial(self._commit_step, step))

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        super()._run()
        for lane in self._lanes:
            lane.stop(_STOP_S)

    def _prepare(self) -> None:
        self._decode.start(lambda: None)  # libraries prepare prompts only
        self._prefill.start(super()._prepare)

    def _finish_steps(self) -> None:
        for lane in self._lanes:
            lane.finish()
        super()._finish_steps()

    def _iterate(self) -> None:
        self.faults.freeze(f"{self.name}.thread")
        now_s = time.monotonic()
        self.last_beat_s = now_s
        self._inbox.run()
        may_admit, held = not self.faults.hold(f"{self.name}.admit"), self.faults.hold(f"{self.name}.step")
        rows_step_s = self.steps.rates.decode_step_s / self._beside_rows.decode_rate
        lead_s = 2 * self._launch_s + _WAKE_S
        turn = self.core.turn(now_s, may_admit=may_admit, may_plan=not held, rows_step_s=rows_step_s, lead_s=lead_s)
        self.calls.turned(turn, now_s)
        if turn.plan is not None:
            masks = self._masks_to_come(turn.plan)
            is_forced = masks is not None and self.calls.constrained.may_force(turn.plan)
            guessed: Future[StepPlan] | None = Future() if is_forced else None
            self.core.launched(self._decode.submit(turn.plan, self.runner, self._beside_rows, masks, guessed))
            self._make_masks()
        if turn.prompts is not None:
            load = self.core.prompt_load(turn.prompts, now_s, self.steps.rates)
            self._share = choose_share(load, self._objectives, self.runner.shares)
            masks = self._masks_to_come(turn.prompts)
            runner = self.runner.beside(self._share)
            self.core.prefill_launched(self._prefill.submit(turn.prompts, runner, self._share, masks))
            if masks is not None:  # a prompt's first token has no step in front of it
                masks.set_result(self.calls.masks(turn.prompts))
        self._flush(now_s)
        is_planned = turn.plan is not None or turn.prompts is not None
        if not is_planned or self.steps.due_for_status(now_s):
            self.status = EngineStatus(self.scheduler.ledger(), self._load())
        # Whoever ended in this turn may have left room for somebody else; all others come by the inbox.
        if not turn.expired and not turn.evicted and not self.core.may_plan_more(turn):
            self._wait(_HELD_POLL_S if held or not may_admit else _MAX_IDLE_S)

    def _wait(self, longest_s: float) -> None:
        if (until_s := self.core.rows_held_until_s) is not None:
            longest_s = max(0.0, min(longest_s, until_s - time.monotonic()))
        super()._wait(longest_s)

    def _masks_to_come(self, plan: StepPlan) -> Future[TokenMasks | None] | None:
        return Future() if self.calls.constrained.concern(plan) else None

    def _make_masks(self) -> None:
        """Of the decode lane's oldest step that has not run: what is in front of it has been committed."""
        if self.core.in_flight:
            oldest = self.core.in_flight[0]
            if oldest.masks is not None and not oldest.masks.done():
                plan = oldest.plan
                if oldest.guessed is not None:
                    plan = self.calls.constrained.guessed(plan)
                    oldest.guessed.set_result(plan)
                oldest.masks.set_result(self.calls.masks(plan))

    @property
    def _beside_rows(self) -> LaneShare:
        """The share of the prompts that are computed now."""
        return self._share if self.core.prompts_in_flight else ALONE

    def _commit_step(self, step: LaneStep) -> None:
        """A step has run. Raises what made it fail as a whole, and what the books raise."""
        lane = self.core.lane_of(step, step.ended_s)
        if lane is None:
            return  # it was abandoned
        if step.failure is not None:
            raise step.failure
        assert step.output is not None
        for request_id, error in step.errors.items():
            self.calls.fail(request_id, error)
        duration_s = step.ended_s - step.started_s
        is_alike = bool(step.plan.chunks) or step.share is self._beside_rows
        if not step.plan.chunks and step.masks is None:  # who waits for masks waits for the steps in front too
            self._launch_s += (step.launch_s - self._launch_s) * SMOOTHING
        self.steps.count_lane(step.plan, duration_s, step.share, is_alike=is_alike)
        self.metrics.step_done(duration_s)
        recorder = self._prompt_recorder if step.plan.chunks else self.recorder
        recorder.ran(step.plan, step.started_s, step.ended_s)
        if self.scheduler.drafts is not None:
            self.scheduler.drafts.step_took(step.plan, step.output.accepted, duration_s)
        self._take_output(step.output, lane)
        self._make_masks()
