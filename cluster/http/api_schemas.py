"""Answers of the API, for its published description. Answers themselves are built without these, for speed; tests hold
the two together."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    message: str = Field(description="What is wrong, and what to do about it.", examples=["messages is required"])
    type: str = Field(description="Class of the error.", examples=["invalid_request_error"])
    param: str | None = Field(description="The field at fault, if one is.", examples=["messages[0].content"])
    code: str | None = Field(description="A stable word for programs.", examples=["invalid_value"])


class ErrorEnvelope(_Answer):
    """Every error, and the last event of a stream that failed."""

    error: ErrorDetail


class PromptTokensDetails(_Answer):
    cached_tokens: int = Field(ge=0, description="Prompt tokens that were found in a prefix cache.")


class CompletionTokensDetails(_Answer):
    reasoning_tokens: int | None = Field(
        default=None, ge=0, description="Tokens that the model spent on thinking, its tags not included."
    )
    accepted_prediction_tokens: int | None = Field(
        default=None, ge=0, description="With `prediction`: tokens of the answer that were guessed right."
    )
    rejected_prediction_tokens: int | None = Field(
        default=None,
        ge=0,
        description="With `prediction`: tokens that were guessed wrong, and are no part of the answer.",
    )


class UsageInfo(_Answer):
    """Tokens of the request."""

    prompt_tokens: int = Field(ge=0, description="Of all prompts; each counts once, however many choices it has.")
    completion_tokens: int = Field(ge=0, description="Generated for all choices, those of best_of included.")
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(
        default=None, description="For models that think, and with `prediction`."
    )


class TopLogprob(_Answer):
    token: str = Field(description="The token by itself; see bytes where it is no whole character.")
    logprob: float = Field(description="Natural logarithm of its probability, before temperature and all other rules.")
    bytes: list[int] = Field(description="The token's bytes.")


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(description="The most likely tokens here, the most likely first.")


class ChatLogprobs(_Answer):
    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(_Answer):
    """Four lists of the same length, an entry a token."""

    tokens: list[str] = Field(description="Joined they are the text; empty while a character is incomplete.")
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where the token begins in the text of the choice, in characters.")


class PromptLogprob(_Answer):
    logprob: float
    rank: int | None = Field(description="1 is the most likely; null if it is not among those reported.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(_Answer):
    name: str = Field(examples=["get_weather"])
    arguments: str = Field(
        description="JSON, as the model wrote it: an object, unless the model made none or max_tokens cut it off.",
        examples=['{"city": "Paris"}'],
    )


class CalledTool(_Answer):
    id: str = Field(description="For the message of role tool that answers it.", examples=["call_1"])
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str | None = Field(description="null where the answer has calls, or only reasoning.")
    refusal: None
    reasoning_content: str | None = Field(default=None, description="What the model thought before it answered.")
    reasoning: str | None = Field(default=None, description="The same, under vLLM's newer name.")
    tool_calls: list[CalledTool] | None = Field(default=None, description="Functions to be called.")


class ChatChoice(_Answer):
    index: int = Field(ge=0)
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(
        description="stop: the model ended, or a stop string or id came. length: max_tokens. tool_calls: the model "
        "ended, and calls tools."
    )
    token_ids: list[int] | None = Field(default=None, description="With return_token_ids.")


class ChatCompletion(_Answer):
    id: str = Field(examples=["chatcmpl-5c8f2a"])
    object: Literal["chat.completion"]
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = Field(default=None, description="With prompt_logprobs.")
    system_fingerprint: str | None = None


class FunctionDelta(_Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(_Answer):
    """The first one of a call has its id and its function's name; then come its arguments, piece by piece."""

    index: int = Field(ge=0)
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(_Answer):
    index: int = Field(ge=0)
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(_Answer):
    """An event of a stream. The first one of a choice has the role, the last one the finish_reason."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(description="Empty in the chunk that has the usage.")
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None


class TextChoiceAnswer(_Answer):
    index: int = Field(ge=0, description="Choices of the first prompt come first.")
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(_Answer):
    id: str = Field(examples=["cmpl-5c8f2a"])
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoiceAnswer]
    usage: UsageInfo
    system_fingerprint: str | None = None


class TextChunkChoice(_Answer):
    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None


class CompletionChunk(_Answer):
    """An event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Most tokens of prompt and answer together.")


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(_Answer):
    count: int = Field(ge=0)
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="With return_token_strs.")


class DetokenizeAnswer(_Answer):
    prompt: str


class Health(_Answer):
    status: Literal["ok"]


class SlowestTransfer(_Answer):
    """Of all pairs of replicas that were measured."""

    reader: str
    source: str
    gb_per_s: float


class Readiness(_Answer):
    status: Literal["ready", "not ready"]
    missing_pools: list[str] | None = None
    reasons: list[str] | None = None
    notes: list[str] | None = None
    slowest_transfer: SlowestTransfer | None = None


class Version(_Answer):
    version: str
