"""The simulator: figures by hand, conservation, determinism, and that its shortcut changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cluster.simulation.client import Client, ClientStatus, Job
from cluster.simulation.event_queue import EventQueue, Order
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun
from cluster.simulation.system_shape import SystemShape
from scheduler.admission import AdmissionPolicy
from scheduler.step_shape import prompt_pairs
from tests.simulation.small_system import COSTS, impatient, random_jobs, shape

QUANTILE = AdmissionPolicy(quantile=0.3, watermark_fraction=0.0, min_samples=8)
SYSTEMS: dict[str, SystemShape] = {
    "one pair": shape(),
    "one pair, lag 1": shape(lag=1),
    "two and three, lag 1": shape(2, 3, lag=1),
    "three routers": shape(2, 2, num_routers=3),
    "colocated": shape(0, 2),
    "colocated, lag 1": shape(0, 1, lag=1),
    "tiny pool": shape(num_blocks=48),
    "few slots": shape(max_sequences=3, lag=1),
    "preempting": shape(num_blocks=64, admission=QUANTILE, num_host_blocks=64),
    "preempting, lag 1": shape(1, 2, num_blocks=64, lag=1, admission=QUANTILE, num_host_blocks=64),
    "evicting": shape(num_blocks=64, admission=QUANTILE, num_host_blocks=4),
    "impatient": impatient(shape(num_blocks=48), queue_s=1.0, request_s=3.0),
}


def run(system: SystemShape, jobs: list[Job], may_skip: bool = True) -> tuple[SimulatedSystem, SystemRun]:
    simulated = SimulatedSystem(system, COSTS, may_skip=may_skip)
    return simulated, simulated.run(jobs, sample_interval_s=0.37)


def fate(client: Client) -> tuple[Any, ...]:
    return client.status, client.first_s, client.last_s, client.num_tokens, client.num_attempts


def jobs_for(name: str, seed: int) -> list[Job]:
    return random_jobs(seed, 150, rate_per_s=12.0, max_tokens=150 if "ing" in name else None)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("seed", [1])
def test_the_shortcut_changes_nothing(name: str, seed: int) -> None:
    jobs = jobs_for(name, seed)
    system, quick = run(SYSTEMS[name], jobs)
    other, slow = run(SYSTEMS[name], jobs, may_skip=False)
    assert [fate(client) for client in quick.clients] == [fate(client) for client in slow.clients]
    assert quick.gaps == slow.gaps
    assert quick.samples == slow.samples
    for ours, theirs in zip(system.decodes.values(), other.decodes.values(), strict=True):
        assert ours.counts.num_steps == theirs.counts.num_steps
        assert ours.counts.num_rows == theirs.counts.num_rows
        assert ours.counts.busy_s == pytest.approx(theirs.counts.busy_s)
        assert theirs.counts.num_skipped_steps == 0
    assert sum(decode.counts.num_skipped_steps for decode in system.decodes.values()) > 0


@pytest.mark.parametrize("name", SYSTEMS)
def test_conservation(name: str) -> None:
    jobs = jobs_for(name, 3)
    system, done = run(SYSTEMS[name], jobs)
    statuses = Counter(client.status for client in done.clients)
    assert statuses[ClientStatus.WAITING] == 0
    assert statuses.total() == len(jobs)
    if name != "impatient":
        assert statuses == {ClientStatus.FINISHED: len(jobs)}
    for client in done.clients:
        if client.status is ClientStatus.FINISHED:
            assert client.num_tokens == client.job.output_len
            assert client.job.arrival_s < client.first_s <= client.last_s
    if statuses[ClientStatus.FINISHED] == len(jobs):
        assert len(done.gaps) == sum(job.output_len - 1 for job in jobs)
    for engine in [*system.decodes.values(), *system.prefills.values()]:
        ledger = engine.scheduler.ledger()
        assert ledger.blocks.free == ledger.blocks.total, "blocks are left"
        assert (ledger.num_queued, ledger.num_active, ledger.num_leased, ledger.used_slots) == (0, 0, 0, 0)
        engine.scheduler.allocator.check_integrity()
    for router in system.routers:
        assert router.view.num_waiting == 0


def test_what_each_system_is_there_for() -> None:
    """Or the tests above would prove less than they seem to."""
    preempting, _ = run(SYSTEMS["preempting"], jobs_for("preempting", 3))
    assert preempting.decodes["decode-0000"].scheduler.preemption.num_swapped > 0
    evicting, done = run(SYSTEMS["evicting"], jobs_for("evicting", 3))
    assert evicting.decodes["decode-0000"].scheduler.preemption.num_evicted > 0
    assert max(client.num_attempts for client in done.clients) > 1
    _, done = run(SYSTEMS["impatient"], random_jobs(3, 150, rate_per_s=12.0))
    assert len({client.status for client in done.clients}) > 2
    tiny, _ = run(SYSTEMS["tiny pool"], jobs_for("tiny pool", 3))
    assert tiny.routers[0].counts.num_waited > 0


def test_determinism() -> None:
    jobs = jobs_for("preempting, lag 1", 5)
    _, first = run(SYSTEMS["preempting, lag 1"], jobs)
    _, second = run(SYSTEMS["preempting, lag 1"], jobs)
    assert [fate(client) for client in first.clients] == [fate(client) for client in second.clients]
    assert first.samples == second.samples


def test_never_over_the_pool() -> None:
    _, done = run(SYSTEMS["preempting"], jobs_for("preempting", 4))
    assert max(sample.decode_max for sample in done.samples) > 0.8
    assert all(0 <= sample.decode_max <= 1 for sample in done.samples)


def test_one_request_by_hand() -> None:
    """A prompt of 100 tokens, 5 tokens: each latency is a sum of its parts, exactly."""
    _, done = run(shape(), [Job(0, 0.0, 100, 5, 5)])
    (client,) = done.clients
    control, transfer = COSTS.control, COSTS.transfer
    prefill_s = COSTS.prefill.base_s + 100 * COSTS.prefill.prompt_token_s + 5050 * COSTS.prefill.prompt_pair_s
    # To decode and back for admission, to prefill and back with the token, to the client.
    called_s = control.ingress_s + control.call_s + control.frame_s + control.call_s
    assert client.first_s == called_s + prefill_s + control.call_s + control.stream_s
    # The handoff leaves with the answer; then four rows at positions 100 to 103.
    ready_s = called_s + prefill_s + transfer.notify_s + transfer.latency_s + 100 * 1024 / transfer.bytes_per_s
    steps_s = sum(COSTS.decode.step_s(1, 100 + row) for row in (1, 2, 3, 4))
    assert client.last_s == ready_s + steps_s + control.frame_s + control.stream_s
    assert client.tpot_s == (client.last_s - client.first_s) / 4


def test_a_prompt_of_several_chunks_is_read_while_it_is_computed() -> None:
    """600 tokens in chunks of 256, 256 and 88: only the last one's KV is read after the first token, where reads are
    quicker than steps; else whatever the link has not managed by then."""
    for bytes_per_s, is_quick in ((2.0**30, True), (2.0**20, False)):
        transfer = COSTS.transfer.model_copy(update={"bytes_per_s": bytes_per_s})
        costs = COSTS.model_copy(update={"transfer": transfer})
        (client,) = SimulatedSystem(shape(), costs).run([Job(0, 0.0, 600, 2, 2)]).clients
        control, read_s = costs.control, costs.read_s
        chunks_s = [
            costs.prefill.step_s(0, 0, size, prompt_pairs(start, size))
            for start, size in ((0, 256), (256, 256), (512, 88))
        ]
        called_s = control.ingress_s + 2 * control.call_s + control.frame_s
        overhead_s = costs.prefill.overhead_s
        told_s = [called_s + sum(chunks_s[: n + 1]) + n * overhead_s + transfer.notify_s for n in range(3)]
        if is_quick:
            assert told_s[0] + read_s(256) < told_s[1]
            ready_s = told_s[2] + read_s(88)
        else:  # the first chunk is still being read when the prompt is done; then all the rest at once
            assert told_s[0] + read_s(256) > told_s[2]
            ready_s = told_s[0] + read_s(256) + read_s(600 - 256)
        last_s = ready_s + costs.decode.step_s(1, 601) + control.frame_s + control.stream_s
        assert client.last_s == pytest.approx(last_s, abs=1e-12)


def test_one_colocated_request_by_hand() -> None:
    """300 tokens in two chunks of at most 256, then two rows."""
    _, done = run(shape(0, 1), [Job(0, 0.0, 300, 3, 3)])
    (client,) = done.clients
    decode, control = COSTS.decode, COSTS.control
    prompt_s = decode.step_s(0, 0, 256, prompt_pairs(0, 256)) + decode.step_s(0, 0, 44, prompt_pairs(256, 44))
    first_s = control.ingress_s + control.call_s + prompt_s + control.frame_s + control.stream_s
    assert client.first_s == first_s
    assert client.last_s == pytest.approx(first_s + decode.step_s(1, 301) + decode.step_s(1, 302), abs=1e-12)


def test_slowed_down_by_the_other_pool() -> None:
    """A prompt that comes while another request decodes takes `contention` times as long."""
    jobs = [Job(0, 0.0, 16, 100, 100), Job(1, 0.2, 200, 1, 1)]
    ttfts_s = []
    for contention in (1.0, 2.0):
        prefill = COSTS.prefill.model_copy(update={"contention": contention})
        costs = COSTS.model_copy(update={"prefill": prefill})
        ttfts_s.append(SimulatedSystem(shape(), costs).run(jobs).clients[1].ttft_s)
    alone_s = COSTS.prefill.step_s(0, 0, 200, prompt_pairs(0, 200))
    # Admission waits for the decode step under way, so only the prompt's own step can be told exactly.
    assert ttfts_s[1] - ttfts_s[0] >= 0.5 * alone_s


def test_prompt_pairs() -> None:
    assert prompt_pairs(3, 4) == sum(position + 1 for position in range(3, 7))


def test_the_clock_never_goes_back() -> None:
    queue, seen = EventQueue(), []
    queue.at(2.0, Order.WAKE, 0, seen.append)
    queue.at(1.0, Order.MESSAGE, 0, lambda now_s: queue.at(1.5, Order.MESSAGE, 0, seen.append))
    queue.run()
    assert seen == [1.5, 2.0]
    with pytest.raises(ValueError):
        queue.at(1.9, Order.MESSAGE, 0, seen.append)


def test_order_of_one_instant() -> None:
    queue, seen = EventQueue(), []
    for order, key in ((Order.SAMPLE, 0), (Order.WAKE, 1), (Order.MESSAGE, 9), (Order.WAKE, 0), (Order.MESSAGE, 2)):
        queue.at(1.0, order, key, lambda _, name=(order, key): seen.append(name))  # type: ignore[misc]
    queue.run()
    assert seen == sorted(seen)
