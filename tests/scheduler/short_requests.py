"""Short ways to make requests and to play a step, for the unit tests."""

from __future__ import annotations

from typing import Any

from scheduler.admission import AdmissionPolicy, ProjectedBudget
from scheduler.capabilities import DECODE, PREFILL, Capabilities
from scheduler.generated_token import Token
from scheduler.generation_spec import GenerationSpec
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.pool_limits import PoolLimits
from scheduler.request import Request, Sequence
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

STOP = 999
ALL_ABLE = Capabilities(computes=True, decodes=True, offers=True, reads=True)


def make_request(
    request_id: str = "r",
    prompt_len: int = 3,
    max_tokens: int = 4,
    choices: tuple[int, ...] = (0,),
    deadline_s: float = 100.0,
    local_prefill: bool = True,
    hands_over: bool = False,
    **values: Any,
) -> Request:
    """Prompt tokens 100, 101, ...; STOP is its only stop token."""
    prompt_ids = tuple(range(100, 100 + prompt_len))
    spec = GenerationSpec(prompt_ids, choices, max_tokens, frozenset({STOP}), SamplingParams(seed=1), **values)
    return Request(request_id, spec, deadline_s, local_prefill, hands_over)


def first_tokens(request: Request, token_id: int = 7) -> tuple[Token, ...]:
    """As a source sampled them: the same for each choice, and none is its last."""
    return tuple(Token(request.request_id, choice, 0, token_id, None) for choice in request.spec.choices)


def limits(num_blocks: int = 20, block_size: int = 4, max_sequences: int = 4, max_step_tokens: int = 16) -> PoolLimits:
    return PoolLimits(num_blocks, block_size, max_sequences, max_step_tokens)


def decode_scheduler(
    size: PoolLimits, admission: AdmissionPolicy | None = None, lag: int = 0, num_host_blocks: int = 0
) -> Scheduler:
    return Scheduler(size, DECODE, admission, lag, num_host_blocks)


def prefill_scheduler(size: PoolLimits, lag: int = 0) -> Scheduler:
    return Scheduler(size, PREFILL, lag=lag)


def projected(scheduler: Scheduler) -> ProjectedBudget:
    """The budget of one that decodes."""
    assert isinstance(scheduler.budget, ProjectedBudget)
    return scheduler.budget


def sampled(plan: StepPlan, token_id: int = 7, **of_request: int) -> StepOutput:
    """What a runner returns that samples `token_id` everywhere, or what `of_request` says by request id."""
    names = [(part.request_id, choice) for part in plan.slices for choice in part.sampled_choices]
    tokens = tuple(SampledToken(rid, choice, of_request.get(rid, token_id)) for rid, choice in names)
    return StepOutput(plan.step_id, tokens)


def works_on(plan: StepPlan) -> list[str]:
    """Ids of the requests that a step computes for, one for each row and chunk."""
    return [part.request_id for part in plan.slices]


def running(scheduler: Scheduler, request: Request) -> Request:
    """Submit, admit and load it; the first token of each choice is 7."""
    assert not request.local_prefill
    scheduler.submit(request, 0.0)
    assert scheduler.admit(0.0) == (request,)
    scheduler.begin_load(request.request_id, 0.0)
    scheduler.kv_ready(request.request_id, first_tokens(request), 0.0)
    return request


def step(scheduler: Scheduler, token_id: int = 7, **of_request: int) -> tuple[StepPlan, tuple[Token, ...]]:
    """Plan and commit one step without lag."""
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan, scheduler.commit(sampled(plan, token_id, **of_request), 0.0).tokens


def written_blocks(request: Request, plan: StepPlan, block_size: int) -> dict[int, int]:
    """Choice -> the block its row writes."""
    by_choice: dict[int, Sequence] = {sequence.choice: sequence for sequence in request.sequences}
    return {
        row.choice: by_choice[row.choice].block_ids[row.start // block_size]
        for row in plan.rows
        if row.request_id == request.request_id
    }
