"""The prefill lane on a card: prompts' steps on a part of its multiprocessors, beside whatever the decode lane runs.

Weights, pool and slots are the other lane's, the modules a twin of its. What must not be shared with steps that run at
the same time is apart: the graphs' memory, the counts of split products, and streams.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from replicas.cuda.card_drafts import CardDrafting, CardDrafts
from replicas.cuda.cublas_lt import CublasLt, NoCublasLt
from replicas.cuda.graph_passes import PromptShape
from replicas.cuda.graph_shapes import lone_prompt_shapes
from replicas.cuda.graphs import StepGraphs
from replicas.cuda.green_contexts import GreenContexts, NoGreenContexts
from replicas.cuda.part_products import PartProducts
from replicas.cuda.runner import CudaRunner
from replicas.cuda.share_times import MeasuredPlans, times_of_shares
from replicas.cuda.skinny_linear import count_apart
from replicas.cuda.slots import CudaSlots
from replicas.kernels.work_sharing import WorkSharing
from replicas.kv.host_pool import HostPool
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ForwardHandle, NotDivisible, StepHandle
from replicas.model.shared_weights import twin_of
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.lane_measurement import AbsurdTimes, measured_by
from scheduler.lane_split import WHOLE_CARD, LaneShare, estimated_shares
from scheduler.plan import StepPlan

logger = logging.getLogger(__name__)


class LaneOrder:
    """The steps of a lane run one behind the other, whichever stream each is launched on."""

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def next_on(self, stream: torch.cuda.Stream) -> None:
        """What is launched there from now on waits for what the lane launched before. Does not block. Mutates."""
        if self._last is not None and self._last is not stream:
            stream.wait_stream(self._last)
        self._last = stream


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What the runners of both lanes have in common. sharing: of rows, which the prefill lane has none of."""

    loaded: LoadedModel
    pool: KvPool
    host_pool: HostPool
    slots: CudaSlots
    max_model_len: int
    has_fresh: bool
    sharing: WorkSharing
    drafts: CardDrafts | None


class LaneRunner(CudaRunner):
    """Prompts, by one share of a card. Prefill lane's thread only, once it is warm."""

    def __init__(
        self, parts: LaneParts, model: Any, stream: torch.cuda.Stream, order: LaneOrder, products: PartProducts
    ) -> None:
        """parts: the decode lane's. model: a twin of its. stream: one that keeps to its part of the card; products: of
        that part."""
        # Not the base's: nothing is allocated, and the model is bound already.
        self._model, self._loaded = model, parts.loaded
        self.pool, self.host_pool, self._slots = parts.pool, parts.host_pool, parts.slots
        self._max_model_len, self._has_fresh, self._sharing = parts.max_model_len, parts.has_fresh, parts.sharing
        self._graphs, self._fed, self._drafts = None, None, parts.drafts
        self.stream, self._order = stream, order
        self._products = products

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        with self._on_stream():
            return super().launch(plan)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardHandle:
        with self._on_stream():
            return super().forward(plan)

    @torch.inference_mode()
    def choose(self, forwarded: ForwardHandle, masks: TokenMasks | None = None) -> StepHandle:
        with self._on_stream():
            return super().choose(forwarded, masks)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        with self._on_stream():
            logits = super().logits(plan)
            self.stream.synchronize()  # whoever reads it does so on another one
        return logits

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """What is launched within it runs behind what the lane launched before."""
        with torch.cuda.stream(self.stream), self._products.used():
            self._order.next_on(self.stream)
            yield

    def capture(self, memory: Any) -> int:
        """Its graphs, in the memory of the lane's others; how many. Blocks. As `CudaRunner.warm_up` otherwise."""
        shapes = lone_prompt_shapes(self._max_model_len, has_fresh=self._has_fresh)
        self._graphs = StepGraphs(
            self._model, self._slots, self._sharing, (), shapes, memory=memory, stream=self.stream
        )
        with self._products.used(is_choosing=True):
            return self._graphs.capture()


class DividedRunner(CudaRunner):
    """The decode lane's runner, on the whole card, and those of the prefill lane beside it.

    Rows need no share of their own: what prompts leave alone is free for them, and of the rest they get what is idle.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        num_slots: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        *,
        drafting: CardDrafting | None = None,
    ) -> None:
        """As CudaRunner's. Raises NotDivisible, before anything is changed."""
        streams = lane_streams(pool.tensor.device)
        super().__init__(loaded, pool, num_slots, max_model_len, num_host_blocks, drafting=drafting)
        self.shares = tuple(share for share in streams if share is not WHOLE_CARD)
        model, order = twin_of(self._model), LaneOrder()
        count_apart(model)
        parts = LaneParts(
            loaded, pool, self.host_pool, self._slots, max_model_len, self._has_fresh, self._sharing, self._drafts
        )
        products = products_of(tuple(streams))
        self._beside = {
            share: LaneRunner(parts, model, stream, order, products[share]) for share, stream in streams.items()
        }

    def beside(self, share: LaneShare) -> LaneRunner:
        return self._beside[share]

    @torch.inference_mode()
    def warm_up(self) -> bool:
        super().warm_up()
        started_s = time.monotonic()
        self._beside[WHOLE_CARD].compile_layers()
        memory = torch.cuda.graph_pool_handle()
        num_graphs = sum(runner.capture(memory) for runner in self._beside.values())
        torch.cuda.synchronize()
        extra = {"event": "lanes_ready", "graphs": num_graphs, "capture_s": round(time.monotonic() - started_s, 1)}
        logger.info("a lane for prompts beside the one for rows", extra=extra)
        self._measure_shares()
        return True

    def _measure_shares(self) -> None:
        """Takes the shares' rates from a short run of both lanes; keeps the estimates where that tells nothing."""
        started_s = time.monotonic()
        extra: dict[str, Any] = {"event": "lane_shares"}
        try:
            plans = MeasuredPlans(
                self.num_slots, self.pool.num_blocks, self.pool.layout.block_size, self._max_model_len
            )
            alone, beside = times_of_shares(self, dict(self._beside), plans)
            measured = dict(zip(beside, measured_by(alone, beside), strict=True))
        except AbsurdTimes as error:
            extra |= {"shares": [_told(share) for share in self.shares], "reason": str(error)}
            logger.warning("the card's division keeps its estimated rates: %s", error, extra=extra)
            return
        self._beside = {measured.get(share, share): lane for share, lane in self._beside.items()}
        self.shares = tuple(measured.values())
        extra |= {
            "shares": [_told(share) for share in self.shares],
            "prompts_ms": round(1e3 * alone.prompts_s, 2),
            "rows_ms": round(1e3 * alone.rows_s, 2),
            "measured_in_s": round(time.monotonic() - started_s, 1),
        }
        logger.info("both lanes' rates beside each other are measured", extra=extra)

    def _prompt_shapes(self) -> list[PromptShape]:
        return []


def lane_streams(device: torch.device) -> dict[LaneShare, torch.cuda.Stream]:
    """One for each share of the card, and for all of it. Raises NotDivisible."""
    try:
        contexts = GreenContexts(device)
        shares = estimated_shares(contexts.num_processors)
        streams = {share: contexts.stream(share.num_processors or 0) for share in shares}
    except NoGreenContexts as error:
        raise NotDivisible(str(error)) from error
    if not streams:
        raise NotDivisible(f"{contexts.num_processors} multiprocessors are too few")
    return streams | {WHOLE_CARD: torch.cuda.Stream(device)}


def products_of(shares: Sequence[LaneShare]) -> dict[LaneShare, PartProducts]:
    """Of prompts. Their ways are chosen on the largest part only: on 68 of 132 multiprocessors ways that were 8 %
    faster alone left prompts as fast beside rows as torch's (0.48) and rows slower (0.65 of their rate, not 0.69).
    """
    library, largest = _cublas_lt(), max(share.num_processors or 0 for share in shares)
    return {share: PartProducts(largest if share.num_processors == largest else None, library) for share in shares}


def _cublas_lt() -> CublasLt | None:
    try:
        return CublasLt()
    except NoCublasLt as error:
        extra = {"event": "no_cublas_lt", "reason": str(error)}
        logger.warning("prompts beside rows take longer: their products are as for the whole card", extra=extra)
        return None


def _told(share: LaneShare) -> dict[str, float | None]:
    """For a log."""
    return {
        "processors": share.num_processors,
        "prefill_rate": round(share.prefill_rate, 3),
        "decode_rate": round(share.decode_rate, 3),
    }
