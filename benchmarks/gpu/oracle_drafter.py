"""Drafts by somebody who knows the text, and errs as often as asked: what a trained head would cost, and bring.

Of a benchmark, never of a server. The products of an EAGLE head are computed for each draft, one after the other, as
each draft needs the one before: as a server would have them, all drafts of a step in one graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu.head_products import HeadProducts
from replicas.cuda.slots import CudaSlots, numbers_to_device
from replicas.speculation.drafter import DraftRow
from scheduler.plan import SlotInit

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # that get a graph; others are padded to the next, and more run by hand


class OracleDrafter:
    """behind: of each token the one that follows. holding: how often each draft is right, if those in front are."""

    def __init__(
        self, slots: CudaSlots, behind: torch.Tensor, holding: Sequence[float], products: HeadProducts
    ) -> None:
        """Blocks: captures its graphs."""
        device = slots.state.device
        self._slots, self._behind, self._products = slots, behind.to(device), products
        self._holding = torch.tensor(holding, device=device)
        self._random = torch.Generator(device).manual_seed(3)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        memory = torch.cuda.graph_pool_handle()
        for num_rows in reversed(_ROWS):
            for most in range(len(holding), 0, -1):
                self._graphs[num_rows, most] = self._captured(num_rows, most, memory)

    def start(self, init: SlotInit) -> None:
        """The text is known."""

    def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        most = max(row.num_drafts for row in rows)
        last = self._slots.last_token[numbers_to_device([row.slot for row in rows], self._behind.device)]
        num_rows = next((size for size in _ROWS if size >= len(rows)), None)
        if num_rows is None:
            found = self._follow(last, most)
        else:
            graph, tokens, drafts = self._graphs[num_rows, most]
            tokens[: len(rows)].copy_(last)
            graph.replay()
            found = drafts[: len(rows)]
        is_right = torch.rand(found.shape, generator=self._random, device=found.device) < self._holding[:most]
        return torch.where(is_right, found, 0)

    def accepted(self, slots: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """The text is known."""

    def _follow(self, token: torch.Tensor, most: int) -> torch.Tensor:
        """int64 [R] to [R, most]."""
        state = torch.ones(1, len(token), 2 * self._products.dim, dtype=torch.bfloat16, device=token.device)
        drafts = []
        for _ in range(most):
            state = self._products(state)
            token = self._behind[token]
            drafts.append(token)
        return torch.stack(drafts, 1)

    def _captured(
        self, num_rows: int, most: int, memory: object
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        """A graph, what it reads, and what it gives."""
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self._behind.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            self._follow(tokens, most)  # whatever is compiled or allocated lazily must be so before
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=memory):
            drafts = self._follow(tokens, most)
        return graph, tokens, drafts
