"""Two lanes on the simulated clock: nothing is lost, and a stream waits for its own steps only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.file import load_config
from cluster.simulation.client import ClientStatus, Job
from cluster.simulation.cost_model import LaneShareCosts
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun
from cluster.simulation.system_shape import SystemShape, shape_of
from scheduler.lane_split import LaneObjectives, LaneShare, estimated_shares
from tests.simulation.small_system import COSTS, random_jobs, shape
from tests.simulation.test_simulated_system import QUANTILE

CONFIGS = Path(__file__).parents[2] / "configs"
HALF = LaneShare(66, 0.5, 0.5)
OBJECTIVES = LaneObjectives(ttft_s=0.4, token_gap_s=0.05)


def with_lanes(system: SystemShape, *shares: LaneShare) -> SystemShape:
    return replace(system, decode=replace(system.decode, lanes=OBJECTIVES, shares=shares))


SYSTEMS = {
    "lag 0": with_lanes(shape(0, 1), HALF),
    "lag 1": with_lanes(shape(0, 2, lag=1), HALF),
    "on a CPU": with_lanes(shape(0, 1)),
    "preempting": with_lanes(shape(0, 1, num_blocks=64, lag=1, admission=QUANTILE, num_host_blocks=64), HALF),
    "beside a prefill pool": with_lanes(shape(1, 1, lag=1), HALF),
}


def test_shares_are_those_of_the_step_file_or_estimates() -> None:
    config = load_config(CONFIGS / "gpu-one-card.yaml")
    measured = [LaneShareCosts(processors=90, prefill_rate=0.6, decode_rate=0.55)]
    with_them = shape_of(config, 131_072, kv_tokens=(0, 65_536), lane_shares=measured)
    assert with_them.decode.shares == (LaneShare(90, 0.6, 0.55),)
    assert shape_of(config, 131_072, kv_tokens=(0, 65_536)).decode.shares == estimated_shares(132)
    on_a_cpu = load_config(CONFIGS / "colocated.yaml", {"layout": "two_lanes"})
    assert shape_of(on_a_cpu, 46_080, lane_shares=measured).decode.shares == ()


def run(system: SystemShape, jobs: list[Job]) -> tuple[SimulatedSystem, SystemRun]:
    simulated = SimulatedSystem(system, COSTS)
    return simulated, simulated.run(jobs)


@pytest.mark.parametrize("name", SYSTEMS)
def test_conservation(name: str) -> None:
    jobs = random_jobs(3, 150, rate_per_s=12.0, max_tokens=150 if name == "preempting" else None)
    system, done = run(SYSTEMS[name], jobs)
    assert [client.status for client in done.clients] == [ClientStatus.FINISHED] * len(jobs)
    assert all(client.num_tokens == client.job.output_len for client in done.clients)
    for engine in [*system.decodes.values(), *system.prefills.values()]:
        ledger = engine.scheduler.ledger()
        assert ledger.blocks.free == ledger.blocks.total, "blocks are left"
        assert ledger.is_idle
    if name == "preempting":
        assert system.decodes["decode-0000"].scheduler.preemption.num_swapped > 0


def test_a_request_alone_has_the_whole_card() -> None:
    _, lanes = run(with_lanes(shape(0, 1), HALF), [Job(0, 0.0, 300, 3, 3)])
    _, one = run(shape(0, 1), [Job(0, 0.0, 300, 3, 3)])
    assert lanes.clients[0].first_s == one.clients[0].first_s
    assert lanes.clients[0].last_s == pytest.approx(one.clients[0].last_s, abs=1e-12)


def test_another_rule_divides_the_card() -> None:
    """One that gives prompts whichever share is named last, where the shipped one gives them the most."""
    quick, slow = LaneShare(100, 0.9, 0.3), LaneShare(32, 0.3, 0.9)
    system = with_lanes(shape(0, 1), quick, slow)
    other = replace(system, decode=replace(system.decode, chooser=lambda load, objectives, shares: shares[-1]))
    jobs = [Job(0, 0.0, 16, 60, 60), Job(1, 0.2, 250, 1, 1)]
    first_s = [run(divided, jobs)[1].clients[1].ttft_s for divided in (system, other)]
    prompt_s = COSTS.decode.step_s(0, 0, 250, 250 * 251 // 2)
    assert first_s[0] == pytest.approx(prompt_s / 0.9, rel=0.2)
    assert first_s[1] == pytest.approx(prompt_s / 0.3, rel=0.2)


def test_a_stream_waits_for_no_prompt_and_is_slowed_down_by_it() -> None:
    """A long prompt comes while one request decodes: its gaps are two steps' at most, not the prompt's."""
    jobs = [Job(0, 0.0, 16, 60, 60), Job(1, 0.2, 250, 1, 1)]
    _, lanes = run(with_lanes(shape(0, 1), HALF), jobs)
    _, one = run(shape(0, 1), jobs)
    prompt_s = COSTS.decode.step_s(0, 0, 250, 250 * 251 // 2)
    step_s = COSTS.decode.step_s(1, 76)
    assert one.gaps.percentile(100) > prompt_s
    assert lanes.gaps.percentile(100) == pytest.approx(2 * step_s, rel=0.1)
    assert lanes.clients[1].ttft_s == pytest.approx(2 * prompt_s, rel=0.2)
    assert lanes.clients[0].last_s < one.clients[0].last_s + prompt_s
