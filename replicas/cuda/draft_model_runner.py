"""The runner of a draft model on a card: prompts as any runner's, by a few graphs; its drafts are made by loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replicas.cuda.graph_passes import PassModel, PromptShape
from replicas.cuda.graphs import StepGraphs
from replicas.cuda.runner import CudaRunner
from replicas.kernels.work_sharing import WorkSharing
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.start_step import start_step
from scheduler.plan import BlockCopy, SlotInit, StepPlan, TableWrite

# Of chunks of prompts, as drafters read them.
_CHUNKS = (64, 256)


class DraftModelRunner(CudaRunner):
    """Rows it has none but in checks. Engine thread only, once it is warm."""

    def __init__(self, loaded: LoadedModel, pool: KvPool, num_slots: int, max_model_len: int) -> None:
        super().__init__(loaded, pool, num_slots, max_model_len)
        num_processors = torch.cuda.get_device_properties(pool.tensor.device).multi_processor_count
        self._sharing = WorkSharing.of(
            pool.layout.num_kv_heads, pool.layout.head_dim, loaded.dtype, num_processors, num_slots, num_slots
        )

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """As the base's."""
        with start_step("compiling the draft model's layers"):
            self.compile_layers()
        self._graphs = StepGraphs(self._model, self._slots, self._sharing, (), self._prompt_shapes())
        self._graphs.capture()
        torch.cuda.synchronize()
        return True

    def _prompt_shapes(self) -> list[PromptShape]:
        return [PromptShape(0, length, is_fresh=False) for length in _CHUNKS]

    @property
    def vocab_size(self) -> int:
        return self._loaded.vocab_size

    @property
    def pass_model(self) -> PassModel:
        """What further passes compute with."""
        model: Any = self._model
        return PassModel(model, self._slots, self._sharing)

    @torch.inference_mode()
    def take(
        self, inits: Sequence[SlotInit], writes: Sequence[TableWrite], copies: Sequence[BlockCopy]
    ) -> None:  # fmt: skip
        """As of a plan that computes nothing. Mutates slots and pool. Does not wait."""
        if inits or writes:
            self._slots.apply(StepPlan(0, tuple(inits), tuple(writes), (), ()))
        for copy in copies:
            self.pool.copy_block(copy.source, copy.destination)
