"""Characters under other names: what a chat template is shown in place of those that could make a control token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

_PRIVATE_USE = re.compile("[\U000f0000-\U0010ffff]")
_FIRST, _LAST = 0xF0000, 0x10FFFD


class StandIns:
    """One private-use character for each of some characters. Immutable.

    One for one: whatever a template cuts, turns round, counts or joins, it does to them as it does to the characters.
    """

    def __init__(self, characters: Iterable[str], names: Iterable[str]) -> None:
        self._name_of = dict(zip(characters, names, strict=True))
        self._of_name = {name: character for character, name in self._name_of.items()}
        self._table = str.maketrans(self._name_of)

    def hide(self, text: str, characters: Iterable[str]) -> str:
        """The text with stand-ins for all of these characters, which must be among those that have one."""
        for character in characters:  # some hundred times as fast as str.translate
            text = text.replace(character, self._name_of[character])
        return text

    def hide_where(self, text: str, where: re.Pattern[str]) -> str:
        """The same for all characters of each match."""
        return where.sub(lambda match: match[0].translate(self._table), text)

    def reveal(self, text: str) -> str:
        for name, character in self._of_name.items():
            text = text.replace(name, character)
        return text

    def fit(self, shown: str, plain: str) -> bool:
        """Whether both are the same text but for stand-ins. A template may have changed what they stand for, such as
        its case: then the characters of `plain` are the right ones.
        """
        if len(shown) != len(plain):
            return False
        pairs = zip(shown, plain, strict=True)
        return self.reveal(shown) == plain or all(one == other or one in self._of_name for one, other in pairs)


def two_sets(characters: str, seen: frozenset[str]) -> tuple[StandIns, StandIns]:
    """Two sets of stand-ins that have none in common, nor in the same order. seen: private-use characters that occur
    already, and stand for nothing.

    Raises ValueError if a text has so many of them that too few are left.
    """
    free = (chr(code) for code in range(_FIRST, _LAST + 1) if chr(code) not in seen and code & 0xFFFE != 0xFFFE)
    names = list(islice(free, 2 * len(characters)))
    if len(names) < 2 * len(characters):
        raise ValueError("there are too many different private-use characters in the text of the messages")
    one, other = names[: len(characters)], names[len(characters) :]
    return StandIns(characters, one), StandIns(characters, reversed(other))


def private_use(value: Any) -> frozenset[str]:
    """Those in a string, or in lists and dicts of strings."""
    seen: set[str] = set()

    def look(text: str) -> str:
        seen.update(_PRIVATE_USE.findall(text))
        return text

    map_texts(value, look)
    return frozenset(seen)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a string, or of lists and dicts of strings, with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return value
