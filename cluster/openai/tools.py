"""Fields of a chat request that say which functions the model may call, or must."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field, PlainValidator, WithJsonSchema

from cluster.openai.object import OpenAIObject, invalid

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolMode(StrEnum):
    """NAMED: a certain one must be called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "function"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """name: of the function that must be called, where it is a certain one."""

    mode: ToolMode
    name: str | None = None


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise invalid("must have 1 to 64 letters, digits, underscores, dots and dashes")
    return value


def _tool_choice(value: Any) -> ToolChoice:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(ToolMode(value))
    if not isinstance(value, dict):
        raise invalid('must be "none", "auto", "required", or an object that names a function')
    if value.get("type") != "function":
        raise invalid('of other types than "function" is not supported')
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid('must name a function: {"type": "function", "function": {"name": "..."}}')
    return ToolChoice(ToolMode.NAMED, name)


_NAME_SCHEMA = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": _NAME_SCHEMA}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}


class FunctionDefinition(OpenAIObject):
    """A function that the model may call."""

    name: Annotated[str, AfterValidator(_name), WithJsonSchema(_NAME_SCHEMA)] = Field(
        description="Name of the function.", examples=["get_weather"]
    )
    description: str | None = Field(
        default=None, description="What it does, for the model.", examples=["The weather of a city"]
    )
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="JSON schema of its arguments, which are an object; left out: there are none.",
        examples=[{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}],
    )
    strict: bool = Field(
        default=False,
        description="Refuse parameters whose schema cannot be enforced. Otherwise such a function's arguments are "
        "only held to be an object.",
        examples=[True],
    )


class Tool(OpenAIObject):
    """A tool: always a function."""

    type: Literal["function"] = Field(description="function: there are no others here.", examples=["function"])
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class ToolFields(OpenAIObject):
    """What may be called, and whether it must be."""

    tools: Annotated[list[Tool], FailFast()] = Field(
        default_factory=list,
        max_length=MAX_TOOLS,
        description="Functions that the model may call. It is told of them by its chat template.",
        examples=[[{"type": "function", "function": {"name": "get_weather"}}]],
    )
    tool_choice: Annotated[ToolChoice, PlainValidator(_tool_choice), WithJsonSchema(_CHOICE_SCHEMA)] | None = Field(
        default=None,
        description="none: no call, and the model is not told of the tools. auto, the default with tools: as the model "
        "likes. required: at least one call; or a function that must be called.",
        examples=["auto"],
    )
    parallel_tool_calls: bool = Field(
        default=True, description="Whether an answer may have several calls.", examples=[True]
    )

    @property
    def tool_mode(self) -> ToolMode:
        """NONE where there are no tools."""
        if not self.tools:
            return ToolMode.NONE
        return ToolMode.AUTO if self.tool_choice is None else self.tool_choice.mode

    @property
    def may_call_several(self) -> bool:
        """Whether an answer may have several calls. A named function is called once."""
        return self.parallel_tool_calls and self.tool_mode is not ToolMode.NAMED

    @property
    def tools_shown(self) -> list[Tool]:
        """Those that the model is told of: all, unless it may call none."""
        return [] if self.tool_mode is ToolMode.NONE else self.tools

    @property
    def tools_in_play(self) -> list[Tool]:
        """Those that may be called."""
        if self.tool_mode is ToolMode.NONE:
            return []
        name = None if self.tool_choice is None else self.tool_choice.name
        return [tool for tool in self.tools if name is None or tool.function.name == name]

    def what_is_wrong_with_tools(self) -> tuple[str, str] | None:
        """A field, and what goes on after its name: of fields that do not go together."""
        seen: set[str] = set()
        for index, tool in enumerate(self.tools):
            if tool.function.name in seen:
                return f"tools[{index}].function.name", "is the name of another tool too"
            seen.add(tool.function.name)
        choice = self.tool_choice
        if choice is None or choice.mode in (ToolMode.NONE, ToolMode.AUTO):
            return None
        if not self.tools:
            return "tool_choice", "asks for a call, and there are no tools"
        if choice.name is not None and choice.name not in seen:
            return "tool_choice.function.name", "is not the name of one of the tools"
        return None
