"""Two lanes, step by step: what is in which, and when slots and blocks may go to somebody else."""

from __future__ import annotations

from scheduler.capabilities import DECODE
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.pool_limits import PoolLimits
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from scheduler.two_lane_core import TwoLaneCore
from tests.scheduler.short_requests import make_request


class Driven:
    """A core whose steps run when the test says so."""

    def __init__(self, lag: int = 1, num_blocks: int = 32) -> None:
        limits = PoolLimits(num_blocks, block_size=4, max_sequences=6, max_step_tokens=16)
        self.scheduler = Scheduler(limits, DECODE, lag=lag, has_two_lanes=True)
        self.core: TwoLaneCore[StepPlan] = TwoLaneCore(self.scheduler)
        self.now_s = 0.0

    def submit(self, name: str, prompt_len: int, num_choices: int = 1, max_tokens: int = 9) -> Request:
        request = make_request(name, prompt_len, max_tokens, tuple(range(num_choices)))
        self.scheduler.submit(request, 0.0)
        return request

    def turn(self, rows_step_s: float = 0.0) -> tuple[StepPlan | None, StepPlan | None]:
        """Rows and prompts of a turn, which are launched."""
        turn = self.core.turn(self.now_s, rows_step_s=rows_step_s)
        if turn.plan is not None:
            self.core.launched(turn.plan)
        if turn.prompts is not None:
            self.core.prefill_launched(turn.prompts)
        return turn.plan, turn.prompts

    def commit(self, plan: StepPlan | None) -> list[str]:
        """Whose tokens it brought."""
        assert plan is not None
        lane = self.core.lane_of(plan, self.now_s)
        assert lane is not None
        tokens = [SampledToken(part.request_id, c, 7) for part in plan.slices for c in part.sampled_choices]
        events = self.core.commit(StepOutput(plan.step_id, tuple(tokens)), 0.0, lane)
        return [token.request_id for token in events.tokens]

    def running(self, name: str, prompt_len: int, **others: int) -> Request:
        """A request whose prompt is computed."""
        request = self.submit(name, prompt_len, **others)
        while request.num_prefilled < prompt_len:
            self.commit(self.turn()[1])
        assert request.state is RequestState.RUNNING
        return request


def test_neither_lane_waits_for_the_other() -> None:
    driven = Driven(lag=1)
    driven.running("row", 5)
    driven.submit("prompt", 40)
    rows, prompts = driven.turn()
    assert rows is not None
    assert [part.request_id for part in rows.slices] == ["row"]
    assert prompts is not None
    assert [part.request_id for part in prompts.slices] == ["prompt"]
    for _ in range(3):  # the prompt's step goes on
        rows, others = driven.turn()
        assert rows is not None
        driven.commit(driven.core.in_flight[0])
        assert others is None or others.step_id == 2
    assert len(driven.core.prompts_in_flight) == 2
    assert driven.turn()[1] is None, "more than its lag"
    driven.commit(prompts)
    assert driven.turn()[1] is not None


def test_a_request_changes_lanes_when_the_step_that_ends_its_prompt_is_committed() -> None:
    driven = Driven(lag=1)
    driven.running("row", 5)
    request = driven.submit("prompt", 6, num_choices=2)
    rows, prompts = driven.turn()
    assert request.state is RequestState.PREFILLING
    driven.commit(rows)
    rows, _ = driven.turn()
    assert rows is not None
    assert [part.request_id for part in rows.slices] == ["row"]
    assert driven.scheduler.num_changing_lanes == 1
    assert driven.commit(prompts) == ["prompt", "prompt"]
    assert request.state is RequestState.RUNNING
    assert driven.scheduler.num_changing_lanes == 0
    rows, _ = driven.turn()
    assert rows is not None
    assert [part.request_id for part in rows.slices] == ["row", "prompt", "prompt"]
    slots = {sequence.slot for sequence in request.sequences}
    assert {write.slot for write in rows.table_writes} >= slots - {request.sequences[0].slot}
    assert len(rows.copies) == 1, "its choices part in the block that both began"


def test_what_a_step_in_flight_notes_of_a_slot_keeps_it_though_its_request_has_no_row_there() -> None:
    driven = Driven(lag=1)
    scheduler = driven.scheduler
    driven.running("row", 5)
    gone = driven.running("gone", 9)
    driven.turn()  # rows of both
    stalled = driven.running("stalled", 4, num_choices=2)
    scheduler.end("gone", RequestState.CANCELLED, 0.0)  # its blocks come free with the step in flight
    assert gone in scheduler.decode_lane.ending
    driven.commit(driven.core.in_flight[0])
    assert gone in scheduler.decode_lane.ending
    scheduler.allocator.allocate(scheduler.allocator.num_free)
    rows, _ = driven.turn()
    assert rows is not None
    assert [part.request_id for part in rows.slices] == ["row"]
    slots = {sequence.slot for sequence in stalled.sequences}
    assert slots & {write.slot for write in rows.table_writes}
    before = scheduler.num_running
    scheduler.end("stalled", RequestState.CANCELLED, 0.0)
    assert scheduler.num_running == before, "a prompt could take the slot while the step in flight writes its table"
    driven.commit(driven.core.in_flight[0])
    driven.commit(rows)
    assert scheduler.num_running == 1


def test_nothing_is_noted_of_slots_that_are_free() -> None:
    driven = Driven(lag=0)
    request = driven.running("a", 4, num_choices=2)
    slots = {sequence.slot for sequence in request.sequences}
    driven.scheduler.end("a", RequestState.CANCELLED, 0.0)  # before any row, when its choices' tables are noted
    driven.running("b", 17)  # in one of them, in two steps
    rows, _ = driven.turn()
    assert rows is not None
    assert not slots & {write.slot for write in rows.table_writes}


def test_abandoned_steps_of_both_lanes_leave_nothing() -> None:
    driven = Driven(lag=1)
    row = driven.running("row", 5)
    prompt = driven.submit("prompt", 40)
    rows, prompts = driven.turn()
    driven.core.abandon()
    for request in (row, prompt):
        driven.scheduler.end(request.request_id, RequestState.FAILED, 0.0)
    assert driven.scheduler.ledger().is_idle
    assert driven.scheduler.ledger().used_slots == 0
    assert rows is not None
    assert driven.core.lane_of(rows, 0.0) is None
    assert prompts is not None
    assert driven.core.lane_of(prompts, 0.0) is None
    driven.running("later", 5)


# -- a request's first row -----------------------------------------------------------------------------

STEP_S = 0.010


def rows_of(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [part.request_id for part in plan.slices]


def beside_a_prompt(driven: Driven) -> StepPlan:
    """One step of rows has just begun, and that which ends a prompt is in flight."""
    driven.running("row", 5, max_tokens=99)
    driven.submit("prompt", 6)
    rows, prompts = driven.turn(STEP_S)
    assert rows_of(rows) == ["row"]
    assert prompts is not None
    return prompts


def test_a_first_row_is_in_the_step_behind_the_one_that_runs() -> None:
    """Not behind one more, which was planned ahead when the prompt had not ended."""
    driven = Driven(lag=1)
    prompts = beside_a_prompt(driven)
    driven.now_s = 0.004
    assert driven.turn(STEP_S) == (None, None), "planned ahead though somebody is about to be a row"
    assert driven.core.rows_held_until_s == 0.007
    driven.commit(prompts)
    assert rows_of(driven.turn(STEP_S)[0]) == ["row", "prompt"]
    assert len(driven.core.in_flight) == 2


def test_a_prompt_that_is_not_over_in_time_holds_nobody_up() -> None:
    """The device has its next step before it runs out of work; and then the first row waits for that one too."""
    driven = Driven(lag=1)
    prompts = beside_a_prompt(driven)
    assert driven.turn(STEP_S)[0] is None
    driven.now_s = 0.007
    assert rows_of(driven.turn(STEP_S)[0]) == ["row"]
    assert driven.core.rows_held_until_s is None
    driven.now_s = 0.008
    driven.commit(prompts)
    assert driven.turn(STEP_S)[0] is None, "two are in flight"
    driven.now_s = 0.010
    driven.commit(driven.core.in_flight[0])
    assert rows_of(driven.turn(STEP_S)[0]) == ["row", "prompt"]


def test_the_slower_a_launch_the_sooner_rows_are_planned() -> None:
    driven = Driven(lag=1)
    beside_a_prompt(driven)
    driven.now_s = 0.001
    assert driven.core.turn(driven.now_s, rows_step_s=STEP_S, lead_s=0.005).plan is None
    assert driven.core.rows_held_until_s == 0.005
    assert driven.core.turn(driven.now_s, rows_step_s=STEP_S, lead_s=0.020).plan is not None


def test_each_step_is_waited_for_from_where_it_began() -> None:
    driven = Driven(lag=1)
    beside_a_prompt(driven)
    driven.now_s = 0.007
    driven.turn(STEP_S)
    driven.now_s = 0.012  # later than foretold
    driven.commit(driven.core.in_flight[0])
    assert driven.turn(STEP_S)[0] is None
    assert driven.core.rows_held_until_s == 0.012 + STEP_S - 0.003


def test_a_step_that_ends_sooner_than_foretold_is_followed_at_once() -> None:
    driven = Driven(lag=1)
    beside_a_prompt(driven)
    assert driven.turn(STEP_S)[0] is None
    driven.now_s = 0.002
    driven.commit(driven.core.in_flight[0])
    assert rows_of(driven.turn(STEP_S)[0]) == ["row"]


def test_rows_are_planned_ahead_at_once_where_no_prompt_ends() -> None:
    driven = Driven(lag=1)
    driven.running("row", 5, max_tokens=99)
    driven.submit("prompt", 40)
    assert rows_of(driven.turn(STEP_S)[0]) == ["row"]
    assert driven.scheduler.num_changing_lanes == 0, "this step only begins it"
    assert rows_of(driven.turn(STEP_S)[0]) == ["row"]
    assert len(driven.core.in_flight) == 2
