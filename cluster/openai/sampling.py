"""Fields of a request body that say how tokens are chosen."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, field_validator

from cluster.openai.object import (
    AtMost,
    Integer,
    OfVocabulary,
    OpenAIObject,
    invalid,
    limit,
    limits_of,
    texts,
    token_ids,
    token_ids_schema,
)

_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_BIAS = 100.0
# Far enough from what float32 can hold, whatever the logits and the temperature are.
_MIN_REPETITION_PENALTY, _MAX_REPETITION_PENALTY = 1e-6, 1e9
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _logit_bias(value: Any, info: ValidationInfo) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid("must be an object")
    most = limits_of(info).max_logit_bias
    if len(value) > most:
        raise invalid(f"has {len(value)} entries; at most {most} are allowed")
    if not all(_TOKEN_ID.fullmatch(key) for key in value):
        raise invalid("must have token ids, written as decimal numbers, as its keys")
    for bias in value.values():
        if type(bias) not in (int, float) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise invalid("must have numbers from -100 to 100 as its values")
    return {int(key): float(bias) for key, bias in value.items()}


def _bad_words(value: Any, info: ValidationInfo) -> list[str]:
    limits = limits_of(info)
    return texts(value, limits.max_bad_words, limits.max_stop_string_chars, blanks=" ")


def _allowed_token_ids(value: Any, info: ValidationInfo) -> list[int]:
    ids = token_ids(value, limits_of(info).max_allowed_token_ids)
    if not ids:
        raise invalid("must not be empty; leave it out to allow all tokens")
    return ids


def _early_stopping(value: Any) -> bool | Literal["never"]:
    if isinstance(value, bool):
        return value
    if value != "never":
        raise invalid('must be true, false or "never"')
    return "never"


_LOGIT_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number", "minimum": -_MAX_BIAS, "maximum": _MAX_BIAS},
    "maxProperties": limit("max_logit_bias"),
}
_BAD_WORDS_SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": limit("max_stop_string_chars"), "pattern": "[^ ]"},
    "maxItems": limit("max_bad_words"),
}
_ALLOWED_SCHEMA = token_ids_schema(minItems=1, maxItems=limit("max_allowed_token_ids"))


class SamplingFields(OpenAIObject):
    """Names are OpenAI's and vLLM's; scheduler.sampling_params says in which order they apply."""

    temperature: float = Field(
        default=1.0,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="Logits are divided by it. 0, and anything below 1e-5, always takes the most likely token.",
        examples=[0.7],
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Sample only from the smallest set of most likely tokens whose probability reaches this.",
        examples=[0.9],
    )
    top_k: Integer = Field(
        default=0,
        ge=-1,
        le=_INT32_MAX,
        description="Sample only from so many most likely tokens; 0 and -1: from all. Not in OpenAI's API.",
        examples=[40],
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Sample only from tokens that have at least this share of the most likely token's probability. "
        "Not in OpenAI's API.",
        examples=[0.05],
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="Taken from the logit of every token that the answer has already.",
        examples=[0.5],
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="Taken from the logit of a token once for each time that the answer has it already.",
        examples=[0.5],
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=_MIN_REPETITION_PENALTY,
        le=_MAX_REPETITION_PENALTY,
        allow_inf_nan=False,
        description="Divides positive and multiplies negative logits of tokens that the prompt or the answer has "
        "already. 1 is off. Not in OpenAI's API.",
        examples=[1.1],
    )
    logit_bias: Annotated[
        dict[int, float], PlainValidator(_logit_bias), WithJsonSchema(_LOGIT_BIAS_SCHEMA), OfVocabulary()
    ] = Field(
        default_factory=dict,
        description="Added to the logits of these tokens, by token id; -100 all but forbids, 100 all but forces one.",
        examples=[{"42": -100}],
    )
    bad_words: Annotated[list[str], PlainValidator(_bad_words), WithJsonSchema(_BAD_WORDS_SCHEMA)] = Field(
        default_factory=list,
        description="Words that the answer may not have: the token sequences of each, with and without a space in "
        "front, are never completed. Another way to cut the same text into tokens is not forbidden. Not in OpenAI's "
        "API.",
        examples=[["Paris"]],
    )
    allowed_token_ids: Annotated[
        list[int], PlainValidator(_allowed_token_ids), WithJsonSchema(_ALLOWED_SCHEMA), OfVocabulary()
    ] = Field(
        default_factory=list,
        description="Sample only from these token ids; left out: from all. Not in OpenAI's API.",
        examples=[[15, 16, 17]],
    )
    min_tokens: Integer = Field(
        default=0,
        ge=0,
        le=_INT64_MAX,
        description="The answer does not end before it has so many tokens, unless by max_tokens. At most max_tokens. "
        "Not in OpenAI's API.",
        examples=[8],
    )
    seed: Annotated[Integer, Field(ge=_INT64_MIN, le=_INT64_MAX)] | None = Field(
        default=None,
        description="The same request with the same seed gives the same answer. Left out: a new one each time.",
        examples=[42],
    )
    n: Annotated[Integer, AtMost("max_choices")] = Field(
        default=1, ge=1, description="How many choices to answer with, for each prompt.", examples=[1]
    )
    best_of: Annotated[Integer, Field(ge=1), AtMost("max_choices")] | None = Field(
        default=None,
        description="Generate so many choices and answer with the n that have the highest mean log-probability a "
        "token; at least n. Completions only, and not streamed. With use_beam_search: the number of beams.",
        examples=[1],
    )
    use_beam_search: bool = Field(
        default=False,
        description="Beam search, with best_of beams (or n, if that is left out), instead of sampling. Goes neither "
        "with other ways of choosing tokens nor with stop and logprobs; all of a stream comes at its end. Not in "
        "OpenAI's API.",
        examples=[False],
    )
    length_penalty: float = Field(
        default=1.0,
        ge=-10,
        le=10,
        allow_inf_nan=False,
        description="For beam search: the score of a text is its log-probability divided by its length to the power "
        "of this. Not in OpenAI's API.",
        examples=[1.0],
    )
    early_stopping: Annotated[
        bool | Literal["never"], PlainValidator(_early_stopping), WithJsonSchema({"enum": [True, False, "never"]})
    ] = Field(
        default=False,
        description="For beam search: true ends when there are as many finished texts as beams; false when better "
        'ones are unlikely; "never" when they are impossible. Not in OpenAI\'s API.',
        examples=[False],
    )

    @field_validator("top_k")
    @classmethod
    def _one_word_for_off(cls, value: int) -> int:
        return max(value, 0)

    @classmethod
    def token_id_fields(cls) -> tuple[str, ...]:
        """Names of those that hold token ids."""
        return tuple(name for name, field in cls.model_fields.items() if OfVocabulary() in field.metadata)

    @property
    def num_generated_choices(self) -> int:
        """Choices to generate, of which n are answered with."""
        return self.n if self.best_of is None else self.best_of
