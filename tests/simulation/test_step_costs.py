"""What a step takes beside rows and tokens: weights that prompts hide, chunks behind earlier ones, digests of KV."""

from __future__ import annotations

import random

import pytest

from cluster.simulation.client import Job
from cluster.simulation.cost_model import CostModel
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun
from cluster.simulation.step_fit import fit_steps
from cluster.simulation.step_model import StepModel
from replicas.engine.step_record import StepRecord
from scheduler.plan import Slice, StepPlan
from scheduler.step_shape import StepShape
from tests.simulation.small_system import COSTS, random_jobs, shape

DIGESTING: CostModel = COSTS.model_copy(
    update={"transfer": COSTS.transfer.model_copy(update={"digest_bytes_per_s": 2.0**24})}
)


def run(costs: CostModel, jobs: list[Job], may_skip: bool = True, lag: int = 1) -> SystemRun:
    return SimulatedSystem(shape(lag=lag), costs, may_skip=may_skip).run(jobs)


def test_pairs_with_earlier_chunks_are_told_apart() -> None:
    chunks = Slice.of_prompt("a", 0, 4, (1, 2, 3)), Slice.of_prompt("b", 1, 0, (1, 2))
    assert StepShape.of(StepPlan(0, (), (), (), chunks)) == StepShape(0, 0, 5, 5 + 6 + 7 + 1 + 2, 3 * 4)


def test_earlier_pairs_cost_as_all_do_unless_said_otherwise() -> None:
    alike = StepModel(base_s=0.004, prompt_token_s=2e-5, prompt_pair_s=1e-9)
    dearer = alike.model_copy(update={"earlier_pair_s": 3e-9})
    chunk = StepShape(0, 0, 2048, 6_000_000, 4_000_000)
    assert alike.step_s(*chunk) == pytest.approx(0.004 + 2048 * 2e-5 + 6e-3)
    assert dearer.step_s(*chunk) == pytest.approx(alike.step_s(*chunk) + 8e-3)
    assert dearer.slower(2.0).step_s(*chunk) == pytest.approx(2 * dearer.step_s(*chunk))
    assert alike.slower(2.0).step_s(*chunk) == pytest.approx(2 * alike.step_s(*chunk))


def test_a_prompt_hides_the_reading_of_weights_as_far_as_it_reaches() -> None:
    steps = StepModel(base_s=0.004, row_s=1e-5, prompt_token_s=2e-5, hidden_s=0.003)
    assert steps.step_s(8, 0) == pytest.approx(0.004 + 8e-5)
    assert steps.step_s(0, 0, 50) == pytest.approx(0.004)
    assert steps.step_s(8, 0, 150) == pytest.approx(0.004 + 8e-5)
    assert steps.step_s(8, 0, 500) == pytest.approx(0.001 + 8e-5 + 0.01)


def test_what_is_read_less_of_rounded_weights_can_be_hidden_less() -> None:
    steps = StepModel(base_s=0.004, prompt_token_s=2e-5, hidden_s=0.003)
    weights = {"num_linear": 1_000_000, "dtype": "bfloat16", "bytes_per_s": 1e9}  # 1 ms for a byte of each
    costs = CostModel.model_validate(
        {"source": "made up", "kv_bytes_per_token": 1, "decode": steps, "prefill": steps, "weights": weights}
    ).with_weights("fp8")
    assert costs.decode.step_s(1, 0) == pytest.approx(0.003, abs=1e-5)
    assert costs.decode.step_s(0, 0, 500) == pytest.approx(steps.step_s(0, 0, 500), abs=1e-5)


def test_the_fit_finds_what_chunks_behind_others_cost() -> None:
    model = StepModel(base_s=0.02, prompt_token_s=4e-4, prompt_pair_s=1e-7, earlier_pair_s=5e-7)
    rng, shapes = random.Random(1), []
    for _ in range(100):
        length, start = rng.randint(1, 200), rng.choice([0, rng.randint(0, 500)])
        own = length * (length + 1) // 2
        shapes.append(StepShape(0, 0, length, own + length * start, length * start))
    fit = fit_steps([StepRecord(0.0, model.step_s(*of), of) for of in shapes], [1.0] * len(shapes))
    assert fit.model.earlier_pair_s == pytest.approx(5e-7, rel=1e-3)
    assert fit.model.prompt_pair_s == pytest.approx(1e-7, rel=1e-3)


@pytest.mark.parametrize("lag", [0, 1])
def test_digests_take_time_at_both_ends(lag: int) -> None:
    """A prompt of 256 tokens: 256 KiB, 2**-6 s at each end. The first token waits for neither."""
    (before,) = run(COSTS, [Job(0, 0.0, 256, 2, 2)], lag=lag).clients
    (after,) = run(DIGESTING, [Job(0, 0.0, 256, 2, 2)], lag=lag).clients
    assert DIGESTING.digest_s(256) == 2**-6
    assert after.first_s == before.first_s
    assert after.last_s == pytest.approx(before.last_s + 2 * 2**-6, abs=1e-12)


def test_prompts_behind_one_another_wait_for_digests() -> None:
    """The source does the digests of one prompt while the next one is in flight, and those of all in all."""
    jobs = [Job(index, 0.0, 256, 2, 2) for index in range(6)]
    before, after = (run(costs, jobs).clients[-1].first_s for costs in (COSTS, DIGESTING))
    assert after == pytest.approx(before + 4 * 2**-6, abs=1e-12)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_shortcut_changes_nothing_with_digests(lag: int) -> None:
    jobs = random_jobs(3, 150, 12.0)
    quick, slow = (run(DIGESTING, jobs, may_skip, lag) for may_skip in (True, False))
    assert [(c.first_s, c.last_s) for c in quick.clients] == [(c.first_s, c.last_s) for c in slow.clients]
    assert quick.gaps == slow.gaps
    assert [(c.first_s, c.last_s) for c in quick.clients] != [(c.first_s, c.last_s) for c in run(COSTS, jobs).clients]
