"""Why a grammar can't be followed, in words for a client, made of those of what compiles."""

from __future__ import annotations

import re

TOO_MUCH_WORK = "takes more work to follow than one request may cause; make it simpler"

# Patterns of llguidance 1.9's messages, and what is said instead.
_WORDS = (
    (r"Unimplemented keys: \[(.*)\]", r"has keywords that are not supported: \1"),
    (r"oneOf constraints are not supported.*", "has a oneOf whose schemas do not exclude each other, as far as can be "
     "told; use anyOf"),
    (r"Resource '(.*?)' is not present.*", r"has a $ref or $schema that leads out of it, which is not followed: \1"),
    (r"patternProperty regexes (.*)", r"has patternProperties that may match one key, which is not supported: \1"),
    (r"Unknown format: (.*)", r"has a format that is not supported: \1 (with strict false it says nothing)"),
    (r"NoExtension\w*", "allows no text at all that could come to its end"),
    (r".*(?:\bfuel\b|too big|too large|too complex|Unable to determine|\blimits?\b|row has).*", TOO_MUCH_WORK),
)  # fmt: skip
# Numbered lines of a grammar, in which a client would see what was put there for it.
_EXCERPT = re.compile(r"(\n +\d+ \|.*)+(\n +\^)?")

# Where in a grammar a schema is that can't be followed.
_IN_LARK = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")


def in_our_words(reason: str) -> str:
    """Goes on after a field's name."""
    reason = _EXCERPT.sub("", reason)
    said_of_schema = _IN_LARK.sub("", reason)
    for pattern, words in _WORDS:
        if found := re.match(pattern, said_of_schema, re.DOTALL):
            return found.expand(words)
    return f"can't be followed: {reason}"
