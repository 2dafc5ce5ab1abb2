"""What the bodies of both generating endpoints have in common, and which of their fields do not go together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from cluster.openai.answer_format import FormatFields, check_formats
from cluster.openai.object import Integer, invalid, limit, limits_of, not_together
from cluster.openai.output import OutputFields
from cluster.openai.prediction import Prediction
from cluster.openai.sampling import SamplingFields
from cluster.openai.unsupported import NEUTRAL_VALUES
from scheduler.sampling_params import SamplingParams

# Known, without effect here, and no reason for a log line.
_TOLERATED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_MOST_SALT_CHARS = 512
_MAX_UNKNOWN_NAMES = 10
INT64_MAX = 2**63 - 1
_Tokens = Annotated[Integer, Field(ge=1, le=INT64_MAX)]
_TokensToKeep = Annotated[Integer, Field(ge=-1, le=INT64_MAX, json_schema_extra={"not": {"const": 0}})]
_WITH_BEAMS = {"temperature", "seed"}
# What must be left at its default beside use_beam_search: it chooses by probability alone.
_NOT_WITH_BEAMS = (
    *(rule.name for rule in fields(SamplingParams) if rule.name in SamplingFields.model_fields.keys() - _WITH_BEAMS),
    "stop",
    "logprobs",
    "prompt_logprobs",
    "prediction",
)
_ONLY_WITH_BEAMS = ("length_penalty", "early_stopping")


def _check_salt(value: str) -> str:
    if not value:
        raise invalid("must not be empty: leave it out where nobody is to be set apart")
    if len(value) > _MOST_SALT_CHARS:
        raise invalid(f"has {len(value)} characters; at most {_MOST_SALT_CHARS} are allowed")
    return value


_CacheSalt = Annotated[
    str,
    AfterValidator(_check_salt),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _MOST_SALT_CHARS}),
]


def _check_priority(value: int, info: ValidationInfo) -> int:
    least, most = limits_of(info).min_priority, limits_of(info).max_priority
    if not least <= value <= most:
        raise invalid(f"must be from {least} (goes first) to {most}")
    return value


_Priority = Annotated[
    Integer,
    AfterValidator(_check_priority),
    WithJsonSchema({"type": "integer", "minimum": limit("min_priority"), "maximum": limit("max_priority")}),
]


class GenerationBody(SamplingFields, OutputFields, FormatFields, ABC):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="allow")

    # What only another endpoint has and this one would have to ignore, and the values that ask for nothing.
    fields_elsewhere: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = Field(
        default=None, description="Name of the model, as /v1/models gives it; left out: the one that is served."
    )
    max_tokens: _Tokens | None = Field(
        default=None,
        description="Most tokens of each choice. Together with the prompt it must fit into the model's context.",
        examples=[64],
    )
    max_completion_tokens: _Tokens | None = Field(
        default=None,
        description="OpenAI's newer name for max_tokens; goes before it.",
        examples=[64],
    )
    truncate_prompt_tokens: _TokensToKeep | None = Field(
        default=None,
        description="Keep only so many last tokens of each prompt; -1: as many as leave room for one token of output "
        "or for max_tokens. Not 0. Left out: a prompt that is too long is an error. Not in OpenAI's API.",
        examples=[256],
    )

    priority: _Priority = Field(
        default=0,
        description="Whose turn it is while requests wait: the smaller goes first, as in vLLM. Not in OpenAI's API.",
        examples=[0],
    )
    cache_salt: _CacheSalt | None = Field(
        default=None,
        description="What the server keeps of this prompt, only requests with the same salt find; among those of one "
        "API key or client, where the server tells them apart. Not in OpenAI's API.",
        examples=["team-7"],
    )

    prediction: Prediction | None = Field(
        default=None,
        description="What the answer is expected to be like, for example the file that it is to change: where it is, "
        "it comes sooner, if the server drafts by n-grams. It changes no word of it.",
        examples=[{"type": "content", "content": "class User:\n    name: str\n"}],
    )

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit for each choice, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many most likely tokens to report beside each token of the answer; None: no log-probabilities."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def unknown_fields(self) -> list[str]:
        """Names of ignored fields, for the log: sorted, shortened, the first few."""
        extra = self.model_extra or {}
        names = extra.keys() - _TOLERATED - NEUTRAL_VALUES.keys() - self.fields_elsewhere.keys()
        return [name[:64] for name in sorted(names)[:_MAX_UNKNOWN_NAMES]]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        _check_choices(self)
        _check_output(self)
        check_formats(self)
        _check_beam_search(self)
        return self


# -- fields that are each allowed but do not go together: PydanticCustomError for the first pair found -----------------


def _check_choices(body: GenerationBody) -> None:
    """n, best_of and max_tokens. Raises PydanticCustomError, as the others here do."""
    if body.best_of is not None and body.best_of < body.n:
        raise not_together("best_of", "must be at least n")
    if body.num_generated_choices > body.n and body.stream and not body.use_beam_search:
        raise not_together("best_of", "above n is not allowed together with stream")
    if body.max_new_tokens is not None and body.min_tokens > max(1, body.max_new_tokens):
        raise not_together("min_tokens", "must be at most max_tokens")


def _check_output(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise not_together("stream_options", "is only allowed together with stream")
    if body.prompt_logprobs is not None and body.stream:
        raise not_together("prompt_logprobs", "is not allowed together with stream")
    if body.truncate_prompt_tokens == 0:
        raise not_together("truncate_prompt_tokens", "must be -1 or at least 1")


def _check_beam_search(body: GenerationBody) -> None:
    if not body.use_beam_search:
        for name in _ONLY_WITH_BEAMS:
            if not _is_default(body, name):
                raise not_together(name, "is only allowed together with use_beam_search")
        return
    if body.answer_format is not None:
        raise not_together(body.answer_format[0], "is not supported together with use_beam_search")
    if "temperature" in body.model_fields_set and body.temperature != 0:
        raise not_together("temperature", "must be 0 or left out together with use_beam_search")
    for name in _NOT_WITH_BEAMS:
        if not _is_default(body, name):
            raise not_together(name, "is not supported together with use_beam_search")


def _is_default(body: GenerationBody, name: str) -> bool:
    field = type(body).model_fields[name]
    return bool(getattr(body, name) == field.get_default(call_default_factory=True))
