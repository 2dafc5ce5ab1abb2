"""A card's runner of which nothing but steps of rows are graphs, to be captured anew as often as one likes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.cuda.graphs import StepGraphs
from replicas.cuda.runner import CudaRunner


class StepsRunner(CudaRunner):
    """After `compile_layers`; without `warm_up`."""

    @torch.inference_mode()
    def capture_steps(self, batches: Sequence[int]) -> None:
        """Graphs of so many rows each, in place of those that there are. Blocks. Mutates no tokens and no KV."""
        self._graphs = StepGraphs(self._model, self._slots, self._sharing, sorted(batches), [])
        self._graphs.capture()
        torch.cuda.synchronize()
