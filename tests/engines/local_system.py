"""A whole system in one process, without Ray: real engines, real NIXL, real token channel, the real router.

Only the calls' way is replaced: `LocalPool` hands them to the engine directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.generation import Generation
from cluster.routing.pool_client import PoolClient
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, RouterLimits
from replicas.channels.wire import Decoder, encode
from replicas.messages import (
    ForgetPeerCall,
    GenerateCall,
    MigrateCall,
    PrefillCall,
    Pulse,
    PulseCall,
    ReplayCall,
    ReplayReply,
)
from replicas.recent_part import recent_part
from replicas.serving.engine_builder import BuiltEngine, build_engine
from replicas.settings import EngineSettings, KvSettings, ModelSettings, TransferSettings
from scheduler.beam_search import BeamParams
from scheduler.generation_spec import GenerationSpec
from scheduler.grammar import Grammar
from scheduler.outcome import Ledger
from scheduler.sampling_params import SamplingParams
from scheduler.token_logprobs import PromptLogprobs, TokenLogprobs
from tests.model_folder import CACHE_DIR, model_folder

_METHODS: dict[type, str] = {GenerateCall: "generate", PrefillCall: "prefill", MigrateCall: "migrate"}
GREEDY = SamplingParams(temperature=0.0)


def settings(pool: str, **changes: Any) -> EngineSettings:
    """A small CPU engine of the bundled model."""
    base = EngineSettings(
        pool=pool,
        served_model_name="test",
        model=ModelSettings(model_folder(), str(CACHE_DIR), "float32", 1024, "auto", trust_remote_code=False),
        transfer=TransferSettings(
            "UCX", lease_s=60.0, verify_digest=True, net_devices=None, max_bytes_in_flight=1 << 29
        ),
        device="cpu",
        num_threads=1,
        kv=KvSettings(block_size=16),
        kv_capacity_tokens=4096,
        kv_memory_bytes=None,
        kv_memory_fraction=None,
        max_running_sequences=32,
        max_batch_tokens=512,
        lag=0,
        idle_frame_s=0.1,
    )
    return replace(base, **changes)


class LocalPool(PoolClient):
    """One engine as a pool."""

    def __init__(self, replica_id: str, built: BuiltEngine) -> None:
        self._replica_id = replica_id
        self.built = built

    def replicas(self) -> ReplicaTable:
        extra = {"channel_public_key": self.built.engine.sender.public_key} if self.built.engine.frames else {}
        return {self._replica_id: {**self.built.metadata(), **extra}}

    async def submit(self, replica_id: str, call: Any) -> Any:
        """What is sent and answered passes through its bytes."""
        assert replica_id == self._replica_id
        if isinstance(call, PulseCall):
            keys = recent_part(self.built.recent_keys, call.keys_from)
            return Pulse(self.built.engine.status.load, 0.0, keys)
        if isinstance(call, ReplayCall):
            return ReplayReply(tuple(self.built.engine.sender.replay(call.router_id, call.from_seq)))
        if isinstance(call, ForgetPeerCall):
            return self.built.transfers.forget_peer(call.agent_name)
        method = _METHODS[type(call)]
        sent = Decoder(type(call))(encode(call))
        try:
            reply = await asyncio.wrap_future(getattr(self.built.engine, method)(sent))
        except asyncio.CancelledError:
            self.built.engine.cancel(call.request_id)
            raise
        return Decoder(type(reply))(encode(reply))


@dataclass
class Generated:
    """Tokens, their log-probabilities and the finish reason of each choice; log-probabilities of the prompt."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompts: list[PromptLogprobs] = field(default_factory=list)


class LocalSystem:
    """Build once per module, use from one event loop at a time through `run`."""

    def __init__(self, decode: EngineSettings, prefill: EngineSettings | None) -> None:
        self.decode = build_engine(decode, "decode-0")
        self.prefill = build_engine(prefill, "prefill-0") if prefill else None
        self.engines: list[BuiltEngine] = [self.decode] + ([self.prefill] if self.prefill else [])
        for built in self.engines:
            built.start()
        self.metrics = IngressMetrics("test", "test", "test")
        self._num_generations = 0

    def close(self) -> None:
        for built in self.engines:
            built.stop()

    async def start_router(self, **limits: Any) -> Router:
        """A new router on the running loop."""
        decode = LocalPool("decode-0", self.decode)
        prefill = LocalPool("prefill-0", self.prefill) if self.prefill else None
        attempt = AttemptLimits(limits.pop("queue_s", 300.0), limits.pop("handoff_s", 60.0))
        values = {"max_queued_requests": 1000, "max_retries": 2, "block_size": 16, **limits}
        router = Router(
            decode=decode,
            prefill=prefill,
            rules=RoutingRules(prefill is not None, local_prefill_max_tokens=0, fallback_to_decode=False),
            limits=RouterLimits(attempt=attempt, **values),
            metrics=self.metrics,
            channel_host="127.0.0.1",
            has_prefix_cache=self.decode.settings.has_prefix_cache,
        )
        await router.start()
        router.pools_changed(decode.replicas())
        return router

    def generation(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        num_choices: int = 1,
        stop_token_ids: frozenset[int] = frozenset(),
        timeout_s: float = 300.0,
        beam: BeamParams | None = None,
        grammar: Grammar | None = None,
    ) -> Generation:
        """beam: search with it, for the num_choices best texts; sampling does not matter then."""
        self._num_generations += 1
        name = f"generation-{self._num_generations}"
        choices = tuple(range(num_choices if beam is None else beam.width))
        spec = GenerationSpec(
            tuple(prompt_ids),
            choices,
            max_tokens,
            stop_token_ids,
            sampling if beam is None else beam.sampling(len(stop_token_ids)),
            beam=beam,
            num_returned=0 if beam is None else num_choices,
            grammar=grammar,
        )
        return Generation(name, spec, timeout_s)

    def run(self, generations: Sequence[Generation], **limits: Any) -> list[Generated]:
        """Run generations side by side, each to its end. Blocks."""

        async def all_of_them() -> list[Generated]:
            router = await self.start_router(**limits)
            try:
                return await asyncio.gather(*(collect(router, generation) for generation in generations))
            finally:
                await router.stop()

        return asyncio.run(all_of_them())

    def ledgers(self) -> list[Ledger]:
        return [built.engine.scheduler.ledger() for built in self.engines]

    async def wait_for_baseline(self, timeout_s: float = 120.0) -> None:
        """Return as soon as nothing is held anywhere; fail the test when that takes longer."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            ledgers = self.ledgers()
            transfers = [built.transfers.snapshot() for built in self.engines]
            held = [
                ledger for ledger in ledgers if ledger.blocks.unowned != ledger.blocks.total or ledger.promised_blocks
            ]
            open_transfers = [t for t in transfers if t.leases_open or t.reads_expected or t.reads_in_flight]
            if not held and not open_transfers:
                return
            assert asyncio.get_running_loop().time() < deadline, (ledgers, transfers)
            await asyncio.sleep(0.01)


async def collect(router: Router, generation: Generation) -> Generated:
    generated = Generated()
    async for batch in router.generate(generation):
        for item in batch:
            if isinstance(item, PromptLogprobs):
                assert not generated.token_ids, "the prompt's log-probabilities come before any token"
                generated.prompts.append(item)
                continue
            generated.logprobs.setdefault(item.choice, []).append(item.logprobs)
            generated.token_ids.setdefault(item.choice, []).append(item.token_id)
            if item.finish_reason is not None:
                generated.finish_reasons[item.choice] = item.finish_reason.value
    return generated


def touch(fault_dir: Path, name: str) -> None:
    (fault_dir / name).touch()
