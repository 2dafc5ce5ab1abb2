"""A decode engine with far too little memory: requests give way and come back, and no text shows it.

Long texts come from a tiny random model, compared with the same engine with memory for everybody; goldens from
the bundled one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from cluster.routing.generation import Generation
from replicas.settings import EngineSettings
from scheduler.admission import AdmissionPolicy
from scheduler.length_estimator import LengthEstimator
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import GREEDY, Generated, LocalSystem, settings
from tests.engines.tiny_model import save_tiny_model, tiny_settings
from tests.golden.golden_set import load_goldens

OPTIMISTIC = AdmissionPolicy(quantile=0.05, min_samples=1)
PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(9 + 5 * number)] for number in range(8)]
SEEDED = [SamplingParams(temperature=0.8, top_p=0.95, seed=number) for number in range(8)]


@contextmanager
def _running(engine: EngineSettings, prefill: EngineSettings | None = None) -> Iterator[LocalSystem]:
    system = LocalSystem(engine, prefill)
    estimator = system.decode.engine.scheduler.budget.estimator
    if isinstance(estimator, LengthEstimator):
        for _ in range(100):  # outputs were very short so far
            estimator.observe(20)
    yield system
    system.close()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return tiny_settings("decode", folder, lag=1)


@pytest.fixture(scope="module")
def roomy(tiny_model: EngineSettings) -> Iterator[LocalSystem]:
    with _running(replace(tiny_model, kv_capacity_tokens=8192)) as system:
        yield system


@pytest.fixture(params=[1 << 26, 0], ids=["host memory", "no host memory"])
def tight(tiny_model: EngineSettings, request: pytest.FixtureRequest) -> Iterator[LocalSystem]:
    changes: dict[str, Any] = {"kv_capacity_tokens": 1280, "host_memory_bytes": request.param}
    with _running(replace(tiny_model, admission=OPTIMISTIC, **changes)) as system:
        yield system


@pytest.fixture
def tight_pair(tiny_model: EngineSettings) -> Iterator[LocalSystem]:
    """Prompts come from a prefill engine, with memory for two of them at a time."""
    decode = replace(tiny_model, kv_capacity_tokens=1280, host_memory_bytes=1 << 26, admission=OPTIMISTIC)
    with _running(decode, replace(tiny_model, pool="prefill", kv_capacity_tokens=512, lag=0)) as system:
        yield system


def _run_preempting(system: LocalSystem, generations: list[Generation]) -> list[Generated]:
    """Run them side by side, in a system that cannot hold them: some gave way, and nothing is left of it."""
    generated = system.run(generations)
    asyncio.run(system.wait_for_baseline())
    preemption = system.decode.engine.scheduler.preemption
    print(f"{preemption.num_swapped} swapped, {preemption.num_evicted} evicted")
    assert preemption.num_host_blocks_used == preemption.num_cooling == len(preemption) == 0
    if preemption.num_host_blocks:
        assert preemption.num_swapped > 0
        assert preemption.num_evicted == 0
    else:
        assert preemption.num_evicted > 0
    return generated


def test_sixteen_requests_of_200_tokens(roomy: LocalSystem, tight: LocalSystem) -> None:
    generations = [tight.generation(prompt, 200, GREEDY) for prompt in PROMPTS]
    generations += [tight.generation(prompt, 200, sampling) for prompt, sampling in zip(PROMPTS, SEEDED, strict=True)]
    expected = roomy.run(generations)
    generated = _run_preempting(tight, generations)
    assert generated == expected
    assert all(len(got.token_ids[0]) == 200 for got in generated)
    assert len({tuple(got.token_ids[0]) for got in generated}) == len(generations), (
        "texts that are all the same prove little"
    )


@pytest.mark.slow
def test_sixteen_requests_of_200_tokens_through_both_pools(tiny_model: EngineSettings, tight_pair: LocalSystem) -> None:
    """Greedy ones against transformers, one at a time; the others against the same request alone."""
    greedy = [tight_pair.generation(prompt, 200) for prompt in PROMPTS]
    seeded = [tight_pair.generation(prompt, 200, sampling) for prompt, sampling in zip(PROMPTS, SEEDED, strict=True)]
    generated = _run_preempting(tight_pair, greedy + seeded)
    model = LlamaForCausalLM.from_pretrained(tiny_model.model.source, dtype=torch.float32)
    model.generation_config = GenerationConfig(max_new_tokens=200, do_sample=False)  # stops nowhere
    for prompt, got in zip(PROMPTS, generated, strict=False):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids))
        assert got.token_ids[0] == whole[0, len(prompt) :].tolist()
    for generation, got in zip(seeded, generated[len(PROMPTS) :], strict=True):
        assert [got] == tight_pair.run([replace(generation, generation_id=f"{generation.generation_id} alone")])


def test_eight_requests_of_three_forked_sequences(roomy: LocalSystem, tight: LocalSystem) -> None:
    generations = [
        tight.generation(p, 100, sampling, num_choices=3) for p, sampling in zip(PROMPTS, SEEDED, strict=True)
    ]
    expected = roomy.run(generations)
    generated = _run_preempting(tight, generations)
    assert generated == expected
    assert all(sorted(got.token_ids) == [0, 1, 2] for got in generated)
    assert all(len(tokens) == 100 for got in generated for tokens in got.token_ids.values())


def test_preemptions_are_counted(tight: LocalSystem) -> None:
    _run_preempting(tight, [tight.generation(prompt, 200) for prompt in PROMPTS * 2])
    preemption = tight.decode.engine.scheduler.preemption
    (family,) = [f for f in tight.decode.metrics_snapshot() if f["name"] == "splitserve_preemptions"]
    counted = {labels["kind"]: value for suffix, labels, value in family["samples"] if suffix == "_total"}
    assert counted == {"swap": preemption.num_swapped, "recompute": preemption.num_evicted}


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_goldens() -> None:
    goldens = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 40 and min(golden.margins) > 5e-3][:12]
    base = settings("decode", lag=1, kv_capacity_tokens=512, admission=OPTIMISTIC)
    with _running(replace(base, model=replace(base.model, max_model_len=256))) as system:
        generations = [system.generation(golden.prompt_ids, 64) for golden in goldens]
        for golden, got in zip(goldens, _run_preempting(system, generations), strict=True):
            golden.check(got.token_ids[0])
