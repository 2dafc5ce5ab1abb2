"""Where a leg goes, in the pools as they are now: the policy asked with what the leg needs, and whose answer it is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import Need, NeverFits, Route, RoutingRules, Unavailable
from cluster.routing.generation import Leg
from cluster.routing.pairing import choose_route
from cluster.routing.pool_view import PoolView
from cluster.routing.route_refusal import refuse


class RouteFinder:
    """One per router, on its event loop. Nothing here waits, so that what is decided is of one moment."""

    def __init__(self, view: PoolView, rules: RoutingRules, block_size: int, metrics: IngressMetrics) -> None:
        self._view, self._rules, self._block_size, self._metrics = view, rules, block_size, metrics

    def need(self, leg: Leg) -> Need:
        request, binding = leg.request("", 0.0), leg.spec.binding
        num_tokens, num_choices = len(request.prompt_ids), len(request.choices)
        model = binding.model if binding.is_final else ""
        return Need(num_tokens, request.max_tokens, num_choices, self._block_size, leg.spec.beam is not None, model)

    def route(self, leg: Leg, excluded: Collection[str] = ()) -> Route:
        """Raises ApiError, and counts it, where there is none."""
        decided = self.decide(leg, excluded)
        return decided if isinstance(decided, Route) else refuse(decided, self.need(leg), self._metrics)

    def decide(self, leg: Leg, excluded: Collection[str] = ()) -> Route | NeverFits | Unavailable:
        need, leaning = self.need(leg), leg.spec.binding.model
        if leaning != need.model:  # to where other parts of the request have gone, unless it has failed there
            decided = self._choose(replace(need, model=leaning), excluded)
            if isinstance(decided, Route) and not {decided.decode_id, decided.prefill_id} & set(excluded):
                return decided
        return self._choose(need, excluded)

    def _choose(self, need: Need, excluded: Collection[str]) -> Route | NeverFits | Unavailable:
        view = self._view
        return choose_route(need, view.decode_candidates(), view.prefill_candidates(), self._rules, excluded)
