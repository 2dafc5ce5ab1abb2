"""The body of POST /v1/responses: what is its own. All other fields are those of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from cluster.openai.object import AtMost, Integer, OpenAIObject, invalid, not_together, unsupported
from cluster.openai.responses.input_items import Input
from cluster.openai.responses.options import ReasoningOptions, ResponseStreamOptions, TextOptions
from cluster.openai.responses.refused import refuse
from cluster.openai.responses.tools import Tool, ToolChoice
from cluster.openai.tools import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
# Reasoning is given in plain text, and taken back so: who asks for it encrypted, to send it back, has what that is for.
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
_MOST_PAIRS, _MOST_KEY_CHARS, _MOST_VALUE_CHARS = 16, 64, 512
_INT64_MAX = 2**63 - 1


def _include(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise invalid("must be an array of strings")
    if not all(item in _INCLUDED for item in value):
        raise unsupported("has something that is not here: it may have " + " and ".join(_INCLUDED))
    return value


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid("must be an object")
    if len(value) > _MOST_PAIRS:
        raise invalid(f"has {len(value)} entries; at most {_MOST_PAIRS} are allowed")
    if not all(isinstance(item, str) and len(item) <= _MOST_VALUE_CHARS for item in value.values()):
        raise invalid(f"must have strings of at most {_MOST_VALUE_CHARS} characters as its values")
    if max(map(len, value), default=0) > _MOST_KEY_CHARS:
        raise invalid(f"must have keys of at most {_MOST_KEY_CHARS} characters")
    return value


_METADATA_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": _MOST_VALUE_CHARS},
    "propertyNames": {"maxLength": _MOST_KEY_CHARS},
    "maxProperties": _MOST_PAIRS,
}
_Text = Annotated[str, Field(max_length=_MOST_VALUE_CHARS)]


class ResponsesBody(OpenAIObject):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(
        default=None, description="Name of the model, as /v1/models gives it; left out: the one that is served."
    )
    input: Input = Field(
        description="What was said so far, as one text of the user or as items, oldest first.",
        examples=["What is the capital of France?"],
    )
    instructions: str | None = Field(
        default=None, description="Comes before input, as a system message.", examples=["Answer in one word."]
    )
    max_output_tokens: Annotated[Integer, Field(ge=1, le=_INT64_MAX)] | None = Field(
        default=None,
        description="Most tokens of the answer, reasoning included. Together with the prompt it must fit into the "
        "model's context.",
        examples=[64],
    )
    stream: bool = Field(
        default=False, description="Answer with server-sent events, the last one response.completed.", examples=[False]
    )
    stream_options: ResponseStreamOptions | None = Field(
        default=None, description="Only together with stream.", examples=[{"include_obfuscation": False}]
    )
    text: TextOptions = Field(
        default_factory=TextOptions,
        description="What the text must look like.",
        examples=[{"format": {"type": "text"}}],
    )
    tools: Annotated[list[Tool], FailFast()] = Field(
        default_factory=list,
        max_length=MAX_TOOLS,
        description="Functions that the model may call. Tools that a server runs, such as web_search, are refused.",
        examples=[[]],
    )
    tool_choice: ToolChoice = Field(
        default="auto",
        description="Whether the model may, must or must not call functions, and which of them.",
        examples=["auto"],
    )
    parallel_tool_calls: bool = Field(
        default=True, description="Whether there may be several calls in one answer.", examples=[True]
    )
    reasoning: ReasoningOptions | None = Field(
        default=None, description="How the model thinks, if it is one that does.", examples=[{"effort": "low"}]
    )
    include: Annotated[
        list[str], PlainValidator(_include),
        WithJsonSchema({"type": "array", "items": {"enum": list(_INCLUDED)}}),
    ] = Field(
        default_factory=list,
        description="What to report besides. reasoning.encrypted_content changes nothing: reasoning is in plain text.",
        examples=[[LOGPROBS]],
    )  # fmt: skip
    top_logprobs: Annotated[Integer, AtMost("max_top_logprobs")] = Field(
        default=0,
        ge=0,
        description=f"How many most likely tokens to report at each position; include must have {LOGPROBS}.",
        examples=[0],
    )
    metadata: Annotated[dict[str, str], PlainValidator(_metadata), WithJsonSchema(_METADATA_SCHEMA)] = Field(
        default_factory=dict, description="Given back with the response.", examples=[{"run": "7"}]
    )
    store: bool = Field(
        default=False, description="Nothing is stored, whatever is asked: responses say false.", examples=[False]
    )
    max_tool_calls: Annotated[Integer, Field(ge=1, le=_INT64_MAX)] | None = Field(
        default=None, description="Of tools that a server runs, so without effect. Given back.", examples=[8]
    )
    service_tier: _Text | None = Field(
        default=None, description="Without effect: there is one tier, default.", examples=["auto"]
    )
    prompt_cache_key: _Text | None = Field(
        default=None, description="Without effect. Given back.", examples=["tenant-7"]
    )
    safety_identifier: _Text | None = Field(
        default=None, description="Without effect. Given back.", examples=["user-7"]
    )
    user: _Text | None = Field(default=None, description="Without effect. Given back.", examples=["user-7"])

    @classmethod
    def refuse(cls, body: Mapping[str, Any]) -> None:
        """Raises ApiError 400 `unsupported` for the first field that asks for what is not done here."""
        refuse(body)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise not_together("top_logprobs", f'is only allowed together with include ["{LOGPROBS}"]')
        if self.stream_options is not None and not self.stream:
            raise not_together("stream_options", "is only allowed together with stream")
        if isinstance(self.tool_choice, dict) and self.tool_choice["type"] == "allowed_tools":
            offered = {tool.name for tool in self.tools}
            if any(tool["name"] not in offered for tool in self.tool_choice["tools"]):
                raise not_together("tool_choice", "allows a function that tools does not have")
        return self
