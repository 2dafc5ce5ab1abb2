"""The admission that projection is compared with: whoever finds enough free blocks now is let in."""

from __future__ import annotations

from cluster.simulation.system_shape import SystemShape
from scheduler.admission import ProjectedBudget
from scheduler.capabilities import DECODE
from scheduler.memory_projection import Profile
from scheduler.prefix_book import PrefixOptions
from scheduler.scheduler import Scheduler


class FreeBlocksBudget(ProjectedBudget):
    """Looks at the blocks in use in the next step and no further. Preemption and all else is as shipped."""

    def _fits(self, newcomer: Profile, hands_over: bool = False) -> bool:
        in_use = self.projection.use_at(self.step)
        return in_use + newcomer.use_at(self.step, self._block_size) <= self._limit_now

    def free_from(self, num_steps: int) -> int:
        """Now, whatever num_steps: later is not looked at."""
        return max(0, self._limit_now - self.projection.use_at(self.step))


def free_blocks_decode(shape: SystemShape, prefixes: PrefixOptions | None) -> Scheduler:
    """A decode scheduler with this budget in the place of its own. It looks for no prefixes: they go by the budget."""
    scheduler = Scheduler(shape.decode.limits, DECODE, shape.admission, shape.decode.lag, shape.num_host_blocks)
    limits = shape.decode.limits
    scheduler.budget = FreeBlocksBudget(limits.num_blocks, limits.block_size, shape.admission, shape.decode.lag)
    return scheduler
