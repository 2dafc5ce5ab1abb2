"""Bodies of POST /v1/chat/completions and /v1/completions.

Where OpenAI's specification is silent or loose, this is what holds here:
- types are strict: true and "5" are no numbers; 5.0 is 5, and 5.5 is not an integer;
- null means the same as leaving the field out;
- fields nobody knows are ignored (`unknown_fields`, to log them), fields that would need something this server does
  not do are refused (openai_unsupported);
- vLLM's extensions top_k, stop_token_ids, ignore_eos, include_stop_str_in_output, return_token_ids and priority work
  on both endpoints, and so does max_completion_tokens, which goes before max_tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cluster.openai_unsupported import NEUTRAL_VALUES

if TYPE_CHECKING:
    from cluster.service_config import LimitsConfig

# Known, without effect here, and no reason for a log line.
_TOLERATED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_MAX_UNKNOWN_NAMES = 10
_MAX_MESSAGES = 2048
_MAX_STOP_TOKEN_IDS = 128
_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def invalid(message: str) -> PydanticCustomError:
    """An error whose message goes on after the field's name. It must not quote what the client sent."""
    return PydanticCustomError("invalid", message)


def _integral(value: Any) -> Any:
    """5.0 as 5. Not beyond 2**53: there a float stands for several integers, and JSON's larger ones come as floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value


def _limits(info: ValidationInfo) -> LimitsConfig:
    return cast("LimitsConfig", info.context)


def _token_ids(value: Any) -> list[int]:
    """A list of integers; whether the vocabulary has them is the tokenizer's business."""
    if not isinstance(value, list):
        raise invalid("must be an array of token ids")
    ids = [_integral(item) for item in value]
    if not all(type(item) is int for item in ids):
        raise invalid("must be an array of integers")
    return ids


def _prompts(value: Any, info: ValidationInfo) -> list[str | list[int]]:
    """The four forms of a prompt as one: a list of prompts, each a text or ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid("must be a string, an array of strings, an array of token ids, or an array of such arrays")
    if not value or [] in value:
        raise invalid("must not be empty")
    if all(isinstance(item, str) for item in value):
        prompts = value
    elif all(isinstance(item, list) for item in value):
        prompts = [_token_ids(item) for item in value]
    else:
        prompts = [_token_ids(value)]
    if len(prompts) > _limits(info).max_prompts:
        raise invalid(f"has {len(prompts)} prompts; at most {_limits(info).max_prompts} are allowed")
    return prompts


def _stops(value: Any, info: ValidationInfo) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("must be a string or an array of strings")
    limits = _limits(info)
    if len(stops) > limits.max_stop_strings:
        raise invalid(f"has {len(stops)} strings; at most {limits.max_stop_strings} are allowed")
    if not all(stops):
        raise invalid("must not contain an empty string")
    if max(map(len, stops), default=0) > limits.max_stop_string_chars:
        raise invalid(f"has a string of more than {limits.max_stop_string_chars} characters")
    return stops


def _stop_token_ids(value: Any) -> list[int]:
    ids = _token_ids(value)
    if len(ids) > _MAX_STOP_TOKEN_IDS:
        raise invalid(f"has {len(ids)} ids; at most {_MAX_STOP_TOKEN_IDS} are allowed")
    return ids


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


Integer = Annotated[int, BeforeValidator(_integral), Field(strict=True)]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


class StreamOptions(_Object):
    include_usage: bool = False


class FunctionCall(_Object):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = Field(default_factory=dict)


class ToolCall(_Object):
    id: str = ""
    function: FunctionCall


class ChatMessage(_Object):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content)] = Field(default=None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast()] = Field(default_factory=list)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        message |= {key: text for key in ("name", "tool_call_id") if (text := getattr(self, key)) is not None}
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


class GenerationBody(_Object):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Integer = Field(default=1, ge=1)
    max_tokens: Integer | None = Field(default=None, ge=1, le=_INT64_MAX)
    max_completion_tokens: Integer | None = Field(default=None, ge=1, le=_INT64_MAX)
    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    # 0 and -1 both mean off; it reads as 0.
    top_k: Integer = Field(default=0, ge=-1, le=_INT32_MAX)
    # Negative seeds are seeds like any other.
    seed: Integer | None = Field(default=None, ge=_INT64_MIN, le=_INT64_MAX)
    stop: Annotated[list[str], PlainValidator(_stops)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], PlainValidator(_stop_token_ids)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # vLLM's: the smaller goes first.
    priority: Integer = 0

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit for each choice, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def unknown_fields(self) -> list[str]:
        """Names of ignored fields, for the log: sorted, shortened, the first few."""
        names = set(self.model_extra or ()) - _TOLERATED - NEUTRAL_VALUES.keys()
        return [name[:64] for name in sorted(names)[:_MAX_UNKNOWN_NAMES]]

    @field_validator("n")
    @classmethod
    def _check_n(cls, value: int, info: ValidationInfo) -> int:
        if value > _limits(info).max_choices:
            raise invalid(f"must be at most {_limits(info).max_choices}")
        return value

    @field_validator("priority")
    @classmethod
    def _check_priority(cls, value: int, info: ValidationInfo) -> int:
        least, most = _limits(info).min_priority, _limits(info).max_priority
        if not least <= value <= most:
            raise invalid(f"must be from {least} (goes first) to {most}")
        return value

    @field_validator("top_k")
    @classmethod
    def _one_word_for_off(cls, value: int) -> int:
        return max(value, 0)

    @field_validator("stream_options")
    @classmethod
    def _only_for_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if info.data.get("stream") is False:
            raise invalid("is only allowed together with stream")
        return value


class ChatCompletionBody(GenerationBody):
    messages: Annotated[list[ChatMessage], FailFast()] = Field(max_length=_MAX_MESSAGES)

    @field_validator("messages")
    @classmethod
    def _not_empty(cls, value: list[ChatMessage]) -> list[ChatMessage]:
        if not value:
            raise invalid("must not be empty")
        return value

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as Tokenizer.apply_chat_template takes them."""
        return [message.for_template() for message in self.messages]


class CompletionBody(GenerationBody):
    # One or more prompts, each a text or token ids. A text may be empty: whether that means BOS or nothing is up to
    # the tokenizer.
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
