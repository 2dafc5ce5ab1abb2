"""Messages of a chat request, and how they are given to a chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, FailFast, Field, ValidationInfo, WithJsonSchema

from cluster.openai.object import OpenAIObject, invalid

_MAX_TOOL_CALLS = 128
_MAX_VARIABLES_BYTES = 65_536

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}, {"type": "null"}],
    "description": "The text, as a string or in parts of type text, which are joined by newlines. Only messages of "
    "role assistant may go without.",
    "examples": ["What is the capital of France?"],
}
_ARGUMENTS_SCHEMA = {
    "type": ["string", "object"],
    "description": "The arguments: an object, or one written as a JSON string, as OpenAI has it.",
    "examples": ['{"city": "Paris"}'],
}


def _content(value: Any, info: ValidationInfo) -> Any:
    """Content as one text: parts joined by newlines, as vLLM does it. Only text parts are known here."""
    if value is None and info.data.get("role") == "assistant":
        return ""  # for example beside tool calls
    if value is None:
        raise invalid("is required")
    if not isinstance(value, list):
        return value
    if not value:
        raise invalid("must not be an empty array")
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid(f"has a part of unsupported type at index {index}: only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise invalid(f"needs a string as text of the part at index {index}")
    return "\n".join(part["text"] for part in value)


def _arguments(value: Any) -> Any:
    """Arguments of a past tool call, for the template: the object which OpenAI writes as a JSON string."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value or "{}")
    except orjson.JSONDecodeError:
        raise invalid("must be a JSON object, written as a string") from None


def _check_variables(value: dict[str, Any]) -> dict[str, Any]:
    """They go through the template engine, and text among them is searched for control tokens."""
    try:
        num_bytes = len(orjson.dumps(value))
    except TypeError:  # deeper than orjson writes
        raise invalid("is nested too deeply") from None
    if num_bytes > _MAX_VARIABLES_BYTES:
        raise invalid(f"has {num_bytes} bytes as JSON; at most {_MAX_VARIABLES_BYTES} are allowed")
    return value


# Further variables for a chat template.
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]


class FunctionCall(OpenAIObject):
    """The function that a past tool call called."""

    name: str = Field(description="Name of the function.", examples=["get_weather"])
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments), WithJsonSchema(_ARGUMENTS_SCHEMA)] = Field(
        default_factory=dict
    )


class ToolCall(OpenAIObject):
    """A call that the assistant made earlier in the conversation."""

    id: str = Field(default="", description="Id that the tool's answer refers to.", examples=["call_1"])
    function: FunctionCall


class ChatMessage(OpenAIObject):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks. developer means system, unless the model's template knows it; tool messages are "
        "refused if the template does not.",
        examples=["user"],
    )
    content: Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        default=None, validate_default=True
    )
    name: str | None = Field(default=None, description="Name of the speaker, for the template.", examples=["alice"])
    tool_call_id: str | None = Field(
        default=None, description="For role tool: the call that this answers.", examples=["call_1"]
    )
    tool_calls: Annotated[list[ToolCall], FailFast()] = Field(
        default_factory=list,
        max_length=_MAX_TOOL_CALLS,
        description="For role assistant: calls that it made. Refused if the model's template has none.",
        examples=[[{"id": "call_1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]],
    )

    reasoning_content: str | None = Field(
        default=None,
        description="For role assistant: what it thought, for templates that show it. Not in OpenAI's API.",
        examples=["The user greets me."],
    )
    reasoning: str | None = Field(
        default=None, description="vLLM's newer name for reasoning_content, which goes before it.", examples=["Hm."]
    )

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        message |= {key: text for key in ("name", "tool_call_id") if (text := getattr(self, key)) is not None}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if thought is not None and self.role == "assistant":
            message |= {"reasoning_content": thought, "reasoning": thought}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        return message
