"""Where readers put the calls that they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from cluster.answers.answer_part import AnswerPart, PartKind
from cluster.answers.characters import MalformedCall

MAX_NAME_CHARS = 256


@dataclass(slots=True)
class CallSink:
    """What readers have found. Mutable.

    offered: the functions that may be called, by name, with the schemas of their parameters.
    parts: found since they were last taken. is_begun: whether the client has the present call's name.
    num_valid, num_malformed: calls that came to their end; a malformed one has arguments that are no JSON object.
    """

    offered: Mapping[str, Mapping[str, Any]]
    only_offered: bool = False
    parts: list[AnswerPart] = field(default_factory=list)
    num_calls: int = 0
    num_valid: int = 0
    num_malformed: int = 0
    is_begun: bool = False
    _arguments: list[str] = field(default_factory=list)

    def begin(self, name: str) -> None:
        """Raises MalformedCall for a name that is none."""
        if not name or len(name) > MAX_NAME_CHARS or (self.only_offered and name not in self.offered):
            raise MalformedCall("")
        self.is_begun = True
        self._arguments.clear()
        self.parts.append(AnswerPart(PartKind.CALL, name, self.num_calls))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        self.parts.append(AnswerPart(PartKind.ARGUMENTS, text, self.num_calls - 1))

    def end(self) -> None:
        """The call is complete, for better or worse."""
        self.is_begun = False
        try:
            is_valid = isinstance(orjson.loads("".join(self._arguments)), dict)
        except orjson.JSONDecodeError:
            is_valid = False
        self.num_valid += is_valid
        self.num_malformed += not is_valid
