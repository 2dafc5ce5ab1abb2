"""How a family of models writes an answer, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto


class CallBody(Enum):
    """What is between the opener of a call and its end.

    JSON: an object with the function's name and its arguments; JSON_LIST: several of them in one array.
    NAMED: the name as it is, and the arguments as JSON behind it. XML: the name and each parameter in tags.
    """

    JSON = auto()
    JSON_LIST = auto()
    NAMED = auto()
    XML = auto()


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What a model writes around what it thinks, at the beginning of its answer."""

    opener: str
    closer: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written. Reading leaves whitespace around the parts open; writing, by grammar, does as it stands.

    opener: where a call begins, or a list of calls. If is_bare, it may be missing: an answer whose first character is {
        is a call, if it names a function that was offered.
    before_name, name_end: of NAMED, what stands around the name.
    before_body, after_body: writing only. closer: what ends a call; may be empty.
    between: from one call to the next. around: what stands before the first call and behind the last; not shown.
    arguments_key: of JSON, as the model was taught; reading takes both words that there are.
    has_short_ids: a call's id has nine letters and digits, as Mistral's templates demand.
    """

    name: str
    body: CallBody
    opener: str
    closer: str = ""
    before_name: str = ""
    name_end: str = ""
    before_body: str = ""
    after_body: str = ""
    between: str = "\n"
    around: tuple[str, str] = ("", "")
    arguments_key: str = "arguments"
    is_bare: bool = False
    has_short_ids: bool = False

    @property
    def first_marker(self) -> str:
        """What comes first, wherever calls come."""
        return self.around[0] or self.opener

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is written around names and arguments: tokens that stand for a text of their own are among it."""
        return (self.opener, self.closer, self.before_name, self.name_end, *self.around)


@dataclass(frozen=True, slots=True)
class FormatRow:
    """A row of the table. marks: what a chat template has of whoever writes like this; all of them."""

    name: str
    marks: tuple[str, ...] = ()
    reasoning: ReasoningTags | None = None
    calls: CallSyntax | None = field(default=None)
