"""Drafts on the simulated clock: nothing is lost, and time is what the choices make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.config.root import Config
from cluster.simulation.client import ClientStatus, Job
from cluster.simulation.draft_shape import DraftShape
from cluster.simulation.shared_machine import SharedMachine
from cluster.simulation.simulated_device import SimulatedDevice
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun
from cluster.simulation.step_model import StepModel
from cluster.simulation.system_shape import SystemShape, shape_of
from scheduler.lane_split import LaneObjectives, LaneShare
from scheduler.plan import Slice, StepPlan
from scheduler.step_shape import StepShape
from tests.simulation.small_system import COSTS, random_jobs, shape

# Steps that take hardly longer with more rows: drafts pay as soon as some hold.
FLAT = COSTS.model_copy(update={"decode": StepModel(base_s=2**-7, row_s=2**-14, prompt_token_s=2**-14)})
STEEP = COSTS.model_copy(update={"decode": StepModel(base_s=2**-20, row_s=2**-7, prompt_token_s=2**-14)})


def drafting(system: SystemShape, *, is_padded: bool = True, max_rows: int | None = None) -> SystemShape:
    return replace(system, decode=replace(system.decode, drafts=DraftShape(7, max_rows, is_padded)))


def with_lanes(system: SystemShape) -> SystemShape:
    half = LaneShare(64, 0.5, 0.5)
    return replace(system, decode=replace(system.decode, lanes=LaneObjectives(), shares=(half,)))


SYSTEMS = {
    "colocated": drafting(shape(0, 1)),
    "lag 1, two routers": drafting(shape(0, 2, lag=1, num_routers=2)),
    "split": drafting(shape(2, 2, lag=1), is_padded=False),
    "little memory": drafting(shape(0, 1, num_blocks=48, lag=1)),
    "two lanes": drafting(with_lanes(shape(0, 1, lag=1))),
}


def run(system: SystemShape, jobs: list[Job], costs: object = FLAT) -> tuple[SimulatedSystem, SystemRun]:
    simulated = SimulatedSystem(system, costs)  # type: ignore[arg-type]
    return simulated, simulated.run(jobs)


def accepted(jobs: list[Job], first: float, further: float) -> list[Job]:
    return [replace(job, acceptance=(first, further)) for job in jobs]


def counts(system: SimulatedSystem) -> tuple[int, int]:
    """Drafts that there were, and that held."""
    planners = [engine.scheduler.drafts for engine in system.decodes.values()]
    found = [planner.counts for planner in planners if planner is not None]
    return sum(sum(of.drafted) for of in found), sum(sum(of.accepted) for of in found)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("acceptance", [(0.0, 0.0), (0.6, 0.8), (1.0, 1.0)])
def test_answers_are_as_long_as_without(name: str, acceptance: tuple[float, float]) -> None:
    """Those that stop before max_tokens, too; and all memory comes back."""
    jobs = accepted(random_jobs(3, 60, 20.0), *acceptance) + [
        Job(60 + i, 100.0 + i, 40, 30 + i, 100, acceptance=acceptance) for i in range(6)
    ]
    system, done = run(SYSTEMS[name], jobs)
    assert [client.status for client in done.clients] == [ClientStatus.FINISHED] * len(jobs)
    assert [client.num_tokens for client in done.clients] == [job.output_len for job in jobs]
    assert all(engine.is_idle for engine in system.decodes.values())
    num_drafted, num_held = counts(system)
    assert num_drafted > 0
    assert (num_held > 0) == (acceptance != (0.0, 0.0))


def test_the_same_seed_is_the_same_run() -> None:
    jobs = accepted(random_jobs(3, 40, 20.0), 0.6, 0.8)
    first, second = (run(SYSTEMS["split"], jobs)[1] for _ in range(2))
    assert [client.last_s for client in first.clients] == [client.last_s for client in second.clients]


def mean_tpot_s(system: SystemShape, jobs: list[Job], costs: object = FLAT) -> float:
    times = [client.tpot_s for client in run(system, jobs, costs)[1].clients]
    return sum(time or 0.0 for time in times) / len(times)


def together(count: int, acceptance: tuple[float, float]) -> list[Job]:
    return [Job(i, 0.0, 16, 256, 256, acceptance=acceptance) for i in range(count)]


def test_time_per_token_is_what_the_choices_make_of_it() -> None:
    plain, drafts = shape(0, 1, lag=1), drafting(shape(0, 1, lag=1))
    for count in (1, 8):
        jobs = together(count, (1.0, 1.0))
        assert mean_tpot_s(drafts, jobs) < 0.25 * mean_tpot_s(plain, jobs), "eight tokens a step"
        jobs = together(count, (0.0, 0.0))
        assert mean_tpot_s(drafts, jobs) < 1.01 * mean_tpot_s(plain, jobs)
    jobs = together(8, (0.5, 0.5))
    assert mean_tpot_s(drafts, jobs, STEEP) < 1.05 * mean_tpot_s(plain, jobs, STEEP), (
        "where a draft is dear there is none"
    )


def test_more_rows_than_may_draft() -> None:
    system, _ = run(drafting(shape(0, 1, lag=1), max_rows=3), together(4, (1.0, 1.0))[:4])
    with_few, _ = run(drafting(shape(0, 1, lag=1), max_rows=4), together(4, (1.0, 1.0))[:4])
    assert counts(system)[0] < counts(with_few)[0] / 4  # only when one had ended


# -- what a step costs -------------------------------------------------------------------------------------------------


def plan_of(*num_drafts: int) -> StepPlan:
    rows = tuple(
        Slice(f"r{i}", 0, i, 100, 1 + count, 1 + count, num_drafts=count) for i, count in enumerate(num_drafts)
    )
    return StepPlan(0, (), (), (), rows, has_drafts=any(num_drafts))


def test_drafts_are_tokens_of_their_rows() -> None:
    assert StepShape.of(plan_of(0, 0)) == StepShape(2, 202)
    assert StepShape.of(plan_of(4, 0)) == StepShape(6, 206)


def test_what_makes_drafts_takes_its_time() -> None:
    steps = StepModel(base_s=1.0, row_s=0.125, drafting_s=0.5)
    device = SimulatedDevice("decode", 0, steps, COSTS, SharedMachine(), 16, DraftShape(7, None, True))
    assert device.launch(plan_of(4, 0), 0.0, True).end_s == 1.0 + 0.5 + 0.125 * 6
    assert device.counts.num_rows == 2
    assert device.launch(plan_of(0, 0), 10.0, True).end_s == 10.0 + 1.25


def test_of_a_config() -> None:
    pool = {"kv_capacity_tokens": 4096}
    values = {"layout": "colocated", "pools": {"decode": pool}}
    assert shape_of(Config.model_validate(values), 1024).decode.drafts is None
    forced = {**values, "speculative": {"method": "grammar"}}
    assert shape_of(Config.model_validate(forced), 1024).decode.drafts is None, "simulated requests have no grammars"
    ngram = {**values, "speculative": {"method": "ngram", "max_drafts": 4}}
    assert shape_of(Config.model_validate(ngram), 1024).decode.drafts == DraftShape(4, None, False)
    on_card = {**ngram, "pools": {"decode": {**pool, "device": "cuda", "num_gpus": 1}}}
    assert shape_of(Config.model_validate(on_card), 1024).decode.drafts == DraftShape(4, 64, True)
