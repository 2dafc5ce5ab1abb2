"""The model runner of a CPU with an EAGLE-3 head, which follows each of its steps, in front of prompts too."""

from __future__ import annotations

from dataclasses import replace

import torch

from replicas.kv.host_pool import MovedBlocks
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ForwardHandle, StepHandle
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.speculation.drafting_runner import DraftingRunner
from replicas.speculation.eagle3 import Eagle3Drafter, LayerInputs
from replicas.speculation.eagle3_head import Eagle3Head
from scheduler.plan import StepPlan


class Eagle3Runner(DraftingRunner):
    """As its base. One thread. A head that fails is asked no more; texts go on."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        num_slots: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        *,
        head: Eagle3Head,
    ) -> None:
        """pool: with a layer for the head behind the model's. Raises UnsupportedModel for a model that no head can look
        into."""
        super().__init__(
            loaded, pool, num_slots, max_model_len, num_host_blocks,
            make_drafter=lambda _: Eagle3Drafter(head, pool, self._slots, loaded.vocab_size),
        )  # fmt: skip
        self._looking = LayerInputs(loaded.model, loaded.num_layers, head.config.layer_ids)

    def _prepare(self, plan: StepPlan) -> MovedBlocks | None:
        moved = super()._prepare(plan)
        if isinstance(self._drafter, Eagle3Drafter):
            for init in plan.slot_inits:
                self._drafter.expect(init)
        return moved

    def _run(self, plan: StepPlan) -> ForwardHandle:
        if plan.is_empty or self._drafter is None:
            return super()._run(plan)
        with self._looking.kept() as by_layer:
            forwarded = super()._run(plan)
        return replace(forwarded, states=self._looking.joined(by_layer))

    @torch.inference_mode()
    def choose(self, forwarded: ForwardHandle, masks: TokenMasks | None = None) -> StepHandle:
        handle = super().choose(forwarded, masks)
        if forwarded.states is not None and isinstance(self._drafter, Eagle3Drafter):
            try:
                self._drafter.follow(forwarded.plan, forwarded.states, handle.read_tokens())
            except Exception as error:
                self._give_up(error)
        return handle
