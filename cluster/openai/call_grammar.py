"""Grammars by which a model writes calls of the tools that it was offered, in the way that it was taught. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from cluster.answers.answer_format import CallBody, CallSyntax
from cluster.openai.grammar_builder import GrammarBuilder, joined

_PARAMETER_END = "\n</parameter>\n"


@dataclass(frozen=True, slots=True)
class CallParameter:
    """A parameter in tags. grammar: the text of one for its value, as JSON; None: it is a text as it stands, one of
    texts, or, if these are None, any.
    """

    name: str
    grammar: str | None
    is_required: bool
    texts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class CallFunction:
    """A function that may be called. arguments: the text of a grammar for all of them, as JSON; or parameters, in tags,
    in their order.
    """

    name: str
    arguments: str = ""
    parameters: tuple[CallParameter, ...] = ()


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Adds rules to a grammar that is being built. What its methods return is the right side of a rule."""

    syntax: CallSyntax
    builder: GrammarBuilder

    def calls(self, functions: Sequence[CallFunction], several: bool) -> str:
        """A call, or several: from their first character to their last."""
        syntax = self.syntax
        if syntax.body is CallBody.JSON_LIST:
            return joined(self.builder.literal(syntax.opener), self._list(functions, several))
        call = self._call_rule(functions)
        before, after = (self.builder.literal(text) for text in syntax.around)
        return joined(before, call, self._more(call) if several else "", after)

    def behind_opener(self, functions: Sequence[CallFunction], several: bool) -> str:
        """What is left when the first marker has been written: `CallSyntax.first_marker`."""
        syntax = self.syntax
        if syntax.body is CallBody.JSON_LIST:
            return self._list(functions, several)
        if not syntax.around[0]:
            return self._body(functions)
        call = self._call_rule(functions)
        return joined(call, self._more(call) if several else "", self.builder.literal(syntax.around[1]))

    def _list(self, functions: Sequence[CallFunction], several: bool) -> str:
        call = self.builder.rule("call", self._functions(functions))
        return joined('"["', call, self._more(call) if several else "", '"]"')

    def _call_rule(self, functions: Sequence[CallFunction]) -> str:
        opener = "" if self.syntax.is_bare else self.builder.literal(self.syntax.opener)
        return self.builder.rule("call", joined(opener, self._body(functions)))

    def _more(self, call: str) -> str:
        return f"({joined(self.builder.literal(self.syntax.between), call)})*"

    def _body(self, functions: Sequence[CallFunction]) -> str:
        """Of one call, between its opener and what follows its end."""
        syntax = self.syntax
        before = self.builder.literal(syntax.before_name + syntax.before_body)
        return joined(
            before, f"({self._functions(functions)})", self.builder.literal(syntax.after_body + syntax.closer)
        )

    def _functions(self, functions: Sequence[CallFunction]) -> str:
        return " | ".join(
            self.builder.rule(f"f{index}", self._function(f"f{index}", function))
            for index, function in enumerate(functions)
        )

    def _function(self, rule: str, function: CallFunction) -> str:
        if self.syntax.body is CallBody.XML:
            parameters = [self._parameter(f"{rule}_{i}", each) for i, each in enumerate(function.parameters)]
            return joined(
                self.builder.literal(f"<function={function.name}>\n"), *parameters, self.builder.literal("</function>")
            )
        arguments = self.builder.use(function.arguments)
        if self.syntax.body is CallBody.NAMED:
            return joined(self.builder.literal(function.name + self.syntax.name_end), arguments)
        name, key = (orjson.dumps(text).decode() for text in (function.name, self.syntax.arguments_key))
        return joined(self.builder.literal(f'{{"name": {name}, {key}: '), arguments, '"}"')

    def _parameter(self, rule: str, parameter: CallParameter) -> str:
        before = self.builder.literal(f"<parameter={parameter.name}>\n")
        if parameter.texts is not None:
            texts = " | ".join(self.builder.literal(text) or '""' for text in parameter.texts)
            value = joined(f"({texts})", self.builder.literal(_PARAMETER_END))
        elif parameter.grammar is None:
            value = self.builder.ends_with(rule, _PARAMETER_END)
        else:
            value = joined(self.builder.use(parameter.grammar), self.builder.literal(_PARAMETER_END))
        return joined(before, value) if parameter.is_required else f"({joined(before, value)})?"
