"""CPU time that a prefix cache costs: of a long prompt that is found or not, and of steps of many rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.scheduler.step_costs import NUM_ROWS, StepCosts, measure_steps
from scheduler.capabilities import PREFILL
from scheduler.generation_spec import GenerationSpec
from scheduler.plan import SampledToken, StepOutput
from scheduler.pool_limits import PoolLimits
from scheduler.prefix_book import PrefixOptions
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

PREFIXES = PrefixOptions("benchmark")
_BLOCK_SIZE, _NUM_BLOCKS = 16, 16_384
_PROMPT_LEN = 8192 + 1  # 512 blocks can be found


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """Microseconds for one prompt of 512 blocks, from its arrival until its blocks are nobody's again.

    what: without a cache; in vain: nothing is found, and nothing is evicted; evicting: likewise, but the pool is full
    of what can be found; found: all of it.
    """

    what: str
    submit_us: float
    admit_us: float
    plan_us: float
    commit_us: float
    release_us: float


def measure_prompts(rounds: int) -> list[PromptCosts]:
    """The medians of so many prompts of each kind. Blocks."""
    num_full = _NUM_BLOCKS // 512 + 1
    return [
        _median("no cache", _Prompts(None), [(number, 0) for number in range(rounds)]),
        _median("in vain", _Prompts(PREFIXES), [(number, 0) for number in range(min(rounds, 30))]),
        _median("evicting", _filled(num_full), [(number, 1) for number in range(rounds)]),
        _median("found", _filled(1), [(0, 0)] * rounds),
    ]


def measure_cached_steps(num_steps: int, rounds: int) -> list[StepCosts]:
    """As `measure_steps`, with a cache that finds nothing."""
    return [measure_steps(num_rows, num_steps, rounds, PREFIXES) for num_rows in NUM_ROWS]


class _Prompts:
    """A prefill engine that gets one prompt at a time, each in one step, and gives its KV away at once."""

    def __init__(self, prefixes: PrefixOptions | None) -> None:
        limits = PoolLimits(_NUM_BLOCKS, _BLOCK_SIZE, 4, _PROMPT_LEN)
        self._scheduler = Scheduler(limits, PREFILL, prefixes=prefixes)
        self._num_made = 0

    def one(self, *kind: int) -> list[float]:
        """Seconds of thread time of each part. kind: prompts of the same kind are the same."""
        scheduler = self._scheduler
        self._num_made += 1
        prompt_ids = (*kind, *range(_PROMPT_LEN - len(kind)))
        spec = GenerationSpec(prompt_ids, (0,), 2, frozenset(), SamplingParams())
        request = Request(f"r{self._num_made}", spec, deadline_s=1e9, hands_over=True)
        times_s = [time.thread_time()]
        scheduler.submit(request, 0.0)
        times_s.append(time.thread_time())
        assert scheduler.admit(0.0) == (request,)
        times_s.append(time.thread_time())
        plan = scheduler.plan(0.0)
        times_s.append(time.thread_time())
        assert plan is not None
        scheduler.commit(StepOutput(plan.step_id, (SampledToken(request.request_id, 0, 7),)), 0.0)
        times_s.append(time.thread_time())
        scheduler.lease_ended(request.request_id, 0.0)
        times_s.append(time.thread_time())
        return [after - before for before, after in pairwise(times_s)]


def _filled(num_prompts: int) -> _Prompts:
    prompts = _Prompts(PREFIXES)
    for number in range(num_prompts):
        prompts.one(number, 0)
    return prompts


def _median(what: str, prompts: _Prompts, kinds: list[tuple[int, int]]) -> PromptCosts:
    columns = zip(*[prompts.one(*kind) for kind in kinds], strict=True)
    return PromptCosts(what, *[1e6 * sorted(column)[len(column) // 2] for column in columns])
