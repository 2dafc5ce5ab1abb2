"""Prefix caches in the simulator: what its engines find is what a reference finds, and what routers do with it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.simulation.lru_reference import LruReference
from cluster.load.traces import TraceEntry
from cluster.simulation.client import ClientStatus, Job, prompt_ids_of
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.trace_jobs import TraceScale, trace_jobs
from tests.simulation.small_system import COSTS, shape

BLOCK = 16
PIECE = 256


def sharing_jobs(seed: int, count: int, gap_s: float, num_trees: int = 4) -> list[Job]:
    """Prompts that are paths in trees of blocks of 256 tokens: whole pieces, and one token more."""
    rng = random.Random(seed)
    jobs = []
    for index in range(count):
        path = [rng.randrange(num_trees)]
        for _ in range(rng.randrange(3)):
            path.append(1_000 * path[-1] + 1 + rng.randrange(2))
        jobs.append(Job(index, gap_s * index, PIECE * len(path) + 1, 4, 4, tuple(path), PIECE))
    return jobs


def test_ids_agree_as_far_as_hash_ids_do() -> None:
    a, b = prompt_ids_of((7, 8, 9), 4, 10), prompt_ids_of((7, 8, 10), 4, 10)
    assert a[:8] == b[:8]
    assert a[8] != b[8]
    assert len(a) == 10
    assert len(prompt_ids_of((7,), 4, 6)) == 6, "a last block that rounding has made longer"
    # Without hash ids nothing is shared.
    assert not set(Job(0, 0.0, 5, 1, 1).prompt_ids()) & set(Job(1, 0.0, 5, 1, 1).prompt_ids())


def test_copies_share_with_copies_and_lengths_scale_with_blocks() -> None:
    entries = [TraceEntry(float(index), 2_048, 5, (1, 2, 3, 4)) for index in range(3)]
    jobs = trace_jobs(entries, TraceScale(rate=2.0, length=1 / 16), 10_000)
    assert len(jobs) == 6
    assert {(job.prompt_len, job.block_tokens) for job in jobs} == {(128, 32)}
    assert len({job.prompt_ids() for job in jobs}) == 2


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("num_blocks", [64, 128, 1_000])
def test_one_after_another_it_finds_what_the_reference_does(num_prefill: int, num_blocks: int) -> None:
    jobs = sharing_jobs(1, 60, gap_s=50.0)
    of = shape(num_prefill, 1, num_blocks)
    # What decode has most of it would compute itself.
    of = replace(of, has_prefix_cache=True, rules=replace(of.rules, local_by_cost=False))
    clients = SimulatedSystem(of, COSTS).run(jobs).clients
    assert {client.status for client in clients} == {ClientStatus.FINISHED}
    reference = LruReference(num_blocks)
    names: dict[tuple[tuple[int, ...], int], int] = {}
    expected = []
    for job in jobs:
        num_blocks_of = job.prompt_len // BLOCK
        ends = [(index + 1) * BLOCK for index in range(num_blocks_of)]
        path = [names.setdefault((job.hash_ids[: -(-end // PIECE)], end), len(names)) for end in ends]
        expected.append(reference.take(path) * BLOCK)
    attempts = [client.attempt for client in clients]
    found = [(of.prefill_found if num_prefill else of.decode_found) for of in attempts if of is not None]
    if num_blocks == 1_000:
        assert found == expected
    # A prompt's last block has no name, and takes the place of one that has: where memory is short that costs hits.
    assert 0 < sum(found) <= sum(expected)
    assert sum(expected) - sum(found) < 0.02 * sum(job.prompt_len for job in jobs)


def test_steady_steps_taken_at_once_change_nothing() -> None:
    of = replace(shape(2, 2, 256, lag=1, num_routers=3), has_prefix_cache=True)
    jobs = sharing_jobs(2, 120, gap_s=0.05)
    runs = [SimulatedSystem(of, COSTS, may_skip=may_skip).run(jobs).clients for may_skip in (True, False)]
    first, second = ([(c.first_s, c.last_s, c.num_tokens) for c in clients] for clients in runs)
    assert first == second


def test_with_caches_first_tokens_come_sooner_and_the_index_is_right() -> None:
    jobs = sharing_jobs(3, 200, gap_s=0.04)
    means = []
    for has_prefix_cache in (False, True):
        system = SimulatedSystem(replace(shape(2, 2, 1_000), has_prefix_cache=has_prefix_cache), COSTS)
        clients = system.run(jobs).clients
        means.append(sum(client.ttft_s for client in clients) / len(clients))
    assert means[1] < 0.7 * means[0]
    (router,) = system.routers
    found, expected = router.counts.found_tokens, router.counts.expected_tokens
    for pool in ("prefill", "decode"):
        assert found[pool] > 0.5 * sum(job.prompt_len for job in jobs)
        assert abs(found[pool] - expected[pool]) < 0.1 * found[pool]
    # Nothing of it is left open.
    assert all(engine.is_idle for engine in (*system.decodes.values(), *system.prefills.values()))


def test_several_routers_find_nearly_as_much_as_one() -> None:
    jobs = sharing_jobs(4, 300, gap_s=0.1, num_trees=24)
    shares = []
    for num_routers in (1, 4):
        of = replace(shape(4, 2, 160, num_routers=num_routers), has_prefix_cache=True)
        system = SimulatedSystem(of, COSTS)
        system.run(jobs)
        found = sum(router.counts.found_tokens["prefill"] for router in system.routers)
        shares.append(found / sum(job.prompt_len for job in jobs))
    assert shares[0] > 0.2
    assert shares[1] > shares[0] - 0.1


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_host_memory_finds_what_has_gone(num_prefill: int) -> None:
    jobs = sharing_jobs(1, 60, gap_s=50.0)
    of = shape(num_prefill, 1, 128)
    of = replace(of, has_prefix_cache=True, rules=replace(of.rules, local_by_cost=False))
    found = []
    for num_host_blocks in (0, 1_000):
        of = replace(of, num_host_blocks=num_host_blocks, num_prefill_host_blocks=num_host_blocks)
        runs = [SimulatedSystem(of, COSTS, may_skip=may_skip).run(jobs).clients for may_skip in (True, False)]
        attempts = [[client.attempt for client in clients] for clients in runs]
        counts = [[(a.prefill_found, a.decode_found) for a in ones if a is not None] for ones in attempts]
        assert counts[0] == counts[1], "steady steps taken at once change nothing"
        found.append(sum(one[0 if num_prefill else 1] for one in counts[0]))
    assert found[1] > 1.2 * found[0] > 0
