"""Fields of a request body that say when an answer ends and what comes back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema

from cluster.openai.object import (
    AtMost,
    Integer,
    OpenAIObject,
    invalid,
    limit,
    limits_of,
    texts,
    token_ids,
    token_ids_schema,
)


def _stops(value: Any, info: ValidationInfo) -> list[str]:
    if not isinstance(value, str | list):
        raise invalid("must be a string or an array of strings")
    limits = limits_of(info)
    return texts([value] if isinstance(value, str) else value, limits.max_stop_strings, limits.max_stop_string_chars)


def _stop_token_ids(value: Any, info: ValidationInfo) -> list[int]:
    return token_ids(value, limits_of(info).max_stop_token_ids)


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": limit("max_stop_string_chars")}
_STOP_SCHEMA = {
    "anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": limit("max_stop_strings")}]
}
_STOP_IDS_SCHEMA = token_ids_schema(maxItems=limit("max_stop_token_ids"))


class StreamOptions(OpenAIObject):
    """Options of a stream."""

    include_usage: bool = Field(
        default=False,
        description="Send one more chunk at the end, without choices, that has the usage.",
        examples=[True],
    )
    continuous_usage_stats: bool = Field(
        default=False,
        description="With include_usage: every chunk has the usage so far. Not in OpenAI's API.",
        examples=[False],
    )


class OutputFields(OpenAIObject):
    """The end of an answer, its form, and what is reported beside the text."""

    stop: Annotated[list[str], PlainValidator(_stops), WithJsonSchema(_STOP_SCHEMA)] = Field(
        default_factory=list,
        description="Strings that end the text. The first one to be complete counts.",
        examples=[["\n\n"]],
    )
    stop_token_ids: Annotated[list[int], PlainValidator(_stop_token_ids), WithJsonSchema(_STOP_IDS_SCHEMA)] = Field(
        default_factory=list,
        description="Token ids that end the text, beside the model's own. Not in OpenAI's API.",
        examples=[[2]],
    )
    include_stop_str_in_output: bool = Field(
        default=False,
        description="Leave the stop string in the text. Not in OpenAI's API.",
        examples=[False],
    )
    ignore_eos: bool = Field(
        default=False,
        description="Go on when the model ends its answer. Not in OpenAI's API.",
        examples=[False],
    )
    skip_special_tokens: bool = Field(
        default=True,
        description="Leave special tokens, such as the one that ends an answer, out of the text. Not in OpenAI's API.",
        examples=[True],
    )
    prompt_logprobs: Annotated[Integer, Field(ge=0), AtMost("max_top_logprobs")] | None = Field(
        default=None,
        description="Report the log-probability of each token of the prompt, and at each position so many most likely "
        "tokens. Not streamed. Not in OpenAI's API.",
        examples=[0],
    )
    return_token_ids: bool = Field(
        default=False,
        description="Report the token ids that the text was made of. Not in OpenAI's API.",
        examples=[False],
    )
    return_tokens_as_token_ids: bool = Field(
        default=False,
        description='Write tokens in logprobs as "token_id:42" instead of as text. Not in OpenAI\'s API.',
        examples=[False],
    )
    stream: bool = Field(
        default=False,
        description="Answer with server-sent events, one for each piece of text, the last one [DONE].",
        examples=[False],
    )
    stream_options: StreamOptions | None = Field(
        default=None, description="Only together with stream.", examples=[{"include_usage": True}]
    )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats
