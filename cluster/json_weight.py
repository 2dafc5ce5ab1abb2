"""How much a JSON document would cost to parse, told from its bytes: parsing holds the interpreter, and with it every
other request. Counting bytes takes a tenth of the time."""

from __future__ import annotations

# Numbers for one string, object or array, by the time to parse them.
_NUMBERS = 16


def num_values_beyond(raw: bytes, most: int) -> int | None:
    """Values of a JSON document, if there are more than `most`, else None: strings (keys included), objects and arrays;
    of commas, and so of numbers, _NUMBERS count as one.

    What looks like values within a string is not counted. Of a document that is no valid JSON the answer may be any.
    """
    if len(raw) <= most or _weight(raw) + raw.count(b'"') // 2 <= most:
        return None
    if b"\\" in raw:
        # A run of backslashes begins with one that escapes: pairs go first, from the left.
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_values = raw.count(b'"') // 2
    if num_values <= most:  # few enough to cut them out
        num_values += _weight(b"".join(raw.split(b'"')[::2]))
    return num_values if num_values > most else None


def _weight(raw: bytes) -> int:
    return raw.count(b"{") + raw.count(b"[") + raw.count(b",") // _NUMBERS
