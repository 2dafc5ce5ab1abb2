"""How large an engine is by its settings: one rule for the engine and for the simulator. No torch."""

from __future__ import annotations

from typing import Protocol

from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits

# On a card long prompts are cut at multiples of so many tokens: a library attends from there on, and its kernels are
# prepared, which takes longer than a step, for few lengths of what is in front.
CHUNK_MULTIPLE = 2048


class PoolKeys(Protocol):
    """The keys of a pool that say so, in the config and in `EngineSettings`."""

    @property
    def kv_capacity_tokens(self) -> int | None: ...

    @property
    def kv_memory_bytes(self) -> int | None: ...

    @property
    def max_running_sequences(self) -> int: ...

    @property
    def max_batch_tokens(self) -> int: ...

    @property
    def may_also(self) -> bool: ...

    @property
    def device(self) -> str: ...


class PoolTooSmall(ValueError):
    """Its KV cache does not hold one request of full length."""


def pool_limits(
    pool: PoolKeys, block_size: int, block_bytes: int, max_model_len: int, memory_bytes: int | None = None
) -> PoolLimits:
    """memory_bytes: for the KV cache, where the keys give neither tokens nor bytes. Raises PoolTooSmall."""
    if pool.kv_capacity_tokens is not None:
        num_blocks = pool.kv_capacity_tokens // block_size
    else:
        num_bytes = memory_bytes if pool.kv_memory_bytes is None else pool.kv_memory_bytes
        assert num_bytes is not None, "the config gives one of the three"
        num_blocks = num_bytes // block_bytes
    num_reserved = -(-max_model_len // block_size) if pool.may_also else 0
    if num_reserved and num_blocks < 2 * num_reserved:
        raise PoolTooSmall(
            f"a KV cache of {num_blocks * block_size} tokens is less than twice model.max_model_len {max_model_len}, "
            "which may_also needs: a prompt for another replica has room of its own; give it more memory"
        )
    if num_blocks * block_size < max_model_len:
        raise PoolTooSmall(
            f"a KV cache of {num_blocks * block_size} tokens ({block_bytes // block_size} bytes each) is less than "
            f"model.max_model_len {max_model_len}; give it more memory"
        )
    multiple = chunk_multiple(pool.device)
    return PoolLimits(num_blocks, block_size, pool.max_running_sequences, pool.max_batch_tokens, num_reserved, multiple)


def chunk_multiple(device: str) -> int:
    """As PoolLimits has it, of an engine on "cpu" or "cuda"."""
    return CHUNK_MULTIPLE if device == "cuda" else 1


def keeps_prefixes_on_host(pool: str, layout: str) -> bool:
    """Whether an engine of this pool uses its host memory for the prefix cache: where prompts are computed. A decode
    engine behind a prefill pool reads what it lacks from there, as fast."""
    return pool == "prefill" or layout != "split"


def num_host_blocks(memory_bytes: int | None, policy: AdmissionPolicy, block_bytes: int, num_blocks: int) -> int:
    """Blocks of host memory: as configured, else as many as the pool has if there can be preempted requests."""
    if memory_bytes is not None:
        return memory_bytes // block_bytes
    return 0 if policy.quantile is None else num_blocks
