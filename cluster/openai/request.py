"""Bodies of POST /v1/chat/completions and /v1/completions.

Where OpenAI's specification is silent or loose, this is what holds here:
- types are strict: true and "5" are no numbers; 5.0 is 5, and 5.5 is not an integer;
- null means the same as leaving the field out;
- fields nobody knows are ignored (`unknown_fields`, to log them), fields that would need something this server does
  not do are refused (`unsupported`);
- vLLM's extensions work on both endpoints where they make sense for both.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    FailFast,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from cluster.openai.generation_body import INT64_MAX, GenerationBody
from cluster.openai.messages import ChatMessage, TemplateVariables
from cluster.openai.object import (
    AtMost,
    Integer,
    invalid,
    limit,
    limits_of,
    not_together,
    token_ids,
    token_ids_schema,
)
from cluster.openai.tools import ToolFields, ToolMode

_MAX_MESSAGES = 2048
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_TokensOrZero = Annotated[Integer, Field(ge=0, le=INT64_MAX)]


def _prompts(value: Any, info: ValidationInfo) -> list[str | list[int]]:
    """The four forms of a prompt as one: a list of prompts, each a text or ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid("must be a string, an array of strings, an array of token ids, or an array of such arrays")
    if not value:
        raise invalid("must not be empty")
    most, most_ids = limits_of(info).max_prompts, limits_of(info).max_text_chars
    if not isinstance(value[0], str | list):
        return [token_ids(value, most_ids)]
    if len(value) > most:
        raise invalid(f"has {len(value)} prompts; at most {most} are allowed")
    if [] in value:
        raise invalid("must not be empty")
    if all(isinstance(item, str) for item in value):
        return value
    return [token_ids(item, most_ids) for item in value]


_IDS_SCHEMA = token_ids_schema(minItems=1, maxItems=limit("max_text_chars"))
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": limit("max_prompts")},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": limit("max_prompts")},
    ],
}


class ChatCompletionBody(ToolFields, GenerationBody):  # the last base says what becomes of unknown fields
    """Body of POST /v1/chat/completions."""

    fields_elsewhere: ClassVar[dict[str, tuple[Any, ...]]] = {"echo": (False,)}

    messages: Annotated[list[ChatMessage], FailFast()] = Field(
        min_length=1,
        max_length=_MAX_MESSAGES,
        description="The conversation so far, oldest message first.",
        examples=[[{"role": "user", "content": "What is the capital of France?"}]],
    )
    logprobs: bool = Field(
        default=False, description="Report the log-probability of each token of the answer.", examples=[True]
    )
    top_logprobs: Annotated[Integer, AtMost("max_top_logprobs")] = Field(
        default=0,
        ge=0,
        description="How many most likely tokens to report at each position; needs logprobs true.",
        examples=[5],
    )
    add_generation_prompt: bool = Field(
        default=True,
        description="Let the prompt end where an answer of the assistant begins. Not in OpenAI's API.",
        examples=[True],
    )
    continue_final_message: bool = Field(
        default=False,
        description="Go on with the last message instead of answering it; needs add_generation_prompt false. Not in "
        "OpenAI's API.",
        examples=[False],
    )
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict,
        description="Further variables for the model's chat template. Not in OpenAI's API.",
        examples=[{"enable_thinking": False}],
    )

    reasoning_effort: ReasoningEffort | None = Field(
        default=None,
        description="For the model's chat template, as its variable reasoning_effort, which it heeds or not. none also "
        "sets enable_thinking to false. chat_template_kwargs go before it.",
        examples=["low"],
    )
    thinking_token_budget: Annotated[Integer, Field(ge=0, le=INT64_MAX)] | None = Field(
        default=None,
        description="Most tokens that the model may spend on thinking, as in vLLM: then it is made to close its "
        "reasoning. Not in OpenAI's API.",
        examples=[1024],
    )

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as Tokenizer.apply_chat_template takes them."""
        return [message.for_template() for message in self.messages]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables for the model's chat template."""
        effort = self.reasoning_effort
        given = {} if effort is None else {"reasoning_effort": effort}
        return {**given, **({"enable_thinking": False} if effort == "none" else {}), **self.chat_template_kwargs}

    @property
    def continued_text(self) -> str | None:
        """The assistant's text that the answer goes on with, where it does."""
        return self.messages[-1].content if self.continue_final_message else None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise not_together("top_logprobs", "is only allowed together with logprobs true")
        if self.best_of not in (None, self.n) and not self.use_beam_search:
            raise not_together("best_of", "is only supported in /v1/completions, or with use_beam_search")
        if self.continue_final_message and self.add_generation_prompt:
            raise not_together("continue_final_message", "is only allowed together with add_generation_prompt false")
        if (wrong := self.what_is_wrong_with_tools()) is not None:
            raise not_together(*wrong)
        if self.use_beam_search and self.tool_mode in (ToolMode.REQUIRED, ToolMode.NAMED):
            raise not_together("tool_choice", "that asks for a call is not supported together with use_beam_search")
        if self.use_beam_search and self.thinking_token_budget is not None:
            raise not_together("thinking_token_budget", "is not supported together with use_beam_search")
        return self


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    fields_elsewhere: ClassVar[dict[str, tuple[Any, ...]]] = {
        "top_logprobs": (0,),
        "continue_final_message": (False,),
        "chat_template_kwargs": ({},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "thinking_token_budget": (),
        "reasoning_effort": (),
    }

    # A text may be empty: whether that means BOS or nothing is up to the tokenizer.
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        description="One or more prompts, each a text or token ids. Control tokens in a text count as such.",
        examples=["Once upon a time"],
    )
    max_tokens: _TokensOrZero | None = Field(
        default=None,
        description="Most tokens of each choice. Together with the prompt it must fit into the model's context. 0 is "
        "only allowed together with echo.",
        examples=[64],
    )
    logprobs: Annotated[Integer, Field(ge=0), AtMost("max_logprobs")] | None = Field(
        default=None,
        description="Report the log-probability of each token, and at each position so many most likely tokens.",
        examples=[1],
    )
    echo: bool = Field(default=False, description="Begin each choice with its prompt.", examples=[False])

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [num for num in (self.prompt_logprobs, self.logprobs if self.echo else None) if num is not None]
        return max(wanted, default=None)

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_new_tokens == 0 and not self.echo:
            raise not_together("max_tokens", "must be greater than or equal to 1 (0 is for echo)")
        return self
