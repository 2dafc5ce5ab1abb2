"""Bodies of POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, FailFast, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from cluster.openai.messages import ChatMessage, TemplateVariables
from cluster.openai.object import (
    AtMost,
    OpenAIObject,
    limit,
    limits_of,
    not_together,
    token_ids,
    token_ids_schema,
)
from cluster.openai.tools import MAX_TOOLS, Tool


def _tokens(value: Any, info: ValidationInfo) -> list[int]:
    return token_ids(value, limits_of(info).max_text_chars)


class TokenizeBody(OpenAIObject):
    """Either a prompt, as for completions, or messages, as for chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array", "minItems": 1}}},
            ]
        }
    )

    model: str | None = Field(default=None, description="Name of the model; left out: the one that is served.")
    prompt: Annotated[str, AtMost("max_text_chars", "maxLength")] | None = Field(
        default=None, description="The text; or give messages.", examples=["Once upon a time"]
    )
    messages: Annotated[list[ChatMessage], FailFast()] = Field(
        default_factory=list,
        max_length=2048,
        description="The conversation; or give a prompt.",
        examples=[[{"role": "user", "content": "Hello"}]],
    )
    add_special_tokens: bool = Field(
        default=True,
        description="Put what the model wants around a text, such as a BOS token. Without effect on messages: the "
        "template has put in all of it.",
        examples=[True],
    )
    return_token_strs: bool = Field(
        default=False, description="Also answer with the text of each token by itself.", examples=[False]
    )
    add_generation_prompt: bool = Field(
        default=True, description="As in /v1/chat/completions; only for messages.", examples=[True]
    )
    continue_final_message: bool = Field(
        default=False, description="As in /v1/chat/completions; only for messages.", examples=[False]
    )
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict,
        description="As in /v1/chat/completions; only for messages.",
        examples=[{"enable_thinking": False}],
    )

    tools: Annotated[list[Tool], FailFast()] = Field(
        default_factory=list,
        max_length=MAX_TOOLS,
        description="As in /v1/chat/completions; only for messages.",
        examples=[[]],
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.prompt is None and not self.messages:
            raise not_together("prompt", "is required, or messages")
        if self.prompt is not None and self.messages:
            raise not_together("messages", "is not allowed together with prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise not_together("continue_final_message", "is only allowed together with add_generation_prompt false")
        return self


_TOKENS_SCHEMA = token_ids_schema(maxItems=limit("max_text_chars"))


class DetokenizeBody(OpenAIObject):
    """Token ids to be written as text."""

    model: str | None = Field(default=None, description="Name of the model; left out: the one that is served.")
    tokens: Annotated[list[int], PlainValidator(_tokens), WithJsonSchema(_TOKENS_SCHEMA)] = Field(
        description="The token ids. Special tokens among them are written by their names.", examples=[[504, 282]]
    )
