"""CPU time of one decision of a decode scheduler that is full, by the number of requests that wait."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.scheduler.prefix_costs import measure_cached_steps, measure_prompts
from benchmarks.scheduler.step_costs import NUM_ROWS, measure_steps
from cluster.load.tables import table
from scheduler.capabilities import DECODE
from scheduler.generation_spec import GenerationSpec
from scheduler.pool_limits import PoolLimits
from scheduler.request import Request, RequestState
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

NUM_QUEUED = (100, 1_000, 10_000)
_NUM_RUNNING = 256
_NUM_CLIENTS = 100
_PRIORITIES = (0, 0, 0, 0, 1, -1)
_PROMPT_LEN, _MAX_TOKENS, _BLOCK_SIZE = 128, 385, 16


@dataclass(frozen=True, slots=True)
class DecisionCosts:
    """Microseconds a call. admit_none: nobody fits, as in nearly every step; admit_one: after one has ended."""

    num_queued: int
    submit_us: float
    admit_none_us: float
    admit_one_us: float
    cancel_us: float


def run_scheduler_benchmark(short: bool) -> dict[str, Any]:
    """Blocks for some seconds."""
    repeats, rounds = (100, 5) if short else (300, 15)
    costs = [measure_decisions(num_queued, repeats, rounds) for num_queued in NUM_QUEUED]
    steps = [measure_steps(num_rows, num_steps=100, rounds=rounds) for num_rows in NUM_ROWS]
    return {
        "num_running": _NUM_RUNNING,
        "num_clients": _NUM_CLIENTS,
        "decisions": [asdict(cost) for cost in costs],
        "steps": [asdict(cost) for cost in steps],
        "cached_steps": [asdict(cost) for cost in measure_cached_steps(num_steps=100, rounds=rounds)],
        "prompts": [asdict(cost) for cost in measure_prompts(repeats)],
    }


def scheduler_tables(result: dict[str, Any]) -> str:
    """For people."""
    names = ["submit", "admit_none", "admit_one", "cancel"]
    rows = [[f"{row['num_queued']:,}", *(f"{row[f'{name}_us']:.1f}" for name in names)] for row in result["decisions"]]
    both = zip(result["steps"], result["cached_steps"], strict=True)
    steps = [
        [str(row["num_rows"]), *(f"{one[f'{name}_us']:.1f}" for name in ("plan", "commit") for one in (row, cached))]
        for row, cached in both
    ]
    parts = ["submit", "admit", "plan", "commit", "release"]
    prompts = [[row["what"], *(f"{row[f'{name}_us']:.0f}" for name in parts)] for row in result["prompts"]]
    return "\n\n".join(
        [
            f"CPU time of a decision, us; {result['num_running']} requests run, {result['num_clients']} clients wait",
            table(["queued", "submit", "admit, none fits", "admit, one fits", "cancel"], rows),
            "CPU time of a step of so many rows, us",
            table(["rows", "plan", "with a prefix cache", "commit", "with a prefix cache"], steps),
            "CPU time of a prompt of 512 blocks, us",
            table(["prefix cache", *parts], prompts),
        ]
    )


def measure_decisions(num_queued: int, repeats: int, rounds: int) -> DecisionCosts:
    """The least of `rounds` averages over `repeats` calls each. Blocks."""
    scene = _FullEngine(num_queued)
    return DecisionCosts(
        num_queued=num_queued,
        submit_us=_least(rounds, lambda: scene.submit_and_cancel(repeats)[0]),
        admit_none_us=_least(rounds, lambda: scene.admit_none(repeats)),
        admit_one_us=_least(rounds, lambda: scene.admit_one(repeats)),
        cancel_us=_least(rounds, lambda: scene.submit_and_cancel(repeats)[1]),
    )


class _FullEngine:
    """A scheduler whose memory is taken, and a queue of requests of many clients that stays as long as it is."""

    def __init__(self, num_queued: int) -> None:
        self._rng = random.Random(1)
        num_blocks = _NUM_RUNNING * ((_PROMPT_LEN + _MAX_TOKENS - 1) // _BLOCK_SIZE)
        limits = PoolLimits(num_blocks, _BLOCK_SIZE, 2 * _NUM_RUNNING, 4 * _NUM_RUNNING)
        self._scheduler = Scheduler(limits, DECODE)
        self._num_made = 0
        for _ in range(_NUM_RUNNING):
            self._scheduler.submit(self._request(), 0.0)
        self._admitted = [request.request_id for request in self._scheduler.admit(0.0)]
        assert len(self._admitted) == _NUM_RUNNING
        for _ in range(num_queued):
            self._scheduler.submit(self._request(), 0.0)

    def submit_and_cancel(self, repeats: int) -> tuple[float, float]:
        """Seconds of thread time a call, of each."""
        requests = [self._request() for _ in range(repeats)]
        submit_s = _time(lambda: [self._scheduler.submit(request, 0.0) for request in requests])
        self._rng.shuffle(requests)
        ids = [request.request_id for request in requests]
        cancel_s = _time(lambda: [self._scheduler.end(name, RequestState.CANCELLED, 0.0) for name in ids])
        return submit_s / repeats, cancel_s / repeats

    def admit_none(self, repeats: int) -> float:
        def admit() -> list[object]:
            return [admitted for _ in range(repeats) for admitted in self._scheduler.admit(0.0)]

        elapsed_s = _time(admit)
        assert self._scheduler.num_running == _NUM_RUNNING, "somebody was admitted"
        return elapsed_s / repeats

    def admit_one(self, repeats: int) -> float:
        elapsed_s = 0.0
        for _ in range(repeats):
            self._scheduler.end(self._admitted.pop(), RequestState.CANCELLED, 0.0)
            began_s = time.thread_time()
            admitted = self._scheduler.admit(0.0)
            elapsed_s += time.thread_time() - began_s
            assert len(admitted) == 1
            self._admitted.insert(0, admitted[0].request_id)
            self._scheduler.submit(self._request(), 0.0)
        return elapsed_s / repeats

    def _request(self) -> Request:
        self._num_made += 1
        spec = GenerationSpec(
            prompt_ids=tuple(range(_PROMPT_LEN)),
            choices=(0,),
            max_tokens=_MAX_TOKENS,
            stop_token_ids=frozenset(),
            sampling=SamplingParams(),
            priority=self._rng.choice(_PRIORITIES),
            client=f"c{self._rng.randrange(_NUM_CLIENTS)}",
        )
        return Request(f"r{self._num_made}", spec, deadline_s=1e9, local_prefill=False)


def _least(rounds: int, measure: Callable[[], float]) -> float:
    """Microseconds."""
    return 1e6 * min(measure() for _ in range(rounds))


def _time(work: Callable[[], Sequence[object]]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s
