"""How many tokens each step brings a request, learned as it goes on: with drafts it may be more than one."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY_STEPS = 32.0


@dataclass(slots=True)
class Pace:
    """tokens_a_step: lately, of the request's slowest choice. The rest: when that was looked at last."""

    tokens_a_step: float = 1.0
    step: int = -1
    num_known: int = 0

    def looked_at(self, step: int, num_known: int) -> float:
        """So many tokens are known when `step` comes next: tokens_a_step, by what has come since the last look.
        Mutates."""
        num_steps = step - self.step
        if self.step >= 0 and num_steps > 0:
            weight = 1.0 - math.exp(-num_steps / _MEMORY_STEPS)
            self.tokens_a_step += weight * ((num_known - self.num_known) / num_steps - self.tokens_a_step)
        if num_steps > 0:
            self.step, self.num_known = step, num_known
        return self.tokens_a_step
