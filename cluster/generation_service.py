"""From a validated body to a running generation: prompts to ids, defaults, limits. Every 4xx is decided here."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from typing import TYPE_CHECKING

from cluster.api_error import ApiError
from cluster.generation import GenerationSpec
from cluster.openai_request import ChatCompletionBody, CompletionBody, GenerationBody
from cluster.openai_response import Answer, ChatAnswer, CompletionAnswer, new_chat_id, new_completion_id
from cluster.request_timer import RequestTimer
from cluster.text_choice import TextChoice
from cluster.text_generation import TextGeneration, TokenSource
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cluster.config import Config
    from cluster.ingress_metrics import IngressMetrics
    from cluster.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SEED_MASK = (1 << 64) - 1


class GenerationService:
    """One per ingress replica. Stateless but for its collaborators."""

    def __init__(self, config: Config, tokenizer: Tokenizer, source: TokenSource, metrics: IngressMetrics) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._source = source
        self._metrics = metrics

    async def chat(self, body: ChatCompletionBody, timer: RequestTimer) -> tuple[TextGeneration, Answer]:
        """Raises ApiError 4xx."""
        self._check_model(body)
        most = self._config.model.max_model_len - 1
        ids = await asyncio.to_thread(self._tokenizer.apply_chat_template, body.template_messages(), most)
        default = self._config.limits.max_tokens_default_chat
        generation = self._generation(body, [ids], default, timer)
        return generation, self._answer(ChatAnswer, new_chat_id(), body)

    async def completion(self, body: CompletionBody, timer: RequestTimer) -> tuple[TextGeneration, Answer]:
        """Raises ApiError 4xx."""
        self._check_model(body)
        most = self._config.model.max_model_len - 1
        prompts = [await asyncio.to_thread(self._tokenizer.encode_prompt, prompt, most) for prompt in body.prompt]
        default = self._config.limits.max_tokens_default_completions
        generation = self._generation(body, prompts, default, timer)
        return generation, self._answer(CompletionAnswer, new_completion_id(), body)

    def _answer(self, answer_class: type[Answer], answer_id: str, body: GenerationBody) -> Answer:
        name, created = self._config.model.name, int(time.time())
        return answer_class(answer_id, name, created, body.include_usage, body.return_token_ids)

    def _check_model(self, body: GenerationBody) -> None:
        served = self._config.model.name
        if body.unknown_fields:
            logger.info("ignored fields", extra={"event": "ignored_fields", "fields": body.unknown_fields})
        if body.model is not None and body.model != served:
            raise ApiError(
                404, f"the model {body.model[:100]!r} does not exist; this server serves {served!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def _generation(
        self, body: GenerationBody, prompts: list[list[int]], default_max_tokens: int | None, timer: RequestTimer
    ) -> TextGeneration:
        # Each prompt of a request without a seed gets a seed of its own; with one, the client's.
        specs = [self._spec(body, ids, default_max_tokens) for ids in prompts]
        self._check_product(body, specs)
        choices = [
            TextChoice(index, self._tokenizer, body.stop, body.include_stop_str_in_output)
            for index in range(len(prompts) * body.n)
        ]
        timer.prompt(sum(map(len, prompts)))
        return TextGeneration(self._source, specs, choices, timer)

    def _spec(self, body: GenerationBody, ids: list[int], default_max_tokens: int | None) -> GenerationSpec:
        seed = secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK
        self._tokenizer.check_ids(body.stop_token_ids, "stop_token_ids")
        stop_ids = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self._tokenizer.eos_token_ids)
        return GenerationSpec(
            generation_id=uuid.uuid4().hex,
            prompt_ids=tuple(ids),
            num_choices=body.n,
            max_tokens=self._max_tokens(body, len(ids), default_max_tokens),
            stop_token_ids=stop_ids,
            sampling=SamplingParams(body.temperature, body.top_k, body.top_p, seed),
            timeout_s=self._config.ingress.request_timeout_s,
        )

    def _max_tokens(self, body: GenerationBody, prompt_len: int, default_max_tokens: int | None) -> int:
        context = self._config.model.max_model_len
        rest = context - prompt_len
        wanted = body.max_new_tokens
        if wanted is None:
            return rest if default_max_tokens is None else min(default_max_tokens, rest)
        if wanted > rest:
            raise ApiError(
                400,
                f"the prompt has {prompt_len} tokens and max_tokens is {wanted}, together more than the model's "
                f"context of {context}; shorten the prompt or ask for at most {rest}",
                param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
                code="context_length_exceeded",
            )
        return wanted

    def _check_product(self, body: GenerationBody, specs: list[GenerationSpec]) -> None:
        most = self._config.limits.max_generated_tokens
        total = sum(spec.num_choices * spec.max_tokens for spec in specs)
        if total > most:
            raise ApiError(
                400,
                f"{len(specs)} prompts, n {body.n} and max_tokens together ask for {total} tokens; at most {most} are "
                "allowed in one request",
                param="n" if body.n > 1 else "max_tokens",
                code="too_many_tokens",
            )
