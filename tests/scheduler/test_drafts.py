"""Which rows have drafts, how far the projection follows them, and what is given back."""

from __future__ import annotations

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.beam_search import BeamParams
from scheduler.capabilities import DECODE
from scheduler.constant_drafts import ConstantDrafts
from scheduler.draft_planner import Speculation
from scheduler.grammar import Grammar
from scheduler.memory_budget import num_blocks_for
from scheduler.pace import Pace
from scheduler.plan import Accepted, SampledToken, StepOutput, StepPlan
from scheduler.pool_limits import PoolLimits
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import limits, make_request, projected, running

B = 4
ESTIMATING = AdmissionPolicy(quantile=0.9, min_samples=1)


def drafting(
    size: PoolLimits, num_drafts: int = 5, lag: int = 0, admission: AdmissionPolicy | None = None, *, able: bool = True
) -> Scheduler:
    speculation = Speculation(ConstantDrafts(num_drafts), num_drafts, can_draft=lambda _: able)
    return Scheduler(size, DECODE, admission, lag, num_host_blocks=100, speculation=speculation)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, num_held: int = 1 << 30) -> None:
    """So many of each row's drafts hold."""
    tokens: list[SampledToken] = []
    accepted = []
    for row in plan.rows:
        held = min(num_held, row.num_drafts)
        tokens += [SampledToken(row.request_id, row.choice, 50)] * (1 + held)
        if row.num_drafts:
            accepted.append(Accepted(row.request_id, row.choice, 1 + held, row.num_sampled, row.num_drafts))
    scheduler.commit(StepOutput(plan.step_id, tuple(tokens), accepted=tuple(accepted)), 0.0)


@pytest.mark.parametrize("num_held", [0, 2, 5])
def test_a_row_with_drafts_is_planned_whole_and_settled_by_what_holds(num_held: int) -> None:
    scheduler = drafting(limits())
    (sequence,) = running(scheduler, make_request(prompt_len=6, max_tokens=30, local_prefill=False)).sequences
    plan = planned(scheduler)
    (row,) = plan.rows
    assert plan.has_drafts
    assert (row.start, row.num_tokens, row.num_sampled, row.num_drafts, row.token_ids) == (6, 6, 6, 5, ())
    assert (sequence.num_planned, sequence.num_unsure, len(sequence.block_ids)) == (7, 5, 3)
    commit(scheduler, plan, num_held)
    assert (sequence.num_known, sequence.num_planned, sequence.num_unsure) == (2 + num_held, 2 + num_held, 0)
    assert len(sequence.block_ids) == num_blocks_for(7 + num_held, B) == scheduler.allocator.counts().request
    assert planned(scheduler).rows[0].start == 7 + num_held


def test_the_next_step_is_planned_from_the_furthest_that_it_may_be() -> None:
    scheduler = drafting(limits(), lag=1)
    (sequence,) = running(scheduler, make_request(prompt_len=6, max_tokens=40, local_prefill=False)).sequences
    first, second = planned(scheduler), planned(scheduler)
    assert (first.rows[0].start, second.rows[0].start) == (6, 12)
    assert (sequence.num_planned, sequence.num_unsure, len(sequence.block_ids)) == (13, 10, 5)
    commit(scheduler, first, num_held=1)
    assert (sequence.num_known, sequence.num_planned, sequence.num_unsure) == (3, 9, 5)
    assert len(sequence.block_ids) == num_blocks_for(8 + 6, B), "behind what the second one may write it has no blocks"
    commit(scheduler, second, num_held=0)
    assert (sequence.num_known, sequence.num_planned, len(sequence.block_ids)) == (4, 4, num_blocks_for(9, B))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_none_sits_out_at_what_may_be_its_end(lag: int) -> None:
    """Whatever holds, each step has a row of it until its last token is planned for certain."""
    scheduler = drafting(limits(num_blocks=40), lag=lag)
    request = running(scheduler, make_request(prompt_len=6, max_tokens=16, local_prefill=False))
    (sequence,) = request.sequences
    in_flight: list[StepPlan] = []
    while sequence.num_known < 16:
        if (plan := scheduler.plan(0.0)) is not None:
            in_flight.append(plan)
            assert sequence.num_planned <= 16
        else:
            assert sequence.num_unsure == 0, "it sits out, and may go on"
        if plan is None or len(in_flight) > lag:
            commit(scheduler, in_flight.pop(0), num_held=1)
    assert not scheduler.batch.num_surplus_tokens


@pytest.mark.parametrize(
    "values",
    [{"beam": BeamParams(2, 1.0, False)}, {"needs_known": True}, {"able": False}],
    ids=["beams", "tokens that are waited for", "the runner can't"],
)
def test_who_never_drafts(values: dict[str, object]) -> None:
    scheduler = drafting(limits(), able=bool(values.pop("able", True)))
    request = make_request(prompt_len=6, max_tokens=30, local_prefill=False)
    if values.pop("needs_known", False):
        request.needs_known_tokens = True
    if "beam" in values:
        assert request.search is None
        request.needs_known_tokens = True  # as a search does
    running(scheduler, request)
    plan = planned(scheduler)
    assert not request.may_draft
    assert (plan.has_drafts, plan.rows[0].num_drafts, plan.rows[0].num_tokens) == (False, 0, 1)
    assert not plan.slot_inits[0].may_draft


@pytest.mark.parametrize("takes_forced", [True, False])
def test_rows_with_grammars_have_what_these_force(takes_forced: bool) -> None:
    """Also where the runner itself makes no drafts; it keeps nothing of them either way."""
    speculation = Speculation(ConstantDrafts(3), 3, can_draft=lambda _: not takes_forced, takes_forced=takes_forced)
    scheduler = Scheduler(limits(), DECODE, None, 0, num_host_blocks=100, speculation=speculation)
    held = make_request("held", prompt_len=6, max_tokens=30, local_prefill=False, grammar=Grammar("a grammar"))
    running(scheduler, held)
    running(scheduler, make_request("free", prompt_len=6, max_tokens=30, local_prefill=False))
    plan = planned(scheduler)
    assert [row.num_drafts for row in plan.rows] == ([3, 0] if takes_forced else [0, 3])
    assert [init.may_draft for init in plan.slot_inits] == [False, not takes_forced]


def test_once_nobody_makes_drafts_none_are_planned() -> None:
    """Whoever runs then has one step more with room for them, which tells; whoever comes has none."""
    alive = [True]
    speculation = Speculation(ConstantDrafts(3), 3, can_draft=lambda _: alive[0])
    scheduler = Scheduler(limits(), DECODE, None, 0, num_host_blocks=100, speculation=speculation)
    running(scheduler, make_request("a", prompt_len=6, max_tokens=30, local_prefill=False))
    plan = planned(scheduler)
    commit(scheduler, plan)
    alive[0] = False
    plan = planned(scheduler)
    assert plan.rows[0].num_drafts == 3
    scheduler.commit(StepOutput(plan.step_id, (SampledToken("a", 0, 50),), accepted=(Accepted("a", 0, 1, 4, 0),)), 0.0)
    running(scheduler, make_request("b", prompt_len=6, max_tokens=30, local_prefill=False))
    plan = planned(scheduler)
    assert [row.num_drafts for row in plan.rows] == [0, 0]
    assert not plan.has_drafts


def test_drafts_that_are_not_found_are_looked_for_again() -> None:
    scheduler = drafting(limits(), 3)
    running(scheduler, make_request("a", prompt_len=6, max_tokens=30, local_prefill=False))
    plan = planned(scheduler)
    scheduler.commit(StepOutput(plan.step_id, (SampledToken("a", 0, 50),), accepted=(Accepted("a", 0, 1, 4, 0),)), 0.0)
    assert planned(scheduler).rows[0].num_drafts == 3


def test_drafts_leave_prompts_their_half_of_a_step() -> None:
    size = PoolLimits(num_blocks=60, block_size=B, max_sequences=4, max_step_tokens=9)
    scheduler = drafting(size)
    running(scheduler, make_request("a", prompt_len=6, max_tokens=30, local_prefill=False))
    assert planned(scheduler).rows[0].num_drafts == 5
    scheduler = drafting(size)
    running(scheduler, make_request("a", prompt_len=6, max_tokens=30, local_prefill=False))
    scheduler.submit(make_request("b", prompt_len=20, max_tokens=3), 0.0)
    scheduler.admit(0.0)
    plan = planned(scheduler)
    assert (plan.rows[0].num_drafts, plan.num_prefill_tokens) == (4, 4)


def test_nobody_drafts_into_what_others_were_promised() -> None:
    """Where no request may run short of memory, one that is further than was projected needs its blocks sooner."""
    scheduler = drafting(PoolLimits(num_blocks=12, block_size=B, max_sequences=4, max_step_tokens=64), lag=0)
    for name, max_tokens in (("a", 17), ("b", 17)):
        running(scheduler, make_request(name, prompt_len=8, max_tokens=max_tokens, local_prefill=False))
    assert scheduler.budget.promised == 12, "each may become six blocks long"
    assert scheduler.budget.num_ahead() == 0
    assert [row.num_drafts for row in planned(scheduler).rows] == [0, 0]
    alone = drafting(PoolLimits(num_blocks=6, block_size=B, max_sequences=4, max_step_tokens=64))
    running(alone, make_request("a", prompt_len=8, max_tokens=17, local_prefill=False))
    assert [row.num_drafts for row in planned(alone).rows] == [5], "alone it takes nobody's"


def test_the_projection_goes_by_the_pace_that_it_learns() -> None:
    """All drafts hold: what was to end in 200 steps ends in a sixth of them."""
    scheduler = drafting(limits(num_blocks=200), admission=ESTIMATING)
    request = running(scheduler, make_request(prompt_len=6, max_tokens=400, local_prefill=False))
    first = projected(scheduler).projection.get("r")
    assert first is not None
    assert first.pace == 1
    for _ in range(40):
        commit(scheduler, planned(scheduler))
    profile = projected(scheduler).projection.get("r")
    assert profile is not None
    (sequence,) = request.sequences
    num_left = 400 - sequence.num_planned
    step = scheduler.builder.next_step_id
    assert profile.pace in (4, 5), "six, as it were for long"
    assert profile.until == step + -(-num_left // profile.pace) - 1
    assert profile.use_at(step, B) == num_blocks_for(6 + sequence.num_planned + 5, B), "with a row's drafts"
    assert profile.peak(B) <= num_blocks_for(6 + 400 - 1, B)


def test_a_pace_forgets() -> None:
    pace = Pace()
    assert pace.looked_at(0, 1) == 1.0
    for step in range(1, 200):
        pace.looked_at(step, 1 + 4 * step)
    assert pace.tokens_a_step == pytest.approx(4.0, abs=0.05)
    assert pace.looked_at(199, 10_000) == pace.looked_at(199, 0), "twice in one step it learns nothing"
    assert pace.looked_at(500, 797 + 301) == pytest.approx(1.0, abs=0.05)


def test_choices_that_part_are_projected_one_by_one() -> None:
    scheduler = drafting(limits(num_blocks=60))
    request = running(scheduler, make_request(prompt_len=6, max_tokens=20, choices=(0, 1), local_prefill=False))
    plan = planned(scheduler)
    tokens = [SampledToken("r", 0, 50)] * 6 + [SampledToken("r", 1, 50)]
    accepted = (Accepted("r", 0, 6, 6, 5), Accepted("r", 1, 1, 6, 5))
    scheduler.commit(StepOutput(plan.step_id, tuple(tokens), accepted=accepted), 0.0)
    assert [sequence.num_planned for sequence in request.sequences] == [7, 2]
    profile = projected(scheduler).projection.get("r")
    assert profile is not None
    step = scheduler.builder.next_step_id
    for ahead in range(25):
        own = [num_blocks_for(min(6 + known + ahead, 25), B) - 1 for known in (7, 2)]
        wanted = 1 + sum(own)  # the prompt's first block is shared
        assert profile.use_at(step + ahead, B) == (wanted if step + ahead <= profile.until else 0)
    assert profile.until == step + 20 - 2 - 1


def test_sampling_may_rule_drafts_out() -> None:
    speculation = Speculation(ConstantDrafts(3), 3, can_draft=lambda sampling: sampling == SamplingParams(seed=1))
    scheduler = Scheduler(limits(), DECODE, speculation=speculation)
    request = running(scheduler, make_request(prompt_len=6, max_tokens=30, local_prefill=False))
    assert request.may_draft
