"""Fields of a request body that are each allowed but do not go together. Pure; raises for the first pair found."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from cluster.openai.object import not_together
from cluster.openai.sampling import SamplingFields
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cluster.openai.request import GenerationBody

_WITH_BEAMS = {"temperature", "seed"}
# What must be left at its default beside use_beam_search: it chooses by probability alone.
_NOT_WITH_BEAMS = (
    *(rule.name for rule in fields(SamplingParams) if rule.name in SamplingFields.model_fields.keys() - _WITH_BEAMS),
    "stop",
    "logprobs",
    "prompt_logprobs",
)
_ONLY_WITH_BEAMS = ("length_penalty", "early_stopping")


def check_choices(body: GenerationBody) -> None:
    """n, best_of and max_tokens. Raises PydanticCustomError, as the others here do."""
    if body.best_of is not None and body.best_of < body.n:
        raise not_together("best_of", "must be at least n")
    if body.num_generated_choices > body.n and body.stream and not body.use_beam_search:
        raise not_together("best_of", "above n is not allowed together with stream")
    if body.max_new_tokens is not None and body.min_tokens > max(1, body.max_new_tokens):
        raise not_together("min_tokens", "must be at most max_tokens")


def check_output(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise not_together("stream_options", "is only allowed together with stream")
    if body.prompt_logprobs is not None and body.stream:
        raise not_together("prompt_logprobs", "is not allowed together with stream")
    if body.truncate_prompt_tokens == 0:
        raise not_together("truncate_prompt_tokens", "must be -1 or at least 1")


def check_beam_search(body: GenerationBody) -> None:
    if not body.use_beam_search:
        for name in _ONLY_WITH_BEAMS:
            if not _is_default(body, name):
                raise not_together(name, "is only allowed together with use_beam_search")
        return
    if "temperature" in body.model_fields_set and body.temperature != 0:
        raise not_together("temperature", "must be 0 or left out together with use_beam_search")
    for name in _NOT_WITH_BEAMS:
        if not _is_default(body, name):
            raise not_together(name, "is not supported together with use_beam_search")


def _is_default(body: GenerationBody, name: str) -> bool:
    field = type(body).model_fields[name]
    return bool(getattr(body, name) == field.get_default(call_default_factory=True))
