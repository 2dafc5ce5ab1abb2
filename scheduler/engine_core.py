"""The loop of an engine without its device and its network: who is late, who gets in, the next step, which one is due.

    turn -> its driver launches the plan -> launched -> due -> commit

One or two steps are in flight over one ledger: that of the scheduler. The driver is an engine's thread, the simulator
or a test; it has the clock, runs the steps, and tells the world what came of each turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from scheduler.lane import Lane
from scheduler.outcome import StepEvents
from scheduler.plan import StepOutput, StepPlan
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler

StepT = TypeVar("StepT")


class Turn(NamedTuple):
    """What one turn decided. plan: to be launched now; None: there is nothing to compute.

    expired: whose time is up. They are over, but for those whose blocks a reader has under a lease: the transfer ends
    these. evicted: who gave way and found no host memory; they are over. prompts: to be launched now in the prefill
    lane, where there are two; `plan` is then the decode lane's.
    """

    expired: tuple[str, ...]
    admitted: tuple[Request, ...]
    evicted: tuple[Request, ...]
    plan: StepPlan | None
    prompts: StepPlan | None = None


class EngineCore(Generic[StepT]):
    """StepT: what the driver keeps of a launched step. The scheduler's lag says how many stay in flight while there is
    something to plan.

    One thread; nothing blocks; `now_s` is monotonic. Raises what the scheduler raises: a bug of ours, after which
    `abandon` and the end of every request bring the books in order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[StepT] = deque()  # launched, not yet due; the oldest first

    def turn(self, now_s: float, *, may_admit: bool = True, may_plan: bool = True) -> Turn:
        """End those whose time is up, let in whoever fits, plan the next step. Mutates."""
        expired = self._expire(now_s)
        admitted = self._admit(now_s) if may_admit else ()
        plan = self._plan(now_s) if may_plan else None
        return Turn(expired, admitted, self.scheduler.take_evicted(), plan)

    def launched(self, step: StepT) -> None:
        """The turn's plan is on its way. Mutates."""
        self.in_flight.append(step)

    def due(self, turn: Turn) -> Iterator[StepT]:
        """The steps to commit now, one by one: those beyond the lag, and all when nothing follows them. Mutates."""
        while self.in_flight and (turn.plan is None or len(self.in_flight) > self.scheduler.lag):
            yield self.in_flight.popleft()

    def in_front(self) -> Iterator[StepT]:
        """The steps in flight, one by one, to be committed now: the next one's tokens depend on theirs. Mutates."""
        while self.in_flight:
            yield self.in_flight.popleft()

    def commit(self, output: StepOutput, now_s: float, lane: Lane | None = None) -> StepEvents:
        """A due step has run: what it brought. lane: whose step it was; None: there is one. Mutates."""
        return self.scheduler.commit(output, now_s, lane)

    def abandon(self) -> None:
        """The device has let go of all steps in flight, and their tokens are lost. Mutates.

        The caller ends every request that is prefilling or running.
        """
        self.in_flight.clear()
        self.scheduler.steps_abandoned()

    # -- the parts of a turn -----------------------------------------------------------------------

    def _expire(self, now_s: float) -> tuple[str, ...]:
        expired = self.scheduler.expired(now_s)
        for request_id in expired:
            request = self.scheduler.get(request_id)
            if request is not None and request.state is not RequestState.LEASED:
                self.scheduler.end(request_id, RequestState.FAILED, now_s)
        return expired

    def _admit(self, now_s: float) -> tuple[Request, ...]:
        return self.scheduler.admit(now_s)

    def _plan(self, now_s: float) -> StepPlan | None:
        return self.scheduler.plan(now_s)
