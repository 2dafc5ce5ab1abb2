"""Grammars by which a model writes calls of the tools that it was offered, in the way that it was taught."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.answers.answer_format import CallBody, CallSyntax

# As models are taught to write JSON: as Python's json.dumps does.
_AS_TAUGHT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_PARAMETER_END = "\n</parameter>\n"


@dataclass(slots=True)
class CallGrammar:
    """Builds one grammar, in llguidance's dialect of Lark. Use once.

    syntax: how calls are written. token_ids: of markers that are one token: the model writes them as such.
    """

    syntax: CallSyntax
    token_ids: Mapping[str, int]
    _rules: list[str] = field(default_factory=list)

    def whole(self, tools: Sequence[Mapping[str, Any]], several: bool, answer: str | None = None) -> str:
        """One call or several, and nothing else. tools: as OpenAI writes them. answer: the right side of a rule that
        may come in place of calls.
        """
        calls = self._calls(tools, several)
        start = calls if answer is None else f"({calls}) | {answer}"
        return self._text(start)

    def behind_opener(self, tools: Sequence[Mapping[str, Any]], several: bool) -> str:
        """What is left of a call, or of a list of calls, when its first marker has been written."""
        opener = self.syntax.around[0] or self.syntax.opener
        return self._text(self._calls(tools, several and not self._is_one_each, behind=opener))

    @property
    def _is_one_each(self) -> bool:
        """Whether each call has an opener of its own, which comes first."""
        return self.syntax.body is not CallBody.JSON_LIST and not self.syntax.around[0]

    def _text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _calls(self, tools: Sequence[Mapping[str, Any]], several: bool, behind: str = "") -> str:
        """behind: the marker that has been written already."""
        syntax = self.syntax
        call = " | ".join([self._function(index, tool["function"]) for index, tool in enumerate(tools)])
        if syntax.body is CallBody.JSON_LIST:
            more = f"({self._literal(syntax.between)} call)*" if several else ""
            self._rules.append(f"call: {call}")
            opener = "" if behind else self._literal(syntax.opener)
            return _joined(opener, '"["', "call", more, '"]"')
        opener = "" if syntax.is_bare else syntax.opener
        before = self._literal(opener + syntax.before_name + syntax.before_body)
        after = self._literal(syntax.after_body + syntax.closer)
        self._rules.append(_joined("call:", before, f"({call})", after))
        more = f"({_joined(self._literal(syntax.between), 'call')})*" if several else ""
        if behind == syntax.opener:
            rest = self._literal(syntax.before_name + syntax.before_body)
            return _joined(rest, f"({call})", after)
        first, last = syntax.around
        return _joined("" if behind else self._literal(first), "call", more, self._literal(last))

    def _function(self, index: int, function: Mapping[str, Any]) -> str:
        """The name of a rule for the call of one function, between what all calls have in common."""
        name, schema = function["name"], function.get("parameters") or {"type": "object", "properties": {}}
        if self.syntax.body is CallBody.XML:
            rule = self._xml(index, name, schema)
        elif self.syntax.body is CallBody.NAMED:
            rule = _joined(self._literal(name + self.syntax.name_end), _json(schema))
        else:
            key = json.dumps(self.syntax.arguments_key)
            rule = _joined(self._literal(f'{{"name": {json.dumps(name)}, {key}: '), _json(schema), '"}"')
        self._rules.append(f"f{index}: {rule}")
        return f"f{index}"

    def _xml(self, index: int, name: str, schema: Mapping[str, Any]) -> str:
        """Parameters in the order of the schema. Of strings only an enum is enforced."""
        parts = [self._literal(f"<function={name}>\n")]
        properties = schema.get("properties")
        required = schema.get("required")
        for number, (key, item) in enumerate((properties if isinstance(properties, Mapping) else {}).items()):
            value = f"f{index}_{number}"
            self._rules += _xml_value(value, item)
            begin, end = self._literal(f"<parameter={key}>\n"), self._literal(_PARAMETER_END)
            is_required = isinstance(required, Iterable) and key in required
            parameter = _joined(begin, value, "" if _is_text(item) else end)
            parts.append(parameter if is_required else f"({parameter})?")
        return _joined(*parts, self._literal("</function>"))

    def _literal(self, text: str) -> str:
        """Markers by their token ids, the rest as it stands; nothing for no text."""
        known = [re.escape(marker) for marker in self.syntax.markers if marker in self.token_ids]
        pieces = re.split(f"({'|'.join(known)})", text) if known else [text]
        shown = [f"<[{self.token_ids[p]}]>" if p in self.token_ids else json.dumps(p) for p in pieces if p]
        return " ".join(shown)


def with_object(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with any object for arguments."""
    return {**tool, "function": {**tool["function"], "parameters": _ANY_OBJECT}}


def arguments_grammar(tool: Mapping[str, Any]) -> str:
    """A grammar of the arguments of one tool alone."""
    return f"start: {_json(tool['function'].get('parameters') or _ANY_OBJECT)}\n"


def _json(schema: Mapping[str, Any]) -> str:
    """Arguments are an object, whether the schema says so or not."""
    of_object = schema if "type" in schema else {**schema, "type": "object"}
    return f"%json {json.dumps({**of_object, **_AS_TAUGHT})}"


def _is_text(schema: Any) -> bool:
    return not isinstance(schema, Mapping) or ("enum" not in schema and schema.get("type", "string") == "string")


def _xml_value(rule: str, schema: Any) -> list[str]:
    """Rules for a parameter's value as text; a free text takes its end along, as it goes as far as that."""
    if _is_text(schema):
        return [f"{rule}[suffix={json.dumps(_PARAMETER_END)}]: /(.|\\n)*/"]
    if all(isinstance(value, str) for value in schema.get("enum", [0])):
        return [f"{rule}: {' | '.join(json.dumps(value) for value in schema['enum'])}"]
    return [f"{rule}: %json {json.dumps({**schema, **_AS_TAUGHT})}"]


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
