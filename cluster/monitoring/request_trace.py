"""What happens to a request, told as it happens to whoever traces it. These classes listen and keep nothing: what a
request has that is not traced. `cluster.monitoring.otel_tracing` has those that make spans of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.policies.routing_policy import Route
    from replicas.messages import GenerateReply, PrefillReply


class AttemptTrace:
    """Of one attempt at one prompt. It begins when it is made. Nothing here raises or blocks."""

    def admitted(self) -> None:
        """Decode has promised memory."""

    def prefilled(self, reply: PrefillReply) -> None:
        """Prefill has answered with the first tokens."""

    def handed_over(self) -> None:
        """Decode has the KV: it was heard of for the first time after admission."""

    def ended(self, call: asyncio.Task[GenerateReply]) -> None:
        """The generate call is over: answered, failed or cancelled. Comes after the request's end at times."""


class RequestTrace:
    """Of one HTTP request. It begins when it is made. Nothing here raises or blocks."""

    def prompt(self, num_tokens: int) -> None:
        """The prompts are accepted."""

    def first_token(self) -> None:
        """The first token is on its way to the client."""

    def over(self, outcome: str, finish_reasons: list[str], num_tokens: int, num_cached: int = 0) -> None:
        """The request has ended, outcome as in splitserve_requests_total. num_cached: prompt tokens that were found in
        prefix caches. Once."""

    def attempt(self, route: Route) -> AttemptTrace:
        """An attempt at one of its prompts begins, on this route."""
        return AttemptTrace()
