"""How large an engine's KV pool is, by its settings and its device, and how its numbers are stored."""

from __future__ import annotations

import logging

import torch

from replicas.kv.kv_pool import KvLayout
from replicas.model.model_loader import LoadedModel
from replicas.pool_size import pool_limits
from replicas.settings import EngineSettings
from scheduler.pool_limits import PoolLimits

logger = logging.getLogger(__name__)


def log_numbers(layout: KvLayout, loaded: LoadedModel) -> None:
    """How KV is stored, where that is not as the model has it, and what of the checkpoint does not count."""
    has_scales = bool(loaded.kv_scales)
    if layout.dtype is not loaded.dtype:
        scales = "the checkpoint's scales" if has_scales else "scale 1.0, as the checkpoint has none"
        extra = {"event": "kv_dtype", "numbers": layout.numbers, "kv_bytes_per_token": layout.bytes_per_token}
        logger.info("KV is stored as %s with %s", layout.numbers, scales, extra=extra)
    elif has_scales:
        extra = {"event": "kv_scales_unused"}
        logger.info("the checkpoint's scales of KV are not used: kv.dtype is auto; fp8 uses them", extra=extra)


def limits_of(settings: EngineSettings, layout: KvLayout, draft_block_bytes: int) -> PoolLimits:
    """draft_block_bytes: of a draft model's KV, which comes with each block. Raises PoolTooSmall."""
    memory_bytes = None
    if settings.kv_memory_fraction is not None:
        free_bytes, _ = torch.cuda.mem_get_info()
        memory_bytes = int(free_bytes * settings.kv_memory_fraction)
    block_bytes = layout.block_bytes + draft_block_bytes
    return pool_limits(settings, settings.kv.block_size, block_bytes, settings.model.max_model_len, memory_bytes)
