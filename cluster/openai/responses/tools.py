"""Functions that a body of POST /v1/responses offers, and which of them are to be called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from cluster.openai.object import OpenAIObject, invalid, unsupported
from cluster.openai.responses.refused import HOSTED_TOOLS

_LEVELS_AROUND = 8


def _tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None and not isinstance(kind, str):
        raise invalid("has a type that is not a string")
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


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    """They are repeated in the response, within so many objects and arrays that are ours."""
    within: Any = value
    for _ in range(_LEVELS_AROUND):
        within = [within]
    try:
        orjson.dumps(within)
    except TypeError:  # deeper than orjson writes
        raise invalid("is nested too deeply") from None
    return value


class FunctionTool(OpenAIObject):
    """A function that the model may call. What runs it is the client."""

    type: Literal["function"] = Field(description="The kind of tool.", examples=["function"])
    name: str = Field(min_length=1, description="Name of the function.", examples=["get_weather"])
    description: str | None = Field(default=None, description="What it does.", examples=["The weather in a city"])
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] | None = Field(
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


Tool = Annotated[FunctionTool, BeforeValidator(_tool)]
ToolChoice = Annotated[str | dict[str, Any], PlainValidator(_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)]
