"""What an engine publishes of itself for other threads: replaced whole, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.kv.pair_rate import PairRate
from replicas.messages import EngineLoad
from replicas.metrics.mixture_clock import NO_MIXTURE, Mixture, MixtureClock
from scheduler.outcome import Ledger
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler

_STATUS_INTERVAL_S = 0.05
SMOOTHING = 0.1
# A step counts for the rate of prompts as at most so many times what is usual. Else a machine that stood still for some
# seconds would be taken for a slow one until it has computed dozens of prompts, and they go elsewhere meanwhile.
_MOST_OFF = 4.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    ledger: Ledger
    load: EngineLoad


class StepClock:
    """Counts steps and what was in them. Engine thread only; readers see plain numbers."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prefilled_tokens = 0
        self.num_rows = 0
        self.busy_s = 0.0
        self.mean_s = 0.0  # moving average
        self.prefill_tokens_per_s = 0.0  # moving average, long steps count for more
        self._recent_tokens = self._recent_s = 0.0  # of steps that compute prompts, the older the less
        self._status_due_s = 0.0
        self.mixture = MixtureClock()

    def count(self, plan: StepPlan, duration_s: float, now_s: float | None = None) -> None:
        """Take one launched step into account. now_s: it ended then; None: nobody asks for the mixture."""
        if now_s is not None:
            self.mixture.count(plan, duration_s, now_s)
        self.num_steps += 1
        num_prefill_tokens = plan.num_prefill_tokens
        self.num_prefilled_tokens += num_prefill_tokens
        self.num_rows += plan.num_rows
        self.busy_s += duration_s
        self.mean_s += (duration_s - self.mean_s) * (SMOOTHING if self.num_steps > 1 else 1.0)
        if num_prefill_tokens and duration_s > 0.0:
            if self._recent_s:  # usual is what so many tokens take, or what steps take in the mean
                usual_s = max(num_prefill_tokens / self.prefill_tokens_per_s, SMOOTHING * self._recent_s)
                duration_s = min(duration_s, _MOST_OFF * usual_s)
            self._recent_tokens += num_prefill_tokens - SMOOTHING * self._recent_tokens
            self._recent_s += duration_s - SMOOTHING * self._recent_s
            self.prefill_tokens_per_s = self._recent_tokens / self._recent_s

    @property
    def means(self) -> tuple[float, float]:
        """Of a step's time, and of the rate of prompts."""
        return self.mean_s, self.prefill_tokens_per_s

    def due_for_status(self, now_s: float) -> bool:
        """Whether the published status is old enough to be replaced. Mutates when it is."""
        if now_s < self._status_due_s:
            return False
        self._status_due_s = now_s + _STATUS_INTERVAL_S
        return True


def load_of(
    scheduler: Scheduler,
    step_s: float,
    prefill_tokens_per_s: float,
    slowest: PairRate | None = None,
    in_turn: PairRate | None = None,
    is_leaving: bool = False,
    mixture: Mixture = NO_MIXTURE,
) -> EngineLoad:
    """What routers are told. Engine thread only. step_s and prefill_tokens_per_s: as a StepClock has them. slowest: the
    peer from which KV is read slowest; in_turn: one of all of them, another each time. mixture: told of engines that
    may do both phases."""
    return EngineLoad(
        num_running=scheduler.num_running,
        num_queued=scheduler.num_queued,
        queued_prompt_tokens=scheduler.queued_prompt_tokens,
        free_blocks=scheduler.free_blocks(),
        total_blocks=scheduler.budget.num_blocks,
        step_s=step_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        later_free_blocks=scheduler.later_free_blocks(),
        expected_tokens=scheduler.expected_tokens or 0,
        slowest_source=slowest.replica_id if slowest is not None else "",
        slowest_read_bytes_per_s=slowest.bytes_per_s if slowest is not None else 0.0,
        read_source=in_turn.replica_id if in_turn is not None else "",
        read_bytes_per_s=in_turn.bytes_per_s if in_turn is not None else 0.0,
        missing_blocks=scheduler.missing_blocks(),
        is_leaving=is_leaving,
        row_step_s=mixture.row_step_s if scheduler.capabilities.does_both and len(scheduler.batch) else 0.0,
        prompt_share=mixture.prompt_share if scheduler.capabilities.does_both else 0.0,
    )
