"""Many decode steps at once, when nothing but growth happens in them: what makes a simulation of hours affordable.

A step is steady if it gives one row to every running sequence and nothing else changes: nobody arrives, is admitted,
starts, ends, stalls, gives way or comes back, nor does what routers are told of the memory to come. Its decisions are
then known without taking them: each sequence is one token further, and has a new block if it entered one. Block numbers
may differ from those of single steps (blocks are taken in another order); no decision depends on them.
"""

from __future__ import annotations

from scheduler.admission import LATER_STEPS, ProjectedBudget
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler


def num_steady_steps(scheduler: Scheduler, lag: int, most: int) -> int:
    """How many next steps are surely steady if nothing arrives, at most `most`; 0 when the very next may not be.

    Ends are foreseen only by max_tokens: who knows of earlier ones lowers `most`. O(running).
    """
    requests, budget = scheduler.batch.requests, scheduler.budget
    if type(budget) is not ProjectedBudget:
        return 0
    if not requests or not _is_quiet(scheduler) or not all(_is_in_step(request, lag) for request in requests):
        return 0
    step = scheduler.builder.next_step_id
    if budget.projection.overdue(step):
        return 0
    count = min(most, budget.projection.next_due - step)
    # Nor does the room change that routers are told of.
    for distance in (0, *LATER_STEPS):
        count = min(count, budget.projection.peak_holds_until(step + distance) - step - distance)
    # Its last known token ends a request: that step is none of these, nor is one that has no row for it.
    count = min(count, min(request.max_tokens - request.sequences[0].num_planned for request in requests) - 1)
    # Room for a block each in every step, so that nobody is looked at more closely.
    block_size = scheduler.limits.block_size
    blocks_each = scheduler._num_available // len(requests)
    return max(0, min(count, (blocks_each - 2) * block_size))


def take_steady_steps(scheduler: Scheduler, count: int) -> None:
    """As if `count` steps, no more than num_steady_steps said, had been planned and as many committed. Mutates."""
    block_size = scheduler.limits.block_size
    builder, requests = scheduler.builder, scheduler.batch.requests
    builder.next_step_id += count
    last_step_id = builder.next_step_id - 1
    for request in requests:
        sequence = request.sequences[0]
        sequence.num_planned += count
        sequence.num_known += count
        request.last_step_id = last_step_id
        blocks = sequence.block_ids
        num_new = (request.prompt_len + sequence.num_planned - 2) // block_size + 1 - len(blocks)
        if num_new > 0:
            blocks += scheduler.allocator.allocate(num_new, after=blocks[-1])
    scheduler.batch.num_forwarded_tokens += count * len(requests)
    scheduler.decode_lane.committed_step_id += count
    scheduler.budget.move_to(builder.next_step_id, scheduler.get)


def _is_quiet(scheduler: Scheduler) -> bool:
    """No prompt in work, nobody over or away whose blocks a step must still let go of, nobody to admit."""
    preemption = scheduler.preemption
    return (
        not len(scheduler.prompts)
        and not scheduler._handing_over
        and not preemption
        and not preemption.is_cooling
        and not scheduler._ending
        and (not scheduler.num_queued or not scheduler._free_slots)
    )


def _is_in_step(request: Request, lag: int) -> bool:
    """One choice, and exactly as many rows in flight as there can be."""
    sequences = request.sequences
    return (
        request.state is RequestState.RUNNING
        and len(sequences) == 1
        and sequences[0].finish_reason is None
        and sequences[0].num_planned - sequences[0].num_known == lag
        and sequences[0].num_known > 0
    )
