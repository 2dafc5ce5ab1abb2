"""Quantised models through whole engines: every way that a text takes gives what transformers alone generates.

With the numbers that weights, inputs, keys and values are rounded to: prompts in chunks, handed over, found in a cache,
beside other rows, out to host memory and in again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.settings import EngineSettings, KvSettings, ModelSettings
from replicas.stored_numbers import as_bits
from scheduler.admission import AdmissionPolicy
from scheduler.length_estimator import LengthEstimator
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import LocalSystem, settings
from tests.engines.quantised_references import NUM_TOKENS, REFERENCES, QuantisedReference, reference

LENGTHS = (5, 40, 70)
MAX_MODEL_LEN = 128
KV_DTYPES = ("auto", "fp8")

ReferenceOf = Callable[[str], QuantisedReference]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> ReferenceOf:
    torch.set_num_threads(1)
    made: dict[str, QuantisedReference] = {}

    def of(name: str) -> QuantisedReference:
        if name not in made:
            made[name] = reference(name, tmp_path_factory.mktemp("quantised") / "model")
        return made[name]

    return of


def engine(pool: str, of: QuantisedReference, kv_dtype: str, **changes: Any) -> EngineSettings:
    """Its steps compute prompts in chunks of 32 tokens, beside what rows there are."""
    base = settings(pool, max_batch_tokens=32, kv=KvSettings(16, kv_dtype), kv_capacity_tokens=1024, **changes)
    model = replace(base.model, source=str(of.folder), max_model_len=MAX_MODEL_LEN, quantise=of.quantise)
    return replace(base, model=model)


def check(of: QuantisedReference, kv_dtype: str, system: LocalSystem, lengths: tuple[int, ...] = LENGTHS) -> None:
    """All prompts at once."""
    wanted = [of.of(length, kv_dtype) for length in lengths]
    generated = system.run([system.generation(golden.prompt_ids, NUM_TOKENS) for golden in wanted])
    for golden, got in zip(wanted, generated, strict=True):
        golden.check(got.token_ids[0])


def found(system: LocalSystem) -> int:
    """Prompt tokens that were found in a cache, by all engines."""
    books = [built.engine.scheduler.prefixes for built in system.engines]
    return sum(book.num_found_tokens for book in books if book is not None)


def handed_over_and_found(of: QuantisedReference, kv_dtype: str, lag: int) -> None:
    """In chunks, over NIXL; and once more by those who have the prompt's blocks already."""
    system = LocalSystem(engine("decode", of, kv_dtype, lag=lag), engine("prefill", of, kv_dtype, lag=lag))
    try:
        scales = [pytest.approx(pair) for pair in of.scales] if kv_dtype == "fp8" else []
        assert list(system.decode.layout.scales) == scales
        check(of, kv_dtype, system)
        transfers = system.decode.transfers.snapshot()
        block_bytes = system.decode.layout.block_bytes
        assert transfers.bytes_read == sum(-(-length // 16) for length in LENGTHS) * block_bytes
        assert found(system) == 0
        check(of, kv_dtype, system)
        assert found(system) > 0
        (info,) = [family for family in system.decode.metrics_snapshot() if family["name"] == "splitserve_model_info"]
        ((_, labels, _),) = info["samples"]
        assert f"scheme={labels['quantisation']} " in system.decode.peer.fingerprint
        assert labels["kv_dtype"] == {"auto": "float32", "fp8": "float8_e4m3fn"}[kv_dtype]
    finally:
        system.close()


def beside_rows_and_out_to_host_memory(of: QuantisedReference, kv_dtype: str, lag: int) -> None:
    """One engine, with too few blocks for all to their ends."""
    optimistic = AdmissionPolicy(quantile=0.05, min_samples=1)
    changes = {"lag": lag, "kv_capacity_tokens": 144, "host_memory_bytes": 1 << 22, "admission": optimistic}
    system = LocalSystem(replace(engine("decode", of, kv_dtype), **changes), None)  # type: ignore[arg-type]
    try:
        estimator = system.decode.engine.scheduler.budget.estimator
        assert isinstance(estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            estimator.observe(2)
        check(of, kv_dtype, system, (30, 31, 61))
        assert system.decode.engine.scheduler.preemption.num_swapped > 0
    finally:
        system.close()


TOURS = {"handed over, found": handed_over_and_found, "beside rows, swapped": beside_rows_and_out_to_host_memory}
# Every scheme once, every type of KV, every lag and every way some times; all of them with each other: exhaustive.
QUICK = (
    ("int8 at load", "fp8", 1, "handed over, found"),
    ("int8 at load", "auto", 0, "beside rows, swapped"),
    ("fp8 at load", "auto", 0, "handed over, found"),
    ("fp8 blocks", "fp8", 1, "beside rows, swapped"),
    ("awq", "fp8", 0, "handed over, found"),
    ("compressed-tensors fp8 with scales of KV", "fp8", 1, "handed over, found"),
)
ALL = tuple((name, kv, lag, way) for name in REFERENCES for kv in KV_DTYPES for lag in (0, 1) for way in TOURS)


@pytest.mark.parametrize(("name", "kv_dtype", "lag", "way"), QUICK)
def test_texts_are_those_of_the_reference(
    name: str, kv_dtype: str, lag: int, way: str, reference_of: ReferenceOf
) -> None:
    TOURS[way](reference_of(name), kv_dtype, lag)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kv_dtype", "lag", "way"), [one for one in ALL if one not in QUICK])
def test_texts_are_those_of_the_reference_in_every_way(
    name: str, kv_dtype: str, lag: int, way: str, reference_of: ReferenceOf
) -> None:
    TOURS[way](reference_of(name), kv_dtype, lag)


# -- the bytes of the pool -------------------------------------------------------------------------------


def filled_pool(
    of: QuantisedReference, kv_dtype: str, prompt_ids: list[int], all_cuts: tuple[tuple[int, ...], ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each way to cut the prompt: its blocks, and the logits behind it."""
    model = ModelSettings(str(of.folder), "", "float32", MAX_MODEL_LEN, "auto", False, of.quantise)
    loaded = load_model(model, torch.device("cpu"), kv_dtype)
    made = []
    for cuts in all_cuts:
        runner = ModelRunner(loaded, KvPool(loaded.kv_layout(16, kv_dtype), 8, torch.device("cpu")), 1, MAX_MODEL_LEN)
        init = SlotInit(0, 0, SamplingParams(temperature=0.0), None)
        runner.launch(StepPlan(0, (init,), (TableWrite(0, 0, (3, 1, 5, 7, 0, 2)),), (), ()))
        for start, end in pairwise(cuts):
            part = Slice.of_prompt("r", 0, start, tuple(prompt_ids[start:end]), (SampleTarget(0, 0),))
            logits = runner.logits(StepPlan(1, (), (), (), (part,)))
        made.append((runner.pool.tensor[[3, 1, 5, 7, 0, 2]], logits))
    return made


@pytest.mark.parametrize("name", dict.fromkeys(one[0] for one in QUICK))
def test_one_chunk_leaves_the_bytes_of_many(name: str, reference_of: ReferenceOf) -> None:
    check_bytes(reference_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_one_chunk_leaves_the_bytes_of_many_in_every_scheme(name: str, reference_of: ReferenceOf) -> None:
    check_bytes(reference_of(name))


def check_bytes(of: QuantisedReference) -> None:
    """Another machine's library may add in another order, and then an input may be rounded to the number beside: that
    moves what is of its token, and no more."""
    prompt_ids = [3 + (7 * i + i * i) % 90 for i in range(90)]
    cuts = ((0, 90), (0, 8, 13, 64, 90), (0, 50, 90))
    for kv_dtype in KV_DTYPES:
        (whole, first), *others = filled_pool(of, kv_dtype, prompt_ids, cuts)
        assert len(whole.float().unique()) > 50
        for pool, logits in others:
            if kv_dtype == "fp8":
                moved = (as_bits(pool) != as_bits(whole)).any(dim=(1, 2, 4, 5))  # by block and place in it
                assert int(moved.sum()) <= 1
            else:
                torch.testing.assert_close(pool, whole, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(logits, first, atol=1e-2, rtol=1e-2)
