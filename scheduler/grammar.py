"""What a grammar says of an answer's tokens: which may come next is a function of it and of those that have come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer, or a part of it, must follow. Nothing but this ever travels: whoever needs the state of
    a sequence makes it of the sequence's output tokens, on any replica, after a handoff, a replay or a swap alike.

    text: as `llguidance.LLMatcher` takes it: JSON, or its dialect of Lark.
    begins_after: it holds from behind the first of these token ids in the output; before, any token may come. Empty: it
        holds from the first output token on.
    repeats: when its text is complete, anything may come again until the next one of begins_after. Else only an end
        token may come then.

    Raises ValueError for what makes no sense.
    """

    text: str
    begins_after: tuple[int, ...] = ()
    repeats: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("a grammar has no text")
        if self.repeats and not self.begins_after:
            raise ValueError("a grammar that repeats has nothing that it begins after")
