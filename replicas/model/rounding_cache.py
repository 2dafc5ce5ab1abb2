"""transformers' own KV cache, but for its numbers: rounded as a pool of 8 bits would store them, before any attention.

By it the reference of `self_check` is what serving computes, and shows what the format cuts off.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from transformers import DynamicCache

from replicas.stored_numbers import FP8, LARGEST_FP8, as_stored

logger = logging.getLogger(__name__)


class KvRounding:
    """scales: as of a KvLayout. cut: by layer, how many numbers of all caches were too large."""

    def __init__(self, scales: tuple[tuple[float, float], ...]) -> None:
        self.scales = scales
        self.cut: Counter[int] = Counter()

    def new_cache(self, config: Any) -> RoundingCache:
        """For one forward pass of a model with this config."""
        return RoundingCache(config, self)

    def rounded(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        """What attention sees of them, in their type."""
        return (as_stored(numbers, FP8, scale).float() * scale).to(numbers.dtype)

    def log_cut(self) -> None:
        """Warn if there were any: only a checkpoint with scales, or another format, holds them."""
        if self.cut:
            layers, num_cut = sorted(self.cut), sum(self.cut.values())
            extra = {"event": "kv_cut", "layers": layers, "num_cut": num_cut}
            logger.warning(
                "kv.dtype fp8 cuts off %d keys or values of short prompts at %g times their scale, in layers %s: texts "
                "may suffer; kv.dtype auto does not, nor may a checkpoint with k_scale and v_scale",
                num_cut, LARGEST_FP8, ", ".join(map(str, layers)), extra=extra,
            )  # fmt: skip


class RoundingCache(DynamicCache):  # type: ignore[misc]  # it has no types
    """Rounds what comes in."""

    def __init__(self, config: Any, rounding: KvRounding) -> None:
        super().__init__(config=config)
        self._rounding = rounding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base's: all keys and values of the layer, these the last."""
        of, rounded = self._rounding, []
        scales = of.scales[layer_idx] if of.scales else (1.0, 1.0)
        for numbers, scale in zip((key_states, value_states), scales, strict=True):
            rounded.append(of.rounded(numbers, scale))
            if num_cut := int((numbers.float().abs() > LARGEST_FP8 * scale).sum()):
                of.cut[layer_idx] += num_cut
        states: tuple[torch.Tensor, torch.Tensor] = super().update(*rounded, layer_idx, *args, **kwargs)
        return states
