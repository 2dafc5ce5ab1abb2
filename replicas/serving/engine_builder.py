"""Puts an engine together from its settings: weights, pool, self-check, warm-up, transfer thread, channel."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from replicas.channels.token_sender import TokenSender
from replicas.engine.constrained_rows import Grammars
from replicas.engine.engine import Engine
from replicas.engine.engine_parts import EngineParts
from replicas.engine.engine_watch import Watched
from replicas.engine.step_recorder import StepRecorder
from replicas.engine.token_frames import TokenFrames
from replicas.engine.two_lane_engine import TwoLaneEngine
from replicas.fault_points import FaultPoints
from replicas.kv.block_digests import DigestBlocks
from replicas.kv.handoff_actions import Event, HandoffTiming
from replicas.kv.kv_digest import BlockDigester
from replicas.kv.kv_pool import KvLayout, KvPool
from replicas.kv.kv_transport import KvTransport
from replicas.kv.slowed_transport import SlowedTransport
from replicas.kv.transfer_thread import TransferThread
from replicas.kv.transport_opener import transport_opener
from replicas.messages import TransferPeer
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.metrics.metric_set import FamilySnapshot
from replicas.metrics.pool_metrics import ModelNumbers, PoolMetrics
from replicas.model.layer_check import check_layers
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner, NotDivisible
from replicas.model.self_check import self_check
from replicas.model_support import naming_failures
from replicas.pool_size import keeps_prefixes_on_host, num_host_blocks
from replicas.serving.device_runner import make_runner, speculation_of
from replicas.serving.drafting import Drafting
from replicas.serving.grammars_opening import GrammarsOpening
from replicas.serving.kv_pool_size import limits_of, log_numbers
from replicas.settings import EngineSettings
from replicas.speculation.draft_model_counts import DraftModelCounts
from replicas.start_step import start_step
from scheduler.capabilities import BOTH, DECODE, PREFILL
from scheduler.prefix_book import PrefixOptions
from scheduler.recent_keys import RecentKeys
from scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# A step on a slow CPU may take many seconds; a loop that is silent for longer hangs.
_MAX_SILENCE_S = 120.0


class UnhealthyEngine(Exception):
    """Ray Serve replaces the replica."""


@dataclass(slots=True)
class BuiltEngine:
    """An engine and what belongs to it, ready to start."""

    engine: Engine
    transfers: TransferThread
    peer: TransferPeer
    settings: EngineSettings
    layout: KvLayout
    metrics: EngineMetrics
    grammars: Grammars | None
    recent_keys: RecentKeys | None = None  # of its prefix cache; None: it has none
    draft_model: DraftModelCounts | None = None  # what came of it; None: there is none

    def start(self) -> None:
        self.engine.start()

    @property
    def is_drained(self) -> bool:
        """Whether nobody waits for anything of it: no request, no reader of a lease, no frame to be sent."""
        transfers = self.transfers.snapshot()
        return self.engine.is_idle and not (transfers.leases_open or transfers.reads_in_flight)

    def watched(self) -> dict[str, Watched]:
        """Its threads, for a watch."""
        return {
            **self.engine.watched(),
            "kv-transfer": Watched(self.transfers.thread, lambda: self.transfers.last_poll_s),
        }

    def stop(self) -> None:
        """End the engine, then its transfers: a read in flight still writes into the pool. Blocks for seconds."""
        self.engine.stop()
        if self.grammars is not None:
            self.grammars.cache.close()
        self.transfers.stop()

    def metadata(self) -> dict[str, Any]:
        """Plain data for the router and the start-up lines."""
        limits, scheduler = self.engine.scheduler.limits, self.engine.scheduler
        return {
            "peer": self.peer.to_metadata(),
            "num_blocks": self.peer.num_blocks - limits.num_reserved_blocks,
            "pool": self.settings.pool,
            "may_also": self.settings.may_also,
            "num_prefix_blocks": scheduler.num_prefix_blocks,
            "step_tokens": limits.max_step_tokens,
            "max_sequences": limits.max_sequences - scheduler.capabilities.num_reserved_slots,
            "block_size": self.layout.block_size,
            "kv_bytes_per_token": self.layout.bytes_per_token,
        }

    def metrics_snapshot(self) -> list[FamilySnapshot]:
        scheduler = self.engine.scheduler
        batch = scheduler.batch if scheduler.capabilities.decodes else None
        if batch is not None:
            preemption = scheduler.preemption
            self.metrics.preempted(preemption.num_swapped, preemption.num_evicted, preemption.num_host_blocks_used)
        if scheduler.drafts is not None:
            self.metrics.drafted(scheduler.drafts.counts)
        self.metrics.drafters_failed(self.engine.runner.num_failed_drafters)
        if self.draft_model is not None:
            self.metrics.undrafted(self.draft_model.undrafted)
        if scheduler.prefixes is not None:
            stats, tier = scheduler.prefixes.stats(), scheduler.host_tier
            self.metrics.prefixes_looked_up(stats if tier is None else tier.counted(stats))
            if tier is not None:
                self.metrics.prefixes_on_host(tier.num_saved_blocks, scheduler.host.num_cached)
        if self.grammars is not None:
            looked_up = self.grammars.cache.counts
            self.metrics.grammars_looked_up(looked_up.hits, looked_up.misses, looked_up.worn_out)
        return self.metrics.snapshot(
            self.engine.status,
            self.engine.steps,
            self.transfers.snapshot(),
            forwarded=batch.num_forwarded_tokens if batch else 0,
            surplus=batch.num_surplus_tokens if batch else 0,
        )

    def check_health(self) -> None:
        """Raises UnhealthyEngine when the engine's or the transfers' thread is dead or stuck."""
        if not self.engine.is_healthy(_MAX_SILENCE_S):
            raise UnhealthyEngine(f"{self.settings.pool} engine: its loop is dead, stuck or failing")
        if not self.transfers.is_alive():
            raise UnhealthyEngine(f"{self.settings.pool} engine: its transfer thread is dead")
        if time.monotonic() - self.transfers.last_poll_s > _MAX_SILENCE_S:
            raise UnhealthyEngine(f"{self.settings.pool} engine: its transfer thread is stuck")


def build_engine(settings: EngineSettings, replica_id: str) -> BuiltEngine:
    """For settings.pool. Blocks for seconds to minutes; logs progress. Raises as model_loader and model_runner do."""
    base = _Base(settings, replica_id)
    capabilities = BOTH if settings.may_also else PREFILL if settings.pool == "prefill" else DECODE
    frames = None
    if capabilities.decodes:
        sender = TokenSender(replica_id, base.epoch, stall_deadline_s=settings.channel_stall_s)
        frames = TokenFrames(sender, settings.idle_frame_s)
    prefixes = recent_keys = None
    if settings.has_prefix_cache:
        recent_keys = RecentKeys(base.epoch)
        uses_host = keeps_prefixes_on_host(settings.pool, settings.layout)
        prefixes = PrefixOptions(base.fingerprint, on_piece=recent_keys.append, uses_host=uses_host)
    has_drafts = base.drafting is not None and capabilities.decodes
    speculation = speculation_of(base.runner, settings.speculative.max_drafts) if has_drafts else None
    scheduler = Scheduler(
        base.limits, capabilities, settings.admission, settings.lag, base.num_host_blocks, base.has_two_lanes,
        prefixes, speculation,
    )  # fmt: skip
    kind = TwoLaneEngine if base.has_two_lanes else Engine
    engine = kind(settings.pool, base.engine_parts(scheduler), frames)
    engine.transfers = base.transfer_thread(engine.on_transfer_event)
    drafting = base.drafting
    counts = None if drafting is None or drafting.draft is None else drafting.counts
    return replace(base.built(engine), recent_keys=recent_keys, draft_model=counts)


class _Base:
    """What an engine is built on. Making it loads the model."""

    def __init__(self, settings: EngineSettings, replica_id: str) -> None:
        self.settings = settings
        self.replica_id = replica_id
        self.epoch = uuid.uuid4().hex[:12]
        # Imported here, on this thread and before anything takes long.
        self._open_transport = transport_opener(settings.transfer.backend)
        torch.set_num_threads(settings.num_threads)
        device = torch.device(settings.device)
        with start_step("loading weights"):
            loaded = load_model(settings.model, device, settings.kv.dtype)
        if settings.model.max_model_len > loaded.max_positions:
            raise ValueError(
                f"model.max_model_len is {settings.model.max_model_len}; the model has {loaded.max_positions} positions"
            )
        logger.info("weights loaded", extra={"event": "weights_loaded", "identity": str(loaded.identity)})
        opening = GrammarsOpening(settings.model, settings.structured_outputs, settings.device, loaded.vocab_size)
        self.layout = loaded.kv_layout(settings.kv.block_size, settings.kv.dtype)
        log_numbers(self.layout, loaded)
        self.drafting = Drafting.by(settings, loaded, device)
        if self.drafting is not None:
            self.layout = self.drafting.widened(self.layout)
        self.limits = limits_of(settings, self.layout, 0 if self.drafting is None else self.drafting.block_bytes)
        num_blocks = self.limits.num_blocks
        with start_step(f"allocating the KV pool of {num_blocks * settings.kv.block_size:,} tokens"):
            self.pool = KvPool(self.layout, num_blocks, device)
        self.num_host_blocks = (
            num_host_blocks(settings.host_memory_bytes, settings.admission, self.layout.block_bytes, num_blocks)
            if settings.pool == "decode" or settings.has_prefix_cache
            else 0
        )
        with naming_failures(type(loaded.model).__name__, "preparing it for this device"):
            self.runner, self.has_two_lanes = self._make_runner(loaded)
        with start_step("self-check"), naming_failures(type(loaded.model).__name__, "its self-check"):
            check_layers(loaded.model, loaded.dtype)
            self_check(self.runner, loaded)
        with start_step("warm-up"), naming_failures(type(loaded.model).__name__, "its warm-up"):
            if self.runner.warm_up():
                for runner in (self.runner, *[self.runner.beside(share) for share in self.runner.shares]):
                    self_check(runner, loaded)
        self.pool.tensor.zero_()
        self.fingerprint = str(loaded.identity_with(self.layout))
        self.faults = FaultPoints(settings.testing.fault_dir, self.pool.tensor)
        self.metrics = EngineMetrics(
            PoolMetrics(
                settings.served_model_name,
                settings.pool,
                settings.version,
                settings.ray_version,
                engine=settings.device,
                backend=settings.transfer.backend.lower(),
                numbers=_numbers(self.layout, loaded),
            )
        )

        self.grammars = opening.result(self.metrics.grammar_compiled)

    def _make_runner(self, loaded: LoadedModel) -> tuple[ModelRunner, bool]:
        """And whether there are two lanes: where they are asked for and the device can have them."""
        settings, drafting = self.settings, self.drafting
        make = partial(
            make_runner,
            loaded, self.pool, settings.max_running_sequences, settings.model.max_model_len, self.num_host_blocks,
            **({} if drafting is None else drafting.of_runner(self.pool, make_runner)),
        )  # fmt: skip
        if settings.layout != "two_lanes" or settings.pool != "decode":
            return make(), False
        try:
            return make(has_two_lanes=True), True
        except NotDivisible as error:
            extra = {"event": "one_lane", "reason": str(error)}
            logger.warning("no second lane here: prompts are computed in the steps of rows (%s)", error, extra=extra)
            return make(), False

    def engine_parts(self, scheduler: Scheduler) -> EngineParts:
        settings = self.settings
        recorder = StepRecorder(settings.testing.step_record_dir, settings.pool)
        return EngineParts(
            scheduler, self.runner, self.faults, self.metrics, settings.num_threads, recorder, settings.lanes,
            self.grammars,
        )  # fmt: skip

    def block_digests(self) -> DigestBlocks:
        """Of this engine's blocks, for one thread at a time; another thread asks for its own. Allocates.

        Of blocks that a committed step has written, or a read that has ended: no step in flight is waited for.
        """
        digester = BlockDigester.for_pool(self.pool.tensor, is_beside_steps=True)
        return partial(digester.digest_blocks, self.pool.tensor)

    def transfer_thread(self, on_event: Callable[[Event], None]) -> TransferThread:
        settings, pool = self.settings.transfer, self.pool.tensor
        faults = self.faults if self.settings.testing.fault_dir else None

        def open_transport() -> KvTransport:
            transport = self._open_transport(pool, self.replica_id, self.epoch, self.fingerprint, settings)
            return transport if faults is None else SlowedTransport(transport, faults.slow_reads_bytes_per_s)

        return TransferThread(
            open_transport,
            on_event,
            replace(HandoffTiming(), lease_s=settings.lease_s),
            settings.max_bytes_in_flight,
            digest_blocks=self.block_digests() if settings.verify_digest else None,
            faults=faults,
        )

    def built(self, engine: Engine) -> BuiltEngine:
        peer = engine.transfers.start()
        return BuiltEngine(engine, engine.transfers, peer, self.settings, self.layout, self.metrics, self.grammars)


def _numbers(layout: KvLayout, loaded: LoadedModel) -> ModelNumbers:
    names = [str(dtype).removeprefix("torch.") for dtype in (loaded.dtype, layout.dtype)]
    return ModelNumbers(names[0], loaded.scheme.describe() if loaded.scheme else "none", names[1])
