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


def num_steady_steps(scheduler: Scheduler, most: int) -> int:
    """How many next steps are surely steady if nothing arrives, at most `most`; 0 when the very next may not be.

    Ends are foreseen only by max_tokens: who knows of earlier ones lowers `most`. O(running).
    """
    requests, budget, lag = scheduler.batch.requests, scheduler.budget, scheduler.lag
    if type(budget) is not ProjectedBudget or scheduler.drafts is not None:
        return 0
    room = scheduler.room_to_grow()
    if not requests or not room or not all(_is_in_step(request, lag) for request in requests):
        return 0
    step = scheduler.builder.next_step_id
    if budget.projection.overdue(step):
        return 0
    count = min(most, budget.projection.next_due - step)
    # Nor does the room change that routers are told of.
    for distance in (0, *LATER_STEPS):
        count = min(count, budget.projection.peak_holds_until(step + distance) - step - distance)
    # Its last known token ends a request: that step is none of these, nor is one that has no row for it.
    count = min(count, min(request.spec.max_tokens - request.sequences[0].num_planned for request in requests) - 1)
    # Room for a block each in every step, so that nobody is looked at more closely.
    blocks_each = room // len(requests)
    return max(0, min(count, (blocks_each - 2) * scheduler.limits.block_size))


def take_steady_steps(scheduler: Scheduler, count: int) -> None:
    """As if `count` steps, no more than num_steady_steps said, had been planned and as many committed. Mutates."""
    block_size = scheduler.limits.block_size
    requests = scheduler.batch.requests
    last_step_id = scheduler.builder.next_step_id + count - 1
    for request in requests:
        sequence = request.sequences[0]
        sequence.num_planned += count
        sequence.num_known += count
        sequence.chain = None  # its tokens are not known
        request.last_step_id = last_step_id
        blocks = sequence.block_ids
        num_new = (request.prompt_len + sequence.num_planned - 2) // block_size + 1 - len(blocks)
        if num_new > 0:
            blocks += scheduler.allocator.allocate(num_new, after=blocks[-1])
    scheduler.batch.num_forwarded_tokens += count * len(requests)
    scheduler.steps_passed(count)


def _is_in_step(request: Request, lag: int) -> bool:
    """One choice, and exactly as many rows in flight as there can be."""
    sequences = request.sequences
    return (
        request.state is RequestState.RUNNING
        and len(sequences) == 1
        and sequences[0].finish_reason is None
        and sequences[0].num_planned - sequences[0].num_known == lag
        and sequences[0].num_known > 0
        and not (request.needs_known_tokens and lag)  # then it sits out in between
    )
