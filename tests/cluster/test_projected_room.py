"""What a load report says of the room to come, against what the replica's own admission decides."""

from __future__ import annotations

import random

import pytest

from cluster.policies.routing_policy import DecodeCandidate, Need
from scheduler.admission import AdmissionPolicy
from scheduler.request import RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import decode_scheduler, limits, make_request, step


def candidate_of(scheduler: Scheduler, with_projection: bool = True) -> DecodeCandidate:
    """As PoolView makes one of a frame."""
    return DecodeCandidate(
        replica_id="d",
        total_blocks=scheduler.limits.num_blocks,
        free_blocks=scheduler.free_blocks(),
        num_in_flight=0,
        num_queued=scheduler.num_queued,
        later_free_blocks=scheduler.later_free_blocks() if with_projection else (),
        expected_tokens=scheduler.expected_tokens or 0,
    )


@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_who_need_not_wait_is_admitted_and_the_projection_sends_more_of_them(watermark: float) -> None:
    """Outputs as long as they may be: never a promise that is not kept, seldom a wait that need not be."""
    rng = random.Random(3)
    size, num_refused, num_too_careful, num_without = 4, 0, 0, 0
    scheduler = decode_scheduler(limits(150, size, 64, 128), AdmissionPolicy(watermark_fraction=watermark))
    for number in range(2500):
        prompt_len, max_tokens, n = rng.randint(1, 60), rng.choice([2, rng.randint(2, 150)]), rng.choice([1, 1, 2])
        request = make_request(f"r{number}", prompt_len, max_tokens, tuple(range(n)), deadline_s=1e9)
        need = Need(prompt_len, max_tokens, n, size)
        if need.decode_blocks > scheduler.limits.num_blocks:
            continue
        must_wait = candidate_of(scheduler).must_wait(need)
        must_wait_without = candidate_of(scheduler, with_projection=False).must_wait(need)
        scheduler.submit(request, 0.0)
        is_admitted = bool(scheduler.admit(0.0))
        assert is_admitted or must_wait, f"{need} was promised room"
        num_refused += not is_admitted
        num_too_careful += is_admitted and must_wait
        num_without += is_admitted and must_wait_without
        if not is_admitted:
            scheduler.end(request.request_id, RequestState.CANCELLED, 0.0)
        for _ in range(rng.choice([0, 1, 5])):
            if scheduler.num_running:
                step(scheduler)
    assert num_refused > 100
    assert num_too_careful < num_without


def test_an_expected_length_counts_for_all_of_max_tokens() -> None:
    scheduler = decode_scheduler(limits(10), AdmissionPolicy(quantile=0.5, min_samples=1))
    need = Need(prompt_tokens=4, max_tokens=32, num_choices=1, block_size=4)
    assert scheduler.expected_tokens is None
    scheduler.submit(make_request("running", 4, 5), 0.0)
    scheduler.admit(0.0)
    assert candidate_of(scheduler).must_wait(need)
    for _ in range(20):
        scheduler.budget.choice_ended(6)
    assert scheduler.expected_tokens == 6
    assert not candidate_of(scheduler).must_wait(need)
    assert candidate_of(scheduler).projected_blocks(need) == 3


def test_nobody_has_room_while_somebody_waits_to_come_back() -> None:
    scheduler = decode_scheduler(limits(6, max_sequences=8), AdmissionPolicy(quantile=0.5, min_samples=1), 0, 20)
    for _ in range(50):
        scheduler.budget.choice_ended(2)
    for name in "ab":
        scheduler.submit(make_request(name, 8, 17), 0.0)
    assert len(scheduler.admit(0.0)) == 2
    for _ in range(7):
        step(scheduler)
    assert len(scheduler.preemption) == 1
    assert scheduler.free_blocks() == 0
    assert set(scheduler.later_free_blocks()) == {0}
