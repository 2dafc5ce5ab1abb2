"""Times one HTTP request as its client sees it. Every latency metric is a difference of two of its events.

arrived --- first token --- token --- token --- ... --- over
   |---- TTFT ----|-- ITL --|-- ITL --|             (per choice)
   |-------------------- e2e -------------------------|
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.ingress_metrics import IngressMetrics


class RequestTimer:
    """One per HTTP request; tells the metrics as things happen. Never raises: the metrics are guarded."""

    def __init__(self, metrics: IngressMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._arrived_s = time.monotonic()
        self._first_s: dict[int, float] = {}  # by choice
        self._last_s: dict[int, float] = {}
        self._num_tokens: Counter[int] = Counter()
        self._num_prompt_tokens = 0
        metrics.requests_in_flight.add(1)

    def prompt(self, num_tokens: int) -> None:
        """The prompts are tokenised and accepted."""
        self._num_prompt_tokens = num_tokens
        self._metrics.request_prompt_tokens.observe(num_tokens)

    def token(self, choice: int) -> None:
        """A token of a choice has come."""
        now_s = time.monotonic()
        if not self._first_s:
            self._metrics.time_to_first_token.observe(now_s - self._arrived_s)
        if choice in self._last_s:
            self._metrics.inter_token_latency.observe(now_s - self._last_s[choice])
        self._first_s.setdefault(choice, now_s)
        self._last_s[choice] = now_s
        self._num_tokens[choice] += 1

    def over(self, outcome: str, finish_reasons: list[str]) -> None:
        """The request has ended: outcome as in splitserve_requests_total. Once."""
        metrics = self._metrics
        metrics.requests_in_flight.add(-1)
        metrics.requests.add(endpoint=self._endpoint, outcome=outcome)
        metrics.request_latency.observe(time.monotonic() - self._arrived_s)
        for reason in finish_reasons:
            metrics.successes.add(finish_reason=reason)
        if not self._num_tokens:
            return
        metrics.prompt_tokens.add(self._num_prompt_tokens)
        metrics.generation_tokens.add(self._num_tokens.total())
        metrics.request_generation_tokens.observe(self._num_tokens.total())
        for choice, count in self._num_tokens.items():
            if count > 1:
                metrics.time_per_output_token.observe((self._last_s[choice] - self._first_s[choice]) / (count - 1))
