"""The bytes that each token of a vocabulary stands for, by the decoder of its tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_ByteRule = Callable[[str], bytes]

_BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(vocabulary: Mapping[str, int], decoder: dict[str, Any] | None) -> dict[int, bytes]:
    """The bytes that each token stands for in the middle of a text, by token id.

    decoder: the part of that name of a tokenizer.json. Raises ValueError, naming it, for a decoder whose tokens have
    no bytes of their own (WordPiece and the like).
    """
    to_bytes = _byte_rule(decoder)
    return {token_id: to_bytes(token) for token, token_id in vocabulary.items()}


def _byte_rule(decoder: dict[str, Any] | None) -> _ByteRule:
    """How the decoder of a tokenizer.json turns one token into bytes."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] if step else "none" for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _byte_level_rule()
    replacements: list[tuple[str, str]] = []
    for step, kind in zip(steps, kinds, strict=True):
        if kind == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        # Fuse only joins tokens. Strip removes the space in front of a whole text; see IncrementalDetokenizer.
        elif kind not in ("ByteFallback", "Fuse", "Strip"):
            raise ValueError(f"tokenizer decoder {kind!r} is not supported")
    return _sentencepiece_rule(replacements, has_byte_tokens="ByteFallback" in kinds)


def _byte_level_rule() -> _ByteRule:
    """Byte-level BPE: one character per byte. A token with any other character (an added one) is its own text."""
    byte_of_char = _byte_level_alphabet()

    def to_bytes(token: str) -> bytes:
        values = [byte_of_char.get(char, -1) for char in token]
        return token.encode() if -1 in values else bytes(values)

    return to_bytes


def _sentencepiece_rule(replacements: list[tuple[str, str]], has_byte_tokens: bool) -> _ByteRule:
    """SentencePiece: text with a visible mark for the space, and perhaps <0xAB> for a byte."""

    def to_bytes(token: str) -> bytes:
        byte = _BYTE_FALLBACK_TOKEN.fullmatch(token) if has_byte_tokens else None
        if byte:
            return bytes([int(byte[1], 16)])
        for mark, text in replacements:
            token = token.replace(mark, text)
        return token.encode()

    return to_bytes


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 byte is its own character, each other byte the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
