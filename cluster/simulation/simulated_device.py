"""The device of a simulated engine: when each step that is launched on it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.simulation.cost_model import CostModel
from cluster.simulation.draft_shape import DraftShape
from cluster.simulation.engine_counts import EngineCounts
from cluster.simulation.shared_machine import SharedMachine
from cluster.simulation.step_model import StepModel
from replicas.metrics.engine_status import StepClock
from replicas.metrics.mixture_clock import MixtureClock
from scheduler.plan import BlockSwap, StepPlan
from scheduler.step_shape import StepShape


@dataclass(slots=True)
class StepInFlight:
    """request_ids: of its rows, then of the prompts that it completes. end_s: when the device is done with it.
    num_drafts: of each of its rows, where they may have some, with the plan, and how long it takes."""

    step_id: int
    request_ids: tuple[str, ...]
    end_s: float
    num_drafts: tuple[int, ...] = ()
    plan: StepPlan | None = None
    step_s: float = 0.0


class SimulatedDevice:
    """One step after another. steps: how long they take. counts: its engine's."""

    def __init__(
        self,
        pool: str,
        key: int,
        steps: StepModel,
        costs: CostModel,
        machine: SharedMachine,
        block_size: int,
        drafts: DraftShape | None = None,
    ) -> None:
        """pool, key: of its engine: what shares the machine with other pools, and its number among all. drafts: None:
        its rows have none."""
        self.steps = steps
        self.is_shared = costs.is_shared
        self.free_s = 0.0  # when the last step ends
        self._digested_s = 0.0  # when the last digests are there
        self.counts = EngineCounts()
        self._pool, self._key, self._machine = pool, key, machine
        self._costs, self._block_size = costs, block_size
        self._drafts = drafts is not None
        self._prompt_clock = StepClock()  # only steps that compute prompts
        self.mixture = MixtureClock()

    @property
    def prefill_tokens_per_s(self) -> float:
        """As engines report it."""
        return self._prompt_clock.prefill_tokens_per_s

    def launch(self, plan: StepPlan, now_s: float, goes_on: bool) -> StepInFlight:
        """Behind the steps before it. Mutates. goes_on: another step follows, as far as can be told now."""
        shape = StepShape.of(plan)
        step_s = self._step_s(plan, shape)
        start_s = max(now_s, self.free_s)
        end_s = start_s + step_s
        if shape.num_rows:  # exactly: many of the steps of rows alone are never launched here
            self.mixture.row_step_s = self.steps.step_s(shape.num_rows, shape.num_context_tokens)
        if self.is_shared:
            end_s = self._machine.launch(self._key, self._pool, start_s, step_s, self.steps.contention, goes_on)
        self.free_s = end_s
        if shape.num_prompt_tokens:
            self._prompt_clock.count(plan, end_s - start_s)
            self.mixture.count(plan, end_s - start_s, end_s)
        return self._until(end_s, plan, shape, end_s - start_s)

    def _until(self, end_s: float, plan: StepPlan, shape: StepShape, step_s: float) -> StepInFlight:
        """A step that ends then, and takes so long. Mutates: counts it."""
        request_ids = [part.request_id for part in plan.slices if part.num_sampled]
        self.counts.num_steps += 1
        self.counts.num_rows += plan.num_rows if self._drafts else shape.num_rows
        self.counts.num_prompt_tokens += shape.num_prompt_tokens
        step = StepInFlight(plan.step_id, tuple(request_ids), end_s)
        if self._drafts:
            step.num_drafts, step.plan, step.step_s = tuple([row.num_drafts for row in plan.rows]), plan, step_s
        return step

    def digest(self, num_tokens: int, now_s: float) -> float:
        """When the digests are there of KV of so many tokens, which moves: one prompt's behind the other's, before what
        is not launched yet, beside the steps in flight. Mutates."""
        took_s = self._costs.digest_s(num_tokens)
        if not took_s:
            return now_s
        self.free_s = max(self.free_s, now_s) + took_s
        self._digested_s = max(self._digested_s, now_s) + took_s
        return self._digested_s

    def steps_passed(self, count: int, num_rows: int, free_s: float) -> None:
        """So many steps of so many rows each have run, the last one until free_s. Mutates."""
        self.free_s = free_s
        self.counts.num_steps += count
        self.counts.num_rows += count * num_rows

    def _step_s(self, plan: StepPlan, shape: StepShape) -> float:
        """Of the step with nothing else on the device: swaps come before its pass, cached blocks move beside it."""
        pass_s = 0.0 if plan.is_empty else self.steps.step_s(*shape)
        if plan.has_drafts:
            pass_s += self.steps.drafting_s
        return max(pass_s + self._copy_s(plan.swap_outs, plan.swap_ins), self._copy_s(plan.fetches, plan.saves))

    def _copy_s(self, out: Sequence[BlockSwap], back: Sequence[BlockSwap]) -> float:
        num_swaps = len(out) + len(back)
        return self._costs.swap_s(num_swaps * self._block_size) if num_swaps else 0.0
