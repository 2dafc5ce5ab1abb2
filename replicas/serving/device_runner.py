"""Picks the model runner for a pool's device."""

from __future__ import annotations

from collections.abc import Callable

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ModelRunner
from replicas.speculation.drafter import Drafter
from replicas.speculation.drafting_runner import DraftingRunner
from replicas.speculation.history import TokenHistory


def make_runner(
    loaded: LoadedModel,
    pool: KvPool,
    num_slots: int,
    max_model_len: int,
    num_host_blocks: int = 0,
    has_two_lanes: bool = False,
    make_drafter: Callable[[TokenHistory], Drafter] | None = None,
) -> ModelRunner:
    """The runner for the pool's device. make_drafter: as of a DraftingRunner; None: it has no drafts.

    Raises UnsupportedModel, and NotDivisible if it can't have two lanes.
    """
    if pool.tensor.is_cuda and has_two_lanes:
        from replicas.cuda.lane_runner import DividedRunner

        return DividedRunner(loaded, pool, num_slots, max_model_len, num_host_blocks)
    if pool.tensor.is_cuda:
        from replicas.cuda.runner import CudaRunner  # its kernels need triton, which a CPU torch lacks

        return CudaRunner(loaded, pool, num_slots, max_model_len, num_host_blocks)
    if make_drafter is not None:
        return DraftingRunner(loaded, pool, num_slots, max_model_len, num_host_blocks, make_drafter=make_drafter)
    return ModelRunner(loaded, pool, num_slots, max_model_len, num_host_blocks)
