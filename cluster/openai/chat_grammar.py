"""The grammar of a chat's answers: of the calls that are asked for, of the format, or of both."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from cluster.answers.answer_format import CallBody
from cluster.answers.parameter_text import is_text, texts_of, what_else_is_asked
from cluster.api_error import ApiError
from cluster.grammars.grammar_source import GrammarSource
from cluster.openai.call_grammar import CallFunction, CallGrammar, CallParameter
from cluster.openai.grammar_builder import GrammarBuilder
from cluster.openai.tools import ToolMode
from scheduler.grammar import Grammar

if TYPE_CHECKING:
    from cluster.config.limits import LimitsConfig
    from cluster.monitoring.ingress_metrics import IngressMetrics
    from cluster.openai.answer_grammar import AnswerGrammars
    from cluster.openai.request import ChatCompletionBody
    from cluster.openai.tools import Tool
    from cluster.text.answer_parser import AnswerParser, AnswerReading

logger = logging.getLogger(__name__)

# How many times limits.max_grammar_bytes the grammar of all of a request's tools may have.
_MOST_AT_ONCE = 8
# Words of a schema by which an object has properties that `properties` does not name.
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
# What can stand in a parameter's opening tag.
_TAG_NAME = re.compile(r"[^\s>]([^\n>]*[^\s>])?")
_ANY_OBJECT = GrammarSource("json_object", "")


class ChatGrammars:
    """One for each request; makes nothing that costs.

    | tools | format | an answer is |
    |---|---|---|
    | none | asked for | what the format says |
    | required, or named | (says nothing) | calls, and nothing else |
    | auto | asked for | calls, or what the format says |
    | auto | not | anything; behind a token that opens calls, what a call goes on with |

    What the model thinks first follows no grammar. With auto and no such token, calls are only read.
    """

    def __init__(
        self, grammars: AnswerGrammars, parser: AnswerParser, limits: LimitsConfig, metrics: IngressMetrics
    ) -> None:
        self._grammars = grammars
        self._parser = parser
        self._limits = limits
        self._metrics = metrics

    async def of(self, body: ChatCompletionBody, reading: AnswerReading | None) -> Grammar | None:
        """None: an answer may be anything. Raises ApiError 400, naming the field that can't be followed, and 503."""
        mode = body.tool_mode
        if mode is ToolMode.AUTO and body.answer_format is None:
            return await self._behind_opener(body)
        if mode is ToolMode.AUTO and not self._parser.knows_calls:
            self._refuse_both(body)
            mode = ToolMode.NONE
        if mode is not ToolMode.NONE:
            return await self._enforced(body, lambda functions: self._calls(body, functions, reading))
        if body.answer_format is None:
            return None
        text = await self._grammars.text_of(*body.answer_format)
        if reading is None or not reading.may_think:
            return Grammar(text)
        builder = GrammarBuilder(self._parser.token_ids)
        return await self._after_thinking(builder, builder.use(text), reading)

    def _refuse_both(self, body: ChatCompletionBody) -> None:
        """Raises ApiError for a format beside tools that the model is told of, and calls in a way that nobody knows."""
        if not self._parser.shows_tools or body.answer_format is None:
            return
        field = body.answer_format[0]
        message = f"{field} is not supported beside tools: it is not known how this model calls them; set tool_choice"
        raise ApiError(400, message, param=field, code="unsupported")

    async def _calls(
        self, body: ChatCompletionBody, functions: list[CallFunction], reading: AnswerReading | None
    ) -> Grammar:
        """And with auto, what the format says instead."""
        builder = GrammarBuilder(self._parser.token_ids)
        start = CallGrammar(self._parser.calls, builder).calls(functions, body.may_call_several)
        if body.tool_mode is ToolMode.AUTO and body.answer_format is not None:
            start = f"{start} | {builder.use(await self._grammars.text_of(*body.answer_format))}"
        return await self._after_thinking(builder, start, reading)

    async def _after_thinking(self, builder: GrammarBuilder, start: str, reading: AnswerReading | None) -> Grammar:
        tags = self._parser.reasoning
        begins_after: tuple[int, ...] = ()
        if reading is not None and reading.may_think and tags is not None:
            if reading.is_in_reasoning and tags.closer in self._parser.token_ids:
                start = builder.behind_space(start)
                begins_after = (self._parser.token_ids[tags.closer],)
            else:
                start = builder.after_thinking(start, tags, reading.is_in_reasoning)
        return Grammar(await self._checked(builder.text(start)), begins_after)

    async def _behind_opener(self, body: ChatCompletionBody) -> Grammar | None:
        """None where it can't be told by a token that a call begins; and for beams, which follow no grammar."""
        opener = self._parser.token_ids.get(self._parser.calls.first_marker)
        knows_calls = self._parser.knows_calls and not self._parser.has_own_template
        if opener is None or not knows_calls or body.use_beam_search:
            return None

        async def behind(functions: list[CallFunction]) -> Grammar:
            builder = GrammarBuilder(self._parser.token_ids)
            start = CallGrammar(self._parser.calls, builder).behind_opener(functions, body.parallel_tool_calls)
            return Grammar(await self._checked(builder.text(start)), (opener,), repeats=body.parallel_tool_calls)

        return await self._enforced(body, behind)

    async def _enforced(
        self, body: ChatCompletionBody, made_of: Callable[[list[CallFunction]], Awaitable[Grammar]]
    ) -> Grammar:
        """made_of the functions in play; of those that are not strict with any arguments, if all is too much."""
        try:
            return await made_of(await self._functions(body))
        except ApiError as error:
            if (
                error.status != 400
                or error.param != "tools"
                or all(tool.function.strict for tool in body.tools_in_play)
            ):
                raise
            self._tell_of_unenforced("tools")
        return await made_of(await self._functions(body, are_free=True))

    async def _checked(self, text: str) -> str:
        """What is made of good parts may still be too much."""
        most = _MOST_AT_ONCE * self._limits.max_grammar_bytes
        if (num_bytes := len(text.encode())) > most:
            message = f"tools: their grammar has {num_bytes} bytes; at most {most} are allowed"
            raise ApiError(400, message, param="tools", code="grammar_refused")
        return await self._grammars.text_of("tools", GrammarSource("text", text))

    # -- functions ----------------------------------------------------------------------------------------------------

    async def _functions(self, body: ChatCompletionBody, are_free: bool = False) -> list[CallFunction]:
        """are_free: those that are not strict take any object."""
        indexes = {tool.function.name: index for index, tool in enumerate(body.tools)}
        made = [self._function(tool, indexes[tool.function.name], are_free) for tool in body.tools_in_play]
        return list(await asyncio.gather(*made))

    async def _function(self, tool: Tool, index: int, is_free: bool) -> CallFunction:
        name, schema, is_strict = tool.function.name, tool.function.parameters or {}, tool.function.strict
        field = f"tools[{index}].function.parameters"
        is_object = _may_be_object(schema)
        if is_strict and not is_object:
            raise _refused(field, "describes no object, which arguments are")
        if not is_object:
            self._tell_of_unenforced(field)
            schema = {"type": "object"}
        if is_free and not is_strict and self._parser.calls.body is not CallBody.XML:
            return CallFunction(name, await self._grammars.text_of(field, _ANY_OBJECT))
        text = await self._schema(field, _of_object(schema), is_strict)
        if self._parser.calls.body is not CallBody.XML:
            return CallFunction(name, text or await self._grammars.text_of(field, _ANY_OBJECT))
        properties = schema.get("properties")
        parameters = [
            await self._parameter(field, key, value, schema, is_strict, is_free and not is_strict)
            for key, value in (properties if isinstance(properties, Mapping) else {}).items()
        ]
        return CallFunction(name, parameters=tuple(parameters))

    async def _parameter(
        self, field: str, key: str, value: Any, schema: Mapping[str, Any], is_strict: bool, is_free: bool
    ) -> CallParameter:
        """One in tags. Raises ApiError where it can't be written like that, or, if it is strict, not enforced."""
        if not _TAG_NAME.fullmatch(key):
            raise _refused(field, f"has a parameter whose name this model's calls can't have: {key!r:.80}")
        required = schema.get("required")
        is_required = isinstance(required, list) and key in required
        own = value if isinstance(value, Mapping) else {}
        if not is_text(own, schema):
            grammar = None if is_free else await self._schema(field, _within(own, schema), is_strict)
            return CallParameter(key, grammar, is_required)
        texts = texts_of(own, schema)
        if texts is None and (word := what_else_is_asked(own, schema)) is not None:
            if is_strict:
                raise _refused(field, f"has {word} for a string, which can't be enforced as this model writes calls")
            self._tell_of_unenforced(field)
        return CallParameter(key, None, is_required, None if texts is None or not texts else tuple(texts))

    async def _schema(self, field: str, schema: Mapping[str, Any], is_strict: bool) -> str | None:
        """The text of a schema's grammar; None where none can be made and the function is not strict."""
        try:
            source = GrammarSource("json_schema", orjson.dumps(schema).decode(), is_lenient=not is_strict)
        except TypeError:  # deeper than orjson writes
            raise ApiError(400, f"{field} is nested too deeply", param=field, code="invalid_value") from None
        try:
            if len(source.text) > self._limits.max_grammar_bytes:
                message = f"{field} has {len(source.text)} bytes; at most {self._limits.max_grammar_bytes} are allowed"
                raise ApiError(400, message, param=field, code="grammar_refused")
            return await self._grammars.text_of(field, source)
        except ApiError as error:
            if is_strict or error.status != 400:
                raise
            self._tell_of_unenforced(field)
            return None

    def _tell_of_unenforced(self, field: str) -> None:
        self._metrics.unenforced_tools.add()
        logger.info("a tool's parameters are not enforced", extra={"event": "unenforced_tool", "param": field})


def _of_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whether a schema says so or not, and have no others than the function's own: most
    schemas leave that unsaid, and a small model fills the object with what it has read.
    """
    own = {**schema, "type": "object"}
    names_all = not schema or ("properties" in schema and not _OPEN & own.keys())
    return {**own, "additionalProperties": False} if names_all else own


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    declared = schema.get("type", "object")
    return declared == "object" or (isinstance(declared, list) and "object" in declared)


def _refused(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field} {why}", param=field, code="grammar_refused")


def _within(schema: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema by itself, with what it may refer to."""
    shared = {name: outer[name] for name in ("$defs", "definitions") if name in outer}
    return {**schema, **shared}
