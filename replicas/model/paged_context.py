"""One step's places in the pool: where its tokens' keys and values go, and the contexts they attend over.

Made once a step and used by every layer, so that a layer does nothing that another has done already.
"""

from __future__ import annotations

import torch

from replicas.kv.kv_pool import KvPool
from replicas.model.step_inputs import StepInputs
from replicas.stored_numbers import as_bits, as_stored


class PagedContext:
    """Keys and values of n sequences' blocks, one layer at a time, and which of them each query sees.

    block_table: int64 [n, num_blocks]. visible: bool, broadcastable to [n, queries, num_blocks * block_size].
    dtype: of the model that attends; None: the pool's. Both layers' and both kinds' copies go to the same memory:
    taking new memory for each costs more than the copying.
    """

    def __init__(
        self, pool: KvPool, block_table: torch.Tensor, visible: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        layout = pool.layout
        self._dtype = dtype or layout.dtype
        n, num_blocks = block_table.shape
        self._planes = as_bits(pool.planes())
        self._indices = _per_plane(block_table.flatten() * pool.planes_per_block, pool.planes_per_block)
        shape = (n, num_blocks * layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._copies = [self._planes.new_empty(n * num_blocks, self._planes.shape[1]) for _ in range(2)]
        self._reader = pool.reader(self._dtype)
        self._numbers = self._copies
        if self._reader is not None:
            self._numbers = [torch.empty_like(copy, dtype=self._dtype) for copy in self._copies]
        self._views = [numbers.view(shape).transpose(1, 2) for numbers in self._numbers]
        # What attention makes of a boolean mask, but once instead of in each layer.
        self._mask = self._planes.new_zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, -torch.inf)
        self._repeated_mask: torch.Tensor | None = None

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As stored, times no scale: each [n, num_kv_heads, num_blocks * block_size, head_dim]. Good until the next
        call."""
        for kind, copy in enumerate(self._copies):
            torch.index_select(self._planes, 0, self._indices[2 * layer + kind], out=copy)
            if self._reader is not None:
                self._reader.read(copy, self._numbers[kind])
        keys, values = self._views
        if keys.dtype is self._dtype:
            return keys, values
        return keys.to(self._dtype), values.to(self._dtype)

    def mask(self, num_repeats: int = 1) -> torch.Tensor:
        """0 where visible, else -inf; the queries' dimension repeated. The same num_repeats in every call of a step."""
        if self._repeated_mask is None:
            self._repeated_mask = self._mask if num_repeats == 1 else self._mask.repeat(num_repeats, 1)
        return self._repeated_mask


class PagedStep:
    """What the attention function is given: the pool, this step's inputs, and their places in the pool.

    num_calls counts layers served, so that the runner can tell a model that bypasses this function. dtype: as of a
    PagedContext. layout: the pool's.
    """

    def __init__(self, pool: KvPool, inputs: StepInputs, dtype: torch.dtype | None = None) -> None:
        block_size = pool.layout.block_size
        self.inputs = inputs
        self.num_calls = 0
        self.layout = pool.layout
        self._token_rows = as_bits(pool.token_rows())
        first = inputs.write_blocks * (pool.planes_per_block * block_size) + inputs.write_offsets
        self._write_rows = _per_plane(first, pool.planes_per_block, step=block_size)
        self.groups = tuple(PagedContext(pool, group.block_table, group.mask, dtype) for group in inputs.groups)
        self.chunks = tuple(PagedContext(pool, chunk.block_ids[None], chunk.mask, dtype) for chunk in inputs.chunks)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [num_tokens, num_kv_heads, head_dim] of this step's tokens. Mutates the pool.

        Attention reads them there, as rounded to the pool's type: a prompt in one chunk sees what one in many does.
        """
        scales = self.layout.scales_of(layer)
        for kind, source in enumerate((keys, values)):
            rows = as_stored(source.flatten(1), self.layout.dtype, scales[kind])
            self._token_rows.index_copy_(0, self._write_rows[2 * layer + kind], as_bits(rows))


def _per_plane(first: torch.Tensor, num_planes: int, step: int = 1) -> tuple[torch.Tensor, ...]:
    """Rows of each plane: those of plane 0, int64 [n], and so many further for each that follows."""
    offsets = torch.arange(0, num_planes * step, step, device=first.device)
    return torch.unbind(first[None, :] + offsets[:, None])
