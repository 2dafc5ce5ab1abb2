"""The ingress replica: HTTP in, tokens through the router, text out. Puts its parts together and reports on them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.autoscaling.scaling_rules import ScalingRules, scaling_rules
from cluster.autoscaling.scaling_targets import ScalingTargets
from cluster.config.file import config_of
from cluster.config.parts import with_live_part
from cluster.grammars.known_grammars import KnownGrammars
from cluster.http.proxy_protocol import bound_connections
from cluster.http.serve_proxy import proxy_here
from cluster.lifecycle.ingress_drain import IngressDrain
from cluster.lifecycle.readiness import PoolHealth, Readiness, readiness
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.metrics_merge import merge
from cluster.monitoring.otel_tracing import open_tracing
from cluster.monitoring.throughput import ThroughputLog
from cluster.openai.answer_grammar import AnswerGrammars
from cluster.openai.generation_service import GenerationService
from cluster.openai.responses.responses_service import ResponsesService
from cluster.openai.tokenize_service import TokenizeService
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.detached_tasks import start_detached
from cluster.routing.pool_changes import PoolChanges
from cluster.routing.pool_client import ServePool
from cluster.routing.pool_view import able
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, MigrationLimits, RouterLimits
from cluster.same_names import by_names
from cluster.serving.checkpoint_parts import answer_parser, grammar_compiler, load_defaults
from cluster.serving.kept_proxies import keep_proxies
from cluster.serving.serve_address import warn_if_elsewhere
from cluster.text.no_torch import no_torch
from cluster.text.tokenizer import Tokenizer
from cluster.text.work_threads import WorkThreads
from cluster.user_error import ConfigError
from cluster.version import VERSION
from replicas.channels.listening import node_address
from replicas.model.identity_digests import tokenizer_digest

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from cluster.config.serving import ServingConfig, SharedConfig
    from replicas.metrics.metric_set import FamilySnapshot

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 2.0


class Ingress:
    """Serve deployment; `__serve_build_asgi_app__` is Serve's hook for an app that needs the instance."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ServingConfig | Callable[[], ServingConfig], decode: Any, prefill: Any | None = None
    ) -> None:
        """settings: the config but for the pools, or what finds it in this process; of the pools Serve tells it by
        `reconfigure`. decode, prefill: Serve handles of the pools; no prefill handle when colocated. Blocks for
        seconds.
        """
        import ray
        from ray import serve
        from ray.serve._private.common import StreamingHTTPRequest

        from replicas.gguf.conversion import resolve_source
        from replicas.hub_model import refuse_unavailable
        from replicas.serving.termination import Termination
        from replicas.start_step import start_step
        from replicas.structured_log import configure_logging

        began_s = time.monotonic()
        config = settings() if callable(settings) else settings
        configure_logging(config.logging.level, config.logging.format)
        context = serve.get_replica_context()
        self.config = config
        self._replica_id = context.replica_id.unique_id
        self._handles = {"decode": decode} | ({"prefill": prefill} if prefill is not None else {})
        self._handles["ingress"] = serve.get_deployment_handle(context.deployment, context.app_name)
        self.started_at = int(time.time())
        self._termination = Termination(config.lifecycle.drain_timeout_s)
        self._termination.watch()
        keep_proxies(StreamingHTTPRequest)
        self.metrics = IngressMetrics(config.model.name, VERSION, ray.__version__, config.routing.policy)
        self.drain = IngressDrain(self.metrics)
        bound_connections(self.metrics.slow_readers.add)  # of those that it takes itself, behind HAProxy
        self.tracing = open_tracing(config.tracing, config.model.name, self.metrics)
        await asyncio.to_thread(refuse_unavailable, model_source(config))
        folder = await asyncio.to_thread(resolve_source, model_source(config), str(config.model.cache_dir))
        with start_step("loading the tokenizer"):
            tokenizer, digest = await asyncio.to_thread(_load_tokenizer, folder, config.model.trust_remote_code)
        self.sampling_defaults = await asyncio.to_thread(load_defaults, folder, config, tokenizer)
        parser = answer_parser(config, tokenizer)
        self._pools = {name: ServePool(name) for name in ("decode", "prefill") if name in self._handles}
        self._rules = by_names(RoutingRules, config.routing, config.slo, has_prefill_pool=prefill is not None)
        self._router = Router(
            decode=self._pools["decode"],
            prefill=self._pools.get("prefill"),
            rules=self._rules,
            limits=by_names(
                RouterLimits,
                config.ingress,
                config.kv,
                config.lifecycle,
                attempt=by_names(AttemptLimits, config.ingress, config.transfer),
                migration=by_names(MigrationLimits, config.migration),
            ),
            metrics=self.metrics,
            channel_host=channel_host(config),
            tokenizer=digest,
            has_prefix_cache=config.prefix_cache.enabled,
        )
        # Until it is told of the pools.
        self._may_be_empty: list[str] = []
        self._scaling_rules: ScalingRules | None = None
        self._throughput = ThroughputLog(self.metrics.work, lambda: self._router.work_state)
        self._changes = PoolChanges()
        self._targets = ScalingTargets(
            context.app_name, self.metrics, self._router.orders.wanted, lambda: self._router.work_state.num_waiting > 0
        )
        self.threads = WorkThreads()
        self.compiler = grammar_compiler(tokenizer, config)
        grammars = AnswerGrammars(KnownGrammars(self.compiler, self.metrics))
        self.service = GenerationService(
            config, tokenizer, self._router, self.metrics, self.threads, self.sampling_defaults, grammars, parser
        )
        self.responses_service = ResponsesService(self.service, config.limits, self.threads, self.sampling_defaults)
        self.tokenize_service = TokenizeService(config, tokenizer, self.threads)
        await self._start()
        extra = {"event": "replica_ready", "replica": self._replica_id}
        logger.info("ready after %.1f s", time.monotonic() - began_s, extra=extra)

    async def _start(self) -> None:
        from cluster.routing import replica_registry

        if (found := proxy_here(os.environ)) != self.config.server.proxy:
            logger.warning(
                "server.proxy: this Ray was started for another",
                extra={"event": "wrong_proxy", "config": self.config.server.proxy, "ray": found},
            )
        await warn_if_elsewhere(self.config.server)
        await self._router.start()
        start_detached(self.compiler.start())  # so that no request waits for it; what goes wrong is in the log
        if self.config.logging.throughput:
            self._throughput.start()
        loop = asyncio.get_running_loop()

        def changed(deployment: str, table: ReplicaTable) -> None:
            if deployment in self._pools:
                loop.call_soon_threadsafe(self._changes.look, deployment, list(table))
            if deployment == "decode":  # called on Serve's router thread
                loop.call_soon_threadsafe(self._router.pools_changed, table)
            elif deployment == "prefill":
                loop.call_soon_threadsafe(self._router.prefill_changed)

        replica_registry.REGISTRY.listen(changed)
        for name in self._pools:
            # A handle starts to learn of its replicas with its first call.
            await self._broadcast(name, "metrics_snapshot")

    async def reconfigure(self, live: Mapping[str, Any]) -> None:
        """Serve's hook, at the start and whenever that part of the config changes (`cluster.config.parts.live_part`).

        Raises ConfigError at the start. Later a wrong one is logged and changes nothing: raising would end a replica
        that serves.
        """
        values = self.config.model_dump(mode="json", exclude_unset=True)
        try:
            config = config_of(with_live_part(values, live))
        except ConfigError as error:
            if self._scaling_rules is None:
                raise
            logger.error("the new config is wrong", extra={"event": "config_refused", "reason": str(error)})
            return
        self._may_be_empty = [name for name, pool in config.pools.deployed().items() if pool.may_be_empty]
        self._router.let_be_empty(self._may_be_empty)
        self._router.orders.expect({name: pool.expected_start_s for name, pool in config.pools.deployed().items()})
        self._scaling_rules = scaling_rules(config)
        self._targets.follow(config)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from cluster.http.app import build_http_app

        return build_http_app(self, server_sends_request_id=True)

    # -- what the HTTP app asks --------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """Whether requests can be served now, and if not, why."""
        pools = self._router.pools
        health = {
            pool.name: PoolHealth(
                fingerprints=tuple(of["peer"]["fingerprint"] for of in self._router.usable(pool.name).values()),
                num_lost=len(pool.lost),
                num_strangers=len(pool.usable()) - len(self._router.usable(pool.name)),
                can_cold_start=pool.name in self._may_be_empty and not pool.staying(),
                num_able=sum(len(able(self._router.usable(other.name))) for other in pools if other is not pool),
            )
            for pool in pools
        }
        is_draining = self.drain.is_draining or self._termination.is_requested
        slow = self._router.slow_transfers
        return readiness(health, self._rules, is_draining, [*self._router.unlike, *slow.found], slow.slowest)

    async def render_metrics(self) -> bytes:
        """Every replica's series of every pool, Prometheus text. Who does not answer is left out and counted."""
        answers = await asyncio.gather(*(self._broadcast(name, "metrics_snapshot") for name in self._handles))
        snapshots: dict[str, list[FamilySnapshot]] = {}
        for name, results in zip(self._handles, answers, strict=True):
            for result in results:
                if isinstance(result, BaseException):
                    self.metrics.scrape_failures.add(of_pool=name)
                else:
                    snapshots[f"{name}-{result[0]}"] = result[1]
        return await asyncio.to_thread(merge, snapshots)

    def check_health(self) -> None:
        """Serve's hook: raising has this replica drained and replaced."""
        self._termination.check()
        if not self._router.is_healthy:
            raise RuntimeError("the token channel of this ingress is dead")

    async def __del__(self) -> None:
        """Serve's hook for the end, when no request is open any more; Serve awaits it. Sends the last spans."""
        if (compiler := getattr(self, "compiler", None)) is not None:  # it may not have started
            await asyncio.to_thread(compiler.close)
        tracing = getattr(self, "tracing", None)
        if tracing is not None:
            self.tracing = None  # the garbage collector comes too
            await asyncio.to_thread(tracing.stop)

    # -- what other processes ask ------------------------------------------------------------------

    async def metrics_snapshot(self) -> tuple[str, list[FamilySnapshot]]:
        """This replica's id and its metrics, for the ingress that was asked for /metrics."""
        self.metrics.requests_queued.set(self._router.num_waiting)
        return self._replica_id, self.metrics.snapshot()

    async def begin_drain(self) -> int:
        """The whole server is being stopped: take nothing new. Returns how many requests are not over; asked again and
        again until there are none."""
        self.drain.begin()
        return self.drain.num_open

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Hook of Ray Serve, for its controller: the demand here, and the rules by which the autoscaling policy scales.
        Asked every second where anything scales.
        """
        rules = self._scaling_rules.to_stats() if self._scaling_rules is not None else {}
        return self._router.demand.report().to_stats() | rules

    async def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Metadata of every replica by pool, for the start-up lines."""
        return {name: [dict(metadata) for metadata in pool.replicas().values()] for name, pool in self._pools.items()}

    async def _broadcast(self, name: str, method: str) -> list[Any]:
        """Results or exceptions, one per replica."""

        async def call() -> list[Any]:
            response = self._handles[name].broadcast(method)
            results: list[Any] = await response.results_async(timeout_s=_SCRAPE_TIMEOUT_S, return_exceptions=True)
            return results

        try:
            return await asyncio.create_task(call(), context=contextvars.Context())
        except Exception as error:
            return [error]


def channel_host(config: ServingConfig) -> str:
    """The address that decode replicas send tokens to: as configured, or this node's own as Ray knows it."""
    if config.ingress.channel_host != "auto":
        return config.ingress.channel_host
    return node_address()


def model_source(config: SharedConfig) -> str:
    """The path or Hub id behind model.source."""
    path = config.model.local_path()
    return str(path) if path is not None else config.model.source


def _load_tokenizer(folder: str, trust_remote_code: bool) -> tuple[Tokenizer, str]:
    """And its digest. Raises ValueError if files were replaced meanwhile: nobody knows whose digest that would be."""
    with contextlib.nullcontext() if trust_remote_code else no_torch():  # remote code may want torch
        digest = tokenizer_digest(folder)
        tokenizer = Tokenizer(folder, trust_remote_code)
    if tokenizer_digest(folder) != digest:
        raise ValueError(f"the tokenizer's files in {folder} changed while they were read; start again")
    return tokenizer, digest
