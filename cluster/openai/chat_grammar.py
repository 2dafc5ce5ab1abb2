"""The grammar of a chat's answers: of the calls that are asked for, of the format, or of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from cluster.answers.answer_format import CallBody
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
_ANY_OBJECT = GrammarSource("json_object", "")


class ChatGrammars:
    """One per ingress replica.

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
        if mode is ToolMode.AUTO and not (self._parser.reads_calls and self._parser.knows_calls):
            mode = ToolMode.NONE  # nobody knows how this model calls, or only its checkpoint's own template
        if mode is ToolMode.AUTO and body.answer_format is None:
            return None if body.use_beam_search else await self._behind_opener(body)
        builder = GrammarBuilder(self._parser.token_ids)
        starts = []
        if mode is not ToolMode.NONE:
            functions = await self._functions(body)
            starts.append(CallGrammar(self._parser.calls, builder).calls(functions, body.parallel_tool_calls))
        if mode in (ToolMode.NONE, ToolMode.AUTO):
            if body.answer_format is None:
                return None
            field, source = body.answer_format
            text = await self._grammars.text_of(field, source)
            if mode is ToolMode.NONE and (reading is None or not reading.may_think):
                return Grammar(text)
            starts.append(builder.use(text))
        return await self._whole(builder, " | ".join(starts), reading)

    async def _whole(self, builder: GrammarBuilder, start: str, reading: AnswerReading | None) -> Grammar:
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
        opener = self._parser.token_ids.get(self._parser.calls.first_marker)
        if opener is None:
            return None
        builder = GrammarBuilder(self._parser.token_ids)
        functions = await self._functions(body)
        start = CallGrammar(self._parser.calls, builder).behind_opener(functions, body.parallel_tool_calls)
        return Grammar(await self._checked(builder.text(start)), (opener,), repeats=body.parallel_tool_calls)

    async def _checked(self, text: str) -> str:
        """What is made of good parts may still be too much."""
        most = _MOST_AT_ONCE * self._limits.max_grammar_bytes
        if (num_bytes := len(text.encode())) > most:
            message = f"tools: their grammar has {num_bytes} bytes; at most {most} are allowed"
            raise ApiError(400, message, param="tools", code="grammar_refused")
        return await self._grammars.text_of("tools", GrammarSource("text", text))

    # -- functions ----------------------------------------------------------------------------------------------------

    async def _functions(self, body: ChatCompletionBody) -> list[CallFunction]:
        indexes = {tool.function.name: index for index, tool in enumerate(body.tools)}
        made = [self._function(tool, indexes[tool.function.name]) for tool in body.tools_in_play]
        return list(await asyncio.gather(*made))

    async def _function(self, tool: Tool, index: int) -> CallFunction:
        name, schema, is_strict = tool.function.name, tool.function.parameters or {}, tool.function.strict
        field = f"tools[{index}].function.parameters"
        text = await self._enforced(field, _of_object(schema), is_strict)
        if self._parser.calls.body is not CallBody.XML:
            return CallFunction(name, text or await self._grammars.text_of(field, _ANY_OBJECT))
        properties, required = schema.get("properties"), schema.get("required")
        parameters = []
        for key, value in (properties if isinstance(properties, Mapping) else {}).items():
            own = value if isinstance(value, Mapping) else {}
            grammar = None if _is_text(own) else await self._enforced(field, _within(own, schema), False)
            is_required = isinstance(required, list) and key in required
            parameters.append(CallParameter(key, grammar, is_required))
        return CallFunction(name, parameters=tuple(parameters))

    async def _enforced(self, field: str, schema: Mapping[str, Any], is_strict: bool) -> str | None:
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
            self._metrics.unenforced_tools.add()
            logger.info("a tool's parameters are not enforced", extra={"event": "unenforced_tool", "param": field})
            return None


def _of_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whether a schema says so or not; without properties, an empty one."""
    own = {**schema, "type": "object"} if "type" not in schema else dict(schema)
    is_empty = not own.get("properties") and own.keys() <= {"type", "properties", "required", "description", "title"}
    return {**own, "additionalProperties": False} if is_empty else own


def _is_text(schema: Mapping[str, Any]) -> bool:
    return "enum" not in schema and "const" not in schema and schema.get("type", "string") == "string"


def _within(schema: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema by itself, with what it may refer to."""
    shared = {name: outer[name] for name in ("$defs", "definitions") if name in outer}
    return {**schema, **shared}
