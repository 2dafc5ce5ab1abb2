"""A decode engine with far too little memory: requests give way and come back, and no text shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.generation import GenerationSpec
from scheduler.admission import AdmissionPolicy
from scheduler.length_estimator import LengthEstimator
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import GREEDY, Generated, LocalSystem, settings
from tests.golden.golden_set import Golden, load_goldens

# Ids that differ clearly from their runners-up, so that the order of sums in a batch does not matter.
GOLDENS = sorted(load_goldens(), key=lambda golden: -min(golden.margins))
PROMPTS = [golden for golden in GOLDENS if len(golden.prompt_ids) <= 60][:8]
OPTIMISTIC = AdmissionPolicy(quantile=0.05, min_samples=1)
# Memory for about five of sixteen requests.
FEW_TOKENS = 1280


def _learn(system: LocalSystem) -> None:
    """Outputs were very short so far."""
    estimator = system.decode.engine.scheduler.budget.estimator
    assert isinstance(estimator, LengthEstimator)
    for _ in range(100):
        estimator.observe(20)


@pytest.fixture(scope="module")
def roomy() -> Iterator[LocalSystem]:
    system = LocalSystem(settings("decode", lag=1, kv_capacity_tokens=8192), None)
    yield system
    system.close()


@pytest.fixture(params=[None, 0], ids=["host memory", "no host memory"])
def tight(request: pytest.FixtureRequest) -> Iterator[LocalSystem]:
    model = replace(settings("decode").model, max_model_len=512)
    system = LocalSystem(
        settings(
            "decode",
            model=model,
            lag=1,
            kv_capacity_tokens=FEW_TOKENS,
            admission=OPTIMISTIC,
            host_memory_bytes=request.param,
        ),
        None,
    )
    _learn(system)
    yield system
    system.close()


def _specs(system: LocalSystem, max_tokens: int) -> list[tuple[Golden, GenerationSpec]]:
    """Sixteen: each prompt greedy and seeded."""
    seeded = [SamplingParams(temperature=0.7, top_p=0.9, seed=number) for number in range(len(PROMPTS))]
    pairs = [(golden, system.spec(golden.prompt_ids, max_tokens, GREEDY)) for golden in PROMPTS]
    return pairs + [
        (golden, system.spec(golden.prompt_ids, max_tokens, sampling))
        for golden, sampling in zip(PROMPTS, seeded, strict=True)
    ]


def _run_to_baseline(system: LocalSystem, specs: list[GenerationSpec]) -> list[Generated]:
    generated = system.run(specs)
    asyncio.run(system.wait_for_baseline())
    preemption = system.decode.engine.scheduler.preemption
    assert preemption.num_host_blocks_used == len(preemption) == 0
    return generated


def _check_preempted(system: LocalSystem) -> None:
    preemption = system.decode.engine.scheduler.preemption
    print(f"{preemption.num_swapped} swapped, {preemption.num_evicted} evicted")
    if preemption.num_host_blocks:
        assert preemption.num_swapped > 0
        assert preemption.num_evicted == 0
    else:
        assert preemption.num_evicted > 0
    families = {family.name: family for family in system.decode.metrics_snapshot()}
    assert "splitserve_preemptions" in families


def test_sixteen_requests_of_200_tokens(roomy: LocalSystem, tight: LocalSystem) -> None:
    pairs = _specs(tight, 200)
    expected = roomy.run([spec for _, spec in pairs])
    generated = _run_to_baseline(tight, [spec for _, spec in pairs])
    _check_preempted(tight)
    for (golden, spec), got, wanted in zip(pairs, generated, expected, strict=True):
        assert got == wanted, f"{golden.name}, {spec.sampling}"
        assert len(got.token_ids[0]) == 200
        if spec.sampling.is_greedy:
            golden.check(got.token_ids[0][:64])


def test_eight_requests_of_three_forked_sequences(roomy: LocalSystem, tight: LocalSystem) -> None:
    sampling = [SamplingParams(temperature=0.7, top_p=0.9, seed=100 + number) for number in range(8)]
    specs = [tight.spec(g.prompt_ids, 64, s, num_choices=3) for g, s in zip(PROMPTS, sampling, strict=True)]
    expected = roomy.run(specs)
    generated = _run_to_baseline(tight, specs)
    _check_preempted(tight)
    assert generated == expected
    assert all(len(tokens) == 64 for got in generated for tokens in got.token_ids.values())
    assert all(len(got.token_ids) == 3 for got in generated)
