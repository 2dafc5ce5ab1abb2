"""A body of POST /v1/responses as one of chat completions, and errors about that one in the client's own words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.api_error import ApiError
from cluster.openai.body import valid_body
from cluster.openai.request import ChatCompletionBody
from cluster.openai.responses.input_items import (
    InputFunctionCall,
    InputFunctionCallOutput,
    InputMessage,
    InputReasoning,
)
from cluster.openai.responses.refused import REFUSED
from cluster.openai.responses.request import LOGPROBS, ResponsesBody

if TYPE_CHECKING:
    from cluster.config.limits import LimitsConfig

_ASSISTANT = "assistant"
_INSTRUCTIONS = "instructions"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """body: what is generated from. names: where its messages and tools come from."""

    body: ChatCompletionBody
    names: FieldNames


@dataclass(frozen=True, slots=True)
class FieldNames:
    """From fields of a chat body to those that they were made of. messages, tools: by index."""

    messages: tuple[str, ...]
    tools: tuple[int, ...]

    def error(self, error: ApiError) -> ApiError:
        """The same error about the responses body."""
        param = None if error.param is None else self._of(error.param)
        message = self._of(error.message)
        return ApiError(error.status, message, error.type, param, error.code, error.retry_after_s)

    def _of(self, text: str) -> str:
        for pattern, new in _NAMES:
            text = pattern.sub(lambda match, new=new: new(self, match), text)  # type: ignore[misc]
        return "input" if text == "messages" else text

    def message(self, index: int) -> str:
        return self.messages[index] if index < len(self.messages) else "input"

    def tool(self, index: int) -> str:
        return f"tools[{self.tools[index]}]" if index < len(self.tools) else "tools"


_NAMES: tuple[tuple[re.Pattern[str], Callable[[FieldNames, re.Match[str]], str]], ...] = (
    (re.compile(r"\bmessages\[(\d+)\][\w.\[\]]*"), lambda names, match: names.message(int(match[1]))),
    (re.compile(r"\btools\[(\d+)\](\.function)?"), lambda names, match: names.tool(int(match[1]))),
    (re.compile(r"\bmax(_completion)?_tokens\b"), lambda _, __: "max_output_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), lambda _, __: "text.format"),
    (re.compile(r"\btool_choice\.function\b"), lambda _, __: "tool_choice"),
    (re.compile(r"\breasoning_effort\b"), lambda _, __: "reasoning.effort"),
)


def chat_request(body: ResponsesBody, limits: LimitsConfig) -> ChatRequest:
    """Raises ApiError 400, in the words of responses."""
    fields, names = chat_fields(body)
    try:
        return ChatRequest(valid_body(fields, ChatCompletionBody, limits), names)
    except ApiError as error:
        raise names.error(error) from None


def chat_fields(body: ResponsesBody) -> tuple[dict[str, Any], FieldNames]:
    """What a chat completion of the same would be asked for with. Fields that responses have no other word for go
    through as they are. Raises ApiError 400 for an output of a function that was not called.
    """
    messages = _Messages()
    messages.add(body)
    tools = _kept_tools(body)
    fields: dict[str, Any] = {
        **{name: value for name, value in (body.model_extra or {}).items() if name not in REFUSED},
        "model": body.model,
        "messages": messages.messages,
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "response_format": _response_format(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        **_tool_fields(body, tools),
    }
    if LOGPROBS in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    given = {name: value for name, value in fields.items() if value is not None}
    return given, FieldNames(tuple(messages.origins), tuple(tools))


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    shown = {name: value for name, value in body.text.format.shown().items() if value is not None}
    kind = shown.pop("type")
    if kind == "text":
        return None
    return {"type": kind, "json_schema": shown} if kind == "json_schema" else {"type": kind}


def _kept_tools(body: ResponsesBody) -> list[int]:
    """Which tools the prompt has: all, or those that tool_choice allows."""
    choice = body.tool_choice
    if isinstance(choice, str) or choice["type"] != "allowed_tools":
        return list(range(len(body.tools)))
    allowed = {tool["name"] for tool in choice["tools"]}
    return [index for index, tool in enumerate(body.tools) if tool.name in allowed]


def _tool_fields(body: ResponsesBody, kept: list[int]) -> dict[str, Any]:
    choice: str | dict[str, Any] = body.tool_choice
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice = choice["mode"]
    elif isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    if not body.tools:
        return {} if choice == "auto" else {"tool_choice": choice}
    return {"tools": [_tool(body, index) for index in kept], "tool_choice": choice} | (
        {} if body.parallel_tool_calls else {"parallel_tool_calls": False}
    )


def _tool(body: ResponsesBody, index: int) -> dict[str, Any]:
    shown = {name: value for name, value in body.tools[index].shown().items() if value is not None}
    return {"type": shown.pop("type"), "function": shown}


class _Messages:
    """Chat messages of items. origins: what each was made of. Items of one answer become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._call_ids: set[str] = set()

    def add(self, body: ResponsesBody) -> None:
        """Raises ApiError 400 for the output of a call that there was none of."""
        if body.instructions is not None:
            self._new("system", _INSTRUCTIONS, body.instructions)
        for index, item in enumerate(body.input):
            origin = f"input[{index}]"
            match item:
                case InputMessage():
                    self._said(item, origin)
                case InputFunctionCall():
                    self._called(item, origin)
                case InputFunctionCallOutput():
                    self._returned(item, origin)
                case InputReasoning():
                    self._thought(item, origin)

    def _new(self, role: str, origin: str, content: str | None = None, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.origins.append(origin)

    @property
    def _last(self) -> Mapping[str, Any]:
        return self.messages[-1] if self.messages else {"role": ""}

    def _said(self, item: InputMessage, origin: str) -> None:
        if item.role == _ASSISTANT and self._has_only_reasoning():
            self.messages[-1]["content"] = item.content
        else:
            self._new(item.role, origin, item.content)

    def _called(self, item: InputFunctionCall, origin: str) -> None:
        if self._last["role"] != _ASSISTANT:
            self._new(_ASSISTANT, origin)
        function = {"name": item.name, "arguments": item.arguments}
        calls: list[dict[str, Any]] = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._call_ids.add(item.call_id)

    def _returned(self, item: InputFunctionCallOutput, origin: str) -> None:
        if item.call_id not in self._call_ids:
            message = (
                f"{origin}.call_id is that of no function_call before it in input; nothing is stored here: send the "
                "items of earlier answers too"
            )
            raise ApiError(400, message, param=f"{origin}.call_id", code="invalid_value")
        self._new("tool", origin, item.output, tool_call_id=item.call_id)

    def _thought(self, item: InputReasoning, origin: str) -> None:
        text = "\n".join(part.text for part in item.content)
        if not text:
            return
        if self._has_only_reasoning():
            self.messages[-1]["reasoning_content"] += "\n" + text
        else:
            self._new(_ASSISTANT, origin, reasoning_content=text)

    def _has_only_reasoning(self) -> bool:
        last = self._last
        return last["role"] == _ASSISTANT and last["content"] is None and "tool_calls" not in last
