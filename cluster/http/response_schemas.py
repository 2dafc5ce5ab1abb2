"""Answers of POST /v1/responses, for the published description of the API, as api_schemas has the others."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.http.api_schemas import ContentLogprob, ErrorDetail

_Status = Literal["in_progress", "completed", "incomplete"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OutputText(_Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="Always empty: nothing is cited.", max_length=0)
    logprobs: list[ContentLogprob] = Field(description="With include message.output_text.logprobs.")


class ReasoningText(_Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputMessageItem(_Answer):
    id: str = Field(examples=["msg_5c8f2a"])
    type: Literal["message"]
    role: Literal["assistant"]
    status: _Status
    content: list[OutputText]


class OutputReasoningItem(_Answer):
    """What the model thought, as it is."""

    id: str = Field(examples=["rs_5c8f2a"])
    type: Literal["reasoning"]
    status: _Status
    summary: list[Any] = Field(description="Always empty: nothing is summarised.", max_length=0)
    content: list[ReasoningText]


class OutputCallItem(_Answer):
    id: str = Field(examples=["fc_5c8f2a"])
    type: Literal["function_call"]
    status: _Status
    call_id: str = Field(description="What the function's output is to refer to.")
    name: str
    arguments: str = Field(description="An object, written as a JSON string.")


OutputItem = OutputMessageItem | OutputReasoningItem | OutputCallItem


class InputTokensDetails(_Answer):
    cached_tokens: int = Field(ge=0, description="Prompt tokens that were found in a prefix cache.")
    cache_write_tokens: int = Field(ge=0)


class OutputTokensDetails(_Answer):
    reasoning_tokens: int = Field(ge=0)


class ResponseUsage(_Answer):
    input_tokens: int = Field(ge=0)
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(ge=0, description="Reasoning included.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(ge=0)


class IncompleteDetails(_Answer):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseFailure(_Answer):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class Response(_Answer):
    """What came of it, and what was asked."""

    id: str = Field(examples=["resp_5c8f2a"])
    object: Literal["response"]
    created_at: int = Field(description="Unix time in seconds.")
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False] = Field(description="Responses are not stored.")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(_Answer):
    """An event of a stream; which fields it has is a matter of its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int = Field(ge=0, description="From 0, one after the other.")
    response: Response | None = Field(default=None, description="Of the first two events and the last one.")
    output_index: int | None = Field(default=None, description="Which item it is about.")
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = Field(default=None, description="More text, or more of the arguments.")
    text: str | None = None
    arguments: str | None = None
    name: str | None = Field(default=None, description="Of the function whose arguments are complete.")
    logprobs: list[ContentLogprob] | None = None
    code: str | None = None
    message: str | None = Field(default=None, description="Of an error, which comes behind response.failed.")
    param: str | None = None
    error: ErrorDetail | None = None
