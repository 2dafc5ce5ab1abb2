"""The response object of POST /v1/responses: what was asked, repeated, and what came of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.api_error import ApiError
    from cluster.openai.request import ChatCompletionBody
    from cluster.openai.responses.request import ResponsesBody
    from cluster.text.usage import Usage

# Why an answer is incomplete, by the finish_reason of chat completions; all other reasons complete it.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """One response at any time of its life. repeated: the fields that stay the same."""

    repeated: Mapping[str, Any]

    def begun(self) -> dict[str, Any]:
        """In progress, without output."""
        return self._with("in_progress", ())

    def ended(self, finish_reason: str, output: Sequence[Mapping[str, Any]], usage: Usage) -> dict[str, Any]:
        """completed, or incomplete with a reason."""
        reason = _INCOMPLETE.get(finish_reason)
        more: dict[str, Any] = {"usage": _usage(usage)}
        if reason is not None:
            return self._with("incomplete", output, incomplete_details={"reason": reason}, **more)
        return self._with("completed", output, completed_at=int(time.time()), **more)

    def failed(self, error: ApiError, output: Sequence[Mapping[str, Any]], usage: Usage) -> dict[str, Any]:
        """After its beginning had been sent."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        detail = {"code": code, "message": error.message}
        return self._with("failed", output, error=detail, usage=_usage(usage))

    def _with(self, status: str, output: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.repeated, "status": status, "output": list(output), **more}


def status_of(finish_reason: str) -> str:
    """Of the response and its last item."""
    return "incomplete" if finish_reason in _INCOMPLETE else "completed"


def response_object(body: ResponsesBody, completed: ChatCompletionBody, model: str, created: int) -> ResponseObject:
    """completed: the body that is generated from, with the checkpoint's sampling defaults."""
    reasoning = body.reasoning
    return ResponseObject(
        {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": completed.temperature,
            "text": {"format": body.text.format.shown(), "verbosity": body.text.verbosity},
            "tool_choice": body.tool_choice,
            "tools": [tool.shown() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": completed.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata,
        }
    )


def _usage(usage: Usage) -> dict[str, Any]:
    """The numbers under the names that they have here."""
    chat = usage.as_dict()
    prompt, answer = chat.get("prompt_tokens_details", {}), chat.get("completion_tokens_details", {})
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": answer.get("reasoning_tokens", 0)},
        "total_tokens": chat["total_tokens"],
    }
