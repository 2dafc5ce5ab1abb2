"""Times one HTTP request as its client sees it. Every latency metric is a difference of two of its events.

arrived --- first token --- token --- token --- ... --- over
   |---- TTFT ----|-- ITL --|-- ITL --|             (per choice)
   |-------------------- e2e -------------------------|
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.api_error import ApiError
    from cluster.ingress_metrics import IngressMetrics


@dataclass(slots=True)
class _TokenTimes:
    """Of one choice, monotonic."""

    first_s: float
    last_s: float
    num_tokens: int = 1


class RequestTimer:
    """One per HTTP request; tells the metrics as things happen. Never raises: the metrics are guarded."""

    def __init__(self, metrics: IngressMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._arrived_s = time.monotonic()
        self._choices: dict[int, _TokenTimes] = {}
        self._num_prompt_tokens = 0
        metrics.requests_in_flight.add(1)

    def prompt(self, num_tokens: int) -> None:
        """The prompts are tokenised and accepted."""
        self._num_prompt_tokens = num_tokens
        self._metrics.request_prompt_tokens.observe(num_tokens)

    def token(self, choice: int) -> None:
        """A token of a choice has come."""
        now_s = time.monotonic()
        times = self._choices.get(choice)
        if times is None:
            if not self._choices:
                self._metrics.time_to_first_token.observe(now_s - self._arrived_s)
            self._choices[choice] = _TokenTimes(now_s, now_s)
            return
        self._metrics.inter_token_latency.observe(now_s - times.last_s)
        times.last_s = now_s
        times.num_tokens += 1

    def over(self, outcome: str, finish_reasons: list[str]) -> None:
        """The request has ended: outcome as in splitserve_requests_total. Once."""
        metrics = self._metrics
        metrics.requests_in_flight.add(-1)
        metrics.requests.add(endpoint=self._endpoint, outcome=outcome)
        metrics.request_latency.observe(time.monotonic() - self._arrived_s)
        for reason in finish_reasons:
            metrics.successes.add(finish_reason=reason)
        if not self._choices:
            return
        num_tokens = sum(times.num_tokens for times in self._choices.values())
        metrics.prompt_tokens.add(self._num_prompt_tokens)
        metrics.generation_tokens.add(num_tokens)
        metrics.request_generation_tokens.observe(num_tokens)
        for times in self._choices.values():
            if times.num_tokens > 1:
                metrics.time_per_output_token.observe((times.last_s - times.first_s) / (times.num_tokens - 1))


def outcome_of(error: ApiError) -> str:
    """As in splitserve_requests_total."""
    if error.status in (429, 503):
        return "rejected"
    if error.status == 504:
        return "timeout"
    return "client_error" if error.status < 500 else "server_error"
