"""What a request has used, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; completion_tokens of all its choices together.

    cached_tokens: how many of the prompts' tokens were found in a prefix cache; None where there is no prefix cache.
    reasoning_tokens: how many of the completion's the model spent on thinking; None for a model that does not.
    accepted_prediction_tokens: how many of the completion's were drafted; rejected_prediction_tokens: drafts that were
    not what came. None where the client predicted nothing.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        of_completion = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
        details = {name: count for name in of_completion if (count := getattr(self, name)) is not None}
        if details:
            usage["completion_tokens_details"] = details
        return usage
