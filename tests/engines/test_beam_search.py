"""Beam search through the whole system: the texts are those of transformers' own, token by token, in any layout."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from replicas.settings import EngineSettings, FaultSettings
from scheduler.admission import AdmissionPolicy
from scheduler.beam_search import BeamParams
from scheduler.length_estimator import LengthEstimator
from tests.engines.local_system import GREEDY, Generated, LocalSystem, settings
from tests.golden.beam_case import BeamCase
from tests.golden.beam_reference import reference_texts
from tests.golden.golden_set import BeamGolden, load_beam_goldens

OPTIMISTIC = AdmissionPolicy(quantile=0.05, min_samples=1)
VOCAB_SIZE = 96


def beam_generation(system: LocalSystem, case: BeamCase) -> Generation:
    return system.generation(
        case.prompt_ids,
        case.max_tokens,
        num_choices=case.num_returned,
        stop_token_ids=case.stop_token_ids,
        timeout_s=1500.0,
        beam=case.params,
    )


def check(system: LocalSystem, cases: list[BeamCase], texts: list[dict[int, list[int]]]) -> None:
    """All side by side. Finish reasons as well; nothing is left."""
    got_texts = system.run([beam_generation(system, c) for c in cases], queue_s=1500.0, handoff_s=600.0)
    for case, text, got in zip(cases, texts, got_texts, strict=True):
        assert got.token_ids == text, case
        reasons = {c: "stop" if ids[-1] in case.stop_token_ids else "length" for c, ids in text.items()}
        assert got.finish_reasons == reasons
    asyncio.run(system.wait_for_baseline())


# -- a tiny random model: many searches, every layout ------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _tiny(folder: Path, pool: str, **changes: Any) -> EngineSettings:
    base = settings(pool, **changes)
    return replace(base, model=replace(base.model, source=str(folder), max_model_len=512))


def _tiny_cases() -> list[BeamCase]:
    rng = random.Random(5)
    cases = []
    for number in range(40):
        width = rng.choice([2, 3, 4, 4, 6])
        params = BeamParams(width, rng.choice([1.0, 0.0, 0.5, 2.0, -1.0]), rng.choice([True, False, "never"]))
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 7, 15, 16, 17, 40])))
        stops = frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1, 3, 8])))
        cases.append(BeamCase(prompt, params, 1 + number % width, rng.choice([2, 9, 20, 40]), stops))
    return cases


@pytest.fixture(scope="module")
def tiny_texts(tiny_folder: Path) -> list[dict[int, list[int]]]:
    torch.set_num_threads(1)  # for work as small as this, threads only get in each other's way
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    texts = [reference_texts(model, case) for case in _tiny_cases()]
    lengths = {len(ids) for text in texts for ids in text.values()}
    assert len(lengths) > 8, "texts of all the same length prove little"
    return texts


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def lag(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


@pytest.fixture(scope="module")
def fault_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module", params=["split", "colocated"])
def tiny(request: pytest.FixtureRequest, tiny_folder: Path, fault_dir: Path, lag: int) -> Iterator[LocalSystem]:
    changes = {"lag": lag, "testing": FaultSettings(str(fault_dir))}
    prefill = _tiny(tiny_folder, "prefill", **changes) if request.param == "split" else None
    system = LocalSystem(_tiny(tiny_folder, "decode", **changes), prefill)
    yield system
    system.close()


def test_equals_transformers_on_a_random_model(tiny: LocalSystem, tiny_texts: list[dict[int, list[int]]]) -> None:
    check(tiny, _tiny_cases(), tiny_texts)


def test_one_token(tiny: LocalSystem, tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    cases = [BeamCase((3, 4, 5), BeamParams(4), 3, 1, frozenset()), BeamCase((9,), BeamParams(3), 1, 1, frozenset({7}))]
    check(tiny, cases, [reference_texts(model, case) for case in cases])


def test_a_single_beam_is_greedy(tiny: LocalSystem) -> None:
    case = BeamCase(tuple(range(20)), BeamParams(1), 1, 30, frozenset())
    greedy, beam = tiny.run([tiny.generation(case.prompt_ids, case.max_tokens, GREEDY), beam_generation(tiny, case)])
    assert beam == greedy


def test_other_requests_are_not_affected(tiny: LocalSystem, tiny_texts: list[dict[int, list[int]]]) -> None:
    sampled = replace(GREEDY, temperature=0.9, seed=11)
    prompts = [tuple(range(start, start + 12)) for start in range(6)]
    others = [tiny.generation(prompt, 40, params, num_choices=2) for prompt in prompts for params in (GREEDY, sampled)]
    alone = tiny.run(others)
    cases = _tiny_cases()[:12]
    together = tiny.run([*others, *(beam_generation(tiny, case) for case in cases)])
    assert together[: len(others)] == alone
    assert [got.token_ids for got in together[len(others) :]] == tiny_texts[:12]


def test_a_client_that_goes_leaves_nothing(tiny: LocalSystem) -> None:
    case = BeamCase(tuple(range(30)), BeamParams(4, early_stopping="never"), 4, 400, frozenset())

    async def leave() -> None:
        router = await tiny.start_router()

        async def consume() -> None:
            async with aclosing(router.generate(beam_generation(tiny, case))) as tokens:
                async for _ in tokens:
                    raise AssertionError("a beam search has no token before its end")

        task = asyncio.create_task(consume())
        before = tiny.decode.engine.scheduler.batch.num_forwarded_tokens
        while tiny.decode.engine.scheduler.batch.num_forwarded_tokens < before + 40:
            assert not task.done()
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.wait({task})
        await tiny.wait_for_baseline()
        await router.stop()

    asyncio.run(leave())
    assert [ledger.used_slots for ledger in tiny.ledgers()] == [0] * len(tiny.engines)


def test_a_search_may_take_longer_than_a_handoff(tiny: LocalSystem) -> None:
    """Its first token is one of the last things to come; the router hears that the KV is there all the same.

    Where the machine stands still for as long as a handoff may take, one fails of which this is not true: then again.
    """
    case = BeamCase(tuple(range(30)), BeamParams(4, early_stopping="never"), 1, 200, frozenset())
    started_s = time.monotonic()
    (patient,) = tiny.run([beam_generation(tiny, case)])
    handoff_s = (time.monotonic() - started_s) / 2

    def impatient() -> Generated | None:
        with suppress(ApiError):
            return tiny.run([beam_generation(tiny, case)], handoff_s=handoff_s)[0]
        return None

    assert next(filter(None, (impatient() for _ in range(5))), None) == patient


# -- memory that runs short --------------------------------------------------------------------------


@pytest.mark.parametrize("host_memory_bytes", [1 << 26, 0], ids=["host memory", "no host memory"])
def test_searches_that_give_way(
    tiny_folder: Path, tiny_texts: list[dict[int, list[int]]], host_memory_bytes: int
) -> None:
    changes = {"kv_capacity_tokens": 1024, "admission": OPTIMISTIC, "host_memory_bytes": host_memory_bytes}
    system = LocalSystem(_tiny(tiny_folder, "decode", lag=1, **changes), None)
    estimator = system.decode.engine.scheduler.budget.estimator
    assert isinstance(estimator, LengthEstimator)
    for _ in range(100):  # outputs were very short so far: what is no search is taken to be short
        estimator.observe(5)
    try:
        cases = _tiny_cases()
        others = [system.generation(range(number, number + 9), 150, GREEDY) for number in range(12)]
        searches = [beam_generation(system, case) for case in cases]
        got = system.run(
            [generation for pair in zip(others, searches[:12], strict=True) for generation in pair] + searches[12:]
        )
        texts = [one.token_ids for one in got[1:24:2] + got[24:]]
        assert texts == tiny_texts
        asyncio.run(system.wait_for_baseline())
        preemption = system.decode.engine.scheduler.preemption
        assert (preemption.num_swapped if host_memory_bytes else preemption.num_evicted) > 0
    finally:
        system.close()


# -- the bundled model -------------------------------------------------------------------------------


def _check_bundled(system: LocalSystem, goldens: list[BeamGolden]) -> None:
    """beam_golden.json has each search's `width` best texts; of some, fewer are asked for."""
    num_returned = [1 + number % golden.case.params.width for number, golden in enumerate(goldens)]
    cases = [replace(golden.case, num_returned=n) for golden, n in zip(goldens, num_returned, strict=True)]
    texts = [dict(enumerate(golden.texts[:n])) for golden, n in zip(goldens, num_returned, strict=True)]
    check(system, cases, texts)


def test_equals_transformers_on_eight_prompts() -> None:
    """Each with one of the six searches: all of them are in the test below."""
    goldens = load_beam_goldens()
    num_searches = len(goldens) // 20
    chosen = [goldens[20 * (number % num_searches) + 2 * number] for number in range(8)]
    assert len({golden.case.prompt_ids for golden in chosen}) == 8
    assert {golden.case.params for golden in chosen} == {golden.case.params for golden in goldens}
    with _bundled(1, 1) as system:
        _check_bundled(system, chosen)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("lag", [0, 1], ids=["lag0", "lag1"])
@pytest.mark.parametrize("num_prefills", [0, 1], ids=["colocated", "split"])
def test_equals_transformers_in_all_searches(lag: int, num_prefills: int, part: int) -> None:
    """A part takes some minutes."""
    with _bundled(lag, num_prefills) as system:
        _check_bundled(system, load_beam_goldens()[part::4])


@contextmanager
def _bundled(lag: int, num_prefills: int) -> Iterator[LocalSystem]:
    system = LocalSystem(settings("decode", lag=lag), settings("prefill", lag=lag) if num_prefills else None)
    yield system
    system.close()
