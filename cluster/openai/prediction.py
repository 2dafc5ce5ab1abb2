"""OpenAI's predicted outputs: what the client expects the answer to be like, so that it comes sooner where it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from cluster.openai.object import OpenAIObject, invalid, limit, limits_of

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MOST = limit("max_text_chars")
_SCHEMA = {
    "anyOf": [{"type": "string", "maxLength": _MOST}, {"type": "array", "items": _PART, "minItems": 1}],
    "description": "The expected text, as a string or in parts of type text, which are joined.",
    "examples": ["class User:\n    name: str\n"],
}


def _text(value: Any, info: ValidationInfo) -> Any:
    """One text: unlike parts of a message, those of a file's text have nothing between them."""
    if isinstance(value, list):
        if not value:
            raise invalid("must not be an empty array")
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise invalid(f"has a part of unsupported type at index {index}: only text parts are supported")
            if not isinstance(part.get("text"), str):
                raise invalid(f"needs a string as text of the part at index {index}")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise invalid("must be a string, or an array of parts of type text")
    most = limits_of(info).max_text_chars
    if len(value) > most:
        raise invalid(f"has {len(value)} characters; at most {most} are allowed")
    return value


class Prediction(OpenAIObject):
    """What the answer is expected to be like: tokens are guessed from it. It changes no word of the answer."""

    type: Literal["content"] = Field(description="The only kind there is.")
    content: Annotated[str, BeforeValidator(_text), WithJsonSchema(_SCHEMA)]
