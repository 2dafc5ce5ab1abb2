"""Where a leg goes, in the pools as they are now: the policy asked with what the leg needs, and whose answer it is.

And what a client is told when there is no route.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NoReturn

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import Need, NeverFits, Route, RoutingRules, Unavailable
from cluster.routing.attempt_failed import AttemptHistory
from cluster.routing.generation import Leg
from cluster.routing.pairing import choose_route
from cluster.routing.pool_view import PoolView
from cluster.routing.prompt_forecast import PrefixForecasts, PromptForecast


class RouteFinder:
    """One per router, on its event loop. Nothing here waits, so that what is decided is of one moment."""

    def __init__(
        self,
        view: PoolView,
        rules: RoutingRules,
        forecasts: PrefixForecasts,
        metrics: IngressMetrics,
        next_in_s: Callable[[str], float],
    ) -> None:
        """next_in_s: when a pool's next replica is expected (`OrderBook.next_in_s`)."""
        self._view, self._rules, self._forecasts, self._metrics = view, rules, forecasts, metrics
        self._next_in_s = next_in_s

    def forecast(self, leg: Leg) -> PromptForecast:
        """Of the prompt of the leg's attempt."""
        if leg.forecast is None:
            leg.forecast = self._forecasts.of(leg.attempt_spec())
        return leg.forecast

    def need(self, leg: Leg) -> Need:
        """As of now."""
        spec, binding = leg.attempt_spec(), leg.generation.binding
        model = binding.model if binding.is_final else ""
        return Need(
            prompt_tokens=spec.prompt_len,
            max_tokens=spec.max_tokens,
            num_choices=len(spec.choices),
            block_size=self._forecasts.block_size,
            is_search=leg.is_search,
            model=model,
            cached=self.forecast(leg).cached(),
            has_begun=leg.has_begun,
        )

    def answering(self) -> Collection[str]:
        """The replicas that may be chosen: they are there, and have not been lost."""
        return self._view.usable()

    def route(self, leg: Leg, past: AttemptHistory) -> Route:
        """As of now. Raises ApiError, and counts it, where there is none."""
        return self.checked(self.decide(leg, past), leg)

    def checked(self, decided: Route | NeverFits | Unavailable, leg: Leg) -> Route:
        """What was decided for the leg. Raises ApiError, and counts it, where that is no route."""
        return decided if isinstance(decided, Route) else self._refuse(decided, self.need(leg))

    def lacking(self, leg: Leg, past: AttemptHistory) -> str | None:
        """The pool that is needed and has nobody for it now; None: it can be routed, or never."""
        decided = self.decide(leg, past)
        return decided.pool if isinstance(decided, Unavailable) else None

    def decide(self, leg: Leg, past: AttemptHistory) -> Route | NeverFits | Unavailable:
        need, leaning = self.need(leg), leg.generation.binding.model
        if past.num_lost:
            need = replace(need, num_lost=past.num_lost)
        if past.num_deaths >= self._rules.quarantine_after_deaths - 1:
            need = replace(need, is_suspect=True)
        if leaning != need.model:  # to where other parts of the request have gone, unless it has failed there
            decided = self._choose(replace(need, model=leaning), past.excluded)
            if isinstance(decided, Route) and not {decided.decode_id, decided.prefill_id} & past.excluded:
                return decided
        return self._choose(need, past.excluded)

    def elsewhere(self, leg: Leg, past: AttemptHistory) -> Route | NeverFits | Unavailable:
        """As `decide`, of one that waits somewhere already: there is no way to whom it has failed before."""
        decided = self.decide(leg, past)
        if isinstance(decided, Route) and {decided.decode_id, decided.prefill_id} & past.excluded:
            return Unavailable("decode")
        return decided

    def _choose(self, need: Need, excluded: Collection[str]) -> Route | NeverFits | Unavailable:
        view = self._view
        decodes, prefills = view.decode_candidates(), view.prefill_candidates()
        return choose_route(need, decodes, prefills, self._rules, excluded, view.pairs.of)

    def _refuse(self, decided: NeverFits | Unavailable, need: Need) -> NoReturn:
        """Counts it and raises ApiError: 400 for what can never fit, 503 for a pool without replicas."""
        if isinstance(decided, NeverFits):
            self._metrics.rejected("too_long")
            size = need.block_size
            raise ApiError(
                400,
                f"this request needs {decided.needed_blocks * size} tokens of KV memory ({need.prompt_tokens} prompt "
                f"tokens, max_tokens {need.max_tokens}, {need.num_choices} choices), the largest {decided.pool} "
                f"replica has {decided.largest_pool_blocks * size}; send a shorter prompt or a smaller max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self._metrics.rejected("no_capacity")
        which = " of the model that began this answer" if need.model else ""
        raise ApiError(
            503,
            f"no {decided.pool} replica is available now{which}; try again later",
            code="unavailable",
            retry_after_s=max(1.0, self._next_in_s(decided.pool)),
        )
