"""Counts the work that came to one router, for its ingress's demand report. On the router's event loop."""

from __future__ import annotations

from typing import Protocol

from cluster.policies.routing_policy import Need, RoutingRules
from cluster.routing.demand_report import DemandReport, heard_figures
from cluster.routing.pool_view import PoolView


class Held(Protocol):
    """Requests that wait for a pool without replicas. held_blocks: what they will use on decode."""

    @property
    def held_prompt_tokens(self) -> int: ...

    @property
    def num_held(self) -> int: ...

    @property
    def held_blocks(self) -> int: ...


class DemandMeter:
    """num_open: generations begun and not over. coming_prompt_tokens: of those that have no token yet.

    arrived_prompt_tokens: of all since the start, for the pool that computes prompts; both without what was expected to
    be in a cache when they came.
    """

    def __init__(self, view: PoolView, held: Held, has_prefill_pool: bool) -> None:
        self.num_open = 0
        self.coming_prompt_tokens = 0
        self.arrived_prompt_tokens = 0
        self._view, self._held, self._has_prefill_pool = view, held, has_prefill_pool

    def opened(self, need: Need, rules: RoutingRules) -> OpenDemand:
        """A generation begins. Mutates."""
        num_tokens = need.fewest_uncached
        if self._has_prefill_pool and num_tokens <= rules.local_prefill_max_tokens:
            num_tokens = 0
        self.num_open += 1
        self.arrived_prompt_tokens += num_tokens
        # A search says nothing before its end: what it waits for then is not its prompt.
        return OpenDemand(self, 0 if need.is_search else num_tokens)

    def report(self) -> DemandReport:
        """The work there is now."""
        decodes = self._view.decode_loads()
        return DemandReport(
            num_open=self.num_open,
            arrived_prompt_tokens=self.arrived_prompt_tokens,
            coming_prompt_tokens=self.coming_prompt_tokens,
            waiting_prompt_tokens=self._waiting_prompt_tokens(),
            waiting_blocks=self._view.unheard_blocks + self._held.held_blocks,
            num_held=self._held.num_held,
            heard=heard_figures(decodes, self._view.prefill_loads() if self._has_prefill_pool else decodes),
        )

    def _waiting_prompt_tokens(self) -> int:
        """Of a colocated pool all that come: who waits for its memory waits for its prompt too."""
        if not self._has_prefill_pool:
            return self.coming_prompt_tokens
        return self._view.sent_prompt_tokens + self._held.held_prompt_tokens


class OpenDemand:
    """One generation's part in the counts. Its prompt waits until `prompt_done` or `close`."""

    def __init__(self, meter: DemandMeter, num_prompt_tokens: int) -> None:
        self._meter, self._num_waiting, self._is_closed = meter, num_prompt_tokens, False
        meter.coming_prompt_tokens += num_prompt_tokens

    def prompt_done(self) -> None:
        """Its first token is here. Idempotent."""
        self._meter.coming_prompt_tokens -= self._num_waiting
        self._num_waiting = 0

    def close(self) -> None:
        """It is over, whatever way. Idempotent."""
        self.prompt_done()
        if not self._is_closed:
            self._is_closed = True
            self._meter.num_open -= 1

    def __enter__(self) -> OpenDemand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
