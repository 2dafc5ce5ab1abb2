"""A prefill replica on the simulated clock."""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulation.client import Attempt
from cluster.simulation.simulated_engine import SimulatedEngine, StepInFlight
from replicas.messages import EngineLoad
from scheduler.engine_core import Turn
from scheduler.outcome import PromptDone
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.request import RequestState


class SimulatedPrefill(SimulatedEngine):
    """on_done(attempt, outcome, load, now_s): a prompt is computed, and its answer leaves now."""

    pool = "prefill"
    on_done: Callable[[Attempt, PromptDone, EngineLoad, float], None]

    def submit(self, attempt: Attempt, deadline_s: float, now_s: float) -> None:
        """A call has come. Within an iteration."""
        self.attempts[attempt.request_id] = attempt
        self.scheduler.submit(attempt.request(deadline_s, local_prefill=True, hands_over=True), now_s)

    def cancel(self, request_id: str, now_s: float) -> None:
        """The router has gone. Within an iteration; a lease goes on until its reader says so."""
        request = self.scheduler.get(request_id)
        if request is not None and request.state is not RequestState.LEASED:
            self.scheduler.end(request_id, RequestState.CANCELLED, now_s)

    def lease_ended(self, request_id: str, now_s: float) -> None:
        """The reader is done with the blocks, or does not want them. Within an iteration."""
        self.scheduler.lease_ended(request_id, now_s)

    def _on_turn(self, turn: Turn) -> None:
        pass

    def _goes_on(self, plan: StepPlan) -> bool:
        return self.scheduler.queued_prompt_tokens > 0

    def _output(self, step: StepInFlight) -> StepOutput:
        attempts = self.attempts
        tokens = [SampledToken(request_id, 0, attempts[request_id].token(0)) for request_id in step.request_ids]
        return StepOutput(step.step_id, tuple(tokens))

    def _take(self, output: StepOutput, now_s: float) -> None:
        for done in self.core.commit(output, now_s).prompts:
            self.on_done(self.attempts[done.request_id], done, self.load(), now_s)

    def _flush(self, now_s: float) -> None:
        pass
