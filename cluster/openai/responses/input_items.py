"""Items of the input of POST /v1/responses: messages, and what past answers were made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from annotated_types import Len
from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, ValidationInfo, WithJsonSchema

from cluster.openai.object import OpenAIObject, invalid, unsupported

MAX_ITEMS = 2048
# Kinds of text in content, and under which key each has its text.
_TEXT_KEYS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_OTHER_PARTS = ("input_image", "input_file", "input_audio")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")

_PARTS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, key: {"type": "string"}},
                "required": ["type", key],
            }
            for kind, key in _TEXT_KEYS.items()
        ]
    },
}
_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, _PARTS_SCHEMA],
    "description": "The text, as a string or in parts, which are joined by newlines. Images, files and audio are "
    "refused.",
    "examples": ["What is the capital of France?"],
}
_ARGUMENTS_SCHEMA = {
    "type": "string",
    "description": "The arguments, an object written as a JSON string.",
    "examples": ['{"city": "Paris"}'],
}


def _text(value: Any, info: ValidationInfo) -> Any:
    """One text of a string or of parts; parts are joined by newlines, as in chat messages."""
    if not isinstance(value, list):
        return value
    if not value:
        raise invalid("must not be an empty array")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _OTHER_PARTS:
            raise unsupported(f"has a part of type {kind} at index {index}: only text is supported")
        if not isinstance(kind, str) or kind not in _TEXT_KEYS:
            raise invalid(f"has a part of unknown type at index {index}: it must be input_text or output_text")
        if not isinstance(part.get(_TEXT_KEYS[kind]), str):
            raise invalid(f"needs a string as {_TEXT_KEYS[kind]} of the part at index {index}")
    return "\n".join(part[_TEXT_KEYS[part["type"]]] for part in value)


def _object_in_json(value: Any) -> Any:
    """Stays a string; but it must hold an object: a chat template gets it as one."""
    if not isinstance(value, str):
        return value
    try:
        found = orjson.loads(value or "{}")
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise invalid("must be a JSON object, written as a string")
    return value


Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_CONTENT_SCHEMA)]


class InputMessage(OpenAIObject):
    """Something that was said."""

    type: Literal["message"] = Field(default="message", description="May be left out.", examples=["message"])
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who speaks. developer means system, unless the model's template knows it.", examples=["user"]
    )
    content: Text


class InputFunctionCall(OpenAIObject):
    """A call that the model made earlier. Calls that follow each other, or an answer, are one message."""

    type: Literal["function_call"] = Field(description="The kind of item.", examples=["function_call"])
    call_id: str = Field(min_length=1, description="What the function's output refers to.", examples=["call_1"])
    name: str = Field(description="Name of the function.", examples=["get_weather"])
    arguments: Annotated[str, BeforeValidator(_object_in_json), WithJsonSchema(_ARGUMENTS_SCHEMA)]


class InputFunctionCallOutput(OpenAIObject):
    """What a function gave back."""

    type: Literal["function_call_output"] = Field(description="The kind of item.", examples=["function_call_output"])
    call_id: str = Field(description="That of a function_call earlier in input.", examples=["call_1"])
    output: Text


class _ReasoningText(OpenAIObject):
    type: Literal["reasoning_text"] = Field(description="The kind of part.", examples=["reasoning_text"])
    text: str = Field(description="What the model thought.", examples=["The capital of France is Paris."])


class InputReasoning(OpenAIObject):
    """What the model thought earlier: given to its template, which takes it or leaves it. Summaries and what is
    encrypted are left aside.
    """

    type: Literal["reasoning"] = Field(description="The kind of item.", examples=["reasoning"])
    content: Annotated[list[_ReasoningText], FailFast()] = Field(
        default_factory=list,
        description="Its text, as answers have it.",
        examples=[[{"type": "reasoning_text", "text": "The capital of France is Paris."}]],
    )


def _check_kind(value: Any) -> Any:
    if not isinstance(value, dict):
        raise invalid("must be an object")
    kind = value.get("type")
    if kind == "item_reference" or (kind is None and value.keys() == {"id"}):
        raise unsupported("refers to an item that is not stored here: send the item itself")
    if kind is not None and kind not in _KINDS:
        raise unsupported("has a type that is not supported: it may be " + ", ".join(_KINDS))
    return value


def _tag(value: Any) -> str:
    """Of an item as it came, or as it was made."""
    kind = value.get("type") if isinstance(value, dict) else value.type
    return f"<{kind or 'message'}>"


# Names in <> are left out where the error names the field.
InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputFunctionCall, Tag("<function_call>")]
    | Annotated[InputFunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(_tag),
    BeforeValidator(_check_kind),
]


def _items(value: Any) -> Any:
    """A string is what a user says."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Described = Annotated[list[InputItem], Len(1, MAX_ITEMS)]
Input = Annotated[
    list[InputItem],
    FailFast(),
    Field(min_length=1, max_length=MAX_ITEMS),
    BeforeValidator(_items, json_schema_input_type=str | _Described),
]
