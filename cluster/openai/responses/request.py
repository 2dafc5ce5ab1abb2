"""The body of POST /v1/responses: what is its own. All other fields are those of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from cluster.openai.object import AtMost, Integer, OpenAIObject, invalid, not_together, unsupported
from cluster.openai.responses.input_items import Input
from cluster.openai.responses.refused import HOSTED_TOOLS, refuse
from cluster.openai.unsupported import MAX_OFFERS

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


def _tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in HOSTED_TOOLS:
        raise unsupported(f"is of type {kind}, which is not run here: offer a function, and call the tool yourself")
    if kind is not None and kind != "function":
        raise unsupported("has a type that is not supported: it may be function")
    return value


def _tool_choice(value: Any) -> str | dict[str, Any]:
    """A mode, a named function, or allowed functions; what else such an object has is left out."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise invalid('must be "none", "auto", "required" or an object')
    if value.get("type") == "function":
        if not isinstance(value.get("name"), str):
            raise invalid("needs the function's name as a string")
        return {"type": "function", "name": value["name"]}
    if value.get("type") != "allowed_tools":
        raise unsupported("has a type that is not supported: it may be function or allowed_tools")
    tools = value.get("tools")
    if value.get("mode") not in ("auto", "required"):
        raise invalid('needs the mode "auto" or "required"')
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise invalid("needs an array of functions as its tools")
    if not all(tool.get("type") == "function" and isinstance(tool.get("name"), str) for tool in tools):
        raise invalid("may have only functions, with their names, as its tools")
    names = [{"type": "function", "name": tool["name"]} for tool in tools]
    return {"type": "allowed_tools", "mode": value["mode"], "tools": names}


_NAMED = {"type": {"const": "function"}, "name": {"type": "string"}}
_NAMED_FUNCTION = {"type": "object", "properties": _NAMED, "required": ["type", "name"]}
_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED_FUNCTION,
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED_FUNCTION, "minItems": 1},
            },
            "required": ["type", "mode", "tools"],
        },
    ]
}
_METADATA_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": _MOST_VALUE_CHARS},
    "propertyNames": {"maxLength": _MOST_KEY_CHARS},
    "maxProperties": _MOST_PAIRS,
}
_Text = Annotated[str, Field(max_length=_MOST_VALUE_CHARS)]


class FunctionTool(OpenAIObject):
    """A function that the model may call. What runs it is the client."""

    type: Literal["function"] = Field(description="The kind of tool.", examples=["function"])
    name: str = Field(min_length=1, description="Name of the function.", examples=["get_weather"])
    description: str | None = Field(default=None, description="What it does.", examples=["The weather in a city"])
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="JSON schema of its arguments.",
        examples=[{"type": "object", "properties": {"city": {"type": "string"}}}],
    )
    strict: bool | None = Field(
        default=None, description="Whether the arguments must be as the schema has them.", examples=[True]
    )
    defer_loading: Literal[False] = Field(
        default=False, description="Every function is in the prompt from the beginning.", examples=[False]
    )

    def shown(self) -> dict[str, Any]:
        """As a response repeats it."""
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


class TextFormat(OpenAIObject):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON by a schema.", examples=["text"]
    )
    name: str | None = Field(default=None, description="For json_schema: its name.", examples=["city"])
    description: str | None = Field(default=None, description="For json_schema: what it is for.", examples=["A city"])
    json_schema: dict[str, Any] | None = Field(
        default=None, alias="schema", description="For json_schema: the schema.", examples=[{"type": "object"}]
    )
    strict: bool | None = Field(default=None, description="For json_schema: as OpenAI has it.", examples=[True])

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        for name, value in (("name", self.name), ("schema", self.json_schema)):
            if self.type == "json_schema" and value is None:
                raise not_together(name, "is required together with type json_schema")
        return self

    def shown(self) -> dict[str, Any]:
        """As a response repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return self.model_dump(by_alias=True)


def _verbosity(value: Any) -> Any:
    if value in ("low", "high"):
        raise unsupported("may only be medium: say in the instructions how much to write")
    return value


class TextOptions(OpenAIObject):
    """The form of the text."""

    format: TextFormat = Field(
        default=TextFormat(type="text"), description="What the text must look like.", examples=[{"type": "text"}]
    )
    verbosity: Annotated[Literal["medium"], BeforeValidator(_verbosity)] = Field(
        default="medium", description="Only the usual one: say in the instructions how much to write.",
        examples=["medium"],
    )  # fmt: skip


def _summary(value: Any) -> Any:
    if value in ("concise", "detailed"):
        raise unsupported("may only be auto: reasoning comes as it is, not summarised")
    return value


_Summary = Annotated[Literal["auto"], BeforeValidator(_summary)]


class ReasoningOptions(OpenAIObject):
    """How the model thinks, if it is one that does."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None,
        description="As reasoning_effort in chat completions: for the model's chat template, which heeds it or not.",
        examples=["low"],
    )
    summary: _Summary | None = Field(
        default=None,
        description="Nothing is summarised here: the reasoning itself comes, as content of an item.",
        examples=["auto"],
    )
    generate_summary: _Summary | None = Field(default=None, description="Older name of summary.", examples=["auto"])
    context: Literal["auto"] | None = Field(
        default=None, description="Which reasoning of earlier turns counts is up to the template.", examples=["auto"]
    )
    mode: Literal["standard"] | None = Field(
        default=None, description="There is only the usual one.", examples=["standard"]
    )


class ResponseStreamOptions(OpenAIObject):
    """Options of a stream."""

    include_obfuscation: Literal[False] = Field(
        default=False, description="Events are not padded: only false.", examples=[False]
    )


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
        default=TextOptions(), description="What the text must look like.", examples=[{"format": {"type": "text"}}]
    )
    tools: Annotated[list[Annotated[FunctionTool, BeforeValidator(_tool)]], FailFast()] = Field(
        default_factory=list,
        max_length=MAX_OFFERS,
        description="Functions that the model may call. Tools that a server runs, such as web_search, are refused.",
        examples=[[]],
    )
    tool_choice: Annotated[str | dict[str, Any], PlainValidator(_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)] = (
        Field(
            default="auto",
            description="Whether the model may, must or must not call functions, and which of them.",
            examples=["auto"],
        )
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
