"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What one push made certain.

    text_to_emit: may go to the client now. matched: the stop string that ended the text, None while it goes on.
    """

    text_to_emit: str
    matched: str | None


class StopMatcher:
    """Watches the text of one choice for stop strings. Not thread-safe; one per choice.

    Which stop wins: the first one to be complete; of several that end at the same character, the longest. That is
    decided without looking ahead, so the result depends on the text alone, not on how tokens cut it: streamed and
    whole answers agree. (With stops "abcd" and "bc", "abcd" matches "bc" and leaves "a".)

    Text that could still become a stop string is held back; nothing of a match is ever emitted, unless include_stop.
    Work per character is proportional to the number of stops, whatever their length.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        # Longest first: of several stops that end at the same character, that one is met first.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopMatch:
        """Takes the next piece of text. After a match further text is ignored and the match is reported again."""
        if self._matched is not None:
            return StopMatch("", self._matched)
        if not self._patterns:
            return StopMatch(text, None)
        # Most text is far from any stop, and finding that out is quick.
        if not self._held and not any(pattern.stop[0] in text for pattern in self._patterns):
            return StopMatch(text, None)
        for end, char in enumerate(text, start=1):
            stop = self._advance(char)
            if stop is not None:
                self._matched = stop
                return StopMatch(self._cut(self._held + text[:end], stop), stop)
        seen = self._held + text
        certain = len(seen) - max(pattern.num_matched for pattern in self._patterns)
        self._held = seen[certain:]
        return StopMatch(seen[:certain], None)

    def finish(self) -> str:
        """The text ends here: returns what was held back. Empty after a match."""
        held, self._held = self._held, ""
        return held if self._matched is None else ""

    def _advance(self, char: str) -> str | None:
        """Moves every pattern by one character; returns the longest stop that this character completes."""
        completed = None
        for pattern in self._patterns:
            if pattern.advance(char) and completed is None:
                completed = pattern.stop
        return completed

    def _cut(self, text: str, stop: str) -> str:
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Pattern:
    """One stop string (Knuth-Morris-Pratt). num_matched: length of its longest prefix that ends the text so far."""

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.num_matched = 0
        # _borders[i]: length of the longest proper prefix of stop[: i + 1] that is also its suffix.
        self._borders = [0]
        for char in stop[1:]:
            self._borders.append(self._extend(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """True when this character completes the stop string; the automaton must not be advanced after that."""
        self.num_matched = self._extend(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _extend(self, num_matched: int, char: str) -> int:
        """The longest prefix that ends the text, after one more character."""
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + 1 if self.stop[num_matched] == char else 0
