"""How an engine's time is divided: how long its steps of rows alone take, and how much of its time prompts have."""

from __future__ import annotations

import math
from typing import NamedTuple

from replicas.messages import PROMPT_SHARE_S
from scheduler.plan import StepPlan

_SMOOTHING = 0.1
_STEPS = 64  # of a share: a load that is told again and again changes only by so much


class Mixture(NamedTuple):
    """As `EngineLoad` has them."""

    row_step_s: float = 0.0
    prompt_share: float = 0.0


NO_MIXTURE = Mixture()


class MixtureClock:
    """Counts steps as they end. One thread."""

    def __init__(self) -> None:
        self.row_step_s = 0.0  # moving average; 0.0 before the first
        self._share = 0.0
        self._share_at_s = 0.0

    def count(self, plan: StepPlan, duration_s: float, now_s: float) -> None:
        """A step has taken so long, and ended now. Mutates. What one of rows alone takes less is the prompts'."""
        num_rows, has_prompts = plan.num_rows, plan.num_rows < len(plan.slices)
        if num_rows and not has_prompts:
            self.row_step_s += (duration_s - self.row_step_s) * (_SMOOTHING if self.row_step_s else 1.0)
        if has_prompts:
            prompts_s = max(0.0, duration_s - (self.row_step_s if num_rows else 0.0))
            self._share = 1.0 - (1.0 - self._share_now(now_s - prompts_s)) * math.exp(-prompts_s / PROMPT_SHARE_S)
            self._share_at_s = max(now_s, self._share_at_s)

    def at(self, now_s: float) -> Mixture:
        """As of then."""
        return Mixture(self.row_step_s, self.prompt_share(now_s))

    def prompt_share(self, now_s: float) -> float:
        """Of the last PROMPT_SHARE_S, the older the less; in 64ths."""
        return round(self._share_now(now_s) * _STEPS) / _STEPS

    def _share_now(self, now_s: float) -> float:
        return self._share * math.exp(-max(0.0, now_s - self._share_at_s) / PROMPT_SHARE_S)
