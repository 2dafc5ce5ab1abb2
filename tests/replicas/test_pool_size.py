"""How many blocks a pool gets, by each of the keys that can say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replicas.pool_size import PoolTooSmall, num_host_blocks, pool_limits
from replicas.settings import EngineSettings
from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits
from tests.engines.local_system import settings

BLOCK_SIZE, BLOCK_BYTES = 16, 1000
BOUND, QUANTILE = AdmissionPolicy(), AdmissionPolicy(quantile=0.9)


@pytest.fixture(scope="module")
def base() -> EngineSettings:
    return settings("decode", kv_capacity_tokens=None)


@pytest.mark.parametrize(
    ("tokens", "num_bytes", "memory_bytes", "num_blocks"),
    [
        (1024, None, None, 64),
        (1039, None, None, 64),
        (1024, 999_999, 999_999, 64),  # tokens say it before bytes do
        (None, 80_999, None, 80),
        (None, 80_999, 999_999, 80),
        (None, None, 90_500, 90),
    ],
)
def test_blocks_by_tokens_by_bytes_or_by_what_is_free(
    base: EngineSettings, tokens: int | None, num_bytes: int | None, memory_bytes: int | None, num_blocks: int
) -> None:
    pool = replace(base, kv_capacity_tokens=tokens, kv_memory_bytes=num_bytes)
    limits = pool_limits(pool, BLOCK_SIZE, BLOCK_BYTES, 1024, memory_bytes)
    assert limits == PoolLimits(num_blocks, BLOCK_SIZE, base.max_running_sequences, base.max_batch_tokens)


def test_less_than_one_request_is_refused_with_the_numbers(base: EngineSettings) -> None:
    pool = replace(base, kv_capacity_tokens=1039)
    with pytest.raises(PoolTooSmall) as error:
        pool_limits(pool, BLOCK_SIZE, BLOCK_BYTES, 1025)
    expected = "a KV cache of 1024 tokens (62 bytes each) is less than model.max_model_len 1025; give it more memory"
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("memory_bytes", "policy", "num_blocks"),
    [(None, BOUND, 0), (None, QUANTILE, 70), (0, QUANTILE, 0), (5999, QUANTILE, 5), (5999, BOUND, 5)],
)
def test_host_blocks(memory_bytes: int | None, policy: AdmissionPolicy, num_blocks: int) -> None:
    assert num_host_blocks(memory_bytes, policy, BLOCK_BYTES, 70) == num_blocks
