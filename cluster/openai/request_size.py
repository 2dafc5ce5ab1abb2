"""What one request may ask for over all its prompts and choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.api_error import ApiError

if TYPE_CHECKING:
    from cluster.config.limits import LimitsConfig
    from cluster.openai.generation_body import GenerationBody
    from scheduler.generation_spec import GenerationSpec


def check_sizes(body: GenerationBody, specs: Sequence[GenerationSpec], limits: LimitsConfig) -> None:
    """Raises ApiError 400."""
    _check_product(body, specs, limits.max_generated_tokens)
    if body.num_prompt_logprobs is not None:
        _check_report(body, specs, body.num_prompt_logprobs + 1, limits.max_reported_logprobs)


def _check_product(body: GenerationBody, specs: Sequence[GenerationSpec], most: int) -> None:
    total = sum(body.num_generated_choices * spec.max_tokens for spec in specs)
    if total > most:
        several = "best_of" if body.best_of is not None else "n"
        raise ApiError(
            400,
            f"{len(specs)} prompts, {several} {body.num_generated_choices} and max_tokens together ask for {total} "
            f"tokens; at most {most} are allowed in one request",
            param=several if body.num_generated_choices > 1 else "max_tokens",
            code="too_many_tokens",
        )


def _check_report(body: GenerationBody, specs: Sequence[GenerationSpec], num_each: int, most: int) -> None:
    num_choices = body.num_generated_choices
    total = sum(len(spec.prompt_ids) for spec in specs) * num_choices * num_each
    if total > most:
        raise ApiError(
            400,
            f"the prompts' tokens, {num_choices} choices and {num_each} log-probabilities each make {total} to "
            f"report; at most {most} are allowed in one request",
            param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
            code="too_many_logprobs",
        )
