"""Requests whose next row is planned only when all their tokens are known, beside others, at any lag.

Beam searches are such, and have tests of their own; these are not searches.
"""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.beam_search import BeamParams
from scheduler.engine_core import EngineCore
from scheduler.generation_spec import GenerationSpec
from scheduler.plan import StepOutput, StepPlan
from scheduler.pool_limits import PoolLimits
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.steady_steps import num_steady_steps
from tests.scheduler.paged_model import PagedRunner, reference_tokens, until_stop
from tests.scheduler.short_requests import decode_scheduler, limits, make_request, running, sampled
from tests.scheduler.simulated_engine import FaultRates
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload

FAULTS = FaultRates(row_error=0.01, not_a_number=0.01, engine=0.003)
OPTIMISTIC = AdmissionPolicy(quantile=0.1, min_samples=4)


def needing(request: Request) -> Request:
    request.needs_known_tokens = True
    return request


def test_it_sits_out_while_a_token_is_in_flight() -> None:
    scheduler = decode_scheduler(limits(), lag=1)
    running(scheduler, needing(make_request("a", max_tokens=9, choices=(0, 1), local_prefill=False)))
    running(scheduler, make_request("b", max_tokens=9, local_prefill=False))
    plans: list[StepPlan] = []
    for _ in range(6):
        plan = scheduler.plan(0.0)
        assert plan is not None
        plans.append(plan)
        if len(plans) > 1:
            scheduler.commit(sampled(plans[-2]), 0.0)
    assert [[row.request_id for row in plan.rows] for plan in plans] == [["a", "a", "b"], ["b"]] * 3
    assert [row.start for plan in plans for row in plan.rows if row.request_id == "a"] == [3, 3, 4, 4, 5, 5]


def test_its_prompts_token_is_one_of_them() -> None:
    scheduler = decode_scheduler(limits(), lag=1)
    scheduler.submit(needing(make_request("a")), 0.0)
    scheduler.admit(0.0)
    first = scheduler.plan(0.0)
    assert first is not None
    assert scheduler.plan(0.0) is None, "nothing else to do: it waits"
    scheduler.commit(sampled(first), 0.0)
    second = scheduler.plan(0.0)
    assert second is not None
    assert [row.start for row in second.rows] == [3]


def test_every_beam_search_is_such() -> None:
    beam = BeamParams(1)
    spec = GenerationSpec((1,), (0,), 4, frozenset(), beam.sampling(0), beam=beam, num_returned=1)
    request = Request("r", spec, 1.0)
    assert request.needs_known_tokens
    assert not make_request().needs_known_tokens


@pytest.mark.parametrize("lag", [0, 1])
def test_no_step_is_steady_in_which_it_sits_out(lag: int) -> None:
    counts = []
    for needs in (False, True):
        scheduler = decode_scheduler(limits(num_blocks=60), lag=lag)
        request = make_request(max_tokens=100, local_prefill=False)
        request.needs_known_tokens = needs
        running(scheduler, request)
        plans = [scheduler.plan(0.0) for _ in range(lag)]
        assert all(plan is not None for plan in plans)
        counts.append(num_steady_steps(scheduler, 50))
    assert counts[0] > 10
    assert (counts[1] == 0) == (lag > 0)


def texts_of(lag: int, needs: set[int], seed: int) -> tuple[dict[tuple[str, int], list[int]], dict[str, list[int]]]:
    """Of twelve requests, numbers `needs` such: each choice's tokens, and each request's steps with rows. Their prompts
    are all in the first step."""
    rng = random.Random(seed)
    size = PoolLimits(num_blocks=400, block_size=3, max_sequences=24, max_step_tokens=300)
    scheduler = decode_scheduler(size, lag=lag)
    core: EngineCore[StepOutput] = EngineCore(scheduler)
    runner = PagedRunner(size, max_blocks=30)
    requests = []
    for number in range(12):
        prompt_ids = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 20)))
        seed, max_tokens = rng.randrange(1 << 30), rng.randint(2, 20)
        stops = frozenset(reference_tokens(prompt_ids, 0, seed, max_tokens)[-1:] if rng.random() < 0.5 else ())
        choices = rng.choice([(0,), (0, 2)])
        spec = GenerationSpec(prompt_ids, choices, max_tokens, stops, SamplingParams(seed=seed))
        request = Request(f"r{number}", spec, 1e9)
        request.needs_known_tokens = number in needs
        requests.append(request)
        scheduler.submit(request, 0.0)
    texts: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    steps: defaultdict[str, list[int]] = defaultdict(list)
    while scheduler.ledger().num_queued or scheduler.ledger().num_active:
        turn = core.turn(0.0)
        if turn.plan is not None:
            for request_id in {row.request_id for row in turn.plan.rows}:
                steps[request_id].append(turn.plan.step_id)
            core.launched(runner.run(turn.plan))
        for output in core.due(turn):
            for event in core.commit(output, 0.0).tokens:
                texts[event.request_id, event.choice].append(event.token_id)
    for request in requests:
        spec = request.spec
        for choice in spec.choices:
            whole = reference_tokens(spec.prompt_ids, choice, spec.sampling.seed, spec.max_tokens)
            answer = until_stop(whole, spec.stop_token_ids)
            assert tuple(texts[request.request_id, choice]) == answer.token_ids
    return dict(texts), dict(steps)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_the_same_at_any_lag_and_nobody_else_is_disturbed(seed: int) -> None:
    needs = {1, 4, 5, 10}
    expected, _ = texts_of(0, set(), seed)
    for lag in (0, 1, 3):
        texts, steps = texts_of(lag, needs, seed)
        without, steps_without = texts_of(lag, set(), seed)
        assert texts == without == expected
        for number in range(12):
            request_id = f"r{number}"
            gaps = {later - step for step, later in pairwise(steps.get(request_id, []))}
            if number in needs:  # fewer where nobody else has rows: then no step goes by
                assert gaps <= set(range(1, lag + 2)), "a row as soon as all is known"
            else:
                assert steps.get(request_id) == steps_without.get(request_id), "the same steps as without them"
                assert gaps <= {1}


def run(workload: Workload) -> SimulatedSystem:
    system = SimulatedSystem(workload)
    system.run()
    statuses = system.statuses()
    assert statuses[Status.OPEN] == 0
    assert statuses[Status.FINISHED] > workload.num_requests // 4
    assert sum(client.request.needs_known_tokens for client in system.clients.values()) > workload.num_requests // 5
    return system


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(seed: int, lag: int) -> None:
    """All of test_random_workloads.py holds: the projection too, which knows how much longer they are there."""
    run(Workload(seed, lag, num_requests=120, local_share=0.5, faults=FAULTS, known_rate=0.4))


@pytest.mark.parametrize("lag", [1, 3])
def test_random_traffic_with_too_little_memory(lag: int) -> None:
    num_swapped = 0
    for seed in range(3):
        workload = Workload(
            seed, lag, num_requests=120, cancel_rate=0.1, admission=OPTIMISTIC, host_share=0.6, scarcity=2.0,
            known_rate=0.4, beam_rate=0.1,
        )  # fmt: skip
        num_swapped += run(workload).decode.scheduler.preemption.num_swapped
    assert num_swapped > 0
