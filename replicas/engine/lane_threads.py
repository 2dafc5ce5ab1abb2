"""One lane's steps, one behind the other: launched on a thread of its own, waited for and told on another.

Plans are applied here, not where they are made: what a plan changes of slots and blocks is then in order with the
steps of this lane, and no step of the other lane looks at it. Who waits for a step must not be who launches the next:
a plan that comes meanwhile would be launched when the device has long run out of work.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from replicas.engine.engine_watch import Watched
from replicas.engine.step_isolation import run_isolated
from replicas.model.model_runner import ModelRunner, StepHandle
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.lane_split import ALONE, LaneShare
from scheduler.plan import StepOutput, StepPlan

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_LOOK_S = 0.5  # at whether the thread still lives
_LOOK_FOR_MASKS_S = 0.1  # at whether they will still come


@dataclass(eq=False, slots=True)
class LaneStep:
    """A plan in a lane, and what came of it: its output and the error of each request that failed in it; or failure,
    after which its blocks cannot be trusted. share: of the prompts in it, or beside it when it was launched. started_s:
    when it was launched or the one before it had ended. launch_s: from its submission until it was launched. masks: of
    its rows, when the tokens in front of it are taken; None: no row has one. guessed: the plan with what grammars force
    in it, likewise; None: nothing is to be put into it.
    """

    plan: StepPlan
    runner: ModelRunner
    share: LaneShare = ALONE
    masks: Future[TokenMasks | None] | None = None
    guessed: Future[StepPlan] | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    launch_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    output: StepOutput | None = None
    errors: dict[str, Exception] = field(default_factory=dict)
    failure: Exception | None = None


class LaneThreads:
    """`submit` and `finish` are for the engine's thread."""

    def __init__(self, name: str, num_threads: int, done: Callable[[LaneStep], None]) -> None:
        """num_threads: torch's. done: called when a step has run, in their order, always on the same thread; does not
        block."""
        self._num_threads = num_threads
        self._done = done
        self._steps: queue.SimpleQueue[LaneStep | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[tuple[LaneStep, StepHandle | StepOutput] | None] = queue.SimpleQueue()
        self._prepared: Future[None] = Future()
        self._idle = threading.Condition()
        self._num_open = 0  # submitted, not done
        self._num_launched = 0  # of these
        self._has_failed = False  # nothing runs until `finish` says that all of it is forgotten
        self._launch_s = self._end_s = 0.0  # when something was launched, or had run, last
        self._prepare: Callable[[], None] | None = None
        self.launcher = threading.Thread(target=self._launch_all, name=name, daemon=True)
        self.reader = threading.Thread(target=self._read_all, name=f"{name}-reader", daemon=True)

    # -- the engine's thread -----------------------------------------------------------------------

    def start(self, prepare: Callable[[], None]) -> None:
        """prepare: run on the launching thread before its first step. Blocks for it. Raises what it raises."""
        self._prepare = prepare
        self.launcher.start()
        self._prepared.result()
        self.reader.start()

    def submit(
        self,
        plan: StepPlan,
        runner: ModelRunner,
        share: LaneShare,
        masks: Future[TokenMasks | None] | None = None,
        guessed: Future[StepPlan] | None = None,
    ) -> LaneStep:
        """Have the runner do the plan, behind what was submitted before. Does not block.

        masks: its tokens are chosen when they are there. The steps in front of it have been told by then. guessed: it
        is launched only then.
        """
        step = LaneStep(plan, runner, share, masks, guessed)
        with self._idle:
            now_s = time.monotonic()
            if not self._num_open:
                self._end_s = now_s
            if self._num_launched == self._num_open:
                self._launch_s = now_s
            self._num_open += 1
        self._steps.put(step)
        return step

    def finish(self) -> None:
        """Block until nothing that was submitted runs any more; what of it was to come is not run."""
        with self._idle:
            self._has_failed = True
            while self._num_open and self.is_alive:
                self._idle.wait(_LOOK_S)
            self._has_failed = False

    def stop(self, timeout_s: float) -> None:
        """After `finish`. Blocks until its threads have ended or the time is up."""
        self._steps.put(None)
        for thread in (self.launcher, self.reader):
            if thread.is_alive():
                thread.join(timeout_s)

    # -- any thread --------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.launcher.is_alive() and self.reader.is_alive()

    @property
    def beat_s(self) -> float:
        """When a step of this lane came to its end last: now, if it has none."""
        return self._end_s if self._num_open else time.monotonic()

    def watched(self) -> dict[str, Watched]:
        """Both threads, by name: each stands still only while there is something for it to do."""
        return {
            self.launcher.name: Watched(self.launcher, self._launcher_beat),
            self.reader.name: Watched(self.reader, self._reader_beat),
        }

    def _launcher_beat(self) -> float:
        return self._launch_s if self._num_open > self._num_launched else time.monotonic()

    def _reader_beat(self) -> float:
        return self._end_s if self._num_launched else time.monotonic()

    # -- the launching thread ----------------------------------------------------------------------

    def _launch_all(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            if self._prepare is not None:
                self._prepare()
        except Exception as error:
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        while (step := self._steps.get()) is not None:
            self._launch(step)
        self._launched.put(None)

    def _launch(self, step: LaneStep) -> None:
        step.started_s = time.monotonic()
        handle: StepHandle | StepOutput = StepOutput(step.plan.step_id, ())
        if not self._has_failed:
            try:
                handle = self._launched_step(step)
            except Exception as error:
                step.failure = error
                self._has_failed = True
        with self._idle:
            self._num_launched += 1
            self._launch_s = time.monotonic()
        step.launch_s = self._launch_s - step.submitted_s
        self._launched.put((step, handle))

    def _launched_step(self, step: LaneStep) -> StepHandle | StepOutput:
        if step.masks is not None:
            return self._constrained(step, step.masks)
        try:
            return step.runner.launch(step.plan)
        except Exception as error:
            return self._in_pieces(step, step.plan, error)

    def _constrained(self, step: LaneStep, coming: Future[TokenMasks | None]) -> StepHandle | StepOutput:
        """The pass runs while the steps in front of it are read and told, and the masks made that depend on their
        tokens: by the engine's thread, for which this one waits."""
        forwarded, failure = None, None
        plan = step.plan if step.guessed is None else self._awaited(step.guessed)
        try:
            forwarded = step.runner.forward(plan)
        except Exception as error:
            failure = error
        masks = self._awaited(coming)
        if forwarded is not None:
            try:
                return step.runner.choose(forwarded, masks)
            except Exception as error:
                failure = error
        assert failure is not None
        return self._in_pieces(step, plan, failure, masks)

    def _awaited(self, coming: Future[_T]) -> _T:
        """Blocks until it is there. Raises if it will not come, as everything is given up."""
        while True:
            try:
                return coming.result(_LOOK_FOR_MASKS_S)
            except TimeoutError:
                if self._has_failed:
                    raise

    @staticmethod
    def _in_pieces(step: LaneStep, plan: StepPlan, error: Exception, masks: TokenMasks | None = None) -> StepOutput:
        extra = {"event": "step_failed", "step": plan.step_id}
        logger.warning("step failed, running it in pieces", exc_info=error, extra=extra)
        isolated = run_isolated(step.runner, plan, masks)
        step.errors = isolated.errors
        return isolated.output

    # -- the reading thread ------------------------------------------------------------------------

    def _read_all(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (launched := self._launched.get()) is not None:
            self._await(*launched)

    def _await(self, step: LaneStep, handle: StepHandle | StepOutput) -> None:
        try:
            step.output = handle.result() if isinstance(handle, StepHandle) else handle
        except Exception as error:
            step.failure = error
            self._has_failed = True
        step.started_s = max(step.started_s, self._end_s)
        step.ended_s = self._end_s = time.monotonic()
        self._done(step)
        with self._idle:
            self._num_open -= 1
            self._num_launched -= 1
            self._idle.notify_all()
