"""What comes of an attempt that failed: who is told of it, and whether there is another one."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.attempt import Attempt
from cluster.routing.attempt_failed import AttemptFailed, AttemptHistory, Stage
from cluster.routing.dead_replicas import DeadReplicas
from cluster.routing.generation import Leg
from cluster.routing.pair_table import PairTable
from cluster.routing.quarantine import Quarantine
from cluster.routing.route_finder import RouteFinder
from cluster.routing.router_limits import RouterLimits
from replicas.messages import CallStatus


class FailedAttempts:
    """One for each router, on its event loop. Nothing here waits."""

    def __init__(
        self,
        rules: RoutingRules,
        limits: RouterLimits,
        metrics: IngressMetrics,
        routes: RouteFinder,
        pairs: PairTable,
        dead: DeadReplicas,
        given_up: Callable[[ApiError], ApiError],
    ) -> None:
        """given_up: what a client is told who has waited in vain, and counts it (`AdmissionWaits.given_up`)."""
        self._rules, self._limits, self._metrics = rules, limits, metrics
        self._routes, self._pairs, self._dead, self._given_up = routes, pairs, dead, given_up
        self.quarantine = Quarantine(metrics)

    def after(
        self, leg: Leg, attempt: Attempt, failure: AttemptFailed, past: AttemptHistory, deadline_s: float
    ) -> AttemptHistory:
        """The leg's history, with which it is tried again. Raises ApiError when it is not. Mutates.

        past: without this attempt. deadline_s: of the request, monotonic."""
        generation = leg.generation
        failure.log(generation.generation_id, attempt.route, past.num_failed)
        if failure.has_lost_kv:
            self._pairs.failed(attempt.route)
        if failure.found_dead is not None:
            self._dead.found(failure.found_dead)
        past = past.after(
            failure,
            attempt.route,
            is_search=leg.is_search,
            has_advanced=leg.has_advanced,
            has_run=leg.has_run,
            has_killed=failure.is_death_of_who_computed(attempt.stage, attempt.route),
        )
        num_dead = past.num_dead(self._routes.answering()) if past.num_deaths else 0
        if num_dead >= self._rules.quarantine_after_deaths:
            raise self.quarantine.found(generation.spec, generation.generation_id, num_dead) from failure
        if not self._may_retry(leg, failure, past, deadline_s):
            raise self._final_error(leg, failure) from failure
        self._metrics.retried(failure.stage)
        return past

    def _may_retry(self, leg: Leg, failure: AttemptFailed, past: AttemptHistory, deadline_s: float) -> bool:
        is_too_late = time.monotonic() + past.pause_s(self._limits.retry_delay_s) >= deadline_s
        if not failure.may_retry or past.is_over(self._limits.max_retries) or is_too_late:
            return False
        if failure.stage is Stage.QUEUE and failure.status is CallStatus.TIMEOUT:
            # It has waited as long as anybody may. Another replica is asked only if that one has room.
            route = self._routes.route(leg, past)
            return not route.must_wait and route.decode_id not in past.excluded
        return True

    def _final_error(self, leg: Leg, failure: AttemptFailed) -> ApiError:
        return self._given_up(failure.api_error(leg.has_emitted, leg.generation.generation_id))
