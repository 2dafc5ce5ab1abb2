"""Times one HTTP request as its client sees it. Every latency metric is a difference of two of its events.

arrived --- first token --- token --- token --- ... --- over
   |---- TTFT ----|-- ITL --|-- ITL --|             (per choice)
   |-------------------- e2e -------------------------|
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.monitoring.request_trace import RequestTrace
from cluster.monitoring.slo_verdict import RequestTimes, judge

if TYPE_CHECKING:
    from cluster.api_error import ApiError
    from cluster.config.slo import SloConfig
    from cluster.monitoring.cache_finding import CacheFinding
    from cluster.monitoring.ingress_metrics import IngressMetrics


@dataclass(frozen=True, slots=True)
class RequestAccount:
    """What a request came to. outcome: as in splitserve_requests_total, "" while it is not over. ttft_s: None if no
    token has come, or all come at the end."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    ttft_s: float | None
    outcome: str


@dataclass(slots=True)
class _TokenTimes:
    """Of one choice, monotonic."""

    first_s: float
    last_s: float
    num_tokens: int = 1

    @property
    def per_token_s(self) -> float | None:
        """After the first; None of a single token."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class RequestTimer:
    """One per HTTP request; tells the metrics as things happen. Never raises: the metrics and the trace are guarded.

    trace: where the same events go when the request is traced.
    """

    def __init__(
        self, metrics: IngressMetrics, endpoint: str, slo: SloConfig, trace: RequestTrace | None = None
    ) -> None:
        self.trace = trace or RequestTrace()
        self._metrics = metrics
        self._endpoint = endpoint
        self._slo = slo
        self._arrived_s = time.monotonic()
        self._choices: dict[int, _TokenTimes] = {}
        self._findings: Sequence[tuple[int, CacheFinding]] = ()
        self._num_prompt_tokens = 0
        self._comes_whole = False
        self._outcome = ""
        metrics.requests_in_flight.add(1)
        metrics.work.num_open += 1

    def prompts(self, findings: Sequence[tuple[int, CacheFinding]], comes_whole: bool = False) -> None:
        """The prompts are tokenised and accepted. findings: of each its length, and what will be found of it in prefix
        caches. comes_whole: all tokens will come at the end, or none will (a beam search, an echo): then times between
        them mean nothing, and only the whole request is timed."""
        num_tokens = sum(length for length, _ in findings)
        self._findings, self._num_prompt_tokens = findings, num_tokens
        self._comes_whole = comes_whole
        self._metrics.request_prompt_tokens.observe(num_tokens)
        self.trace.prompt(num_tokens)

    def token(self, choice: int) -> None:
        """A token of a choice has come that the client gets, and pays for."""
        now_s = time.monotonic()
        work = self._metrics.work
        work.num_generated_tokens += 1
        times = self._choices.get(choice)
        if times is None:
            if not self._choices:
                work.num_prompt_tokens += self._num_prompt_tokens
            if not self._choices and not self._comes_whole:
                self._metrics.time_to_first_token.observe(now_s - self._arrived_s)
                self.trace.first_token()
            self._choices[choice] = _TokenTimes(now_s, now_s)
            return
        if not self._comes_whole:
            self._metrics.inter_token_latency.observe(now_s - times.last_s)
        times.last_s = now_s
        times.num_tokens += 1

    def calls(self, parser: str, num_valid: int, num_malformed: int) -> None:
        """A choice has ended, in which so many calls of tools were read; parser: one of CALL_PARSERS."""
        for result, number in (("valid", num_valid), ("malformed", num_malformed)):
            if number:
                self._metrics.tool_calls.add(number, parser=parser, result=result)

    def over(self, outcome: str, finish_reasons: list[str]) -> None:
        """The request has ended: outcome as in splitserve_requests_total. Once."""
        metrics, times = self._metrics, self._times()
        self._outcome = outcome
        metrics.work.num_open -= 1
        metrics.requests_in_flight.add(-1)
        metrics.requests.add(endpoint=self._endpoint, outcome=outcome)
        metrics.judged(judge(times, outcome, self._slo))
        for reason in finish_reasons:
            metrics.successes.add(finish_reason=reason)
        num_tokens = sum(choice.num_tokens for choice in self._choices.values())
        if outcome == "ok":
            metrics.request_latency.observe(times.e2e_s)
        if outcome == "ok" or num_tokens:
            self._count_tokens(num_tokens)
        self.trace.over(outcome, finish_reasons, num_tokens, self._num_cached_tokens)

    @property
    def account(self) -> RequestAccount:
        """As of now."""
        num_tokens = sum(choice.num_tokens for choice in self._choices.values())
        first_s = min((times.first_s for times in self._choices.values()), default=None)
        ttft_s = None if first_s is None or self._comes_whole else first_s - self._arrived_s
        return RequestAccount(self._num_prompt_tokens, self._num_cached_tokens, num_tokens, ttft_s, self._outcome)

    @property
    def _num_cached_tokens(self) -> int:
        return sum(finding.num_tokens for _, finding in self._findings)

    def _count_tokens(self, num_tokens: int) -> None:
        metrics = self._metrics
        metrics.prompt_tokens.add(self._num_prompt_tokens)
        for length, finding in self._findings:
            if finding.is_local is not None:
                metrics.prompt_found("local" if finding.is_local else "remote", length, finding.num_tokens)
        metrics.generation_tokens.add(num_tokens)
        metrics.request_generation_tokens.observe(num_tokens)
        if self._comes_whole:
            return
        for times in self._choices.values():
            if (per_token_s := times.per_token_s) is not None:
                metrics.time_per_output_token.observe(per_token_s)

    def _times(self) -> RequestTimes:
        e2e_s = time.monotonic() - self._arrived_s
        if self._comes_whole:
            return RequestTimes(e2e_s, comes_whole=True)
        first_s = min((times.first_s for times in self._choices.values()), default=None)
        return RequestTimes(
            e2e_s,
            ttft_s=None if first_s is None else first_s - self._arrived_s,
            tpot_s=max((s for times in self._choices.values() if (s := times.per_token_s) is not None), default=None),
        )


def outcome_of(error: ApiError) -> str:
    """As in splitserve_requests_total."""
    if error.status in (429, 503):
        return "rejected"
    if error.status == 504:
        return "timeout"
    return "client_error" if error.status < 500 else "server_error"
