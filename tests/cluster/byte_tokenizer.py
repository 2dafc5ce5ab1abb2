"""The tokenizer.json of a tokenizer whose tokens are the bytes, and one that ends an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

EOS = 256


def byte_tokenizer_json(special: Sequence[str] = (), plain: Sequence[str] = ()) -> str:
    """Token ids are those of tests.cluster.fake_ingress.ByteTokenizer. special, plain: tokens that are added."""
    # GPT-2's alphabet: a printable byte is its own character, each other one the next from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    names = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    added = [("<eos>", True), *((text, True) for text in special), *((text, False) for text in plain)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [
        {"id": EOS + i, "content": text, "special": is_special, **flags} for i, (text, is_special) in enumerate(added)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": tokens,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )
