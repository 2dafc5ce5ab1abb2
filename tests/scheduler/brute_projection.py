"""The projection done the slow way: block tables of all requests, played forward row by row."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from scheduler.admission import ProjectedBudget, distinct_blocks
from scheduler.memory_budget import num_blocks_for
from scheduler.request import Request, RequestState, Sequence
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import projected

_UNSTARTED = (RequestState.ADMITTED, RequestState.PREFILLING, RequestState.LOADING)


@dataclass(frozen=True, slots=True)
class Future:
    """Blocks after each row from `first_step` on; the last number stays, until step `until` (None: for good)."""

    first_step: int
    counts: list[int]
    until: int | None

    def at(self, step: int) -> int:
        if self.until is not None and step > self.until:
            return 0
        return self.counts[max(0, min(step - self.first_step, len(self.counts) - 1))]

    @property
    def last_change(self) -> int:
        return max(self.first_step + len(self.counts), self.until or 0)


def play(tables: list[list[object]], live: list[int], position: int, num_rows: int, block_size: int) -> list[int]:
    """Distinct blocks now, or after each of num_rows rows of all live tables: a shared block is copied when written."""
    tables = [list(table) for table in tables]
    counts = []
    for row in range(position, position + num_rows):
        for index in live:
            table, at = tables[index], row // block_size
            if at == len(table):
                table.append(object())
            elif sum(table[at] in other for other in tables) > 1:
                table[at] = object()
        counts.append(len({block for table in tables for block in table}))
    return counts or [len({block for table in tables for block in table})]


def play_row(table: list[object], tables: list[list[object]], at: int) -> list[object]:
    """The table once a token was written into its block at `at`."""
    if at == len(table):
        return [*table, object()]
    if sum(table[at] in other for other in tables) > 1:
        return [*table[:at], object(), *table[at + 1 :]]
    return table


def newcomer_future(request: Request, num_rows: int, first_step: int, block_size: int) -> Future:
    prompt: list[object] = list(range(num_blocks_for(request.prompt_len, block_size)))
    tables = [prompt for _ in request.spec.choices]
    counts = play(tables, list(range(len(tables))), request.prompt_len, num_rows, block_size)
    return Future(first_step, counts, None)


def search_future(request: Request, block_size: int) -> Future:
    """At most so many, at any time: as if all beams parted at once and none ended before its last token."""
    prompt: list[object] = list(range(num_blocks_for(request.prompt_len, block_size)))
    tables = [prompt for _ in request.spec.choices]
    counts = play(tables, list(range(len(tables))), request.prompt_len, request.spec.max_tokens - 1, block_size)
    return Future(0, [max(counts)], None)


def prompt_future(request: Request, block_size: int) -> Future:
    """What is handed over needs its prompt's blocks, until its reader is done."""
    return Future(0, [num_blocks_for(request.prompt_len, block_size)], None)


class BruteProjection:
    """num_rows: how many rows a choice still has with so many tokens planned (the bound, or an estimate)."""

    def __init__(self, scheduler: Scheduler, budget: ProjectedBudget, admitted_at: dict[str, int]) -> None:
        self._scheduler, self._budget, self._admitted_at = scheduler, budget, admitted_at
        self._lag = budget._lag
        self._block_size = scheduler.limits.block_size
        self.step = scheduler.builder.next_step_id
        waiting = {request.request_id for queue in scheduler._queues for request in queue.in_order()}
        self.futures = [self._own_future(rid) for rid in scheduler._requests if rid not in waiting]

    def peak(self, *more: Future) -> int:
        futures = [*self.futures, *more]
        last = max((future.last_change for future in futures), default=self.step)
        steps = range(self.step, max(last, self.step) + 1)
        return max(sum(future.at(step) for future in futures) for step in steps)

    def falls_to(self, num_blocks: int) -> int | None:
        """The first step from which on no more blocks are in use."""
        last = max((future.last_change for future in self.futures), default=self.step)
        above = [step for step in range(self.step, max(last, self.step) + 2) if self._at(step) > num_blocks]
        if not above:
            return self.step
        return above[-1] + 1 if above[-1] <= last else None

    def _at(self, step: int) -> int:
        return sum(future.at(step) for future in self.futures)

    def _own_future(self, request_id: str) -> Future:
        """Without what others hold too."""
        future, num_shared = self._future(request_id), self._scheduler._requests[request_id].num_shared
        return replace(future, counts=[count - num_shared for count in future.counts])

    def _future(self, request_id: str) -> Future:
        scheduler = self._scheduler
        request = scheduler._requests[request_id]
        in_transfer = scheduler._transfers.get(request_id, ())
        if request.hands_over and not request.is_over:
            return prompt_future(request, self._block_size)
        if request.search is not None and request.state in (*_UNSTARTED, RequestState.RUNNING):
            return search_future(request, self._block_size)
        if request.state in _UNSTARTED:
            rows = self._rows(request, request.spec.max_tokens - 1)
            return newcomer_future(request, rows, self._admitted_at[request_id], self._block_size)
        if request.state is RequestState.RUNNING:
            return self._running(request)
        cooling = sum(len(set(c.device_refs)) for c in scheduler.preemption._cooling if c.request_id == request_id)
        if request.sequences and (cooling or request_id not in scheduler.preemption):
            until: int | None = request.last_step_id + self._lag
            if scheduler.has_two_lanes and any(ending is request for ending in scheduler.prefill_lane.ending):
                until = None  # the steps of that lane are not those of the projection
            own = distinct_blocks(sequence.block_ids for sequence in request.sequences)
            return Future(self.step, [len(own) + cooling], until)
        held = {block_id for sequence in request.sequences for block_id in sequence.block_ids} | set(in_transfer)
        return Future(self.step, [len(held)], None)

    def _running(self, request: Request) -> Future:
        live = [i for i, s in enumerate(request.sequences) if s.finish_reason is None]
        going: list[Sequence] = [request.sequences[i] for i in live]
        if request.may_draft and going:
            return self._drafting(request, going)
        (planned,) = {sequence.num_planned for sequence in going}
        rows = self._rows(request, request.spec.max_tokens - planned)
        position = request.prompt_len + planned - 1
        profile = self._budget.projection.get(request.request_id)
        assert profile is not None
        if request.needs_known_tokens and self._budget.estimator is not None and profile.live:
            rows = profile.last_row + profile.offset - position + 1
        tables: list[list[object]] = [list(sequence.block_ids) for sequence in request.sequences]
        counts = play(tables, live, position, rows, self._block_size)
        if request.needs_known_tokens:  # it may have got less far than its profile says, but no further
            num_ahead = rows - max(0, profile.last_row - self.step + 1)
            assert num_ahead >= 0
            longest = rows * (self._lag + 1) if rows else request.last_step_id - self.step + 1
            assert profile.until >= self.step + longest - 1, "it may be there for longer than was promised"
            return Future(self.step - num_ahead, counts, profile.until)
        if self._budget.estimator is not None:
            return Future(self.step, counts, profile.until)
        last_step = self.step + rows - 1 if rows else request.last_step_id
        return Future(self.step, counts, last_step + self._lag)

    def _drafting(self, request: Request, going: list[Sequence]) -> Future:
        """Each choice from where it may be at most, a token a step, to its own end; all stay until the slowest one is
        done if no draft in flight counts. With estimates as the profile has it."""
        profile = self._budget.projection.get(request.request_id)
        assert profile is not None
        if self._budget.estimator is not None:
            last_row = max(one.last_row for one in (profile, *profile.others))
            steps = range(self.step, max(self.step, last_row) + 1)
            counts = [profile.use_at(step, self._block_size) + request.num_shared for step in steps]
            return Future(self.step, counts, profile.until)
        most = request.spec.max_tokens
        num_rows = max(most - choice.num_planned + choice.num_unsure for choice in going)
        tables: list[list[object]] = [list(choice.block_ids) for choice in request.sequences]
        counts = []
        for row in range(max(1, num_rows)):
            for choice in going:
                if choice.num_planned + row < most:
                    position = request.prompt_len + choice.num_planned - 1 + row
                    table = tables[request.sequences.index(choice)]
                    table[:] = play_row(table, tables, position // self._block_size)
            counts.append(len({block for table in tables for block in table}))
        last_step = self.step + num_rows - 1 if num_rows else request.last_step_id
        return Future(self.step, counts, last_step + self._lag)

    def _rows(self, request: Request, bound: int) -> int:
        """With estimates, their ends are given: they were made when the request changed last."""
        if self._budget.estimator is None:
            return bound
        profile = self._budget.projection.get(request.request_id)
        assert profile is not None
        if request.state in _UNSTARTED:
            return profile.last_row - self._admitted_at[request.request_id] + 1
        return max(0, profile.last_row - self.step + 1) if profile.live else 0


def check_projection(scheduler: Scheduler, admitted_at: dict[str, int]) -> None:
    """Fast equals slow: the peak as it is, and the answer for the one that waits first."""
    budget = projected(scheduler)
    brute = BruteProjection(scheduler, budget, admitted_at)
    assert budget.promised == brute.peak() + budget.num_shared, "the projection differs from playing it forward"
    queue = scheduler._handovers if len(scheduler._handovers) else scheduler._queue
    with closing(queue.in_order()) as waiting:
        head = next(waiting, None)
    if head is not None:
        profile = budget.newcomer(head)
        limit = budget.num_blocks if head.hands_over else budget.limit
        room = limit - budget.num_shared - profile.peak(scheduler.limits.block_size)
        assert budget.start_of(head) == brute.falls_to(room), "it would fit earlier, or later"
        if head.hands_over:
            slow = brute.peak(prompt_future(head, scheduler.limits.block_size))
            assert budget.projection.peak_with(profile, brute.step) == slow
            return
        if head.search is not None:
            slow = brute.peak(search_future(head, scheduler.limits.block_size))
            assert budget.projection.peak_with(profile, brute.step) == slow
            return
        rows = profile.last_row - brute.step + 1
        slow = brute.peak(newcomer_future(head, rows, brute.step, scheduler.limits.block_size))
        assert budget.projection.peak_with(profile, brute.step) == slow
        if budget.estimator is None:
            assert rows == head.spec.max_tokens - 1
