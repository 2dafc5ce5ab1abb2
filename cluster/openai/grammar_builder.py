"""Puts the text of a grammar together of those of others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from cluster.answers.answer_format import ReasoningTags
from replicas.grammars.grammar_text import lark_string

ANYTHING = r"/(.|\n)*/"
# What models put between what they think and what they say.
_SPACE = r"/[ \n]{0,4}/"


@dataclass(slots=True)
class GrammarBuilder:
    """Mutable; use once. Its text is llguidance's `{"grammars": [...]}`: the first one, of rules in Lark, names others.

    token_ids: of tokens that stand for a text of their own: what the model writes as one of them must be one.
    """

    token_ids: Mapping[str, int]
    _rules: list[str] = field(default_factory=list)
    _others: list[dict[str, object]] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # of others, by their text

    def use(self, text: str) -> str:
        """The text of a grammar that stands alone, as rules name it."""
        if text not in self._names:
            name = self._names[text] = f"g{len(self._others)}"
            (grammar,) = orjson.loads(text)["grammars"]
            self._others.append({**grammar, "name": name})
        return f"@{self._names[text]}"

    def rule(self, name: str, right: str, options: str = "") -> str:
        """A new rule; its name."""
        self._rules.append(f"{name}{options}: {right}")
        return name

    def literal(self, text: str) -> str:
        """This text, nothing for no text; what is a token in it as that token."""
        known = sorted(map(re.escape, self.token_ids), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(known)})", text) if known else [text]
        return joined(*(f"<[{self.token_ids[p]}]>" if p in self.token_ids else lark_string(p) for p in pieces if p))

    def ends_with(self, name: str, end: str) -> str:
        """A new rule for any text up to this one, which is taken along; its name."""
        return self.rule(name, ANYTHING, f"[suffix={lark_string(end)}]")

    def after_thinking(self, start: str, tags: ReasoningTags, is_opened: bool) -> str:
        """The same behind what the model thinks, which it may leave out unless the prompt has opened it."""
        if tags.closer in self.token_ids:
            thought = joined(self.rule("thought", ANYTHING), self.literal(tags.closer))
        else:
            thought = self.ends_with("thought", tags.closer)
        if not is_opened:
            thought = f"({joined(self.literal(tags.opener), thought)})?"
        return self.behind_space(start, thought)

    def behind_space(self, start: str, before: str = "") -> str:
        """The same with some white space in front of it."""
        return joined(before, _SPACE, f"({start})")

    def text(self, start: str) -> str:
        """start: the right side of the first rule."""
        first = {"lark_grammar": "\n".join([f"start: {start}", *self._rules, ""])}
        return orjson.dumps({"grammars": [first, *self._others]}).decode()


def joined(*parts: str) -> str:
    """One after the other."""
    return " ".join(part for part in parts if part)
