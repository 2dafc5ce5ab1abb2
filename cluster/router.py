"""Runs a generation: picks replicas, runs attempts, retries what failed, yields tokens in order, each once.

Nothing of it is visible to the client but the tokens and, at the end, one error if there is no other way.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from cluster.api_error import ApiError
from cluster.attempt import Attempt, AttemptFailed, AttemptLimits, Stage, retrieve
from cluster.attempt_mailboxes import Mailboxes
from cluster.generation import ChoiceState, GeneratedToken, GenerationSpec, Leg
from cluster.ingress_metrics import IngressMetrics
from cluster.pool_client import PoolClient, ReplicaLost
from cluster.pool_view import PoolView
from cluster.replica_registry import ReplicaTable
from cluster.routing_policy import Need, NeverFits, Route, RoutingRules, Unavailable, choose_route
from replicas.messages import CallStatus, Frame
from replicas.token_receiver import TokenReceiver
from scheduler.memory_budget import blocks_for_generation, num_blocks_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """From the config. retry_delay_s doubles with each retry."""

    max_queued: int
    max_retries: int
    block_size: int
    attempt: AttemptLimits
    retry_delay_s: float = 0.05


class Router:
    """One per ingress replica, on its event loop."""

    def __init__(
        self,
        *,
        decode: PoolClient,
        prefill: PoolClient | None,
        rules: RoutingRules,
        limits: RouterLimits,
        metrics: IngressMetrics,
        channel_host: str,
    ) -> None:
        self._decode, self._prefill = decode, prefill
        self._rules, self._limits, self._metrics = rules, limits, metrics
        self._view = PoolView(decode.replicas, prefill.replicas if prefill else dict)
        self._mailboxes = Mailboxes()
        self._num_waiting = 0
        self._background: set[asyncio.Task[None]] = set()
        self.router_id = f"router-{uuid.uuid4().hex[:12]}"
        self._receiver = TokenReceiver(self.router_id, channel_host, self._on_frame, self._on_gap)

    async def start(self) -> None:
        """Bind the token channel. Before any generation."""
        await self._receiver.start()

    async def stop(self) -> None:
        """Close the token channel. After the last generation."""
        await self._receiver.stop()

    def pools_changed(self, decodes: ReplicaTable) -> None:
        """Only decode replicas that are there now may send frames. On the router's event loop."""
        for metadata in decodes.values():
            self._receiver.allow(metadata["channel_public_key"])

    @property
    def num_in_flight(self) -> int:
        return len(self._mailboxes)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    async def generate(self, spec: GenerationSpec) -> AsyncGenerator[GeneratedToken, None]:
        """Tokens of all choices as they come, in order within each choice. Raises ApiError.

        Closing the iterator (or cancelling its consumer) ends all work for it, at once, everywhere.
        """
        deadline_s = time.monotonic() + spec.timeout_s
        output: asyncio.Queue[GeneratedToken | None] = asyncio.Queue()
        leg = Leg(spec, {choice: ChoiceState() for choice in range(spec.num_choices)}, output)
        # Decided before anything is awaited, so that a refusal costs nobody anything.
        self._check_room(leg)
        run = asyncio.create_task(self._run_leg(leg, deadline_s), context=contextvars.Context())
        run.add_done_callback(lambda _: output.put_nowait(None))
        try:
            while (token := await output.get()) is not None:
                yield token
            await run  # its error, if it has one
        finally:
            run.cancel()
            await asyncio.wait({run})
            retrieve(run)

    # -- one leg, over its attempts ----------------------------------------------------------------

    async def _run_leg(self, leg: Leg, deadline_s: float) -> None:
        excluded: set[str] = set()
        for attempt in range(self._limits.max_retries + 1):
            route, need = self._route(leg, excluded)
            try:
                await self._run_attempt(leg, route, need, deadline_s)
                return
            except AttemptFailed as failure:
                self._log_failure(leg, route, failure, attempt)
                if not failure.may_retry or attempt == self._limits.max_retries or time.monotonic() > deadline_s:
                    raise _api_error(failure) from failure
                excluded |= {route.decode_id, route.prefill_id or route.decode_id}
                self._metrics.retried(failure.stage)
            await asyncio.sleep(self._limits.retry_delay_s * 2**attempt)
            legs = leg.split()
            if len(legs) > 1:
                await self._run_apart(legs, deadline_s)
                return
            leg = legs[0]

    async def _run_apart(self, legs: list[Leg], deadline_s: float) -> None:
        """Choices that have parted go on each by itself; the first error ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                for leg in legs:
                    group.create_task(self._run_leg(leg, deadline_s))
        except* ApiError as errors:
            raise errors.exceptions[0] from None

    async def _run_attempt(self, leg: Leg, route: Route, need: Need, deadline_s: float) -> None:
        timeout_s = max(0.0, deadline_s - time.monotonic())
        request = leg.request(uuid.uuid4().hex, timeout_s)
        attempt = Attempt(
            leg,
            request,
            route,
            need,
            decode=self._decode,
            prefill=self._prefill,
            view=self._view,
            mailboxes=self._mailboxes,
            channel=self._receiver.address,
            limits=self._limits.attempt,
            on_left_queue=lambda: self._wait_over(route),
        )
        self._metrics.routed(route.kind)
        self._num_waiting += route.must_wait
        try:
            await asyncio.wait_for(attempt.run(), timeout_s)
        except TimeoutError:
            raise AttemptFailed(Stage.DECODE, CallStatus.TIMEOUT, "the request's time is up", False) from None

    def _wait_over(self, route: Route) -> None:
        self._num_waiting -= route.must_wait

    # -- decisions ---------------------------------------------------------------------------------

    def _check_room(self, leg: Leg) -> None:
        route, _ = self._route(leg, set())
        if route.must_wait and self._num_waiting >= self._limits.max_queued:
            self._metrics.rejected("queue_full")
            raise ApiError(
                429,
                f"{self._num_waiting} requests are waiting for KV memory, the most allowed; try again later",
                type="rate_limit_error",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )

    def _route(self, leg: Leg, excluded: set[str]) -> tuple[Route, Need]:
        request = leg.request("", 0.0)
        prompt_len, block_size = len(request.prompt_ids), self._limits.block_size
        need = Need(
            decode_blocks=blocks_for_generation(prompt_len, request.max_tokens, len(request.choices), block_size),
            prefill_blocks=num_blocks_for(prompt_len, block_size),
            prompt_tokens=prompt_len,
        )
        decided = choose_route(
            need, self._view.decode_candidates(), self._view.prefill_candidates(), self._rules, excluded
        )
        match decided:
            case Route():
                return decided, need
            case NeverFits(pool, needed, largest):
                self._metrics.rejected("too_long")
                raise ApiError(
                    400,
                    f"this request needs {needed * block_size} tokens of KV memory ({prompt_len} prompt tokens, "
                    f"max_tokens {request.max_tokens}, {len(request.choices)} choices), the largest {pool} replica "
                    f"has {largest * block_size}; send a shorter prompt or a smaller max_tokens",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
            case Unavailable(pool):
                self._metrics.rejected("no_capacity")
                raise ApiError(
                    503,
                    f"no {pool} replica is available now; try again later",
                    type="server_error",
                    code="unavailable",
                    retry_after_s=1.0,
                )

    def _retry_after_s(self) -> float:
        """Whole seconds, a guess: what is waiting at one request a second and replica, at least one."""
        return float(max(1, self._num_waiting // max(1, len(self._decode.replicas()))))

    # -- frames ------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        self._view.heard(frame)
        self._mailboxes.deliver(frame)

    def _on_gap(self, replica_id: str, epoch: str, from_seq: int) -> None:
        self._spawn(self._fill_gap(replica_id, epoch, from_seq))

    async def _fill_gap(self, replica_id: str, epoch: str, from_seq: int) -> None:
        logger.warning("frames missing", extra={"event": "frame_gap", "replica": replica_id, "from_seq": from_seq})
        self._metrics.retried("frames")
        try:
            self._receiver.deliver_replayed(await self._decode.call(replica_id, "replay", self.router_id, from_seq))
        except Exception as error:  # gone, or the replica is: its requests can't be complete any more
            self._mailboxes.lose(replica_id, f"frames from {from_seq} on are lost: {error}")
            self._receiver.skip_gap(replica_id, epoch)

    def _spawn(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine, context=contextvars.Context())  # type: ignore[arg-type]
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _log_failure(self, leg: Leg, route: Route, failure: AttemptFailed, attempt: int) -> None:
        logger.warning(
            "attempt failed",
            extra={
                "event": "attempt_failed",
                "generation": leg.spec.generation_id,
                "stage": failure.stage,
                "status": failure.status,
                "detail": failure.detail,
                "decode": route.decode_id,
                "prefill": route.prefill_id,
                "attempt": attempt,
            },
        )
        cause = failure.__cause__
        if isinstance(cause, ReplicaLost) and cause.is_dead:
            self._spawn(self._forget_dead(cause.replica_id))

    async def _forget_dead(self, replica_id: str) -> None:
        """A replica died: whoever holds a lease for it, or waits for it, lets go now instead of at expiry."""
        agent_name = self._view.forget(replica_id)
        if agent_name is None:
            return
        for pool in (self._decode, self._prefill):
            for survivor in pool.replicas() if pool else ():
                with contextlib.suppress(ReplicaLost):
                    assert pool is not None
                    await pool.call(survivor, "forget_peer", agent_name)


def _api_error(failure: AttemptFailed) -> ApiError:
    if failure.stage is Stage.QUEUE and failure.status is CallStatus.TIMEOUT:
        return ApiError(
            429,
            f"no decode replica had room in time ({failure.detail}); try again later",
            type="rate_limit_error",
            code="queue_timeout",
            retry_after_s=1.0,
        )
    if failure.status is CallStatus.TIMEOUT:
        return ApiError(504, f"the request timed out: {failure.detail}", type="server_error", code="timeout")
    return ApiError(500, f"the request failed at {failure.stage}: {failure.detail}", type="server_error", code="failed")
