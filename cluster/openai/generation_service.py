"""From a validated body to a running generation: prompts to ids, defaults, limits. A body's values are checked here."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.api_error import ApiError
from cluster.monitoring.request_timer import RequestTimer
from cluster.openai.chat_grammar import ChatGrammars
from cluster.openai.engine_params import beam_params, sampling_params
from cluster.openai.generation_body import GenerationBody
from cluster.openai.logprobs import LogprobsReport, TokenNames
from cluster.openai.request import ChatCompletionBody, CompletionBody
from cluster.openai.request_size import check_sizes
from cluster.openai.response import Answer, ChatAnswer, CompletionAnswer, new_chat_id, new_completion_id
from cluster.openai.served_model import check_model
from cluster.openai.tools import ToolMode
from cluster.routing.generation import Generation
from cluster.routing.model_binding import ModelBinding
from cluster.text.chat_template import TemplateOptions
from cluster.text.choice import TextChoice
from cluster.text.generation import TextGeneration, TokenSource
from cluster.text.length import size_up_to
from cluster.text.prompt_echo import PromptEcho
from cluster.text.work_threads import LONG
from scheduler.generation_spec import GenerationSpec
from scheduler.thinking_budget import ThinkingBudget

if TYPE_CHECKING:
    from cluster.config.serving import ServingConfig
    from cluster.monitoring.ingress_metrics import IngressMetrics
    from cluster.openai.answer_grammar import AnswerGrammars
    from cluster.openai.caller import Caller
    from cluster.openai.sampling_defaults import SamplingDefaults
    from cluster.text.answer_parser import AnswerParser, AnswerReading
    from cluster.text.tokenizer import Tokenizer
    from cluster.text.work_threads import WorkThreads
    from scheduler.grammar import Grammar
    from scheduler.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class GenerationService:
    """One per ingress replica. Stateless but for its collaborators."""

    def __init__(
        self,
        config: ServingConfig,
        tokenizer: Tokenizer,
        source: TokenSource,
        metrics: IngressMetrics,
        threads: WorkThreads,
        defaults: SamplingDefaults,
        grammars: AnswerGrammars,
        parser: AnswerParser,
    ) -> None:
        """parser: takes the answers of chats apart."""
        self._threads = threads
        self._defaults = defaults
        self._config = config
        self._tokenizer = tokenizer
        self._source = source
        self._metrics = metrics
        self._grammars = grammars
        self._parser = parser

    async def chat(
        self, body: ChatCompletionBody, timer: RequestTimer, caller: Caller
    ) -> tuple[TextGeneration, Answer]:
        """Raises ApiError 4xx."""
        self._check_model(body)
        tools = [tool.for_template() for tool in body.tools_shown]
        if tools and not self._tokenizer.shows_tools:
            self._metrics.unseen_tools.add()
            logger.info("the chat template shows no tools to the model", extra={"event": "unseen_tools"})
        options = TemplateOptions(
            body.add_generation_prompt, body.continue_final_message, body.template_variables, tools
        )
        messages = body.template_messages()
        ids = await self._threads.run(
            size_up_to([messages, options.variables, tools], LONG),
            self._tokenizer.apply_chat_template,
            messages,
            self._most_prompt_tokens,
            options,
            self._num_kept(body),
            self._config.limits.max_text_chars,
        )
        configured = self._config.limits.max_tokens_default_chat
        default = self._defaults.max_tokens if configured is None else configured
        # With auto and a format, a call is written as the grammar of both has it.
        has_both = body.answer_format is not None and self._parser.knows_calls
        is_forced = body.tool_mode in (ToolMode.REQUIRED, ToolMode.NAMED) or has_both
        in_play = [tool.for_template() for tool in body.tools_in_play]
        reading = self._parser.reading(ids, in_play, is_forced, body.continued_text)
        thinking = self._thinking(body, reading)
        known = self._grammars.for_client(caller.label)
        grammar = await ChatGrammars(known, self._parser, self._config.limits, self._metrics).of(body, reading)
        generation = await self._generation(body, [ids], [None], default, timer, caller, grammar, reading, thinking)
        answer = self._answer(ChatAnswer, new_chat_id(), body)
        return generation, replace(answer, has_short_ids=self._parser.calls.has_short_ids)

    async def completion(
        self, body: CompletionBody, timer: RequestTimer, caller: Caller
    ) -> tuple[TextGeneration, Answer]:
        """As `chat`."""
        self._check_model(body)
        keep = self._num_kept(body)
        most, most_chars = self._most_prompt_tokens, self._config.limits.max_text_chars
        prompts = [
            await self._threads.run(len(prompt), self._tokenizer.encode_prompt, prompt, most, keep, most_chars)
            for prompt in body.prompt
        ]
        echoes: list[PromptEcho | None] = [None] * len(prompts)
        if body.echo:
            given = zip(body.prompt, prompts, strict=True)
            echoes = [await asyncio.to_thread(PromptEcho, self._tokenizer, prompt, ids, keep) for prompt, ids in given]
        default = self._config.limits.max_tokens_default_completions
        grammar = await self._grammars.for_client(caller.label).of(body)
        generation = await self._generation(body, prompts, echoes, default, timer, caller, grammar)
        return generation, self._answer(CompletionAnswer, new_completion_id(), body)

    def _thinking(self, body: ChatCompletionBody, reading: AnswerReading | None) -> ThinkingBudget | None:
        if body.thinking_token_budget is None:
            return None
        if (ids := self._parser.reasoning_ids) is None:
            message = "thinking_token_budget is not supported: this model has no token that ends its thinking"
            raise ApiError(400, message, param="thinking_token_budget", code="unsupported")
        return ThinkingBudget(body.thinking_token_budget, *ids, reading is not None and reading.is_in_reasoning)

    @property
    def _most_prompt_tokens(self) -> int:
        return self._config.model.max_model_len - 1

    def _num_kept(self, body: GenerationBody) -> int | None:
        """How many last tokens of each prompt to keep; None: all."""
        wanted, most = body.truncate_prompt_tokens, self._most_prompt_tokens
        if wanted == -1:
            return max(1, most + 1 - max(1, body.max_new_tokens or 1))
        if wanted is not None and wanted > most:
            message = f"truncate_prompt_tokens must be at most {most}, the most prompt tokens that are possible here"
            raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
        return wanted

    def _answer(self, answer_class: type[Answer], answer_id: str, body: GenerationBody) -> Answer:
        report = None
        if body.num_logprobs is not None or body.prompt_logprobs is not None:
            names = TokenNames(self._tokenizer, body.return_tokens_as_token_ids)
            report = LogprobsReport(names, body.num_logprobs, body.prompt_logprobs)
        return answer_class(
            answer_id,
            self._config.model.name,
            int(time.time()),
            body.include_usage,
            body.return_token_ids,
            continuous_usage=body.continuous_usage,
            report=report,
        )

    def _check_model(self, body: GenerationBody) -> None:
        if fields := body.unknown_fields:
            logger.info("ignored fields", extra={"event": "ignored_fields", "fields": fields})
        check_model(body.model, self._config.model.name)

    async def _generation(
        self,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        echoes: Sequence[PromptEcho | None],
        default_max_tokens: int | None,
        timer: RequestTimer,
        caller: Caller,
        grammar: Grammar | None,
        reading: AnswerReading | None = None,
        thinking: ThinkingBudget | None = None,
    ) -> TextGeneration:
        body = self._defaults.complete(body)
        self._tokenizer.check_ids(body.stop_token_ids, "stop_token_ids")
        bad_words: tuple[tuple[int, ...], ...] = ()
        if body.bad_words:
            bad_words = await asyncio.to_thread(self._tokenizer.bad_word_sequences, body.bad_words)
        predicted = await self._predicted_ids(body)
        specs = [self._spec(body, ids, bad_words, default_max_tokens, caller, grammar, predicted) for ids in prompts]
        if thinking is not None:
            specs = [replace(spec, sampling=replace(spec.sampling, thinking=thinking)) for spec in specs]
        check_sizes(body, specs, self._config.limits)
        echo_of_choice = [echo for spec, echo in zip(specs, echoes, strict=True) for _ in range(spec.num_answers)]
        choices = [self._choice(index, body, echo, reading) for index, echo in enumerate(echo_of_choice)]
        timeout_s, binding = self._config.ingress.request_timeout_s, ModelBinding()
        generations = [Generation(uuid.uuid4().hex, spec, timeout_s, timer.trace, binding) for spec in specs]
        findings = [(generation.spec.prompt_len, generation.finding) for generation in generations]
        timer.prompts(findings, comes_whole=body.use_beam_search or body.max_new_tokens == 0)
        thinks = reading is not None and self._parser.reasoning is not None
        has_cache, predicts = self._config.prefix_cache.enabled, body.prediction is not None
        return TextGeneration(self._source, generations, choices, timer, thinks, has_cache, predicts)

    async def _predicted_ids(self, body: GenerationBody) -> tuple[int, ...]:
        """Of the prediction, for who can do something with it: no longer than any answer."""
        if body.prediction is None or self._config.speculative.method != "ngram":
            return ()
        text = body.prediction.content
        return await self._threads.run(
            len(text), self._tokenizer.encode_prediction, text, self._config.model.max_model_len
        )

    def _choice(
        self, index: int, body: GenerationBody, echo: PromptEcho | None, reading: AnswerReading | None
    ) -> TextChoice:
        return TextChoice(
            index,
            self._tokenizer,
            body.stop,
            body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=body.min_tokens,
            echo=echo,
            only_echo=body.max_new_tokens == 0,
            reading=reading,
        )

    def _spec(
        self,
        body: GenerationBody,
        ids: list[int],
        bad_words: tuple[tuple[int, ...], ...],
        default_max_tokens: int | None,
        caller: Caller,
        grammar: Grammar | None,
        predicted_ids: tuple[int, ...],
    ) -> GenerationSpec:
        max_tokens = self._max_tokens(body, len(ids), default_max_tokens)
        # A grammar says where an answer may end, and where it must: nothing else could come there.
        has_ends = (grammar is not None and not grammar.repeats) or not body.ignore_eos
        stop_ids = frozenset(body.stop_token_ids) | (self._tokenizer.eos_token_ids if has_ends else frozenset())
        beam = beam_params(body)
        return GenerationSpec(
            prompt_ids=tuple(ids),
            choices=tuple(range(body.num_generated_choices)),
            max_tokens=max_tokens,
            stop_token_ids=stop_ids,
            sampling=self._sampling(body, stop_ids, bad_words, max_tokens),
            priority=-body.priority,  # a client's smaller number goes first, as in vLLM
            client=caller.label,
            beam=beam,
            num_returned=0 if beam is None else body.n,
            grammar=grammar,
            cache_salt=caller.cache_salt(body.cache_salt) if self._config.prefix_cache.enabled else b"",
            predicted_ids=predicted_ids,
        )

    def _sampling(
        self,
        body: GenerationBody,
        stop_ids: frozenset[int],
        bad_words: tuple[tuple[int, ...], ...],
        max_tokens: int,
    ) -> SamplingParams:
        if body.min_tokens > max_tokens:
            message = f"min_tokens must be at most {max_tokens}, the most tokens that this answer can have"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        return sampling_params(body, self._tokenizer, stop_ids, bad_words, body.num_logprobs, body.num_prompt_logprobs)

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
        return max(1, wanted)  # 0: the prompt is only echoed; one token is generated and dropped
