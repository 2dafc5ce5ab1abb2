"""CPU time of planning and committing a step in which every running sequence has a row, by the number of rows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from scheduler.capabilities import DECODE
from scheduler.generated_token import Token
from scheduler.generation_spec import GenerationSpec
from scheduler.plan import SampledToken, StepOutput
from scheduler.pool_limits import PoolLimits
from scheduler.prefix_book import PrefixOptions
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

NUM_ROWS = (16, 64, 256)
_PROMPT_LEN, _BLOCK_SIZE, _LAG = 128, 16, 1


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Microseconds a step."""

    num_rows: int
    plan_us: float
    commit_us: float


def measure_steps(num_rows: int, num_steps: int, rounds: int, prefixes: PrefixOptions | None = None) -> StepCosts:
    """The least of `rounds` averages over `num_steps` steps each. prefixes: with a prefix cache. Blocks."""
    measured = [_run(num_rows, num_steps, prefixes) for _ in range(rounds)]
    return StepCosts(num_rows, min(plan for plan, _ in measured), min(commit for _, commit in measured))


def _run(num_rows: int, num_steps: int, prefixes: PrefixOptions | None) -> tuple[float, float]:
    scheduler = _running(num_rows, num_steps + 2, prefixes)
    plans_s, commits_s = [], []
    previous = scheduler.plan(0.0)
    for _ in range(num_steps):
        began_s = time.thread_time()
        plan = scheduler.plan(0.0)
        plans_s.append(time.thread_time() - began_s)
        assert plan is not None
        assert previous is not None
        assert plan.num_rows == num_rows
        tokens = tuple([SampledToken(row.request_id, row.choice, 7) for row in previous.rows])
        began_s = time.thread_time()
        scheduler.commit(StepOutput(previous.step_id, tokens), 0.0)
        commits_s.append(time.thread_time() - began_s)
        previous = plan
    return 1e6 * sum(plans_s) / num_steps, 1e6 * sum(commits_s) / num_steps


def _running(num_rows: int, num_steps: int, prefixes: PrefixOptions | None) -> Scheduler:
    num_blocks = num_rows * ((_PROMPT_LEN + num_steps) // _BLOCK_SIZE + 1)
    limits = PoolLimits(num_blocks, _BLOCK_SIZE, num_rows, 4 * num_rows)
    scheduler = Scheduler(limits, DECODE, lag=_LAG, prefixes=prefixes)
    for number in range(num_rows):
        prompt_ids = (number, *range(_PROMPT_LEN - 1))
        spec = GenerationSpec(prompt_ids, (0,), num_steps, frozenset({-1}), SamplingParams())
        scheduler.submit(Request(f"r{number}", spec, 1e9, local_prefill=False), 0.0)
    for request in scheduler.admit(0.0):
        scheduler.begin_load(request.request_id, 0.0)
        scheduler.kv_ready(request.request_id, (Token(request.request_id, 0, 0, 7, None),), 0.0)
    return scheduler
