"""The projection against playing every block table forward, at every step; and what admission makes of it."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.generated_token import FinishReason
from scheduler.length_estimator import LengthEstimator
from scheduler.memory_budget import blocks_for_generation
from scheduler.memory_projection import MemoryProjection, constant, unstarted
from scheduler.outcome import NeverFits
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.request import Request, RequestState
from tests.scheduler.brute_projection import check_projection
from tests.scheduler.short_requests import STOP, decode_scheduler, first_tokens, limits, make_request, running, step


class Traffic:
    """Requests that come, are loaded after a while, stop at random; some are cancelled. Checks every step."""

    def __init__(self, seed: int, num_requests: int, quantile: float | None) -> None:
        self.rng = rng = random.Random(seed)
        self.lag = rng.choice([0, 1, 3])
        self.max_overtakes = rng.choice([0, 2, 8])
        policy = AdmissionPolicy(quantile, rng.choice([0.0, 0.05]), self.max_overtakes, min_samples=8)
        size = limits(rng.randint(20, 60), rng.choice([1, 3, 4, 16]), rng.randint(4, 12), 64)
        self.scheduler = decode_scheduler(size, policy, self.lag, num_host_blocks=100)
        self.left = num_requests
        self.cost: dict[str, int] = {}  # of those that wait
        self.bound: dict[str, int] = {}  # what may be served of its priority before it
        self.served: Counter[int] = Counter()  # by priority
        self.served_before: dict[str, int] = {}
        self.overtaken: Counter[str] = Counter()
        self.admitted_at: dict[str, int] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.num_admitted = self.num_checked = 0

    def run(self) -> None:
        scheduler = self.scheduler
        while self.left or scheduler._requests:
            self._arrive()
            self._admit()
            check_projection(scheduler, self.admitted_at)
            self.num_checked += 1
            plan = scheduler.plan(0.0)
            if plan is not None:
                self.in_flight.append(plan)
            if scheduler.budget.estimator is None:
                assert scheduler.allocator.counts().request <= scheduler.budget.promised <= scheduler.limits.num_blocks
            while self.in_flight and (plan is None or len(self.in_flight) > self.lag):
                self._commit(self.in_flight.popleft())
            self._move_on()
        if scheduler.budget.estimator is None:
            assert scheduler.preemption.num_swapped == scheduler.num_stalls == 0, "memory ran short"

    def _arrive(self) -> None:
        rng = self.rng
        while self.left and len(self.scheduler._queue) < 15 and rng.random() < 0.5:
            self.left -= 1
            request = make_request(
                f"r{self.left}",
                rng.randint(1, 40),
                rng.choice([1, 2, rng.randint(1, 60)]),
                tuple(range(rng.choice([1, 1, 1, 2, 3]))),
                deadline_s=1e9,
                local_prefill=rng.random() < 0.4,
                client=rng.choice(["a", "a", "a", "b", f"c{self.left}"]),
                priority=rng.choice([0, 0, 0, 1]),
            )
            try:
                self.scheduler.submit(request, 0.0)
            except NeverFits:
                continue
            self._count_in(request)

    def _count_in(self, request: Request) -> None:
        """scheduler.waiting_queue's bound, with C and L at their most: 15 wait, and each costs at most 40 + 3 * 60."""
        waiting = [r for r in self.scheduler._queue.in_order() if r.spec.priority == request.spec.priority]
        self.cost[request.request_id] = self.scheduler._cost(request)
        own = sum(self.cost[r.request_id] for r in waiting if r.spec.client == request.spec.client)
        overtaking = self.max_overtakes * 220
        self.bound[request.request_id] = 15 * (own + overtaking + 220) + overtaking
        self.served_before[request.request_id] = self.served[request.spec.priority]

    def _admit(self) -> None:
        waiting = [request.request_id for request in self.scheduler._queue.in_order()]
        for request in self.scheduler.admit(0.0):
            index = waiting.index(request.request_id)
            self.overtaken.update(self._delayed(request, waiting[:index]))
            del waiting[index]
            served = self.served[request.spec.priority] - self.served_before[request.request_id]
            assert served < self.bound[request.request_id], "it starved"
            self.served[request.spec.priority] += self.cost.pop(request.request_id)
            self.admitted_at[request.request_id] = self.scheduler.builder.next_step_id
            self.num_admitted += 1
        assert all(self.overtaken[request_id] <= self.max_overtakes for request_id in waiting), "it starves"

    def _delayed(self, request: Request, passed: list[str]) -> list[str]:
        """Those of whom it is not sure that it is over before they could start: themselves, or another in front of them
        that is passed by nobody any more."""
        ends_at = self.scheduler.builder.next_step_id + request.spec.max_tokens - 1
        delayed, is_free = [], False
        for request_id in passed:
            starts_at = self.scheduler._requests[request_id].starts_at
            is_in_time = starts_at is not None and ends_at < starts_at
            if not is_in_time and not is_free:
                delayed.append(request_id)
            is_free = is_free or (is_in_time and self.overtaken[request_id] >= self.max_overtakes)
        return delayed

    def _move_on(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        for request in list(scheduler._requests.values()):
            if rng.random() < 0.01 and scheduler.end(request.request_id, RequestState.CANCELLED, 0.0):
                scheduler.transfer_ended(request.request_id)
                self.cost.pop(request.request_id, None)
            elif request.local_prefill or rng.random() < 0.6:
                continue
            elif request.state is RequestState.ADMITTED:
                scheduler.begin_load(request.request_id, 0.0)
            elif request.state is RequestState.LOADING:
                self._load(request)

    def _load(self, request: Request) -> None:
        if request.spec.max_tokens == 1:
            self.scheduler.end(request.request_id, RequestState.CANCELLED, 0.0)
            self.scheduler.transfer_ended(request.request_id)
        else:
            firsts = list(first_tokens(request))
            if len(firsts) > 1 and self.rng.random() < 0.3:
                firsts[0] = firsts[0]._replace(token_id=STOP, finish_reason=FinishReason.STOP)
            self.scheduler.kv_ready(request.request_id, firsts, 0.0)

    def _commit(self, plan: StepPlan) -> None:
        names = [(part.request_id, choice) for part in plan.slices for choice in part.sampled_choices]
        tokens = tuple(SampledToken(*name, STOP if self.rng.random() < 0.02 else 7) for name in names)
        self.scheduler.commit(StepOutput(plan.step_id, tokens), 0.0)


@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("seed", range(8))
def test_fast_equals_slow_at_every_step(seed: int, quantile: float | None) -> None:
    traffic = Traffic(seed, 150, quantile)
    traffic.run()
    assert traffic.num_checked > traffic.num_admitted > 50


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("seed", range(20))
def test_fast_equals_slow_over_ten_thousand_requests(seed: int, quantile: float | None) -> None:
    Traffic(1000 + seed, 10_000, quantile).run()


@pytest.mark.parametrize("seed", range(50))
def test_a_newcomer_peaks_at_what_was_promised_before(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 4, 16])
    prompt_len, max_tokens, num_choices = rng.randint(1, 50), rng.randint(1, 50), rng.randint(1, 5)
    profile = unstarted(prompt_len, num_choices, max_tokens - 1, rng.randint(0, 99), size)
    assert profile.peak(size) == blocks_for_generation(prompt_len, max_tokens, num_choices, size)


def test_a_newcomer_grows_into_what_others_release() -> None:
    scheduler = decode_scheduler(limits(num_blocks=11, max_sequences=2))
    running(scheduler, make_request("old", prompt_len=16, max_tokens=9, local_prefill=False))  # 4, at last 6 blocks
    scheduler.submit(make_request("new", prompt_len=8, max_tokens=21, local_prefill=False), 0.0)  # 2, at last 7
    (new,) = scheduler.admit(0.0)
    assert new.request_id == "new", "worst cases together are 13 blocks, but never at the same time"
    assert scheduler.budget.promised == 11 - 1


def test_the_watermark_stays_free_but_not_for_one_that_is_alone() -> None:
    policy = AdmissionPolicy(watermark_fraction=0.2)
    scheduler = decode_scheduler(limits(num_blocks=10), policy)
    scheduler.submit(make_request("whole", prompt_len=40, max_tokens=1), 0.0)
    assert len(scheduler.admit(0.0)) == 1
    scheduler.end("whole", RequestState.CANCELLED, 0.0)
    for name, prompt_len in (("a", 16), ("b", 20), ("c", 16)):
        scheduler.submit(make_request(name, prompt_len=prompt_len, max_tokens=1), 0.0)
    assert [request.request_id for request in scheduler.admit(0.0)] == ["a", "c"]
    assert scheduler.budget.available == 0


def test_nobody_is_overtaken_more_often_than_configured() -> None:
    scheduler = decode_scheduler(limits(num_blocks=10, max_sequences=4), AdmissionPolicy(max_overtakes=2))
    scheduler.submit(make_request("first", prompt_len=4, max_tokens=9), 0.0)  # it runs when "large" comes
    scheduler.submit(make_request("large", prompt_len=36, max_tokens=1), 0.0)
    order = []
    for number in range(8):
        scheduler.submit(make_request(f"small{number}", prompt_len=4, max_tokens=9), 0.0)
    while scheduler._requests:
        order += [request.request_id for request in scheduler.admit(0.0)]
        step(scheduler)
    assert order[:4] == ["first", "small0", "small1", "large"]


def test_a_budget_without_anybody() -> None:
    projection = MemoryProjection(4)
    assert projection.peak(5) == 0
    assert projection.fits(constant(3), 5, 3)
    assert not projection.fits(constant(4), 5, 3)


def test_the_quantile_is_one_of_what_is_longer_than_there_is_already() -> None:
    estimator = LengthEstimator(0.5, min_samples=10, window=100)
    for length in range(1, 10):
        estimator.observe(length)
    assert estimator.estimate(1) is None, "too few"
    estimator.observe(10)
    assert [estimator.estimate(n) for n in (0, 4, 8, 9)] == [5, 7, 9, 10]
    assert estimator.estimate(10) is None, "longer than any"
    for _ in range(100):
        estimator.observe(3)
    assert estimator.estimate(0) == 3
    assert estimator.estimate(3) is None, "the old ones are forgotten"
